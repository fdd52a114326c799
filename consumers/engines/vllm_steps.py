"""The calls that load a version into vLLM, and their order, for each transport: HTTP, `LLM`, `AsyncLLM`.

The worker reads the version from the weights segment within `update_weights`, all or nothing; `start` and
`finish` move no data. So requests see either set of weights, and a pusher's death in between leaves a
consistent model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from shmbridge.consumers.engines.engine import UNKNOWN, EngineFailed, Pause, Update, doubt, doubt_hint


class VllmCalls(Protocol):
    """vLLM's calls. Each blocks and raises EngineFailed."""

    def pause(self, mode: Pause) -> None:
        """Stops sampling."""

    def start(self) -> None:
        """Begins an update; refused while one is active."""

    def load(self, update_info: dict[str, Any]) -> None:
        """Makes every worker load the weights."""

    def finish(self, version: str | None) -> None:
        """Ends the update; later samples are of this version."""

    def engines(self) -> int:
        """Returns the number of data-parallel engines; each loads separately."""

    def stamp(self, version: str) -> None:
        """Stamps later samples with this version, whatever the weights are."""

    def reset_cache(self) -> bool:
        """Drops all cached keys and values, also of requests in flight; returns whether it did."""

    def resume(self) -> None:
        """Resumes sampling."""


def bring_to(calls: VllmCalls, address: str, update: Update) -> None:
    """Loads a version into vLLM; sampling resumes in any case. Blocks.

    Kept requests are recomputed from their tokens: they continue exactly as under the new weights alone, and
    no cached prefix is of older weights.

    Raises:
        EngineFailed: it keeps its earlier version; or, if the message says so, it has new weights and an old
            cache, or its weights are uncertain and samples are stamped with an unknown version.
    """
    try:
        calls.pause(update.pause)
        begin_update(calls.start, lambda: calls.finish(None))
        _load(calls, update)
        if not calls.reset_cache():
            raise EngineFailed(
                f"{address} has version {update.version}, and its prefix cache is still that of an earlier "
                "one",
                hint="pause with wait or abort: something holds its blocks",
            )
    except BaseException as error:
        _resume_after(calls, error)
        raise
    calls.resume()


def begin_update(start: Callable[[], object], finish: Callable[[], object]) -> None:
    """Begins an update, also if a dead pusher left one active. Blocks; raises as `start`."""
    try:
        start()
    except Exception:
        # if none was active, starting failed for another reason, which is raised now
        with suppress(Exception):
            finish()
        start()


def _load(calls: VllmCalls, update: Update) -> None:
    """Loads and stamps; if the weights are uncertain after a failure, stamps samples as unknown."""
    taken = False
    try:
        calls.load({"bridge": update.bridge, "version": update.version})
        taken = True
        calls.finish(str(update.version))
    except BaseException as error:  # also a signal's exception: the engine continues its running call
        if isinstance(error, EngineFailed) and not error.reached:
            raise
        try:
            why = "it has taken it" if taken else doubt(error, calls.engines())
            if why:
                calls.stamp(UNKNOWN)
                calls.reset_cache()
            said = why and doubt_hint(why)
        except EngineFailed as also:
            said = f"the version of its samples is unknown: {also.message}"
        if said and isinstance(error, EngineFailed):
            raise EngineFailed(error.message, hint="; ".join(filter(None, (said, error.hint)))) from error
        if said:
            error.add_note(said)
        raise


def _resume_after(calls: VllmCalls, error: BaseException) -> None:
    """Resumes sampling after a failure, or adds to the error that it could not."""
    if isinstance(error, EngineFailed) and not error.reached:
        return
    try:
        calls.resume()
    except EngineFailed as also:
        raise EngineFailed(
            f"{error}; and it may still be paused: {also.message}", hint="see its log, or start it again"
        ) from error
