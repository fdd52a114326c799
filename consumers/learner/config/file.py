"""The learner's configuration as a YAML file. PyYAML is imported on first use."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from shmbridge.consumers.learner.config.run_options import OPTIONS, SECTIONS, LearnerConfig, meant
from shmbridge.shown import kind_of
from shmbridge.wrong_value import wrong_yaml

NAME = "config.yaml"  # in the run directory
_CHANGED = "# changed: "
_FLOAT = re.compile(r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+")  # YAML 1.1 parses 1e-6 as text


class BadConfigFile(Exception):
    """A configuration file is unreadable or invalid; the message names the file, the keys and the values."""


def read(path: Path) -> dict[str, Any]:
    """Returns the options that a file gives, by name. Blocks for the disk.

    Raises:
        BadConfigFile: the message lists all errors.
    """
    import yaml

    try:
        document = yaml.load(path.read_bytes(), _yaml()[0])  # a SafeLoader
    except OSError as error:
        raise BadConfigFile(f"{path}: {error.strerror} -> give the path of a YAML file") from error
    except yaml.YAMLError as error:
        raise BadConfigFile(f"{path} is not YAML: {wrong_yaml(error)} -> mend that line") from error
    values: dict[str, Any] = {}
    if wrong := list(_take(document, values)):
        raise BadConfigFile(
            f"{path}: {'; '.join(wrong)} -> mend that, docs/reference/learner-options.md has each option"
        )
    return values


def read_earlier(path: Path) -> dict[str, Any] | None:
    """Returns the options of a run's own file that this release has and can read; None if it has none.

    Blocks for the disk.
    """
    import yaml

    values: dict[str, Any] = {}
    try:
        document = yaml.load(path.read_bytes(), _yaml()[0])  # a SafeLoader
    except (OSError, yaml.YAMLError):
        return None
    for _ in _take(document, values):
        continue  # an option of another release
    return values or None


def changes(path: Path) -> list[str]:
    """Returns what earlier resumes of the run have changed, a line each. Blocks for the disk."""
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    return [line.removeprefix(_CHANGED) for line in lines if line.startswith(_CHANGED)]


def write(config: LearnerConfig, path: Path, changed: Iterable[str] = ()) -> None:
    """Writes a whole configuration atomically: a reader sees the earlier or the new file. Raises OSError.

    Args:
        config: the options from now on.
        path: the file.
        changed: what resumes have changed, a line each, for comments.
    """
    import yaml

    head = f"# shmbridge train --config {path.name} takes all of this again; flags win over it."
    text = yaml.dump(config.document(), Dumper=_yaml()[1], sort_keys=False)
    unfinished = path.with_name(f".{path.name}.part")
    unfinished.write_text("\n".join([head, *(_CHANGED + each for each in changed), text]))
    unfinished.replace(path)


def _take(document: object, values: dict[str, Any]) -> Iterator[str]:
    """Puts the options of a document into `values`; yields a line per error."""
    if not isinstance(document, Mapping):
        yield f"it holds {kind_of(document)}, not sections such as run: and optimizer:"
        return
    for section, inner in document.items():
        if section not in SECTIONS:
            yield _unknown("", str(section))
        elif not isinstance(inner, Mapping | None):
            yield f"{section}: {inner!r} is not a mapping of options"
        else:
            for name, value in (inner or {}).items():
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


@cache
def _yaml() -> tuple[Any, Any]:
    """Returns a loader and a dumper that parse 1e-6 as a number and reject duplicate keys."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = [key.value for key, _ in node.value]
            if twice := [key for key, _ in node.value if names.count(key.value) > 1]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{twice[0].value} is given twice", twice[-1].start_mark
                )
            return super().construct_mapping(node, deep)

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        pass

    for each in (Loader, Dumper):
        each.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
    return Loader, Dumper
