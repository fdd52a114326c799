"""A launch leaves no orphan: whichever of its processes is killed, by SIGKILL and at any time, every process
it started is gone, by pid.
"""

import ctypes
import os
import random
import signal
import time

import pytest


def stubborn_run(launch, **options):
    """Services that ignore SIGTERM and have processes in sessions of their own, whose parents are gone, which
    do so too.
    """
    flags = ("--stubborn", "--stray")
    hub = launch.service("hub", *flags, role="hub", grace_s=0.3)
    envs = [launch.service(name, *flags, grace_s=0.3) for name in ("one", "two")]
    return launch.start(
        [launch.service("server", *flags, role="server", grace_s=0.3)], [hub], envs, **options
    )


def test_an_orderly_end_takes_the_strays_too(launch):
    launch.start(
        [launch.service("hub", "--stray", "--until", launch.folder / "enough", role="hub")],
        [launch.service("env", "--stray")],
    )
    launch.until_up()
    assert len(launch.started_pids()) == 4
    (launch.folder / "enough").touch()
    assert launch.wait() == 0
    launch.until_nothing_lives()


def test_the_front_is_killed(launch):
    stubborn_run(launch).until_up()
    assert len(launch.started_pids()) == 8
    supervisor = launch.supervisor()
    launch.process.kill()
    launch.wait()
    launch.until_nothing_lives()
    launch.until(lambda: not os.path.exists(f"/proc/{supervisor}"))
    # an orderly end, for services that handle signals
    assert [each["signal"] for each in launch.said("signal")] == ["SIGTERM"]


def test_the_front_is_killed_and_its_terminal_is_gone_too(launch):
    reading, writing = os.pipe()
    stubborn_run(launch, form="text", stderr=writing).until_up()
    os.close(writing)
    os.close(reading)
    launch.process.kill()
    launch.wait()
    launch.until_nothing_lives()


def test_the_supervisor_is_killed(launch):
    stubborn_run(launch).until_up()
    os.kill(launch.supervisor(), signal.SIGKILL)
    assert launch.wait() == 137
    # Not even as zombies: the front has waited for them.
    assert not [pid for pid in launch.started_pids() if os.path.exists(f"/proc/{pid}")]
    assert "its supervisor was killed" in launch.errors
    launch.until_nothing_lives()


@pytest.fixture
def a_name_of_any_bytes():
    """A process whose name the kernel has cut off within a character, as it does after 15 bytes."""
    waiting, release = os.pipe()
    ready, named = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(release)
        ctypes.CDLL(None).prctl(15, b"seven \xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3", 0, 0, 0)  # PR_SET_NAME
        os.write(named, b".")
        os.read(waiting, 1)
        os._exit(0)
    os.read(ready, 1)
    yield
    os.close(release)
    os.waitpid(pid, 0)
    for descriptor in (waiting, ready, named):
        os.close(descriptor)


@pytest.mark.parametrize("who", ["nobody", "front", "supervisor"])
def test_a_process_with_a_broken_name_is_no_hindrance(launch, a_name_of_any_bytes, who):
    stubborn_run(launch).until_up()
    supervisor = launch.supervisor()
    if who == "nobody":
        launch.send(signal.SIGTERM)
    else:
        os.kill(launch.pid if who == "front" else supervisor, signal.SIGKILL)
    assert launch.wait() == {"nobody": 143, "front": -9, "supervisor": 137}[who]
    launch.until_nothing_lives()


@pytest.mark.parametrize("who", ["nobody", "front"])
def test_a_caller_that_ignores_sigterm(launch, who):
    """As a batch script with `trap '' TERM` does, and all that it starts inherits."""
    stubborn_run(launch, before=("sh", "-c", "trap '' TERM; exec \"$@\"", "sh")).until_up()
    if who == "nobody":
        launch.send(signal.SIGTERM)
    else:
        launch.process.kill()
    assert launch.wait() == {"nobody": 143, "front": -9}[who]
    launch.until_nothing_lives()


def test_a_stopped_supervisor_is_killed(launch):
    """A stopped supervisor cannot act: the effects of its death must be enough."""
    stubborn_run(launch).until_up()
    supervisor = launch.supervisor()
    os.kill(supervisor, signal.SIGSTOP)
    os.kill(supervisor, signal.SIGKILL)
    assert launch.wait() == 137
    launch.until_nothing_lives()


def test_front_and_supervisor_are_killed_together(launch):
    stubborn_run(launch).until_up()
    supervisor = launch.supervisor()
    os.kill(launch.pid, signal.SIGSTOP)  # neither sees the other die
    os.kill(supervisor, signal.SIGSTOP)
    os.kill(launch.pid, signal.SIGKILL)
    os.kill(supervisor, signal.SIGKILL)
    launch.wait()
    launch.until_nothing_lives()


def test_the_guardian_of_an_environment_is_killed(launch):
    hub, env = launch.service("hub", role="hub"), launch.service("env", "--stubborn", "--stray", grace_s=0.3)
    launch.start([hub], [env]).until_up()
    launch.until(lambda: len(launch.started_pids()) == 3)  # a stray says so itself, perhaps after that
    first = launch.started_pids()[-2:]
    (guardian,) = [pid for pid in launch.guardians() if b"\0env\0" in launch._words(pid)]
    os.kill(guardian, signal.SIGKILL)
    launch.until(lambda: launch.noted("start").count("env") == 2)
    assert not [pid for pid in first if os.path.exists(f"/proc/{pid}")]  # before the next one was started
    launch.send(signal.SIGTERM)
    assert launch.wait() == 143
    launch.until_nothing_lives()


def test_supervisor_and_guardians_are_killed_together(launch):
    stubborn_run(launch).until_up()
    victims = [launch.supervisor(), *launch.guardians()]
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for pid in victims:
            os.kill(pid, signum)
    assert launch.wait() == 137
    launch.until_nothing_lives()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("who", ["front", "supervisor"])
def test_a_kill_at_any_moment_of_the_start(launch, who, seed):
    """The kill may come also between a fork and its effects."""
    moment = random.Random(seed).uniform(0.0, 0.9)
    stubborn_run(launch)
    if who == "supervisor":
        victim = launch.supervisor()
        time.sleep(moment / 2)
    else:
        victim = launch.pid
        time.sleep(moment)
    os.kill(victim, signal.SIGKILL)
    launch.wait()
    launch.until_nothing_lives()
