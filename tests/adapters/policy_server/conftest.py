"""The fixtures of all tests with torch."""

from tests.adapters.torch_fixtures import (
    _one_thread,
    _rows_are_what_was_put,
    agreement,
    bridge,
    differences_allowed,
    on_ranks,
    packed_batch,
    serving,
    tiny_model,
    wandb_history,
)

__all__ = [
    "_one_thread",
    "_rows_are_what_was_put",
    "agreement",
    "bridge",
    "differences_allowed",
    "on_ranks",
    "packed_batch",
    "serving",
    "tiny_model",
    "wandb_history",
]
