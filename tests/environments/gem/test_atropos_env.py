"""AtroposGemEnv: an Atropos environment turn by turn, its body run once, its score and tokens its own."""

import math

import gem
import pytest
from gem.utils.constants import TERMINAL_STATE

from shmbridge.errors import BadArgument, Closed
from shmbridge.producers.gem import Action, AtroposGemEnv, EnvFailed, NotSuspendable, register
from tests.environments.byte_tokenizer import byte_tokenizer


def atropos(env: AtroposGemEnv):
    """The environment itself."""
    return env._runtime.env


def action(text: str, first: float = -0.5) -> Action:
    """An answer as a model samples it, end token included."""
    tokens = [*byte_tokenizer().encode(text, add_special_tokens=False), byte_tokenizer().eos_token_id]
    return Action(text, tokens, [first - at / 4 for at in range(len(tokens))])


def test_atropos_env_plays_every_turn_once(make_env):
    env = make_env("ChatEnv", turns=4)
    observation, info = env.reset()
    assert observation == "count\n\n1"
    assert info["conversation"] == [{"role": "system", "content": "count"}, {"role": "user", "content": "1"}]
    assert info["options"] == {"max_tokens": 9, "temperature": 0.5}
    assert info["replays"] == 0
    for said in ("two", "three", "four"):
        observation, reward, terminated, truncated, info = env.step(said)
        assert (observation, reward, terminated, truncated) == (f"and after {said}?", 0.0, False, False)
        assert info["new_messages"] == [{"role": "user", "content": f"and after {said}?"}]
        assert not info["rewritten"]
    observation, reward, terminated, truncated, info = env.step("five")
    assert (observation, reward, terminated, truncated) == (TERMINAL_STATE, 1.0, True, False)
    assert atropos(env).said == ["two", "three", "four", "five"]
    assert atropos(env).runs == [1]
    assert info["group"]["tokens"][0] == byte_tokenizer().apply_chat_template(
        info["group"]["messages"][0], return_dict=False
    )
    assert [message["content"] for message in info["group"]["messages"][0][1:]][:2] == ["1", "two"]
    assert info["group"]["scores"] == [1.0]
    assert not info["retokenised"]
    assert info["replays"] == 0


def test_atropos_env_text_prompts_have_turns_too(make_env):
    env = make_env("TextEnv", turns=3)
    observation, info = env.reset()
    assert (observation, info["prompt"], info["options"]) == ("1:", "1:", {"max_tokens": 9, "stop": ["\n"]})
    observation, *_, info = env.step("one")
    assert (observation, info["prompt"], info["rewritten"]) == ("\nnext:", "1:one\nnext:", False)
    env.step("two")
    assert env.step("three")[2]
    assert atropos(env).said == ["one", "two", "three"]


def test_atropos_env_real_tokens_and_logprobs_arrive(make_env):
    """Through Atropos' own managed server, over turns: what was sampled stands in the group as it was."""
    env = make_env("GroupEnv", turns=2)
    _, info = env.reset()
    prompt, first, second = info["prompt_token_ids"], action("ab"), action("c", -2.0)
    assert info["conversation"] == [{"role": "user", "content": "1"}]
    assert byte_tokenizer().decode(prompt) == info["prompt"] == "<|user|>1<|end|>\n<|assistant|>"
    observation, *_, info = env.step(first)
    assert observation == "next"
    *_, info = env.step(second)
    group = info["group"]
    tokens, masks, logprobs = group["tokens"][0], group["masks"][0], group["inference_logprobs"][0]
    assert tokens[: len(prompt)] == prompt
    trained = [at for at, mask in enumerate(masks) if mask != -100]
    assert [tokens[at] for at in trained] == [*first.token_ids, *second.token_ids]
    assert [logprobs[at] for at in trained] == [*first.logprobs, *second.logprobs]
    assert {logprobs[at] for at in set(range(len(tokens))) - set(trained)} == {1.0}
    assert not info["retokenised"]
    assert atropos(env).runs == [1]
    assert len(atropos(env).said) == 2


def test_atropos_env_tokens_are_never_character_codes(make_env):
    """ROLL's third failure. Text is tokenised by the policy's tokenizer, and marked."""
    env = make_env("GroupEnv", turns=1)
    env.reset()
    *_, info = env.step("né")
    group = info["group"]
    trained = [
        token for token, mask in zip(group["tokens"][0], group["masks"][0], strict=True) if mask != -100
    ]
    assert trained == [*byte_tokenizer().encode("né"), byte_tokenizer().eos_token_id]
    assert trained[:2] != [ord("n"), ord("é")]
    assert info["retokenised"]
    assert "inference_logprobs" not in group
    assert all(map(math.isnan, atropos(env).logprobs_seen[-4:])), "an environment cannot take them for real"


def test_atropos_env_one_answer_without_logprobs_leaves_none(make_env):
    env = make_env("GroupEnv", turns=2)
    env.reset()
    env.step(action("ab"))
    *_, info = env.step("c")
    assert info["retokenised"]
    assert "inference_logprobs" not in info["group"]


@pytest.mark.parametrize("name", ["TokensEnv", "LogprobsEnv"])
def test_atropos_env_refuses_text_where_logprobs_are_asked_for(make_env, name):
    """The action is refused, and the episode still waits for one."""
    env = make_env(name)
    env.reset()
    with pytest.raises(BadArgument, match="log-probabilities of its completion"):
        env.step("ab")
    *_, terminated, _, info = env.step(action("ab"))
    if not terminated:
        *_, terminated, _, info = env.step(action("c"))
    assert terminated
    assert not info["retokenised"]
    sampled = [*action("ab").logprobs, *(action("c").logprobs if name == "LogprobsEnv" else ())]
    assert info["group"]["inference_logprobs"][0][-len(sampled) :] == sampled


def test_atropos_env_scores_stay_as_they_are(make_env):
    """ROLL's second failure: -1.0 became -0.998."""
    for score in (-1.0, 0.0, 0.25):
        env = make_env("ChatEnv", turns=1, score=score)
        env.reset()
        _, reward, *_, info = env.step("x")
        assert reward == info["raw_score"] == info["group"]["scores"][0] == score


def test_atropos_env_uses_the_reward_config_it_is_given(make_env):
    """ROLL's first failure: it was an argument that nobody read."""

    async def bridge(group):
        said = group["messages"][0][-1]["content"]
        return {**group, "scores": [score + (0.5 if "<think>" in said else 0.0) for score in group["scores"]]}

    env = make_env("ChatEnv", turns=1, score=-1.0, options={"reward_config": bridge})
    env.reset()
    _, reward, *_, info = env.step("<think>")
    assert (reward, info["raw_score"], info["group"]["scores"]) == (-0.5, -1.0, [-0.5])
    env.reset()
    assert env.step("no")[1] == -1.0


def test_atropos_env_refuses_arguments_it_does_not_know(make_env, envs, policy_tokenizer):
    with pytest.raises(TypeError, match="reward_confg"):
        AtroposGemEnv(envs.ChatEnv, reward_confg={}, tokenizer=policy_tokenizer)
    with pytest.raises(BadArgument, match="has no turnz"):
        make_env("ChatEnv", turnz=3)
    with pytest.raises(BadArgument, match="cannot be"):
        make_env("ChatEnv", turns="many")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("FourEnv", "4 completions of one prompt"),
        ("TogetherEnv", "while it waits for another"),
        ("ThreadEnv", "threads of its own"),
        ("WorkerEnv", "outside of an episode"),
    ],
)
def test_atropos_env_refuses_what_cannot_stand_still(make_env, name, what):
    """Also where the environment swallows the error."""
    with pytest.raises(NotSuspendable, match=what):
        make_env(name).reset()


def test_atropos_env_replays_if_told_to_and_counts(make_env):
    env = make_env("FourEnv", options={"replay": True})
    env.reset()
    for at, said in enumerate(("a", "b", "a"), 1):
        observation, reward, terminated, _, info = env.step(said)
        assert (observation, reward, terminated, info["replays"]) == ("4", 0.0, False, at)
    _, reward, terminated, _, info = env.step("c")
    assert (reward, terminated, info["replays"]) == (3.0, True, 4)
    assert atropos(env).said == ["a", "b", "a", "c"]
    assert len(atropos(env).runs) == 5


def test_atropos_env_replays_what_asks_at_the_same_time_and_in_threads(make_env):
    env = make_env("TogetherEnv", options={"replay": True})
    assert env.reset()[0] == "a"
    assert env.step("A")[0] == "b"
    assert env.step("B")[1:3] == (1.0, True)
    env = make_env("ThreadEnv", options={"replay": True})
    assert env.reset()[0] == "t"
    assert env.step("T")[1:3] == (1.0, True)


def test_atropos_env_errors_reach_the_caller(make_env):
    """Of a step, with the original as cause; the episode is over and has no reward."""
    env = make_env("ChatEnv", breaks_in_turn=2)
    env.reset()
    env.step("a")
    with pytest.raises(EnvFailed, match="the environment broke") as failed:
        env.step("b")
    assert isinstance(failed.value.__cause__, KeyError)
    with pytest.raises(BadArgument, match="no episode"):
        env.step("c")
    assert env.reset()[0] == "count\n\n2"


def test_atropos_env_errors_of_setup_and_items_reach_the_caller(make_env, monkeypatch):
    env = make_env("ChatEnv", setup_fails=True)
    with pytest.raises(EnvFailed, match="no data") as failed:
        env.reset()
    assert isinstance(failed.value.__cause__, RuntimeError)
    env = make_env("ChatEnv")
    env.reset()
    monkeypatch.setattr(atropos(env), "items", iter(()))
    with pytest.raises(EnvFailed, match="StopIteration"):
        env.reset()


@pytest.mark.parametrize(
    ("ends", "error", "what"),
    [
        ("none", EnvFailed, "no trajectory"),
        ("nan", EnvFailed, "the score is nan"),
        ("exit", EnvFailed, "SystemExit"),
        ("teacher", NotSuspendable, "log-probabilities of a prompt"),
    ],
)
def test_atropos_env_ends_without_a_reward_are_errors(make_env, envs, monkeypatch, ends, error, what):
    monkeypatch.setattr(envs.OddEnv, "ends", ends)
    env = make_env("OddEnv")
    env.reset()
    with pytest.raises(error, match=what):
        env.step("x")
    monkeypatch.setattr(envs.OddEnv, "ends", "postprocessed")
    env.reset()
    assert env.step("x")[1] == 11.0, "its loop goes on; Atropos' postprocess_histories is applied"
    env.reset()
    assert env._running.episode.item == {"start": 77}, "the backlog comes first"


def test_atropos_env_that_asks_nothing_is_refused(make_env, envs, monkeypatch):
    monkeypatch.setattr(envs.OddEnv, "ends", "silent")
    with pytest.raises(NotSuspendable, match="without asking"):
        make_env("OddEnv").reset()


def test_atropos_env_that_hangs_is_an_error_in_time(make_env, envs, monkeypatch):
    monkeypatch.setattr(envs.OddEnv, "ends", "hang")
    env = make_env("OddEnv", options={"timeout_s": 0.2})
    env.reset()
    with pytest.raises(EnvFailed, match=r"nothing for 0.2 s"):
        env.step("x")


def test_atropos_env_that_gave_up_waiting_is_no_zero_reward(make_env, envs):
    envs.ImpatientEnv.gave_up.clear()
    env = make_env("ImpatientEnv")
    env.reset()
    assert envs.ImpatientEnv.gave_up.wait(20)
    with pytest.raises(NotSuspendable, match="stopped waiting"):
        env.step("late")


def test_atropos_env_rows_that_are_not_one_need_a_rule(make_env):
    env = make_env("StepwiseEnv")
    env.reset()
    env.step("a")
    env.step("b")
    with pytest.raises(EnvFailed, match="3 rows in 3 groups"):
        env.step("c")
    env = make_env(
        "StepwiseEnv", options={"reward_of": lambda groups: sum(each["scores"][0] for each in groups)}
    )
    env.reset()
    env.step("a")
    env.step("b")
    _, reward, *_, info = env.step("c")
    assert reward == 3.0
    assert [group["tokens"] for group in info["groups"]] == [[[0]], [[1]], [[2]]]


def test_atropos_env_says_when_the_conversation_is_another(make_env):
    env = make_env("RewrittenEnv", options={"judge_calls": ()})
    env.reset()
    observation, *_, info = env.step("hello")
    assert observation == "so far: hello"
    assert info["rewritten"]
    assert info["new_messages"] == info["conversation"]


def test_atropos_env_seeds_name_items(make_env):
    first, second = make_env("ChatEnv"), make_env("ChatEnv")
    assert first.reset(seed=5)[0] == second.reset(seed=5)[0] == "count\n\n1"
    assert second.reset()[0] == "count\n\n2"
    first.step("a")  # its item is its own
    assert first.reset(seed=6)[0] == "count\n\n3"
    assert first.reset(seed=5)[0] == "count\n\n1"


def test_atropos_env_items_are_the_same_in_every_process(make_env):
    """The order of requests does not matter, as for members of a group in two Ray workers."""
    here, there = (
        make_env("ChatEnv", options={"items": 5}),
        make_env("ChatEnv", options={"items": 5}, score=2.0),
    )
    assert atropos(here) is not atropos(there), "each has its own stream of items"
    assert [here.reset(seed=seed)[0][-1] for seed in (7, 2, 0, 14)] == ["3", "3", "1", "5"]
    assert [there.reset(seed=seed)[0][-1] for seed in (14, 0, 2, 7)] == ["5", "1", "3", "3"]
    assert [there.reset()[0][-1] for _ in range(6)] == ["1", "2", "3", "4", "5", "1"]


def test_atropos_env_info_leaves_a_trainers_own_fields_alone(make_env):
    """ROLL merges it into what it keeps of a step."""
    env = make_env("GroupEnv", turns=1)
    infos = [env.reset()[1], env.step("a")[4]]
    own = {
        "observation",
        "messages",
        "reward",
        "penalty",
        "llm_response",
        "prompt_ids",
        "response_ids",
        "metrics",
    }
    assert all(own.isdisjoint(info) for info in infos)


def test_atropos_env_end_token_of_plain_text_is_no_text(make_env):
    env = make_env("GroupEnv", turns=1)
    env.reset()
    *_, info = env.step("ab<|end|>")
    assert atropos(env).said == ["ab"]
    assert info["group"]["tokens"][0][-3:] == [*byte_tokenizer().encode("ab"), byte_tokenizer().eos_token_id]


def test_atropos_env_is_set_up_once_and_shared(make_env, envs, monkeypatch):
    monkeypatch.setattr(envs.ChatEnv, "setups", 0)
    first, second, other = make_env("ChatEnv"), make_env("ChatEnv"), make_env("ChatEnv", turns=1)
    first.reset()
    second.reset()
    assert envs.ChatEnv.setups == 1
    assert atropos(first) is atropos(second) is not atropos(other)
    assert first.step("a")[0] == "and after a?"
    assert second.step("b")[0] == "and after b?"
    assert atropos(first).runs == [1, 2]
    assert atropos(first).config.group_size == 1
    other.reset()
    assert envs.ChatEnv.setups == 2


def test_atropos_env_spawns(make_env):
    env = make_env("ChatEnv")
    env.reset()
    with env.spawn(same_state=True) as same, env.spawn() as other:
        assert same.step("a")[0] == "and after a?"
        assert env.step("b")[0] == "and after b?"
        assert other.reset()[0] == "count\n\n2"
        with pytest.raises(BadArgument, match="before its first answer"):
            env.spawn(same_state=True)
    assert env.step("c")[0] == "and after c?", "the loop is shared, and goes on"


def test_atropos_env_actions_that_are_none(make_env):
    env = make_env("ChatEnv")
    with pytest.raises(BadArgument, match=r"reset\(\) first"):
        env.step("a")
    env.reset()
    with pytest.raises(BadArgument, match="int is no action"):
        env.step(3)
    with pytest.raises(BadArgument, match="neither"):
        Action()
    with pytest.raises(BadArgument, match="2 log-probabilities for 1 tokens"):
        Action("a", [1], [-1.0, -2.0])
    assert env.step(Action(token_ids=byte_tokenizer().encode("ab")))[0] == "and after ab?"
    assert isinstance(env.sample_random_action(), str)
    env.close()
    with pytest.raises(Closed):
        env.step("a")


def test_atropos_env_is_made_by_gem(envs, policy_tokenizer):
    register()
    register()
    path = f"{envs.__file__}:TextEnv"
    env = gem.make("atropos", environment=path, tokenizer=policy_tokenizer, config={"turns": 1})
    with env:
        assert isinstance(env, AtroposGemEnv)
        assert isinstance(env, gem.Env)
        env.reset(seed=1)
        assert env.step("x")[1:3] == (1.0, True)


@pytest.mark.parametrize(
    "name", ["no_colon", "nowhere.py:X", "shmbridge.producers.gem:Action", "shmbridge.producers.gem:Nothing"]
)
def test_atropos_env_names_that_lead_nowhere(name):
    with pytest.raises(BadArgument):
        AtroposGemEnv(name)
