"""Whether a GPU reads the memory of lanes itself. Asked in a process of its own, `gpu_process.py`: a driver
may hang or crash.
"""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shmbridge.config import format_size
from shmbridge.doctor.check import Check

COMMAND = (sys.executable, "-m", "shmbridge.doctor.gpu_process")
_MOST_S = 60.0
_GOOD_RATIO = 1.2  # pinned to unpinned


class Device(msgspec.Struct, frozen=True):
    """What one GPU did: rates in bytes a second; an error of the driver stands for what it refused."""

    number: int
    name: str
    lane_bytes: int
    unpinned: float = 0.0
    pinned: float = 0.0
    refused: int = 0
    read_only: bool = False


class Answer(msgspec.Struct, frozen=True):
    """What the process that asks says: GPUs, or why it sees none."""

    devices: list[Device] = []
    trouble: str = ""


def devices(asked: bool, command: Sequence[str] = COMMAND, root: Path = Path("/")) -> list[Check]:
    """One finding per GPU; without a sign of one, and unless `asked`, none is looked for.

    Blocks for seconds where there are some.
    """
    if not asked and not is_likely(root):
        text = "no GPU found: page-locking and copies to it were not tried"
        return [Check("gpu", "ok", text)]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_MOST_S, check=False
        )
        answer = msgspec.json.decode(done.stdout, type=Answer) if done.stdout else None
    except subprocess.TimeoutExpired:
        return [_trouble(f"the driver has not answered for {_MOST_S:g} s", asked)]
    if answer is None:
        return [_trouble(f"the process that asks the driver ended with {done.returncode}", asked)]
    if not answer.devices:
        return [_trouble(answer.trouble or "the driver knows of no GPU", asked)]
    return [_finding(device) for device in answer.devices]


def is_likely(root: Path = Path("/")) -> bool:
    """Returns whether something says that there is an NVIDIA GPU."""
    return shutil.which("nvidia-smi") is not None or any((root / "dev").glob("nvidia[0-9]*"))


def _trouble(text: str, asked: bool) -> Check:
    return Check(
        "gpu",
        "fail" if asked else "warn",
        f"{text}: page-locking and copies were not tried",
        "install NVIDIA's driver (docker run --gpus all), and look at nvidia-smi",
    )


def _finding(device: Device) -> Check:
    name, lane = f"gpu {device.number}", format_size(device.lane_bytes)
    rates = f"{device.pinned / 1e9:.1f} GB/s to the device, {device.unpinned / 1e9:.1f} unpinned"
    if device.refused:
        return Check(
            name,
            "warn",
            f"{device.name} does not page-lock {lane} of shared memory (error {device.refused}): copies from "
            f"lanes go at {device.unpinned / 1e9:.1f} GB/s",
            "ulimit -l unlimited (docker run --ulimit memlock=-1)",
        )
    writable = "" if device.read_only else "; it registers no read-only memory, so lanes are mapped writable"
    text = f"{device.name} page-locks {lane} of shared memory, {rates}{writable}"
    if device.pinned < _GOOD_RATIO * device.unpinned:
        fix = "numactl --preferred NODE, with the node of this GPU (nvidia-smi topo -m); or others use it now"
        return Check(name, "warn", f"{text}: page-locking wins little", fix)
    return Check(name, "ok", text)
