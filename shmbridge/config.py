"""What a user may set, and how it is written: sizes, bridge names, the announcement of a training run. No I/O."""

import re

import msgspec

from shmbridge.errors import BadBridgeName

_NAME = re.compile(r"[A-Za-z0-9_-]{1,48}")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", re.IGNORECASE)
_LAST_PORT = 65535
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class Run(msgspec.Struct, frozen=True):
    """A training run as its learner announces it; environments steer by it (Atropos' `/register`).

    `batch_size` counts trajectories, `max_token_len` tokens of one trajectory (0 or less: no limit), `num_steps` optimizer steps;
    `save_checkpoint_interval` is in steps, -1 never.
    """

    batch_size: int = 64
    max_token_len: int = 2048
    num_steps: int = 100
    starting_step: int = 0
    checkpoint_dir: str = ""
    save_checkpoint_interval: int = -1
    wandb_group: str = ""
    wandb_project: str = ""


def check_bridge_name(bridge: str) -> str:
    """Returns the name, or raises BadBridgeName."""
    if not isinstance(bridge, str) or not _NAME.fullmatch(bridge):
        raise BadBridgeName(f"bridge name {bridge!r} is not 1 to 48 of A-Z a-z 0-9 _ -", hint='choose a name such as "run1"')
    return bridge


def parse_size(size: int | str) -> int:
    """Bytes of `64M`, `1.5G`, `4096` or an int; units are powers of 1024."""
    if isinstance(size, int):
        return size
    match = _SIZE.fullmatch(size)
    if match is None:
        raise ValueError(f"{size!r} is not a size: write bytes, or a number with K, M, G or T, such as 64M")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def parse_port(text: str) -> int:
    """A TCP port of a command line, 0 for one that is free. For argparse's `type`: raises its ArgumentTypeError."""
    if text.strip().isascii() and text.strip().isdigit() and int(text) <= _LAST_PORT:
        return int(text)
    from argparse import ArgumentTypeError

    raise ArgumentTypeError(f"{text!r} is not a port: 0 to {_LAST_PORT}, 0 for one that is free")


def format_size(size: float) -> str:
    """A size for people: `64 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
