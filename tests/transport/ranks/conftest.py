"""Groups for learner ranks to read."""

from collections.abc import Callable

import pytest

import shmbridge


@pytest.fixture
def put_groups() -> Callable[..., None]:
    """Puts groups of two rows whose tokens are the group's number; `lengths` gives the tokens of a row."""

    def put(
        producer: shmbridge.Producer,
        numbers: range,
        lengths: Callable[[int], int] = lambda number: 5,
        **options: object,
    ) -> None:
        for number in numbers:
            producer.put({"tokens": [[number] * lengths(number)] * 2}, group_id=number, **options)

    return put
