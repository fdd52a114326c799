"""Runs one program, keeps its log within a limit, and kills every process it started when it ends.

A script that uses the standard library alone.

    python -I -S guardian.py PARENT DEATH_SIGNAL FOLDER LABEL LOG LOG_BYTES PROGRAM [ARGUMENT ...]

Three facts of the kernel: a process that asks for it becomes the parent of its descendants' orphans, in any
session (PR_SET_CHILD_SUBREAPER); a process can be signalled when its parent dies (PR_SET_PDEATHSIG); a child
that has ended keeps its pid until its parent has waited for it, so that killing children hits no other
process. From these:

- the program ends: its remaining processes become children of the guardian and are killed, all of them;
  but if the program was told to end, the processes of its group, which were told the same, end by themselves
  first (a shell ends before the program it has started);
- the guardian is killed: the program gets DEATH_SIGNAL, and the other processes go to the guardian's own
  guardian;
- PARENT dies (0: the guardian outlives it): the guardian kills the program at once, then sweeps as above.

SIGINT, SIGTERM and SIGHUP are passed on to the program's process group. LABEL is shown in a list of
processes. Exit status: that of the program, 128 + signal if one killed it; 127 if it could not be started.

LOG, if not empty, is where this process' own output goes, too. The program's output comes through a pipe, and
`Log` writes it. The pipe is read as long as the program may live: this process outlives it but for SIGKILL,
which the kernel passes on to the program.
"""

import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CHUNK = 64 << 10  # what a pipe holds
_GATHER_S = 0.001  # lines of this time are written together
_DRAIN_S = 2.0
_NOTE_BYTES = 512  # at most


def command(
    parent: int,
    death_signal: int,
    folder: str,
    label: str,
    program: Sequence[str],
    log: str = "",
    log_bytes: int = 0,
) -> list[str]:
    """Returns the command line of a guardian of a program.

    Isolated and without site: it does not depend on the run's Python environment, and starts fast.
    """
    words = (parent, int(death_signal), folder, label, log, log_bytes, *program)
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), *map(str, words)]


# Why a pipe: its limit holds at any speed, on any file system. A file that the program writes itself can
# only be cut after a look: at 1 GB/s it grows by 50 MB within 50 ms. A punched hole reads as NUL bytes in a
# file of growing length (NFS before 4.2 has none), a truncation loses what is written meanwhile, uncounted,
# RLIMIT_FSIZE ends the program. A pipe that the supervisor reads would block or end programs with it; a
# guardian outlives its program. Parts are renamed and never written anew, so that `tail -F` and our own
# reader go on where they were.
class Log:
    """A log of at most so many bytes: the beginning and the newest lines, however much a program writes.

    It has three parts, each a third. The first one stays, as LOG.first. After that LOG is filled, becomes
    LOG.1 in place of an earlier one, and is begun anew. One line at the end of LOG.first says how many bytes
    are missing between it and LOG.1. Output that a full disk does not take is missing, too; the program goes
    on.

    Args:
        path: LOG. It exists, and is this process' descriptors 1 and 2.
        most: bytes of all parts together.
        label: name of the program, for lines of our own.
        told: called when the first bytes go missing.
    """

    def __init__(self, path: str, most: int, label: str, told: Callable[[], None]) -> None:
        self._path, self._part, self._label, self._told = path, (most - _NOTE_BYTES) // 3, label, told
        self._size = os.stat(path).st_size
        self._missing, self._place = missing(path)
        self._refused = 0  # bytes, since the disk took some

    def write(self, data: bytes) -> None:
        """Appends output, of which lines stay whole; blocks for the disk."""
        try:
            if self._refused:
                note = self._line(f"{self._refused:,} bytes of output are missing here: the disk is full")
                while note:
                    note = self._append(note)
                self._refused = 0
            while data:
                data = self._append(data)
        except OSError:
            self._refused += len(data)

    def _append(self, data: bytes) -> bytes:
        """Writes lines that fit into this part, or begins another; returns the rest."""
        room = max(self._part - self._size, 0)
        fits = len(data) if len(data) <= room else data.rfind(b"\n", 0, room) + 1
        if not fits and self._size:
            self._begin_part()
            return data
        written = os.write(1, data[: fits or room])  # if nothing fits, a line is longer than a part
        self._size += written
        return data[written:]

    def _begin_part(self) -> None:
        first, before, new = (f"{self._path}.{name}" for name in ("first", "1", "new"))
        part = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
        lost = 0
        with contextlib.suppress(FileNotFoundError):
            if has_first := os.path.exists(first):
                lost = os.stat(before).st_size if os.path.exists(before) else 0
            os.replace(self._path, before if has_first else first)
        os.replace(new, self._path)
        for descriptor in (1, 2):
            os.dup2(part, descriptor)
        os.close(part)
        self._size = 0
        if lost:
            self._missing += lost
            self._note()

    def _note(self) -> None:
        """Writes the number into the line at the end of LOG.first, or that line."""
        with open(f"{self._path}.first", "r+b") as first:
            if self._place:
                first.seek(self._place)
                first.write(f"{self._missing:20,}".encode())
                return
            first.seek(0, os.SEEK_END)
            name = os.path.basename(self._path)
            why = f"log_bytes of the launch file; {name}.1 and {name} go on"
            first.write(self._line(f"{self._missing:20,} bytes of output are missing here: {why}"))
        self._missing, self._place = missing(self._path)
        self._told()

    def _line(self, text: str) -> bytes:
        return f"{time.strftime('%Y-%m-%d %H:%M:%S')}.000 WARNING {self._label}: {text}\n".encode()


def missing(log: str) -> tuple[int, int]:
    """Returns how many bytes a log lacks by the line at the end of LOG.first, and the place of that number.

    Returns zeros if there is no such line.
    """
    with contextlib.suppress(OSError), open(f"{log}.first", "rb") as first:
        begin = max(first.seek(0, os.SEEK_END) - _NOTE_BYTES, 0)
        first.seek(begin)
        line = rb" WARNING [^ ]+: ([ \d,]{20}) bytes of output are missing here"
        if found := re.search(line, first.read()):
            return int(found[1].replace(b",", b"")), begin + found.start(1)
    return 0, 0


def _keep(source: int, log: Log) -> None:
    """Writes to the log what comes through a pipe, until all that could write to it are gone."""
    while data := os.read(source, _CHUNK):
        log.write(data)
        if len(data) < _CHUNK // 2:
            time.sleep(_GATHER_S)


def adopt_orphans() -> None:
    """Makes this process, instead of init, the parent of its descendants' orphans."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> dict[int, int]:
    """Returns the children of this process, zombies included: pid -> process group."""
    me, found = str(os.getpid()).encode(), {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                # A name is any bytes, and may be cut off within a character.
                with open(f"/proc/{name}/stat", "rb") as file:
                    after_name = file.read().rpartition(b")")[2].split()
            except OSError:  # it has ended, or is another user's and hidden
                continue
            if after_name[1] == me:
                found[int(name)] = int(after_name[2])
    return found


def sweep(spared: Collection[int] = ()) -> None:
    """Kills the children of this process, and theirs as they become its own, until there is none.

    Blocks until it is done.
    """
    beyond = set(spared)
    while remaining := children().keys() - beyond:
        for pid in remaining:
            try:
                os.kill(pid, signal.SIGKILL)
            except PermissionError:  # it became another user's: we may not signal it
                beyond.add(pid)
        for pid in remaining - beyond:
            os.waitpid(pid, 0)


def block_signals() -> set[signal.Signals]:
    """Blocks the ending signals and SIGCHLD for `sigwait`; SIGINT and SIGHUP stay ignored if they were at the
    start (nohup, a shell's `&`).
    """
    # The caller may ignore them, but they report ends and the parent's death.
    for signum in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)
    wanted = {signum for signum in ENDING if signal.getsignal(signum) != signal.SIG_IGN} | {signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_SETMASK, wanted)
    return wanted


def main(argv: list[str]) -> int:
    """Runs the program; returns its exit status. Blocks until it and all processes it started are gone."""
    parent, death_signal, folder, label, log, log_bytes, *command = argv
    adopt_orphans()
    awaited = block_signals()
    if parent != "0":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):  # the parent died before the line above
            return 1
    spared = children()  # children that this process had before exec
    source, output = os.pipe() if log else (-1, -1)
    program = _start(command, folder, int(death_signal), output)
    keeper = None
    if log:
        os.close(output)
        kept = Log(log, int(log_bytes), label, lambda: _tell(int(parent)))
        keeper = threading.Thread(target=_keep, args=(source, kept), daemon=True)
        keeper.start()  # after the fork, and with all signals blocked that the main thread awaits
    status = 127
    if program:
        wait_status, told = _wait(program, int(parent), awaited)
        status = _status(wait_status)
        if told:
            _wait_for_group(program, int(parent), awaited)
    sweep(spared)
    if keeper:  # all that wrote is gone, but for another user's process
        keeper.join(_DRAIN_S)
    if parent == "0" and status == 128 + signal.SIGKILL:
        with contextlib.suppress(OSError):  # the reader is gone
            print(
                f"{label}: its supervisor was killed; all that it ran has been ended",
                file=sys.stderr,
                flush=True,
            )
    return status


def _start(command: list[str], folder: str, death_signal: int, output: int) -> int:
    """Starts the program in a session of its own; returns its pid, or 0, with the reason on stderr, if it
    cannot run. `output`: where its output goes; -1: where this process' goes.
    """
    me = os.getpid()
    running, failed = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            # Python ignores these signals; a program should start with the defaults.
            for signum in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(signum, signal.SIG_DFL)
            _prctl(_PR_SET_PDEATHSIG, death_signal)
            if output >= 0:
                os.dup2(output, 1)
                os.dup2(output, 2)
            if os.getppid() == me:
                signal.pthread_sigmask(signal.SIG_SETMASK, ())
                os.chdir(folder)
                os.execvp(command[0], command)
        except OSError as error:
            os.write(failed, f"cannot run {command[0]} in {folder}: {error}\n".encode())
        finally:
            os._exit(127)
    os.close(failed)
    with os.fdopen(running) as pipe:
        if why := pipe.read():  # a successful exec closes the pipe
            os.waitpid(pid, 0)
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S')}.000 ERROR launch: {why}", end="", file=sys.stderr)
            return 0
    return pid


def _wait(program: int, parent: int, awaited: set[signal.Signals]) -> tuple[int, bool]:
    """Returns the wait status of the program, and whether it was told to end.

    Passes signals on; kills the program if the parent dies.
    """
    told = False
    while True:
        signum = signal.sigwait(awaited)
        if signum != signal.SIGCHLD:
            told = not _orphaned(parent)
            _signal_group(program, signum if told else signal.SIGKILL)
            continue
        while (ended := _ended())[0]:
            if ended[0] == program:
                return ended[1], told


def _wait_for_group(program: int, parent: int, awaited: set[signal.Signals]) -> None:
    """Waits until no process of the group is left.

    To stop waiting, the caller kills this guardian; the parent's death also ends the wait.
    """
    while True:
        while _ended()[0]:
            pass
        if program not in children().values() or _orphaned(parent):
            return
        signum = signal.sigwait(awaited)
        if signum != signal.SIGCHLD:
            _signal_group(program, signum)


def _orphaned(parent: int) -> bool:
    return parent != 0 and os.getppid() != parent


def _ended() -> tuple[int, int]:
    try:
        return os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return 0, 0


def _signal_group(program: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended, and SIGCHLD is pending
        os.killpg(program, signum)


def _tell(parent: int) -> None:
    """Has the supervisor look at the logs; it looks whenever a child may have ended."""
    if not _orphaned(parent):
        os.kill(parent, signal.SIGCHLD)


def _status(wait_status: int) -> int:
    code = os.waitstatus_to_exitcode(wait_status)
    return code if code >= 0 else 128 - code


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
