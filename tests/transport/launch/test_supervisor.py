"""The supervisor with fake services: order, health, restarts, stops.

test_orphans.py checks that no kill leaves a process behind.
"""

import contextlib
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import time

import pytest

from shmbridge.launch.config import Restart
from shmbridge.launch.plan import Plan
from shmbridge.testing import wait_until


def test_each_stage_waits_for_the_health_of_the_one_before_and_stops_in_reverse(launch):
    server = launch.service(
        "server", "--answer-after", 0.4, role="server", http=launch.free_port(), within_s=20
    )
    hub = launch.service(
        "hub", "--until", launch.folder / "enough", role="hub", http=launch.free_port(), within_s=20
    )
    envs = [launch.service("one"), launch.service("two")]
    launch.start([server], [hub], envs).until_up()
    (launch.folder / "enough").touch()
    assert launch.wait() == 0

    order = [(name, what) for name, what, _ in launch.notes]
    assert order[:4] == [("server", "start"), ("server", "answers"), ("hub", "start"), ("hub", "answers")]
    assert {name for name, _ in order[4:6]} == {"one", "two"}
    assert launch.noted("SIGTERM")[-1] == "server"
    assert sorted(launch.noted("SIGTERM")) == ["one", "server", "two"]  # the hub ended by itself
    stops = [each["service"] for each in launch.said("stopped")]
    assert stops.index("server") > max(stops.index("one"), stops.index("two"))
    assert [each["status"] for each in launch.said("end")] == [0]
    for name in ("server", "hub", "one", "two"):
        assert f"{name} says hello" in (launch.run_dir / "logs" / f"{name}.log").read_text()
    launch.until_nothing_lives()


def test_each_change_is_a_line_on_stderr_without_json(launch):
    launch.start(
        [launch.service("hub", "--until", launch.folder / "enough", role="hub")], form="text"
    ).until_up()
    (launch.folder / "enough").touch()
    assert launch.wait() == 0
    assert launch.output == ""
    assert "hub: starting" in launch.errors
    assert "hub: up after" in launch.errors
    assert "everything has ended; status 0" in launch.errors


def test_json_is_one_object_per_event_on_stdout_and_nothing_else(launch):
    launch.start([launch.service("hub", "--until", launch.folder / "enough", role="hub")]).until_up()
    (launch.folder / "enough").touch()
    assert launch.wait() == 0
    assert launch.errors == ""
    assert launch.output == (launch.run_dir / "events.jsonl").read_text()
    assert [each["event"] for each in launch.events] == ["start", "up", "up", "done", "end"]


def test_a_deadline_shows_the_end_of_the_log_and_ends_the_run(launch):
    server = launch.service(
        "server", "--answer-after", 60, role="server", http=launch.free_port(), within_s=3
    )
    launch.start([server], [launch.service("env")])
    assert launch.wait() == 1
    (failed,) = launch.said("failed")
    assert "server is not up after 3 s" in failed["text"]
    assert "server says hello" in failed["text"]
    assert "server.ready_timeout" in failed["text"]
    assert launch.noted("start") == ["server"]
    launch.until_nothing_lives()


def test_a_question_of_health_has_its_token(launch):
    hub = launch.service("hub", "--token", "secret", role="hub", http=launch.free_port(), within_s=20)
    hub.check.token = "secret"
    launch.start([hub]).until_up()
    launch.send(signal.SIGTERM)
    assert launch.wait() == 143


def test_a_server_that_refuses_to_answer_is_not_up(launch):
    launch.start(
        [launch.service("hub", "--token", "secret", role="hub", http=launch.free_port(), within_s=2)]
    )
    launch.until(lambda: launch.noted("answers"))
    assert launch.wait() == 1
    assert not launch.said("up")


def test_a_death_at_the_start_shows_log_and_status(launch):
    server = launch.service("server", "--live", 0.1, "--status", 3, role="server", within_s=20)
    launch.start([server], [launch.service("env")])
    assert launch.wait() == 1
    (failed,) = launch.said("failed")
    assert "server ended with status 3" in failed["text"]
    assert "server is leaving with 3" in failed["text"]
    assert launch.noted("start") == ["server"]


def test_a_program_that_cannot_be_run_says_so(launch):
    service = launch.service("server", role="server", within_s=20)
    service.command = ["/no/such/program"]
    launch.start([service])
    assert launch.wait() == 1
    assert "cannot run /no/such/program" in launch.said("failed")[0]["text"]
    assert "status 127" in launch.said("failed")[0]["text"]


def test_the_log_of_an_earlier_run_is_kept_and_not_shown(launch):
    (launch.run_dir / "logs").mkdir(parents=True)
    log = launch.run_dir / "logs" / "server.log"
    log.write_text("an old story\n")
    launch.start([launch.service("server", "--live", 0.1, "--status", 3, role="server", within_s=20)])
    assert launch.wait() == 1
    assert log.read_text().startswith("an old story\n")
    assert "an old story" not in launch.said("failed")[0]["text"]


def learner_of(launch, *flags, **more):
    hub = launch.service("hub", *flags, role="hub", http=launch.free_port(), within_s=20, **more)
    hub.again = ["--until", str(launch.folder / "enough")]
    return hub


def test_a_killed_learner_starts_again_with_other_words_and_ends_the_run_in_order(launch):
    env = launch.service("env")
    launch.start([learner_of(launch, restart=Restart(first_delay=0.05))], [env]).until_up()
    (pid,) = (pid for name, what, pid in launch.notes if (name, what) == ("hub", "start"))
    os.kill(pid, signal.SIGKILL)
    launch.until(lambda: len(launch.said("up", "hub")) == 2)
    (ended,) = launch.said("ended", "hub")
    assert (ended["status"], ended["delay_s"]) == (137, 0.05)
    assert f"starting again in 0.05 s with --until {launch.folder / 'enough'}" in ended["text"]
    assert launch.noted("start").count("env") == 1
    (launch.folder / "enough").touch()
    assert launch.wait() == 0
    assert [each["service"] for each in launch.said("done")] == ["hub"]


@pytest.mark.parametrize(
    ("flags", "rule", "signum"),
    [
        (("--live", 2, "--status", 5), Restart(), None),  # by itself, with an error
        (("--on-term", 143), Restart(), signal.SIGTERM),  # asked to stop
        ((), Restart(when="never"), signal.SIGKILL),
        ((), None, signal.SIGKILL),  # a gateway
    ],
)
def test_a_learner_that_was_not_killed_or_has_no_rule_ends_the_run(launch, flags, rule, signum):
    launch.start([learner_of(launch, *flags, restart=rule)], [launch.service("env")]).until_up()
    if signum is not None:
        (pid,) = (pid for name, what, pid in launch.notes if (name, what) == ("hub", "start"))
        os.kill(pid, signum)
    assert launch.wait() == 1
    assert "hub ended with status" in launch.said("failed")[0]["text"]
    assert launch.noted("start").count("hub") == 1


@pytest.mark.parametrize(("status", "starts"), [(5, 2), (143, 1)])
def test_a_hub_with_restart_always_comes_again_after_an_error_of_its_own(launch, status, starts):
    """A trainer whose hub is a process of Ray's ends with an error if that is killed."""
    rule = Restart(first_delay=0.05, when="always")
    hub = learner_of(launch, "--live", 1, "--status", status, restart=rule)
    hub.again = ["--live", "60", "--status", "0", *hub.again]
    launch.start([hub], [launch.service("env")]).until_up()
    if starts == 2:
        launch.until(lambda: len(launch.said("up", "hub")) == 2)
        (launch.folder / "enough").touch()
    assert launch.wait() == (0 if starts == 2 else 1)
    assert launch.noted("start").count("hub") == starts


def test_a_learner_that_is_killed_before_it_is_up_ends_the_run(launch):
    hub = learner_of(launch, "--answer-after", 30, restart=Restart())
    launch.start([hub])
    launch.until(lambda: launch.noted("start"))
    os.kill(launch.notes[0][2], signal.SIGKILL)
    assert launch.wait() == 1
    assert launch.noted("start") == ["hub"]


def test_a_restarted_learner_has_its_deadline_too(launch):
    hub = learner_of(launch, restart=Restart(first_delay=0.05))
    hub.check.within_s = 4
    hub.again = ["--answer-after", "60"]
    launch.start([hub], [launch.service("env")]).until_up()
    os.kill(launch.notes[0][2], signal.SIGKILL)
    assert launch.wait() == 1
    assert "hub is not up after 4 s" in launch.said("failed")[0]["text"]


def test_an_environment_is_restarted_with_growing_delays_until_patience_ends(launch):
    rule = Restart(first_delay=0.05, max_delay=0.15, max_restarts=4, window=600)
    hub, env = (
        launch.service("hub", role="hub"),
        launch.service("env", "--live", 0.3, "--status", 1, restart=rule),
    )
    launch.start([hub], [env])
    assert launch.wait() == 1
    assert [each["delay_s"] for each in launch.said("ended", "env")] == [0.05, 0.1, 0.15, 0.15]
    assert launch.noted("start") == ["hub", "env", "env", "env", "env", "env"]
    (failed,) = launch.said("failed")
    assert "env ended more than 4 times within 600 s" in failed["text"]
    assert str(launch.run_dir / "logs" / "env.log") in failed["text"]
    log = (launch.run_dir / "logs" / "env.log").read_text()
    assert log.count("env says hello") == 5
    assert "start 5 of env" in log
    assert launch.noted("SIGTERM") == ["hub"]
    launch.until_nothing_lives()


@pytest.mark.parametrize(("status", "live", "settle_s"), [(2, 0.6, 0.1), (1, 0.0, 20)])
def test_an_environment_called_wrongly_or_dead_at_once_is_not_restarted(launch, status, live, settle_s):
    env = launch.service("env", "--live", live, "--status", status, within_s=settle_s)
    launch.start([launch.service("hub", role="hub")], [env])
    assert launch.wait() == 1
    assert launch.noted("start") == ["hub", "env"]
    assert f"env ended at its start with status {status}" in launch.said("failed")[0]["text"]


def test_an_environment_that_has_finished_stays_so_and_the_run_goes_on(launch):
    envs = [
        launch.service("env", "--live", 0.3),
        launch.service("other", "--live", 0.3, restart=Restart(when="always", first_delay=0.05)),
    ]
    launch.start([launch.service("hub", "--until", launch.folder / "enough", role="hub")], envs)
    launch.until(lambda: launch.noted("start").count("other") == 3)
    assert launch.noted("start").count("env") == 1
    (launch.folder / "enough").touch()
    assert launch.wait() == 0


def test_restarts_leave_no_zombie_and_no_stray(launch):
    rule = Restart(first_delay=0.01, max_delay=0.01, max_restarts=100)
    env = launch.service("env", "--live", 0.2, "--status", 1, "--stray", restart=rule)
    launch.start([launch.service("hub", role="hub")], [env])
    launch.until(lambda: launch.noted("stray").count("env") >= 4)
    earlier = [pid for name, what, pid in launch.notes if what == "stray"][:3]
    launch.until(lambda: not [pid for pid in earlier if os.path.exists(f"/proc/{pid}")])
    supervisor = launch.supervisor()
    wait_until(lambda: not launch.zombies(supervisor), 10)
    assert not launch.zombies(launch.pid)
    launch.send(signal.SIGTERM)
    assert launch.wait() == 143
    launch.until_nothing_lives()


@pytest.mark.parametrize("role", ["server", "hub"])
def test_the_death_of_server_or_hub_stops_everything(launch, role):
    dying = ("--until", launch.folder / "enough", "--status", 4)
    server, hub = (
        launch.service(each, *(dying if each == role else ()), role=each) for each in ("server", "hub")
    )
    launch.start([server], [hub], [launch.service("env")]).until_up()
    (launch.folder / "enough").touch()
    assert launch.wait() == 1
    assert f"{role} ended with status 4" in launch.said("failed")[0]["text"]
    assert set(launch.noted("SIGTERM")) == {"server", "hub", "env"} - {role}
    launch.until_nothing_lives()


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_stops_orderly_environments_first(launch, signum, status):
    launch.start(
        [launch.service("server", role="server")],
        [launch.service("hub", role="hub")],
        [launch.service("env")],
    ).until_up()
    launch.send(signum)
    assert launch.wait() == status
    assert launch.noted("SIGTERM") == ["env", "hub", "server"]
    assert not launch.said("kill")
    launch.until_nothing_lives()


def test_a_service_that_outstays_its_grace_is_killed(launch):
    launch.start(
        [launch.service("hub", role="hub")], [launch.service("env", "--stubborn", grace_s=0.4)]
    ).until_up()
    launch.send(signal.SIGTERM)
    assert launch.wait() == 143
    assert [each["service"] for each in launch.said("kill")] == ["env"]
    assert launch.noted("SIGTERM") == ["env", "hub"]
    launch.until_nothing_lives()


def test_the_second_signal_ends_all_at_once(launch):
    stubborn = [launch.service(name, "--stubborn", "--stray", grace_s=3600) for name in ("one", "two")]
    launch.start(
        [launch.service("hub", "--stubborn", "--stray", role="hub", grace_s=3600)], stubborn
    ).until_up()
    launch.send(signal.SIGINT)
    launch.until(lambda: set(launch.noted("SIGTERM")) >= {"one", "two"})
    launch.until(lambda: launch.send(signal.SIGINT) or launch.said("kill"))
    assert launch.wait() == 130
    assert sorted(each["service"] for each in launch.said("kill")) == ["hub", "one", "two"]
    launch.until_nothing_lives()


def test_one_signal_to_everybody_is_one_signal(launch):
    """A service manager signals all processes at once."""
    slow = launch.service("hub", "--stubborn", "--until", launch.folder / "saved", role="hub", grace_s=60)
    launch.start([slow]).until_up()
    for pid in (launch.supervisor(), launch.pid):
        os.kill(pid, signal.SIGTERM)
    launch.until(lambda: launch.noted("SIGTERM"))
    (launch.folder / "saved").touch()
    assert launch.wait() == 143
    assert not launch.said("kill")


def test_hangups_are_ignored_under_nohup(launch):
    launch.start([launch.service("hub", role="hub")], before=["nohup"]).until_up()
    launch.send(signal.SIGHUP)
    launch.send(signal.SIGTERM)
    assert launch.wait() == 143
    assert [each["signal"] for each in launch.said("signal")] == ["SIGTERM"]


def test_a_reader_that_has_gone_away_ends_nothing(launch):
    reading, writing = os.pipe()
    launch.start([launch.service("hub", "--until", launch.folder / "enough", role="hub")], stdout=writing)
    os.close(writing)
    os.close(reading)
    launch.until_up()
    (launch.folder / "enough").touch()
    assert launch.wait() == 0


def test_a_reader_that_does_not_read_ends_nothing(launch):
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writing, b"." * select.PIPE_BUF):
            pass
    os.set_blocking(writing, True)
    launch.start([launch.service("hub", "--live", 0.5, role="hub")], stdout=writing)
    assert launch.wait() == 0
    assert launch.said("end")
    os.close(writing)
    os.close(reading)


def test_a_script_that_wraps_a_program_does_not_keep_the_signal_from_it(launch):
    service = launch.service("hub", role="hub")
    service.command = ["sh", "-c", f"{shlex.join(service.command)}; exit $?"]
    launch.start([service]).until_up()
    launch.send(signal.SIGTERM)
    assert launch.wait() == 143
    assert launch.noted("SIGTERM") == ["hub"]


def test_a_wrapped_program_has_its_grace_and_no_more(launch):
    """The shell is gone at once; the program that it has started takes half a second, another never ends."""
    slow = "trap 'sleep 0.5; echo slow has ended; exit' TERM; echo slow waits; while :; do sleep 0.05; done"
    never = "trap '' TERM; echo never waits; while :; do sleep 0.05; done"
    shells = [launch.service("hub", role="hub"), launch.service("server", role="server")]
    for service, script in zip(shells, (slow, never), strict=True):
        service.command, service.stop_grace_s = ["sh", "-c", f"sh -c {shlex.quote(script)}; exit $?"], 2.0
    launch.start(shells)
    launch.until(
        lambda: all(
            f"{word} waits" in log_of(launch, name) for word, name in (("slow", "hub"), ("never", "server"))
        )
    )
    launch.send(signal.SIGTERM)
    assert launch.wait() == 143
    assert "slow has ended" in log_of(launch, "hub")


def log_of(launch, name):
    log = launch.run_dir / "logs" / f"{name}.log"
    return log.read_text() if log.exists() else ""


def test_a_port_in_other_hands_is_named_before_anything_starts(launch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        launch.start([launch.service("server", role="server", http=port, within_s=5)])
        assert launch.wait() == 1
    assert f"port {port}, which is for server, is in use" in launch.said("failed")[0]["text"]
    assert not launch.notes


def test_a_bridge_in_other_hands_is_named_before_anything_starts(launch, bridge, make_consumer):
    make_consumer()
    path = launch.folder / "wanted.json"
    Plan(bridge=bridge, run_dir=str(launch.run_dir), stages=[[launch.service("hub", role="hub")]]).save(path)
    launch.command(sys.executable, launch.script, str(path), "json")
    assert launch.wait() == 1
    assert f"bridge {bridge} has a living consumer, pid {os.getpid()}" in launch.said("failed")[0]["text"]
    assert not launch.notes


def test_one_launch_per_run_directory(launch):
    launch.start([launch.service("hub", role="hub")]).until_up()
    path = launch.folder / "wanted.json"
    second = subprocess.run(
        [sys.executable, launch.script, path, "json"], capture_output=True, text=True, timeout=60
    )
    assert second.returncode == 1
    assert f"is in use by a launch, pid {launch.pid}" in second.stderr
    launch.send(signal.SIGTERM)
    assert launch.wait() == 143
    assert launch.noted("start") == ["hub"]


def test_a_waiting_supervisor_costs_nothing(launch):
    launch.start([launch.service("hub", role="hub")]).until_up()
    pid = launch.supervisor()

    def cpu_ticks():
        with open(f"/proc/{pid}/stat") as file:
            return sum(map(int, file.read().rpartition(")")[2].split()[11:13]))

    before = cpu_ticks()
    time.sleep(1.0)  # the cost of the measurement itself: an idle second
    assert cpu_ticks() - before <= 1
    launch.send(signal.SIGTERM)
    assert launch.wait() == 143


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_descriptors_that_come_closed(launch, closed):
    """As from some cron jobs: output to them is discarded, and does not go into the lock or a log."""
    hub = launch.service("hub", role="hub")
    launch.start([hub], form="text", before=("sh", "-c", f'exec "$@" {closed}', "sh")).until_up()
    assert (launch.run_dir / "launch.lock").read_text() == f"{launch.pid}\n"
    launch.until(lambda: "hub says hello" in (launch.run_dir / "logs" / "hub.log").read_text())
    launch.send(signal.SIGTERM)
    assert launch.wait() == 143
    launch.until_nothing_lives()


def test_a_log_folder_that_is_gone_ends_the_launch_in_one_line(launch):
    hub, env = launch.service("hub", role="hub"), launch.service("env", "--live", 0.5, "--status", 1)
    env.restart = Restart(first_delay=1.0)
    launch.start([hub], [env]).until_up()
    (launch.run_dir / "logs").rename(launch.run_dir / "elsewhere")
    assert launch.wait() == 1
    assert "No such file or directory" in launch.said("failed")[0]["text"]
    assert "Traceback" not in launch.errors
    launch.until_nothing_lives()


def test_a_run_directory_that_cannot_be(launch):
    launch.run_dir.write_text("a file")
    launch.start([launch.service("hub", role="hub")])
    assert launch.wait() == 1
    assert "LaunchFailed: [" in launch.errors
    assert "set a run_dir that this user can write to" in launch.errors


@pytest.mark.parametrize("host", ["a..b", "[::1]"])
def test_a_host_that_is_none_is_not_up_and_that_is_all(launch, host):
    server = launch.service("server", role="server", http=launch.free_port(), within_s=0.3)
    server.check.url = f"http://{host}:{launch.free_port()}/health"
    launch.start([server])
    assert launch.wait() == 1
    assert "server is not up after 0.3 s" in launch.said("failed")[0]["text"]
    launch.until_nothing_lives()
