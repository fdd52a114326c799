"""NeMo Gym's captured tokens through a bridge: `ShmTokenSink` in its model servers, `ShmTokenSource` at the
trainer.

    token_id_capture:
      enabled: true
      sink: "shmbridge.producers.nemo_gym:ShmTokenSink"
      sink_kwargs: {bridge: run1, folder: /path/of/this/run}

Each model call is a record of a lane: once `put` returns, the death of any process leaves it there, and the
next source gets it. A small file for each rollout, in `folder`, is locked by whoever writes or freezes it:
it has the calls, the holes and the end. The records are of split "eval": a call has no reward, and no door of
training data hands it out.

Written from `nemo_gym/token_id_capture/` at commit 07d6b0d0 of github.com/NVIDIA-NeMo/Gym.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

import pyarrow as pa

from shmbridge import Consumer, Producer, Record, ShmBridgeError
from shmbridge.errors import BadArgument

if TYPE_CHECKING:
    from nemo_gym.token_id_capture.protocols import TokenCaptureSnapshot
    from nemo_gym.token_id_capture.records import TokenEntry

T = TypeVar("T")

_ID = re.compile(r"[A-Za-z0-9._-]{1,200}")
_LOGPROBS = "generation_log_probs"  # as they came: those of the schema are rounded to float32
_SCHEMA = pa.schema([(_LOGPROBS, pa.list_(pa.float64()))])
_LOOK_S = 0.005  # between two looks at a lock, or for records
_ENDING = ".calls"


class CaptureRefused(ShmBridgeError, ValueError):
    """A model call cannot be stored: its rollout is frozen, or its id stands for other content already."""

    code = "SB527"


class ShmTokenSink:
    """Stores model calls in a lane; NeMo Gym's `TokenSink`, with its `begin_call`. For one event loop.

    Args:
        bridge: name of the bridge.
        folder: of this run, for sinks and source; made if it is not there.
        env_name: in metrics.
        lane_bytes: size of the lane. It holds all calls of all rollouts that are not retired yet.
        timeout_s: longest wait for room in it. Then the call is refused, and Gym masks its rollout.
    """

    def __init__(
        self,
        bridge: str,
        folder: str | Path,
        *,
        env_name: str = "nemo_gym",
        lane_bytes: int | str = "256M",
        timeout_s: float = 60.0,
    ) -> None:
        self._rollouts, self._timeout_s = _Rollouts(folder), timeout_s
        self._thread = ThreadPoolExecutor(1, "shmbridge-nemo-gym-sink")  # a producer is for one thread
        make = self._thread.submit(
            Producer, bridge, env_name=env_name, lane_bytes=lane_bytes, schema=_SCHEMA, on_full="block"
        )
        self._producer = make.result()

    async def put(self, entry: TokenEntry) -> None:
        """Stores one call; once it returns, no death of a process loses it. The same call again does nothing.

        Raises:
            CaptureRefused: the rollout is frozen; or the call's id was there with other content, and the
                rollout is marked incomplete.
            LaneFull: there was no room within the time; nothing is stored.
        """
        await self._called(lambda: self._put(entry))

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """Notes that a call is about to be made: without its `put`, the rollout will be incomplete.

        Raises CaptureRefused: the rollout is frozen.
        """
        await self._called(lambda: self._note(rollout_id, intent=model_call_id))

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """Notes that a call of the rollout is missing, for good; a frozen rollout takes it too.

        Raises CaptureRefused: the rollout is retired.
        """
        await self._called(lambda: self._note(rollout_id, hole=model_call_id))

    async def close(self) -> None:
        """Leaves the bridge, with what is stored in the lane; again does nothing."""
        with contextlib.suppress(RuntimeError):  # the thread has ended before
            await self._called(self._producer.close)
        self._thread.shutdown(wait=False)

    async def _called(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _note(self, rollout_id: str, **what: str) -> None:
        with self._rollouts.locked(rollout_id) as rollout:
            if rollout.retired or (rollout.snapshot_id and "intent" in what):
                raise _frozen(rollout_id)
            rollout.note(**what)

    def _put(self, entry: TokenEntry) -> None:
        fields = entry.model_dump(mode="json")
        digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
        call_id = entry.model_call_id
        with self._rollouts.locked(entry.rollout_id) as rollout:
            if rollout.snapshot_id:
                raise _frozen(entry.rollout_id)
            if rollout.calls.get(call_id) == digest:
                return
            if call_id in rollout.calls:
                rollout.note(hole=call_id)
                raise CaptureRefused(
                    f"call {call_id!r} of rollout {entry.rollout_id!r} was stored with other content",
                    hint="give each call an id of its own",
                )
            prompt, sampled = fields.pop("prompt_token_ids"), fields.pop("generation_token_ids")
            group = {
                "tokens": [prompt + sampled],
                "prompt_length": [len(prompt)],
                "loss_mask": [[0] * len(prompt) + [1] * len(sampled)],
                _LOGPROBS: [fields.pop(_LOGPROBS)],
                "instance_id": [entry.rollout_id],
                "extra": {"nemo_gym": fields, "digest": digest},
            }
            self._producer.put(group, split="eval", timeout_s=self._timeout_s)
            rollout.note(call=call_id, digest=digest)


class ShmTokenSource:
    """Freezes, reads and retires rollouts; NeMo Gym's `TokenSource`, the consumer of the bridge. For one
    event loop.

    A record is released by `drop` or `forget` alone: a source that is killed leaves all others to the next.

    Args:
        bridge, folder: those of the sinks.
        timeout_s: longest wait for a call that a sink has stored; then its rollout is incomplete.
        lanes: model servers at most, those that ended with records included.

    Attributes:
        forgotten: calls that were released without a snapshot being retired, by why.
    """

    def __init__(self, bridge: str, folder: str | Path, *, timeout_s: float = 10.0, lanes: int = 64) -> None:
        self._rollouts, self._timeout_s = _Rollouts(folder), timeout_s
        self._held: dict[str, list[Record]] = {}
        self.forgotten: Counter[str] = Counter()
        self._thread = ThreadPoolExecutor(1, "shmbridge-nemo-gym-source")  # a consumer is for one thread
        self._consumer = self._thread.submit(Consumer, bridge, lanes=lanes, schema=_SCHEMA).result()

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """Ends a rollout and returns its calls; again returns the same. Waits for a `put` under way.

        It is incomplete if a call was marked, begun and not stored, or stored and not found.

        Raises CaptureRefused: it is retired.
        """
        return await self._called(lambda: self._freeze(rollout_id))

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Releases the calls of a frozen rollout, if it is as it was in the snapshot; returns whether."""
        return await self._called(lambda: self._drop(rollout_id, snapshot_id, version))

    async def forget(self, rollout_id: str, why: str = "masked") -> int:
        """Releases the calls of a rollout whatever its state, and ends it: Gym drops none that was masked.

        Args:
            why: counted in `forgotten`.

        Returns:
            How many calls.
        """
        return await self._called(lambda: self._forget(rollout_id, why))

    async def sweep(self, older_than_s: float) -> int:
        """Removes the files of rollouts that were retired so long ago; returns how many."""
        return await self._called(lambda: self._rollouts.sweep(older_than_s))

    async def close(self) -> None:
        """Leaves the bridge; the calls of rollouts that are not retired are the next source's."""
        with contextlib.suppress(RuntimeError):  # the thread has ended before
            await self._called(self._leave)
        self._thread.shutdown(wait=False)

    async def _called(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _leave(self) -> None:
        self._held.clear()  # unreleased: the next source gets them
        self._consumer.close()

    def _poll(self) -> None:
        while records := self._consumer.poll():
            for record in records:
                rollout_id = str(record["instance_id"][0])
                if record.meta.redelivered and self._rollouts.is_retired(rollout_id):
                    record.release()  # a source was killed while it retired them
                else:
                    self._held.setdefault(rollout_id, []).append(record)

    def _freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        from nemo_gym.token_id_capture.protocols import TokenCaptureSnapshot

        with self._rollouts.locked(rollout_id, meanwhile=self._poll) as rollout:
            if rollout.retired:
                raise _frozen(rollout_id)
            if not rollout.snapshot_id:
                rollout.note(frozen=uuid.uuid4().hex)
            entries, is_whole = self._entries(rollout_id, rollout)
            return TokenCaptureSnapshot(
                rollout_id=rollout_id,
                entries=tuple(entries.values()),
                incomplete=not is_whole or bool(rollout.holes) or not rollout.intents <= entries.keys(),
                snapshot_id=rollout.snapshot_id,
                version=rollout.version,
            )

    def _entries(self, rollout_id: str, rollout: _Rollout) -> tuple[dict[str, TokenEntry], bool]:
        """The calls by their ids, and whether they are all, and agree."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            self._poll()
            found: dict[str, tuple[str, Record]] = {}
            agree = True
            for record in self._held.get(rollout_id, ()):
                extra = record.json("extra")
                call_id, digest = extra["nemo_gym"]["model_call_id"], extra["digest"]
                agree &= found.setdefault(call_id, (digest, record))[0] == digest
            if rollout.calls.keys() <= found.keys() or time.monotonic() > deadline:
                break
            time.sleep(_LOOK_S)
        entries = {call_id: _entry(record) for call_id, (_, record) in found.items()}
        return entries, agree and rollout.calls.keys() <= found.keys()

    def _drop(self, rollout_id: str, snapshot_id: str, version: int) -> bool:
        with self._rollouts.locked(rollout_id, meanwhile=self._poll) as rollout:
            if not rollout.snapshot_id or (rollout.snapshot_id, rollout.version) != (snapshot_id, version):
                return False
            self._retire(rollout_id, rollout)
            return True

    def _forget(self, rollout_id: str, why: str) -> int:
        with self._rollouts.locked(rollout_id, meanwhile=self._poll) as rollout:
            count = self._retire(rollout_id, rollout)
        self.forgotten[why] += count
        return count

    def _retire(self, rollout_id: str, rollout: _Rollout) -> int:
        self._poll()
        rollout.note(retired=rollout.snapshot_id or uuid.uuid4().hex)  # first: what is released is not asked
        records = self._held.pop(rollout_id, [])
        for record in records:
            record.release()
        return len(records)


def _entry(record: Record) -> TokenEntry:
    from nemo_gym.token_id_capture.records import TokenEntry

    tokens, prompt = record["tokens"][0].tolist(), int(record["prompt_length"][0])
    return TokenEntry(
        **record.json("extra")["nemo_gym"],
        prompt_token_ids=tokens[:prompt],
        generation_token_ids=tokens[prompt:],
        generation_log_probs=record[_LOGPROBS][0].tolist(),
    )


def _frozen(rollout_id: str) -> CaptureRefused:
    return CaptureRefused(
        f"rollout {rollout_id!r} is frozen: no call is taken any more",
        hint="give another attempt an id of its own, and each run a folder of its own",
    )


# --- what is known of a rollout -----------------------------------------------------------------------------


class _Rollout:
    """One rollout, while its file is locked: each line is a note. A line that a killed process left
    unfinished was never there.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.calls: dict[str, str] = {}  # id -> digest
        self.intents: set[str] = set()
        self.holes: set[str] = set()
        self.snapshot_id, self.retired, self.version = "", False, 0
        for line in file.read().splitlines():
            with contextlib.suppress(ValueError):
                self._take(json.loads(line))

    def note(self, **what: str) -> None:
        """Writes a note; every one is another version of the rollout. Blocks for the disk."""
        self._file.write(b"\n" + json.dumps(what).encode() + b"\n")  # begins anew behind an unfinished line
        self._file.flush()
        self._take(what)

    def _take(self, what: dict[str, str]) -> None:
        self.version += 1
        if "call" in what:
            self.calls[what["call"]] = what["digest"]
        elif "intent" in what:
            self.intents.add(what["intent"])
        elif "hole" in what:
            self.holes.add(what["hole"])
        else:
            self.retired = "retired" in what
            self.snapshot_id = what["retired"] if self.retired else what["frozen"]


class _Rollouts:
    """The files of all rollouts of a run."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise BadArgument(f"folder={str(folder)!r}: {error}", hint="give a folder of this run") from None

    @contextlib.contextmanager
    def locked(self, rollout_id: str, meanwhile: Callable[[], None] | None = None) -> Iterator[_Rollout]:
        """Locks a rollout against all other processes. Blocks; calls `meanwhile` again and again."""
        if not _ID.fullmatch(rollout_id):
            raise BadArgument(
                f"rollout id {rollout_id!r} is not 1 to 200 of A-Z a-z 0-9 . _ -", hint="use Gym's own ids"
            )
        with self._opened(rollout_id, meanwhile) as file:
            yield _Rollout(file)

    @contextlib.contextmanager
    def _opened(self, rollout_id: str, meanwhile: Callable[[], None] | None) -> Iterator[IO[bytes]]:
        path = self._folder / (rollout_id + _ENDING)
        while True:
            with path.open("a+b") as file:
                while True:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if meanwhile else 0))
                        break
                    except BlockingIOError:
                        assert meanwhile is not None
                        meanwhile()  # who holds it may wait for room in a lane
                        time.sleep(_LOOK_S)
                if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    file.seek(0)
                    yield file
                    return  # else it was swept away meanwhile

    def is_retired(self, rollout_id: str) -> bool:
        """Whether a rollout is retired, which is for ever; takes no lock."""
        path = self._folder / (rollout_id + _ENDING)
        return path.exists() and b'{"retired"' in path.read_bytes()

    def sweep(self, older_than_s: float) -> int:
        """Removes the files of rollouts that were retired so long ago."""
        removed = 0
        for path in self._folder.glob("*" + _ENDING):
            rollout_id = path.name.removesuffix(_ENDING)
            with self.locked(rollout_id) as rollout:
                if rollout.retired and time.time() - path.stat().st_mtime >= older_than_s:
                    path.unlink()
                    removed += 1
        return removed
