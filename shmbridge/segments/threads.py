"""Threads of this process beside signal handlers, forks and its end; and the watch for producers' deaths.

`Closing`: close() in a signal handler, which may interrupt the main thread anywhere. A handler that comes in
a section locked by its own thread must not wait. In that case close() only records that it is owed, and the
interrupted call closes at its end. So close() must know every lock that it, or a thread that it joins, may
wait for: `Closing.lock` makes them all, and they are re-entrant.
"""

import _thread
import asyncio
import atexit
import contextlib
import functools
import logging
import os
import queue
import select
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any, Concatenate, NoReturn, ParamSpec, Protocol, TypeVar, cast

from shmbridge._ext.header import Mapping
from shmbridge.errors import ProcessLimit, UsedByTwoThreads
from shmbridge.segments import locks
from shmbridge.segments.locks import LockByte

_this_thread = threading.local()

Rest = ParamSpec("Rest")
Result = TypeVar("Result")


class Closing:
    """The closing state of an object, shared by all its parts. Once `ending`, it never opens again.

    Attributes:
        owed: a signal handler called close() where it had to wait; the interrupted call closes at its end.
        ending: nothing more is taken, formed or handed out.
        closed: `ending`, and its counters are final.
        over: `closed`, and everything is given back.
        whole: a lock for work on all parts: close() comes before or after it, never in between.
    """

    def __init__(self, give_up: Callable[[], None], stop_taking: Callable[[], None]) -> None:
        self._give_up, self._stop_taking = give_up, stop_taking
        self._pid = os.getpid()
        self._locks: list[threading.RLock] = []
        # held during close(); a re-entrant signal handler sees that and returns
        self._closer = threading.RLock()
        self.owed = self.ending = self.closed = self.over = False
        self.whole = self.lock()

    def lock(self) -> "threading.RLock":
        """Returns a lock that close(), or a thread that it joins, may wait for."""
        lock = threading.RLock()
        self._locks.append(lock)
        return lock

    @property
    def lock_is_mine(self) -> bool:
        """Whether this thread holds one of the locks: tells a handler whether it interrupted a locked
        section.
        """
        return any(map(is_mine, self._locks))

    def close(self) -> None:
        """Gives everything up, or records that the close is owed.

        Idempotent; a repeated call finishes an interrupted one. No-op in a child of fork.
        """
        if self.over or os.getpid() != self._pid or is_mine(self._closer):
            return
        if self.lock_is_mine:
            self.owed = self.ending = True
            self._stop_taking()
            return
        with self._closer:
            if not self.over:
                self._give_up()
                self.over, self.owed = True, False

    def close_if_owed(self) -> None:
        """Does an owed close(). Called at the end of every call that takes a lock."""
        if self.owed and not is_own_thread():
            self.close()


class _HasClosing(Protocol):
    _closing: Closing


Owner = TypeVar("Owner", bound=_HasClosing)


def then_close(
    call: Callable[Concatenate[Owner, Rest], Result],
) -> Callable[Concatenate[Owner, Rest], Result]:
    """Wraps a call that takes a lock: an owed close() is done at its end, also after an exception."""

    @functools.wraps(call)
    def called(owner: Owner, /, *args: Rest.args, **options: Rest.kwargs) -> Result:
        try:
            return call(owner, *args, **options)
        finally:
            owner._closing.close_if_owed()

    return called


def is_mine(lock: "threading.RLock") -> bool:
    """Returns whether this thread holds the lock."""
    return lock._is_owned()  # type: ignore[attr-defined, no-any-return]


def begin_own_thread() -> None:
    """Marks this thread as one whose end close() waits for."""
    _this_thread.is_own = True


def is_own_thread() -> bool:
    """Returns whether close() waits for the end of this thread, so that it must not close."""
    return hasattr(_this_thread, "is_own")


_LOOK_AGAIN_S = 0.05


async def run_to_end(call: Callable[..., Result], *args: Any, **named: Any) -> Result:
    """Runs a call in a thread while the event loop goes on; returns its result or raises its error.

    A cancellation takes effect after the call ends: until then the call may use the caller's data.
    """
    running = asyncio.get_running_loop().run_in_executor(None, functools.partial(call, *args, **named))
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from running.exception()
    return running.result()


def in_another_thread(call: Callable[[], Result]) -> Result:
    """Runs a call in a thread, in which no signal handler can raise; returns its result or raises its error.

    Blocks.

    If a handler raises here, the call still runs to its end. If no thread can be had, the call runs in this
    thread.
    """
    outcome: queue.SimpleQueue[tuple[Result, None] | tuple[None, BaseException] | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((call(), None))
        except BaseException as error:
            outcome.put((None, error))

    try:
        start_apart(
            threading.Thread(target=run, name="shmbridge-apart", daemon=True), lambda _: outcome.put(None)
        )
        ended = outcome.get()
    except RuntimeError:  # not even the starting thread can be had
        ended = None
    if ended is None:
        return call()
    result, error = ended
    if error is not None:
        raise error
    return cast(Result, result)


def start_apart(thread: threading.Thread, failed: Callable[[Exception], None]) -> None:
    """Starts a thread from another thread, where no handler runs: an interrupted Thread.start may keep the
    lock that the new thread needs to begin.

    Does not wait. If the thread cannot be had, `failed` is called with the error, in the starting thread;
    RuntimeError if even the starting thread cannot be had.
    """

    def start() -> None:
        try:
            thread.start()
        except Exception as error:
            failed(error)

    _thread.start_new_thread(start, ())


class _Life:
    """Whether a thread runs. The thread does everything inside `with`; other threads may wait for the end."""

    def __init__(self) -> None:
        self._runs_in = 0  # process id; in a child of fork the thread does not run
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __enter__(self) -> None:
        # Set before the thread checks its stop flag; the stopping thread sets the flag, then reads this.
        self._runs_in = os.getpid()

    def __exit__(self, *_: object) -> None:
        self._runs_in = 0
        self._ended.put(None)

    def wait_for_end(self) -> None:
        """Returns at once if the thread has not begun.

        May be called again, also by a handler that interrupts it.
        """
        while self._runs_in == os.getpid():
            with contextlib.suppress(queue.Empty):  # the interrupted call may have taken the item
                self._ended.get(timeout=_LOOK_AGAIN_S)


class Joined:
    """A thread that close() waits for.

    An exception from a signal handler, at any point, leaves a thread that can begin and be joined.

    So it uses neither Thread.start (see start_apart) nor Thread.join: an interrupted join marks a running
    thread as ended.
    """

    def __init__(self, run: Callable[[], object], name: str) -> None:
        self._over, self._life = False, _Life()
        self._begun: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(run,), name=name, daemon=True)

    def start(self) -> None:
        """Blocks until it runs; RuntimeError if no thread can be had. After any error call `join`."""
        self.begin(self._begun.put)
        if (error := self._begun.get()) is not None:
            raise error

    def begin(self, failed: Callable[[Exception], None]) -> None:
        """Like `start`, without waiting; see start_apart.

        Raises ProcessLimit where a library has replaced threads by greenlets: one that waits in C stops all.
        """
        for part in (_thread.start_new_thread, queue.SimpleQueue):
            by = part.__module__.partition(".")[0]
            if by not in ("_thread", "_queue"):
                raise ProcessLimit(
                    f"thread {self._thread.name} cannot run: {by} has replaced {part.__name__} in this "
                    "process",
                    hint=f"keep both, as {by}.monkey.patch_all(thread=False, queue=False) does, or use a "
                    "process of its own; a Producer needs no thread",
                )
        start_apart(self._thread, failed)

    def join(self) -> None:
        """Blocks until the thread has ended; a thread that has not begun will do nothing.

        May be called again, also by a handler that interrupts it.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("a thread cannot wait for its own end")
        self._over = True
        self._life.wait_for_end()

    def _run(self, run: Callable[[], object]) -> None:
        with self._life:
            begin_own_thread()
            self._begun.put(None)
            if not self._over:
                run()


class Apart:
    """A thread that makes calls for event loops, one after the other.

    It begins with the first call, and ends with `stop`.

    No Python lock: a signal handler may call `stop` wherever it interrupts, also in `call`.
    """

    def __init__(self, name: str) -> None:
        self._name, self._begun, self._stopping, self._life = name, False, False, _Life()
        self._calls: queue.SimpleQueue[tuple[Callable[[], object], asyncio.Future[None]] | None] = (
            queue.SimpleQueue()
        )

    async def call(self, call: Callable[[], object]) -> None:
        """Returns once a call is over, or will not be made because this is stopped; raises the call's error.

        A cancellation does not end the call.
        """
        done = asyncio.get_running_loop().create_future()
        if not self._begun:
            self._begun = True
            try:
                start_apart(
                    threading.Thread(target=self._run, name=self._name, daemon=True), self._cannot_begin
                )
            except RuntimeError:
                self._begun = False
                raise
        self._calls.put((call, done))
        if not self._stopping:  # else the thread may have checked the queue for the last time
            await done

    def end(self) -> None:
        """Makes no further call. Does not wait: for a finalizer."""
        self._stopping = True
        self._calls.put(None)

    def stop(self) -> None:
        """Ends the thread; blocks until the call under way is over.

        May be called again, also by a handler that interrupts it.
        """
        self.end()
        self._life.wait_for_end()  # a thread that begins later sees the stop flag

    def _run(self) -> None:
        with self._life:
            while not self._stopping and (next_call := self._calls.get()) is not None:
                _finish(next_call[1], _error_of(next_call[0]))
                del next_call  # it may keep its owner alive, whose finalizer ends this thread
            self._answer_all(None)

    def _cannot_begin(self, error: Exception) -> None:
        self._begun = False
        self._answer_all(error)

    def _answer_all(self, error: BaseException | None) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                if (left := self._calls.get_nowait()) is not None:
                    _finish(left[1], error)


def _error_of(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error
    return None


def _finish(done: "asyncio.Future[None]", error: BaseException | None) -> None:
    """Ends the future in its own loop, if that loop still runs and waits for it."""

    def finish() -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the loop is closed
        done.get_loop().call_soon_threadsafe(finish)


_Generator = TypeVar("_Generator", bound=Generator[Any, Any, Any])
_Weak = weakref.WeakMethod[Callable[[], None]]


def at_exit(method: Callable[[], None]) -> Callable[[], None]:
    """Calls a bound method at the end of this process if its object still lives, not in children; returns a
    function that cancels that.
    """
    weak: _Weak = weakref.WeakMethod(method)
    pid = os.getpid()

    def call() -> None:
        if os.getpid() == pid and (alive := weak()) is not None:
            alive()

    atexit.register(call)
    return lambda: atexit.unregister(call)


_generators: "weakref.WeakSet[Generator[Any, Any, Any]]" = weakref.WeakSet()


def closed_at_exit(generator: _Generator) -> _Generator:
    """Returns the generator, which is closed when the interpreter exits.

    Its `except` and `finally` need their modules, which Python clears before it collects what is left.

    Never blocks. One that another thread is in stays as it is.
    """
    _generators.add(generator)
    return generator


@atexit.register
def _close_generators() -> None:
    for generator in list(_generators):
        with contextlib.suppress(ValueError):
            generator.close()


class OneProcess:
    """Refuses to be pickled, with a hint what to pass to another process instead."""

    __slots__ = ()
    _instead = "pass the bridge's name, and open a new one in that process"

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled: it belongs to this process -> {self._instead}"
        )


def debug_checks_wanted() -> bool:
    """Returns whether SHMBRIDGE_DEBUG=1 asks for the check."""
    return os.environ.get("SHMBRIDGE_DEBUG", "") == "1"


def watch_threads(owner: object, what: str, methods: tuple[str, ...]) -> None:
    """With SHMBRIDGE_DEBUG=1, a second thread in any of these methods of `owner` at once gets
    UsedByTwoThreads.

    The methods become attributes of the object. A signal handler that calls one during another, in the same
    thread, does not count as a second thread.
    """
    if not debug_checks_wanted():
        return
    inside = _Inside(what)
    for name in methods:
        setattr(owner, name, inside.of(name, getattr(owner, name)))


class _Inside:
    """The thread that is in the object, and in which of its methods."""

    def __init__(self, what: str) -> None:
        # re-entrant: a signal handler may come while it is held
        self._what, self._lock = what, threading.RLock()
        self._thread, self._method, self._depth = 0, "", 0

    def of(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def watched(*args: Any, **options: Any) -> Any:
            self._enter(name)
            try:
                return method(*args, **options)
            finally:
                self._depth -= 1

        return watched

    def _enter(self, name: str) -> None:
        with self._lock:
            me = threading.get_ident()
            if self._depth and self._thread != me:
                names = {thread.ident: thread.name for thread in threading.enumerate()}
                raise UsedByTwoThreads(
                    f"{self._what}: thread {names.get(self._thread, self._thread)!r} is in "
                    f"{self._method}(), and thread {names.get(me, me)!r} calls {name}()",
                    hint="give each thread its own, or take turns with a lock",
                )
            if not self._depth:
                self._thread, self._method = me, name
            self._depth += 1


log = logging.getLogger(__name__)

_PROBE_MS = 500
_BUSY_MS = 50  # while a dead lane still waits to be removed


class DeathWatch:
    """Calls `on_death(name)` once per watched lane whose producer is gone, and `on_tick() -> bool` (returns
    whether anything is left to remove) regularly.

    Both run in the watch's own daemon thread. Methods may be called from any thread.
    """

    def __init__(self, on_death: Callable[[str], None], on_tick: Callable[[], bool]) -> None:
        self._on_death, self._on_tick = on_death, on_tick
        self._lanes: dict[str, tuple[Mapping, int]] = {}
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopping = False
        self._pid = os.getpid()
        self._thread = Joined(self._run, "shmbridge-deathwatch")
        try:
            self._thread.start()
        except BaseException:
            self.stop()
            raise

    def watch(self, name: str, lane: Mapping, pid: int, namespace: int) -> None:
        """Starts to watch a lane. Idempotent.

        Keeps the mapping until the producer's death was reported.
        """
        if name not in self._lanes:
            self._lanes[name] = (lane, locks.open_pidfd(pid, namespace))
        os.eventfd_write(self._wake, 1)

    def nudge(self) -> None:
        """Triggers the next tick now."""
        os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Ends the thread; blocks until it has ended. Does nothing in a child of fork."""
        if self._wake < 0 or os.getpid() != self._pid:
            return
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        # A repeat after an interrupt closes no descriptor twice: its number may be another file's by then.
        while self._lanes:
            _, (_, pidfd) = self._lanes.popitem()
            if pidfd >= 0:
                os.close(pidfd)
        wake, self._wake = self._wake, -1
        os.close(wake)

    def _run(self) -> None:
        timeout_ms = _PROBE_MS
        while not self._stopping:
            fired = self._sleep(timeout_ms)
            if self._stopping:
                return
            try:
                busy = self._look(fired)
            except Exception:
                # For example no descriptor left: it may work next time, and this is the only watch.
                log.exception("the death watch could not look round")
                busy = True
            timeout_ms = _BUSY_MS if busy else _PROBE_MS

    def _look(self, fired: set[int]) -> bool:
        """Checks all lanes once; returns whether to check again soon: a dead lane is left to be removed, or a
        pidfd was wrong.
        """
        wrong = False
        for name, (lane, pidfd) in list(self._lanes.items()):
            dead = not locks.is_locked(lane.fd, LockByte.PRODUCER)
            if dead:
                del self._lanes[name]
            elif pidfd in fired:  # a pidfd of another process than the lock's holder would fire for ever
                self._lanes[name] = (lane, -1)
                wrong = True
            if pidfd >= 0 and (dead or pidfd in fired):
                os.close(pidfd)
            if dead:
                self._on_death(name)
            del lane
        return self._on_tick() or wrong

    def _sleep(self, timeout_ms: int) -> set[int]:
        """Waits for a death or a nudge; returns the pidfds that fired."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for _, pidfd in list(self._lanes.values()):
            if pidfd >= 0:
                poll.register(pidfd, select.POLLIN)
        fired = {fd for fd, _ in poll.poll(timeout_ms)}
        if self._wake in fired:
            os.eventfd_read(self._wake)
        return fired
