"""Looks and records with fixed numbers, and a source that gives them to the screens of these tests."""

import itertools

import numpy as np

from shmbridge._ext.record import Ragged, RecordMeta
from shmbridge.watch.snapshot import BridgeLook, ConsumerLook, LaneLook, State

NO_DROPS = {"full": 0, "cancelled": 0, "invalid": 0, "timeout": 0}
NO_DISCARDS = {"stale": 0, "partial": 0, "resume": 0, "corrupt": 0}


def lane(env_name, pid, *, records=100, held=3, **changes) -> LaneLook:
    """A healthy lane; `changes` are its other fields."""
    fields = {
        "name": f"lane-{pid}",
        "producer_id": f"{env_name}-{pid}-0c2d4e6f8a1b3c5d",
        "env_name": env_name,
        "pid": pid,
        "state": State.RUNNING,
        "read": True,
        "records": records,
        "tokens": records * 4096,
        "bytes": records * 80_000,
        "released": records - held,
        "held": held,
        "held_bytes": held * 80_000,
        "data_bytes": 64 << 20,
        "slot_count": 64,
        "segment_bytes": 65 << 20,
        "newest_age_s": 0.2,
        "oldest_age_s": 1.5,
        "newest_version": 40,
        "wait_s": 0.0,
        "blocked_s": None,
        "dropped": NO_DROPS,
        "discarded": NO_DISCARDS,
        "leases_dropped": 0,
        "quarantined": False,
    }
    return LaneLook(**fields | changes)


def consumer(state, handed_age_s, asking_s, paused=False, draining=False) -> ConsumerLook:
    return ConsumerLook(88, state, handed_age_s, asking_s, paused, draining, 0.0, 0.0, [0] * 30, 0.0)


def bridge_look(lanes, *, at_s=1000.0, **changes) -> BridgeLook:
    fields = {
        "consumer": consumer(State.RUNNING, 2.0, None, False, False),
        "policy_version": 41,
        "published_age_s": 14.0,
        "mount_free": 61 << 30,
        "mount_bytes": 64 << 30,
    }
    return BridgeLook("run1", at_s, lanes=lanes, **fields | changes)


def healthy() -> list[BridgeLook]:
    """Three environments, ten seconds apart."""
    names = [("code", 70), ("code", 72), ("gsm8k", 71), ("math", 73), ("math", 74)]
    discards = NO_DISCARDS | {"stale": 12}
    return [
        bridge_look(
            [
                lane(
                    name,
                    pid,
                    records=100 + more * (pid - 60),
                    wait_s=more * 0.1,
                    held=pid - 68,
                    discarded=discards,
                )
                for name, pid in names
            ],
            at_s=1000.0 + more,
        )
        for more in (0, 10)
    ]


def stopped() -> list[BridgeLook]:
    """gsm8k is stopped in the second look, and the learner waits for it."""
    before, now = healthy()
    lanes = [
        lane("gsm8k", 71, records=100, held=0, state=State.STOPPED, newest_age_s=41.0)
        if each.pid == 71
        else each
        for each in now.lanes
    ]
    waiting = consumer(State.RUNNING, 14.0, 12.0, False, False)
    return [
        before,
        bridge_look(lanes, at_s=1010.0, consumer=waiting),
        bridge_look(lanes, at_s=1022.0, consumer=waiting),
    ]


def hundred() -> list[BridgeLook]:
    """A hundred lanes of eight environments; one is stopped, one dead, one waits for a lane."""
    state = {
        17: {"state": State.STOPPED, "newest_age_s": 200.0},
        44: {"state": State.DEAD},
        99: {"read": False},
    }
    return [
        bridge_look(
            [
                lane(
                    f"env{number % 8}",
                    2000 + number,
                    records=1000 + more * (number % 9),
                    held=number % 60,
                    **state.get(number, {}),
                )
                for number in sorted(range(100), key=lambda number: number % 8)
            ],
            at_s=1000.0 + more,
        )
        for more in (0, 10)
    ]


class Copy:
    """A record as an observer returns it, of columns given as rows."""

    def __init__(self, rows, scores=(), **meta) -> None:
        self._columns = {
            name: Ragged(
                np.concatenate([np.asarray(row, dtype) for row in values]),
                np.array([len(row) for row in values]),
                None,
            )
            for name, (dtype, values) in rows.items()
        }
        if len(scores):
            self._columns["score"] = np.array(scores)
        self._rows = len(rows["tokens"][1])
        fields = {
            "producer_id": "gsm8k-71-0c2d4e6f8a1b3c5d",
            "env_name": "gsm8k",
            "sequence": 918,
            "group_id": "77",
            "group_size": self._rows,
            "env_id": None,
            "min_policy_version": 40,
            "max_policy_version": 40,
            "t_created_ns": 0,
            "t_publish_ns": 0,
            "split": "train",
            "redelivered": False,
            "uneven": False,
        }
        self.meta = RecordMeta(**fields | {"origin": None} | meta)

    @property
    def columns(self):
        return list(self._columns)

    def __len__(self):
        return self._rows

    def __getitem__(self, name):
        return self._columns[name]


def scored_record() -> Copy:
    """Two rollouts with advantages per token and step rewards."""
    return Copy(
        {
            "tokens": ("int32", [[11, 12, *range(100, 130)], [11, 12, 205, 206, 207]]),
            "loss_mask": ("uint8", [[0, 0] + [1] * 30, [0, 0, 1, 1, 1]]),
            "advantages": (
                "float32",
                [
                    [0.0, 0.0] + [0.88] * 6 + [0.3] * 6 + [-0.31] * 8 + [-0.88] * 5 + [0.1] * 5,
                    [0, 0, -0.5, -0.5, -0.5],
                ],
            ),
            "step_rewards": ("float32", [[0.42, 0.97, -0.1], [0.05]]),
            "step_ends": ("int32", [[8, 14, 27], [5]]),
        },
        scores=[1.0, 0.0],
    )


class Frozen:
    """Gives looks in turn, the last one for ever; every lane holds the same record."""

    def __init__(self, looks, record=None) -> None:
        self._looks = itertools.chain(looks[:-1], itertools.repeat(looks[-1]))
        self.record = record
        self.asked = []
        self.rests = 0

    def bridges(self):
        return ["run1"]

    def look(self, bridge):
        return next(self._looks)

    def newest(self, bridge, lane):
        self.asked.append((bridge, lane))
        return self.record

    def rest(self):
        self.rests += 1
