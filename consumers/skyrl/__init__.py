"""Feeds SkyRL from a bridge: `trainer.override_entrypoint=shmbridge.consumers.skyrl.entrypoint`.

- `config.py`: SkyRL's config with a section `bridge`, and the advantage estimator `shmbridge`.
- `generator.py`: groups of a feed as the outputs of a SkyRL generator.
- `weights.py`: the way back: the policy worker's half, and the trainer's inference client.
- `entrypoint.py`: SkyRL's trainers, which tell the feed of steps and checkpoints, and the program.
"""

import importlib.util
import sys
import typing
from contextlib import suppress

import typing_extensions

from shmbridge.consumers.feed import warn_if_untested

_TYPES = "skyrl.tinker.types"  # has the only model, in 0.3, with a `typing.TypedDict` inside


def _import_types() -> None:
    """Imports it with the `TypedDict` that pydantic takes on Python 3.11; `typing` stays as it was."""
    before = typing.TypedDict
    typing.TypedDict = typing_extensions.TypedDict
    try:
        with suppress(ModuleNotFoundError):  # another release may not have it
            importlib.import_module(_TYPES)
    finally:
        typing.TypedDict = before


warn_if_untested("skyrl", "0.3", "0.5")  # first: another release may fail at its import
if sys.version_info < (3, 12) and _TYPES not in sys.modules and importlib.util.find_spec("skyrl") is not None:
    _import_types()
