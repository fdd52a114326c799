"""AtroposGemEnv in Ray workers, two environments each: errors come out of the worker, rows never do."""

import os
from pathlib import Path

import pytest

ENV = f"{Path(__file__).parent / 'envs' / 'atropos_envs.py'}:GroupEnv"
ROOT = Path(__file__).parents[3]


class Worker:
    """Two environments of one worker; the second may be one that breaks."""

    def __init__(self, tokenizer: str, breaks: bool) -> None:
        import signal

        import gem

        before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        broken = {"environment": ENV.replace("GroupEnv", "ChatEnv"), "config": {"breaks_in_turn": 1}}
        one_turn = {"environment": ENV, "config": {"turns": 1}}
        self.envs = [
            gem.make("atropos", environment=ENV, tokenizer=tokenizer, config={"turns": 2, "score": -1.0}),
            gem.make("atropos", **(broken if breaks else one_turn), tokenizer=tokenizer),
        ]
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before

    def play(self, which: int, turns: int) -> list[tuple[float, bool, list[list[float]] | None]]:
        from shmbridge.producers.gem import Action

        env = self.envs[which]
        env.reset(seed=1)
        steps = [env.step(Action("a", [64, 256], [-0.5, -0.25])) for _ in range(turns)]
        return [(step[1], step[2], step[4].get("group", {}).get("inference_logprobs")) for step in steps]

    def close(self) -> None:
        for env in self.envs:
            env.close()


@pytest.fixture(scope="module")
def cluster():
    import ray

    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80_000_000,
        runtime_env={
            "env_vars": {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
            "worker_process_setup_hook": "shmbridge.producers.gem.register",
        },
    )
    yield ray
    ray.shutdown()


@pytest.mark.timeout(300)
def test_ray_workers_errors_come_out_and_rewards_are_the_environments_own(cluster, policy_tokenizer):
    from shmbridge.producers.gem import EnvFailed

    remote = cluster.remote(Worker)
    good, bad = remote.remote(policy_tokenizer, False), remote.remote(policy_tokenizer, True)
    played = cluster.get([good.play.remote(0, 2), good.play.remote(1, 1), bad.play.remote(0, 2)], timeout=240)
    for steps in (played[0], played[2]):
        assert [step[:2] for step in steps] == [(0.0, False), (-1.0, True)]
        assert [each for each in steps[-1][2][0] if each != 1.0] == [-0.5, -0.25] * 2
    assert [step[:2] for step in played[1]] == [(1.0, True)]
    with pytest.raises(cluster.exceptions.RayTaskError) as failed:
        cluster.get(bad.play.remote(1, 3), timeout=100)
    assert isinstance(failed.value.cause, EnvFailed)
    assert "the environment broke" in str(failed.value)
    assert cluster.get(bad.play.remote(0, 2), timeout=100)[-1][0] == -1.0, "the other one goes on"
    cluster.get([good.close.remote(), bad.close.remote()], timeout=100)
