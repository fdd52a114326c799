"""The calls that bring a vLLM to a version, and their order, whatever carries them: HTTP, an `LLM`, an
`AsyncLLM`.

The worker takes the version out of the weights segment within `update_weights`, whole or not at all; `start`
and `finish` move nothing. So requests see one set of weights or the other, and a pusher that dies in between
leaves a whole model. Knows no transport.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Protocol

from shmbridge.consumers.engines.engine import UNKNOWN, EngineFailed, Pause, Update, doubt, doubt_hint


class VllmCalls(Protocol):
    """vLLM's names. Each blocks and raises EngineFailed."""

    def pause(self, mode: Pause) -> None:
        """Stop sampling."""

    def start(self) -> None:
        """Begins an update; refused while one is active."""

    def load(self, update_info: dict[str, Any]) -> None:
        """Has every worker take the weights."""

    def finish(self, version: str | None) -> None:
        """Ends the update; samples are of this version from here on."""

    def engines(self) -> int:
        """How many data-parallel engines there are; each loads for itself."""

    def stamp(self, version: str) -> None:
        """Has samples be of this version, whatever the weights are."""

    def reset_cache(self) -> bool:
        """Forgets keys and values that were computed with earlier weights, those of requests in flight, too;
        whether it did.
        """

    def resume(self) -> None:
        """Samples again."""


def bring_to(calls: VllmCalls, address: str, update: Update) -> None:
    """Has a vLLM at a version; it samples again whatever happens. Blocks.

    Requests that are kept are computed again from their tokens: what they sample from here on is what the new
    weights alone would sample there, and no cached prefix is of older ones.

    Raises:
        EngineFailed: it is at the version that it had, or, where the message says so, has new weights and an
            old cache, or nobody knows which weights, and samples are stamped as of an unknown version.
    """
    try:
        calls.pause(update.pause)
        _start(calls)
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


def _start(calls: VllmCalls) -> None:
    """Begins an update, also where a pusher that died left one active."""
    try:
        calls.start()
    except EngineFailed:
        # where none was active, starting fails for a reason of its own, which is said now
        with suppress(EngineFailed):
            calls.finish(None)
        calls.start()


def _load(calls: VllmCalls, update: Update) -> None:
    """Loads and stamp; where nobody can say which weights it has after a failure, samples are stamped so."""
    taken = False
    try:
        calls.load({"bridge": update.bridge, "version": update.version})
        taken = True
        calls.finish(str(update.version))
    except BaseException as error:  # a signal's, too: the engine goes on with what it was told
        if isinstance(error, EngineFailed) and not error.reached:
            raise
        try:
            why = "it has taken it" if taken else doubt(error, calls.engines())
            if why:
                calls.stamp(UNKNOWN)
                calls.reset_cache()
            said = why and doubt_hint(why)
        except EngineFailed as also:
            said = f"nobody can say which version its samples are of: {also.message}"
        if said and isinstance(error, EngineFailed):
            raise EngineFailed(error.message, hint="; ".join(filter(None, (said, error.hint)))) from error
        if said:
            error.add_note(said)
        raise


def _resume_after(calls: VllmCalls, error: BaseException) -> None:
    """Samples again after a failure, or say with it that it does not."""
    if isinstance(error, EngineFailed) and not error.reached:
        return
    try:
        calls.resume()
    except EngineFailed as also:
        raise EngineFailed(
            f"{error}; and it may still be paused: {also.message}", hint="see its log, or start it again"
        ) from error
