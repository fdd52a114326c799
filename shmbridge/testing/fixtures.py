"""The segments of a bridge on the mount, and the processes that still have them open or mapped: for the error
of a test that leaves some.

Reads names and /proc only. Used by the fixtures.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

import shmbridge
from shmbridge.control.messages import (
    NO_RANKS,
    Ack,
    BeginGroup,
    Full,
    Manifest,
    MayBegin,
    NextShare,
    NoMoreShares,
    Refused,
    SharesDone,
)
from shmbridge.schema import Split
from shmbridge.segments import MOUNT
from shmbridge.testing import wait_until


def segments_of(bridge: str) -> list[str]:
    """Returns the names of the bridge's segments, and of its socket directory, that exist now, sorted."""
    return sorted(name for name in os.listdir(MOUNT) if name.startswith(f"shmbridge.{bridge}."))


def holders(bridge: str) -> list[str]:
    """Returns one line for each process that maps a segment of the bridge: its pid, its command and the
    segments.

    Sees processes of this user in this pid namespace only.
    """
    prefix = f"{MOUNT}/shmbridge.{bridge}."
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (mapped := _mapped(entry, prefix)):
            found.append(f"pid {entry.name} ({_command(entry)}) maps {', '.join(mapped)}")
    return sorted(found)


def _mapped(process: Path, prefix: str) -> list[str]:
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        paths = [
            line.split(maxsplit=5)[-1]
            for line in (process / "maps").read_text().splitlines()
            if prefix in line
        ]
        return sorted({path.removeprefix(f"{MOUNT}/").removesuffix(" (deleted)") for path in paths})
    return []


def _command(process: Path) -> str:
    with contextlib.suppress(OSError):
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:60]
    return "?"


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


@dataclass
class FakeHub:
    """Every field can be set; `queued` is groups per producer id, `live` the ids of living producers."""

    hub_epoch: int = 1
    run: shmbridge.Run | None = field(default_factory=lambda: shmbridge.Run(batch_size=16, num_steps=50))
    current_step: int = 0
    policy_version: int = -1
    paused: bool = False
    draining: bool = False
    queued: dict[str, int] = field(default_factory=dict)
    live: set[str] = field(default_factory=set)
    announced: int = 0
    refused: dict[str, str] = field(default_factory=dict)

    def refused_lanes(self) -> dict[str, str]:
        """Returns `refused`."""
        return self.refused

    def announce_run(self, run: shmbridge.Run) -> None:
        """Stores the run, and counts the call."""
        self.run = run
        self.announced += 1

    def publish_policy_version(self, version: int) -> None:
        """Stores the version; ValueError if it goes backwards, as in a consumer."""
        if version < self.policy_version:
            raise ValueError(f"policy version {version} is before {self.policy_version}")
        self.policy_version = version

    def pause(self) -> None:
        """Sets `paused`."""
        self.paused = True

    def resume(self) -> None:
        """Clears `paused`."""
        self.paused = False

    def drain(self) -> None:
        """Sets `draining`."""
        self.draining = True

    def queue_groups(self, producer_id: str | None = None) -> int:
        """Returns the groups waiting, of one producer or of all."""
        return sum(self.queued.values()) if producer_id is None else self.queued.get(producer_id, 0)

    def look_at_producers(self, producer_ids: Collection[str]) -> dict[str, tuple[bool, int]]:
        """Returns, per producer id, whether it is in `live`, and its groups."""
        return {each: (each in self.live, self.queue_groups(each)) for each in producer_ids}

    def next_share(self, request: NextShare) -> Manifest | NoMoreShares | Refused | None:
        """Returns Refused: there are no ranks here."""
        return Refused(NO_RANKS, "no real hub", "use a Consumer")

    def shares_done(self, request: SharesDone) -> Ack | Refused:
        """Returns Refused: there are no ranks here."""
        return Refused(NO_RANKS, "no real hub", "use a Consumer")

    def begin_group(self, request: BeginGroup) -> MayBegin | Full | Refused | None:
        """Returns MayBegin always: there is no limit here."""
        return MayBegin(self.hub_epoch, self.policy_version, 1 << 62)


_passed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remembers whether the test itself passed: after a failure nothing more is checked."""
    report = yield
    if report.when == "call":
        item.stash[_passed] = report.passed
    return report


@pytest.fixture
def bridge(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yields an unused bridge name.

    After a passed test none of its segments may be left; a failure names the processes that still hold one.
    """
    stem = re.sub(r"[^A-Za-z0-9]+", "-", request.node.name)[:28].strip("-")
    name = f"t-{stem}-{os.getpid()}-{os.urandom(2).hex()}"
    yield name
    report = shmbridge.clean(name, dry_run=False)
    if segments_of(name):  # an end in a cycle of objects lives until it is collected, which takes long
        gc.collect()  # frees the consumer
        gc.collect()  # and what only its finalizer kept
        before = holders(name)
        report = shmbridge.clean(name, dry_run=False)
        if request.node.stash.get(_passed, False):
            still = "; ".join([*(f"{segment}: {why}" for segment, why in report.kept.items()), *before])
            assert not report.kept, f"still in use after the test: {still}"
            assert not segments_of(name), f"left after the test: {still or 'no process maps it'}"


@pytest.fixture
def segments(bridge: str) -> Callable[[], list[str]]:
    """Returns a function for the names of the bridge's segments that exist now."""
    return lambda: segments_of(bridge)


@pytest.fixture
def make_producer(bridge: str) -> Iterator[Callable[..., shmbridge.Producer]]:
    """Yields a function that makes a Producer of the bridge, with Producer's options; lanes of 64 KiB by
    default.

    Closed at the end.
    """
    with contextlib.ExitStack() as made:

        def make(**options: Any) -> shmbridge.Producer:
            producer = shmbridge.Producer(bridge, **{"lane_bytes": "64K", **options})
            made.callback(producer.close)
            return producer

        yield make


@pytest.fixture
def make_consumer(bridge: str) -> Iterator[Callable[..., shmbridge.Consumer]]:
    """Yields a function that makes a Consumer of the bridge, with Consumer's options. Closed at the end."""
    with contextlib.ExitStack() as made:

        def make(**options: Any) -> shmbridge.Consumer:
            consumer = shmbridge.Consumer(bridge, **options)
            made.callback(consumer.close)
            return consumer

        yield make


@pytest.fixture
def child(bridge: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Yields a function that runs Python code in a child, where `bridge` is defined; it returns once the
    child has printed `until`.

    Standard input and output are pipes, in text. Killed at the end of the test, if it still runs.
    """
    with contextlib.ExitStack() as children:

        def start(code: str, *, until: str = "ready") -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-c", f"bridge = {bridge!r}\n{code}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            children.callback(_end, process)
            line = _pipe(process.stdout).readline().strip()
            assert line == until, f"child {process.pid} said {line!r} and not {until!r}"
            return process

        yield start


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):  # input that the child never read
            _pipe(stream).close()


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


@pytest.fixture
def until() -> Callable[..., None]:
    """`shmbridge.testing.wait_until`: polls a condition, with a deadline."""
    return wait_until
