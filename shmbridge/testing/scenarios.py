"""Short stories that every ring must live through, each a function of
`make_ring(lane_count, slots, data_bytes)`.

They name what the state machine finds at random: read them first, and run them first on a ring of your own.
Know RingUnderTest only.
"""

from collections.abc import Callable

from shmbridge.testing.ring_under_test import LINE, RingUnderTest, Seen

Scenario = Callable[[RingUnderTest], None]
# name -> (lane_count, slots, data_bytes), story
SCENARIOS: dict[str, tuple[tuple[int, int, int], Scenario]] = {}


def run_scenario(name: str, make_ring: Callable[[int, int, int], RingUnderTest]) -> None:
    """Makes a ring of the shape that the story needs, tells it, and closes the ring."""
    shape, story = SCENARIOS[name]
    ring = make_ring(*shape)
    try:
        story(ring)
    finally:
        ring.close()


def _scenario(lane_count: int, slots: int, data_lines: int) -> Callable[[Scenario], Scenario]:
    def register(story: Scenario) -> Scenario:
        SCENARIOS[story.__name__] = ((lane_count, slots, data_lines * LINE), story)
        return story

    return register


def _payload(lane: int, number: int, data_lines: int) -> bytes:
    return bytes([16 * lane + number % 16 + 1]) * (data_lines * LINE)


def _put(ring: RingUnderTest, lane: int, count: int = 1, data_lines: int = 1) -> None:
    for _ in range(count):
        assert ring.claim(lane, data_lines * LINE) is not None, "there is room"
        number = ring.words(lane).committed
        assert ring.commit(lane, _payload(lane, number, data_lines)) == number


def _take(ring: RingUnderTest, count: int) -> list[Seen]:
    seen = [each for each in (ring.take() for _ in range(count)) if each is not None]
    assert len(seen) == count, f"{len(seen)} records came, {count} were due"
    return seen


def _summary(seen: list[Seen], lane: int = 0) -> list[tuple[int, bool]]:
    return [(each.sequence, each.redelivered) for each in seen if each.lane == lane]


@_scenario(1, 8, 8)
def records_come_whole_and_in_order(ring: RingUnderTest) -> None:
    """Also those that were committed before any hub came."""
    _put(ring, 0, 3)
    ring.hub_starts()
    _put(ring, 0, 2)
    seen = _take(ring, 5)
    assert _summary(seen) == [(number, False) for number in range(5)]
    assert [each.payload for each in seen] == [_payload(0, number, 1) for number in range(5)]
    assert ring.take() is None


@_scenario(1, 2, 4)
def an_abort_leaves_no_trace(ring: RingUnderTest) -> None:
    """Neither a sequence, nor a slot, nor bytes."""
    for _ in range(5):
        assert ring.claim(0, 4 * LINE) is not None
        ring.abort(0)
    _put(ring, 0)
    ring.hub_starts()
    assert _summary(_take(ring, 1)) == [(0, False)]


@_scenario(1, 4, 4)
def a_full_lane_refuses_until_something_is_released(ring: RingUnderTest) -> None:
    """Out of order: one held record pins its own extent and nothing else."""
    ring.hub_starts()
    _put(ring, 0, 4)
    assert ring.claim(0, 1) is None
    _take(ring, 4)
    assert ring.claim(0, 1) is None, "taken is not released"
    ring.release(0, 2)
    _put(ring, 0)
    assert ring.claim(0, 1) is None
    for sequence in (0, 1):
        ring.release(0, sequence)
    assert ring.claim(0, 2 * LINE) is not None, "two neighbours make one gap"


@_scenario(1, 8, 6)
def a_held_record_is_never_overwritten(ring: RingUnderTest) -> None:
    """While its lane is used over and over around it."""
    ring.hub_starts()
    _put(ring, 0)
    (held,) = _take(ring, 1)
    for _ in range(40):
        _put(ring, 0, data_lines=2)
        (other,) = _take(ring, 1)
        assert ring.read(0, held.sequence) == held.payload
        ring.release(0, other.sequence)


@_scenario(1, 4, 4)
def a_view_outlives_the_release(ring: RingUnderTest) -> None:
    """The lease ends with the last of both."""
    ring.hub_starts()
    _put(ring, 0, 1, data_lines=4)
    (seen,) = _take(ring, 1)
    ring.release_under_view(0, 0)
    assert ring.claim(0, LINE) is None
    assert ring.read(0, 0) == seen.payload
    ring.drop_view(0, 0)
    assert ring.claim(0, LINE) is not None


@_scenario(2, 4, 4)
def lanes_do_not_disturb_each_other(ring: RingUnderTest) -> None:
    """One is full and held, the other goes on; which one is served first is nobody's business, but both
    are.
    """
    ring.hub_starts()
    _put(ring, 0, 4)
    _put(ring, 1, 2)
    seen = _take(ring, 6)
    assert _summary(seen, 0) == [(number, False) for number in range(4)]
    assert _summary(seen, 1) == [(0, False), (1, False)]
    assert ring.claim(0, 1) is None
    _put(ring, 1, 2)
    assert _summary(_take(ring, 2), 1) == [(2, False), (3, False)]


@_scenario(1, 8, 8)
def a_successor_gets_what_was_not_released_and_marks_what_was_handed_out(ring: RingUnderTest) -> None:
    """Committed while no hub was there, and committed before but never taken: both are new."""
    _put(ring, 0, 4)
    ring.hub_starts()
    _take(ring, 3)
    ring.release(0, 1)
    ring.hub_dies()
    _put(ring, 0)
    ring.hub_starts()
    assert _summary(_take(ring, 4)) == [(0, True), (2, True), (3, False), (4, False)]
    assert ring.take() is None


@_scenario(1, 4, 4)
def marks_only_grow_over_hubs_that_die(ring: RingUnderTest) -> None:
    """Each takes one more than the one before."""
    _put(ring, 0, 4)
    for taken in range(4):
        ring.hub_starts()
        assert _summary(_take(ring, taken)) == [(number, number < taken - 1) for number in range(taken)]
        ring.hub_dies()
    ring.hub_starts()
    assert _summary(_take(ring, 4)) == [(0, True), (1, True), (2, True), (3, False)]


@_scenario(1, 4, 4)
def a_dead_producer_leaves_what_it_committed(ring: RingUnderTest) -> None:
    """And nothing of what it was writing."""
    _put(ring, 0, 2)
    assert ring.claim(0, LINE) is not None
    ring.producer_dies(0)
    ring.hub_starts()
    assert _summary(_take(ring, 2)) == [(0, False), (1, False)]
    assert ring.take() is None
    assert ring.words(0).committed == 2


@_scenario(1, 4, 4)
def an_abandoned_record_is_for_the_next_hub(ring: RingUnderTest) -> None:
    """Not for this one, and its bytes stay."""
    _put(ring, 0, 2)
    ring.hub_starts()
    _take(ring, 2)
    ring.abandon(0, 0)
    ring.release(0, 1)
    assert ring.take() is None
    ring.hub_dies()
    ring.hub_starts()
    (again,) = _take(ring, 1)
    assert (again.sequence, again.redelivered, again.payload) == (0, True, _payload(0, 0, 1))


@_scenario(2, 4, 4)
def discards_are_counted_where_they_happen(ring: RingUnderTest) -> None:
    """Produced = released + held + discarded, also for the next hub."""
    _put(ring, 0, 3)
    _put(ring, 1, 1)
    ring.hub_starts()
    _take(ring, 4)
    ring.discard(0, 0)
    ring.discard(0, 2)
    ring.release(1, 0)
    for _ in range(2):
        one, other = ring.words(0), ring.words(1)
        assert (one.committed, one.discarded, one.unreleased) == (3, 2, 1)
        assert (other.committed, other.discarded, other.unreleased) == (1, 0, 0)
        ring.hub_dies()
        ring.hub_starts()


@_scenario(2, 4, 4)
def nonsense_quarantines_its_own_lane(ring: RingUnderTest) -> None:
    """What waited there is counted as lost; what is held stays whole; the neighbour and the next hub are not
    concerned.
    """
    _put(ring, 0, 2)
    ring.hub_starts()
    (held,) = _take(ring, 1)
    ring.damage(0)
    _put(ring, 0, 2)
    _put(ring, 1, 2)
    assert _summary(_take(ring, 2), 1) == [(0, False), (1, False)]
    assert ring.take() is None
    assert ring.read(0, held.sequence) == held.payload
    words = ring.words(0)
    assert (words.quarantined, words.discarded, words.waiting, words.held) == (True, 3, 0, 1)
    assert not ring.words(1).quarantined
    ring.hub_dies()
    ring.hub_starts()
    assert _summary(_take(ring, 2), 1) == [(0, True), (1, True)]
    assert ring.take() is None
    assert ring.words(0).discarded == 3
