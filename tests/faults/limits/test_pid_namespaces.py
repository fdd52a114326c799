"""Ends in different pid namespaces, as in two containers that share the mount: records flow, deaths are seen,
nothing alive is swept.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import shmbridge
from shmbridge.segments import lane_names

ELSEWHERE = ("unshare", "-p", "-f", "--kill-child", "--mount-proc")


@pytest.fixture
def elsewhere(namespaces, start):
    """Starts a role as process 1 of a pid namespace of its own."""
    if subprocess.run([*ELSEWHERE, "true"], capture_output=True).returncode != 0:
        pytest.skip("no pid namespace can be made here")
    return lambda role, *arguments: start(role, *arguments, before=ELSEWHERE)


def clean_elsewhere(bridge: str) -> str:
    """The output of `shmbridge clean --yes` in a namespace of its own."""
    code = f"import shmbridge; print(shmbridge.clean({bridge!r}, dry_run=False))"
    environment = {**os.environ, "PYTHONPATH": str(Path(shmbridge.__file__).parents[1])}
    return subprocess.run(
        [*ELSEWHERE, sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    ).stdout


def test_records_flow_and_the_death_is_seen_within_a_second(
    elsewhere, bridge, consumer, segments, until
) -> None:
    child = elsewhere("produce", 5, 3)
    assert child.step("put")["pid"] == 1
    for sequence in range(3):
        with consumer.get(5) as record:
            assert record["tokens"].values.tolist() == [5, sequence]
            del record
    assert consumer.stats()["lanes_live"] == 1
    child.process.kill()  # unshare; its child 1 goes with it
    until(lambda: consumer.stats()["lanes_live"] == 0, 1.0)
    until(lambda: not lane_names(bridge), 1.0)
    consumer.close()
    assert segments() == []


def test_nothing_alive_is_swept_from_either_side(elsewhere, bridge, consumer, make_producer) -> None:
    here = make_producer(producer_id="here")
    child = elsewhere("produce", 5)
    child.step("put")
    names = lane_names(bridge)
    assert len(names) == 2
    report = shmbridge.clean(bridge, dry_run=False)
    assert (report.removed, set(names) <= set(report.kept)) == ([], True)
    assert "removed=[]" in clean_elsewhere(bridge)
    assert lane_names(bridge) == names
    with pytest.raises(shmbridge.ConsumerTaken):
        shmbridge.Consumer(bridge)
    here.put({"tokens": [[1]]})
    child.tell(9)
    child.step("put")
    found = sorted(record["tokens"].values.tolist() for record in (consumer.get(5) for _ in range(3)))
    assert found == [[1], [5, 0], [5, 9]]


def test_a_dead_one_is_cleaned_from_another_namespace(elsewhere, bridge, until) -> None:
    """Its records are undelivered: they are removed only on request, and the report says how many."""
    child = elsewhere("produce", 5, 3)
    child.step("put")
    child.process.kill()
    child.process.wait()
    until(
        lambda: (
            not [
                each
                for each in shmbridge.list_bridges()
                if each.name == bridge and any(lane.alive for lane in each.lanes)
            ]
        ),
        2.0,
    )
    (name,) = lane_names(bridge)
    assert f"undelivered={{'{name}': 3}}" in clean_elsewhere(bridge)
    assert lane_names(bridge) == []


def test_a_consumer_elsewhere_takes_over(elsewhere, bridge, make_producer, until) -> None:
    """The hub lock shows who lives; a pid would be 1 in both namespaces."""
    make_producer(producer_id="here").put({"tokens": [[3]]})
    child = elsewhere("consume_with_few_descriptors", 200)
    assert child.step("got")["value"] == 3
    with pytest.raises(shmbridge.ConsumerTaken, match="pid 1"):
        shmbridge.Consumer(bridge)
    child.process.kill()

    def free() -> bool:
        try:
            shmbridge.Consumer(bridge).close()
        except shmbridge.ConsumerTaken:
            return False
        return True

    until(free, 5.0)
