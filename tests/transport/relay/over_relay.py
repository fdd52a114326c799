"""A pytest plugin: producers that tests make are on another node, and a relay brings their records.

    pytest -p over_relay tests/transport/record ...

`make_producer` opens the bridge of the other node, `make_consumer` the bridge here; a thread asks the source
for records and gives them to the destination, through the bytes that Ray would carry. A call that puts, and
`poll`, wait here until everything committed there has come, as on one node it has at once.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import shmbridge
from shmbridge._ext import header
from shmbridge.relay.destination import Destination
from shmbridge.relay.source import Source
from shmbridge.segments import lane_names, open_mapping

NODE = "elsewhere"
_SETTLED_S = 0.1
# Tests that look at what a relay changes by design, by the words of docs/adr/0017-relay.md.
OF_ONE_NODE = {
    "a producer's own lane is empty once its records are committed here": """
        test_release_gives_the_memory_back test_a_view_outlives_release_and_holds_the_memory
        test_a_lease_ends_with_its_last_view_and_not_with_the_object test_reading_is_in_place_and_read_only
        test_columns_are_read_and_let_go_on_another_thread test_records_in_garbage_cycles_are_not_released
        test_a_forked_child_has_no_columns_and_ends_no_lease test_arrow_of_a_list_keeps_the_lease
        test_arrow_has_the_same_values_and_holds_the_lease test_the_arrays_stay_after_release
        test_a_polars_frame_holds_the_lease_until_it_is_dropped
        test_batches_gathered_ahead_and_not_handed_out_are_still_held""",
    "lanes here are larger, and a full one holds up the relay, not a call of the test": """
        test_a_full_lane_and_a_stuck_batch_name_the_count
        test_a_batch_that_can_never_fit_is_an_error_with_the_numbers
        test_atropos_also_says_when_the_lanes_are_full_of_what_makes_no_batch
        test_a_batch_that_can_never_be_filled_is_said_to_the_ranks""",
    "a record's own key is that of its lane here; the source's is meta.origin": """
        test_metadata test_the_text_of_a_record_says_who_and_how_much
        test_a_full_group_comes_back_exactly test_metadata_is_made_when_it_is_read""",
    "environments register at the hub of their node: numbers, weights and sizes stay there": """
        test_a_batch_is_fair_over_what_all_lanes_hold test_a_share_that_comes_ends_the_wait
        test_a_share_is_waited_for_without_an_error_and_then_counted
        test_stats_say_how_much_of_each_environment_is_queued
        test_atropos_forms_what_upstream_would_of_the_same_arrivals
        test_groups_that_atropos_never_batches_are_the_next_consumers
        test_atropos_tells_environments_upstreams_numbers
        test_a_dead_environments_allocation_does_not_stop_atropos""",
    "a hub here knows the relay's lanes, not the producers', and counts no drops of theirs": """
        test_a_lane_that_the_death_watch_just_adopts_is_not_overlooked
        test_get_without_a_record_says_who_is_there test_nothing_is_lost_or_counted_twice
        test_garbage_among_lanes_is_said_once_and_the_records_before_it_come
        test_garbage_found_while_a_backlog_is_discarded_is_counted_and_said_once""",
    "a call that puts returns here when the hub may have used its record already": """
        test_a_batch_that_grows_stale_while_it_waits_is_not_handed_out""",
    "a version, a pause and the end of a run are known there with the next ask": """
        test_policy_versions_only_rise test_tokens_that_say_nothing_leave_the_current_version
        test_a_later_run_is_not_ended_by_an_earlier_one""",
}


class Relay(threading.Thread):
    """A relay from one bridge to another, in a thread of this process."""

    def __init__(self, there: str, here: str) -> None:
        super().__init__(daemon=True)
        self.there, self.here = there, here
        self._over = threading.Event()
        self.opened = threading.Event()
        self.failed: BaseException | None = None
        self.start()
        assert self.opened.wait(10.0)

    def run(self) -> None:
        try:
            with (
                Source(self.there, NODE) as source,
                Destination(self.here, lane_bytes=4 << 20, wait_s=0.002) as destination,
            ):
                self.opened.set()
                while not self._over.is_set():
                    self._exchange(source, destination)
        except BaseException as failed:  # the test thread raises it
            self.failed = failed
            self.opened.set()

    def _exchange(self, source: Source, destination: Destination) -> None:
        from relaying import send

        requested_ns = time.monotonic_ns()
        destination.accept(NODE, send(source, destination.request(NODE)), requested_ns)
        destination.work()

    def stop(self) -> None:
        self._over.set()
        self.join(10.0)
        if self.failed is not None:
            raise self.failed

    def settle(self) -> None:
        """Returns once every record committed there is committed here, or nothing comes any more: the lane
        here is full.
        """
        held, until = _held(self.there), time.monotonic() + _SETTLED_S
        while held and self.failed is None and time.monotonic() < until:
            time.sleep(0.0005)
            if (now := _held(self.there)) != held:
                held, until = now, time.monotonic() + _SETTLED_S


def _held(bridge: str) -> int:
    """The committed and un-released records of a bridge, by its lanes' own words."""
    found = 0
    for name in lane_names(bridge):
        mapping = open_mapping(name, readonly=True)
        if mapping is not None and header.read_lane(mapping) is not None:
            words = header.lane_counters(mapping)
            found += words["tail"] - words["released"]
    return found


class Fixtures:
    """What takes the place of the fixtures of one node."""

    @pytest.fixture
    def relay(self, bridge: str) -> Iterator[Relay]:
        there = f"{bridge}-there"
        relay = Relay(there, bridge)
        try:
            yield relay
        finally:
            relay.stop()
            shmbridge.clean(there, dry_run=False)

    @pytest.fixture
    def make_producer(self, relay: Relay) -> Iterator[Callable[..., shmbridge.Producer]]:
        """As on one node, but there."""

        class Producer(shmbridge.Producer):
            def put(self, *args: Any, **options: Any) -> int | None:
                sequence = super().put(*args, **options)
                relay.settle()
                return sequence

            def put_many(self, *args: Any, **options: Any) -> list[int | None]:
                sequences = super().put_many(*args, **options)
                relay.settle()
                return sequences

        with contextlib.ExitStack() as made:

            def make(**options: Any) -> shmbridge.Producer:
                producer = Producer(relay.there, **{"lane_bytes": "64K", **options})
                made.callback(producer.close)
                return producer

            yield make

    @pytest.fixture
    def make_consumer(self, bridge: str, relay: Relay) -> Iterator[Callable[..., shmbridge.Consumer]]:
        """As on one node, but for `poll`."""

        class Consumer(shmbridge.Consumer):
            def poll(self, *args: Any, **options: Any) -> list[shmbridge.Record]:
                relay.settle()
                return super().poll(*args, **options)

        with contextlib.ExitStack() as made:

            def make(**options: Any) -> shmbridge.Consumer:
                consumer = Consumer(bridge, **options)
                made.callback(consumer.close)
                return consumer

            yield make


def pytest_collection(session: pytest.Session) -> None:
    """Registered last, they take precedence over those of conftest.py."""
    session.config.pluginmanager.register(Fixtures(), "over_relay_fixtures")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what `OF_ONE_NODE` names."""
    left_out = {name for names in OF_ONE_NODE.values() for name in names.split()}
    out = [item for item in items if getattr(item, "originalname", item.name) in left_out]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in out]
