"""Every contender moves the groups it is given: a round checks the sum of every byte that was read."""

import pytest

import shmbridge
from shmbridge.bench import baselines, groups
from shmbridge.bench.contract import Plan
from shmbridge.bench.groups import TINY, Shape
from shmbridge.bench.session import Session, limit_of

SHAPE = Shape(length=16)
LANE = 1 << 20


def plan(contender: str, **more) -> Plan:
    return Plan(contender, SHAPE, lane_bytes=LANE, **more)


@pytest.mark.parametrize("contender", baselines.CONTENDERS)
def test_groups_come_through_whole(contender):
    if how := baselines.missing(contender):
        pytest.skip(how)
    with Session(plan(contender)) as session:
        first, again = session.round(3), session.round(5)
    assert (first.count, again.count) == (3, 5)
    assert first.seconds > 0


@pytest.mark.parametrize("form", groups.FORMS)
def test_the_ring_takes_every_form(form):
    if form == "tensors":
        pytest.importorskip("torch")
    with Session(plan("ring", form=form)) as session:
        assert session.round(6).count == 6


def test_several_producers_share_a_round():
    with Session(plan("ring", producers=3)) as session:
        assert session.round(7).count == 9, "the same number for each"


def test_a_contender_for_one_producer_refuses_two():
    with pytest.raises(ValueError, match="one producer"):
        Session(plan("numpy_slots", producers=2))


@pytest.mark.parametrize("checksum", ["crc32", "xxh3"])
def test_a_round_checks_a_checksum_over_the_bytes(checksum):
    if checksum == "xxh3":
        pytest.importorskip("xxhash")
    with Session(plan("ring", checksum=checksum)) as session:
        session.round(4)


def test_a_full_lane_is_drained_by_poll():
    with Session(Plan("ring", TINY, lane_bytes=LANE, take="poll")) as session:
        assert session.round(20, filled_first=True).count == 20


def test_a_wrong_byte_is_noticed():
    with Session(plan("limit")) as session:
        session._sums[0] += 1
        with pytest.raises(AssertionError, match="not what was written"):
            session.round(1)


def test_a_producer_that_dies_is_an_error(monkeypatch):
    with Session(plan("ring")) as session:
        session._writers[0]._child.kill()
        with pytest.raises((RuntimeError, BrokenPipeError)):
            session._writers[0].end()


def test_a_session_leaves_no_bridge_behind():
    with Session(plan("ring")) as session:
        bridge = session._reader.address["bridge"]
        session.round(2)
    assert bridge not in [info.name for info in shmbridge.list_bridges()]


def test_the_limit_of_a_plan_has_one_producer():
    made = plan("ring", form="lists", producers=2, take="poll")
    assert limit_of(made) == plan("limit", form="lists")


def test_the_same_seed_is_the_same_group_in_every_form():
    flat = groups.make(SHAPE, "arrays")
    rows = groups.make(SHAPE, "row_arrays")
    lists = groups.make(SHAPE, "lists")
    assert flat["tokens"][0].tolist() == [token for row in lists["tokens"] for token in row]
    assert flat["advantages"][0].tolist() == [value for row in rows["advantages"] for value in row.tolist()]
    assert flat["scores"] == rows["scores"] == lists["scores"]
    assert sum(column.nbytes for column in groups.flat_columns(flat)) == SHAPE.bytes
    assert groups.make(SHAPE, "arrays", seed=1)["tokens"][0].tolist() != flat["tokens"][0].tolist()
