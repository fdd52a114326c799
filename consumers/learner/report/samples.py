"""samples.jsonl: every few steps two groups of the batch just trained, with texts and advantages per token.

One group is that whose scores differ most, the other is drawn at random, by the run's seed and the step. A
line is one group. Long trajectories keep their beginning and their end; what is left out is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

import shmbridge
from shmbridge.consumers.learner import Metrics
from shmbridge.consumers.learner.data.training_rows import TrainingRows
from shmbridge.consumers.learner.report.logs import OtherLog
from shmbridge.schema import FINISH_REASONS

SAMPLES_FILE = "samples.jsonl"  # in the run directory
MOST_ROWS = 16  # trajectories of a group
MOST_PROMPT = 1024  # tokens of a prompt: the last ones
HEAD, TAIL = 1536, 512  # tokens of a completion: the first and the last ones
MOST_BYTES = 64 * 2**20  # of the file
MOST_SHOWN_BYTES = 4 * 2**20  # of the file's lines in a page
Ints = npt.NDArray[np.integer[Any]]
_PARTIAL = "\ufffd"  # what a tokenizer writes for a token that is part of a character


class SampledRow(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One trajectory as it was trained; T tokens of its completion.

    Attributes:
        completion: its text, without what is cut.
        score: None if it has none.
        finish_reason: None if unknown.
        tokens: the text of each token (T).
        advantages: of each token (T); None: not trained.
        prompt: None: the group's.
        cut_at: how many tokens stand in front of the cut.
        cut: how many tokens are left out there.
        step_rewards: of each step; None: not finite.
        step_ends: the token after each step, counted in the whole completion.
    """

    completion: str
    score: float | None
    finish_reason: str | None
    tokens: list[str]
    advantages: list[float | None]
    prompt: str | None = None
    cut_at: int = 0
    cut: int = 0
    step_rewards: list[float | None] = []
    step_ends: list[int] = []

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.advantages):
            raise ValueError("tokens and advantages differ in number")


class SampledGroup(msgspec.Struct):
    """One line of samples.jsonl; `trajectories` may be fewer than `group_size`."""

    step: int
    why: str  # "spread" or "random"
    env_name: str
    group_id: str
    min_policy_version: int | None
    max_policy_version: int | None
    group_size: int
    prompt: str
    trajectories: list[SampledRow]


class SampleLog(OtherLog):
    """Writes samples of the trained groups; no failure stops training. One thread; blocks for the disk.

    Args:
        path: the file; lines are appended.
        every: steps between two samples; the first step is sampled, too.
        seed: of the group drawn at random.
        tokenizer: the learner's, or None.
        say: prints a line for the user.
        others: logs that take the samples, too.
        most_bytes: the file's largest size.
    """

    def __init__(
        self,
        path: Path,
        every: int,
        seed: int,
        tokenizer: Any,
        say: Callable[[str], None],
        others: Sequence[OtherLog] = (),
        most_bytes: int = MOST_BYTES,
    ) -> None:
        super().__init__("samples", SAMPLES_FILE, say)
        self._path, self._every, self._seed, self._most_bytes = path, every, seed, most_bytes
        self._texts, self._others = TokenTexts(tokenizer), others
        self._picked: list[SampledGroup] = []
        self._tokens_cut = self._left_out = 0

    def due(self, step: int) -> bool:
        """Whether this step, counted from 1, is sampled."""
        return step == 1 or step % self._every == 0

    def pick(self, batch: shmbridge.Batch, rows: TrainingRows, step: int) -> None:
        """Keeps copies of two groups of a trained batch until `log`. Waits for a device, if tokens are there.

        Args:
            batch: a packed `shmbridge.Batch`, or anything with its attributes.
            rows: its training arrays.
            step: that trains it, counted from 1.
        """
        with self.guarded("take a sample"):
            self._picked = [
                self._group(batch, rows, group, step, why)
                for why, group in _chosen(batch, self._seed, step).items()
            ]

    def log(self, metrics: Metrics) -> None:
        """Writes the groups picked since the last call. Blocks for the disk."""
        picked, self._picked = self._picked, []
        if not picked:
            return
        with self.guarded("be written"):
            self._append(b"".join(msgspec.json.encode(each) + b"\n" for each in picked), len(picked))
            for other in self._others:
                other.log_samples(msgspec.to_builtins(picked))

    def counters(self) -> Metrics:
        """Returns the failures, the tokens cut from samples, and the groups left out of a full file."""
        return {
            **super().counters(),
            "samples_tokens_cut_total": self._tokens_cut,
            "samples_left_out_total": self._left_out,
        }

    def _append(self, lines: bytes, groups: int) -> None:
        with self._path.open("a+b", buffering=0) as file:
            size = file.seek(0, 2)
            if size:
                file.seek(-1, 2)
                lines = lines if file.read(1) == b"\n" else b"\n" + lines  # after a killed writer's half line
            if size + len(lines) > self._most_bytes:
                if not self._left_out:
                    self._say(f"{SAMPLES_FILE} has {size:,} bytes and takes no more samples")
                self._left_out += groups
            else:
                file.write(lines)

    def _group(
        self, batch: shmbridge.Batch, rows: TrainingRows, group: int, step: int, why: str
    ) -> SampledGroup:
        places = np.flatnonzero(batch.group_index == group).tolist()
        meta, shared = batch.meta[places[0]], _prompt(batch, rows, places[0])
        return SampledGroup(
            step=step,
            why=why,
            env_name=meta.env_name,
            group_id=str(meta.group_id),
            min_policy_version=meta.min_policy_version,
            max_policy_version=meta.max_policy_version,
            group_size=len(places),
            prompt=self._prompt_text(shared),
            trajectories=[self._row(batch, rows, place, shared) for place in places[:MOST_ROWS]],
        )

    def _row(self, batch: shmbridge.Batch, rows: TrainingRows, place: int, shared: Ints) -> SampledRow:
        prompt = _prompt(batch, rows, place)
        begin, end = rows.cu_seqlens[place : place + 2].tolist()
        completion = slice(begin + prompt.size, end)
        tokens = _on_host(rows.tokens[completion])
        advantages = rows.advantages[completion].astype(np.float64).round(4)
        cut = max(0, tokens.size - HEAD - TAIL)
        self._tokens_cut += cut
        keep = np.r_[0:HEAD, HEAD + cut : tokens.size] if cut else slice(None)
        texts = self._texts.texts(tokens[keep].tolist())
        trained = rows.trained[completion][keep].tolist()
        score, reason = _scalar(batch, "score", place), _scalar(batch, "finish_reason", place)
        known = reason is not None and 0 <= reason < len(FINISH_REASONS)
        return SampledRow(
            completion="".join(texts),
            score=None if score is None or not np.isfinite(score) else float(score),
            finish_reason=FINISH_REASONS[int(reason)] if known else None,
            tokens=texts,
            advantages=[
                value if trains else None
                for value, trains in zip(advantages[keep].tolist(), trained, strict=True)
            ],
            prompt=None if np.array_equal(prompt, shared) else self._prompt_text(prompt),
            cut_at=HEAD if cut else 0,
            cut=cut,
            step_rewards=[round(each, 4) for each in _list(batch, "step_rewards", place)],
            step_ends=[each - prompt.size for each in _list(batch, "step_ends", place)],
        )

    def _prompt_text(self, tokens: Ints) -> str:
        self._tokens_cut += max(0, tokens.size - MOST_PROMPT)
        return "".join(self._texts.texts(tokens[-MOST_PROMPT:].tolist()))


def _chosen(batch: shmbridge.Batch, seed: int, step: int) -> dict[str, int]:
    """Returns why -> index of a group: that with the highest spread of scores, and one of the others."""
    groups = np.unique(batch.group_index)
    if not groups.size:
        return {}
    scores = np.zeros(len(batch.meta)) if batch.scores is None else np.asarray(batch.scores, np.float64)
    known = batch.has("score") & np.isfinite(scores)
    low, high = np.full(groups.size, np.inf), np.full(groups.size, -np.inf)
    at = np.searchsorted(groups, batch.group_index)
    np.minimum.at(low, at[known], scores[known])
    np.maximum.at(high, at[known], scores[known])
    spread = np.where(high >= low, high - low, -1.0)
    widest = int(spread.argmax())
    found = {"spread": int(groups[widest])}
    if groups.size > 1:
        others = np.delete(groups, widest)
        found["random"] = int(others[np.random.default_rng([seed, step]).integers(others.size)])
    return found


def _prompt(batch: shmbridge.Batch, rows: TrainingRows, place: int) -> Ints:
    """Returns the tokens in front of the completion, as far as that is known."""
    begin, end = rows.cu_seqlens[place : place + 2].tolist()
    answers = (rows.trained if rows.answers is None else rows.answers)[begin:end]
    length = int(answers.argmax()) if answers.any() else end - begin
    recorded = _scalar(batch, "prompt_length", place)
    if recorded is not None and 0 <= recorded < length:
        length = int(recorded)
    return _on_host(rows.tokens[begin : begin + length])


def _on_host(tokens: Any) -> Ints:
    return np.array(tokens if isinstance(tokens, np.ndarray) else tokens.cpu().numpy())


def _scalar(batch: shmbridge.Batch, name: str, place: int) -> Any:
    values = getattr(batch, "scores" if name == "score" else name, None)
    return None if values is None or not batch.has(name)[place] else values[place]


def _list(batch: shmbridge.Batch, name: str, place: int) -> list[Any]:
    values = getattr(batch, name, None)
    if values is None or not batch.has(name)[place]:
        return []
    begin = int(values.lengths[:place].sum())
    found: list[Any] = values.values[begin : begin + int(values.lengths[place])].tolist()
    return found


class TokenTexts:
    """Texts of token ids, remembered per id. One thread; never blocks.

    Args:
        tokenizer: with `decode`, such as a Hugging Face tokenizer; None: every text is the id, as "<17>".
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Returns one text per id. The last token of a character split over tokens has the character."""
        found = [self._text(each) for each in ids]
        begin = 0
        while begin < len(found):
            end = begin
            while end < len(found) and _PARTIAL in found[end]:
                end += 1
            if end > begin + 1:
                found[begin:end] = self._split(ids[begin:end])
            begin = max(end, begin + 1)
        return found

    def _text(self, token: int) -> str:
        if token not in self._known:
            # some tokenizers drop the space before the first token of a text, but not before the second
            once = self._decoded([token])
            self._known[token] = self._decoded([token, token])[len(once) :] or once
        return self._known[token]

    def _split(self, ids: Sequence[int]) -> list[str]:
        """Returns texts of tokens that are parts of characters: each character stands at its last token."""
        texts, begin = [""] * len(ids), 0
        for place in range(len(ids)):
            text = self._decoded(list(ids[begin : place + 1]))
            if _PARTIAL not in text:
                texts[place], begin = text, place + 1
        if begin < len(ids):
            texts[-1] = self._decoded(list(ids[begin:]))
        return texts

    def _decoded(self, ids: list[int]) -> str:
        if self._tokenizer is None:
            return "".join(f"<{each}>" for each in ids)
        try:
            return str(
                self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            )
        except Exception:  # an id that the tokenizer lacks; a tokenizer may raise anything
            return "".join(f"<{each}>" for each in ids)


# --- reading them -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Samples:
    """Sampled groups of one run.

    Attributes:
        groups: each once, in order.
        left_out: further groups, for which there was no room; the kept ones are spread over the run.
        torn: invalid lines.
    """

    groups: list[SampledGroup]
    left_out: int = 0
    torn: int = 0


def read_samples(folder: Path, most_bytes: int = MOST_SHOWN_BYTES) -> Samples:
    """Returns the samples in a run directory; none if there is no file. Blocks for the disk."""
    try:
        lines = (folder / SAMPLES_FILE).read_text(errors="replace").split("\n")
    except OSError:
        return Samples([])
    decode = msgspec.json.Decoder(SampledGroup).decode
    found: list[SampledGroup] = []
    sizes: list[int] = []
    torn = 0
    for line in filter(str.strip, lines):
        try:
            group = decode(line)
        except (msgspec.DecodeError, RecursionError):
            torn += 1
            continue
        # a resumed run samples the steps again that were not saved
        while found and (
            found[-1].step > group.step
            or (group.step, group.why) in {(each.step, each.why) for each in found[-2:]}
        ):
            found.pop()
            sizes.pop()
        found.append(group)
        sizes.append(len(line))
    share = min(1.0, most_bytes / max(sum(sizes), 1))
    kept = [each for place, each in enumerate(found, 1) if int(place * share) > int((place - 1) * share)]
    return Samples(kept, len(found) - len(kept), torn)
