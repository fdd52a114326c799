"""What the workers of one engine say to each other while they load.

Knows vLLM's groups, its multiprocess executor and its worker.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from shmbridge.consumers.vllm.release import say_no_update_is_open

_SAID_BYTES = 1024


def first_refusal(mine: str) -> str:
    """What one of this engine's workers said against going on; empty if none did.

    Blocks until each has spoken.

    Args:
        mine: what this worker says, empty if it can go on.
    """
    for group in (get_tp_group(), get_pp_group()):
        if group.world_size > 1:
            said = [torch.zeros(_SAID_BYTES, dtype=torch.uint8) for _ in range(group.world_size)]
            torch.distributed.all_gather(said, _padded(mine), group=group.cpu_group)
            mine = next((text for text in map(_text, said) if text), "")
    return mine


def _padded(text: str) -> torch.Tensor:
    raw = text.encode()[:_SAID_BYTES]
    return torch.tensor([*raw, *bytes(_SAID_BYTES - len(raw))], dtype=torch.uint8)


def _text(said: torch.Tensor) -> str:
    return bytes(said.tolist()).rstrip(b"\0").decode(errors="replace")


def ends_quietly(engine: Any) -> bool:
    """Whether this worker must not raise, so that the answers of vLLM's multiprocess executor stay in step.

    Then its update is ended here.

    That executor reads the workers' answers in order and stops at the first error: those behind it are taken
    for answers to its next call. So the last worker speaks for all, and in the others the update that vLLM
    believes to be open is closed.
    """
    parallel = engine.parallel_config
    if parallel.distributed_executor_backend != "mp" or parallel.rank == parallel.world_size - 1:
        return False
    frame: Any = inspect.currentframe()
    while frame is not None:
        worker = frame.f_locals.get("self")
        calls_us = getattr(worker, "weight_transfer_engine", None) is engine
        if calls_us:
            say_no_update_is_open(worker, engine)
            return True
        frame = frame.f_back
    return False
