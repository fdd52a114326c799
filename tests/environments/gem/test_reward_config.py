"""A reward_config of AtroposGemEnv as ROLL's YAML has it: the values that are given are used."""

import pytest

from shmbridge.errors import BadConfig
from shmbridge.producers.gem import AtroposGemEnv


def test_reward_config_of_a_mapping_is_used(make_env):
    markers = {"format_markers": {"<think>": 0.5}, "length_bounty_max": 0.25}
    env = make_env("ChatEnv", turns=1, score=-1.0, options={"reward_config": markers})
    env.reset()
    _, reward, *_, info = env.step("<think> 5")
    said = len("<think> 5<|end|>")
    assert info["raw_score"] == -1.0
    assert reward == pytest.approx(-1.0 + 0.5 + min(0.25, 0.001 * said), abs=0.003)
    (parts,) = info["group"]["reward_components"]
    assert parts["<think>"] == 0.5
    assert parts["base"] == -1.0


def test_reward_config_that_cannot_be_is_refused(envs, policy_tokenizer):
    with pytest.raises(BadConfig, match="format_marker"):
        AtroposGemEnv(envs.ChatEnv, tokenizer=policy_tokenizer, reward_config={"format_marker": {}})
