"""From put to loss, drawn at random: each row reaches the micro-batches exactly as it was put, or a counter
gives the reason.

Through the real path: put, lane, hub (with one rank or two), gather in both layouts, `prepare`, micro-batches
in both layouts. The expected rows are computed from the groups put, by rules written down here once more.
`make test-long` runs 20,000 groups.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import shmbridge
from shmbridge.batch import Batch
from shmbridge.consumers.advantages.from_scores import group_normalised
from shmbridge.consumers.learner.data.microbatch import micro_batches
from shmbridge.consumers.learner.data.training_rows import NO_LOGPROB, prepare
from shmbridge.errors import InvalidRecord
from shmbridge.schema import LOGPROBS

GROUPS = 4  # of a batch
ENVIRONMENTS = ("math", "code")
PER_TOKEN = ("advantages", "inference_logprobs", "ref_logprobs", "token_rewards", "token_versions")
FINITE = ("advantages", "token_rewards")  # NaN is refused here, and from Atropos in every column

COUNTERS = (
    "trajectories_uneven",
    "trajectories_without_mask",
    "trajectories_greedy",
    "trajectories_odd_temperature",
    "trajectories_binary_mask",
    "columns_ignored",
    "token_rewards",  # of "columns_ignored/token_rewards", over all environments
)

# The state of a column in a record. Only Atropos groups may be "uneven" or "rows": plain `put` refuses them.
MODES = ("absent", "absent", "sound", "sound", "null", "odd", "uneven", "rows")
MASKS = ("absent", "none", "loss_mask", "loss_mask", "masks", "masks", "binary", "null", "uneven", "rows")


@dataclass
class Row:
    """The values of one trajectory that the loss must see; None where absent."""

    group_id: str
    env: str
    tokens: np.ndarray
    columns: dict[str, np.ndarray | None] = field(default_factory=dict)
    mask: np.ndarray | None = None
    mask_fits: bool = True
    prompt_length: int | None = None
    score: float | None = None
    temperature: float | None = None
    faults: list[str] = field(default_factory=list)  # counters that count it

    @property
    def trained(self) -> np.ndarray:
        places = np.arange(len(self.tokens))
        if self.mask is not None:
            return (self.mask != 0) & (places > 0)
        if self.prompt_length is None or not self.mask_fits:
            return np.zeros(len(self.tokens), bool)
        return (places > 0) & (places >= self.prompt_length)

    def values(self, name: str, otherwise: float) -> np.ndarray:
        value = self.columns.get(name)
        return np.full(len(self.tokens), otherwise, np.float32) if value is None else value


def drawn_records() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "lengths": st.lists(st.sampled_from((0, 1, 2, 3, 5, 9, 17)), min_size=1, max_size=4),
            "seed": st.integers(0, 2**32 - 1),
            "foreign": st.booleans(),
            "arrays": st.booleans(),
            "mask": st.sampled_from(MASKS),
            "prompt": st.booleans(),
            "score": st.sampled_from(("absent", "sound", "sound", "sound", "odd", "rows")),
            "temperature": st.sampled_from(("absent", "sound", "odd")),
            **{name: st.sampled_from(MODES) for name in PER_TOKEN},
        }
    )


def drawn_groups() -> st.SearchStrategy[list[tuple[int, list[dict[str, Any]]]]]:
    """A batch: each group has an environment, and one record or two."""
    group = st.tuples(st.integers(0, 1), st.lists(drawn_records(), min_size=1, max_size=2))
    return st.lists(group, min_size=GROUPS, max_size=GROUPS)


class Maker:
    """Draws records: the group to put, and the rows to expect."""

    def __init__(self) -> None:
        self._serial = itertools.count(1_000_000)  # the first token of a row, which identifies it

    def record(
        self, drawn: dict[str, Any], group_id: str, env: str
    ) -> tuple[dict[str, Any], list[Row], bool]:
        """Returns the group to put, its expected rows, and whether `put` must refuse it."""
        draw = np.random.default_rng(drawn["seed"])
        rows = [Row(group_id, env, self._tokens(draw, length)) for length in drawn["lengths"]]
        group: dict[str, Any] = {"tokens": [row.tokens for row in rows]}
        refused = False
        for name in PER_TOKEN:
            mode = drawn[name]
            if mode in ("uneven", "rows") and not drawn["foreign"]:
                mode = "sound"
            if mode != "absent":
                refused |= self._column(draw, group, rows, name, mode) and (
                    drawn["foreign"] or name in FINITE
                )
        self._mask(draw, group, rows, drawn["mask"], drawn["foreign"])
        if drawn["prompt"]:
            group["prompt_length"] = [int(draw.integers(0, len(row.tokens) + 1)) for row in rows]
            for row, length in zip(rows, group["prompt_length"], strict=True):
                row.prompt_length = length
        refused |= self._scalars(draw, group, rows, drawn)
        for row in rows:
            if row.mask is None and (row.prompt_length is None or not row.mask_fits):
                row.faults.append("trajectories_without_mask")
        if drawn["foreign"] or not drawn["arrays"]:
            group = {name: _as_lists(value) for name, value in group.items()}
        return group, rows, refused

    def _tokens(self, draw: np.random.Generator, length: int) -> np.ndarray:
        tokens = draw.integers(1000, 1 << 30, length).astype(np.int32)
        if length:
            tokens[0] = next(self._serial)
        return tokens

    @staticmethod
    def _column(
        draw: np.random.Generator, group: dict[str, Any], rows: list[Row], name: str, mode: str
    ) -> bool:
        """Adds a column; whether something in it is not finite."""
        values: list[np.ndarray | None] = [_values(draw, name, len(row.tokens)) for row in rows]
        odd = False
        if mode == "odd" and name != "token_versions":
            for value in values:
                if value is not None and len(value):
                    value[draw.integers(len(value))] = draw.choice([np.nan, np.inf, -np.inf])
                    if name in LOGPROBS:
                        value[draw.integers(len(value))] = draw.choice([1.0, -9999.0, 1e-7])
                    odd = name not in LOGPROBS
        if mode == "null":
            values[draw.integers(len(rows))] = None
        said = list(values)
        if mode == "uneven":
            said, values = _made_uneven(draw, values, lambda length: _values(draw, name, length))
        if mode == "rows":
            said = (
                values[:-1] if len(values) > 1 and draw.random() < 0.5 else [*values, _values(draw, name, 3)]
            )
            values = [None] * len(rows)
        group[name] = said
        for row, value, told in zip(
            rows, values, itertools.chain(said, itertools.repeat(None)), strict=False
        ):
            if value is not None and name in LOGPROBS:
                known = (value > -9998) & (value <= np.float32(1e-3))
                value = np.where(known, np.minimum(value, 0), np.float32(np.nan))
            row.columns[name] = value
            if value is None and (told is not None or mode == "rows"):
                row.faults.append(f"trajectories_uneven{{{name}}}")
            if value is not None and name == "token_rewards":
                row.faults.append("columns_ignored/token_rewards")
        return odd

    @staticmethod
    def _mask(
        draw: np.random.Generator, group: dict[str, Any], rows: list[Row], mode: str, foreign: bool
    ) -> None:
        if mode in ("uneven", "rows") and not foreign:
            mode = "masks"
        if mode == "absent":
            return
        if mode == "none":
            group["masks"] = None
            return
        masks: list[np.ndarray | None] = [
            draw.integers(0, 2, len(row.tokens)).astype(np.uint8) for row in rows
        ]
        if mode == "loss_mask" or (mode == "null" and not foreign):
            if mode == "null":
                masks[draw.integers(len(rows))] = None
            group["loss_mask"] = masks
            for row, mask in zip(rows, masks, strict=True):
                row.mask = mask
            return
        if mode == "binary":
            group["masks"] = [mask.astype(np.int32) for mask in masks if mask is not None]
            for row in rows:
                row.mask = np.ones(len(row.tokens), np.uint8)
                row.faults += ["trajectories_binary_mask"] if len(row.tokens) else []
            return
        said: list[Any] = [np.where(mask, row.tokens, -100) for row, mask in zip(rows, masks, strict=True)]
        if mode == "null":
            at = int(draw.integers(len(rows)))
            said[at] = masks[at] = None
        if mode == "uneven":
            said, masks = _made_uneven(draw, said, lambda length: np.full(length, 7, np.int32), masks)
        if mode == "rows":
            said, masks = [*said, np.array([-100, 5], np.int32)], [None] * len(rows)
        group["masks"] = said
        for row, mask, told in zip(rows, masks, said, strict=False):
            row.mask = mask
            if mask is None and told is not None:
                row.mask_fits = False
                row.faults += ["trajectories_uneven{masks}", "trajectories_uneven{loss_mask}"]

    @staticmethod
    def _scalars(
        draw: np.random.Generator, group: dict[str, Any], rows: list[Row], drawn: dict[str, Any]
    ) -> bool:
        mode, refused = drawn["score"], False
        if mode != "absent":
            refused = _has_scored_nothing(drawn)
            scores = draw.integers(-3, 4, len(rows)).astype(np.float64)
            if mode == "odd":
                scores[draw.integers(len(rows))], refused = np.nan, True
            for row, score in zip(rows, scores.tolist(), strict=True):
                row.score = score
            group["scores"] = scores
            if mode == "rows" and drawn["foreign"]:
                fewer = len(rows) > 1 and draw.random() < 0.5
                group["scores"] = scores[:-1] if fewer else np.append(scores, 9.0)
                rows[-1].score = None if fewer else rows[-1].score
                for row in rows:
                    row.faults.append("trajectories_uneven{score}")
        if drawn["temperature"] != "absent":
            usual, odd = (
                (0.5, 0.7, 1.5),
                (0.0, 1e-6, 0.7) if drawn["foreign"] else (0.0, 1e-6, np.nan, np.inf, 0.7),
            )
            heat = draw.choice(usual if drawn["temperature"] == "sound" else odd, len(rows)).astype(
                np.float32
            )
            group["temperature"] = heat
            for row, value in zip(rows, heat, strict=True):
                row.temperature = value if np.isfinite(value) and value >= 1e-5 else None
                if row.temperature is None:
                    row.faults.append(
                        "trajectories_greedy" if np.isfinite(value) else "trajectories_odd_temperature"
                    )
        return refused


def _has_scored_nothing(drawn: dict[str, Any]) -> bool:
    """Whether there is a score for a row without tokens, which only Atropos may say."""
    return 0 in drawn["lengths"] and drawn["score"] != "absent" and not drawn["foreign"]


def _values(draw: np.random.Generator, name: str, length: int) -> np.ndarray:
    if name == "token_versions":
        return draw.integers(-1, 9, length).astype(np.int32)
    values = draw.normal(size=length).astype(np.float32)
    return -np.abs(values) if name.endswith("logprobs") else values


def _made_uneven(
    draw: np.random.Generator, values: list[Any], make: Any, kept: list[Any] | None = None
) -> tuple[list[Any], list[Any]]:
    """Returns values of which one row has another length, and the values to expect of them."""
    said, kept = list(values), list(values if kept is None else kept)
    at = int(draw.integers(len(said)))
    length = len(said[at])
    other = [each for each in (length + 1, length - 1, 0, length // 2) if each >= 0 and each != length]
    said[at], kept[at] = make(int(draw.choice(other))), None
    return said, kept


def _as_lists(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [_as_lists(each) for each in value] if isinstance(value, list) else value


class Path:
    """A bridge with its environments and its learner of one rank or two, for any number of batches."""

    def __init__(self, name: str, ranks: int, stack: ExitStack) -> None:
        self.ranks, self._make = ranks, Maker()
        self._numbers = itertools.count()
        consumer = stack.enter_context(shmbridge.Consumer(name))
        self._producers = [
            stack.enter_context(shmbridge.Producer(name, env_name=env, lane_bytes="1M"))
            for env in ENVIRONMENTS
        ]
        if ranks == 1:
            self._batches = [consumer.batches(groups=GROUPS, prefetch=0, hold="caller", timeout_s=30)]
        else:
            consumer.serve_ranks(ranks, groups=GROUPS)
            members = [stack.enter_context(shmbridge.Rank(name, rank, ranks)) for rank in range(ranks)]
            self._batches = [member.batches(hold="caller", timeout_s=30) for member in members]

    def take(self, drawn: list[tuple[int, list[dict[str, Any]]]]) -> None:
        """Puts a batch, takes it, and compares all of it with what was put.

        AssertionError where they differ.
        """
        put = [row for env, records in drawn for row in self._put(env, records)]
        batches = [next(batches) for batches in self._batches]
        try:
            self._compare(put, batches)
        finally:
            for batch in batches:
                batch.release()

    def _put(self, env: int, records: list[dict[str, Any]]) -> list[Row]:
        producer, group_id = self._producers[env], f"g{next(self._numbers)}"
        size, rows = sum(len(drawn["lengths"]) for drawn in records), []
        for drawn in records:
            group, made, refused = self._make.record(drawn, group_id, ENVIRONMENTS[env])
            options = {
                "group_id": group_id,
                "group_size": size,
                "foreign": drawn["foreign"],
                "timeout_s": 30.0,
            }
            if refused:
                before = producer.stats()["dropped_total{invalid}"]
                with pytest.raises(InvalidRecord):
                    producer.put(group, **options)
                assert producer.stats()["dropped_total{invalid}"] == before + 1
                sound = dict.fromkeys((*PER_TOKEN, "temperature"), "sound")
                score = "absent" if 0 in drawn["lengths"] and not drawn["foreign"] else "sound"
                group, made, refused = self._make.record(
                    {**drawn, **sound, "score": score}, group_id, ENVIRONMENTS[env]
                )
                if refused:  # not an AssertionError, which would count as a fault that was found
                    raise RuntimeError(f"a record is not sound: {drawn}")
            producer.put(group, **options)
            rows += made
        return rows

    def _compare(self, put: list[Row], batches: list[Batch]) -> None:
        expected: dict[str, list[Row]] = defaultdict(list)
        for row in put:
            expected[row.group_id].append(row)
        seen: Counter[str] = Counter()
        counted: Counter[str] = Counter()
        for batch in batches:
            rows_of = []
            for meta in batch.meta:
                rows_of.append(expected[meta.group_id][seen[meta.group_id]])
                seen[meta.group_id] += 1
                assert meta.env_name == rows_of[-1].env
            _compare_batch(batch, rows_of)
            _compare_batch(Batch(batch.groups, "padded"), rows_of)
            prepared, metrics = prepare(batch, 1.0, with_reference=True)
            _compare_prepared(prepared, rows_of, expected)
            for layout in ("padded", "packed"):
                _compare_micro(
                    list(micro_batches(prepared, 24, torch.device("cpu"), layout)), rows_of, expected
                )
            counted.update(
                {
                    name: count
                    for name, count in metrics.items()
                    if name.split("/", 2)[-1].startswith(COUNTERS)
                }
            )
        assert seen == {group_id: len(rows) for group_id, rows in expected.items()}
        faults = Counter(fault for row in put for fault in row.faults)
        of_environments = Counter(f"atropos/{row.env}/{fault}" for row in put for fault in row.faults)
        of_environments = Counter(
            {name: count for name, count in of_environments.items() if "odd_temp" not in name}
        )
        assert +counted == faults + of_environments


def _compare_batch(batch: Batch, rows: list[Row]) -> None:
    assert batch.lengths.tolist() == [len(row.tokens) for row in rows]

    def of_row(values: np.ndarray, at: int) -> np.ndarray:
        if batch.layout == "padded":
            assert not values[at, len(rows[at].tokens) :].any()
            return values[at, : len(rows[at].tokens)]
        return values[batch.cu_seqlens[at] : batch.cu_seqlens[at + 1]]

    for at, row in enumerate(rows):
        np.testing.assert_array_equal(of_row(batch.tokens, at), row.tokens)
        assert bool(batch.has("loss_mask")[at]) == (row.mask is not None)
        np.testing.assert_array_equal(
            of_row(batch.loss_mask, at), np.zeros(len(row.tokens)) if row.mask is None else row.mask
        )
        for name in PER_TOKEN:
            value = row.columns.get(name)
            assert bool(batch.has(name)[at]) == (value is not None), name
            if batch[name] is not None if name in batch else False:
                np.testing.assert_array_equal(
                    of_row(batch[name], at), np.zeros(len(row.tokens)) if value is None else value
                )


def _advantages(row: Row, group: list[Row]) -> np.ndarray:
    own = row.columns.get("advantages")
    if own is None:
        scores = np.array([0.0 if each.score is None else each.score for each in group])
        usable = np.array([each.score is not None for each in group])
        of_rows = group_normalised(scores, np.zeros(len(group), np.int32), usable=usable)
        own = np.full(
            len(row.tokens), of_rows[next(at for at, each in enumerate(group) if each is row)], np.float32
        )
    return np.where(row.trained, own, np.float32(0.0))


def _of_loss(row: Row, group: list[Row]) -> dict[str, np.ndarray]:
    """Returns the values of a row that the loss must see, by the names of `TrainingRows`."""
    return {
        "tokens": row.tokens,
        "trained": row.trained,
        "advantages": _advantages(row, group),
        "sampled_logprobs": row.values("inference_logprobs", NO_LOGPROB),
        "reference_logprobs": row.values("ref_logprobs", NO_LOGPROB),
    }


def _compare_prepared(prepared: Any, rows: list[Row], groups: dict[str, list[Row]]) -> None:
    assert np.diff(prepared.cu_seqlens).tolist() == [len(row.tokens) for row in rows]
    for at, row in enumerate(rows):
        where = slice(*prepared.cu_seqlens[at : at + 2])
        for name, values in _of_loss(row, groups[row.group_id]).items():
            np.testing.assert_allclose(
                getattr(prepared, name)[where], values, rtol=1e-6 if name == "advantages" else 0, err_msg=name
            )
        assert prepared.temperature[at] == (1.0 if row.temperature is None else row.temperature)


def _compare_micro(micros: list[Any], rows: list[Row], groups: dict[str, list[Row]]) -> None:
    by_serial = {int(row.tokens[0]): row for row in rows if row.trained.any()}
    came: Counter[int] = Counter()
    for micro in micros:
        starts = [0, *itertools.accumulate(micro.row_lengths)]
        for at, length in enumerate(micro.row_lengths):
            packed = micro.cu_seqlens is not None
            where = (0, slice(starts[at], starts[at] + length)) if packed else (at, slice(0, length))
            serial = int(micro.tokens[where][0])
            came[serial] += 1
            row = by_serial[serial]
            assert length == len(row.tokens)
            for name, values in _of_loss(row, groups[row.group_id]).items():
                np.testing.assert_allclose(
                    getattr(micro, name)[where].numpy(),
                    values,
                    rtol=1e-6 if name == "advantages" else 0,
                    err_msg=name,
                )
            assert micro.temperature[at] == (1.0 if row.temperature is None else row.temperature)
            assert micro.trained_lengths[at] == row.trained.sum()
            assert packed or not micro.trained[at, length:].any()
    assert came == dict.fromkeys(by_serial, 1)


@pytest.fixture
def path(bridge):
    """Return a maker of paths: ranks -> Path."""
    with ExitStack() as stack:
        yield lambda ranks: Path(bridge, ranks, stack)


def run(path: Path, examples: int) -> None:
    """Compares that many batches, always the same ones."""

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn_groups())
    def batches(drawn: list[tuple[int, list[dict[str, Any]]]]) -> None:
        path.take(drawn)

    batches()


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_row_comes_as_it_was_put_or_a_counter_rose(path, ranks) -> None:
    run(path(ranks), 64)  # 4 groups each: 512 in all


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_of_20000_groups_comes_as_it_was_put_or_a_counter_rose(path, ranks) -> None:
    run(path(ranks), 2500)
