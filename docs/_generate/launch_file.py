"""The page of the keys of a launch file, from the structs of its config."""

from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from markdown import code, table
from msgspec import Meta

from shmbridge.launch import config
from shmbridge.launch.config import Option

_HEAD = """# Keys of a launch file

The YAML file of `shmbridge launch`: every key, its type and its default. How to write one, with examples: [launch a run](../how-to/launch.md). An unknown key, a
wrong type and a key given twice are errors that name the path. Numbers under `env`, `args` and `options` are [text, as the file has it](../how-to/launch.md#numbers-and-texts).

<!-- Written by docs/_generate from shmbridge/launch/config.py. -->
"""
_SECTIONS: dict[str, tuple[type, str]] = {
    "The file": (
        config.Config,
        "The sections of a run: one hub (`learner`, `gateway` or `trainer.command`), at most one inference server.",
    ),
    "policy_server": (
        config.PolicyServer,
        "The small inference server of this package, for models that one device holds.",
    ),
    "vllm": (config.Vllm, "vLLM's own OpenAI server."),
    "learner": (config.Learner, "The learner; it is the hub of the bridge."),
    "gateway": (
        config.Gateway,
        "The HTTP rollout server, for trainers that poll one; it is the hub of the bridge.",
    ),
    "environments[]": (config.Environment, "A list; each entry is one script, run in `count` processes."),
    "environments[].restart": (
        config.Restart,
        "When a process of an environment that ended is started again, and under `learner.restart` and `trainer.restart` a hub that was killed.",
    ),
    "trainer": (
        config.Trainer,
        "[Another trainer](../how-to/launch.md#another-trainer), which is the hub of the bridge; or, without `command`, the recipe's section.",
    ),
    "trainer.atropos": (
        config.Atropos,
        "The keys of verl's Atropos recipe, [with its meanings](../how-to/launch.md#the-recipes-keys).",
    ),
}
_EVERYWHERE = {
    "model": "folder of the model, or its Hugging Face id",
    "host": "address to listen on",
    "port": "0: a free one is chosen",
    "ready_timeout": "seconds to come up in; longer ends the launch",
    "stop_grace": "seconds to end in after SIGTERM, before it is killed",
    "env": "environment variables, added to the launcher's own",
}
_MEANINGS = {
    "The file.bridge": "name of the bridge",
    "The file.run_dir": "folder for logs, metrics and checkpoints; `runs/<bridge>` if empty",
    "The file.log_bytes": "most bytes of each process' log, [the beginning and the newest lines](../how-to/launch.md#logs)",
    "The file.policy_server": "at most one of this and `vllm`",
    "The file.vllm": "at most one of this and `policy_server`",
    "The file.learner": "exactly one of this, `gateway` and `trainer.command`",
    "The file.gateway": "exactly one of this, `learner` and `trainer.command`",
    "The file.environments": "the environments",
    "The file.trainer": "another trainer; or the recipe's keys for the learner",
    "policy_server.options": "[flags](../how-to/launch.md#options) of `shmbridge serve`, without dashes",
    "vllm.python": "the interpreter that has vLLM and shmbridge; the launcher's own if empty",
    "vllm.follow": "load each new version of the bridge's weights",
    "vllm.pause": "what happens to requests in flight while weights are loaded",
    "vllm.args": "words for `vllm.entrypoints.openai.api_server`",
    "learner.steps": "optimizer steps of the run",
    "learner.options": "[flags of the learner](learner-options.md), without dashes, [in any shape](../how-to/launch.md#options)",
    "learner.restart": "when it was killed, with its checkpoint or its published weights; the keys are those of `environments[].restart`",
    "gateway.host": "`trainer.atropos.api_url` if empty, or else 127.0.0.1",
    "gateway.port": "`trainer.atropos.api_url`, or else 8000, if absent; 0: a free one is chosen",
    "gateway.compat": "strict: the exact numbers and order of the Atropos server",
    "gateway.token": "requests must carry it; no check if empty",
    "gateway.options": "[flags](../how-to/launch.md#options) of `shmbridge gateway`, without dashes",
    "environments[].script": "path of the environment's script",
    "environments[].name": "name of its logs; the script's name if empty",
    "environments[].count": "processes of this script",
    "environments[].args": "its flags, as a mapping without dashes or as a list of words; placeholders are replaced",
    "environments[].lane_bytes": "size of each process' lane",
    "environments[].on_full": "what a put does when the lane has no room",
    "environments[].cwd": "folder to run in; the launcher's if empty",
    "environments[].settle": "seconds it must stay alive to count as started",
    "environments[].restart": "see below",
    "environments[].restart.when": "after a failure, always, or never",
    "environments[].restart.first_delay": "seconds before the first restart; twice as long each time",
    "environments[].restart.max_delay": "seconds; the longest delay",
    "environments[].restart.reset_after": "seconds of running after which the delays begin again at the first",
    "environments[].restart.max_restarts": "more than this many within `window` end the launch",
    "environments[].restart.window": "seconds",
    "trainer.command": "the trainer's words, or text that is split as a shell does; placeholders are replaced",
    "trainer.again": "words that follow from its second start on",
    "trainer.python": "the interpreter that the words go to; if empty, the first word is the program",
    "trainer.cwd": "folder to run in; the launcher's if empty",
    "trainer.restart": "when it was killed, or, with `always`, ended with an error; the keys are those of `environments[].restart`",
    "trainer.atropos": "see below; not beside `command`",
    "trainer.atropos.api_url": "address of a gateway; not used beside a learner",
    "trainer.atropos.timeout": "seconds for one try to get a batch",
    "trainer.atropos.use_advantages": "use the records' own advantages",
    "trainer.atropos.fallback_to_grpo": "make advantages of scores for groups that have none",
    "trainer.atropos.retry_attempts": "tries to get a batch",
    "trainer.atropos.retry_delay": "seconds before the second try; later ones wait longer",
    "trainer.atropos.max_wait_time": "seconds for a batch, all tries together",
}


def _type(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        kind, meta = get_args(hint)[0], next(each for each in get_args(hint) if isinstance(each, Meta))
        if meta.gt is not None:
            return f"{_type(kind)} above {meta.gt:g}"
        if meta.le is not None and meta.le < 1e9:
            return f"{_type(kind)}, {meta.ge:g} to {meta.le:g}"
        return f"{_type(kind)}, {meta.ge:g} or above"
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(code(each) for each in parts)
    if origin in (Union, UnionType):
        if hint == Option:
            return "text, list or mapping"
        return " or ".join(_type(each) for each in parts if each is not type(None))
    if origin is list:
        return f"list of {_plural(parts[0])}"
    if origin is dict:
        return f"mapping from names to {_plural(parts[1])}"
    return {bool: "true or false", int: "whole number", float: "number", str: "text"}.get(hint, "section")


def _plural(hint: Any) -> str:
    return {"section": "sections", "text, list or mapping": "texts, numbers, lists or mappings"}.get(
        _type(hint), "texts or numbers"
    )


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else None
    if value is None or value in ("", [], {}):
        return "none"
    return code(
        str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else value
    )


def page() -> str:
    """Returns the page. Raises KeyError for a key without a meaning."""
    parts, used = [_HEAD], set()
    for title, (kind, text) in _SECTIONS.items():
        hints, rows = get_type_hints(kind, include_extras=True), []
        for field in msgspec.structs.fields(kind):
            meaning = _MEANINGS.get(f"{title}.{field.name}") or _EVERYWHERE[field.name]
            used.add(f"{title}.{field.name}")
            rows.append([code(field.name), _type(hints[field.name]), _default(field), meaning])
        heading = title if title == "The file" else code(title)
        parts.append(f"## {heading}\n\n{text}\n\n" + table(["key", "type", "default", "meaning"], rows))
    if gone := sorted(set(_MEANINGS) - used):
        raise KeyError(f"no such keys any more: {', '.join(gone)}")
    return "\n".join(parts)
