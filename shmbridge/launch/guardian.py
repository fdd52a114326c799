"""Runs one program and lets nothing it started outlive it.

A script of the standard library alone; knows nothing of shmbridge.

    python -I -S guardian.py PARENT DEATH_SIGNAL FOLDER LABEL PROGRAM [ARGUMENT ...]

Three facts of the kernel: a process that asks for it becomes the parent of its descendants' orphans, whatever
sessions they opened (PR_SET_CHILD_SUBREAPER); a process can have itself signalled when its parent dies
(PR_SET_PDEATHSIG); a child that has ended keeps its pid until its parent has waited for it, so that killing
children hits nobody else. From these:

- the program ends: whatever it left becomes a child of the guardian and is killed, until there is none; but
  if it ends since it was told to, those of its process group, who were told the same, end by themselves first
  (a shell is gone before the program it has started);
- the guardian is killed: the program gets DEATH_SIGNAL, and what else there is goes to the guardian's own
  guardian;
- PARENT dies (0: it may): the guardian kills the program at once, then sweeps as above.

SIGINT, SIGTERM and SIGHUP go on to the program's process group. LABEL is there for those who read a list of
processes. Exit status: that of the program, 128 + signal if one killed it; 127 if it could not be started.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Collection

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def adopt_orphans() -> None:
    """From now on this process, not init, becomes the parent of its descendants' orphans."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> dict[int, int]:
    """The children of this process, ended ones that nobody waited for included: pid -> process group."""
    me, found = str(os.getpid()).encode(), {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                # a name is any bytes, cut off within a character too
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
            except PermissionError:  # it became another user's: nothing of ours may touch it
                beyond.add(pid)
        for pid in remaining - beyond:
            os.waitpid(pid, 0)


def block_signals() -> set[signal.Signals]:
    """Has the ending signals and SIGCHLD wait for `sigwait`; SIGINT and SIGHUP stay ignored if they came so
    (nohup, a shell's `&`).
    """
    # how we learn of ends, and of a parent's death: whoever called may ignore them
    for signum in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)
    wanted = {signum for signum in ENDING if signal.getsignal(signum) != signal.SIG_IGN} | {signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_SETMASK, wanted)
    return wanted


def main(argv: list[str]) -> int:
    """Runs the program; its exit status. Blocks until it and all it started are gone."""
    parent, death_signal, folder, label, *command = argv
    adopt_orphans()
    awaited = block_signals()
    if parent != "0":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):  # it died before the line above
            return 1
    spared = children()  # whoever became this program may have had some
    program = _start(command, folder, int(death_signal))
    status = 127
    if program:
        wait_status, told = _wait(program, int(parent), awaited)
        status = _status(wait_status)
        if told:
            _wait_for_group(program, int(parent), awaited)
    sweep(spared)
    if parent == "0" and status == 128 + signal.SIGKILL:
        with contextlib.suppress(OSError):  # of a reader that has gone away
            print(
                f"{label}: its supervisor was killed; all that it ran has been ended",
                file=sys.stderr,
                flush=True,
            )
    return status


def _start(command: list[str], folder: str, death_signal: int) -> int:
    """Pid of the program once it runs, in a session of its own; 0, and why on stderr, if it cannot be run."""
    me = os.getpid()
    running, failed = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            # Python ignores them; programs should not have to
            for signum in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(signum, signal.SIG_DFL)
            _prctl(_PR_SET_PDEATHSIG, death_signal)
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
        if why := pipe.read():  # its end closes with a successful exec
            os.waitpid(pid, 0)
            print(why, end="", file=sys.stderr)
            return 0
    return pid


def _wait(program: int, parent: int, awaited: set[signal.Signals]) -> tuple[int, bool]:
    """The wait status of the program, and whether it was told to end.

    Signals are passed on; a dead parent is the program's death.
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
    """Until nobody of the group is left.

    Whoever has no more patience kills this guardian; a dead parent has none.
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
    with contextlib.suppress(ProcessLookupError):  # ended, and SIGCHLD is on its way
        os.killpg(program, signum)


def _status(wait_status: int) -> int:
    code = os.waitstatus_to_exitcode(wait_status)
    return code if code >= 0 else 128 - code


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
