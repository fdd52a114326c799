"""Coordination of one engine's workers during a load."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from shmbridge.consumers.vllm.non_public_names import say_no_update_is_open

_SAID_BYTES = 1024


def first_refusal(mine: str) -> str:
    """Returns the first objection of this engine's workers to continuing; empty if there is none.

    Blocks until each worker has reported.

    Args:
        mine: this worker's objection; empty if it can continue.
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

    That executor reads the workers' responses in order and stops at the first error, so later ones would be
    taken for responses to its next call. So the last worker raises for all, and the others close the update
    that vLLM considers open.
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
