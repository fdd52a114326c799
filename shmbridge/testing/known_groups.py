"""Groups with every trap that an adapter of a trainer meets, and what must arrive at its loss.

    producer = shmbridge.Producer("run1")
    for group in known_groups(seed=3):
        group.put(producer)
    ...                                    # the trainer under test
    group.rows[0].advantages               # equals what its loss got, position by position

Rows of uneven lengths, masks of several turns, a row of a prompt only, columns that are missing, a group in
two fragments, two policy versions; `loss_matrix()` has more. Imported by tests, never by the package.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import shmbridge
from shmbridge.schema import Split

Floats = np.ndarray[Any, np.dtype[np.float32]]

_NOT_RECORDED = (1.0, -9999.0, np.nan, np.inf)  # what environments write, by the row


@dataclass(frozen=True)
class KnownRow:
    """What a trainer must see of one row; L tokens, value i belongs to token i."""

    tokens: np.ndarray[Any, np.dtype[np.int32]]  # (L,)
    prompt_length: int  # tokens before the response; L in a row of a prompt only
    trained: np.ndarray[Any, np.dtype[np.bool_]]  # (L,)
    advantages: Floats  # (L,) 0 where nothing is trained; made of the scores where the group has none
    logprobs: Floats | None  # (L,) nats, 0 where nothing is trained, NaN where the sampler recorded none
    score: float
    finish_reason: str | None = None


@dataclass(frozen=True)
class KnownGroup:
    """One group, as it is put and as it must arrive."""

    name: str  # the trap it holds
    group_id: str
    versions: tuple[int, int]  # smallest and largest policy version
    fragments: Sequence[Mapping[str, Any]]  # what is put, in order
    rows: list[KnownRow]
    split: Split = "train"

    def put(self, producer: shmbridge.Producer) -> None:
        """Puts all fragments; blocks as `Producer.put`."""
        for fragment in self.fragments:
            producer.put(
                fragment,
                group_id=self.group_id,
                group_size=len(self.rows),
                policy_version=self.versions,
                split=self.split,
            )


def known_groups(seed: int = 3, *, vocabulary: int = 64, rows: int = 4, version: int = 4) -> list[KnownGroup]:
    """Returns five groups of `rows` rows; the same for the same arguments.

    Args:
        seed: of the generator of numbers.
        vocabulary: token ids are 1 to `vocabulary` - 1.
        rows: rows of a group, even and at least 4.
        version: the newest policy version; one group has tokens of `version` - 2 up to it.
    """
    random = np.random.default_rng(seed)
    made = {
        name: [_row(random, vocabulary) for _ in range(rows)]
        for name in ("uneven", "prompt only", "no columns", "fragments", "two versions")
    }
    alone = made["prompt only"][1]
    nothing = np.zeros(len(alone.tokens), np.float32)
    made["prompt only"][1] = KnownRow(alone.tokens, len(nothing), nothing > 0, nothing, nothing, alone.score)
    made["no columns"] = _from_scores(made["no columns"])
    groups = []
    for number, (name, each) in enumerate(made.items()):
        half = rows // 2
        parts = [each[:half], each[half:]] if name == "fragments" else [each]
        missing = {"advantages", "inference_logprobs", "prompt_length"} if name == "no columns" else set()
        fragments = [{k: v for k, v in _columns(part).items() if k not in missing} for part in parts]
        if name == "two versions":
            fragments[0]["token_versions"] = [_versions(row, version) for row in each]
        versions = (version - 2, version) if name == "two versions" else (version, version)
        groups.append(KnownGroup(name, f"known-{seed}-{number}", versions, fragments, each))
    return groups


def loss_matrix(seed: int = 3, *, vocabulary: int = 64, rows: int = 4, version: int = 4) -> list[KnownGroup]:
    """Returns the known groups and five more; arguments as of `known_groups`, the same for the same ones.

    "many versions", in which each trained token has another version than the one before it, replaces "two
    versions". "evaluation" may reach no loss. In "equal scores" only the advantages differ. In "truncated"
    every second row has the `finish_reason` "length". In "ends untrained" no row ends in a trained token. In
    "unknown log-probabilities" every row but the last lacks that of one token.
    """
    random = np.random.default_rng([seed, 1])
    made = {
        name: [_row(random, vocabulary, tail=name == "ends untrained") for _ in range(rows)]
        for name in ("evaluation", "equal scores", "truncated", "ends untrained", "unknown log-probabilities")
    }
    made["equal scores"] = [replace(row, score=0.5) for row in made["equal scores"]]
    made["truncated"] = [
        replace(row, finish_reason="length" if at % 2 else "stop") for at, row in enumerate(made["truncated"])
    ]
    for row in made["unknown log-probabilities"][:-1]:
        assert row.logprobs is not None
        row.logprobs[row.trained.argmax()] = np.nan
    groups = known_groups(seed, vocabulary=vocabulary, rows=rows, version=version)
    many = _columns(groups[-1].rows) | {
        "token_versions": [
            np.where(row.trained, version - np.arange(len(row.tokens)) % 3, -1) for row in groups[-1].rows
        ]
    }
    groups[-1] = replace(groups[-1], name="many versions", fragments=[many])
    for name, each in made.items():
        split: Split = "eval" if name == "evaluation" else "train"
        group_id, versions = f"known-{seed}-{len(groups)}", (version, version)
        groups.append(KnownGroup(name, group_id, versions, [_columns(each)], each, split))
    return groups


def _row(random: np.random.Generator, vocabulary: int, tail: bool = False) -> KnownRow:
    """A prompt, and two or three turns of the policy with a tool's answers between them, or after all."""
    prompt = int(random.integers(2, 9))
    turns = [int(n) for n in random.integers(1, 8, random.integers(2, 4))]
    trained = [False] * prompt
    for turn, length in enumerate(turns):
        trained += [True] * length
        if turn < len(turns) - 1:
            trained += [False] * int(random.integers(1, 5))
    trained += [False] * (int(random.integers(1, 4)) if tail else 0)
    mask = np.array(trained)
    spread = random.normal(size=len(mask)).astype(np.float32)
    advantages = np.where(mask, spread, np.float32(0))
    logprobs = np.where(mask, -np.abs(spread), np.float32(0))
    tokens = random.integers(1, vocabulary, len(mask)).astype(np.int32)
    return KnownRow(tokens, prompt, mask, advantages, logprobs, float(random.normal()))


def _from_scores(rows: list[KnownRow]) -> list[KnownRow]:
    """The rows of a group without advantages: (score - mean) / (std + 1e-4), GRPO, arXiv 2402.03300."""
    scores = np.array([row.score for row in rows])
    of_rows = ((scores - scores.mean()) / (scores.std() + 1e-4)).astype(np.float32)
    return [
        KnownRow(row.tokens, row.prompt_length, row.trained, row.trained * of_row, None, row.score)
        for row, of_row in zip(rows, of_rows, strict=True)
    ]


def _columns(rows: list[KnownRow]) -> dict[str, Any]:
    """As an environment writes them: Atropos' 1.0 for log-probabilities where nothing was sampled."""
    logprobs = [
        np.where(row.trained, row.advantages if row.logprobs is None else row.logprobs, np.float32(1))
        for row in rows
    ]
    for at, values in enumerate(logprobs):
        values[np.isnan(values)] = _NOT_RECORDED[at % len(_NOT_RECORDED)]
    columns = {
        "tokens": [row.tokens for row in rows],
        "prompt_length": [row.prompt_length for row in rows],
        "loss_mask": [row.trained.astype(np.uint8) for row in rows],
        "score": [row.score for row in rows],
        "advantages": [row.advantages for row in rows],
        "inference_logprobs": logprobs,
        "finish_reason": [row.finish_reason for row in rows],
    }
    return columns if rows[0].finish_reason else {k: v for k, v in columns.items() if k != "finish_reason"}


def _versions(row: KnownRow, version: int) -> list[int]:
    """Token versions of a row whose weights changed in the middle; -1 where nothing was sampled."""
    at = np.flatnonzero(row.trained)
    found = np.full(len(row.tokens), -1, np.int32)
    found[at] = version - 2
    found[at[len(at) // 2 :]] = version
    return found.tolist()
