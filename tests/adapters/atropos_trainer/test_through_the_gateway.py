"""Atropos' own trainer, unchanged but for the vLLM server, polls a gateway: registration, batches, steps."""

import numpy as np
import pytest
from example_trainer import trainers, training
from gateway_clients import GatewayProcess
from legacy_run import config_of

import shmbridge


@pytest.fixture
def gateway(bridge, tmp_path):
    gateway = GatewayProcess(tmp_path / "gateway.log", "--bridge", bridge, "--lane-bytes", "1M")
    yield gateway
    gateway.end()


def test_upstreams_loop_trains_from_a_gateway(gateway, bridge, tiny, tmp_path, without_vllm, monkeypatch):
    seen, inner = [], training.compute_grpo_loss

    def loss(model, tokens, labels, advantages, *others, **named):
        seen.append((tokens.tolist(), labels.tolist(), advantages.tolist()))
        return inner(model, tokens, labels, advantages, *others, **named)

    monkeypatch.setattr(training, "compute_grpo_loss", loss)
    config = config_of(str(tiny), str(tmp_path), 3, 4, size=4)
    config.atropos_url = gateway.url
    scores = np.array([0.0, 1.0, 2.0, 3.0])
    with shmbridge.Producer(bridge, lane_bytes="1M") as producer:
        for step in range(3):
            producer.put(
                {
                    "tokens": [[6, 7 + step, 10 + row] for row in range(4)],
                    "masks": [[-100, -100, 10 + row] for row in range(4)],
                    "scores": scores.tolist(),
                    "inference_logprobs": [[1.0, 1.0, -2.0]] * 4,
                }
            )
        trainers.train_legacy(config)
    assert len(seen) == 3
    for step, (tokens, labels, advantages) in enumerate(seen):
        assert [row[:3] for row in tokens] == [[6, 7 + step, 10 + row] for row in range(4)]
        assert [row[:2] for row in labels] == [[-100, 10 + row] for row in range(4)]
        np.testing.assert_allclose(np.ravel(advantages), (scores - 1.5) / scores.std(), rtol=1e-6)
    assert gateway.get("/status").json()["current_step"] == 3
