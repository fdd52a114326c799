"""The model as a ring of its own: its lanes, memory that is really overwritten, and the choices that the
rules leave open.

Extents are placed first-fit, lanes are served in turn. Driven by the conformance suite to show that the rules
have the properties asked of every ring.
"""

from ring_under_test import RingUnderTest, Seen, Words

from shmbridge.testing.model import RingModel, lines

_ABORTED = 0xEE


class ModelRing(RingUnderTest):
    """Several RingModels with one hub, and a data area for each."""

    def __init__(self, lane_count: int, slots: int, data_bytes: int) -> None:
        super().__init__(lane_count, slots, data_bytes)
        self.models = [RingModel(slots, data_bytes) for _ in range(lane_count)]
        self._memory = [bytearray(data_bytes) for _ in range(lane_count)]
        self._claims: dict[int, tuple[int, int]] = {}
        self._extents: dict[tuple[int, int], tuple[int, int]] = {}
        self._turn = 0

    def claim(self, lane: int, size: int) -> int | None:
        at = self.models[lane].place_for(size)
        if at is not None:
            self.models[lane].claim(at, size)
            self._claims[lane] = (at, lines(size))
        return at

    def _write(self, lane: int, payload: bytes) -> tuple[int, int]:
        at, size = self._claims.pop(lane)
        self._memory[lane][at : at + size] = payload
        return at, size

    def commit(self, lane: int, payload: bytes) -> int:
        extent = self._write(lane, payload)
        sequence = self.models[lane].commit(payload)
        self._extents[lane, sequence] = extent
        return sequence

    def abort(self, lane: int) -> None:
        self._write(lane, bytes([_ABORTED]) * self._claims[lane][1])
        self.models[lane].abort()

    def producer_dies(self, lane: int) -> None:
        self.models[lane].producer_dies()

    def hub_starts(self) -> None:
        for model in self.models:
            model.hub_starts()

    def hub_dies(self) -> None:
        for model in self.models:
            model.hub_dies()

    def take(self) -> Seen | None:
        for offset in range(self.lane_count):
            lane = (self._turn + offset) % self.lane_count
            taken = self.models[lane].take()
            if taken is not None:
                self._turn = (lane + 1) % self.lane_count
                return Seen(lane, taken.sequence, self.read(lane, taken.sequence), taken.redelivered)
        return None

    def read(self, lane: int, sequence: int) -> bytes:
        at, size = self._extents[lane, sequence]
        return bytes(self._memory[lane][at : at + size])

    def release(self, lane: int, sequence: int) -> None:
        self.models[lane].release(sequence)

    def abandon(self, lane: int, sequence: int) -> None:
        self.models[lane].abandon(sequence)

    def discard(self, lane: int, sequence: int) -> None:
        self.models[lane].discard(sequence)

    def release_under_view(self, lane: int, sequence: int) -> None:
        """The rules know one end of a lease, and that is when the view goes."""

    def drop_view(self, lane: int, sequence: int) -> None:
        self.models[lane].release(sequence)

    def words(self, lane: int) -> Words:
        return words_of(self.models[lane])

    def damage(self, lane: int) -> None:
        self.models[lane].damage()

    def close(self) -> None:
        self.models.clear()


def words_of(model: RingModel) -> Words:
    """What a lane must say by the rules."""
    return Words(
        model.tail,
        model.head,
        model.unreleased,
        model.discarded,
        model.quarantined,
        model.waiting,
        model.held,
    )
