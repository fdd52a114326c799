"""A reward config is read whole: aliases of ROLL, files, and nothing that is not known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shmbridge.errors import BadConfig
from shmbridge.producers.rewards import FormatMarker, LengthBounty, Linear, RewardConfig, read_config

WHOLE = """\
base: {-1: 0}
format_markers:
  - {pattern: <think>, weight: 0.2, name: think}
  - {pattern: '\\\\boxed\\{.*?\\}', weight: 3e-1, regex: true, count: each, when: wrong}
length_bounty: {cap: 0.2, per: character, rate: 0.001}
clamp: [-1, null]
wrong_at_most: 0.5
"""


def test_a_file_has_every_field(tmp_path: Path) -> None:
    path = tmp_path / "rewards.yaml"
    path.write_text(WHOLE)
    expected = RewardConfig(
        base={-1.0: 0.0},
        format_markers=(
            FormatMarker("<think>", 0.2, name="think"),
            FormatMarker(r"\\boxed\{.*?\}", 0.3, regex=True, count="each", when="wrong"),
        ),
        length_bounty=LengthBounty(0.2, "character", 0.001),
        clamp=(-1.0, None),
        wrong_at_most=0.5,
    )
    assert read_config(path) == read_config(str(path)) == expected
    assert read_config(expected) is expected
    path.write_text("reward_config:\n  " + WHOLE.replace("\n", "\n  "))
    assert read_config(path) == expected


def test_the_keys_of_roll() -> None:
    assert read_config(
        {"format_markers": {"<think>": 0.2, "\\boxed{": 0.3}, "length_bounty_max": 0.2}
    ) == RewardConfig(
        format_markers=(FormatMarker("<think>", 0.2), FormatMarker("\\boxed{", 0.3)),
        length_bounty=LengthBounty(0.2, "character", 0.001),
    )


def test_other_forms() -> None:
    assert read_config({"base": {"scale": 2, "offset": -1}}).base == Linear(2.0, -1.0)
    assert read_config({"format_markers": {"a": {"weight": 1, "count": "each"}}}).format_markers == (
        FormatMarker("a", 1.0, count="each"),
    )
    for off in (None, {}, {"base": {}, "format_markers": [], "clamp": None}, {"reward_config": None}):
        assert read_config(off) == RewardConfig()
        assert read_config(off).is_off
    assert not read_config({"base": {-1: 0}}).is_off


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"format_marker": {}}, r"format_marker is not known: did you mean format_markers\?"),
        ({"lenght_bounty_max": 0.2}, r"did you mean length_bounty_max\?"),
        ({"length_bounty": {"cap": 1, "pre": "token"}}, r"length_bounty\.pre is not known: did you mean per"),
        ({"format_markers": [{"patern": "a", "weight": 1}]}, r"format_markers\[0\]\.patern .* pattern\?"),
        ({"colour": 1}, "colour is not known: known are base, "),
        ({"format_markers": [{"pattern": "a"}]}, r"format_markers\[0\]: .* lacks pattern and weight"),
        ({"length_bounty": {}}, "lacks cap"),
        ({"format_markers": {"a": "much"}}, r"format_markers\.a\.weight: 'much' is not a number"),
        ({"format_markers": {"a": float("nan")}}, "nan is not a finite number"),
        ({"format_markers": {"": 1}}, "'' is no text to look for"),
        ({"format_markers": {"(": {"weight": 1, "regex": True}}}, "is no regular expression"),
        ({"format_markers": {"a": {"weight": 1, "regex": "no"}}}, "has regex 'no'"),
        ({"format_markers": {"a": {"weight": 1, "count": "twice"}}}, "'twice' is none of once, each"),
        ({"format_markers": [{"pattern": "a", "weight": 1}] * 2}, "two components are called 'a'"),
        ({"format_markers": {"base": 1}}, "two components are called 'base'"),
        ({"format_markers": "<think>"}, "no mapping and no list"),
        ({"length_bounty": {"cap": -1}}, "is below 0"),
        ({"length_bounty": {"cap": 1, "per": "word"}}, "'word' is none of token, character"),
        ({"length_bounty": {"cap": 1}, "length_bounty_max": 1}, "are one thing"),
        ({"base": 3}, "base: 3 is not a mapping"),
        ({"base": {"-1": 0, -1.0: 5}}, "base: -1 is given twice"),
        ({"base": {"scale": 10**400}}, "is not a number"),
        ({"format_markers": {"a": {"pattern": "b", "weight": 1}}}, "the pattern, and it has 'b', too"),
        ({"base": {-1: 0, "scale": 2}}, "base: 'scale' is not a number"),
        ({"base": {"scal": 2}}, r"base\.scal is not known: did you mean scale\?"),
        ({"clamp": [1, -1]}, "no lowest and highest"),
        ({"clamp": 1}, "no lowest and highest"),
        ({"wrong_at_most": True}, "True is not a number"),
        ([1], "is not a mapping of options"),
    ],
)
def test_what_cannot_be_used_is_refused(given: Any, why: str) -> None:
    with pytest.raises(BadConfig, match=why):
        read_config(given)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"none\.yaml cannot be read: No such file"):
        read_config(tmp_path / "none.yaml")
    path = tmp_path / "rewards.yaml"
    path.write_text("clamp: [1")
    with pytest.raises(BadConfig, match="is not YAML"):
        read_config(path)
    for hostile in ("base: " + "[" * 3000 + "]" * 3000, "clamp: &c [*c, 1]", "a: &a [x]\nbase: [*a, *a]"):
        path.write_text(hostile)
        with pytest.raises(BadConfig):
            read_config(path)
    path.write_text("base: {0: 010, 1: 1e-3}\nclamp: [-1.0, null]\nformat_markers: {no: 0.5}\n")
    config = read_config(path)
    assert (config.base, config.clamp) == ({0.0: 10.0, 1.0: 0.001}, (-1.0, None))
    assert config.format_markers[0].pattern == "no"
    path.write_text("clamp: [0, 1]\nclamp: [-1, 1]\n")
    with pytest.raises(BadConfig, match="clamp is given twice"):
        read_config(path)
