"""The examples of docs/errors/mistakes.md: each is code and the error that it ends in.

`python tests/transport/mistakes/mistakes_page.py --write` writes the errors into the page again.
"""

import contextlib
import doctest
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import shmbridge
from shmbridge.weights import WeightsReader, WeightsWriter

PAGE = Path(__file__).parents[3] / "docs/errors/mistakes.md"
BRIDGE = f"t-mistakes-{os.getpid()}"
_FENCE = re.compile(r"(?<=```text\n).*?(?=```)", re.DOTALL)
_PARSER = doctest.DocTestParser()


def examples() -> list[doctest.Example]:
    """Returns the page's examples in order: `source`, and `want`, the error's text."""
    return [each for block in _FENCE.findall(PAGE.read_text()) for each in _PARSER.get_examples(block)]


class Scene:
    """The names that the examples use, made for them."""

    def __init__(self) -> None:
        before = os.environ.get("SHMBRIDGE_CHECK_ROWS")
        os.environ["SHMBRIDGE_CHECK_ROWS"] = "0"  # else a record's size depends on which rows are checked
        try:
            self._make()
        finally:
            if before is None:
                del os.environ["SHMBRIDGE_CHECK_ROWS"]
            else:
                os.environ["SHMBRIDGE_CHECK_ROWS"] = before

    def _make(self) -> None:
        self.consumer = shmbridge.Consumer(BRIDGE)
        self.consumer.publish_policy_version(5)
        self.producer = shmbridge.Producer(BRIDGE, lane_bytes="64K", on_full="raise")
        writer = WeightsWriter(BRIDGE)
        writer.publish(1, [("w", np.ones(2, np.float32))])
        group = {"tokens": [[1, 2], [3]], "score": [1.0, 0.0]}
        self.producer.put(group)
        batch = next(self.consumer.batches(groups=1, prefetch=0, timeout_s=5, hold="caller"))
        batch.release()
        self.producer.put(group)
        self.producer.put(group)
        record, released = self.consumer.get(timeout_s=5), self.consumer.get(timeout_s=5)
        released.release()
        closed = shmbridge.Producer(BRIDGE, lane_bytes="64K")
        closed.close()
        full = shmbridge.Producer(f"{BRIDGE}-full", lane_bytes="64K", on_full="raise")
        _fill(full)
        self.drained = shmbridge.Consumer(f"{BRIDGE}-over")
        late = shmbridge.Producer(f"{BRIDGE}-over", lane_bytes="64K")
        self.drained.drain()
        self.others = [full, late]
        self.names: dict[str, Any] = {
            "np": np,
            "pa": pa,
            "shmbridge": shmbridge,
            "WeightsReader": WeightsReader,
            "WeightsWriter": WeightsWriter,
            "nan": float("nan"),
            "consumer": self.consumer,
            "producer": self.producer,
            "closed_producer": closed,
            "full_producer": full,
            "late_producer": late,
            "released_record": released,
            "writer": writer,
            "batch": batch,
            "record": record,
        }
        for library, name in (("torch", "torch"), ("pandas", "pd"), ("polars", "pl")):
            if library in sys.modules or _can_import(library):
                self.names[name] = sys.modules[library]

    def error_of(self, source: str) -> tuple[Exception | None, str]:
        """Returns the error that the code ends in, and its text as the page has it; (None, "") if none."""
        try:
            exec(source.replace('"run1"', repr(BRIDGE)), dict(self.names))
        except Exception as wrong:
            text = str(wrong).replace(BRIDGE, "run1").replace(str(os.getpid()), "PID")
            return wrong, re.sub(r"-[0-9a-f]{16}\b", "-ID", text)
        finally:
            self.producer._writer.abort()
        return None, ""

    def close(self) -> None:
        """Ends all, and removes the bridges."""
        for name in ("record", "batch"):
            self.names[name].release()
        self.names["writer"].close()
        for end in (*self.others, self.producer, self.drained, self.consumer):
            end.close()
        for name in (BRIDGE, f"{BRIDGE}-full", f"{BRIDGE}-over"):
            shmbridge.clean(name, dry_run=False)


def _fill(producer: shmbridge.Producer) -> None:
    with contextlib.suppress(shmbridge.LaneFull):
        while True:
            producer.put({"tokens": [[1] * 4000], "loss_mask": [[1] * 4000]})


def _can_import(library: str) -> bool:
    try:
        __import__(library)
    except ImportError:
        return False
    return True


def _write() -> None:
    logging.disable(logging.CRITICAL)
    scene = Scene()

    def block(match: re.Match[str]) -> str:
        found = []
        for each in _PARSER.get_examples(match[0]):
            code = each.source.rstrip("\n").replace("\n", "\n... ")
            wrong, text = scene.error_of(each.source)
            if wrong is None:
                raise SystemExit(f"nothing is wrong with: {code}")
            found.append(f">>> {code}\n{text}\n")
        return "\n".join(found)

    PAGE.write_text(_FENCE.sub(block, PAGE.read_text()))
    scene.close()


if __name__ == "__main__" and "--write" in sys.argv:
    _write()
