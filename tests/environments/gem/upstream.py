"""Data sets and answers for upstream's own scripts, which tests play unedited: written here, no download."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROBLEMS = 200


@dataclass(frozen=True)
class Script:
    """One of upstream's scripts.

    Attributes:
        path: below `environments/`, and the class.
        right: an answer that is right, to what is shown; of at least ten tokens, as most want.
        scores: of a wrong and a right answer of one group.
        config: fields of its config.
        wrong: an answer that is wrong.
        drops: whether a group of one is dropped, since its scores are equal.
    """

    path: str
    right: Callable[[str], str]
    scores: tuple[float, float] = (-1.0, 1.0)
    config: dict[str, Any] = field(default_factory=dict)
    wrong: str = "<think>It is hard</think> I do not know any answer at all."
    drops: bool = True


def _sum(shown: str) -> int:
    """Of the two numbers that a problem of ours names."""
    first, second = re.findall(r"What is (\d+) plus (\d+)\?", shown)[-1]
    return int(first) + int(second)


def _boxed(shown: str) -> str:
    return f"<think>An addition</think> The answer is \\boxed{{{_sum(shown)}}}"


def _zero(shown: str) -> str:
    return f" An addition</think> <answer>The final answer is \\boxed{{{_sum(shown)}}}</answer>"


def _letters(shown: str) -> str:
    """Counts the letters that it is asked about, in what it is asked about."""
    one = re.search(r"How many (.)s are in the string (.*)\?\n\nProvide", shown, re.DOTALL)
    if one:
        return f"<think>counted</think><answer>{one[2].lower().count(one[1])}</answer>"
    asked = re.search(r"the letters (.*?) in the string (.*)\n\nProvide", shown, re.DOTALL)
    assert asked is not None
    counts = {each: asked[2].lower().count(each) for each in re.findall(r"'(.)'", asked[1])}
    return f"<think>counted</think><answer>{json.dumps(counts)}</answer>"


def _reversed(shown: str) -> str:
    text = shown.rpartition("The text to reverse:\n")[2]
    return f"<think>backwards</think><reversed_text>{text[::-1]}</reversed_text>"


def _regex(shown: str) -> str:
    """The strings that should match, one or the other."""
    positive = shown.partition("SHOULD match:")[2].partition("\n\n")[0]
    strings = [re.escape(_literal(line)) for line in re.findall(r"  - (.+)", positive)]
    return f"<think>each by name</think><answer>{'|'.join(strings)}</answer>"


def _literal(text: str) -> str:
    return (
        str(json.loads(json.dumps(text))) if text[0] not in "'\"" else str(eval(text))
    )  # repr() of a string


def _call(shown: str) -> str:
    number = re.findall(r"number (\d+)", shown)[-1]
    return f"<think>a call</think><tool_call>{json.dumps(call_of(int(number)))}</tool_call>"


def call_of(number: int) -> dict[str, Any]:
    """The call that problem `number` of the data set of tool calls wants."""
    return {"name": "look_up", "arguments": {"number": number}}


def _word(shown: str) -> str:
    word = re.findall(r"the word (word[0-9]+)", shown)[-1]
    return f"<think>easy</think> It has {word} in it, as it should have."


def _choice(shown: str) -> str:
    return f"<think>known</think> The best answer is {re.findall(r'Take ([A-D])', shown)[-1]}"


SCRIPTS = {
    "gsm8k": Script("gsm8k_server.py:GSM8kEnv", _boxed, config={"max_token_length": 4096}),
    "gsm8k_axolotl": Script("gsm8k_server_axolotl.py:GSM8kEnv", _boxed, config={"max_token_length": 4096}),
    "math": Script("math_server.py:MathEnv", _boxed, config={"max_token_length": 8192}),
    "math_zero": Script(
        "math_server_zero.py:MathEnv",
        _zero,
        config={"max_token_length": 8192, "start_tok_length": 4096},
        wrong=" It is hard</think> <answer>The final answer is \\boxed{7}</answer>",
    ),
    "mcqa": Script("mcqa_thinking_env.py:MCQAThinkingEnv", _choice),
    "regex": Script("community/regex_generation/regex_env.py:RegexEnv", _regex, (0.0, 1.0)),
    "letter_counting": Script(
        "letter_counting_environment/letter_counting_environment.py:LetterCountingEnv",
        _letters,
        (0.0, 1.0),
        {"max_generation_tokens": 512},
    ),
    "text_reversal": Script(
        "text_reversal_environment.py:TextReversalEnv",
        _reversed,
        (0.0, 1.0),
        {"train_dataset": "reversal.jsonl", "eval_dataset": "reversal.jsonl", "eval_split": "train"},
    ),
    "tool_calling": Script("tool_calling_server.py:SingleToolCallingEnv", _call),
    "instruction_following": Script(
        "instruction_following_algorithm_environment.py:InstructionFollowingEnv",
        _word,
        (0.0, 1.0),
        drops=False,
    ),
}


def write_data(folder: Path) -> None:
    """Writes what the scripts ask the hub for into a folder, which `datasets` takes for it in its place."""
    numbers = range(PROBLEMS)
    sums = [(f"What is {each} plus {each % 7}?", each + each % 7) for each in numbers]
    gsm8k = [{"question": asked, "answer": f"An addition.\n#### {total}"} for asked, total in sums]
    _set(folder / "gsm8k", {"train": gsm8k, "test": gsm8k[:10]}, "main")
    maths = [{"question": asked, "final_answer": str(total)} for asked, total in sums]
    _set(folder / "zwhe99/DeepMath-103K", {"train": maths})
    few = [
        {"problem": asked, "question": asked, "answer": str(total), "final_answer": [str(total)]}
        for asked, total in sums[:5]
    ]
    _set(folder / "HuggingFaceH4/aime_2024", {"train": few})
    for name in ("HuggingFaceH4/math-500", "math-ai/amc23", "math-ai/minervamath", "math-ai/olympiadbench"):
        _set(folder / name, {"test": few})
    choices = [
        {
            "prompt": f"Question {each}. Take {'ABCD'[each % 4]}.",
            "options": [f"first {each}", f"second {each}", f"third {each}", f"fourth {each}"],
            "answer": each % 4,
            "ground_truth": "ABCD"[each % 4],
        }
        for each in numbers
    ]
    _set(folder / "NousResearch/AcademicMCQA", {"train": choices})
    calls = [
        {
            "conversations": [
                {"from": "system", "value": "You have a tool look_up."},
                {"from": "human", "value": f"Look up number {each}."},
                {"from": "gpt", "value": f"<tool_call>{json.dumps(call_of(each))}</tool_call>"},
            ]
        }
        for each in numbers
    ]
    _set(folder / "NousResearch/XLAM-Atropos", {"train": calls})
    words = [
        {
            "messages": [{"role": "user", "content": f"Use the word word{each} in your answer."}],
            "ground_truth": json.dumps({"func_name": "verify_keywords", "keyword_list": [f"word{each}"]}),
            "constraint": "",
        }
        for each in numbers
    ]
    _set(folder / "allenai/RLVR-IFeval", {"train": words})
    counted = [{"Prompt": "How many?", "Answer": "1", "DifficultyLevel": 1}]
    _set(folder / "NousResearch/Letter-Counting-Eval", {"train": counted})
    reversal = "".join(json.dumps({"text": f"a text of number {each}"}) + "\n" for each in numbers)
    (folder / "reversal.jsonl").write_text(reversal)
    corpus = folder / "nltk_data/corpora/words"
    corpus.mkdir(parents=True)
    syllables = ("ba", "ke", "li", "mo", "nu", "ra", "se", "ti")
    words_of = [a + b + c for a in syllables for b in syllables for c in syllables]
    for name in ("en", "en-basic"):
        (corpus / name).write_text("\n".join(words_of) + "\n")


def _set(folder: Path, splits: dict[str, list[dict[str, Any]]], config: str = "default") -> None:
    folder.mkdir(parents=True)
    for name, rows in splits.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = "".join(f"  - split: {name}\n    path: {name}.jsonl\n" for name in splits)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n")


@dataclass(frozen=True)
class Played:
    """One answer to a problem of GSM8K: what was shown and said, and the row that Atropos makes of it.

    Attributes:
        tokens, masks: of the whole row; a mask is the token id where it was sampled, else -100.
    """

    shown: str
    said: str
    tokens: Sequence[int]
    masks: Sequence[int]


def gsm8k(checkout: Path) -> Any:
    """Upstream's script of GSM8K, as a module; imports atroposlib and math_verify."""
    spec = importlib.util.spec_from_file_location("upstream_gsm8k", checkout / "gsm8k_server.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def own_scores(checkout: Path, group: Sequence[Played], longest: int = 4096) -> list[float]:
    """What upstream's `score` of GSM8K says of a group, with no `AtroposGemEnv`.

    Main thread only. Of a group that it drops, what it had in its ScoredDataGroup as it did: all are equal.

    Args:
        longest: the config's max_token_length.
    """
    module = gsm8k(checkout)
    env = module.GSM8kEnv.__new__(module.GSM8kEnv)
    config, _ = module.GSM8kEnv.config_init()
    env.config = config.model_copy(update={"group_size": len(group), "max_token_length": longest})
    env.percent_correct_buffer = []
    rows = [
        {
            "messages": (
                {"role": "user", "content": each.shown},
                {"role": "assistant", "content": each.said},
            ),
            "gold_answer": f"\\boxed{{{_sum(group[0].shown)}}}",
            "finish_reason": "stop",
            "tokens": each.tokens,
            "masks": each.masks,
            "logprobs": [number],
        }
        for number, each in enumerate(group)
    ]
    scored = asyncio.run(env.score(rows))
    if scored is None:
        return [1.0 if each else -1.0 for each in env.percent_correct_buffer]
    order = [logprobs[0] for logprobs in scored["inference_logprobs"]]
    return [scored["scores"][order.index(number)] for number in range(len(group))]
