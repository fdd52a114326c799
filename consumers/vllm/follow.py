"""Keeps an engine at the newest policy version of a bridge, from inside its server's event loop.

Knows nothing of HTTP and of vLLM. The learner need not know of any of this, and its death between any two
steps leaves the engine with one whole version and nothing paused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from typing import Protocol, TypeVar

import msgspec

from shmbridge.errors import NotReady, ShmBridgeError

logger = logging.getLogger("vllm.shmbridge")

_LOOK_S = 0.5  # longest sleep of the thread that waits for versions: what closing takes at worst
_TRIES = 3  # of one version; a learner's next one is another
_FIRST_RETRY_S = 1.0

Result = TypeVar("Result")


class Held(Protocol):
    """A version that stays where it is while its lease lasts."""

    @property
    def version(self) -> int:
        """Its number."""


class Versions(Protocol):
    """What is used of `shmbridge.weights.WeightsReader`, from one thread."""

    @property
    def version(self) -> int | None:
        """Newest complete version; None while there is none."""

    def wait(self, after: int | None, timeout_s: float) -> int:
        """Block until the newest version is another than `after`; NotReady once the time is over."""

    def lease(self, *, timeout_s: float) -> AbstractContextManager[Held]:
        """Holds the newest version still."""

    def close(self) -> None:
        """Lets the segment go."""


class Engine(Protocol):
    """What is used of `LiveEngine`."""

    @property
    def alive(self) -> bool:
        """False ends the following."""

    @property
    def in_doubt(self) -> bool:
        """Whether nobody can say which version it has, since a load failed and could not be undone."""

    async def is_paused(self) -> bool:
        """Whether somebody else has paused it."""

    async def pause(self) -> None:
        """Lets nothing be generated from here on."""

    async def load(self, version: int) -> None:
        """Takes a version, whole or not at all; after an error `in_doubt` says whether that can be
        promised.
        """

    async def empty_caches(self) -> None:
        """Forgets what was computed with other weights."""

    async def resume(self) -> None:
        """Goes on generating."""


class UpdateTimes(msgspec.Struct, frozen=True):
    """Milliseconds of one update: until nothing was generated, for weights and caches, and from beginning to
    end.
    """

    pause_ms: float
    load_ms: float
    total_ms: float


class FollowStats(msgspec.Struct, frozen=True):
    """What `GET /policy_version` says of a follower."""

    version: int | None  # that the engine generates with; None: the weights that it was started with
    loaded_total: int
    failed_total: int
    last_error: str | None  # why the engine does not have the newest version
    refused_version: int | None  # the newest version, if it will not be tried again
    last_update: UpdateTimes | None


class Follower:
    """Follows for one engine; for one event loop.

    Args:
        versions: where they come from; used from a thread of the follower's own, and closed by it.
        engine: what takes them.
    """

    def __init__(self, versions: Versions, engine: Engine) -> None:
        self._versions = versions
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shmbridge-versions")
        self._task: asyncio.Task[None] | None = None
        self._considered: int | None = None
        self._refused: str | None = None  # why the last version that was tried is not loaded
        self._cause = ""  # the same without the version: weights of another model come with every step
        self._given_up = False  # that version
        self._unreadable: str | None = None
        self._version: int | None = None
        self._last_update: UpdateTimes | None = None
        self._loaded_total = self._failed_total = 0

    @property
    def version(self) -> int | None:
        """The policy version that tokens come from now; None if that is unknown."""
        return self._version

    def stats(self) -> FollowStats:
        """Returns the state of this moment."""
        error = self._unreadable or self._refused
        refused = self._considered if self._given_up else None
        return FollowStats(
            self._version, self._loaded_total, self._failed_total, error, refused, self._last_update
        )

    async def start(self) -> None:
        """Loads the newest version, if there is one, and follow from then on; awaits that first load,
        whatever becomes of it.
        """
        if (newest := await self._in_thread(self._look)) is not None:
            await self._take(newest)
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Stop following; awaits the resume of a load that is under way. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await self._in_thread(self._versions.close)
        self._thread.shutdown(wait=False)

    async def _follow(self) -> None:
        while self._engine.alive:
            if (newest := await self._in_thread(self._wait)) is not None:
                await self._take(newest)

    async def _take(self, newest: int) -> None:
        """Loads the newest version; try again what may be trouble of the moment, unless there is another
        version by then.
        """
        self._considered, self._given_up = newest, False
        retry_s = _FIRST_RETRY_S
        for attempt in range(1, _TRIES + 1):
            try:
                await self._update()
            except Exception as error:  # whatever it was, the engine goes on with the version it has
                if await self._in_thread(self._look) != self._considered:
                    return  # that one is next
                self._failed_total += 1
                self._refused = f"policy version {self._considered} was not loaded: {error}"
                self._said(self._refused, repeated=str(error) == self._cause)
                self._cause = str(error)
                if attempt == _TRIES or not self._engine.alive:
                    self._given_up = True
                    return
                await asyncio.sleep(retry_s)
                retry_s *= 2
            else:
                self._loaded_total += 1
                self._refused, self._cause = None, ""
                return

    async def _update(self) -> None:
        """One update, to what is newest once nothing is generated.

        An engine that somebody else has paused stays paused.
        """
        began = time.perf_counter()
        engine = self._engine
        paused_before = await engine.is_paused()
        try:
            if not paused_before:
                await engine.pause()
            paused = time.perf_counter()
            async with self._held() as version:
                self._considered = version
                await self._load(version)
            loaded = time.perf_counter()
        finally:
            if not paused_before:
                await engine.resume()
        times = [1e3 * seconds for seconds in (paused - began, loaded - paused, time.perf_counter() - began)]
        self._last_update = UpdateTimes(*times)
        logger.info(
            "policy version %d: paused in %.1f ms, loaded in %.1f ms, %.1f ms in all", version, *times
        )

    async def _load(self, version: int) -> None:
        try:
            await self._engine.load(version)
        except Exception:
            if self._engine.in_doubt:
                self._version = None
                await self._engine.empty_caches()
            raise
        self._version, self._refused = version, None  # before the first token that comes from it
        await self._engine.empty_caches()

    @asynccontextmanager
    async def _held(self) -> AsyncIterator[int]:
        """The newest version, which the workers find although the learner goes on: the slot that it is in is
        not written meanwhile.
        """
        # of the thread, where calls are made in order, also that of a task which was cancelled
        held = ExitStack()
        try:
            yield await self._in_thread(
                lambda: held.enter_context(self._versions.lease(timeout_s=_LOOK_S)).version
            )
        finally:
            await self._in_thread(held.close)

    def _said(self, trouble: str, *, repeated: bool) -> None:
        if not repeated:
            logger.warning("%s; generation goes on with version %s", trouble, self._version)

    # --- in the thread
    # --------------------------------------------------------------------------------------------------------

    async def _in_thread(self, call: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _look(self) -> int | None:
        return self._readable(lambda: self._versions.version)

    def _wait(self) -> int | None:
        """The newest version, once it is another one than the last that was tried: also a lower one, of a
        segment made again.
        """

        def wait() -> int | None:
            try:
                return self._versions.wait(self._considered, timeout_s=_LOOK_S)
            except NotReady:
                return None

        newest = self._readable(wait)
        if self._unreadable:
            time.sleep(_LOOK_S)
        return newest

    def _readable(self, look: Callable[[], int | None]) -> int | None:
        try:
            newest = look()
        except ShmBridgeError as error:
            trouble = f"the weights cannot be read: {error}"
            self._said(trouble, repeated=trouble == self._unreadable)
            self._unreadable = trouble
            return None
        self._unreadable = None
        return newest
