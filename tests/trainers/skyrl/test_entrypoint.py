"""SkyRL's own program over a bridge: command line, Ray, simulated trainer; which settings are refused."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import shmbridge

HERE = Path(__file__).parent
# Python 3.11 needs the room before SkyRL; from 3.12 on it is `python -m skyrl.train.entrypoints.main_base`.
PROGRAM = "import shmbridge.consumers.skyrl; from skyrl.train.entrypoints.main_base import main; main()"

ASYNC = [
    "trainer.algorithm.policy_loss_type=rollout_is",
    "trainer.fully_async.enabled=true",
    "trainer.fully_async.max_staleness_steps=1",
    "trainer.fully_async.num_parallel_generation_workers=4",
    "trainer.fully_async.simulate_training=true",
    "trainer.fully_async.simulate_training_step_seconds=0.01",
]


@pytest.mark.long  # Ray starts, and imports SkyRL twice
@pytest.mark.timeout(300)
def test_skyrls_program_trains_from_a_bridge_under_ray(example, tiny, bridge, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(
        "shmbridge.consumers.skyrl.config.ShmTrainConfig.from_cli_overrides", lambda words: said.extend(words)
    )
    example.config(tiny, bridge, 2, "bridge.steps=3", *ASYNC)
    words = [
        *said,
        "trainer.override_entrypoint=shmbridge.consumers.skyrl.entrypoint",
        *(f"trainer.{name}={tmp_path / name}" for name in ("export_path", "ckpt_path", "log_path")),
    ]
    over = threading.Event()
    environment = threading.Thread(target=example._play, args=(bridge, over))
    environment.start()
    path = os.pathsep.join([str(HERE / "stand_ins"), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, *words],
            env=os.environ | {"PYTHONPATH": path, "RAY_DEDUP_LOGS": "0"},
            capture_output=True, text=True, timeout=280,
        )  # fmt: skip
    finally:
        over.set()
        environment.join()
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "Training done!" in ended.stdout + ended.stderr
    with shmbridge.Consumer(bridge, resume="discard") as following:
        assert following.policy_version == 3


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("bridge.release_at=never", "none of step, checkpoint -> bridge.release_at=step"),
        ("bridge.release_at=checkpoint", "ckpt_interval=-1 saves none -> trainer.ckpt_interval=1"),
        ("bridge.unfit=drop", "none of refuse, leave_out -> bridge.unfit=refuse"),
        ("bridge.start=anew", "none of from-bridge, from-scratch"),
        ("bridge.set_aside_after=-1", "at least 0 -> bridge.set_aside_after=0"),
        ("bridge.match=foo", "none of arrival, instance -> bridge.match=arrival"),
        ("bridge.long_groups=cut", "none of refuse, trim -> bridge.long_groups=refuse"),
        ("bridge.name=a/b", "a/b"),
        ("bridge.timeout_s=soon", "'soon' is no number of seconds"),
        ("bridge.max_staleness=-1", "at least 0 -> bridge.max_staleness=0"),
        ("bridge.steps=0", "at least 1 -> bridge.steps=1"),
        ("bridge.engines=http://127.0.0.1:1", r"-> bridge.engines=\[http://127.0.0.1:1\]"),
    ],
)
def test_values_of_the_bridge_that_mean_nothing(example, tiny, setting, says):
    from shmbridge.consumers.skyrl.config import ConfigDoesNotFit, check

    with pytest.raises(ConfigDoesNotFit, match=says):
        check(example.config(tiny, "run1", 2, setting))


@pytest.mark.parametrize("choice", [{"match": "foo"}, {"long_groups": "cut"}])
def test_a_choice_that_is_none_is_refused_by_the_generator_too(make_generator, choice):
    with pytest.raises(shmbridge.ShmBridgeError, match=next(iter(choice.values()))):
        make_generator(**choice)


@pytest.mark.parametrize("words", [["bridge.nam=run1"], ["bridge.name=run1"]])
def test_a_users_mistake_ends_the_program_with_a_sentence(example, words, monkeypatch, capsys):
    """A wrong key; and what SkyRL sets by default, which does not go with a bridge."""
    example.without_cuda()
    from shmbridge.consumers.skyrl import entrypoint

    monkeypatch.setattr(sys, "argv", ["skyrl", *words])
    with pytest.raises(
        SystemExit, match=r"^error: .*(Invalid fields \{'nam'\}|advantage_estimator=shmbridge)"
    ):
        entrypoint.main()


def test_a_mistake_that_training_finds_is_a_sentence_too(example, tiny, monkeypatch, bridge, consumer):
    """A second trainer on the bridge: Ray would show the task's traceback around it."""
    example.without_cuda()
    import ray

    from shmbridge.consumers.skyrl import entrypoint

    cfg = example.config(tiny, bridge, 2)
    monkeypatch.setattr(entrypoint.ShmTrainConfig, "from_cli_overrides", lambda words: cfg)
    for name in ("validate_cfg", "initialize_ray"):
        monkeypatch.setattr(entrypoint, name, lambda cfg: None)

    def get(task):
        try:
            entrypoint.train(cfg)
        except Exception as error:
            raise ray.exceptions.RayTaskError("train", "a long traceback", error) from None

    monkeypatch.setattr(entrypoint.ray, "get", get)
    monkeypatch.setattr(
        entrypoint.ray, "remote", lambda **_: lambda call: SimpleNamespace(remote=lambda cfg: None)
    )
    with pytest.raises(SystemExit, match=rf"^error: \[SB401\] .*{os.getpid()}"):
        entrypoint.main()


def test_the_staleness_limit_and_the_need_of_log_probabilities(example, tiny):
    from shmbridge.consumers.skyrl.config import max_staleness, needs_logprobs

    plain = example.config(tiny, "run1", 2)
    assert max_staleness(plain) is None
    assert not needs_logprobs(plain)
    asynchronous = example.config(tiny, "run1", 2, *ASYNC)
    assert max_staleness(asynchronous) == 1
    assert needs_logprobs(asynchronous)
    assert max_staleness(example.config(tiny, "run1", 2, *ASYNC, "bridge.max_staleness=3")) == 3
    corrected = "trainer.algorithm.off_policy_correction.tis_ratio_type=token"
    assert needs_logprobs(example.config(tiny, "run1", 2, corrected))


def test_the_workers_of_skyrl_keep_their_code_and_send_into_the_bridge(example):
    example.without_cuda()
    from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase

    from shmbridge.consumers.skyrl.weights import BridgeWeights, with_bridge_weights

    bases = with_bridge_weights(FSDPPolicyWorkerBase).__mro__
    names = [base.__name__ for base in bases if "init_weight_sync_state" in vars(base)]
    assert names == ["FSDPPolicyWorkerBase", "BridgeWeights", "Worker"]
    assert bases.index(FSDPPolicyWorkerBase) < bases.index(BridgeWeights)


def test_what_the_client_refuses_and_what_ray_copies_of_it(bridge, tmp_path):
    import asyncio
    import pickle

    from shmbridge.consumers.feed import Feed
    from shmbridge.consumers.skyrl.weights import SampledElsewhere, ShmInferenceClient

    with Feed(bridge, run_dir=tmp_path) as feed:
        feed.begin_run(7)
        client = ShmInferenceClient(feed, bridge, "tiny", ["http://127.0.0.1:1"])
        there = pickle.loads(pickle.dumps(client))
        assert (there.bridge, there.engines) == (bridge, ("http://127.0.0.1:1",))
        assert there.weight_version == -1
        with pytest.raises(SampledElsewhere, match=r"generate\(\)"):
            asyncio.run(client.generate({}))
        client.increment_weight_version()  # no weights in the segment: the next number
        assert client.weight_version == feed.consumer.policy_version == 8
        asyncio.run(client.teardown())
