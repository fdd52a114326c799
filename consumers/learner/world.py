"""The ranks that train one model together: this one, and host-side collectives for numbers and texts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from traceback import clear_frames
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from shmbridge.cli.base import tell
from shmbridge.consumers.feed import lost_peer
from shmbridge.consumers.learner import Refusal

Value = TypeVar("Value")  # JSON-serialisable


class PeerLost(Exception):
    """Another rank is gone, or did not join in time; the message gives the error that showed it."""


class PeerFailed(Refusal):
    """Another rank failed; the message is its error's."""


class BadWorld(Refusal):
    """The environment variables that describe the ranks are not torchrun's; the message names them."""


class World:
    """A world of one process: each collective returns its own argument."""

    rank = 0
    size = 1
    local_rank = 0  # on this machine
    machine_size = 1  # ranks on this machine

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which is the hub, writes files and prints."""
        return self.rank == 0

    def all_reduce_sum(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Returns the elementwise sum over all ranks (all_reduce). Blocks for the others."""
        return values

    def all_reduce_max(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Returns the elementwise maximum over all ranks (all_reduce). Blocks for the others."""
        return values

    def all_gather(self, word: Value) -> list[Value]:
        """Returns what each rank says here, by rank; JSON-serialisable. Blocks for the others."""
        return [word]

    def broadcast(self, word: Value) -> Value:
        """Returns rank 0's value (broadcast). Blocks until all ranks call it."""
        return self.all_gather(word)[0]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Runs the block on all ranks, then raises on all of them if it failed on any. Blocks for the others.

        The block must not wait for other ranks: a failed rank would not take part.

        Raises:
            PeerFailed: the block failed on another rank. On the failed rank its own exception is raised.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        said = self.all_gather("" if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        for rank, text in enumerate(said):
            if text:
                raise PeerFailed(f"rank {rank}: {text}")


class TorchWorld(World):
    """One rank of a torchrun job, between init_process_group and destroy_process_group.

    Values go through a separate Gloo group. FSDP2 holds the default group as long as the model exists, so
    destroying that one does not end its threads, and a thread that frees a tensor at exit aborts the process.
    """

    def __init__(self, rank: int, size: int, local_rank: int, machine_size: int, timeout: timedelta) -> None:
        from torch import distributed

        self.rank, self.size, self.local_rank, self.machine_size = rank, size, local_rank, machine_size
        self._words = distributed.new_group(backend="gloo", timeout=timeout)

    def all_reduce_sum(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Returns the elementwise sum over all ranks, bit-identical on each. Blocks for the others."""
        return self._reduced(values, "SUM")

    def all_reduce_max(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Returns the elementwise maximum over all ranks (all_reduce). Blocks for the others."""
        return self._reduced(values, "MAX")

    def all_gather(self, word: Value) -> list[Value]:
        """Returns what each rank says here, by rank; JSON-serialisable. Blocks for the others."""
        import torch
        from torch import distributed

        text = torch.frombuffer(bytearray(json.dumps(word).encode()), dtype=torch.uint8)
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(text)
        distributed.all_reduce(lengths, group=self._words)
        longest = int(lengths.max())
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        distributed.all_gather(
            texts, torch.nn.functional.pad(text, (0, longest - len(text))), group=self._words
        )
        return [
            json.loads(bytes(each[:length].tolist()))
            for each, length in zip(texts, lengths.tolist(), strict=True)
        ]

    def _reduced(self, values: npt.NDArray[np.float64], operation: str) -> npt.NDArray[np.float64]:
        import torch
        from torch import distributed

        tensor = torch.from_numpy(np.array(values, np.float64))
        distributed.all_reduce(tensor, getattr(distributed.ReduceOp, operation), group=self._words)
        reduced: npt.NDArray[np.float64] = tensor.numpy()
        return reduced

    def leave(self) -> None:
        """Destroys the Gloo group and its threads. Call it once; no collective may follow."""
        from torch import distributed

        distributed.destroy_process_group(self._words)
        del self._words  # the last reference: destroying it joins the threads


ALONE = World()


@contextmanager
def joined(device: str, timeout_s: float) -> Iterator[World]:
    """Joins the ranks that torchrun started; yields `ALONE` outside of torchrun or with a world size of 1.

    Blocks until all ranks have joined. Leave it by an exception only if all ranks do.

    Args:
        device: "cuda" sends gradients by NCCL. Everything else goes by Gloo.
        timeout_s: how long one rank waits for another, at any time.

    Raises:
        BadWorld: there are several ranks, and the environment does not give this one's number.
        PeerLost: a rank did not join, or left while others waited for it; also raised from code in the block.
    """
    size = _number("WORLD_SIZE", "1")
    if size == 1:
        yield ALONE
        return
    from torch import distributed

    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise BadWorld(
            f"WORLD_SIZE is {size}, and there is no {', '.join(missing)} -> start with torchrun, or unset "
            "WORLD_SIZE"
        )
    rank = _number("RANK")
    local_rank, machine_size = _number("LOCAL_RANK", str(rank)), _number("LOCAL_WORLD_SIZE", str(size))
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    with _lost_peers_named(rank, size, timeout_s):
        distributed.init_process_group(backend, timeout=timeout)
        world = TorchWorld(rank, size, local_rank, machine_size, timeout)
    try:
        with _lost_peers_named(rank, size, timeout_s):
            yield world
    finally:
        world.leave()  # also after an exception: then all ranks end, and the interpreter with them
    distributed.destroy_process_group()


def device_kind(wanted: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """Returns the kind of device to compute on; "auto" is a GPU if torch sees one."""
    if wanted != "auto":
        return wanted
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def _lost_peers_named(rank: int, size: int, timeout_s: float) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not lost_peer(error):
            raise
        clear_frames(error.__traceback__)  # torch's frames hold the Gloo group
        raise PeerLost(
            f"rank {rank} of {size} ends, since another one is gone or was silent for {timeout_s:g} s: "
            f"{_seen(error)} -> see that rank's output; start all ranks again with --resume"
        ) from None


def _number(name: str, otherwise: str = "") -> int:
    said = os.environ.get(name, otherwise)
    try:
        return int(said)
    except ValueError:
        raise BadWorld(
            f"{name}={said} is no whole number -> start with torchrun, or unset WORLD_SIZE"
        ) from None


def speaks() -> bool:
    """Returns whether this process prints for all ranks: it is the only one, or rank 0."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK") == "0"


def say(text: str) -> None:
    """Prints one line for the user; only rank 0 does."""
    if speaks():
        tell("grpo", text)


def _seen(error: RuntimeError) -> str:
    """Returns the first line of the error, without the source location and without advice."""
    return str(error).splitlines()[0].removeprefix("[").split("] ", 1)[-1].split(". ")[0]
