"""Rows are trained as they were put: each is compared, and a shift, a flip, a lost row and a doubled one are
found and named.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import shmbridge
from shmbridge.consumers.advantages.batch_facts import BatchFacts
from shmbridge.consumers.advantages.credit import Credit
from shmbridge.consumers.learner.data.row_checks import DIFFERENCE
from shmbridge.consumers.learner.report.run import as_text, read_run, summary
from shmbridge.consumers.learner.train import grpo_update
from shmbridge.consumers.learner.train.grpo_update import Learner, Objective

SEED = 1414
GROUPS, ROWS = 3, 4


def groups(seed: int = SEED) -> list[dict]:
    """Rows of 4 to 20 tokens, no two alike; the second group has no log-probabilities, the third no
    advantages and Atropos' masks.
    """
    rng = np.random.default_rng(seed)
    made = []
    for number in range(GROUPS):
        lengths = rng.integers(4, 20, ROWS)
        tokens = [rng.integers(0, 28, length).tolist() for length in lengths]
        masks = [[0, 0, *rng.integers(0, 2, length - 3).tolist(), 1] for length in lengths]
        group = {"tokens": tokens, "scores": rng.normal(size=ROWS).tolist()}
        if number == 2:
            pairs = zip(tokens, masks, strict=True)
            group["masks"] = [
                [token if on else -100 for token, on in zip(*pair, strict=True)] for pair in pairs
            ]
        else:
            group["loss_mask"] = masks
            group["advantages"] = [rng.normal(size=length).astype(np.float32) for length in lengths]
        if number != 1:
            group["inference_logprobs"] = [
                -rng.exponential(size=length).astype(np.float32) for length in lengths
            ]
        if number == 0:
            group["ref_logprobs"] = [-rng.exponential(size=length).astype(np.float32) for length in lengths]
        made.append(group)
    return made


@pytest.fixture
def batch(bridge):
    """A batch of all groups, whose leases are held."""
    with (
        shmbridge.Consumer(bridge) as consumer,
        shmbridge.Producer(bridge, env_name="maze", producer_id="maze-1") as producer,
    ):
        for group in groups():
            producer.put(group)
        with next(consumer.batches(groups=GROUPS, timeout_s=10, hold="caller")) as made:
            yield made


@pytest.fixture
def metrics(tiny_model, batch):
    """Call it for the metrics of one batch."""

    def make(learner=None, **objective):
        learner = learner or Learner(
            tiny_model(1), Objective(micro_tokens=50, **objective), lambda step: 1e-3
        )
        return learner.accumulate(batch, 0)

    return make


def of_checks(metrics):
    return {
        name: value for name, value in metrics.items() if name.startswith(("rows_compared{", "rows_differ{"))
    }


@pytest.mark.parametrize(
    "objective",
    [
        {"layout": "padded"},
        {"layout": "packed"},
        {"micro_tokens": 1},
        {"kl": 0.1},
        {"max_token_staleness": 0},
        {"loss": "sft", "credit": Credit(normalise="batch", clip=(-1.0, 1.0))},
        {"credit": Credit(use_own=False)},
    ],
    ids=str,
)
def test_every_row_is_compared_and_none_differs(tiny_model, batch, objective) -> None:
    learner = Learner(
        tiny_model(1), Objective(**({"micro_tokens": 50} | objective)), lambda step: 1e-3, reference=None
    )
    found = of_checks(learner.accumulate(batch, 0))
    assert found == {"rows_compared{maze}": GROUPS * ROWS, "rows_differ{maze}": 0}


def shifted(name):
    def plant(monkeypatch, batch):
        prepare = grpo_update.prepare

        def wrong(*arguments, **options):
            rows, metrics = prepare(*arguments, **options)
            return replace(rows, **{name: np.roll(getattr(rows, name), 1)}), metrics

        monkeypatch.setattr(grpo_update, "prepare", wrong)

    return plant


def mask_shifted(monkeypatch, batch):
    wanted = BatchFacts.trained_tokens.func
    shifted = property(lambda facts: np.roll(wanted(facts), 1) & (batch.position_ids > 0))
    monkeypatch.setattr(BatchFacts, "trained_tokens", shifted)


def trained_besides(monkeypatch, batch):
    """A token that the mask leaves out."""
    prepare = grpo_update.prepare

    def wrong(*arguments, **options):
        rows, metrics = prepare(*arguments, **options)
        besides = rows.trained.copy()
        besides[np.flatnonzero(~rows.answers & (batch.position_ids > 0))[-1]] = True
        return replace(rows, trained=besides), metrics

    monkeypatch.setattr(grpo_update, "prepare", wrong)


def flipped_in_gather(column, row, place):
    def plant(monkeypatch, batch):
        values = batch[column]
        at = batch.cu_seqlens[row] + place
        values[at] = 1 - values[at] if column == "loss_mask" else values[at] + 1

    return plant


def shifted_in_gather(column):
    def plant(monkeypatch, batch):
        batch[column][:] = np.roll(batch[column], 1)

    return plant


def of_micro_batches(change):
    def plant(monkeypatch, batch):
        cut = grpo_update.micro_batches

        def wrong(*arguments):
            yield from change(list(cut(*arguments)))

        monkeypatch.setattr(grpo_update, "micro_batches", wrong)

    return plant


def column_lost(column):
    def plant(monkeypatch, batch):
        del batch._columns[column]
        batch._present[column][:] = False

    return plant


PLANTED = {
    "tokens shifted in prepare": (shifted("tokens"), "column 'tokens' position 0: trained with"),
    "log-probabilities shifted in prepare": (
        shifted("sampled_logprobs"),
        "column 'inference_logprobs' position 0: trained with",
    ),
    "mask shifted on its way to what is trained": (mask_shifted, "column 'loss_mask' position"),
    "a token trained that the mask leaves out": (trained_besides, "column 'loss_mask' position"),
    "advantages shifted in prepare": (shifted("advantages"), "column 'advantages' position"),
    "tokens shifted in gather": (shifted_in_gather("tokens"), "column 'tokens' position 0: trained with"),
    "log-probabilities shifted in gather": (
        shifted_in_gather("inference_logprobs"),
        "column 'inference_logprobs' position",
    ),
    "advantages shifted in gather": (shifted_in_gather("advantages"), "column 'advantages' position"),
    "a mask flipped in gather": (
        flipped_in_gather("loss_mask", 2, 1),
        "row 2 of environment 'maze': column 'loss_mask' position 1:",
    ),
    "a token flipped in gather": (
        flipped_in_gather("tokens", 9, 3),
        "record 2 row 1 of environment 'maze': column 'tokens' position 3:",
    ),
    "a row dropped": (of_micro_batches(lambda micros: micros[1:]), "is in no micro-batch"),
    "a row doubled": (of_micro_batches(lambda micros: [*micros, micros[0]]), "is trained 2 times"),
    "a column dropped": (
        column_lost("inference_logprobs"),
        "column 'inference_logprobs' is missing, and was put",
    ),
    "advantages dropped": (column_lost("advantages"), "column 'advantages' is missing, and was put"),
}


@pytest.mark.usefixtures("differences_allowed")
@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_fault_is_found_and_named(monkeypatch, batch, metrics, case) -> None:
    plant, named = PLANTED[case]
    plant(monkeypatch, batch)
    found = metrics()
    assert found["rows_compared{maze}"] == GROUPS * ROWS
    assert 1 <= found["rows_differ{maze}"] <= GROUPS * ROWS
    assert named in found[DIFFERENCE]
    assert found[DIFFERENCE].startswith(f"producer {batch.meta[0].producer_id} record ")


@pytest.mark.usefixtures("differences_allowed")
def test_only_the_first_difference_is_named(tiny_model, batch) -> None:
    learner = Learner(tiny_model(1), Objective(micro_tokens=50), lambda step: 1e-3)
    batch["tokens"][0] ^= 1
    assert learner.accumulate(batch, 0)["rows_differ{maze}"] == 1
    second = learner.accumulate(batch, 0)
    assert second["rows_differ{maze}"] == 1
    assert DIFFERENCE not in second


@pytest.mark.usefixtures("differences_allowed")
def test_values_that_were_not_put_are_found(batch, metrics) -> None:
    """Group 1 has no log-probabilities; a learner that trains with some anyway is wrong."""
    batch._present["inference_logprobs"][:] = True
    batch["inference_logprobs"][:] -= np.float32(0.5) * (np.repeat(batch.group_index, batch.lengths) == 1)
    assert "column 'inference_logprobs' is there, and was not put for this row" in metrics()[DIFFERENCE]


@pytest.mark.usefixtures("differences_allowed")
def test_a_row_of_another_length_is_absent_or_differs(bridge, tiny_model) -> None:
    """Values that an environment sends for the answer alone cannot be assigned to tokens."""
    tokens = [[1, 2, 3, 4], [5, 6, 7, 8]]
    group = {
        "tokens": tokens,
        "masks": tokens,
        "scores": [1.0, 0.0],
        "inference_logprobs": [[-0.5, -0.5], [-1.0] * 4],
    }
    learner = Learner(tiny_model(1), Objective(), lambda step: 1e-3)
    with shmbridge.Consumer(bridge) as consumer, shmbridge.Producer(bridge, env_name="maze") as producer:
        producer.put(group, foreign=True)
        with next(consumer.batches(groups=1, timeout_s=10, hold="caller")) as made:
            found = learner.accumulate(made, 0)
            trained_with_it = int(made.has("inference_logprobs")[0])
    assert of_checks(found) == {"rows_compared{maze}": 2, "rows_differ{maze}": trained_with_it}


def test_rows_without_checks_are_not_compared(bridge, tiny_model, monkeypatch) -> None:
    monkeypatch.setenv("SHMBRIDGE_CHECK_ROWS", "0")
    learner = Learner(tiny_model(1), Objective(), lambda step: 1e-3)
    with shmbridge.Consumer(bridge) as consumer, shmbridge.Producer(bridge) as producer:
        producer.put(groups()[0])
        with next(consumer.batches(groups=1, timeout_s=10, hold="caller")) as made:
            assert of_checks(learner.accumulate(made, 0)) == {}


def test_a_batch_that_let_go_of_its_records_is_not_compared(bridge, tiny_model) -> None:
    learner = Learner(tiny_model(1), Objective(), lambda step: 1e-3)
    with shmbridge.Consumer(bridge) as consumer, shmbridge.Producer(bridge) as producer:
        producer.put(groups()[0])
        with next(consumer.batches(groups=1, timeout_s=10, hold="caller")) as made:
            for record in made.records:
                record.release()
            assert of_checks(learner.accumulate(made, 0)) == {}


def test_the_report_shows_what_was_compared_and_the_first_difference(tmp_path) -> None:
    steps = [
        {
            "step": 1,
            "rows_compared{maze}": 4,
            "rows_differ{maze}": 0,
            "rows_compared{a{b}": 1,
            "rows_differ{a{b}": 0,
        },
        {
            "step": 2,
            "rows_compared{maze}": 4,
            "rows_differ{maze}": 2,
            "row_difference": "producer maze-1 record 7 row 0: wrong",
        },
        {"step": 3, "rows_compared{maze}": 4, "rows_differ{maze}": 1, "row_difference": "of another rank"},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in steps))
    found = summary(read_run(tmp_path))
    assert found["rows_compared"] == {"a{b": 1, "maze": 12}
    assert found["rows_differ"] == {"a{b": 0, "maze": 3}
    assert found["row_difference"] == "producer maze-1 record 7 row 0: wrong"
    words = as_text(found)
    assert "  rows       13 compared with what was put, 3 DIFFER: maze 3 of 12" in words
    assert "first: producer maze-1 record 7 row 0: wrong" in words


def test_the_report_of_a_run_without_checks_says_nothing_of_them(tmp_path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    found = summary(read_run(tmp_path))
    assert found["rows_compared"] == {}
    assert "compared" not in as_text(found)


FITS = [[1, 2, 3, 4], [5, 6, 7], [8, 9, 10, 11]]
LOGPROBS = [[1.0, *[-0.5] * (len(row) - 1)] for row in FITS]


@pytest.mark.parametrize(
    "misfit",
    [
        {"inference_logprobs": LOGPROBS[:2]},
        {"inference_logprobs": [*LOGPROBS, [1.0, -0.5]]},
        {"inference_logprobs": [LOGPROBS[0], LOGPROBS[1][1:], LOGPROBS[2]]},
        {"advantages": [[0.1] * len(row) for row in FITS[:2]]},
    ],
    ids=["a row too few", "a row too many", "a row of another length", "advantages of a row too few"],
)
def test_a_column_that_does_not_fit_the_rows_is_no_difference(bridge, tiny_model, misfit) -> None:
    """Atropos takes such groups; batches leave the column out and count it."""
    group = {"tokens": FITS, "masks": [[-100, *row[1:]] for row in FITS], "scores": [0.0, 1.0, 2.0], **misfit}
    with shmbridge.Consumer(bridge) as consumer, shmbridge.Producer(bridge, env_name="maze") as producer:
        producer.put(group, foreign=True)
        with next(consumer.batches(groups=1, timeout_s=10, hold="caller")) as batch:
            learner = Learner(tiny_model(1), Objective(micro_tokens=50), lambda step: 1e-3)
            found = of_checks(learner.accumulate(batch, 0))
    assert found == {"rows_compared{maze}": 3, "rows_differ{maze}": 0}
