"""A record as marked text: signs, colours, step rewards, pages, tokenizers."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for looks

pytest.importorskip("textual")

import looks

from shmbridge.errors import BadArgument
from shmbridge.watch.text import tokenizer_pieces
from shmbridge.watch.top_screens import PAGE, legend, marked, record_facts


def styles_at(content, text) -> str:
    start = content.plain.index(text)
    return " ".join(str(span.style) for span in content.spans if span.start <= start < span.end)


def test_signs_and_step_rewards_are_in_the_text():
    content = marked(looks.scored_record(), 0)
    assert content.plain == (
        "11 12 ⁺100 101 102 103 104 105⟨0.42⟩ 106 107 108 109 110 111⟨0.97⟩ "
        "⁻112 113 114 115 116 117 118 119 120 121 122 123 124⟨-0.1⟩ ⁺125 126 127 128 129"
    )
    assert marked(looks.scored_record(), 1).plain == "11 12 ⁻205 206 207⟨0.05⟩"


def test_colours_say_sign_and_size():
    content = marked(looks.scored_record(), 0)
    strong, weak = styles_at(content, "100"), styles_at(content, "106")
    assert strong != weak  # 0.88 and 0.3 of at most 0.88
    assert "underline" in styles_at(content, "112")
    assert "underline" not in strong + weak
    assert "dim" in styles_at(content, "11 12")


def test_facts_of_a_record():
    facts = record_facts(looks.scored_record(), 0, 41)
    assert "row 1 of 2" in facts
    assert "policy version 40, lag 1" in facts
    assert "32 tokens, 30 trained" in facts
    assert "advantage -0.88 to 0.88" in facts
    assert "score 1" in facts


def test_a_record_of_tokens_alone():
    record = looks.Copy({"tokens": ("int32", [[5, 6, 7]])})
    assert marked(record, 0).plain == "5 6 7"
    assert legend(record).startswith("no advantages")
    assert "3 tokens" in record_facts(record, 0, None)


def test_rows_that_do_not_fit_together_are_shown_as_they_are():
    """A foreign producer's row may be shorter than its tokens, not finite, or end its steps past the row."""
    record = looks.Copy(
        {
            "tokens": ("int32", [[5, 6, 7]]),
            "loss_mask": ("uint8", [[1]]),
            "advantages": ("float32", [[np.nan, 1.0]]),
            "step_rewards": ("float32", [[0.5, 0.25]]),
            "step_ends": ("int32", [[2, 9]]),
        }
    )
    assert marked(record, 0).plain == "5 ⁺6⟨0.5⟩ 7\n1 step ends are outside of the row: 9"


def test_a_long_row_is_shown_in_pages():
    record = looks.Copy({"tokens": ("int32", [range(PAGE + 3)])})
    assert marked(record, 0).plain.split()[-1] == str(PAGE - 1)
    assert marked(record, 0, first=PAGE).plain == f"{PAGE} {PAGE + 1} {PAGE + 2}"


def test_text_of_tokens(tmp_path):
    """Spaces and line ends stay where they are, and what could steer a terminal is escaped."""
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models

    words = {"▁two": 0, "▁plus": 1, "\n": 2, "\x1b[2J": 3, "s": 4}
    made = tokenizers.Tokenizer(models.WordLevel(words, unk_token="s"))
    made.decoder = decoders.Metaspace()
    made.save(str(tmp_path / "tokenizer.json"))
    pieces = tokenizer_pieces(str(tmp_path))
    assert pieces([0, 1, 4, 2]) == ["two", " plus", "s", "\n"]
    record = looks.Copy({"tokens": ("int32", [[0, 1, 4, 2, 3]])})
    assert marked(record, 0, pieces).plain == "two pluss↵\n\\x1b[2J"


def test_a_file_that_is_no_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadArgument, match="no tokenizer of this name"):
        tokenizer_pieces(str(tmp_path))
