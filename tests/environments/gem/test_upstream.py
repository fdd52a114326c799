"""AtroposGemEnv with upstream's own scripts, unedited, of the checkout that SHMBRIDGE_ATROPOS_CHECKOUT names.

What they download is written by `upstream.py`. Run with commit 296a0bc5 of github.com/NousResearch/atropos.
"""

import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gem
import pytest

from shmbridge.producers.atropos.check import checked
from shmbridge.producers.gem import Action, register
from tests.environments.byte_tokenizer import byte_tokenizer
from tests.environments.gem.upstream import SCRIPTS, Played, own_scores, write_data

GROUP = 4


@pytest.fixture(scope="module")
def checkout() -> Path:
    """The folder of upstream's environments."""
    named = os.environ.get("SHMBRIDGE_ATROPOS_CHECKOUT")
    if not named:
        pytest.skip("not run: SHMBRIDGE_ATROPOS_CHECKOUT names no checkout of Atropos")
    return Path(named).resolve() / "environments"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data sets."""
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


@pytest.fixture
def make(checkout, data, policy_tokenizer, monkeypatch, tmp_path):
    """`make(name of a script, group_size)`, as ROLL makes it."""
    monkeypatch.chdir(data)
    for name, value in {
        "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "NLTK_DATA": str(data / "nltk_data"),
        "HF_DATASETS_CACHE": str(tmp_path / "cache"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    if "datasets" in sys.modules:
        monkeypatch.setattr(sys.modules["datasets"].config, "HF_HUB_OFFLINE", True)
    register()
    made = []

    def env_of(name: str, group_size: int = 1):
        script = SCRIPTS[name]
        made.append(
            gem.make(
                "atropos",
                environment=str(checkout / script.path),
                tokenizer=policy_tokenizer,
                config={"use_wandb": False, **script.config},
                group_size=group_size,
                timeout_s=200.0,
            )
        )
        return made[-1]

    yield env_of
    for env in made:
        env.close()


def action(text: str) -> Action:
    """An answer as a model samples it, end token included."""
    tokens = [*byte_tokenizer().encode(text, add_special_tokens=False), byte_tokenizer().eos_token_id]
    return Action(text, tokens, [-0.25] * len(tokens))


def asked(observation: str, info: dict) -> str:
    """What the policy is asked last."""
    return info["new_messages"][-1]["content"] if info.get("new_messages") else observation


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", SCRIPTS)
def test_upstreams_script_alone_and_as_a_group(make, name):
    """Right and wrong answers, alone and as siblings: rewards are those that the environment gives."""
    script = SCRIPTS[name]
    wrong, right = script.scores
    env = make(name)
    for seed in range(4):
        shown = asked(*env.reset(seed=seed))
        said, expected = (script.right(shown), right) if seed % 2 else (script.wrong, wrong)
        _, reward, terminated, truncated, info = env.step(action(said))
        assert (reward, terminated, truncated) == (expected, True, False), (shown, said)
        assert info["filtered"] or not script.drops, "a group of one has equal scores"
        assert len(info["group"]["tokens"]) == 1
    siblings = [make(name, GROUP) for _ in range(GROUP)]

    def play(number: int):
        shown = asked(*siblings[number].reset(seed=9))
        said = script.right(shown) if number < 2 else script.wrong
        return siblings[number].step(action(said + " " * number))

    with ThreadPoolExecutor(GROUP) as threads:
        played = list(threads.map(play, range(GROUP)))
    assert [each[1] for each in played] == [right, right, wrong, wrong]
    for *_, info in played:
        assert sorted(info["sibling_scores"]) == sorted([right, right, wrong, wrong])
        assert not info["filtered"]


@pytest.mark.long
@pytest.mark.timeout(500)
def test_a_hundred_episodes_of_gsm8k_have_the_environments_own_scores(make, checkout):
    """25 groups of 4 through gem.make; the same answers are then scored by the environment's own `score`."""
    script = SCRIPTS["gsm8k"]
    siblings = [make("gsm8k", GROUP) for _ in range(GROUP)]
    chance, played = random.Random(5), []
    for seed in range(25):
        rights = [chance.random() < 0.75 for _ in range(GROUP)]
        longer = [chance.random() < 0.3 for _ in range(GROUP)]

        def play(number: int, seed=seed, rights=rights, longer=longer):
            shown = asked(*siblings[number].reset(seed=seed))
            text = script.right(shown) if rights[number] else script.wrong
            text = f"<think>{'hm ' * 700 * longer[number]}{number}</think>" + text.rpartition("</think>")[2]
            _, reward, *_, info = siblings[number].step(action(text))
            row = info["group"]
            return Played(shown, text, row["tokens"][0], row["masks"][0]), reward

        with ThreadPoolExecutor(GROUP) as threads:
            played.append(list(threads.map(play, range(GROUP))))
    rewards = [[reward for _, reward in group] for group in played]
    assert sum(map(len, rewards)) == 100
    assert rewards == [own_scores(checkout, [each for each, _ in group]) for group in played]
    assert {1.0, -1.0} < {each for group in rewards for each in group}, "and some are worth less for length"


@pytest.mark.timeout(500)
def test_check_says_of_these_what_happens(checkout):
    for name in ("gsm8k", "mcqa", "regex", "tool_calling"):
        said = checked(checkout / SCRIPTS[name].path.rpartition(":")[0])
        assert (said.attached.can, said.stepped.can, said.evaluated.can) == (True, True, True), name
        assert ("in a process of its own" in str(said.stepped)) == (name == "gsm8k")
