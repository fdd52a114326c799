"""The page of the learner's options, from the sections of its configuration."""

import re
from dataclasses import MISSING
from typing import get_args

from markdown import code, prose, table

from shmbridge.consumers.learner.config.options import ON_RESUME, OPTIONS, SECTIONS, Option, described

_HEAD = """# Options of the learner

Each option is a flag of `shmbridge train`, and a key of the YAML file that `--config` names; a flag overrides the file. A key is its flag
with `_` for `-`; a flag that begins with `--no-` turns off its key, which is on by default. The sections below are those of the file. In a [launch file](launch-file.md) options stand under `learner.options`, without sections. Every run writes all of them into
`config.yaml` of its run directory. What they are for: [train for long](../how-to/train.md).

**With `--resume`**, the last column says what becomes of an option that differs from the run's `config.yaml`. *free*: it changes nothing that is trained. *reported*: the learner prints both values, and notes them as
a comment in `config.yaml`. *refused*: the checkpoint holds another model; the learner does not start.

<!-- Written by docs/_generate from consumers/learner/config/. -->
"""


def _type(option: Option) -> str:
    if option.shape == "switch":
        return "switch"
    if option.shape == "choice":
        return ", ".join(code(each) for each in get_args(option.item))
    one = described(option.item).removeprefix("a ").removeprefix("an ")
    if "shmbridge" in one or "typing" in one:
        one = "text"
    return {"list": f"list of {one}", "pair": f"two of {one}", "mapping": f"names, each with a {one}"}.get(
        option.shape, one
    )


def _default(option: Option, words: str) -> str:
    if option.default is MISSING:
        return "required"
    if words:
        return prose(words)
    value = option.default
    if value is None or value in ("", (), {}):
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return code(
        f"{value:g}"
        if isinstance(value, float)
        else ", ".join(map(str, value))
        if isinstance(value, tuple)
        else value
    )


def _row(option: Option) -> list[str]:
    text, words = option.help, ""
    if found := re.search(r" ?\[([^\[\]]*)\]$", text):
        text, words = text[: found.start()], found[1]
        if words in (f"{option.default}", f"{option.default:g}" if isinstance(option.default, float) else ""):
            words = ""
    return [code(option.flag), _type(option), _default(option, words), prose(text), ON_RESUME[option.name]]


def page() -> str:
    """Returns the page."""
    parts = [_HEAD]
    for section, kind in SECTIONS.items():
        summary = (kind.__doc__ or "").split("\n\n")[0]
        rows = (_row(each) for each in OPTIONS.values() if each.section == section)
        parts.append(
            f"## {section}\n\n{prose(' '.join(summary.split()))}\n\n"
            + table(["flag", "type", "default", "meaning", "resume"], rows)
        )
    return "\n".join(parts)
