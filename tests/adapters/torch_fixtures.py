"""A tiny model and hand-made packed batches, so that the learner is tested without a transport; W&B's files
read back.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

import shmbridge
from shmbridge.consumers.learner.data.row_checks import RowCheck

__all__ = [
    "_one_thread",
    "_rows_are_what_was_put",
    "agreement",
    "bridge",
    "differences_allowed",
    "on_ranks",
    "packed_batch",
    "serving",
    "tiny_model",
    "wandb_history",
]  # the fixtures, for conftest files

VOCABULARY = 28
BLOCK = 32768  # a W&B file is a log of blocks, as LevelDB's: each piece has crc, length and kind in front


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _rows_are_what_was_put(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test in this process whose learner trained other values than were put, unless it allows
    differences.
    """
    if "differences_allowed" in request.fixturenames:
        return
    differences = RowCheck.differences

    def none(check: RowCheck) -> dict[int, str]:
        found = differences(check)
        assert not found, found
        return found

    monkeypatch.setattr(RowCheck, "differences", none)


@pytest.fixture
def differences_allowed() -> None:
    """Allows differences, for tests that plant some."""


@pytest.fixture
def bridge() -> Iterator[str]:
    """Yield the name of a bridge; afterwards nothing of it is left, once those who were killed, and their
    children, are gone.
    """
    name = f"learner-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    yield name
    deadline = time.monotonic() + 20.0
    while (kept := shmbridge.clean(name, dry_run=False).kept) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not kept


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[int], PreTrainedModel]:
    """Return a maker of random models: seed -> 86,208 parameters, float32."""

    def make(seed: int) -> PreTrainedModel:
        torch.manual_seed(seed)
        config = Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=256,
            initializer_range=0.1,
            tie_word_embeddings=False,
        )
        return Qwen2ForCausalLM(config).eval()

    return make


@dataclass
class HandMadeBatch:
    """The attributes of a packed `shmbridge.Batch`."""

    tokens: np.ndarray
    cu_seqlens: np.ndarray
    position_ids: np.ndarray
    lengths: np.ndarray
    loss_mask: np.ndarray | None
    group_index: np.ndarray
    scores: np.ndarray | None
    advantages: np.ndarray | None
    inference_logprobs: np.ndarray | None
    temperature: np.ndarray | None
    prompt_length: np.ndarray | None
    overrides: list[str | None] | None
    generation_params: list[str | None] | None
    group_overrides: list[str | None] | None
    meta: list[Any]
    ref_logprobs: np.ndarray | None = None
    token_rewards: np.ndarray | None = None
    token_versions: np.ndarray | None = None
    step_rewards: Any = None  # values and lengths, as shmbridge.Ragged
    step_ends: Any = None
    advantages_mask: Any = None
    finish_reason: np.ndarray | None = None
    present: dict[str, np.ndarray] = field(default_factory=dict)
    released: int = 0

    def __getitem__(self, column: str) -> Any:
        return getattr(self, column)

    def has(self, column: str) -> np.ndarray:
        return self.present.get(column, np.zeros(len(self.meta), dtype=bool))

    def release(self) -> None:
        self.released += 1


# method, path, query, body -> status, body
Answer = Callable[[str, str, dict[str, str], Any], tuple[int, Any]]


@pytest.fixture
def serving() -> Iterator[Callable[[Answer], str]]:
    """Return a starter of servers of one's own: what it answers -> its address."""
    with ExitStack() as stack:
        yield lambda answer, port=0: stack.enter_context(served(answer, port))


@contextmanager
def served(answer: Answer, port: int = 0) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            where = urlsplit(self.path)
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            assert not raw or self.headers["Content-Type"] == "application/json"
            status, said = answer(
                self.command, where.path, dict(parse_qsl(where.query)), json.loads(raw) if raw else None
            )
            body = said.encode() if isinstance(said, str) else json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with suppress(ConnectionError):  # the client may have been killed
                self.wfile.write(body)

        do_GET = do_POST = _answer

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def packed_batch() -> Callable[..., HandMadeBatch]:
    """Return a maker of batches from rows; None in a column's row means: its record carried none."""

    def make(
        rows: Sequence[Sequence[int]],
        *,
        masks: Sequence[Sequence[int] | None] | None = None,
        groups: Sequence[int] | None = None,
        scores: Sequence[float | None] | None = None,
        advantages: Sequence[Sequence[float] | None] | None = None,
        logprobs: Sequence[Sequence[float] | None] | None = None,
        temperatures: Sequence[float | None] | None = None,
        prompt_lengths: Sequence[int | None] | None = None,
        overrides: Sequence[str | None] | None = None,
        generation_params: Sequence[str | None] | None = None,
        group_overrides: Sequence[str | None] | None = None,
        ref_logprobs: Sequence[Sequence[float] | None] | None = None,
        token_rewards: Sequence[Sequence[float] | None] | None = None,
        token_versions: Sequence[Sequence[int] | None] | None = None,
        step_rewards: Sequence[Sequence[float] | None] | None = None,
        step_ends: Sequence[Sequence[int] | None] | None = None,
        advantages_mask: Sequence[Sequence[int] | None] | None = None,
        finish_reasons: Sequence[int | None] | None = None,
        version: int = 0,
        envs: Sequence[str] | None = None,
        published_ns: Sequence[int] | None = None,
    ) -> HandMadeBatch:
        present: dict[str, np.ndarray] = {}

        def ragged(name: str, values: Sequence[Any] | None, dtype: type) -> np.ndarray | None:
            if values is None:
                return None
            present[name] = np.array([row is not None for row in values])
            filled = [np.zeros(len(t)) if v is None else v for t, v in zip(rows, values, strict=True)]
            return np.concatenate(filled).astype(dtype)

        def lists(name: str, values: Sequence[Any] | None, dtype: type) -> SimpleNamespace | None:
            if values is None:
                return None
            present[name] = np.array([row is not None for row in values])
            filled = [np.zeros(0) if row is None else np.asarray(row) for row in values]
            return SimpleNamespace(
                values=np.concatenate(filled).astype(dtype),
                lengths=np.array([len(row) for row in filled], np.int32),
            )

        def scalar(name: str, values: Sequence[float | None] | None, dtype: type) -> np.ndarray | None:
            if values is None:
                return None
            present[name] = np.array([value is not None for value in values])
            return np.array([0.0 if value is None else value for value in values], dtype=dtype)

        if prompt_lengths is None:
            prompt_lengths = [0] * len(rows)  # rows without a mask are whole
        group_of = list(groups if groups is not None else [0] * len(rows))

        def record(group: int) -> SimpleNamespace:
            first = group_of.index(group)
            return SimpleNamespace(
                min_policy_version=version,
                max_policy_version=version,
                redelivered=False,
                env_name="test" if envs is None else envs[first],
                group_id=f"group-{group}",
                producer_id="test-1",
                sequence=group,
                t_publish_ns=0 if published_ns is None else published_ns[first],
            )

        records = {group: record(group) for group in group_of}
        return HandMadeBatch(
            tokens=np.concatenate([np.asarray(row, dtype=np.int32) for row in rows]),
            cu_seqlens=np.cumsum([0] + [len(row) for row in rows]).astype(np.int32),
            position_ids=np.concatenate([np.arange(len(row), dtype=np.int32) for row in rows]),
            lengths=np.array([len(row) for row in rows], dtype=np.int32),
            loss_mask=ragged("loss_mask", masks, np.uint8),
            group_index=np.asarray(group_of, dtype=np.int32),
            scores=scalar("score", scores, np.float64),
            advantages=ragged("advantages", advantages, np.float32),
            inference_logprobs=ragged("inference_logprobs", logprobs, np.float32),
            temperature=scalar("temperature", temperatures, np.float32),
            finish_reason=scalar("finish_reason", finish_reasons, np.uint8),
            prompt_length=scalar("prompt_length", prompt_lengths, np.int32),
            overrides=None if overrides is None else list(overrides),
            generation_params=None if generation_params is None else list(generation_params),
            group_overrides=None if group_overrides is None else list(group_overrides),
            ref_logprobs=ragged("ref_logprobs", ref_logprobs, np.float32),
            token_rewards=ragged("token_rewards", token_rewards, np.float32),
            token_versions=ragged("token_versions", token_versions, np.int32),
            step_rewards=lists("step_rewards", step_rewards, np.float32),
            step_ends=lists("step_ends", step_ends, np.int32),
            advantages_mask=lists("advantages_mask", advantages_mask, np.uint8),
            meta=[records[group] for group in group_of],
            present=present,
        )

    return make


@pytest.fixture
def on_ranks() -> Callable[..., list[Any]]:
    """Return a runner: (ranks, function of a rank and its `reduce`) -> results; a thread is a rank."""

    def run(ranks: int, function: Callable[[int, Any], Any]) -> list[Any]:
        barrier, sent = threading.Barrier(ranks, timeout=30), [np.zeros(0)] * ranks

        def reducer(rank: int) -> Callable[[np.ndarray], np.ndarray]:
            def reduce(values: np.ndarray) -> np.ndarray:
                sent[rank] = values
                barrier.wait()
                total = np.sum(sent, axis=0)
                barrier.wait()
                return total

            return reduce

        with ThreadPoolExecutor(ranks) as pool:
            return list(pool.map(lambda rank: function(rank, reducer(rank)), range(ranks)))

    return run


@pytest.fixture
def agreement(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Return a recorder of differences between another package's numbers and ours; see agreement.py."""

    def record(
        package: str,
        what: str,
        value: float,
        gradient: float | None,
        tolerance: float | None,
        why: str | None = None,
    ) -> None:
        record_property("agreement", [package, what, value, gradient, tolerance, why])

    return record


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [
        report
        for outcome in terminalreporter.stats.values()
        for report in outcome
        if isinstance(report, pytest.TestReport)
    ]
    rows = [
        row
        for report in reports
        if report.when == "call"
        for name, row in report.user_properties
        if name == "agreement"
    ]
    for package, what, value, gradient, *_ in rows:
        terminalreporter.write_line(
            f"{package:5} {what:70} {value:9.1e} {'' if gradient is None else f'{gradient:9.1e}'}"
        )


def records(path: Path) -> Iterator[Any]:
    """Yield the records of a W&B file, which W&B itself reads only to send it away."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:  # no room for a head: the rest of the block is empty
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if at + 7 + length > len(data):
            return  # more is being written
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


@pytest.fixture
def wandb_history() -> Callable[..., tuple[list[dict[str, Any]], Any]]:
    return history


def history(folder: Path, runs: int, within_s: float = 30.0) -> tuple[list[dict[str, Any]], Any]:
    """Return every logged row of all runs under a folder, in order, and the last description of a run.

    Another process writes the files, and may go on for a moment after a run has ended.
    """
    deadline = time.monotonic() + within_s
    while True:
        paths = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))
        found = [record for path in paths for record in records(path)]
        if sum(record.WhichOneof("record_type") == "exit" for record in found) == runs:
            break
        assert time.monotonic() < deadline, f"W&B has not ended {runs} runs in {paths}"
        time.sleep(0.05)
    logged = [record.history.item for record in found if record.WhichOneof("record_type") == "history"]
    rows = [{"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items} for items in logged]
    return rows, [record.run for record in found if record.WhichOneof("record_type") == "run"][-1]
