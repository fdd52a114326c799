"""A process that takes records from a lane while its bytes are changed, and reports the result.

Run by the tests as a child.

Standard input: one plan per line, JSON. Standard output: one report per line. An error other than a
ShmBridgeError is reported with its place; a crash shows as the end of this process.
"""

import contextlib
import gc
import io
import json
import logging
import mmap
import os
import resource
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

import shmbridge
from shmbridge import cli
from shmbridge.record import Ragged, RaggedLists, Record

sys.path.insert(0, str(Path(__file__).parent))
from places import LaneBytes

MEMORY_LIMIT = 3 << 30  # a false size must not use up the machine's memory
GOOD_BEFORE, GOOD_AFTER = 3, 3


def rich(number: int) -> dict[str, Any]:
    return {
        "tokens": [[number, 2, 3], [4, 5]],
        "loss_mask": [[0, 1, 1], [0, 1]],
        "score": [1.0, None],
        "advantages": [[0.5, 1.0, 1.5], [2.0, 2.5]],
        "step_rewards": [[0.5], [1.0, 2.0]],
        "step_ends": [[3], [1, 2]],
        "distill_token_ids": [[[1, 2], [3], []], [[4], [5, 6, 7]]],
        "reward_components": [{"a": 1.0, "größe": 2.0}, {}],
        "instance_id": ["one", "zwei ü"],
        "is_last": [True, False],
        "messages": [json.dumps([{"role": "user", "content": "x"}]), None],
        "group_overrides": '{"k": 1}',
        "images": None,
        "routed_experts": [b"\x00\xff", b""],
    }


def put_bad(producer: shmbridge.Producer) -> int:
    """Records of every shape; their number."""
    producer.put(rich(1))
    producer.put({"tokens": [[1]], "masks": [[-100]], "scores": [0.0], "ref_logprobs": []}, foreign=True)
    producer.put({"tokens": [[7, 8]]}, group_id="whole", group_size=2)
    producer.put({"tokens": [[9]], "score": [0.5]}, group_id="whole", group_size=2)
    producer.put(rich(2))
    return 5


class Scene:
    """One bridge, one good lane, one that is scribbled over."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.bridge = plan["bridge"]
        self.wrong: list[str] = []
        self.typed: list[str] = []  # the typed errors that were raised, with their texts
        self.said: list[str] = []
        self.good_seen: list[int] = []
        self.bad_seen = 0
        self.stats: dict[str, float] = {}

    # -- asking
    # --------------------------------------------------------------------------------------------------------

    def ask(self, what: str, call: Any) -> Any:
        """Makes a call; typed errors are noted, others are failures."""
        try:
            return call()
        except shmbridge.ShmBridgeError as error:
            self.typed.append(f"{what}: {type(error).__name__}")
            self.said.append(str(error)[:200])
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.wrong.append(
                f"{what}: {type(error).__name__}: {str(error)[:120]} at "
                f"{Path(where.filename).name}:{where.lineno}"
            )
        return None

    def read(self, record: Record) -> None:
        """Reads everything that can be read of a record."""
        good = record.meta.producer_id.startswith("good-")
        for name in self.ask("columns", lambda: record.columns) or []:
            value = self.ask(f"record[{name!r}]", lambda name=name: record[name])
            self.ask(f"touch {name}", lambda value=value: touch(record, value))
            self.ask(f"valid {name}", lambda name=name: record.valid(name))
            self.ask(f"checks {name}", lambda name=name: record.row_checks(name))
        for name in ("messages", "group_overrides", "extra"):
            self.ask(f"json {name}", lambda name=name: name in record and record.json(name))
        self.ask("to_arrow", lambda: record.meta.uneven or record.to_arrow().to_pylist())
        self.ask("to_scored_data", record.to_scored_data)
        self.ask("repr", lambda: f"{record!r} {record.meta} {len(record)}")
        if good:
            self.good_seen.append(int(record["tokens"].values[0]))
        else:
            self.bad_seen += 1

    # -- the story
    # --------------------------------------------------------------------------------------------------------

    def scribble(self, moment: str) -> None:
        if self.plan["moment"] == moment:
            for name, how, value in self.plan["changes"]:
                self.lane.change(name, how, value)

    def play(self) -> None:
        self._play()
        gc.collect()  # cheap: imported objects are frozen
        self.ask("clean", lambda: shmbridge.clean(self.bridge, dry_run=False))

    def _play(self) -> None:
        good = shmbridge.Producer(self.bridge, lane_bytes="64K", on_full="raise", producer_id="good")
        bad = shmbridge.Producer(self.bridge, lane_bytes="64K", on_full="raise", producer_id="bad")
        with open(f"/dev/shm{bad.lane_name}", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            self.lane = LaneBytes(memory, put_bad(bad))
            for number in range(GOOD_BEFORE):
                good.put({"tokens": [[number]]})
            if self.plan.get("dead"):
                bad.close()
            self.scribble("before")
            consumer = self.ask(
                "Consumer()",
                lambda: shmbridge.Consumer(self.bridge, resume=self.plan.get("resume", "redeliver")),
            )
            if consumer is not None:
                self.consume(consumer, good, bad)
            self.ask("bad.put", lambda: self.plan.get("dead") or put_bad(bad))
            self.ask("bad.stats", bad.stats)
            self.ask("bad.close", bad.close)
            if consumer is None or self.plan.get("dead"):
                self.look_around()
            self.ask("good.close", good.close)
            self.lane.memory = None
        successor = self.ask("Consumer() again", lambda: shmbridge.Consumer(self.bridge, resume="discard"))
        if successor is not None:
            self.ask("poll again", successor.poll)
            self.ask("close again", successor.close)

    def consume(
        self, consumer: shmbridge.Consumer, good: shmbridge.Producer, bad: shmbridge.Producer
    ) -> None:
        self.scribble("adopted")
        held: list[Record] = []
        if self.plan["how"] == "poll":
            held += self.ask("poll", lambda: consumer.poll(2)) or []
            self.scribble("held")
            held += self.ask("poll", consumer.poll) or []
            self.scribble("taken")
        for record in held:
            self.read(record)
        for number in range(GOOD_BEFORE, GOOD_BEFORE + GOOD_AFTER):
            good.put({"tokens": [[number]]})
        self.ask("bad.put", lambda: self.plan.get("dead") or bad.put(rich(3)))
        if self.plan["how"] == "poll":
            for record in self.ask("poll", consumer.poll) or []:
                self.read(record)
                self.ask("release", record.release)
            while (record := self.ask("get", lambda: self.next_or_none(consumer))) is not None:
                self.read(record)
        else:
            self.batches(consumer)
        for record in held:
            self.ask("release", record.release)
        held.clear()
        record = None
        self.stats = self.ask("stats", consumer.stats) or {}
        self.look_around()
        self.ask("close", consumer.close)

    def next_or_none(self, consumer: shmbridge.Consumer) -> Record | None:
        with contextlib.suppress(shmbridge.ConsumerEmpty):
            return consumer.get(timeout_s=0.002)
        return None

    def batches(self, consumer: shmbridge.Consumer) -> None:
        consumer.drain()
        form = {
            "groups": self.plan.get("groups", 1),
            "layout": self.plan.get("layout", "packed"),
            "prefetch": self.plan.get("prefetch", 0),
        }
        for _ in range(20):  # a typed error of one record may end an iteration; the next one goes on
            before = len(self.wrong) + len(self.typed)
            self.ask("batches", lambda: self.iterate(consumer, form))
            if len(self.wrong) + len(self.typed) == before:
                return
        self.wrong.append("batches: no end of errors")

    def iterate(self, consumer: shmbridge.Consumer, form: dict[str, Any]) -> None:
        for batch in consumer.batches(**form):
            rows = len(batch)
            starts = batch.cu_seqlens[:-1].tolist()
            flat = batch["tokens"] if form["layout"] == "packed" else batch["tokens"][:, 0]
            for row, meta in enumerate(batch.meta):
                if meta.producer_id.startswith("good-"):
                    self.good_seen.append(int(flat[starts[row]] if form["layout"] == "packed" else flat[row]))
                else:
                    self.bad_seen += 1
            for name in batch.columns:
                value = batch[name]
                per_token = form["layout"] == "packed" and getattr(value, "shape", None) == (
                    batch.token_count,
                )
                if not per_token and len(value) != rows:
                    self.wrong.append(f"batch[{name!r}] has {len(value)} rows of {rows}")
                if len(batch.has(name)) != rows:
                    self.wrong.append(f"batch.has({name!r}) has {len(batch.has(name))} rows of {rows}")
            if len(batch.meta) != rows:
                self.wrong.append(f"{len(batch.meta)} metas for {rows} rows")
            str(batch)

    def look_around(self) -> None:
        self.ask(
            "inspect", lambda: quietly(["inspect", self.bridge, "--seconds", "0"])
        )  # which lists all bridges
        self.ask("clean", lambda: quietly(["clean", self.bridge, "--json"]))


def quietly(argv: list[str]) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        cli.main(argv)


def touch(record: Record, value: Any) -> None:
    """Reads every byte; what is in place must lie inside the record's extent."""
    if isinstance(value, (Ragged, RaggedLists)):
        for row in range(len(value)):
            touch(record, value[row])
        touch(record, value.values)
    elif isinstance(value, np.ndarray) and value.size:
        value.tobytes()
        extent = np.frombuffer(memoryview(record), np.uint8)
        low, high = (each.__array_interface__["data"][0] for each in (extent, extent[-1:]))
        begin = value.__array_interface__["data"][0]
        if not low <= begin <= begin + value.nbytes - 1 <= high:
            raise AssertionError(f"{value.nbytes} bytes at {begin:#x} are outside {low:#x}..{high:#x}")


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)
    thread_errors: list[str] = []
    import threading

    threading.excepthook = lambda args: thread_errors.append(
        f"thread {args.thread and args.thread.name}: {args.exc_type.__name__}"
    )
    sys.unraisablehook = lambda args: thread_errors.append(
        f"unraisable: {args.exc_type.__name__} {args.exc_value}"
    )
    for line in sys.stdin:
        gc.freeze()
        scene = Scene(json.loads(line))
        try:
            scene.play()
        except BaseException as error:
            scene.wrong.append(f"story: {type(error).__name__}: {error} {traceback.format_exc()[-400:]}")
        scene.wrong += thread_errors
        thread_errors.clear()
        report = {
            "wrong": scene.wrong,
            "typed": scene.typed,
            "said": scene.said,
            "good": scene.good_seen,
            "bad": scene.bad_seen,
            "quarantined": scene.stats.get("lanes_quarantined", 0),
            "refused": scene.stats.get("lanes_refused", 0),
            "discarded": scene.stats.get("discarded_total", 0),
            "pid": os.getpid(),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
