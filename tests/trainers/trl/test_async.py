"""The real AsyncGRPOTrainer, its queue data set, planners and packing on a bridge.

On a CPU only its attention kernel and the name of its GPU are replaced: cpu_attention.py.
"""

import queue
from collections import defaultdict
from importlib import metadata

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_grpo_trainer import RolloutQueueDataset

from shmbridge.consumers.trl import (
    NoLogprobs,
    NoProducers,
    PerTokenAdvantages,
    ShmRolloutWorker,
    ShmWeightTransfer,
)
from shmbridge.testing.fixtures import loss_matrix
from shmbridge.weights import WeightsReader
from tests.trainers.contract import Seen, assert_contract, fully_recorded, without
from tests.trainers.trl.cpu_attention import on_cpu
from tests.trainers.trl.target_groups import TARGET, group


class NoTransfer:
    """A weight transfer that moves nothing."""

    def init_weight_transfer(self):
        pass

    pause = resume = destroy = init_weight_transfer

    def send_weights(self, iterator):
        for _ in iterator:
            pass


class Captured(AsyncGRPOTrainer):
    """Keeps what TRL's own loss is called with."""

    def compute_loss(self, model, inputs, **more):
        loss = super().compute_loss(model, inputs, **more)
        kept = {name: value.clone() for name, value in inputs.items()}
        clip = (1 - self.epsilon_low, 1 + self.epsilon_high)
        self.seen = [*getattr(self, "seen", []), kept | {"loss": loss.item(), "clip": clip}]
        return loss


@pytest.fixture
def make_worker(bridge, tmp_path):
    """Makes workers of the bridge; stopped at the end."""
    made = []

    def make(**options) -> ShmRolloutWorker:
        made.append(ShmRolloutWorker(bridge, run_dir=tmp_path / "run", **options))
        return made[-1]

    yield make
    for worker in made:
        worker.stop()


@pytest.fixture
def start(tiny, tmp_path, monkeypatch):
    """Makes the real trainer for a worker."""
    on_cpu(monkeypatch)

    def make(worker, trainer=Captured, weight_transfer=None, **changed):
        given = {
            "output_dir": str(tmp_path / "out"), "use_cpu": True, "bf16": False, "dtype": "float32",
            "seed": 3, "report_to": [], "save_strategy": "no", "logging_steps": 1,
            "disable_tqdm": True, "max_steps": 1,
            "learning_rate": 1e-2, "lr_scheduler_type": "constant", "warmup_steps": 0, "num_generations": 4,
            "gradient_accumulation_steps": 1, "per_device_train_batch_size": 4, "token_budget": 0,
            "model_init_kwargs": {}, "heartbeat_stale_after_s": 0.0,
        }  # fmt: skip
        return trainer(
            tiny,
            args=AsyncGRPOConfig(**given | changed),
            train_dataset=Dataset.from_dict({"prompt": [""]}),
            rollout_worker=worker,
            weight_transfer=weight_transfer or NoTransfer(),
        )

    return make


def rows_of(inputs):
    """The rows of TRL's packed batch, a trie of the samples in pre-order.

    Its loss has one term per trained token: the position that predicts it, its advantage and its old
    log-probability. A row that was split into samples is one path of the trie, with the terms of all of them.
    """
    real = inputs["attention_mask"][0].bool()
    ids, depths = inputs["input_ids"][0][real].tolist(), inputs["position_ids"][0][real].tolist()
    labels = inputs["shift_labels"][0][real].tolist()
    paths, leaves, terms, stack = [], [], defaultdict(list), []
    for at, (token, depth) in enumerate(zip(ids, depths, strict=True)):
        stack[depth:] = [token]
        paths.append(tuple(stack))
        if at + 1 == len(ids) or depths[at + 1] <= depth:
            leaves.append(paths[-1])
    names = ("token_index", "advantages", "old_log_probs")
    for at, *term in zip(*(inputs[name][0].tolist() for name in names), strict=True):
        if at >= 0:
            terms[(*paths[at], labels[at])].append(term)
    for leaf in leaves:
        of_tokens = [terms.pop(leaf[: at + 1], []) for at in range(len(leaf))]
        values = np.array([term[0] if term else (0.0, 0.0) for term in of_tokens], np.float32)
        row = Seen(np.array(leaf), np.array([len(term) > 0 for term in of_tokens]), *values.T)
        yield from [row] * max(1, *map(len, of_tokens))  # a token with two terms is a row that comes twice
    assert not terms, "of tokens that were not forwarded"


@pytest.fixture
def groups():
    """Those that the async trainer takes: it has no log-probabilities but the sampler's."""
    return fully_recorded(loss_matrix())


@pytest.fixture
def rows(groups):
    """The rows in which something is trained."""
    return [row for each in without(groups, "evaluation") for row in each.rows if row.trained.any()]


@pytest.fixture
def packed(make_worker, start, groups, rows, make_producer):
    """What the loss of the real trainer got of these groups, and the worker's counters."""
    samples = sum(len(np.unique(row.advantages[row.trained])) for row in rows)
    worker = make_worker()
    # TRL fetches one micro-batch ahead: a second copy of the groups is that one
    trainer = start(worker, per_device_train_batch_size=samples, max_staleness=9)
    producer = make_producer(lane_bytes="1M")
    for each in groups * 2:
        each.put(producer)
    stats = {}

    class Last(TrainerCallback):
        def on_step_end(self, *_, **__):
            stats.update(worker.stats())

    trainer.add_callback(Last())
    trainer.train()
    return trainer.seen[0], stats


def test_the_loss_gets_what_was_put_of_split_rows(packed, groups, rows):
    inputs, stats = packed
    assert_contract("TRL, `AsyncGRPOTrainer`", metadata.version("trl"), "", groups, rows_of(inputs))
    assert stats["trl_rows_split_total"] == 2 * sum(
        len(np.unique(row.advantages[row.trained])) > 1 for row in rows
    )
    assert stats["trl_rows_untrained_total"] == 2  # the row of a prompt only
    # every sample of a row shares its tokens: they are forwarded once
    assert int(inputs["global_n_forward_tokens"][0]) < 2 * sum(len(row.tokens) for row in rows)


def test_its_numbers_are_those_of_the_loss_by_definition(packed, tiny, rows):
    """The stand-in for the kernel is right: packed log-probabilities are those of each row alone."""
    from transformers import AutoModelForCausalLM

    inputs, _ = packed
    model = AutoModelForCausalLM.from_pretrained(tiny)
    loss, count = 0.0, 0
    for row in rows:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(row.tokens[None].astype(np.int64))).logits[0].float()
        logprobs = torch.log_softmax(logits, -1)
        for at in np.flatnonzero(row.trained):
            ratio = float(torch.exp(logprobs[at - 1, int(row.tokens[at])] - row.logprobs[at]))
            advantage = float(row.advantages[at])
            loss -= min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
            count += 1
    assert count == int(inputs["global_n_tokens"][0])
    assert inputs["loss"] == pytest.approx(loss / count, rel=1e-4)


def test_samples_are_views_and_the_queue_is_a_queue(make_worker, make_producer, known):
    worker = make_worker(per_token="mean")
    worker.start()
    samples = worker.rollout_buffer
    assert samples.empty()
    with pytest.raises(queue.Empty):
        samples.get(timeout=0.01)
    with pytest.raises(queue.Empty):
        samples.get_nowait()
    known[0].put(make_producer(lane_bytes="1M"))
    first = samples.get(timeout=5)
    assert samples.qsize() == 3
    batch = samples._held[0].step.batch
    assert np.shares_memory(first.input_ids, batch.tokens)
    row = known[0].rows[0]
    np.testing.assert_array_equal(first.input_ids, row.tokens)
    np.testing.assert_array_equal(first.completion_mask, row.trained)
    np.testing.assert_array_equal(first.old_log_probs, row.logprobs)
    assert first.metrics == {"reward": row.score}
    samples.put_nowait("another")
    assert [samples.get(timeout=0) for _ in range(4)][-1] == "another"
    assert worker.stats()["trl_batches_held"] == 1


def test_trl_drops_what_is_stale_and_counts_it(make_worker, make_producer, known):
    worker = make_worker(per_token="mean")
    for version in range(1, 5):
        worker.update_model_version(version)
    producer = make_producer(lane_bytes="1M")
    known[4].put(producer)  # versions 2 to 4
    known[0].put(producer)  # version 4
    metrics = defaultdict(list)
    stream = RolloutQueueDataset(
        worker.rollout_buffer, lambda: worker.model_version, worker.check_health, 60, metrics, max_staleness=1
    )
    got = [item for _, item in zip(range(4), stream, strict=False)]
    assert [item["group_id"] for item in got] == [1] * 4
    assert sum(metrics["sample/dropped_stale_total"]) == 4
    assert metrics["sample/staleness_max"] == [0] * 4
    assert all(0 <= waited < 60 for waited in metrics["sample/time_in_queue_s"])
    for version in range(5, 8):
        worker.update_model_version(version)
    assert worker.stats()["released_total"] == 2  # also what TRL dropped


def test_the_bridge_can_drop_whole_groups(make_worker, make_producer, known):
    worker = make_worker(per_token="mean", max_staleness=1)
    for version in range(1, 5):
        worker.update_model_version(version)
    producer = make_producer(lane_bytes="1M")
    known[4].put(producer)
    known[0].put(producer)
    assert worker.rollout_buffer.get(timeout=5).model_version == 4
    assert worker.stats()["discarded_total{stale}"] == 1


def test_several_advantages_are_refused_or_averaged_only_if_asked(make_worker, make_producer, known):
    producer = make_producer(lane_bytes="1M")
    known[0].put(producer)
    for options, words, aside in (
        ({"per_token": "refuse"}, "per_token='split'", 0),
        ({"most_parts": 2}, "most_parts=", 1),  # the second time it is set aside
    ):
        worker = make_worker(**options)
        with pytest.raises(PerTokenAdvantages, match=words):
            worker.rollout_buffer.get(timeout=5)
        worker.stop()
        stats = worker.stats()
        assert (stats["released_total"], stats.get("feed_groups_set_aside_total", 0)) == (aside, aside)
    known[0].put(producer)
    worker = make_worker(per_token="mean")
    row = known[0].rows[0]
    assert worker.rollout_buffer.get(timeout=5).advantage == pytest.approx(row.advantages[row.trained].mean())
    assert worker.stats()["trl_rows_averaged_total"] == 4


def test_rows_without_logprobs_are_refused_or_skipped(make_worker, make_producer, known):
    producer = make_producer(lane_bytes="1M")
    known[2].put(producer)
    refusing = make_worker()
    with pytest.raises(NoLogprobs, match="inference_logprobs"):
        refusing.rollout_buffer.get(timeout=5)
    refusing.stop()
    skipping = make_worker(unscored="skip", per_token="mean")
    known[0].put(producer)
    assert skipping.rollout_buffer.get(timeout=5).metrics["reward"] == known[0].rows[0].score
    stats = skipping.stats()
    assert (stats["trl_rows_without_logprobs_total"], stats["released_total"]) == (4, 1)


def test_health_is_about_producers(make_worker, make_producer, known):
    worker = make_worker()
    worker.start()
    with pytest.raises(NoProducers, match="start the environments"):
        worker.check_health(0.0)
    worker.check_health(60.0)
    producer = make_producer(lane_bytes="1M")
    known[0].put(producer)
    worker.rollout_buffer.get(timeout=5)
    worker.check_health(0.0)  # it lives, and is slow


def test_unknown_words_are_refused(bridge):
    for options in ({"per_token": "sum"}, {"unscored": "drop"}, {"hold": "step"}):
        with pytest.raises(ValueError, match="is none of"):
            ShmRolloutWorker(bridge, **options)


class AtEnds(TrainerCallback):
    """Calls a function at the end of each step, after TRL's own weight sync."""

    def __init__(self, call) -> None:
        self.call, self.seen = call, []

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append(self.call(state.global_step))


def with_logprobs(model, made: dict) -> dict:
    """The group, with the log-probabilities that the model gives its tokens now."""
    tokens = torch.tensor(np.stack(made["tokens"]))
    with torch.no_grad():
        logits = model(input_ids=tokens).logits.float()
    logprobs = torch.log_softmax(logits[:, :-1], -1).gather(2, tokens[:, 1:, None])[..., 0]
    return made | {"inference_logprobs": [[1.0, *row] for row in logprobs.tolist()]}


def test_it_trains_releases_what_was_trained_and_sends_weights(make_worker, start, make_producer, bridge):
    """One group a step; the model learns TARGET; versions of weights and of the policy are the same."""
    worker = make_worker()
    trainer = start(
        worker, weight_transfer=ShmWeightTransfer(worker), max_steps=8, per_device_train_batch_size=8
    )
    producer = make_producer(lane_bytes="1M")
    released, versions = [], []

    def target() -> float:
        with torch.no_grad():
            logits = trainer.model(input_ids=torch.tensor([[2, 3, 4]])).logits[0, -1].float()
        return float(torch.log_softmax(logits, -1)[TARGET])

    def put(step: int) -> None:
        producer.put(with_logprobs(trainer.model, group(step)), policy_version=producer.policy_version)

    # TRL's model wants its packing's own arguments; a plain forward pass needs plain attention
    trainer.model.set_attn_implementation("eager")
    put(0)
    put(1)
    before = target()
    trainer.model.set_attn_implementation("tree_fa3")
    with WeightsReader(bridge) as reader:

        def after(step: int) -> None:
            version, tensors = reader.copy()
            own = dict(trainer.model.named_parameters())
            assert all(np.array_equal(tensors[name], own[name].detach().numpy()) for name in tensors)
            versions.append((version, producer.policy_version))
            released.append(worker.stats()["released_total"])
            trainer.model.set_attn_implementation("eager")
            put(step + 1)
            trainer.model.set_attn_implementation("tree_fa3")

        trainer.add_callback(AtEnds(after))
        trainer.train()
    trainer.model.set_attn_implementation("eager")
    print(f"log p(target) {before:.2f} -> {target():.2f}")
    assert target() > before + 0.5
    assert versions == [(step + 1, step + 1) for step in range(1, 9)]  # 1 is TRL's, before the first step
    # the group of step k is trained at its end; released two or three ends later, never before
    assert released == [0, 0, 2, 3, 4, 5, 6, 7]


def test_versions_go_on_above_those_of_an_earlier_run(make_worker, make_producer, bridge):
    versions = []
    for _ in range(2):
        worker = make_worker(per_token="mean", hold="none", start="from-scratch")
        transfer = ShmWeightTransfer(worker)
        transfer.init_weight_transfer()
        for number in (1, 2):  # as TRL calls them
            transfer.pause()
            transfer.send_weights(iter([("w", torch.full((2,), float(number)))]))
            transfer.resume()
            worker.update_model_version(number)
            with WeightsReader(bridge) as reader:
                versions.append(reader.copy()[0])
            assert versions[-1] == worker.policy_version
        worker.start()
        producer = make_producer(lane_bytes="1M")
        logprobs = [[0.0] * 3 + [-1.0] * 4] * 4
        producer.put(group(0, inference_logprobs=logprobs), policy_version=producer.policy_version)
        samples = [worker.rollout_buffer.get(timeout=5) for _ in range(4)]
        assert [each.model_version for each in samples] == [2] * 4  # TRL's number, not the bridge's
        assert worker.stats()["held"] == 0  # hold="none"
        transfer.destroy()
        worker.stop()
    assert versions == [1, 2, 3, 4]
