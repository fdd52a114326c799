"""AtroposGemEnv: an environment that wants the main thread has a process of its own."""

import gc
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shmbridge.errors import BadArgument, Closed
from shmbridge.producers.atropos.check import wants_main_thread
from shmbridge.producers.env_process import EnvProcessEnded
from shmbridge.producers.gem import Action, AtroposGemEnv, EnvFailed
from shmbridge.testing import wait_until
from tests.environments.byte_tokenizer import byte_tokenizer

ENVS = Path(__file__).parent / "envs"
ALARM = f"{ENVS / 'alarm_env.py'}:AlarmEnv"


def action(text: str) -> Action:
    """An answer as a model samples it, end token included."""
    tokens = [*byte_tokenizer().encode(text, add_special_tokens=False), byte_tokenizer().eos_token_id]
    return Action(text, tokens, [-0.25] * len(tokens))


@pytest.fixture(scope="module")
def held_process(policy_tokenizer):
    """Keeps the process of AlarmEnv for all tests that play in it, with an environment of another config."""
    config = {"max_token_length": 78}
    with AtroposGemEnv(ALARM, tokenizer=policy_tokenizer, timeout_s=30.0, config=config) as env:
        yield env


@pytest.fixture
def make_alarm(policy_tokenizer):
    made = []

    def make(**arguments):
        made.append(AtroposGemEnv(ALARM, tokenizer=policy_tokenizer, timeout_s=30.0, **arguments))
        return made[-1]

    yield make
    for env in made:
        env.close()


@pytest.mark.timeout(300)
def test_siblings_and_errors_in_another_process(make_alarm, held_process):
    siblings = [make_alarm(group_size=3) for _ in range(3)]

    def play(env, text):
        env.reset(seed=1)
        return env.step(action(text))

    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(play, siblings, ["1", "2", "no"]))
    assert [result[1] for result in results] == [1.0, -1.0, -1.0]
    assert sorted(results[0][4]["sibling_scores"]) == [-1.0, -1.0, 1.0]
    env = make_alarm()
    env.reset()
    with env.spawn(same_state=True) as same:
        assert same.observation == env.observation
        assert same._remote.pid == env._remote.pid
    with pytest.raises(BadArgument, match="int is no action"):
        env.step(3)
    with pytest.raises(EnvFailed, match=r"KeyError\('the environment broke'\)"):
        env.step("raise")
    with pytest.raises(BadArgument, match="no episode"):
        env.step("again")


@pytest.mark.timeout(300)
def test_a_process_that_ends_costs_its_episodes_and_is_started_again(policy_tokenizer):
    """Its main thread blocks, it is killed, then closed; what the environment forked ends with it."""
    with AtroposGemEnv(f"{ENVS / 'alarm_env.py'}:PoolEnv", tokenizer=policy_tokenizer, timeout_s=5.0) as env:
        blocked, forked, shown = begun(env)
        assert shown.endswith(" 1")
        pid, forked, shown = begun(env)
        assert (pid, shown[-2:]) == (blocked, " 2")
        with pytest.raises(EnvProcessEnded, match="the environment blocks the main thread"):
            env.step(action("block"))
        wait_until(lambda: not any_alive(forked), timeout_s=20)
        killed, forked, shown = begun(env)
        assert killed != blocked
        assert shown.endswith(" 1"), "its items begin again"
        assert env.step(action(shown))[1] == 1.0
        env.reset()
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(EnvProcessEnded, match="exit status -9"):
            env.step("1")
        wait_until(lambda: not any_alive(forked), timeout_s=20)
        closed, forked, shown = begun(env)
        assert closed not in (blocked, killed)
    wait_until(lambda: not any_alive(forked), timeout_s=20)


def begun(env):
    """An episode's process, the processes that its environment forked, and the right answer."""
    shown = env.reset()[0].removeprefix("say ")
    forked = [int(each) for each in shown.partition(" ")[0].split(",")]
    assert all(Path(f"/proc/{pid}").exists() for pid in forked)
    return env._remote.pid, forked, shown


def any_alive(pids):
    return any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_without_a_process_the_alarm_is_an_error(make_alarm):
    env = make_alarm(process=False)
    env.reset()
    with pytest.raises(EnvFailed, match="AssertionError"):
        env.step("1")


def test_arguments_go_there_in_any_mapping(make_alarm, held_process):
    """ROLL's are OmegaConf's."""
    from types import MappingProxyType

    env = make_alarm(config=MappingProxyType({"max_token_length": 77}), judge_calls=())
    assert env.reset()[0] == "say 1"


def test_functions_do_not_go_into_another_process(policy_tokenizer):
    for name in ("reward_of", "reward_config"):
        with pytest.raises(BadArgument, match=f"{name} is a function"):
            AtroposGemEnv(ALARM, tokenizer=policy_tokenizer, **{name: len})


def test_what_wants_the_main_thread_is_told_from_its_script(tmp_path):
    assert wants_main_thread(ENVS / "alarm_env.py") == "alarm_env.py calls signal in line 62"
    assert wants_main_thread(ENVS / "atropos_envs.py") == ""
    (tmp_path / "grading").mkdir()
    (tmp_path / "grading/latex.py").write_text("from math_verify import parse\n")
    (tmp_path / "script.py").write_text("import asyncio\nfrom grading.latex import grade\n")
    assert wants_main_thread(tmp_path / "script.py") == "latex.py imports math_verify"
    wants_main_thread.cache_clear()
    (tmp_path / "script.py").write_text("import grading\nsignal = 1\nprint(timer.signal(3))\n")
    assert wants_main_thread(tmp_path / "script.py") == ""


@pytest.mark.timeout(300)
def test_an_environment_that_sets_alarms_runs_in_its_own_process(make_alarm, held_process):
    """By itself, and with the same process for all that play it here; a seed is an item there, too.

    The last test: it ends the process.
    """
    env, other = make_alarm(), make_alarm()
    assert env._remote.pid == other._remote.pid != os.getpid()
    observation, info = env.reset(seed=4)
    assert (observation, info["options"]) == ("say 1", {"max_tokens": 9})
    assert other.reset(seed=4)[0] == "say 1"
    assert other.reset(seed=5)[0] == "say 2"
    _, reward, terminated, truncated, info = env.step(action("1"))
    assert (reward, terminated, truncated, info["filtered"]) == (1.0, True, False, True)
    assert info["group"]["inference_logprobs"][0][-2:] == [-0.25, -0.25]
    _, reward, *_, info = other.step("1")
    assert (reward, info["retokenised"]) == (-1.0, True)
    assert isinstance(env.sample_random_action(), str)
    pid = env._remote.pid
    env.close()
    with pytest.raises(Closed):
        env.step("1")
    assert other.reset(seed=9)[0] == "say 3"
    del other, env
    held_process.close()
    gc.collect()
    make_alarm.__closure__[0].cell_contents.clear()
    gc.collect()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), timeout_s=20)
