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
from shmbridge.consumers.learner.report.log import OtherLog
from shmbridge.consumers.learner.report.token_texts import TokenTexts
from shmbridge.schema import FINISH_REASONS

SAMPLES_FILE = "samples.jsonl"  # in the run directory
MOST_ROWS = 16  # trajectories of a group
MOST_PROMPT = 1024  # tokens of a prompt: the last ones
HEAD, TAIL = 1536, 512  # tokens of a completion: the first and the last ones
MOST_BYTES = 64 * 2**20  # of the file

Ints = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class _Row:
    """One trajectory as it was trained; L tokens."""

    tokens: Ints  # (L,)
    trained: npt.NDArray[np.bool_]  # (L,)
    advantages: npt.NDArray[np.float32]  # (L,)
    prompt: int  # tokens before the completion
    score: float | None
    finish_reason: str | None
    step_rewards: list[float]
    step_ends: list[int]


@dataclass(frozen=True)
class _Group:
    """One sampled group."""

    why: str  # "spread" or "random"
    meta: Any  # of its first record
    size: int  # its trajectories in the batch; `rows` may be fewer
    rows: list[_Row]


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
        self._picked: list[_Group] = []
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
                _taken(batch, rows, why, group) for why, group in _chosen(batch, self._seed, step).items()
            ]

    def log(self, metrics: Metrics) -> None:
        """Writes the groups picked since the last call, as those of this step. Blocks for the disk."""
        picked, self._picked = self._picked, []
        if not picked:
            return
        with self.guarded("be written"):
            samples = [self._sample(group, metrics) for group in picked]
            self._append(b"".join(msgspec.json.encode(each) + b"\n" for each in samples), len(samples))
            for other in self._others:
                other.log_samples(samples)

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

    def _sample(self, group: _Group, metrics: Metrics) -> Metrics:
        first = group.rows[0]
        prompt = first.tokens[: first.prompt]
        meta, trajectories = group.meta, []
        for row in group.rows:
            own = row.tokens[: row.prompt]
            said = self._trajectory(row)
            trajectories.append(said if np.array_equal(own, prompt) else {"prompt": self._prompt(own)} | said)
        return {
            "step": int(metrics["step"]),
            "why": group.why,
            "env_name": meta.env_name,
            "group_id": str(meta.group_id),
            "min_policy_version": meta.min_policy_version,
            "max_policy_version": meta.max_policy_version,
            "group_size": group.size,
            "prompt": self._prompt(prompt),
            "trajectories": trajectories,
        }

    def _prompt(self, tokens: Ints) -> str:
        self._tokens_cut += max(0, tokens.size - MOST_PROMPT)
        return "".join(self._texts.texts(tokens[-MOST_PROMPT:].tolist()))

    def _trajectory(self, row: _Row) -> Metrics:
        tokens, trained = row.tokens[row.prompt :], row.trained[row.prompt :]
        values = row.advantages[row.prompt :].astype(np.float64).round(4)
        cut = max(0, tokens.size - HEAD - TAIL)
        self._tokens_cut += cut
        keep = np.r_[0:HEAD, HEAD + cut : tokens.size] if cut else slice(None)
        texts = self._texts.texts(tokens[keep].tolist())
        found: Metrics = {
            "completion": "".join(texts),
            "score": row.score,
            "finish_reason": row.finish_reason,
            "tokens": texts,
            "advantages": [
                value if trains else None
                for value, trains in zip(values[keep].tolist(), trained[keep].tolist(), strict=True)
            ],
        }
        if cut:
            found |= {"cut_at": HEAD, "cut": cut}
        if row.step_rewards:
            found["step_rewards"] = row.step_rewards
            found["step_ends"] = [end - row.prompt for end in row.step_ends]
        return found


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


def _taken(batch: shmbridge.Batch, rows: TrainingRows, why: str, group: int) -> _Group:
    places = np.flatnonzero(batch.group_index == group).tolist()
    kept = [_row(batch, rows, place) for place in places[:MOST_ROWS]]
    return _Group(why, batch.meta[places[0]], len(places), kept)


def _row(batch: shmbridge.Batch, rows: TrainingRows, place: int) -> _Row:
    begin, end = rows.cu_seqlens[place : place + 2].tolist()
    tokens: Any = rows.tokens[begin:end]
    tokens = np.array(tokens if isinstance(tokens, np.ndarray) else tokens.cpu().numpy())
    trained = np.array(rows.trained[begin:end])
    answers = trained if rows.answers is None else rows.answers[begin:end]
    prompt = int(answers.argmax()) if answers.any() else tokens.size
    said = _scalar(batch, "prompt_length", place)
    if said is not None and 0 <= said < prompt:
        prompt = int(said)
    score, reason = _scalar(batch, "score", place), _scalar(batch, "finish_reason", place)
    return _Row(
        tokens,
        trained,
        np.array(rows.advantages[begin:end]),
        prompt,
        None if score is None or not np.isfinite(score) else float(score),
        FINISH_REASONS[int(reason)] if reason is not None and 0 <= reason < len(FINISH_REASONS) else None,
        [round(each, 4) for each in _list(batch, "step_rewards", place)],
        _list(batch, "step_ends", place),
    )


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
