"""The compiled ring beside the model: both take every step, and all visible state must agree. Where the ring
may choose, the model checks its choice.
"""

from compiled_ring import CompiledRing, Seen, Words

from shmbridge.testing.model import RingModel


class AgainstModel:
    """Has the methods of the ring. Raises AssertionError at the first step after which the two differ."""

    def __init__(self, ring: CompiledRing) -> None:
        self.ring = ring
        self.models = [RingModel(ring.slots, ring.data_bytes) for _ in range(ring.lane_count)]

    def claim(self, lane: int, size: int) -> int | None:
        must = self.models[lane].place_for(size) is not None
        at = self.ring.claim(lane, size)
        room = "room" if must else "no room"
        assert (at is not None) == must, (
            f"a claim of {size} bytes in lane {lane} gave {at}, in the model there is {room}"
        )
        if at is not None:
            self.models[lane].claim(at, size)
        return at

    def commit(self, lane: int, payload: bytes) -> int:
        sequence, expected = self.ring.commit(lane, payload), self.models[lane].commit(payload)
        assert sequence == expected, f"lane {lane} committed as {sequence}, the model as {expected}"
        self._check()
        return sequence

    def abort(self, lane: int) -> None:
        self.ring.abort(lane)
        self.models[lane].abort()
        self._check()

    def producer_dies(self, lane: int) -> None:
        self.ring.producer_dies(lane)
        self.models[lane].producer_dies()
        self._check()

    def hub_starts(self) -> None:
        self.ring.hub_starts()
        for model in self.models:
            model.hub_starts()
        self._check()

    def hub_dies(self) -> None:
        self.ring.hub_dies()
        for model in self.models:
            model.hub_dies()
        self._check()

    def take(self) -> Seen | None:
        seen = self.ring.take()
        if seen is not None:
            taken = self.models[seen.lane].take()
            assert taken is not None, (
                f"lane {seen.lane} gave {seen.sequence}, in the model it has nothing to give"
            )
            expected = Seen(seen.lane, taken.sequence, taken.payload, taken.redelivered)
            assert seen == expected, f"the ring gave {_short(seen)}, the model {_short(expected)}"
        for lane, model in enumerate(self.models):
            if not model.quarantined and self.ring.words(lane).quarantined:
                assert model.take() is None, f"lane {lane} is quarantined for nothing"
        assert seen is not None or not any(model.waiting for model in self.models), (
            "nothing was given, and a record waits"
        )
        self._check()
        return seen

    def read(self, lane: int, sequence: int) -> bytes:
        return self.ring.read(lane, sequence)

    def release(self, lane: int, sequence: int) -> None:
        self.ring.release(lane, sequence)
        self.models[lane].release(sequence)
        self._check()

    def abandon(self, lane: int, sequence: int) -> None:
        self.ring.abandon(lane, sequence)
        self.models[lane].abandon(sequence)
        self._check()

    def discard(self, lane: int, sequence: int) -> None:
        self.ring.discard(lane, sequence)
        self.models[lane].discard(sequence)
        self._check()

    def release_under_view(self, lane: int, sequence: int) -> None:
        self.ring.release_under_view(lane, sequence)
        self._check()

    def drop_view(self, lane: int, sequence: int) -> None:
        self.ring.drop_view(lane, sequence)
        self.models[lane].release(sequence)
        self._check()

    def words(self, lane: int) -> Words:
        return self.ring.words(lane)

    def damage(self, lane: int) -> None:
        self.ring.damage(lane)
        self.models[lane].damage()
        self._check()

    def close(self) -> None:
        self.ring.close()

    def _check(self) -> None:
        for lane, model in enumerate(self.models):
            expected = Words(
                model.tail,
                model.head,
                model.unreleased,
                model.discarded,
                model.quarantined,
                model.waiting,
                model.held,
            )
            words = self.ring.words(lane)
            assert words == expected, f"lane {lane} says {words}, the model {expected}"


def _short(seen: Seen) -> str:
    return f"{seen.lane}/{seen.sequence}{' redelivered' if seen.redelivered else ''} {seen.payload[:8].hex()}"
