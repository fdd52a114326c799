"""What environments measured reaches the consumer once, bounded; what is no measurement is refused."""

import math

import pytest

from shmbridge.control.environments import MOST_KEPT
from shmbridge.control.messages import BAD_VALUE, LONGEST_NAME, MOST_METRICS, Ack, Evaluated
from shmbridge.control.server import ControlClient, RequestRefused


@pytest.fixture
def ask(bridge, consumer):
    with ControlClient(bridge, role="env", name="gsm8k") as client:
        yield client.request


def evaluation(number: int, producer_id: str = "a", **metrics: float) -> Evaluated:
    return Evaluated(producer_id, "gsm8k", number, metrics, policy_version=number, step=2 * number)


def test_each_is_taken_once_in_order_and_one_that_is_sent_again_is_noted_once(ask, consumer):
    assert consumer.take_evaluations() == []
    sent = [evaluation(1, correct=0.25), evaluation(1, "b", correct=0.5), evaluation(2, correct=0.75)]
    for each in sent:
        assert ask(each) == Ack()
    ask(sent[0])
    assert consumer.take_evaluations() == sent
    ask(sent[2])  # its answer was lost, and it was taken meanwhile
    assert consumer.take_evaluations() == []
    stats = consumer.stats()
    assert (stats["evaluations_total"], stats["evaluations_lost_total"]) == (3, 0)


def test_the_newest_are_kept_and_the_others_counted(ask, consumer):
    for number in range(MOST_KEPT + 3):
        ask(evaluation(number, correct=0.5))
    assert [each.number for each in consumer.take_evaluations()] == list(range(3, MOST_KEPT + 3))
    assert consumer.stats()["evaluations_lost_total"] == 3


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({f"m{number}": 0.0 for number in range(MOST_METRICS + 1)}, "257 metrics, at most 256 are kept"),
        ({"x" * (LONGEST_NAME + 1): 0.0}, "a name of 129 characters"),
        ({"correct": math.nan}, "'correct' is nan"),
        ({"correct": math.inf}, "'correct' is inf"),
    ],
    ids=["many", "long", "nan", "inf"],
)
def test_what_is_too_large_or_no_number_is_refused(ask, consumer, metrics, said):
    with pytest.raises(RequestRefused, match=said) as refused:
        ask(evaluation(1, **metrics))
    assert refused.value.reason == BAD_VALUE
    assert consumer.take_evaluations() == []
