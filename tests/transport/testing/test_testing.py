"""The package's tools for users' tests: importing them costs nothing, and the fixtures name what a test
leaves behind.
"""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shmbridge
from shmbridge.testing import RingModel, faults, wait_until
from shmbridge.testing.faults import Fault, fault_build
from shmbridge.testing.fixtures import holders, segments_of

ROOT = str(Path(shmbridge.__file__).parents[1])

PLUGIN = 'pytest_plugins = ["shmbridge.testing.fixtures"]\n'
LEAVES_A_PROCESS = """
import subprocess, sys
CODE = '''
import os, sys, time, shmbridge
producer = shmbridge.Producer(sys.argv[1], lane_bytes="64K", producer_id="forgotten")
print(os.getpid(), flush=True)
time.sleep(60)
'''
left = []

def test_it(bridge):
    process = subprocess.Popen([sys.executable, "-c", CODE, bridge], stdout=subprocess.PIPE, text=True)
    left.append(process)
    print("left", process.stdout.readline().strip(), bridge)

def test_put_it_right():
    left[0].kill()
    left[0].wait()
"""


def pytest_in(folder: Path, tests: str, *options: str, plugin: str = PLUGIN) -> tuple[dict[str, int], str]:
    """Runs a user's tests: outcomes and output."""
    (folder / "conftest.py").write_text(plugin)
    (folder / "test_user.py").write_text(tests)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(folder),
            *options,
            "test_user.py",
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": ROOT, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    outcomes = {
        word: int(count)
        for count, word in re.findall(r"(\d+) (passed|failed|errors?)\b", done.stdout.splitlines()[-1])
    }
    return outcomes, done.stdout + done.stderr


def test_importing_it_imports_no_test_tools():
    code = (
        "import sys, shmbridge.testing, shmbridge.testing.faults; print({'pytest', 'hypothesis'} & "
        "set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "set()\n"


def test_a_users_test_with_the_fixtures(tmp_path):
    outcomes, output = pytest_in(
        tmp_path,
        """
def test_round_trip(bridge, make_producer, make_consumer, segments):
    producer, consumer = make_producer(env_name="mine"), make_consumer()
    producer.put({"tokens": [[1, 2, 3]]})
    with consumer.get(timeout_s=5) as record:
        assert record["tokens"].values.tolist() == [1, 2, 3]
    assert len(segments()) == 3

def test_a_process_dies(bridge, child, make_consumer, until):
    process = child('''
import shmbridge, time
producer = shmbridge.Producer(bridge, lane_bytes="64K")
producer.put({"tokens": [[7]]})
print("ready", flush=True)
time.sleep(60)
''')
    consumer = make_consumer()
    process.kill()
    until(lambda: consumer.stats()["lanes_live"] == 0)
    consumer.get(timeout_s=5).release()
""",
    )
    assert outcomes == {"passed": 2}, output


def test_a_child_that_says_something_else_fails_the_test(tmp_path):
    outcomes, output = pytest_in(tmp_path, "def test_it(child):\n    child('print(\"no\")')\n")
    assert outcomes == {"failed": 1}, output
    assert "said 'no' and not 'ready'" in output


def test_a_process_that_is_left_is_named(tmp_path):
    """The test passes, its teardown fails: the error names the segments and the process."""
    outcomes, output = pytest_in(tmp_path, LEAVES_A_PROCESS, "-s")
    pid, name = re.search(r"left (\d+) (\S+)", output).groups()
    assert outcomes in ({"passed": 2, "error": 1},), output
    assert "still in use after the test" in output
    assert "its producer is alive" in output
    assert f"pid {pid} (" in output
    shmbridge.clean(name, dry_run=False)


def test_a_test_that_fails_is_asked_for_nothing_more(tmp_path):
    outcomes, output = pytest_in(
        tmp_path, LEAVES_A_PROCESS.replace("\ndef test_put", "    assert False\n\ndef test_put"), "-s"
    )
    name = re.search(r"left \d+ (\S+)", output)[1]
    assert outcomes == {"failed": 1, "passed": 1}, output
    shmbridge.clean(name, dry_run=False)


def test_the_fixtures_are_there_only_where_they_are_asked_for(tmp_path):
    outcomes, output = pytest_in(tmp_path, "def test_it(bridge):\n    pass\n", plugin="")
    assert outcomes == {"error": 1}, output
    assert "fixture 'bridge' not found" in output


def test_holders_are_processes_that_map_a_segment(bridge, child):
    process = child(
        'import shmbridge, time\np = shmbridge.Producer(bridge, lane_bytes="64K")\n'
        'print("ready", flush=True)\ntime.sleep(60)'
    )
    (line,) = holders(bridge)
    assert line.startswith(f"pid {process.pid} (")
    assert all(segment in line for segment in segments_of(bridge))
    process.kill()
    process.wait()
    assert holders(bridge) == []


def test_an_unknown_fail_point_is_an_error_at_once():
    with pytest.raises(ValueError, match=r"did you mean producer\.committed"):
        Fault("producer.commited")
    assert str(Fault("producer.committed", 3)) == "producer.committed:3:9"


def test_a_build_needs_a_source_tree(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no setup\.py"):
        fault_build(tmp_path, tmp_path / "into")


def test_a_build_that_fails_says_what_the_compiler_said(tmp_path):
    (tmp_path / "setup.py").write_text('raise SystemExit("no compiler here")')
    (tmp_path / "pyproject.toml").write_text("")
    with pytest.raises(RuntimeError, match="no compiler here"):
        fault_build(tmp_path, tmp_path / "into")
    with pytest.raises(RuntimeError):
        fault_build(tmp_path, tmp_path / "into")  # a failed build does not count as one


def test_wait_until_says_what_it_waited_for():
    with pytest.raises(AssertionError, match=r"not within 0\.01 s: never"):

        def never() -> bool:
            return False

        wait_until(never, 0.01)


@pytest.mark.parametrize(
    "forbidden", ["claim twice", "claim on a record", "commit nothing", "two hubs", "claim after death"]
)
def test_the_model_refuses_what_the_protocol_forbids(forbidden):
    lane = RingModel(slots=4, data_bytes=256)
    lane.claim(0, 64)
    lane.commit(b"x" * 64)
    lane.hub_starts()
    with pytest.raises(AssertionError):
        if forbidden == "claim twice":
            lane.claim(64, 64)
            lane.claim(128, 64)
        elif forbidden == "claim on a record":
            lane.claim(0, 64)
        elif forbidden == "commit nothing":
            lane.commit(b"")
        elif forbidden == "two hubs":
            lane.hub_starts()
        else:
            lane.producer_dies()
            lane.claim(64, 64)


def test_the_reference_names_what_there_is():
    """Every module and every constant of the page exists, and no group of labels is missing from it."""
    page = (Path(ROOT) / "docs/reference/testing.md").read_text()
    for module in set(re.findall(r"shmbridge\.testing(?:\.\w+)?(?=`)", page)):
        importlib.import_module(module)
    groups = {name for name, value in vars(faults).items() if name.isupper() and isinstance(value, tuple)}
    assert set(re.findall(r"`([A-Z][A-Z_]+)`", page)) - {"LABELS"} == groups
