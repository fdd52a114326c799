"""An unedited environment whose workers begin only when the consumer has room: groups under way are bounded,
also while they are generated.
"""

import time

import pytest

import shmbridge

pytestmark = pytest.mark.timeout(300)

pytest.importorskip("atroposlib")

GROUPS = 4
AHEAD = ("--env.max_batches_offpolicy", "40", "--env.collect_s", "0.02")
RUN = shmbridge.Run(batch_size=4 * GROUPS, max_token_len=4096, num_steps=1000)


def limited(make_consumer, steps: int) -> shmbridge.Consumer:
    consumer = make_consumer(run=RUN, policy="oldest", max_off_policy_steps=steps, groups_per_step=GROUPS)
    consumer.publish_policy_version(0)
    return consumer


def under_way(consumer: shmbridge.Consumer) -> float:
    stats = consumer.stats()
    return stats["groups_running"] + stats["queue_groups"]


def test_workers_begin_as_the_steps_make_room(start_env, make_consumer) -> None:
    """Some items send two groups under one ticket; that many groups may be over the limit."""
    consumer = limited(make_consumer, 1)
    env = start_env(*AHEAD, options=("--tickets",))
    env.until(lambda: consumer.stats()["queue_groups"] >= 2 * GROUPS)
    since = time.monotonic()
    env.until(lambda: time.monotonic() > since + 1.0)
    assert 2 * GROUPS <= under_way(consumer) <= 2 * GROUPS + 2
    lags = []
    for number, batch in enumerate(consumer.batches(groups=GROUPS, prefetch=0, timeout_s=60), 1):
        lags += [consumer.policy_version - meta.min_policy_version for meta in batch.meta]
        consumer.publish_policy_version(number)
        if number == 6:
            break
    assert max(lags) <= 1
    assert consumer.stats()["groups_begun_total"] >= 6 * GROUPS // 2


def test_workers_without_tickets_are_held_back_only_by_what_is_queued(start_env, make_consumer) -> None:
    consumer = limited(make_consumer, 1)
    env = start_env(*AHEAD)
    env.until(lambda: consumer.stats()["queue_groups"] > 6 * GROUPS)
    assert consumer.stats()["groups_begun_total"] == 0
