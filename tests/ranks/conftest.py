"""A hub that serves ranks, ranks that are closed at the end, and groups to read."""

from collections.abc import Callable, Iterator

import pytest

import shmbridge


@pytest.fixture
def make_rank(bridge: str) -> Iterator[Callable[..., shmbridge.Rank]]:
    """Makes learner ranks of the bridge; closed at the end."""
    made: list[shmbridge.Rank] = []

    def make(rank: int = 0, world_size: int = 1) -> shmbridge.Rank:
        made.append(shmbridge.Rank(bridge, rank, world_size))
        return made[-1]

    yield make
    while made:
        made.pop().close()


@pytest.fixture
def put_groups() -> Callable[..., None]:
    """Puts groups of two rows whose tokens are the group's number; `lengths` gives the tokens of a row."""

    def put(producer: shmbridge.Producer, numbers: range, lengths: Callable[[int], int] = lambda number: 5, **options: object) -> None:
        for number in numbers:
            producer.put({"tokens": [[number] * lengths(number)] * 2}, group_id=number, **options)

    return put
