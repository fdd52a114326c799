"""SkyRL on a CPU: the example's stand-ins for Ray's actors, FSDP and CUDA, and a tiny model."""

import os
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

import shmbridge

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """The folder of a tiny random model and its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    runpy.run_path(str(ROOT / "examples/tiny_model.py"))["build"](folder, seed=3)
    return folder


@pytest.fixture(scope="session")
def example() -> SimpleNamespace:
    """The names of examples/skyrl_train.py."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "examples/skyrl_train.py"), run_name="example"))


@pytest.fixture
def prompts():
    """SkyRL's own input for `groups` prompts of `rows` rows."""

    def made(groups, rows, phase="train", first=0):
        from skyrl.train.generators.utils import prepare_generator_input

        from shmbridge.consumers.skyrl.entrypoint import EmptyPrompts

        data = EmptyPrompts(first + groups)
        drawn = data.collate_fn([data[first + each] for each in range(groups)])
        return prepare_generator_input(drawn, rows, {}, "none", phase, 1)[0]

    return made


@pytest.fixture
def make_generator(bridge, tmp_path):
    """Generators over a feed, one at a time; what they hold is discarded after the test."""
    from shmbridge.consumers.feed import Feed
    from shmbridge.consumers.skyrl.generator import ShmGenerator

    made, feeds = [], []

    def close():
        while made:
            made.pop().close()
        while feeds:
            feeds.pop().close()

    def generator(repetitions=4, *, timeout_s=30.0, of_feed=None, **options):
        close()
        feeds.append(Feed(bridge, exact=True, **{"groups": 1, "run_dir": tmp_path} | (of_feed or {})))
        made.append(ShmGenerator(feeds[-1], repetitions, timeout_s=timeout_s, **options))
        return made[-1]

    yield generator
    close()
    shmbridge.Consumer(bridge, resume="discard").close()
