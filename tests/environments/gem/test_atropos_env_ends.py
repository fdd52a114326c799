"""AtroposGemEnv ends what it began: close, garbage collection, the interpreter's exit, other threads."""

import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from shmbridge.producers.gem import AtroposGemEnv, EnvFailed
from shmbridge.testing import wait_until


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("shmbridge-gem-")]


def test_atropos_env_close_ends_coroutine_and_thread(make_env, envs, monkeypatch):
    first, second = make_env("ChatEnv"), make_env("ChatEnv")
    ended = []
    collect = envs.ChatEnv.collect_trajectory

    async def noting(self, item):
        try:
            return await collect(self, item)
        finally:
            ended.append(item["start"])

    monkeypatch.setattr(envs.ChatEnv, "collect_trajectory", noting)
    first.reset()
    second.reset()
    second.close()
    wait_until(lambda: ended, timeout_s=20)
    assert ended == [2]
    assert threads() == ["shmbridge-gem-ChatEnv"], "the other one needs it"
    assert first.step("a")[0] == "and after a?"
    first.close()
    first.close()
    assert ended == [2, 1]
    assert not threads()


def test_atropos_env_garbage_collection_ends_them(envs, policy_tokenizer):
    env = AtroposGemEnv(envs.ChatEnv, tokenizer=policy_tokenizer)
    env.reset()
    inside = weakref.ref(env._runtime.env)
    thread = env._runtime.thread
    del env
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()
    gc.collect()
    assert inside() is None


def test_atropos_env_reset_ends_the_episode_before(make_env):
    env = make_env("ChatEnv")
    for number in range(1, 4):
        assert env.reset()[0] == f"count\n\n{number}"
    wait_until(lambda: len(env._runtime.episodes) <= 1 or gc.collect() is None, timeout_s=20)
    env.step("a")
    assert env._runtime.env.said == ["a"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["pass", pytest.param("raise SystemExit(0)", marks=pytest.mark.long)])
def test_atropos_env_never_keeps_the_interpreter(envs, policy_tokenizer, how):
    code = f"""
from shmbridge.producers.gem import AtroposGemEnv
env = AtroposGemEnv({f"{envs.__file__}:ChatEnv"!r}, tokenizer={policy_tokenizer!r})
env.reset(); env.step("a")
{how}
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], stderr=subprocess.PIPE, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert "Task was destroyed" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_atropos_env_many_in_many_threads(make_env):
    """Each has its own conversation, in any thread; nobody gets another's answer."""
    made = [make_env("ChatEnv", turns=5) for _ in range(8)]

    def play(number: int) -> float:
        env = made[number]
        for _ in range(3):
            env.reset()
            for turn in range(5):
                said = f"{number}-{turn}"
                observation, reward, terminated, *_ = env.step(said)
                assert terminated == (turn == 4)
                assert terminated or observation == f"and after {said}?"
        return reward

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(play, range(8))) == [1.0] * 8
    assert len(made[0]._runtime.env.runs) == 24
    assert threads() == ["shmbridge-gem-ChatEnv"]


def test_atropos_env_close_in_another_thread_wakes_who_waits(make_env, envs, monkeypatch):
    monkeypatch.setattr(envs.OddEnv, "ends", "hang")
    env = make_env("OddEnv")
    env.reset()
    with ThreadPoolExecutor(1) as pool:
        stepping = pool.submit(env.step, "x")
        wait_until(lambda: env._runtime.env.said == ["x"], timeout_s=20)
        env.close()
        error = stepping.exception(20)
    assert error is not None
    assert not isinstance(error, EnvFailed)
    assert "ended" in str(error)
