"""Starts the services of a plan in order, watches them, restarts those that die, stops all in reverse order.

    python -m shmbridge.launch.supervisor PLAN LOCK_FD text|json

Runs under a guardian, which is what the user started: the guardian passes signals on, and its death is a
SIGTERM here. All of it happens in one thread that waits for signals in one place, so nothing is ever
interrupted half-way.
"""

import os
import signal
import sys
import time
from pathlib import Path

import shmbridge
from shmbridge.config import format_size
from shmbridge.errors import LaunchFailed, ShmBridgeError
from shmbridge.launch import guardian
from shmbridge.launch.config import Restart
from shmbridge.launch.events import Events
from shmbridge.launch.health import is_up, look_around
from shmbridge.launch.plan import Plan
from shmbridge.launch.process import Process
from shmbridge.launch.step_lines import NewSteps, step_line, steps_of

_STEP_S = 1.0  # between two looks at the learner's metrics
_TICK_S = 0.1  # between two checks of services that are coming up
_SAME_SIGNAL_S = 0.3  # a service manager signals the command and this process, which so gets the signal twice
_STOP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_REFUSED = 2  # exit status of a program for wrong arguments: a restart will not help


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
            status = self._run()
        finally:
            self._stop()
        for left in shmbridge.list_bridges():
            held = sum(lane.held for lane in left.lanes)
            if left.name == self._plan.bridge and held:
                clean = f"a run that goes on takes them, shmbridge clean {left.name} --yes removes them"
                self._events.say(
                    "left", f"{held} groups that reached no batch are in shared memory: {clean}", records=held
                )
        self._events.say("end", f"everything has ended; status {status}", status=status)
        return status

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
        hubs = [process for process in self._processes() if process.service.role == "hub"]
        due += [time.monotonic() + _TICK_S] if any(hub.coming_up for hub in hubs) else []
        due += [time.monotonic() + _STEP_S] if self._steps else []
        self._wait(min(due) - time.monotonic() if due else None)
        self._show_step()
        self._look_at_ends()
        for process in self._processes():
            if process.due is not None and process.due <= time.monotonic():
                self._begin(process)
        for hub in hubs:
            if hub.coming_up:
                self._look_at(hub)

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
            elif process.service.role == "hub" and _comes_again(process, process.status):
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


def _comes_again(hub: Process, status: int) -> bool:
    """Returns whether a hub that ended after it had come up starts again: by its rule if it was killed, or,
    if that says always, by itself with an error. One that was asked to stop does not.
    """
    rule = hub.service.restart
    if rule is None or rule.when == "never" or not hub.came_up or status - 128 in _STOP_SIGNALS:
        return False
    return status > 128 or (rule.when == "always" and status != _REFUSED)


def _failed(process: Process, what: str) -> LaunchFailed:
    return LaunchFailed(
        f"{process.name} {what} with {process.how()}",
        hint=f"mend what the end of {process.log} says:\n{process.last_words()}",
    )


def main(argv: list[str]) -> int:
    """Runs a saved plan; returns the exit status."""
    path, lock, form = argv
    os.set_inheritable(int(lock), False)  # held by the guardian and by this process, not by services
    plan = Plan.load(Path(path))
    events = Events(Path(plan.run_dir) / "events.jsonl", as_json=form == "json")
    for note in plan.notes:
        events.say("note", f"note: {note}")
    return Supervisor(plan, events).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
