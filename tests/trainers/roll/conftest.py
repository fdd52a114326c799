"""ROLL from the checkout that SHMBRIDGE_ROLL_CHECKOUT names, or stand-ins of what interface.json records."""

import functools
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.trainers.contract import Seen

HERE = Path(__file__).parent
CHECKOUT = os.environ.get("SHMBRIDGE_ROLL_CHECKOUT", "")

# Before the adapter is imported. `roll` on the package index is another project.
if CHECKOUT:
    os.environ.setdefault("ROLL_LOG_DIR", "/tmp/roll-logs")
    os.environ["USE_TF"] = "0"
    sys.path.insert(0, CHECKOUT)
else:
    from tests.trainers.roll import stand_in

    stand_in.install()


def pytest_report_header() -> str:
    return f"ROLL: {CHECKOUT or 'stand-ins of its recorded interface'}"


@pytest.fixture(scope="session")
def recorded() -> dict:
    """interface.json."""
    return json.loads((HERE / "interface.json").read_text())


@pytest.fixture
def needs_checkout() -> str:
    """The checkout's folder; the test is skipped without one."""
    if not CHECKOUT:
        pytest.skip("set SHMBRIDGE_ROLL_CHECKOUT to a checkout of github.com/alibaba/ROLL")
    return CHECKOUT


def rows_of(batch, *columns: str) -> Iterator[Seen]:
    """The rows of ROLL's columns of a mask, advantages and log-probabilities, for tests/trainers/contract.py.

    A column that is one shorter than the tokens begins at the second one.
    """
    there = set(batch.keys())
    for at, length in enumerate(np.asarray(batch["attention_mask"]).sum(-1).tolist()):
        tokens = np.asarray(batch["input_ids"][at])
        arrays = [np.asarray(batch[name][at], np.float32) if name in there else None for name in columns]
        whole = [each if each is None else np.pad(each, (len(tokens) - len(each), 0)) for each in arrays]
        assert not whole[0][length:].any()
        yield Seen(tokens[:length], *(each if each is None else each[:length] for each in whole))


class Call:
    """A method as a Ray actor has it; here it runs at once."""

    def __init__(self, method) -> None:
        self.remote = method


class Queue:
    """ROLL's queue of one group: `episodes` episodes, begun in step `began`; `put` keeps what it gets."""

    def __init__(self, episodes: int, began: int = 0) -> None:
        self._left, self._began, self.rollouts, self.refused = list(range(episodes)), began, [], 0
        self.get_episode_id, self.put = Call(self._next), Call(self._put)

    def _next(self, group_id, env_id=None):
        return self._left.pop(0) if self._left else None

    def _put(self, group_id, episode_id, start_step, rollout, env_id=None):
        if rollout is None:
            return
        self.refused += start_step < self._began
        assert start_step >= self._began, f"{start_step=} {self._began=}"
        self.rollouts.append(rollout)


def manager_of(
    bridge: str, queue, *, length=48, size=1, lag=0, group_size=1, pipeline=None, output=None, **settings
):
    """Returns a ShmEnvManager over that queue."""
    from shmbridge.consumers.roll.env_manager import ShmEnvManager

    names = {"env_id": 0, "group_id": 0, "tag": "known", "group_seed": 5}
    config = {**names, "config": {"bridge": bridge, **settings}}
    steps = {"max_steps": 9, "save_steps": 2, "resume_from_checkpoint": False}
    sizes = {"sequence_length": length, "rollout_batch_size": size, "val_batch_size": 1}
    more = {"async_generation_ratio": lag, "output_dir": output or tempfile.mkdtemp(), **(pipeline or {})}
    worker = SimpleNamespace(name="train_env", group_size=group_size, env_configs={0: {0: config}})
    pipeline = SimpleNamespace(**steps | sizes | {"train_env_manager": worker} | more)
    tokenizer = SimpleNamespace(pad_token_id=63, eos_token_id=62)
    return ShmEnvManager(worker, pipeline, config, tokenizer, None, queue, None)


@pytest.fixture
def make_manager(bridge, monkeypatch, tmp_path):
    """`make_manager(queue, length=48, **settings)`: as `manager_of`, for the test's bridge."""
    from shmbridge.consumers.roll import env_manager

    monkeypatch.setattr(env_manager.ray, "get", lambda value: value)
    return functools.partial(manager_of, bridge, output=str(tmp_path))


@pytest.fixture
def known(bridge):
    """The known groups, which a producer that lives as long as the test has put."""
    import shmbridge
    from shmbridge.testing.fixtures import known_groups

    groups = known_groups(version=4)
    with shmbridge.Producer(bridge, lane_bytes="1M") as producer:
        for group in groups:
            group.put(producer)
        yield groups, producer
