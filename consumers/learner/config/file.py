"""The learner's configuration as a YAML file."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shmbridge.config import plain, read_yaml, shown_value, write_yaml
from shmbridge.consumers.learner.config.run_options import OPTIONS, SECTIONS, LearnerConfig, meant
from shmbridge.errors import kind_of

NAME = "config.yaml"  # in the run directory
_CHANGED = "# changed: "


class BadConfigFile(Exception):
    """A configuration file is unreadable or invalid; the message names the file, the keys and the values."""


def read(path: Path) -> dict[str, Any]:
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
