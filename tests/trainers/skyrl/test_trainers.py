"""SkyRL's trainers over a bridge: training raises the right log-probability, every step keeps its advantages,
the simulated asynchronous loop runs, weights and versions go back.
"""

import asyncio
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

import shmbridge
from shmbridge.testing import wait_until
from shmbridge.weights import WeightsReader


@pytest.fixture
def environment(example, bridge):
    """Puts the example's groups until the test ends."""
    over = threading.Event()
    thread = threading.Thread(target=example._play, args=(bridge, over))
    thread.start()
    yield
    over.set()
    thread.join()
    shmbridge.Consumer(bridge, resume="discard").close()


def test_the_rewarded_token_becomes_likely(example, tiny, bridge, environment):
    cfg = example.config(tiny, bridge, 4, "trainer.max_training_steps=6")
    with example.experiment(cfg) as trainer, WeightsReader(bridge) as weights:
        worker = trainer.dispatch.worker
        curve = [example.target_logprob(worker)]
        step = worker.optim_step
        worker.optim_step = lambda: (step(), curve.append(example.target_logprob(worker)))[0]
        asyncio.run(trainer.train())
        assert len(curve) == 7
        assert curve[-1] > curve[0] + 2.0
        consumer = trainer.generator.feed.consumer
        assert trainer.generator.held == 0
        assert consumer.policy_version == weights.version == 6
        assert consumer.current_step == 6
        with weights.lease() as lease:
            state = worker.model.model.state_dict()
            assert set(lease.tensors) == set(state)
            for name, tensor in lease.tensors.items():
                np.testing.assert_array_equal(tensor, state[name].numpy())


@pytest.mark.parametrize("start", ["from-scratch", "from-bridge"])
def test_a_trained_bridge_is_refused_or_gone_on_with(
    example, tiny, bridge, environment, tmp_path, monkeypatch, start
):
    """After a trainer that ended in order; its environments and engines have the trained weights."""
    from shmbridge.consumers.feed import BridgeAhead

    monkeypatch.chdir(tmp_path)
    one_step = "trainer.max_training_steps=1", f"trainer.ckpt_path={tmp_path}"
    with example.experiment(example.config(tiny, bridge, 4, *one_step)) as trainer:
        base = example.target_logprob(trainer.dispatch.worker)
        asyncio.run(trainer.train())
        trained = example.target_logprob(trainer.dispatch.worker)
    with (
        pytest.raises(BridgeAhead, match="trained up to version 1"),
        example.experiment(example.config(tiny, bridge, 4, *one_step)) as trainer,
    ):
        asyncio.run(trainer.train())
    cfg = example.config(tiny, bridge, 4, *one_step, f"bridge.start={start}")
    with example.experiment(cfg) as trainer, WeightsReader(bridge) as weights:
        assert weights.version == 1  # the one that was refused has published nothing
        begins = example.target_logprob(trainer.dispatch.worker)
        assert begins == pytest.approx(base if start == "from-scratch" else trained, abs=1e-5)
        asyncio.run(trainer.train())
        assert trainer.generator.feed.consumer.policy_version == weights.version == 3


def batch_of_steps():
    """SkyRL's tensors of two episodes, of two rows and of one; no two values are equal."""
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch

    values = torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [0.0, 0.0, 7.0]])
    data = TrainingInputBatch(
        {
            "sequences": torch.ones(3, 5, dtype=torch.long),
            "rewards": values,
            "response_mask": torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 1]]),
            "loss_mask": torch.ones(3, 3),
            "values": None,
        }
    )
    data.metadata = {"uids": ["0", "0", "1"], "is_last_step": [False, True, True], "avg_response_length": 2.0}
    return data, values


def test_every_step_keeps_its_own_advantages(example, tiny, bridge):
    from skyrl.train.trainer import RayPPOTrainer

    cfg = example.config(tiny, bridge, 2, "generator.step_wise_trajectories=true")
    with example.experiment(cfg) as trainer:
        data, values = batch_of_steps()
        torch.testing.assert_close(
            trainer.compute_advantages_and_returns(data)["advantages"], values, rtol=0, atol=0
        )
        assert trainer.all_metrics["loss/avg_raw_advantages"] == pytest.approx(22 / 6)
        # SkyRL's own way gives the first row the values of the last one
        data, values = batch_of_steps()
        stock = RayPPOTrainer.compute_advantages_and_returns(trainer, data)["advantages"]
        assert stock[0].tolist() == [0.0, 4.0, 5.0]


def test_a_step_wise_batch_goes_through_the_whole_trainer(example, tiny, bridge, producer):
    random = np.random.default_rng(3)
    tokens = [random.integers(6, 28, 8).astype(np.int32) for _ in range(6)]
    mask = np.array([0, 0, 0, 1, 1, 0, 1, 1], np.uint8)
    for _ in range(2):
        producer.put(
            {
                "tokens": tokens,
                "prompt_length": [3] * 6,
                "loss_mask": [mask] * 6,
                "advantages": [mask * random.normal(size=8).astype(np.float32) for _ in range(6)],
                "repetition_id": [0, 0, 1, 2, 2, 3],
                "row_index": [0, 1, 0, 0, 1, 0],
                "is_last": [False, True, True, False, True, True],
            }
        )
    cfg = example.config(
        tiny, bridge, 2, "trainer.max_training_steps=1", "generator.step_wise_trajectories=true"
    )
    with example.experiment(cfg) as trainer:
        asyncio.run(trainer.train())
        assert trainer.generator.held == 0
        assert trainer.generator.stats()["groups"] == 2
        wait_until(lambda: trainer.generator.feed.stats()["held"] == 0)


def test_skyrls_experiment_runs_its_simulated_asynchronous_trainer(
    example, tiny, bridge, environment, tmp_path
):
    example.without_cuda()
    from shmbridge.consumers.skyrl.entrypoint import ShmExp

    cfg = example.config(
        tiny,
        bridge,
        2,
        "bridge.steps=4",
        "trainer.algorithm.policy_loss_type=rollout_is",
        "trainer.fully_async.enabled=true",
        "trainer.fully_async.max_staleness_steps=1",
        "trainer.fully_async.num_parallel_generation_workers=4",
        "trainer.fully_async.simulate_training=true",
        "trainer.fully_async.simulate_training_step_seconds=0.01",
        f"trainer.export_path={tmp_path / 'export'}",
        f"trainer.ckpt_path={tmp_path / 'checkpoints'}",
    )
    logged = []
    with ShmExp(cfg) as exp:
        tracker = exp.get_tracker()
        tracker.log = lambda data, **_: logged.append(data)
        exp.get_tracker = lambda: tracker
        exp.run()
        assert type(exp.trainer).__name__ == "ShmTrainerSim"
        assert exp.trainer.global_step == 5
        assert exp.trainer.generator.held == 0
        assert exp.trainer.generator.stats()["groups"] == 8
        consumer = exp.feed.consumer
        assert consumer.policy_version == 4  # one at the beginning, one after each of four steps
        assert consumer.current_step == 4
    behind = [each["shmbridge/staleness_trained_max"] for each in logged if "async/staleness_max" in each]
    assert len(behind) == 4
    assert max(behind) <= 2  # one in the bridge, one in SkyRL's buffer


def test_an_engine_that_follows_the_bridge_has_skyrls_weights(example, tiny, bridge, environment, tmp_path):
    from shmbridge.consumers.engines.fleet import engine_of

    server = subprocess.Popen(
        [sys.executable, "-m", "shmbridge.consumers.policy_server", "--bridge", bridge,
         "--model", str(tiny), "--port", "0"],
        stdout=subprocess.PIPE, stderr=(tmp_path / "server.log").open("w"), text=True,
    )  # fmt: skip
    try:
        line = server.stdout.readline()
        assert "http://" in line, (tmp_path / "server.log").read_text()
        engine = engine_of("http://" + line.split("http://")[1].split()[0])
        cfg = example.config(tiny, bridge, 2, "trainer.max_training_steps=2")
        with example.experiment(cfg) as trainer:
            asyncio.run(trainer.train())
            assert trainer.generator.feed.consumer.policy_version == 2
        wait_until(lambda: engine.version() == 2, 30.0)
        engine.close()
    finally:
        server.terminate()
        server.wait(30)


def test_the_asynchronous_trainer_trains(example, tiny, bridge, environment):
    cfg = example.config(
        tiny,
        bridge,
        2,
        "bridge.steps=5",
        "bridge.max_staleness=1",
        "trainer.algorithm.policy_loss_type=rollout_is",
        "trainer.fully_async.enabled=true",
        "trainer.fully_async.max_staleness_steps=0",
        "trainer.fully_async.num_parallel_generation_workers=2",
    )
    logged = []
    with example.experiment(cfg) as trainer:
        assert type(trainer).__name__ == "ShmAsyncTrainer"
        trainer.tracker.log = lambda data, **_: logged.append(data)
        before = example.target_logprob(trainer.dispatch.worker)
        asyncio.run(trainer.train())
        assert example.target_logprob(trainer.dispatch.worker) > before + 0.5
        assert trainer.generator.held == 0
        assert trainer.generator.feed.consumer.policy_version == 5
    behind = [each["shmbridge/staleness_trained_max"] for each in logged if "async/staleness_max" in each]
    assert len(behind) == 5
    assert max(behind) <= 1  # SkyRL keeps no group for later: the bridge's limit is that of training
