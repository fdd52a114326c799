"""The learner's configuration from a command line and a YAML file, derived from its sections."""

from __future__ import annotations

import argparse
import difflib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, get_args

from shmbridge.cli.base import Parser
from shmbridge.config import plain, read_yaml, shown_value, write_yaml
from shmbridge.consumers.learner.config.options import (
    OPTIONS,
    SECTIONS,
    LearnerConfig,
    Option,
    described,
    meant,
)
from shmbridge.errors import kind_of, shown

CONFIG_FILE = "config.yaml"  # in the run directory
_CHANGED = "# changed: "
_EXAMPLES = """\
examples:
  # a small random model on the CPU, against environments that send 8 answers per prompt
  %(prog)s --bridge demo --model ./tiny --steps 400 --groups 16 --group-size 8 \\
      --lr 2e-3 --entropy 0.1 --device cpu --threads 1

  # a pretrained model on a GPU; batches at most four versions old; weights leave as bfloat16
  %(prog)s --bridge run1 --model Qwen/Qwen2.5-1.5B-Instruct --steps 500 \\
      --groups 64 --lr 1e-6 --max-staleness 4 --precision bfloat16 --gradient-checkpointing

  # one command for the first start and for each restart, from the newest checkpoint of the run directory
  %(prog)s --bridge run1 --model Qwen/Qwen2.5-1.5B-Instruct --steps 500 --run-dir /runs/run1 --resume

  # the run directory is lost, shared memory is not: go on with the weights that the bridge has
  %(prog)s --bridge run1 --model Qwen/Qwen2.5-1.5B-Instruct --steps 500 --run-dir /runs/run1b --from-bridge

  # the same run once more, with another learning rate: every run directory has its configuration
  %(prog)s --config runs/run1/config.yaml --run-dir runs/run1-faster --lr 3e-6

  # the limits of the Atropos recipe for verl: 10 attempts of 30 s for a batch, but 30 s in all; advantages
  # wanted
  %(prog)s --bridge run1 --model Qwen/Qwen2.5-1.5B-Instruct --steps 500 \\
      --batch-timeout 30 --batch-attempts 10 --batch-retry-delay 0.5 --max-wait-time 30 --no-fallback-to-grpo

  # four GPUs of this machine, one process for each; a part of each tensor on each
  torchrun --standalone --nproc-per-node 4 -m shmbridge.consumers.grpo --bridge run1 \\
      --model Qwen/Qwen2.5-7B-Instruct --steps 500 --groups 64 --precision bfloat16 --parallel fsdp2

  # adapters on a model in bfloat16, four batches a step, a cosine that ends at a tenth; stop when it is good
  %(prog)s --bridge run1 --model Qwen/Qwen2.5-7B-Instruct --steps 500 \\
      --lora-rank 16 --param-dtype bfloat16 --precision bfloat16 --lr 1e-5 --accumulate 4 \\
      --schedule cosine_with_min_lr --schedule-option min_lr_rate=0.1 \\
      --stop-when 'reward_mean>=0.95' --stop-patience 5 --tensorboard

  # two vLLM servers, started with VLLM_SERVER_DEV_MODE=1, get every second version; what they are generating
  # goes on
  %(prog)s --bridge run1 --model Qwen/Qwen2.5-1.5B-Instruct --steps 500 \\
      --precision bfloat16 --engine http://127.0.0.1:8000 --engine http://127.0.0.1:8001 \\
      --pause keep --publish-every 2

exit status: 0 all steps done, stopped early, or the bridge was drained; 1 refused to start, or a group had
no advantages under --no-fallback-to-grpo; 3 no batch came within the limits; 4 another rank is gone; 5 a step
could not be computed, for want of memory or by an error; 130 or 143 stopped by SIGINT or SIGTERM. The
unfinished batch goes to the next learner, finished steps are saved. Each step's figures: metrics.jsonl in the
run directory, a JSON object per step.
"""


class BadConfigFile(Exception):
    """A configuration file is unreadable or invalid; the message names the file, the keys and the values."""


def read_config(path: Path) -> dict[str, Any]:
    """Returns the options that a file gives, by name. Blocks for the disk. Needs PyYAML.

    Raises:
        BadConfigFile: the message lists all errors.
    """
    try:
        document = read_yaml(path.read_bytes())
    except OSError as error:
        raise BadConfigFile(f"{path}: {error.strerror} -> give the path of a YAML file") from error
    except ValueError as error:
        raise BadConfigFile(f"{path}: {error} -> correct that line") from error
    values: dict[str, Any] = {}
    if wrong := list(_take(document, values)):
        raise BadConfigFile(
            f"{path}: {'; '.join(wrong)} -> correct that, docs/reference/learner-options.md has each option"
        )
    return values


def read_earlier(path: Path) -> dict[str, Any] | None:
    """Returns the options of a run's own file that this release has and can read; None if it has none.

    Blocks for the disk.
    """
    values: dict[str, Any] = {}
    try:
        document = read_yaml(path.read_bytes())
    except (OSError, ValueError):
        return None
    for _ in _take(document, values):
        continue  # an option of another release
    return values or None


def noted_changes(path: Path) -> list[str]:
    """Returns what earlier resumes of the run have changed, a line each. Blocks for the disk."""
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    return [line.removeprefix(_CHANGED) for line in lines if line.startswith(_CHANGED)]


def write_config(config: LearnerConfig, path: Path, changed: Iterable[str] = ()) -> None:
    """Writes a whole configuration atomically: a reader sees the earlier or the new file. Raises OSError.

    Args:
        config: the options from now on.
        path: the file.
        changed: what resumes have changed, a line each, for comments.
    """
    head = f"# shmbridge train --config {path.name} takes all of this again; flags win over it."
    text = write_yaml(config.document())
    unfinished = path.with_name(f".{path.name}.part")
    unfinished.write_text("\n".join([head, *(_CHANGED + each for each in changed), text]))
    unfinished.replace(path)


def _take(document: object, values: dict[str, Any]) -> Iterator[str]:
    """Puts the options of a document into `values`; yields a line per error."""
    if not isinstance(document, Mapping):
        yield f"it holds {kind_of(plain(document))}, not sections such as run: and optimizer:"
        return
    for section, inner in document.items():
        if section not in SECTIONS:
            yield _unknown("", str(section))
        elif not isinstance(inner, Mapping) and plain(inner) is not None:
            yield f"{section}: {shown_value(inner)} is not a mapping of options"
        else:
            for name, value in inner.items() if isinstance(inner, Mapping) else ():
                if name not in OPTIONS or OPTIONS[name].section != section:
                    yield _unknown(section, str(name))
                    continue
                try:
                    values[name] = OPTIONS[name].whole(value)
                except ValueError as error:
                    yield f"{section}.{name}: {error}"


def _unknown(section: str, name: str) -> str:
    """Returns the error for an unknown key of a section, or with "" of the file."""
    here = [each.name for each in OPTIONS.values() if each.section == section] if section else list(SECTIONS)
    where = f"{section}.{name}" if section else name
    if not section and (close := difflib.get_close_matches(name, here, n=1)):
        return f"{where}: did you mean {close[0]}?"
    if (option := meant(name)) is not None:
        return f"{where}: did you mean {option.section}.{option.name}?"
    return f"{where} is not known; known are {', '.join(here)}"


def parse(argv: Sequence[str] | None = None) -> LearnerConfig:
    """Returns the configuration of a command line and of its `--config`. Exits the process on an error.

    Args:
        argv: the command line, without the program; None: this process's.
    """
    root = parser()
    found = root.parse_args(argv)
    try:
        values = {} if found.config is None else read_config(found.config)
    except BadConfigFile as error:
        root.error(str(error))
    for name, value in vars(found).items():
        if name in OPTIONS:
            values[name] = OPTIONS[name].whole(dict(value) if OPTIONS[name].shape == "mapping" else value)
    if missing := [
        each.flag for each in OPTIONS.values() if each.default is MISSING and each.name not in values
    ]:
        root.error(f"missing: {', '.join(missing)} (as flags, or in the file of --config)")
    return LearnerConfig.of(values)


def parser(prog: str = "python -m shmbridge.consumers.grpo") -> Parser:
    """Returns the parser of the learner; its result has only the options that were given."""
    root = Parser(
        prog,
        description="Train a causal language model with GRPO on the trajectory groups of a bridge.",
        examples=_EXAMPLES,
        usage="--bridge NAME --model DIR_OR_ID --steps N [--config FILE] [FLAG ...]",
        meant=_meant_flag,
        argument_default=argparse.SUPPRESS,
    )
    root.add_json_log()
    root.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        default=None,
        help="YAML file with options, in sections named as below; every run writes such a file, config.yaml, "
        "into its run directory. Flags win over the file: --no-SWITCH turns off what the file turns on, "
        "and one --engine or --schedule-option replaces all of the file's",
    )
    for section, kind in SECTIONS.items():
        group = root.add_argument_group(section, (kind.__doc__ or "").split("\n")[0])
        for each in OPTIONS.values():
            if each.section == section:
                _add(group, each)
    return root


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    add = functools.partial(group.add_argument, option.flag, dest=option.name, help=option.help)
    if option.shape == "switch":
        name = option.flag.removeprefix("--")
        opposite = name.removeprefix("no-") if name.startswith("no-") else f"no-{name}"
        add(action="store_const", const=not option.default)
        group.add_argument(
            f"--{opposite}",
            dest=option.name,
            action="store_const",
            const=option.default,
            help=argparse.SUPPRESS,
        )
    elif option.shape == "choice":
        add(choices=get_args(option.item))
    elif option.shape == "pair":
        add(type=_typed(option), nargs=2, metavar=tuple(option.metavar.split()))
    elif option.shape == "list" and "," in option.metavar:
        add(type=lambda text: text.split(","), metavar=option.metavar)
    elif option.shape == "value":
        add(type=_typed(option), metavar=option.metavar)
    else:
        add(
            type=_named(option) if option.shape == "mapping" else _typed(option),
            action="append",
            metavar=option.metavar,
        )


def _typed(option: Option) -> Callable[[str], Any]:
    """Returns the argparse type of an option. Of a ValueError argparse would not show the message."""
    number = (get_args(option.item) or (option.item,))[0]

    def typed(text: str) -> Any:
        try:
            value = number(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{shown(text)} is not {described(option.item)}") from None
        try:
            return option.one(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return typed


def _named(option: Option) -> Callable[[str], tuple[str, Any]]:
    """Returns the argparse type of an argument such as min_lr_rate=0.1."""

    def named(text: str) -> tuple[str, Any]:
        name, equals, value = text.partition("=")
        try:
            if name and equals:
                return name, option.one(float(value))
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(
            f"{text!r} is not {option.metavar}, where X is {described(option.item)}"
        )

    return named


def _meant_flag(name: str) -> str | None:
    """Returns the flag that was probably meant by a name that is none."""
    option = meant(name)
    return None if option is None else option.flag
