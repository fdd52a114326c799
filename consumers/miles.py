"""miles' asynchronous rollouts through a bridge: `ShmDataBuffer`, for `--custom-async-data-buffer-path`.

    SHMBRIDGE_BRIDGE=run1 python train_async.py --fully-async \\
        --custom-async-data-buffer-path shmbridge.consumers.miles.ShmDataBuffer ...

A finished group is a record of a lane from `put` on: what was generated and not trained outlives the trainer,
and the next run gets it first. Groups of any other producer of the bridge are trained too, as samples.

Released: the groups of a batch when the batch after the next is asked for; by then miles has trained it. It
has no word for a checkpoint in this hook. After a kill: the groups of the last two batches come again, and
all that no batch had; `shmbridge/redelivered_groups` counts them. Needs `SHMBRIDGE_LANE_BYTES` [1G] for three
batches and what waits.

Written from `miles/rollout/fully_async_data_buffer.py` at commit 31f1ca96 of github.com/radixark/miles.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from shmbridge import InvalidRecord, Producer, Record
from shmbridge.consumers.feed import Feed, Step
from shmbridge.consumers.record_factories import slime_sample
from shmbridge.errors import BadArgument

if TYPE_CHECKING:
    from miles.rollout.fully_async_data_buffer import DataBufferConstructorInput, DataBufferInput
    from miles.utils.types import Sample

log = logging.getLogger(__name__)

_ARRAYS = "miles_arrays"  # arrays of a row, one after the other; where each is, is in its fields
_SCHEMA = pa.schema([(_ARRAYS, pa.binary())])
_IN_COLUMNS = ("tokens", "loss_mask", "rollout_log_probs")
_PREFIX = "rollout/fully_async/"


class ShmDataBuffer:
    """A `DataBuffer` of miles, in the place of its `DefaultDataBuffer`, with the same filters and metrics.

    For one event loop. The constructor blocks, to reserve the lane's memory.

    Args:
        input: what miles gives. Of its arguments those count that count for the default; a group is also
            refused where its size is not `n_samples_per_prompt`.

    Raises:
        BadArgument: SHMBRIDGE_BRIDGE does not name a bridge.
    """

    def __init__(self, input: DataBufferConstructorInput) -> None:
        from miles.rollout.filter_hub.base_types import MetricGatherer
        from miles.utils.misc import load_function

        args = input.args
        if not (bridge := os.environ.get("SHMBRIDGE_BRIDGE")):
            raise BadArgument("SHMBRIDGE_BRIDGE is not set", hint="SHMBRIDGE_BRIDGE=run1, the bridge's name")
        self._args, self._unused = args, input.unused_handler_fn
        self._filter = load_function(args.dynamic_sampling_filter_path)
        self._capacity = max(1, int(args.async_data_buffer_capacity_factor * args.rollout_batch_size))
        self._feed = Feed(
            bridge, groups=1, release_at="step", unfit="leave_out", set_aside_after=0, schema=_SCHEMA
        )
        try:
            self._producer = Producer(
                bridge,
                env_name="miles",
                lane_bytes=os.environ.get("SHMBRIDGE_LANE_BYTES", "1G"),
                schema=_SCHEMA,
            )
        except BaseException:
            self._feed.close()
            raise
        self._room, self._putting = asyncio.Condition(), asyncio.Lock()
        self._waiting: dict[object, int | None] = {}  # the oldest version of each group put, in order
        self._version: int | None = None
        self._batch: list[Step] = []  # taken since the last metrics
        self._batches: deque[list[Step]] = deque()  # taken before, not released
        self._gatherer, self._make_gatherer = MetricGatherer(), MetricGatherer
        self._counts: Counter[str] = Counter()
        self._staleness: list[int] = []

    async def put(self, input: DataBufferInput) -> None:
        """Stores a finished group, or hands its prompts back if it was aborted, or drops what the dynamic
        filter does not keep. Waits while the buffer has as many groups as miles lets it have.

        Raises:
            InvalidRecord: a sample has a field that cannot be stored, such as multimodal tensors.
        """
        from miles.rollout.filter_hub.base_types import call_dynamic_filter
        from miles.utils.types import Sample

        samples = list(_samples(input.group))
        if any(sample.status == Sample.Status.ABORTED for sample in samples):
            self._counts["aborted"] += 1
            self._unused(input.prompt_group)
            return
        verdict = call_dynamic_filter(self._filter, self._args, input.group)
        if not verdict.keep:
            self._gatherer.on_dynamic_filter_drop(reason=verdict.reason)
            return
        columns = self._columns(input, samples)
        versions = [int(v) for sample in samples for v in sample.weight_versions if str(v).isdigit()]
        stamp = (min(versions), max(versions)) if versions else None
        place = object()
        async with self._room:
            await self._room.wait_for(lambda: len(self._waiting) < self._capacity)
            self._waiting[place] = min(versions, default=None)
        # In a task of its own: what has a place is stored, or gives it back, also if the caller is cancelled.
        await asyncio.shield(asyncio.create_task(self._store(place, columns, stamp)))

    async def _store(self, place: object, columns: dict[str, Any], stamp: tuple[int, int] | None) -> None:
        try:
            async with self._putting:  # a producer is for one at a time
                await self._producer.put_async(columns, policy_version=stamp)
        except BaseException:  # it is not there, and nothing waits for it
            await self._make_room(place)
            raise

    async def get(self, current_version: int | None = None, **_: Any) -> DataBufferInput:
        """Returns the next group, waiting for it; those that are too stale go back as prompts.

        Args:
            current_version: of the weights, for `--max-weight-staleness`.
        """
        from miles.rollout.fully_async_data_buffer import DataBufferInput
        from miles.utils.types import Sample

        if current_version is not None:
            self._version = current_version
        while len(self._batches) > 1:
            self._feed.trained(self._batches.popleft())
        while True:
            step = await self._feed.take_async(groups=1)
            record = step.groups[0].records[0]
            meta = record.meta
            extra = record.json("extra") if "extra" in record else None
            about = extra.get("miles") if isinstance(extra, dict) else None
            self._counts["redelivered"] += meta.redelivered
            if about is not None and meta.producer_id == self._producer.producer_id:
                await self._make_room()
            if about is not None:
                samples = _read(record, about["samples"], Sample)
                prompts = [Sample.from_dict(each) for each in about["prompt_group"]]
                group = _nested(samples, about["nested"])
            else:
                prompts, group = [], self._of_other_producers(step, Sample)
            if len(group) != self._args.n_samples_per_prompt:
                log.warning(
                    "group %s of environment %r has %d rollouts, n_samples_per_prompt is %d: left out",
                    meta.group_id, meta.env_name, len(group), self._args.n_samples_per_prompt,
                )  # fmt: skip
                self._drop(step, "size", prompts)
                continue
            staleness = self._staleness_of(meta.min_policy_version)
            if staleness is not None:
                self._staleness.append(staleness)
                most = self._args.max_weight_staleness
                if most is not None and staleness > most:
                    self._drop(step, "stale", prompts)
                    continue
            self._batch.append(step)
            return DataBufferInput(prompt_group=prompts, group=group)

    def get_metrics(self) -> dict[str, float]:
        """Returns the default buffer's metrics since the last call, and ours; a batch ends. Never blocks."""
        self._batches.append(self._batch)
        self._batch = []
        metrics: dict[str, float] = {
            f"{_PREFIX}queue_size": len(self._waiting),
            f"{_PREFIX}aborted_groups_filtered": self._counts["aborted"],
            f"{_PREFIX}stale_groups_filtered": self._counts["stale"],
            "shmbridge/groups_of_another_size": self._counts["size"],
            "shmbridge/redelivered_groups": self._counts["redelivered"],
            **self._gatherer.collect(),
        }
        waiting = [s for each in self._waiting.values() if (s := self._staleness_of(each)) is not None]
        for name, values in (("", self._staleness), ("buffer_", waiting)):
            if values:
                metrics[f"{_PREFIX}{name}avg_staleness"] = sum(values) / len(values)
                metrics[f"{_PREFIX}{name}max_staleness"] = max(values)
        self._gatherer, self._staleness = self._make_gatherer(), []
        self._counts.clear()
        return metrics

    def close(self) -> None:
        """Leaves the bridge; what was not released is the next run's. miles ends without calling it."""
        self._producer.close()
        self._feed.close()

    async def _make_room(self, place: object = None) -> None:
        """Gives a place back; None: that of the oldest group."""
        async with self._room:
            self._waiting.pop(next(iter(self._waiting), None) if place is None else place, None)
            self._room.notify_all()

    def _drop(self, step: Step, why: str, prompts: list[Sample]) -> None:
        self._counts[why] += 1
        self._feed.dropped(step, why)
        if prompts:
            self._unused(prompts)

    def _staleness_of(self, oldest: int | None) -> int | None:
        if oldest is None or oldest < 0 or self._version is None:
            return None
        return self._version - oldest

    def _columns(self, input: DataBufferInput, samples: Sequence[Sample]) -> dict[str, Any]:
        fields, arrays = zip(*map(_fields, samples), strict=True)
        prompts = [_fields(_to_ask_again(sample), whole=True)[0] for sample in input.prompt_group]
        nested = [len(each) if isinstance(each, list) else 0 for each in input.group]
        lengths = [len(sample.tokens) - sample.response_length for sample in samples]
        group: dict[str, Any] = {
            "tokens": [sample.tokens for sample in samples],
            "prompt_length": lengths,
            "loss_mask": [
                [0] * prompt + list(sample.loss_mask or [1] * sample.response_length)
                for sample, prompt in zip(samples, lengths, strict=True)
            ],
            "repetition_id": [number for number, each in enumerate(nested) for _ in range(each or 1)],
            "extra": {"miles": {"samples": fields, "prompt_group": prompts, "nested": nested}},
        }
        if any(arrays):
            group[_ARRAYS] = list(arrays)
        if any(sample.rollout_log_probs is not None for sample in samples):
            group["inference_logprobs"] = [
                [0.0] * prompt + list(sample.rollout_log_probs or [math.nan] * sample.response_length)
                for sample, prompt in zip(samples, lengths, strict=True)
            ]
        rewards = [sample.reward and sample.get_reward_value(self._args) for sample in samples]
        if all(isinstance(reward, (int, float)) for reward in rewards):
            group["score"] = [float(reward) for reward in rewards]
        return group

    def _of_other_producers(self, step: Step, kind: type[Sample]) -> list[Sample | list[Sample]]:
        episodes: dict[int, list[Sample]] = {}
        for row in step.rows:
            rollouts = episodes.setdefault(row.repetition_id, [])
            index = row.meta.sequence * self._args.n_samples_per_prompt + row.repetition_id
            rollouts.append(kind.from_dict(slime_sample(row, index, index)))
        return [rows[0] if len(rows) == 1 else rows for _, rows in sorted(episodes.items())]


def _samples(group: Sequence[Any]) -> Iterator[Sample]:
    for each in group:
        yield from each if isinstance(each, list) else (each,)


def _to_ask_again(sample: Sample) -> Sample:
    """A prompt as miles hands it to its data source again: what was generated of it is not stored twice."""
    copy = type(sample).from_dict(sample.to_dict())
    copy.reset_for_retry()
    return copy


def _nested(samples: list[Sample], nested: Sequence[int]) -> list[Sample | list[Sample]]:
    left = iter(samples)
    return [[next(left) for _ in range(each)] if each else next(left) for each in nested]


def _fields(sample: Sample, *, whole: bool = False) -> tuple[dict[str, Any], bytes]:
    """The fields that are no columns, as JSON has them, and the bytes of arrays. Raises InvalidRecord.

    Args:
        whole: of a sample that has no row.
    """
    fields, arrays = dict(sample.to_dict()), b""
    where: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for name in () if whole else _IN_COLUMNS:
        value = fields.pop(name)
        fields[f"has_{name}"] = value is not None
    for name, value in list(fields.items()):
        if isinstance(value, np.ndarray) and not whole and value.dtype.kind in "biuf":
            where[name] = (value.dtype.str, value.shape, len(arrays))
            arrays += value.tobytes()
            del fields[name]
            continue
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise InvalidRecord(
                f"field {name!r} of sample {sample.index} cannot be stored: "
                f"{type(value).__name__} {value!r:.50}",
                hint="numbers must be finite; use miles' own buffer for samples with objects",
                column=name,
                row=0,
            ) from None
    return fields if whole else fields | {"arrays": where}, arrays


def _read(record: Record, fields: Sequence[dict[str, Any]], kind: type[Sample]) -> list[Sample]:
    samples = []
    for row, given in enumerate(fields):
        rest = dict(given)
        for name, (dtype, shape, at) in rest.pop("arrays").items():
            count = int(np.prod(shape))
            data = np.frombuffer(record[_ARRAYS][row], dtype, count, at)
            rest[name] = data.reshape(shape).copy()
        begin = int(record["prompt_length"][row])
        columns: dict[str, Any] = {"tokens": record["tokens"][row].tolist()}
        for name, column in (("loss_mask", "loss_mask"), ("rollout_log_probs", "inference_logprobs")):
            there = column in record and rest[f"has_{name}"]
            columns[name] = record[column][row][begin:].tolist() if there else None
        samples.append(
            kind.from_dict(
                {name: value for name, value in rest.items() if not name.startswith("has_")} | columns
            )
        )
    return samples
