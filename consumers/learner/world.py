"""The processes that train one model together: who this one is, and the few words they exchange.

Numbers and short texts only, through the host; gradients and parameters are `sharding.py`'s. Knows torchrun's
environment, and nothing of models, batches or the bridge. Called by the GRPO learner.
"""

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

Value = TypeVar("Value")  # anything that JSON can say


class PeerLost(Exception):
    """Another rank is gone, or did not come in time; the message says what was seen of it."""


class PeerFailed(Exception):
    """Another rank ends with an error of its own; the message is its."""


class BadWorld(Exception):
    """The environment variables of the ranks are not torchrun's; the message says which."""


class World:
    """The only process of a learner: what all ranks say is what it says itself."""

    rank = 0
    size = 1
    local_rank = 0  # among those of this machine
    machine_size = 1  # how many those are

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that is the hub, writes files and speaks to people."""
        return self.rank == 0

    def all_reduce_sum(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Returns the sum over all ranks, value by value. Blocks for the others."""
        return values

    def all_reduce_max(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Returns the largest over all ranks, value by value. Blocks for the others."""
        return values

    def all_gather(self, word: Value) -> list[Value]:
        """Returns what each rank says here, by rank; anything that JSON can say. Blocks for the others."""
        return [word]

    def broadcast(self, word: Value) -> Value:
        """Returns what rank 0 says here. Blocks until all ranks are here."""
        return self.all_gather(word)[0]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Lets all ranks finish the block, or raise on all of them if it fails on any. Blocks for the others.

        Nothing in the block may wait for other ranks: one that has failed would not answer.

        Raises:
            PeerFailed: it failed on another rank; where it failed, its own exception.
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
    """One rank of a torchrun, between init_process_group and its end.

    Words go through a Gloo group of their own: FSDP2 holds the default group for as long as the model lives,
    so that ending that one does not end its threads, and a thread that lets go of a tensor while the
    interpreter ends aborts the process.
    """

    def __init__(self, rank: int, size: int, local_rank: int, machine_size: int, timeout: timedelta) -> None:
        from torch import distributed

        self.rank, self.size, self.local_rank, self.machine_size = rank, size, local_rank, machine_size
        self._words = distributed.new_group(backend="gloo", timeout=timeout)

    def all_reduce_sum(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Returns the sum over all ranks, value by value; the same bits on each. Blocks for the others."""
        return self._reduced(values, "SUM")

    def all_reduce_max(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Returns the largest over all ranks, value by value. Blocks for the others."""
        return self._reduced(values, "MAX")

    def all_gather(self, word: Value) -> list[Value]:
        """Returns what each rank says here, by rank; anything that JSON can say. Blocks for the others."""
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
        """Ends the group of words; when this returns its threads are gone.

        Once, and nothing is said after it.
        """
        from torch import distributed

        distributed.destroy_process_group(self._words)
        del self._words  # the last reference: its end waits for the threads


ALONE = World()


@contextmanager
def joined(device: str, timeout_s: float) -> Iterator[World]:
    """Joins the ranks that torchrun started with this one; outside of torchrun, or in one of one, there is
    nobody.

    Blocks until all are there. Leave it by an exception only where all ranks do.

    Args:
        device: "cuda" lets gradients travel by NCCL; words, and everything of "cpu", by Gloo.
        timeout_s: how long one rank waits for another, at any time.

    Raises:
        BadWorld: there are several, and the environment does not say who this one is.
        PeerLost: a rank did not come, or went while others waited for it; also from whatever runs inside.
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
        world.leave()  # also by an exception: all ranks end then, and the interpreter with them
    distributed.destroy_process_group()


def device_kind(wanted: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """Returns what to compute on; auto is a GPU if torch sees one."""
    if wanted != "auto":
        return wanted
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def _lost_peers_named(rank: int, size: int, timeout_s: float) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not is_of_a_lost_peer(error):
            raise
        clear_frames(error.__traceback__)  # those of torch hold the group of words
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
    """Whether this process is to say what all ranks would say: the only one, or rank 0."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK") == "0"


def say(text: str) -> None:
    """Prints one line for people; of several ranks, rank 0 does."""
    if speaks():
        print(f"grpo: {text}", flush=True)


def _seen(error: RuntimeError) -> str:
    """What was seen of the peer, without the place in somebody's source and without advice."""
    return str(error).splitlines()[0].removeprefix("[").split("] ", 1)[-1].split(". ")[0]


def is_of_a_lost_peer(error: RuntimeError) -> bool:
    """Whether an error says that a collective found no partner; Gloo's are plain RuntimeErrors with its file
    names.
    """
    from torch import distributed

    text = str(error).lower()
    return isinstance(error, distributed.DistError) or "gloo" in text or "nccl" in text
