"""Processes of which one runs at a time, each stopped before its system calls: turns say who goes on, and up
to which call.

A stage forks actors. From an actor's `begin()` on, all its threads stop before each system call that another
process could notice. A turn lets one actor go on up to one of these calls, or as far as it gets; every other
actor stands still meanwhile, in the middle of whatever it was doing. The same turns stop an actor of one
thread at the same calls again. The threads of one actor run side by side: turns of a consumer, which has
helper threads, come again but for a few calls.

Knows processes and system calls; knows nothing of what the actors do. Needs ptrace, seccomp and a C compiler.
"""

import contextlib
import ctypes
import faulthandler
import functools
import gc
import json
import mmap
import os
import re
import select
import signal
import struct
import subprocess
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

# They change nothing outside of the process, and say nothing of other processes.
# fmt: off
_QUIET = [
    "brk", "mprotect", "munmap", "madvise", "mremap", "membarrier", "rt_sigaction", "rt_sigprocmask",
    "rt_sigreturn", "sigaltstack", "getpid", "gettid", "getppid", "getuid", "geteuid", "getgid",
    "getegid", "clock_gettime", "clock_getres", "gettimeofday", "time", "getrandom", "rseq",
    "set_robust_list", "set_tid_address", "sched_getaffinity", "prlimit64", "getrlimit", "uname",
    "prctl", "arch_prctl", "exit", "exit_group", "clone", "clone3", "epoll_create1", "eventfd2", "lseek",
    "ioctl",
]
# fmt: on
_CONT, _SEIZE, _SYSCALL_INFO = 7, 0x4206, 0x420E
_FOLLOW_CLONES, _TELL_OF_CALLS, _KILL_AT_EXIT = 1 << 3, 1 << 7, 1 << 20
_BEFORE_A_CALL = 7  # PTRACE_EVENT_SECCOMP
_THREADS_TOO = 0x40000000  # __WALL
_SET_FILTER, _OF_ALL_THREADS, _NO_NEW_PRIVILEGES = 1, 1, 38
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # of a filter's instructions
_ALLOW, _TRACE = 0x7FFF0000, 0x7FF00000
_LOOK_S, _MOMENT_S = 0.001, 0.1
_NOTES_BYTES = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


class Stuck(Exception):
    """Some actors do not end."""


class Turn(NamedTuple):
    """Lets an actor go on up to its call `number` from now that has the name `call` ("": any name); with
    number 0 until it ends or all its threads sleep. With `others_ms`, all others go on side by side instead,
    for so long. Then kills the actor, if `kill`.
    """

    actor: str
    call: str = ""
    number: int = 0
    others_ms: int = 0
    kill: bool = False

    def __str__(self) -> str:
        number = f"*{self.number}" if self.number and (self.number, bool(self.call)) != (1, True) else ""
        others = f"~{self.others_ms}" if self.others_ms else ""
        return f"{self.actor}:{others}{self.call}{number}{'!' if self.kill else ''}"


def turns_of(text: str) -> list[Turn]:
    """Returns turns from their text: `producer:fallocate*3 hub:mmap hub:*17! producer:~20 producer:`."""
    found = []
    for word in text.split():
        match = re.fullmatch(r"([\w-]+):(?:~(\d+))?(\w*)(?:\*(\d+))?(!?)", word)
        if match is None:
            raise ValueError(f"{word!r} is not a turn")
        actor, others_ms, call, number, kill = match.groups()
        found.append(Turn(actor, call, int(number or bool(call)), int(others_ms or 0), bool(kill)))
    return found


class Call(NamedTuple):
    """A system call that a thread is about to make."""

    name: str
    arguments: tuple[int, ...]


class Notes:
    """What an actor says, as JSON lines in memory that outlives it; read by anyone."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _NOTES_BYTES)

    def add(self, *note: Any) -> None:
        (used,) = struct.unpack_from("Q", self._memory)
        line = json.dumps(note).encode() + b"\n"
        self._memory[8 + used : 8 + used + len(line)] = line
        struct.pack_into("Q", self._memory, 0, used + len(line))

    def all(self) -> list[list[Any]]:
        (used,) = struct.unpack_from("Q", self._memory)
        return [json.loads(line) for line in self._memory[8 : 8 + used].splitlines()]


@functools.cache
def _numbers() -> dict[str, int]:
    """Returns the numbers of this machine's system calls, which its C compiler knows."""
    command = ["cc", "-E", "-dM", "-include", "sys/syscall.h", "-xc", "/dev/null"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        name: int(number) for name, number in re.findall(r"#define __NR_(\w+) (\d+)$", said, re.MULTILINE)
    }


@functools.cache
def _names() -> dict[int, str]:
    return {number: name for name, number in _numbers().items()}


@functools.cache
def _filter() -> bytes:
    """Returns the program by which the kernel stops a thread before a call, but for quiet ones, locks among
    threads, and memory that belongs to no file.
    """
    numbers = _numbers()
    quiet = sorted(numbers[name] for name in _QUIET if name in numbers)
    end = len(quiet) + 8  # the last instruction: allow
    code = [(_LOAD, 0, 0, 0)]
    code += [(_EQUAL, end - at - 2, 0, number) for at, number in enumerate(quiet)]
    code += [
        (_EQUAL, 0, 2, numbers["futex"]),
        (_LOAD, 0, 0, 16 + 8 * 1),
        (_ANY_BIT, 4, 3, 128),  # private
        (_EQUAL, 0, 2, numbers["mmap"]),
        (_LOAD, 0, 0, 16 + 8 * 4),
        (_EQUAL, 1, 0, 0xFFFFFFFF),  # of no file
        (_RETURN, 0, 0, _TRACE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *each) for each in code)


def _install_filter() -> None:
    """For all threads of this process, for good; a tracer must have seized them."""
    program = _filter()
    code = ctypes.create_string_buffer(program, len(program))
    about = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code)))
    _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if _libc.syscall(_numbers()["seccomp"], _SET_FILTER, _OF_ALL_THREADS, about) != 0:
        raise OSError(ctypes.get_errno(), "no seccomp filter here")


def _ptrace(request: int, tid: int, value: Any = None, at: Any = None) -> bool:
    """Returns False if the thread is gone."""
    if _libc.ptrace(request, tid, at, value) >= 0:
        return True
    if (number := ctypes.get_errno()) != 3:  # ESRCH
        raise OSError(number, f"ptrace {request:#x} of {tid}: {os.strerror(number)}")
    return False


@dataclass
class Actor:
    """One process.

    `threads`: those it had when it began; `held`: its threads that stand before a call, and which; `calls`:
    how many it has come to.
    """

    name: str
    pid: int
    notes: Notes
    threads: set[int] = field(default_factory=set)
    held: dict[int, Call] = field(default_factory=dict)
    calls: int = 0
    status: int | None = None
    killed: bool = False

    @property
    def ended(self) -> bool:
        return self.status is not None

    @property
    def asleep(self) -> bool:
        """Whether none of its threads could go on by itself."""
        with contextlib.suppress(OSError):
            stats = [stat.read_text() for stat in Path(f"/proc/{self.pid}/task").glob("*/stat")]
            return all(stat.rpartition(")")[2].split()[0] == "S" for stat in stats)
        return False


class Stage:
    """The actors of one play; the process that makes it has one thread, and no other children.

    `played` are the turns so far, with the number of the actor's call before which each ended. Actors that
    have not ended after `limit_s` seconds are stuck; time in which this process was stopped does not count.
    """

    def __init__(self, limit_s: float) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        gc.freeze()  # children share these pages
        self.actors: dict[str, Actor] = {}
        self.played: list[str] = []
        self._left_s, self._looked_s = limit_s, time.monotonic()
        self._of_thread: dict[int, Actor] = {}

    def enter(self, name: str, body: Callable[[Callable[[], None], Notes], None]) -> None:
        """Forks an actor, which runs `body(begin, notes)`; returns once it has called `begin`, or ended."""
        notes = Notes()
        (up, said), (heard, down) = os.pipe(), os.pipe()
        _filter()
        pid = os.fork()
        if pid == 0:
            _be_actor(body, notes, said, heard, (up, down))
        os.close(said)
        os.close(heard)
        actor = self.actors[name] = Actor(name, pid, notes)
        self._of_thread[pid] = actor
        while not select.select([up], [], [], _LOOK_S)[0]:
            self._check_time()
        if os.read(up, 1):
            while new := set(map(int, os.listdir(f"/proc/{pid}/task"))) - actor.threads:
                for tid in new:  # a thread that another one begins meanwhile is in the next list
                    self._seize(actor, tid)
            os.write(down, b"g")
        os.close(up)
        os.close(down)

    def _seize(self, actor: Actor, tid: int) -> None:
        self._of_thread[tid] = actor
        try:
            _ptrace(_SEIZE, tid, _FOLLOW_CLONES | _TELL_OF_CALLS | _KILL_AT_EXIT)
        except PermissionError:
            if not actor.threads:
                raise
            # else it is the new thread of one that is seized, and so is seized already
        actor.threads.add(tid)

    def play(self, turn: Turn) -> None:
        """Gives an actor its turn; nothing if it has ended. Raises Stuck."""
        actor = self.actors[turn.actor]
        if actor.ended:
            return
        before = self._run_others(actor, turn.others_ms) if turn.others_ms else self._run(actor, turn)
        if turn.kill and not actor.ended:
            actor.killed = True
            os.kill(actor.pid, signal.SIGKILL)
            while not actor.ended:
                self._next()
        self.played.append(f"{turn}  ({actor.calls}: {'ended' if actor.ended else before})")

    def _run(self, actor: Actor, turn: Turn) -> str:
        """Returns before which call the actor stands now."""
        seen, before = 0, ""
        for tid in list(actor.held):
            self._let_go(actor, tid)
        while not actor.ended:
            at, asleep = self._next(), False
            if at is None:  # none runs: what has happened since is told at once, or never
                asleep = actor.asleep
                at = self._next(wait=False)
            if at is None and asleep:
                return "sleeps"
            if at is None:
                self._check_time()
            elif at[0] is actor:
                actor.calls += 1
                before = actor.held[at[1]].name
                seen += turn.call in ("", before)
                if seen == turn.number:
                    break
                self._let_go(actor, at[1])
        return before

    def _run_others(self, actor: Actor, others_ms: int) -> str:
        for other in self.actors.values():
            for tid in list(other.held) if other is not actor else ():
                self._let_go(other, tid)
        end_s = time.monotonic() + others_ms / 1e3
        while time.monotonic() < end_s:
            if (at := self._next()) is not None and at[0] is not actor:
                at[0].calls += 1
                self._let_go(*at)
        return "waits"

    def finish(self, between: Callable[[], None] = lambda: None) -> None:
        """Gives all their turns, one after the other, until all have ended. Raises Stuck."""
        while any(not actor.ended for actor in self.actors.values()):
            for actor in list(self.actors.values()):
                self.play(Turn(actor.name))
                between()
            self._check_time()

    def kill_all(self) -> None:
        """Kills those that have not ended, and waits for their ends."""
        for actor in self.actors.values():
            if not actor.ended:
                os.kill(actor.pid, signal.SIGKILL)
        while any(not actor.ended for actor in self.actors.values()):
            self._next()

    def _check_time(self) -> None:
        """Counts the time since the last look, a moment of it at most; raises Stuck when none is left."""
        now_s = time.monotonic()
        self._left_s -= min(now_s - self._looked_s, _MOMENT_S)
        self._looked_s = now_s
        if self._left_s > 0:
            return
        stuck = [actor for actor in self.actors.values() if not actor.ended]
        for actor in stuck:
            os.kill(actor.pid, signal.SIGUSR1)  # it prints where its threads are
            for tid in list(actor.held):
                self._let_go(actor, tid)
        while time.monotonic() < now_s + 0.5:
            if (at := self._next()) is not None:
                self._let_go(*at)
        raise Stuck(", ".join(f"{actor.name} after {actor.calls} calls" for actor in stuck))

    def _let_go(self, actor: Actor, tid: int) -> None:
        del actor.held[tid]
        _ptrace(_CONT, tid)

    def _next(self, *, wait: bool = True) -> tuple[Actor, int] | None:
        """Waits a moment; returns the thread that has stopped before a call, or None."""
        try:
            tid, status = os.waitpid(-1, os.WNOHANG | _THREADS_TOO)
            if tid == 0 and wait and signal.sigtimedwait({signal.SIGCHLD}, _LOOK_S):
                tid, status = os.waitpid(-1, os.WNOHANG | _THREADS_TOO)
        except ChildProcessError:
            return None
        if tid == 0:
            return None
        actor = self._of_thread.get(tid) or self._newcomer(tid)
        if actor is None:  # a thread that has ended before it was seen
            return None
        if not os.WIFSTOPPED(status):
            actor.held.pop(tid, None)
            del self._of_thread[tid]
            if tid == actor.pid:
                actor.status = status
            return None
        if status >> 16 == _BEFORE_A_CALL:
            about = ctypes.create_string_buffer(88)
            if _ptrace(_SYSCALL_INFO, tid, about, len(about)):
                number, *arguments = struct.unpack_from("7Q", about, 24)
                actor.held[tid] = Call(_names().get(number, str(number)), tuple(arguments))
                return actor, tid
            return None
        _ptrace(_CONT, tid, 0 if status >> 16 else os.WSTOPSIG(status))
        return None

    def _newcomer(self, tid: int) -> Actor | None:
        """Returns whose new thread this is."""
        with contextlib.suppress(OSError):
            said = Path(f"/proc/{tid}/status").read_text()
            group = int(said.split("Tgid:")[1].split()[0])
            self._of_thread[tid] = self._of_thread[group]
            return self._of_thread[tid]
        return None


def _be_actor(
    body: Callable[[Callable[[], None], Notes], None],
    notes: Notes,
    said: int,
    heard: int,
    others: tuple[int, int],
) -> None:
    def begin() -> None:
        os.write(said, b"b")
        os.read(heard, 1)
        os.close(said)
        os.close(heard)
        _install_filter()

    code = 1
    try:
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        for end in others:
            os.close(end)
        body(begin, notes)
        code = 0
    except BaseException:
        notes.add("failed", traceback.format_exc())
    finally:
        os._exit(code)
