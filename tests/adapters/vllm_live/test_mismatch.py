"""vLLM's log-probabilities, through a bridge, compared with the learner's: equal when all is right, and
warned of after each planted fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import shmbridge
from shmbridge.consumers.learner.train.grpo_update import Learner, MismatchAlarm, Objective
from shmbridge.weights import WeightsWriter

TEMPERATURE = 0.7
LIMIT = 0.05  # the default of --mismatch-warn
GROUPS, ANSWERS, TOKENS = 4, 8, 24
PROMPTS = [[2, 7, 9, 12, 3], [5, 5, 6], [8, 20, 4, 4, 13, 9, 11], [25, 3]]


class Sampled:
    """An engine, a bridge and a learner with the same weights; samples go through the bridge."""

    def __init__(self, llm: Any, bridge: str, model: Any, producer: Any, consumer: Any, writer: Any) -> None:
        self.llm, self.bridge, self.model, self.writer = llm, bridge, model, writer
        self.learner = Learner(model, Objective(truncated="keep", entropy=0.0), lambda step: 3e-3)
        self.version = 0
        self.publish()
        self._producer, self._batches = (
            producer,
            consumer.batches(groups=GROUPS, layout="packed", prefetch=0, timeout_s=30.0),
        )
        self.warnings: list[str] = []
        self._alarm = MismatchAlarm(LIMIT, self.warnings.append)

    def publish(self) -> None:
        """Write the learner's weights and have the engine take them."""
        self.version += 1
        self.writer.publish(
            self.version, [(name, each.detach()) for name, each in self.model.named_parameters()]
        )
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"bridge": self.bridge, "version": self.version}})
        self.llm.finish_weight_update(str(self.version))
        self.llm.reset_prefix_cache()

    def step(
        self,
        change: Callable[[list[float]], list[float]] = list,
        *,
        temperature: float = TEMPERATURE,
        seed: int = 1,
    ) -> Any:
        """Sample, put, train on it up to the update; return the metrics."""
        from vllm import SamplingParams

        wanted = SamplingParams(
            n=ANSWERS,
            temperature=TEMPERATURE,
            top_p=1.0,
            max_tokens=TOKENS,
            logprobs=0,
            seed=seed,
            ignore_eos=True,
            detokenize=False,
        )
        for at, asked in enumerate(
            self.llm.generate([{"prompt_token_ids": each} for each in PROMPTS], wanted, use_tqdm=False)
        ):
            prompt = PROMPTS[at]
            answers = [list(each.token_ids) for each in asked.outputs]
            logprobs = [
                [each[token].logprob for each, token in zip(one.logprobs, one.token_ids, strict=True)]
                for one in asked.outputs
            ]
            group = {
                "tokens": [prompt + answer for answer in answers],
                "loss_mask": [[0] * len(prompt) + [1] * len(answer) for answer in answers],
                "inference_logprobs": [[1.0] * len(prompt) + change(row) for row in logprobs],
                "token_versions": [[-1] * len(prompt) + [self.version] * len(answer) for answer in answers],
                "temperature": [temperature] * ANSWERS,
                "score": [float(sum(token > 14 for token in answer)) for answer in answers],
            }
            self._producer.put(group, policy_version=self.version, timeout_s=10.0)
        batch = next(self._batches)
        metrics = self.learner.accumulate(batch, self.version)
        batch.release()
        return metrics | self._alarm.looked(metrics)


@pytest.fixture(scope="module")
def engine(make_llm: Callable[..., Any]) -> Iterator[Callable[[str], Any]]:
    """Call it with a `--logprobs-mode` for an engine in this process."""
    made: dict[str, Any] = {}

    def get(mode: str) -> Any:
        if mode not in made:
            made[mode] = make_llm(logprobs_mode=mode)
        return made[mode]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield get


@pytest.fixture
def sampled(
    engine: Any, bridge: str, make_model: Callable[..., Any], request: pytest.FixtureRequest
) -> Iterator[Sampled]:
    """All of it, with the log-probabilities of the distribution that is sampled from unless a test says
    otherwise.
    """
    llm = engine(getattr(request, "param", "processed_logprobs"))
    with (
        shmbridge.Producer(bridge, env_name="vllm", lane_bytes="4M") as producer,
        shmbridge.Consumer(bridge) as consumer,
        WeightsWriter(bridge) as writer,
    ):
        yield Sampled(llm, bridge, make_model(3), producer, consumer, writer)
    llm.init_weight_transfer_engine({"init_info": {}})


def test_over_fresh_tokens_the_sampler_is_the_policy(sampled, record_property, capsys):
    """The number that proves the whole way: engine, record, gathering, forward pass."""
    for seed in (1, 2):
        metrics = sampled.step(seed=seed)
        assert metrics["tokens_fresh"] == metrics["trained_tokens"] == GROUPS * ANSWERS * TOKENS
        assert metrics["logprob_diff_mean_fresh"] < 1e-3
        assert metrics["mismatch_kl_fresh"] < 1e-5
        said = {
            name: metrics[name]
            for name in ("logprob_diff_mean_fresh", "logprob_diff_max_fresh", "mismatch_kl_fresh")
        }
        record_property("mismatch", said)
        with capsys.disabled():
            print(f"\nfresh tokens, T = {TEMPERATURE}, float32, {metrics['tokens_fresh']:.0f} tokens: {said}")
        sampled.learner.apply()
        sampled.publish()
    assert sampled.warnings == []


@pytest.mark.parametrize("sampled", ["raw_logprobs"], indirect=True)
def test_raw_log_probabilities_are_warned_of(sampled):
    assert sampled.step()["logprob_diff_mean_fresh"] > LIMIT
    assert len(sampled.warnings) == 1


def test_a_wrong_temperature_is_warned_of(sampled):
    assert sampled.step(temperature=1.0)["logprob_diff_mean_fresh"] > LIMIT
    assert len(sampled.warnings) == 1


def test_log_probabilities_shifted_by_one_are_warned_of(sampled):
    metrics = sampled.step(lambda row: [*row[1:], row[0]])
    assert metrics["logprob_diff_mean_fresh"] > LIMIT
    assert metrics["ratio_mean"] > 0.5  # which does not show the fault
    assert len(sampled.warnings) == 1


def test_old_weights_stamped_as_the_newest_are_warned_of(sampled):
    """The learner has made a step, the engine has not loaded it, but its answers name the new version."""
    sampled.step()
    sampled.learner.apply()
    sampled.version += 1
    assert sampled.step(seed=2)["logprob_diff_mean_fresh"] > LIMIT
    assert len(sampled.warnings) == 1
    sampled.publish()
    assert sampled.step(seed=3)["logprob_diff_mean_fresh"] < 1e-3  # now the engine has its weights
    assert len(sampled.warnings) == 1
