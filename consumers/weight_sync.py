"""A policy's weights into its inference engines, in one line: `sync.push(model)`, or around a rollout.

    sync = WeightSync("run1", llm)       # a vllm.LLM, an AsyncLLM, "http://127.0.0.1:8000", or a list
    with sync.updated(model) as engine:  # it has the model's weights now, and its memory
        answers = engine.generate(prompts)

The weights go through the weights segment of a bridge, never through these calls. Knows a model's parameters,
the segment and the interface of `engines/`; knows no engine. For trainers of one process; the GRPO learner
has its own way (`learner/train/publishing.py`).
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Self

from shmbridge.consumers.engines.engine import PAUSES, EngineFailed, Pause, Update
from shmbridge.consumers.engines.fleet import Fleet, engine_of, raise_for
from shmbridge.segments.helper_threads import run_to_end
from shmbridge.weights import WeightsWriter

__all__ = ["EngineFailed", "WeightSync"]


class WeightSync:
    """Writes versions of a model into a bridge and brings engines to them.

    A context manager; pushes at once come one after the other.

    It is the one writer of the bridge's weights as long as it lives; versions go on above those of an earlier
    one, and of the engines.

    Args:
        bridge: whose weights segment is used.
        engine: what samples: a URL, a vLLM `LLM` or `AsyncLLM`, an `Engine`, or a list of those. Closed with
            this, if it is one of ours.
        pause: what becomes of requests in flight: "keep" (they go on under the new weights), "wait" or
            "abort".
        timeout_s: for the engines' part of a push.

    Raises:
        ConsumerTaken: another process writes this bridge's weights. EngineFailed: that is no engine.
    """

    def __init__(self, bridge: str, engine: Any, *, pause: Pause = "keep", timeout_s: float = 300.0) -> None:
        if pause not in PAUSES:
            raise ValueError(f"pause={pause!r} is none of {', '.join(PAUSES)}")
        self._given = engine
        engines = [engine_of(each) for each in (engine if isinstance(engine, (list, tuple)) else [engine])]
        self._writer = WeightsWriter(bridge)
        self._turn = threading.RLock()  # a version is written, and engines brought to it, before the next
        self._fleet = Fleet(engines)
        self._pause, self._timeout_s = pause, timeout_s

    @property
    def version(self) -> int | None:
        """The newest version of the bridge's weights, also an earlier writer's; None before the first."""
        return self._writer.last_version

    def push(self, model: Any, version: int | None = None) -> int:
        """Writes a model's weights as a new version, have the engines sample with it, and return it.

        Blocks until they do.

        Args:
            model: a torch module, whose low-rank adapters are merged, peft's, compiled or in DDP, too; or
                (name, tensor) pairs, the same names each time.
            version: above all before; None: the next.

        Raises:
            ConsumerTaken: another process, as another rank, was first to write the bridge's weights; nothing
                was written.
            EngineFailed: some engine is not at the version; the segment has it, the other engines are, and
                the next push tries again.
            WeightsMismatch, WeightsBusy: nothing was written; so, too, where an engine could only wait for
                this thread's event loop, and where this process has a part of the model, or adapters that
                adding a product does not merge. ValueError: the version is not above all before.
        """
        with self._turn:
            version = self._write(model, version)
            self._update(version)
        return version

    async def push_async(self, model: Any, version: int | None = None) -> int:
        """Does as `push`, without stopping the event loop; the model must not change meanwhile.

        A cancellation comes once it is over.
        """
        return await run_to_end(self.push, model, version)

    @contextmanager
    def updated(self, model: Any, version: int | None = None) -> Iterator[Any]:
        """Yields the engine, or the list of them, as it was given: awake, and with the model's weights.

        Blocks as `push`. Afterwards engines that can sleep give their memory back, whatever happened inside.
        Raises as `push`; after an error of the block, that error.
        """
        with self._turn:
            version = self._write(model, version)
            with self._asleep_after_errors():
                raise_for(self._fleet.wake(), self._size, "did not wake")
                self._update(version)
        with self._asleep_after_errors():
            yield self._given
        with self._turn:
            raise_for(self._fleet.sleep(self._pause), self._size, "keep their memory")

    @contextmanager
    def _asleep_after_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            with self._turn:
                for failure in self._fleet.sleep(self._pause).values():
                    error.add_note(str(failure))
            raise

    @asynccontextmanager
    async def updated_async(self, model: Any, version: int | None = None) -> AsyncIterator[Any]:
        """Does as `updated`, without stopping the event loop; the model must not change before the block
        begins.
        """
        around = self.updated(model, version)
        entered: list[Any] = []
        try:
            await run_to_end(lambda: entered.append(around.__enter__()))
            yield entered[0]
        except BaseException as error:
            if entered:  # also where a cancellation came meanwhile
                await run_to_end(around.__exit__, type(error), error, error.__traceback__)
            raise
        await run_to_end(around.__exit__, None, None, None)

    @property
    def _size(self) -> int:
        return len(self._fleet.engines)

    def _write(self, model: Any, version: int | None) -> int:
        self._fleet.require_callable()
        tensors = _tensors_of(model)
        if version is None:
            last = self._writer.last_version
            if last is None:  # a segment of nobody's: what engines have of an earlier one counts
                last = self._fleet.newest_version()
            version = 0 if last is None else last + 1
        self._writer.publish(version, tensors)
        return version

    def _update(self, version: int) -> None:
        update = Update(self._writer.bridge, version, self._pause, self._timeout_s)
        raise_for(self._fleet.update(update), self._size, f"are not at version {version}")

    def close(self) -> None:
        """Lets the engines go, as they are, and the segment, whose last version stays readable.

        Idempotent.
        """
        self._fleet.close()
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tensors_of(model: Any) -> Iterable[tuple[str, Any]]:
    if not hasattr(model, "named_parameters"):
        return list(model.items()) if hasattr(model, "items") else model
    from shmbridge.consumers.learner.model.lora import published_parameters
    from shmbridge.consumers.learner.model.wrapped_model import public_name, unwrapped

    return ((public_name(name), tensor) for name, tensor in published_parameters(unwrapped(model)))
