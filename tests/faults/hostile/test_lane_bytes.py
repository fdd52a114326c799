"""A lane is scribbled over: the consumer refuses or quarantines that lane, or delivers records within it, and
everything else goes on.

Numbers beside their limits in every field that is read, then whatever Hypothesis finds; before the lane is
adopted, after, and while records are held. The child (victim.py) reports what happened; a crash of the child
names the plan.
"""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from .places import BEHIND, COLUMN, ENTRY, HEADER, SLOT

Survive = Callable[..., dict[str, Any]]
Change = tuple[str, str, int]

MOMENTS = ("before", "adopted", "held", "taken")
COLUMN_OF_KIND = {
    "tokens": 0,
    "score": 4,
    "reward_components": 14,
    "distill_token_ids": 16,
    "instance_id": 18,
    "group_overrides": 26,
}
RICH = 14  # entries of a rich record
LIMITS = [
    ("set", 0),
    ("set", 1),
    ("add", 1),
    ("add", -1),
    ("set", 2**31),
    ("set", 2**32 - 1),
    ("set", 2**63),
    ("set", 2**64 - 1),
]


def test_an_unchanged_lane_gives_every_record(survive: Survive) -> None:
    """The baseline of the other tests."""
    for how in ("poll", "batches"):
        report = survive(moment="before", how=how, changes=[])
        assert (report["typed"], report["quarantined"], report["refused"]) == (
            [] if how == "poll" else ["bad.put: BridgeDraining"],
            0,
            0,
        )
        assert report["bad"] == {"poll": 6, "batches": 9}[how]


@pytest.mark.parametrize("field", HEADER)
def test_header_fields(survive: Survive, field: str) -> None:
    for number, (how, value) in enumerate(LIMITS):
        survive(
            moment=MOMENTS[number % 2],
            how="poll",
            changes=[(f"header.{field}", how, value)],
            dead=number % 3 == 0,
        )


@pytest.mark.parametrize("column", COLUMN_OF_KIND.values(), ids=list(COLUMN_OF_KIND))
def test_column_table(survive: Survive, column: int) -> None:
    for field in COLUMN:
        for how, value in (("set", 0), ("add", 1), ("set", 77), ("set", 0xFFFE_FDFC_FBFA_F9F8)):
            survive(moment="before", how="poll", changes=[(f"column.{column}.{field}", how, value)])


def test_two_columns_of_one_name(survive: Survive) -> None:
    """Unchecked, the columns' numbers would mean one thing in C and another in Python."""
    name = int.from_bytes(b"tokens\0\0", "little")
    report = survive(moment="before", how="poll", changes=[("column.3.name", "set", name)])
    assert report["refused"] == 1, report


@pytest.mark.parametrize(
    "field", ["magic", "slot_count", "slots_at", "released_at", "data_at", "segment_bytes"]
)
def test_a_header_that_lies_when_its_lane_is_quarantined(survive: Survive, field: str) -> None:
    """The lost records are counted from the words that the lane had when it was adopted."""
    report = survive(
        moment="adopted", how="poll", changes=[(f"header.{field}", "set", 0), ("slot.0.columns", "set", 0)]
    )
    assert (report["bad"], report["quarantined"], report["discarded"]) == (0, 1, 5), report


@pytest.mark.parametrize("field", SLOT)
@pytest.mark.parametrize("how", ["poll", "batches"])
def test_slot_fields(survive: Survive, field: str, how: str) -> None:
    for number, (change, value) in enumerate(LIMITS if how == "poll" else [*LIMITS[:5:2], ("set", 2**30)]):
        survive(
            moment=MOMENTS[number % 3],
            how=how,
            changes=[(f"slot.{number % 4}.{field}", change, value)],
            groups=1 + number % 2,
        )


@pytest.mark.parametrize("entry", [0, 2, 4, 6, 7, 8, 11])
def test_directory_entries(survive: Survive, entry: int) -> None:
    """The entries are of every kind of column."""
    for number, field in enumerate(ENTRY):
        for how, value in (("set", 0), ("add", 1), ("set", 2**64 - 1)):
            survive(
                moment=MOMENTS[number % 2], how="poll", changes=[(f"entry.0.{entry}.{field}", how, value)]
            )


@pytest.mark.parametrize("what", BEHIND)
def test_lengths_texts_and_truth_values_that_entries_lead_to(survive: Survive, what: str) -> None:
    """Lengths that no longer add up, or that do but say something else; text that is no text; truth values
    that are neither.
    """
    for entry in (0, 2, 6, 7, 8, 10, 11):
        for changes in (
            [(0, "add", 1)],
            [(0, "add", -1), (1, "add", 1)],
            [(0, "set", 2**32 - 1)],
            [(0, "set", 2**31), (1, "set", 2**31)],
            [(0, "set", 255)],
        ):
            survive(
                moment="before",
                how="poll",
                changes=[(f"{what}.0.{entry}.{item}", how, value) for item, how, value in changes],
            )


@pytest.mark.parametrize("tail", [-1, -5, 1, 63, 64, 65, 2**32, 2**63])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_tail_that_jumps(survive: Survive, moment: str, tail: int) -> None:
    survive(
        moment=moment,
        how="poll",
        changes=[("header.tail", "add", tail)],
        resume="discard" if tail % 2 else "redeliver",
    )


VALUES = st.one_of(
    st.tuples(
        st.just("set"),
        st.sampled_from(
            [
                0,
                1,
                2,
                3,
                63,
                64,
                127,
                128,
                255,
                2**15,
                2**16 - 1,
                2**30,
                2**31 - 1,
                2**32 - 1,
                2**62,
                2**64 - 1,
            ]
        ),
    ),
    st.tuples(st.just("add"), st.sampled_from([-64, -8, -2, -1, 1, 2, 8, 64, 2**31])),
    st.tuples(st.just("set"), st.integers(0, 2**64 - 1)),
)
RECORDS, ENTRIES = st.integers(0, 4), st.integers(0, RICH - 1)
PLACES = st.one_of(
    st.sampled_from(sorted(HEADER)).map("header.{}".format),
    st.tuples(st.integers(0, 30), st.sampled_from(sorted(COLUMN))).map(
        lambda place: "column.{}.{}".format(*place)
    ),
    st.tuples(RECORDS, st.sampled_from(sorted(SLOT))).map(lambda place: "slot.{}.{}".format(*place)),
    st.tuples(RECORDS, ENTRIES, st.sampled_from(sorted(ENTRY))).map(
        lambda place: "entry.{}.{}.{}".format(*place)
    ),
    st.tuples(st.sampled_from(sorted(BEHIND)), RECORDS, ENTRIES, st.integers(0, 7)).map(
        lambda place: "{}.{}.{}.{}".format(*place)
    ),
    st.tuples(st.sampled_from(["ring", "released"]), st.integers(0, 8)).map(
        lambda place: "{}.{}".format(*place)
    ),
    st.tuples(st.just("group_id"), RECORDS, st.integers(0, 20)).map(lambda place: "{}.{}.{}".format(*place)),
    st.integers(0, 2**20).map("byte.{}".format),
)
CHANGES = st.lists(st.tuples(PLACES, VALUES).map(lambda both: (both[0], *both[1])), min_size=1, max_size=6)


@settings(
    derandomize=True,
    database=None,
    max_examples=150,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
)
@given(
    moment=st.sampled_from(MOMENTS),
    changes=CHANGES,
    dead=st.booleans(),
    resume=st.sampled_from(["redeliver", "discard"]),
    form=st.sampled_from(
        [{"how": "poll"}] * 3
        + [{"how": "batches"}, {"how": "batches", "groups": 2, "layout": "padded", "prefetch": 1}]
    ),
)
def test_lane_bytes_may_be_whatever_hypothesis_writes(
    survive: Survive, moment: str, changes: list[Change], dead: bool, resume: str, form: dict[str, Any]
) -> None:
    survive(moment=moment, changes=changes, dead=dead, resume=resume, **form)


def test_many_bytes_at_once(survive: Survive) -> None:
    """A run of garbage over one part after the other: header, columns, ring, slots, released words,
    extents.
    """
    for begin in (0, 0x200, 0x300, 4096, 20480, 24576, 32768, 36864):
        for filler in (0, 0xFF, 0x5A):
            survive(
                moment="adopted" if filler else "before",
                how="poll",
                changes=[(f"byte.{begin + at}", "set", filler) for at in range(256)],
            )


SHORT = """
import os, shmbridge
from shmbridge import cli
with shmbridge.Producer(bridge, lane_bytes="64K", producer_id="good") as good:
    with shmbridge.Producer(bridge, lane_bytes="64K") as bad:
        bad.put({"tokens": [[2]]})
        path = "/dev/shm" + bad.lane_name
    whole = open(path, "rb").read()
    sizes = (0, 1, 4095, 4096, 20479, 20480, 24576, 28672, 36863, 40960)
    for size in (*sizes, len(whole) - 4096, len(whole) - 1):
        with open(path, "wb") as file:
            file.write(whole[:size])
        assert cli.main(["inspect", bridge, "--seconds", "0"]) == 0 and shmbridge.clean(bridge) is not None
        good.put({"tokens": [[size]]})
        with shmbridge.Consumer(bridge) as consumer:
            (record,) = consumer.poll()
            assert record["tokens"].values.tolist() == [size]
            record.release()
print("survived")
"""


def test_a_lane_that_is_shorter_than_it_says(bridge) -> None:
    """The lane is cut before it is adopted.

    Cutting a lane while it is read would give its reader SIGBUS: no peer of shmbridge ever does that.
    """
    ended = subprocess.run(
        [sys.executable, "-c", f"bridge = {bridge!r}\n{SHORT}"], capture_output=True, text=True, timeout=60
    )
    assert ended.stdout.endswith("survived\n"), f"ended with {ended.returncode}: {ended.stderr[-600:]}"
