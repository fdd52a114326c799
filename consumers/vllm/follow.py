"""Keeps an engine at the newest policy version of a bridge, from inside its server's event loop.

The learner is not involved; if it dies at any step, the engine has one complete version and is not paused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from typing import Any, TypeVar

import msgspec

from shmbridge.config import check_bridge_name
from shmbridge.consumers.engines.engine import UNKNOWN, EngineFailed, Pause, doubt, doubt_hint
from shmbridge.errors import BadConfig, NotReady, ShmBridgeError
from shmbridge.weights import WeightsReader

_EXAMPLE = """give the server --additional-config '{"shmbridge": {"bridge": "run1", "pause": "keep"}}'"""


class FollowSettings(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The value of `shmbridge` in `--additional-config`.

    Args:
        bridge: whose weights segment is followed.
        pause: requests in flight while new weights are loaded: "keep" holds and continues them, "wait" lets
            them finish first, "abort" ends them with their tokens so far.
        recompute: kept requests continue with a KV cache recomputed under the new weights. False: with the
            old one; then the prefix cache, which vLLM empties only while no request uses it, may serve
            entries of earlier versions.
    """

    bridge: str
    pause: Pause = "keep"
    recompute: bool = True


def follow_settings(additional_config: object) -> FollowSettings:
    """Parses vLLM's `additional_config`; raises BadConfig."""
    given: Any = additional_config.get("shmbridge") if isinstance(additional_config, Mapping) else None
    if given is None:
        raise BadConfig("vLLM is to follow a bridge, and no bridge is named", hint=_EXAMPLE)
    try:
        settings = msgspec.convert(given, FollowSettings)
    except msgspec.ValidationError as error:
        raise BadConfig(f"shmbridge in --additional-config: {error}", hint=_EXAMPLE) from error
    check_bridge_name(settings.bridge)
    return settings


logger = logging.getLogger("vllm.shmbridge")


class LiveEngine:
    """The follower's operations on an engine.

    Args:
        client: vLLM's AsyncLLM, whose workers have the weight-transfer backend `shmbridge`.
        settings: how it is paused, and which bridge the workers read.
        engines: how many data-parallel engines the client asks; each loads for itself.
    """

    def __init__(self, client: Any, settings: FollowSettings, engines: int = 1) -> None:
        self._client = client
        self._settings = settings
        self._engines = engines
        self._in_doubt = False

    @property
    def alive(self) -> bool:
        """Whether the engine still accepts calls."""
        return not self._client.errored

    @property
    def in_doubt(self) -> bool:
        """Whether its version is uncertain: a load failed midway, or in only some engines."""
        return self._in_doubt

    async def is_paused(self) -> bool:
        """Whether it is paused."""
        return bool(await self._client.is_paused())

    async def pause(self) -> None:
        """Stops generation; treats requests in flight by the pause mode."""
        await self._client.pause_generation(mode=self._settings.pause, clear_cache=False)

    async def resume(self) -> None:
        """Resumes generation, including kept requests."""
        await self._client.resume_generation()

    async def load(self, version: int) -> None:
        """Makes all workers load a version, all or nothing. The engine must be paused.

        Of several data-parallel engines one may load it and another fail, and an accelerator cannot undo a
        partial load. Samples then have no version until one is loaded.

        Raises:
            EngineFailed: a worker's error; its weights are uncertain. Exception: it keeps its earlier
                weights.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        client = self._client
        try:
            await client.start_weight_update()
        except Exception:
            # an update that was begun and not ended; this backend loses nothing by closing it
            await client.finish_weight_update()
            await client.start_weight_update()
        request = WeightTransferUpdateRequest(
            update_info={"bridge": self._settings.bridge, "version": version}
        )
        taken = False
        try:
            await client.update_weights(request)
            taken = True
            await client.finish_weight_update(str(version))
        except Exception as error:
            if not (why := "it has taken it" if taken else doubt(error, self._engines)):
                raise
            self._in_doubt = True
            # each engine does that after its load, however it ended
            await client.update_weight_version(UNKNOWN)
            raise EngineFailed(str(error), hint=doubt_hint(why)) from error
        self._in_doubt = False

    async def empty_caches(self) -> None:
        """Drops caches computed with other weights. The engine must be paused."""
        client, settings = self._client, self._settings
        recompute = settings.pause == "keep" and settings.recompute
        emptied = await client.reset_prefix_cache(reset_running_requests=recompute, reset_connector=True)
        if not emptied:
            logger.warning(
                "requests in flight hold the prefix cache: it keeps entries of earlier versions (recompute "
                "is %s)",
                recompute,
            )
        if client.model_config.is_multimodal_model:
            await client.reset_encoder_cache()


logger = logging.getLogger("vllm.shmbridge")

_LOOK_S = 0.5  # longest sleep of the waiting thread, so the longest close()
_TRIES = 3  # per version
_FIRST_RETRY_S = 1.0

Result = TypeVar("Result")


class UpdateTimes(msgspec.Struct, frozen=True):
    """Milliseconds of one update: until generation stopped, for weights and caches, and in total."""

    pause_ms: float
    load_ms: float
    total_ms: float


class FollowStats(msgspec.Struct, frozen=True):
    """The fields of `GET /policy_version`."""

    version: int | None  # the engine's version; None: the weights it was started with
    loaded_total: int
    failed_total: int
    last_error: str | None  # why the engine does not have the newest version
    refused_version: int | None  # the newest version, if it will not be tried again
    last_update: UpdateTimes | None


class Follower:
    """Keeps one engine at the newest version; for one event loop.

    Args:
        versions: source of versions; used in the follower's own thread, and closed by it.
        engine: loads them.
    """

    def __init__(self, versions: WeightsReader, engine: LiveEngine) -> None:
        self._versions = versions
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shmbridge-versions")
        self._task: asyncio.Task[None] | None = None
        self._considered: int | None = None
        self._refused: str | None = None  # why the last tried version is not loaded
        # the same without the version number, since weights of another model fail at every step
        self._cause = ""
        self._given_up = False  # on that version
        self._unreadable: str | None = None
        self._version: int | None = None
        self._last_update: UpdateTimes | None = None
        self._loaded_total = self._failed_total = 0

    @property
    def version(self) -> int | None:
        """The policy version of tokens generated now; None if unknown."""
        return self._version

    def stats(self) -> FollowStats:
        """Returns the current state."""
        error = self._unreadable or self._refused
        refused = self._considered if self._given_up else None
        return FollowStats(
            self._version, self._loaded_total, self._failed_total, error, refused, self._last_update
        )

    async def start(self) -> None:
        """Loads the newest version, if any, and follows; returns after that load, even if it failed."""
        if (newest := await self._in_thread(self._look)) is not None:
            await self._take(newest)
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Stops following; awaits the resume of a running load. Idempotent."""
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
        """Loads the newest version; retries transient errors unless there is a newer version by then."""
        self._considered, self._given_up = newest, False
        retry_s = _FIRST_RETRY_S
        for attempt in range(1, _TRIES + 1):
            try:
                await self._update()
            except Exception as error:  # after any error the engine keeps its version
                if await self._in_thread(self._look) != self._considered:
                    return  # the newer version is next
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
        """Loads the newest version once generation has stopped; leaves an engine paused that was paused."""
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
        self._version, self._refused = version, None  # before its first token
        await self._engine.empty_caches()

    @asynccontextmanager
    async def _held(self) -> AsyncIterator[int]:
        """Leases the newest version, so that its slot stays until the workers have read it."""
        # of the thread, which makes calls in order, including those of a cancelled task
        held = ExitStack()
        try:
            yield await self._in_thread(self._hold, held)
        finally:
            await self._in_thread(held.close)

    def _said(self, trouble: str, *, repeated: bool) -> None:
        if not repeated:
            logger.warning("%s; generation goes on with version %s", trouble, self._version)

    # --- in the thread

    async def _in_thread(self, call: Callable[..., Result], *arguments: ExitStack) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def _look(self) -> int | None:
        return self._readable(lambda: self._versions.version)

    def _hold(self, held: ExitStack) -> int:
        """Leases the newest version. Raises WeightsMismatch for values that are not finite."""
        lease = held.enter_context(self._versions.lease(timeout_s=_LOOK_S))
        lease.require_finite()
        return lease.version

    def _wait(self) -> int | None:
        """Waits until the newest version differs from the last tried; a new segment's may be lower."""

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
