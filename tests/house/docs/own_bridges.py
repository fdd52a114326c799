"""Gives the examples of a page bridges of their own, so that two pages can run at a time."""

import os
import re

import shmbridge

_NAMED = re.compile(r'"(run[1-9])"')


def with_own_bridges(block: str) -> str:
    """Returns a block whose "run1", "run2", ... are bridges of this process alone."""
    return _NAMED.sub(rf'"\1-docs-{os.getpid()}"', block)


def clean_own_bridges() -> list[shmbridge.CleanReport]:
    """Removes them; one report for each."""
    mine = [info.name for info in shmbridge.list_bridges() if info.name.endswith(f"-docs-{os.getpid()}")]
    return [shmbridge.clean(name, dry_run=False) for name in mine]
