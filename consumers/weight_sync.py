"""Pushes a policy's weights into its inference engines: `sync.push(model)`, or `sync.updated` around a
rollout.

    sync = WeightSync("run1", llm)       # a vllm.LLM, an AsyncLLM, "http://127.0.0.1:8000", or a list
    with sync.updated(model) as engine:  # it has the model's weights now, and its memory
        answers = engine.generate(prompts)

The weights travel through the weights segment of a bridge, not through these calls. The ranks of a trainer
call `push_from_ranks` together, as the adapters of all trainers do; the GRPO learner's write their shards
(`learner/train/publishing.py`).
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from typing import Any, Self

from shmbridge.consumers.engines.engine import PAUSES, EngineFailed, Pause, Update
from shmbridge.consumers.engines.fleet import Fleet, engine_of, raise_for
from shmbridge.consumers.pinned import PinnedWeights
from shmbridge.segments import run_to_end
from shmbridge.weights import WeightsWriter

__all__ = ["EngineFailed", "WeightSync", "push_from_ranks"]


class WeightSync:
    """Writes versions of a model into a bridge and brings engines to them.

    A context manager; concurrent pushes are serialised.

    It is the only writer of the bridge's weights while it is open. Versions continue above those of an
    earlier writer and of the engines.

    Args:
        bridge: whose weights segment is used.
        engine: the inference engine: a URL, a vLLM `LLM` or `AsyncLLM`, an `Engine`, or a list of those.
            `close` closes it if it is one of ours.
        pause: how to treat requests in flight: "keep" (continue them under the new weights), "wait" or
            "abort".
        timeout_s: limit for the engines' part of a push, and for readers to let go of the memory of the
            version before the last.
        announce: called with each version once all engines have it, such as
            `consumer.publish_policy_version`: groups that begin from then on are stamped with it.

    Raises:
        ConsumerTaken: another process writes this bridge's weights. EngineFailed: `engine` is not an engine.
    """

    def __init__(
        self,
        bridge: str,
        engine: Any,
        *,
        pause: Pause = "keep",
        timeout_s: float = 300.0,
        announce: Callable[[int], object] | None = None,
    ) -> None:
        if pause not in PAUSES:
            raise ValueError(f"pause={pause!r} is none of {', '.join(PAUSES)}")
        if announce is not None and not callable(announce):
            raise TypeError(
                f"announce= is a {type(announce).__name__}, which cannot be called with a version -> "
                "announce=consumer.publish_policy_version"
            )
        self._announce = announce
        self._given = engine
        engines = [engine_of(each) for each in (engine if isinstance(engine, (list, tuple)) else [engine])]
        self._writer = WeightsWriter(bridge)
        self._pinned = PinnedWeights(self._writer)
        self._turn = threading.RLock()  # held while one version is written and loaded by the engines
        self._fleet = Fleet(engines)
        self._pause, self._timeout_s = pause, timeout_s

    @property
    def version(self) -> int | None:
        """The newest version in the bridge, also an earlier writer's; None before the first."""
        return self._writer.last_version

    def next_version(self, at_least: int = 0) -> int:
        """Returns the next free version: above the bridge's weights and policy version.

        Never blocks, but to ask the engines for theirs, if the bridge never had weights.
        """
        last = self._writer.last_version
        if last is None:  # a new segment: above the versions that engines loaded from an earlier one
            last = self._fleet.newest_version()
        return max(at_least, (-1 if last is None else last) + 1, self._writer.policy_version + 1)

    def push(self, model: Any, version: int | None = None, *, at_least: int = 0) -> int:
        """Writes a model's weights as a new version, loads it into the engines, and returns the version.

        Blocks until the engines sample with it.

        Args:
            model: a torch module, also one in peft, torch.compile or DDP (low-rank adapters are merged); or
                (name, tensor) pairs, with the same names each time.
            version: higher than all earlier versions; None: the next free one, at least `at_least`.

        Raises:
            ConsumerTaken: another process (such as another rank) already writes the bridge's weights; nothing
                was written.
            EngineFailed: some engine did not load the version. The segment and the other engines have it; the
                next push tries again.
            WeightsMismatch, WeightsBusy: nothing was written. Also raised if an engine would have to wait for
                this thread's event loop, if this process has only a shard of the model, or if its adapters
                cannot be merged by adding
            a product. ValueError: the version is not higher than all earlier ones.
        """
        with self._turn:
            version = self._write(model, version, at_least)
            self._update(version)
        return version

    async def push_async(self, model: Any, version: int | None = None) -> int:
        """Does the same as `push` without blocking the event loop; do not change the model until it returns.

        A cancellation is raised only after the push is over.
        """
        return await run_to_end(self.push, model, version)

    @contextmanager
    def updated(self, model: Any, version: int | None = None) -> Iterator[Any]:
        """Yields the engine, or the list of engines, as given: awake, and with the model's weights.

        Blocks as `push`. On exit, engines that can sleep free their memory, even after an error in the block.
        Raises as `push`, or the block's own error.
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
        """As `updated` without blocking the event loop; do not change the model before the block."""
        around = self.updated(model, version)
        entered: list[Any] = []
        try:
            await run_to_end(lambda: entered.append(around.__enter__()))
            yield entered[0]
        except BaseException as error:
            if entered:  # also if the task was cancelled while entering
                await run_to_end(around.__exit__, type(error), error, error.__traceback__)
            raise
        await run_to_end(around.__exit__, None, None, None)

    @property
    def _size(self) -> int:
        return len(self._fleet.engines)

    def _write(self, model: Any, version: int | None, at_least: int = 0) -> int:
        self._fleet.require_callable()
        tensors = _tensors_of(model)
        if version is None:
            version = self.next_version(at_least)
        self._writer.publish(version, tensors, timeout_s=self._timeout_s)
        if (parameter := next(_parameters_of(model), None)) is not None:
            self._pinned.pin(parameter.device)
        return version

    def _update(self, version: int) -> None:
        update = Update(self._writer.bridge, version, self._pause, self._timeout_s)
        raise_for(self._fleet.update(update), self._size, f"are not at version {version}")
        if self._announce is not None:
            self._announce(version)

    def close(self) -> None:
        """Closes engines and segment; the last version stays readable. Idempotent."""
        self._fleet.close()
        self._pinned.close()
        self._writer.close()

    def __repr__(self) -> str:
        return f"<WeightSync to {self._size} engines: {self._writer!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def push_from_ranks(
    sync: WeightSync | None, weights: Any, version: int | None = None, *, at_least: int = 0
) -> int | None:
    """Pushes weights that ranks share: rank 0 with its `sync`, the others with None. Every rank calls it.

    Blocks as `WeightSync.push`, and for the other ranks while tensors are gathered, one by one as they are
    written; under FSDP 1 all of them first. If rank 0 fails, it still takes part in gathering the rest.

    Args:
        sync: None on all ranks but the first.
        weights: a torch module, adapters merged: whole on every rank, or sharded by FSDP 1 (its outermost
            wrapper), FSDP 2 or DeepSpeed's ZeRO-3; or (name, tensor) pairs whose iteration gathers them.
        version, at_least: as for `push`.

    Returns: the version, on rank 0.

    Raises: as `push`, on rank 0.
    """
    if (shards := _shards(weights)) is None:
        return None if sync is None else sync.push(weights, version, at_least=at_least)
    pairs = weights.items() if hasattr(weights, "items") else weights
    tensors = _gathered(weights, sync is not None, shards) if shards else iter(pairs)
    try:
        return None if sync is None else sync.push(tensors, version, at_least=at_least)
    finally:
        for _ in tensors:  # after an error, too: the other ranks wait in the gathering of each
            pass


def _shards(weights: Any) -> str | None:
    """Returns how a module is sharded: "fsdp1", "fsdp2", "zero3", None; "" for pairs."""
    if not hasattr(weights, "named_parameters"):
        return ""
    if any(type(each).__name__ == "FullyShardedDataParallel" for each in weights.modules()):
        return "fsdp1"
    marks = {"full_tensor": "fsdp2", "ds_id": "zero3"}
    return next((marks[each] for one in weights.parameters() for each in marks if hasattr(one, each)), None)


def _gathered(model: Any, write: bool, shards: str) -> Iterator[tuple[str, Any]]:
    from shmbridge.consumers.learner.model.lora import public_name, published_parameters, unwrapped
    from shmbridge.consumers.learner.model.sharding import gathered

    whole: Any = nullcontext
    with ExitStack() as stack:
        if shards == "zero3":
            from deepspeed import zero

            whole = zero.GatheredParameters
        elif shards == "fsdp1":
            from torch.distributed.fsdp import FullyShardedDataParallel as Wrapper

            apart = next(model.parameters()).device.type != "cpu"
            all_of_it = Wrapper.summon_full_params(
                model, writeback=False, rank0_only=True, offload_to_cpu=apart
            )
            stack.enter_context(all_of_it)
            if not write:  # only rank 0 has them now
                return
            model = model.module
        for name, tensor in published_parameters(unwrapped(model, sharded=True), whole=whole):
            full = gathered(tensor, write)
            if full is not None:
                # FSDP 1 and ZeRO-3 take their memory back
                yield public_name(name), full if shards == "fsdp2" else full.clone()


def _parameters_of(model: Any) -> Iterator[Any]:
    return iter(model.parameters()) if hasattr(model, "parameters") else iter(())


def _tensors_of(model: Any) -> Iterable[tuple[str, Any]]:
    if not hasattr(model, "named_parameters"):
        return list(model.items()) if hasattr(model, "items") else model
    from shmbridge.consumers.learner.model.lora import public_name, published_parameters, unwrapped

    return ((public_name(name), tensor) for name, tensor in published_parameters(unwrapped(model)))
