"""Starts the services of a plan in order, watches them, restarts those that die, stops all in reverse order.

    python -m shmbridge.launch.supervisor PLAN LOCK_FD text|json

Runs under a guardian, which is what the user started: the guardian passes signals on, and its death is a
SIGTERM here. All of it happens in one thread that waits for signals in one place, so nothing is ever
interrupted half-way.
"""

import contextlib
import fcntl
import http.client
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import msgspec

import shmbridge
from shmbridge.cli.log import LOG_NAME, lines
from shmbridge.config import format_size
from shmbridge.errors import LaunchFailed, ShmBridgeError
from shmbridge.launch import guardian
from shmbridge.launch.config import Config, Restart
from shmbridge.launch.logs import log_parts
from shmbridge.launch.plan import Check, Plan, Service, write_private

_LOOK_S = 0.5
_LAST_BYTES, _LAST_LINES = 16 << 10, 15
_MOST_BYTES = 1 << 20  # read at once; older steps than that are skipped
_OF_LINES = 20  # lines of a whole run where they do not replace each other
_STEP_S = 1.0  # between two looks at the learner's metrics
_TICK_S = 0.1  # between two checks of services that are coming up
_SAME_SIGNAL_S = 0.3  # a service manager signals the command and this process, which so gets the signal twice
_STOP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_REFUSED = 2  # exit status of a program for wrong arguments: a restart will not help


class Events:
    """Reports events; a closed terminal or pipe never ends a run.

    Args:
        path: file that gets a JSON line per event.
        as_json: JSON on stdout instead of text on stderr.
    """

    def __init__(self, path: Path, *, as_json: bool) -> None:
        self._file = path.open("ab", buffering=0)
        self._as_json = as_json
        self._began = time.monotonic()
        self._in_place = not as_json and os.isatty(2)
        self._drawn = False

    def say(self, event: str, text: str, **facts: Any) -> None:
        """Reports one event: its kind, the text for a reader, and facts for a program."""
        line = msgspec.json.encode({"event": event, "time": time.time(), **facts, "text": text}) + b"\n"
        with contextlib.suppress(OSError):
            self._file.write(line)
        if self._as_json:
            _write(1, line)
        else:
            clear = "\r\x1b[K" if self._drawn else ""
            self._drawn = False
            _write(2, f"{clear}{self._line(text)}\n".encode())

    def step(self, text: str, *, is_due: bool, **facts: Any) -> None:
        """Shows the newest step: on a terminal in one line, drawn over the last step's; else reports it if a
        line `is_due`.
        """
        if self._in_place:
            self._drawn = True
            _write(2, f"\r{self._line(text)}\x1b[K".encode())
        elif is_due:
            self.say("step", text, **facts)

    def _line(self, text: str) -> str:
        return f"[{time.monotonic() - self._began:7.1f} s] {text}"


def _write(descriptor: int, data: bytes) -> None:
    """Writes as much as the reader takes; a stopped terminal or a full pipe costs a moment and the rest of
    the line, but does not stop the run.
    """
    with contextlib.suppress(OSError):
        for begin in range(0, len(data), select.PIPE_BUF):
            if not select.select([], [descriptor], [], 0.2)[1]:
                return
            os.write(descriptor, data[begin : begin + select.PIPE_BUF])


class Backoff:
    """The restart delays of one process: they double, and the number of restarts is limited.

    Args:
        rule: the config's restart rule.
    """

    def __init__(self, rule: Restart) -> None:
        self._rule = rule
        self._next_delay = rule.first_delay
        self._restarts: deque[float] = deque()

    def after(self, *, started: float, ended: float) -> float | None:
        """Returns the seconds until it may start again; None: it has been restarted `max_restarts` times
        within the window.
        """
        rule = self._rule
        while self._restarts and self._restarts[0] <= ended - rule.window:
            self._restarts.popleft()
        if len(self._restarts) >= rule.max_restarts:
            return None
        self._restarts.append(ended)
        if ended - started >= rule.reset_after:
            self._next_delay = rule.first_delay
        delay = min(self._next_delay, rule.max_delay)
        self._next_delay = min(2 * delay, rule.max_delay)
        return delay


def is_up(check: Check, bridge: str, alive_s: float) -> bool:
    """Returns whether a process that has been alive for `alive_s` seconds is up."""
    if check.kind == "alive":
        return alive_s >= check.within_s
    return _consumer_pid(bridge) is not None if check.kind == "hub" else _answers(check.url, check.token)


def look_around(plan: Plan) -> None:
    """Raises LaunchFailed if the run's bridge or one of its ports is in use: its owner would pass our health
    checks.
    """
    if (consumer := _consumer_pid(plan.bridge)) is not None:
        raise LaunchFailed(
            f"bridge {plan.bridge} has a living consumer, pid {consumer}",
            hint="end it, or use another bridge",
        )
    for service in plan.services:
        if service.check.kind == "http":
            parts = urlsplit(service.check.url)
            try:
                socket.create_connection((parts.hostname or "", parts.port or 80), _LOOK_S).close()
            except (OSError, UnicodeError):
                # The port is free; an invalid name is left to the service to report.
                continue
            taken = f"port {parts.port}, which is for {service.name}, is in use"
            raise LaunchFailed(taken, hint=f"set another {service.key}.port, or 0 for a free one")


def _consumer_pid(bridge: str) -> int | None:
    return next((info.consumer_pid for info in shmbridge.list_bridges() if info.name == bridge), None)


def _answers(url: str, token: str) -> bool:
    parts = urlsplit(url)
    try:
        with contextlib.closing(
            http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_LOOK_S)
        ) as connection:
            connection.request(
                "GET", parts.path, headers={"Authorization": f"Bearer {token}"} if token else {}
            )
            return connection.getresponse().status == 200
    except (OSError, UnicodeError, http.client.HTTPException):
        return False


class Process:
    """A service and its present process, if any.

    Args:
        service: what to run.
        log: file its output is appended to; its guardian keeps it within a limit.
        log_bytes: that limit.
    """

    def __init__(self, service: Service, log: Path, log_bytes: int) -> None:
        self.service = service
        self.log = log
        self._log_bytes = log_bytes
        self._missing: int | None = guardian.missing(str(self.log))[0]  # of earlier launches; None: was told
        self.pid = 0  # of the guardian; 0: not running
        self.status: int | None = None  # of its last end
        self.started = 0.0
        self.starts = 0
        self.lived_s = 0.0  # of its last run
        self.up = self.came_up = False  # now; in any of its runs
        self.over = False  # ended for good, and reported
        self.due: float | None = None  # time of the next start
        self.backoff = Backoff(service.restart or Restart())
        self._begins = b""  # the first line of this start

    @property
    def name(self) -> str:
        """The service's name."""
        return self.service.name

    @property
    def coming_up(self) -> bool:
        """Whether it runs and has not passed its health check yet."""
        return self.pid != 0 and not self.up

    def start(self) -> None:
        """Starts the service; never blocks. If the program cannot be run, its log says so and it ends with
        127.
        """
        self.starts += 1
        self.started, self.due, self.status, self.up = time.monotonic(), None, None, False
        self._begins = (lines(self.name, f"start {self.starts} of {self.name}") + "\n").encode()
        with self.log.open("ab", buffering=0) as log:
            with contextlib.suppress(OSError):  # a full disk costs output, and no restart
                log.write(self._begins)
            self.pid = os.posix_spawn(
                sys.executable,
                guardian.command(
                    os.getpid(),
                    signal.SIGKILL,
                    self.service.folder or os.getcwd(),
                    self.name,
                    self.service.command + (self.service.again if self.starts > 1 else []),
                    str(self.log.absolute()),
                    self._log_bytes,
                ),
                os.environ | self.service.env | {LOG_NAME: self.name},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, log.fileno(), 1),
                    (os.POSIX_SPAWN_DUP2, log.fileno(), 2),
                ],
                setsid=True,
            )

    def ended(self, status: int) -> None:
        """Records an end. `status`: the exit status, or 128 + signal."""
        self.pid, self.status, self.up = 0, status, False
        self.lived_s = time.monotonic() - self.started

    def send(self, signum: signal.Signals) -> None:
        """Signals the guardian, which passes the signal on; for SIGKILL, the kernel does.

        Harmless once the process has ended.
        """
        if self.pid:
            os.kill(self.pid, signum)  # not waited for yet: the pid is not reused

    def how(self) -> str:
        """Returns how it last ended, in words."""
        status = self.status or 0
        if status > 128 and status - 128 in set(signal.Signals):
            return f"status {status} ({signal.Signals(status - 128).name})"
        return f"status {status}"

    def last_words(self) -> str:
        """Returns the end of its log, of this start alone."""
        text = b"".join(map(_end_of, log_parts(self.log)[-2:]))[-_LAST_BYTES:].rpartition(self._begins)[2]
        lines = text.decode(errors="replace").splitlines()
        return "\n".join(f"    {line[:800]}" for line in lines[-_LAST_LINES:])

    def missing_now(self) -> int:
        """Returns how many bytes its log lacks, once: when that number grew in this launch; else 0."""
        if self._missing is None or (found := guardian.missing(str(self.log))[0]) <= self._missing:
            return 0
        self._missing = None
        return found


def _end_of(log: Path) -> bytes:
    with log.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - _LAST_BYTES, 0))
        return file.read()


class NewSteps:
    """Reads what a run appends to its metrics.jsonl; what was there before is of earlier runs.

    Args:
        path: metrics.jsonl; may come later.
        steps: of the whole run; 0: unknown.
    """

    def __init__(self, path: Path, steps: int) -> None:
        self.steps = steps
        self._path = path
        self._read_to = path.stat().st_size if path.exists() else 0
        self._shown = 0

    def newest(self) -> dict[str, Any] | None:
        """Returns the metrics of the newest step since the last call; None if there is none."""
        try:
            with self._path.open("rb") as file:
                end = file.seek(0, 2)
                file.seek(max(self._read_to, end - _MOST_BYTES))
                text = file.read()
        except OSError:
            return None
        complete = text.rpartition(b"\n")[0]
        if not complete:
            return None
        self._read_to = end - (len(text) - len(complete) - 1)
        try:
            metrics = msgspec.json.decode(complete.rpartition(b"\n")[2])
        except msgspec.DecodeError:
            return None
        return metrics if isinstance(metrics, dict) and isinstance(metrics.get("step"), int) else None

    def is_due(self, step: int) -> bool:
        """Returns whether a line of its own is due: the first step, the last, and some twenty between."""
        every = max(1, self.steps // _OF_LINES)
        due = self._shown == 0 or step == self.steps or step // every > self._shown // every
        self._shown = step if due else self._shown
        return due


def step_line(metrics: dict[str, Any], steps: int) -> str:
    """Returns step, reward, tokens per second, the share of the step that was waiting, staleness."""
    total = _number(metrics, "step_s")  # waiting is part of it
    parts = [f"step {metrics['step']}" + (f"/{steps}" if steps else "")]
    if metrics.get("reward_mean") is not None:
        parts.append(f"reward {_number(metrics, 'reward_mean'):.3f}")
    if total > 0:
        parts.append(f"{_number(metrics, 'tokens') / total:,.0f} tokens/s")
        parts.append(f"waiting {_number(metrics, 'wait_s') / total:.0%}")
    parts.append(f"staleness {_number(metrics, 'staleness_mean'):.1f}")
    return "  ".join(parts)


def steps_of(command: list[str]) -> int:
    """Returns the steps that a learner's command line says; 0 if it says none."""
    for word, value in zip(command, [*command[1:], ""], strict=False):
        if word == "--steps" and value.isdigit():
            return int(value)
        if word.startswith("--steps=") and word[8:].isdigit():
            return int(word[8:])
    return 0


def _number(metrics: dict[str, Any], name: str) -> float:
    value = metrics.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0


def become_guardian(
    config: Config, plan: Plan, *, label: str, as_json: bool, module: str = "shmbridge.launch.supervisor"
) -> NoReturn:
    """Writes the run directory and becomes the guardian of a supervisor, which runs `module`; raises
    LaunchFailed if the directory is in use or cannot be written.
    """
    _open_standard_descriptors()
    run_dir = Path(plan.run_dir)
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        lock = _lock(run_dir / "launch.lock")
        write_private(run_dir / "config.json", msgspec.json.format(msgspec.json.encode(config)))
        plan.save(run_dir / "plan.json")
    except OSError as error:
        raise LaunchFailed(
            f"run directory {run_dir}: {error.strerror}", hint="set a run_dir that this user can write to"
        ) from error
    supervisor = [sys.executable, "-m", module, str(run_dir / "plan.json")]
    supervisor += [str(lock), "json" if as_json else "text"]
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None if the descriptor was closed at the start
            stream.flush()
    # From here on the user's shell, terminal and `kill` see a small process with one thread, which can hardly
    # fail.
    os.execv(sys.executable, guardian.command(0, signal.SIGTERM, os.getcwd(), label, supervisor))


def _open_standard_descriptors() -> None:
    """Opens closed standard descriptors (`2>&-`) on /dev/null; else the lock or a log would get their
    numbers, and the output written to them.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number: this one


def _lock(path: Path) -> int:
    """Takes a lock that lasts as long as the guardian or the supervisor lives; returns its descriptor."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
        os.close(lock)
        raise LaunchFailed(
            f"{path.parent} is in use by a launch, pid {holder}", hint="stop that one, or set another run_dir"
        ) from None
    os.truncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    os.set_inheritable(lock, True)
    return lock


class Stopped(Exception):
    """The user, or the death of the launcher, asked to stop."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Supervisor:
    """One run. Main thread only.

    Args:
        plan: what to run.
        events: receives the reports.
    """

    def __init__(self, plan: Plan, events: Events) -> None:
        self._plan = plan
        self._events = events
        self._stages = [
            [Process(service, plan.log(service), plan.log_bytes) for service in stage]
            for stage in plan.stages
        ]
        self._done = False  # the hub has ended in order
        learner = next((service for service in plan.services if service.name == "learner"), None)
        self._steps = learner and NewSteps(Path(plan.run_dir) / "metrics.jsonl", steps_of(learner.command))
        self._stopping_since: float | None = None
        self._hurry = False
        self._awaited: set[signal.Signals] = set()

    def run(self) -> int:
        """Runs the plan; returns the exit status: 0 the hub has done its work, 1 something failed, 128 +
        signal stopped.

        Blocks until nothing runs any more.
        """
        guardian.adopt_orphans()
        self._awaited = guardian.block_signals()
        try:
            return self._run()
        finally:
            self._stop()

    def _run(self) -> int:
        try:
            look_around(self._plan)
            for stage in self._stages:
                self._start(stage)
            if not self._done:
                self._events.say(
                    "up", f"all {len(self._plan.services)} services are up; logs in {self._plan.run_dir}/logs"
                )
            while not self._done:
                self._watch()
        except Stopped as stopped:
            self._events.say("signal", f"stopping: {stopped}", signal=str(stopped))
            return 128 + stopped.signum
        except ShmBridgeError as error:
            self._events.say("failed", str(error), code=error.code)
            return 1
        except OSError as error:  # for example a full disk, a missing log folder, no process left
            self._events.say("failed", f"the launch cannot go on: {error}")
            return 1
        return 0

    # --- start ----------------------------------------------------------------------------------------------

    def _start(self, stage: list[Process]) -> None:
        """Starts a stage and returns once it is up.

        Raises LaunchFailed if a service ends, or a deadline passes, before that.
        """
        for process in stage:
            self._begin(process)
        while not self._done and any(process.coming_up for process in stage):
            self._wait(_TICK_S)
            self._look_at_ends()
            for process in stage:
                if process.coming_up:
                    self._look_at(process)

    def _begin(self, process: Process) -> None:
        if self._done:
            return
        process.start()
        again = f" again, start {process.starts}" if process.starts > 1 else ""
        self._events.say(
            "start",
            f"{process.name}: starting{again}",
            service=process.name,
            starts=process.starts,
            log=str(process.log),
        )

    def _look_at(self, process: Process) -> None:
        check, alive_s = process.service.check, time.monotonic() - process.started
        if is_up(check, self._plan.bridge, alive_s):
            process.up = process.came_up = True
            self._events.say(
                "up", f"{process.name}: up after {alive_s:.1f} s", service=process.name, after_s=alive_s
            )
        elif alive_s > check.within_s:
            waited_for = (
                f"an answer at {check.url}" if check.url else f"a consumer of bridge {self._plan.bridge}"
            )
            raise LaunchFailed(
                f"{process.name} is not up after {check.within_s:g} s: there is no sign of {waited_for}",
                hint=f"raise {process.service.key}.ready_timeout if its log says that it is loading:\n"
                f"{process.last_words()}",
            )

    # --- watch ----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Waits for the next event and handles it."""
        due = [process.due for process in self._processes() if process.due is not None]
        again = [process for process in self._processes() if process.service.role != "environment"]
        due += [time.monotonic() + _TICK_S] if any(process.coming_up for process in again) else []
        due += [time.monotonic() + _STEP_S] if self._steps else []
        self._wait(min(due) - time.monotonic() if due else None)
        self._show_step()
        self._look_at_ends()
        for process in self._processes():
            if process.due is not None and process.due <= time.monotonic():
                self._begin(process)
        for process in again:
            if process.coming_up:
                self._look_at(process)

    def _look_at_ends(self) -> None:
        for process in self._processes():
            if process.status is None or process.over or process.due is not None:
                continue
            if process.service.role == "environment":
                self._environment_ended(process, process.status)
            elif process.service.role == "hub" and process.status == 0:
                process.over = self._done = True
                never = (
                    "" if process.came_up else ", and was never seen as the bridge's consumer: see its log"
                )
                self._events.say("done", f"{process.name}: done{never}", service=process.name)
            elif _comes_again(process, process.status):
                self._start_later(process)
            else:
                raise _failed(process, "ended")

    def _show_step(self) -> None:
        """Shows the learner's newest step, at most one a second."""
        if self._steps and (metrics := self._steps.newest()):
            text, step = step_line(metrics, self._steps.steps), metrics["step"]
            self._events.step(
                f"learner: {text}", is_due=self._steps.is_due(step), service="learner", step=step
            )

    def _environment_ended(self, process: Process, status: int) -> None:
        rule, how = process.service.restart or Restart(), f"{process.name}: ended with {process.how()}"
        if rule.when == "never" or (rule.when == "failure" and status == 0):
            process.over = True
            self._events.say("ended", how, service=process.name, status=status)
            if all(each.over for each in self._processes() if each.service.role == "environment"):
                self._events.say(
                    "ended", "no environment runs any more: what the hub has is all it gets from here"
                )
            return
        if status == _REFUSED or (process.starts == 1 and process.lived_s < process.service.check.within_s):
            raise _failed(process, "ended at its start")
        self._start_later(process)

    def _start_later(self, process: Process) -> None:
        """Starts an ended process again after its delay; raises LaunchFailed if its rule allows no more."""
        rule, again = process.service.restart or Restart(), process.service.again
        delay = process.backoff.after(started=process.started, ended=time.monotonic())
        if delay is None:
            raise _failed(
                process, f"ended more than {rule.max_restarts} times within {rule.window:g} s, at last"
            )
        process.due = time.monotonic() + delay
        self._events.say(
            "ended",
            f"{process.name}: ended with {process.how()}; starting again in {delay:g} s"
            + (f" with {' '.join(again)}" if again else ""),
            service=process.name,
            status=process.status,
            delay_s=delay,
        )

    def _processes(self) -> list[Process]:
        return [process for stage in self._stages for process in stage]

    # --- the one place to wait ------------------------------------------------------------------------------

    def _wait(self, seconds: float | None) -> None:
        """Waits for a signal, and records ended processes. Raises Stopped, or hurries if stopping already."""
        if seconds is None:
            signum = signal.sigwait(self._awaited)
        else:
            received = signal.sigtimedwait(self._awaited, max(seconds, 0.0))
            signum = signal.Signals(received.si_signo) if received else signal.SIGCHLD
        if signum != signal.SIGCHLD:
            if self._stopping_since is None:
                raise Stopped(signum)
            self._hurry |= time.monotonic() - self._stopping_since > _SAME_SIGNAL_S
        self._reap()
        self._look_at_logs()

    def _reap(self) -> None:
        running = {process.pid: process for process in self._processes() if process.pid}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if process := running.pop(pid, None):
                code = os.waitstatus_to_exitcode(status)
                process.ended(code if code >= 0 else 128 - code)
                if code < 0:  # its guardian was killed: its processes are ours now
                    guardian.sweep(running)

    def _look_at_logs(self) -> None:
        """Reports a log from which output is missing; its guardian has signalled us."""
        for process in self._processes():
            if missing := process.missing_now():
                self._events.say(
                    "log",
                    f"{process.name}: its log has {format_size(self._plan.log_bytes)}, log_bytes: the "
                    f"beginning and the newest lines are kept, {missing:,} bytes are missing so far",
                    service=process.name,
                    log=str(process.log),
                    missing_bytes=missing,
                )

    # --- stop -----------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Stops everything, the last stage first; kills processes that exceed their grace, or all if there is
        a hurry.
        """
        self._stopping_since = time.monotonic()
        for stage in reversed(self._stages):
            self._stop_stage([process for process in stage if process.pid])
        guardian.sweep()

    def _stop_stage(self, stage: list[Process]) -> None:
        began, killed = time.monotonic(), list[Process]()
        for process in stage:
            self._events.say("stop", f"{process.name}: stopping", service=process.name)
            process.send(signal.SIGTERM)
        while any(process.pid for process in stage):
            for process in stage:
                left = began + process.service.stop_grace_s - time.monotonic()
                if process.pid and process not in killed and (self._hurry or left <= 0):
                    killed.append(process)
                    why = (
                        "there is a hurry"
                        if self._hurry
                        else f"it did not end within {process.service.stop_grace_s:g} s"
                    )
                    self._events.say("kill", f"{process.name}: killing, {why}", service=process.name)
                    process.send(signal.SIGKILL)
            self._wait(_TICK_S)
        for process in stage:
            self._events.say(
                "stopped",
                f"{process.name}: ended with {process.how()}",
                service=process.name,
                status=process.status,
            )


def _comes_again(process: Process, status: int) -> bool:
    """Returns whether a hub or server that ended after it had come up starts again: by its rule if it was
    killed, or, if that says always, after an error of its own. One that was asked to stop does not.
    """
    rule = process.service.restart
    if rule is None or rule.when == "never" or not process.came_up or status - 128 in _STOP_SIGNALS:
        return False
    return status > 128 or (rule.when == "always" and status != _REFUSED)


def _failed(process: Process, what: str) -> LaunchFailed:
    return LaunchFailed(
        f"{process.name} {what} with {process.how()}",
        hint=f"fix what the end of {process.log} reports:\n{process.last_words()}",
    )


def supervise(path: Path, lock: int, *, as_json: bool) -> tuple[int, Plan, Events]:
    """Runs a saved plan; returns the exit status, as `Supervisor.run`. Blocks until its end."""
    os.set_inheritable(lock, False)  # held by the guardian and by this process, not by services
    plan = Plan.load(path)
    events = Events(Path(plan.run_dir) / "events.jsonl", as_json=as_json)
    for note in plan.notes:
        events.say("note", f"note: {note}")
    return Supervisor(plan, events).run(), plan, events


def main(argv: list[str]) -> int:
    """Runs a saved plan and reports what it leaves behind; returns the exit status."""
    path, lock, form = argv
    status, plan, events = supervise(Path(path), int(lock), as_json=form == "json")
    for left in shmbridge.list_bridges():
        held = sum(lane.held for lane in left.lanes)
        if left.name == plan.bridge and held:
            clean = f"a run that goes on takes them, shmbridge clean {left.name} --yes removes them"
            text = f"{held} groups that reached no batch are in shared memory: {clean}"
            events.say("left", text, records=held)
    events.say("end", f"everything has ended; status {status}", status=status)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
