"""A model as it computes when it is not trained: without dropout, for the time of a question.

Knows modules; knows nothing of what is asked. Called by `attention.py`, `forward.py` and `training_step.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Has every module of a model in evaluation mode, then each in the mode that it was in, whatever was done
    to it.

    One thread.
    """
    before = [(module, module.training) for module in model.modules()]
    for module, _ in before:
        module.training = False
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
