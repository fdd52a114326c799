"""The fixtures that users get too, and ends that many tests need; resets ignored signals for all children."""

import gc
import os
import signal
from collections.abc import Callable, Iterator

import pytest

import shmbridge

pytest_plugins = ["shmbridge.testing.fixtures"]

# the rows that a learner of these tests trains are compared with those that were put
os.environ.setdefault("SHMBRIDGE_CHECK_ROWS", "1")

# A background job inherits an ignored SIGINT, and so would every child of these tests; a handled one is reset
# at exec.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# so does one under nohup; handled by nothing, it stays ignored here
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_collection_finish() -> None:
    """Takes what the imports made out of all later collections, which torch alone makes slow."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def producer(make_producer: Callable[..., shmbridge.Producer]) -> shmbridge.Producer:
    """A producer with a lane of 64 KiB that raises when it is full."""
    return make_producer(on_full="raise")


@pytest.fixture
def consumer(make_consumer: Callable[..., shmbridge.Consumer]) -> shmbridge.Consumer:
    return make_consumer()


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


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tokenizer with a word per id, for Atropos environments; no network."""
    pytest.importorskip("atroposlib")
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizer")
    words = models.WordLevel({f"w{number}": number for number in range(1000)}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="w0").save_pretrained(folder)
    return str(folder)


@pytest.fixture
def limited(make_consumer):
    """A consumer that keeps a limit; version 0 of the policy is out, if none was before."""

    def make(steps: int = 0, groups: int = 1, **options) -> shmbridge.Consumer:
        consumer = make_consumer(
            policy="oldest", max_off_policy_steps=steps, groups_per_step=groups, **options
        )
        consumer.publish_policy_version(max(consumer.policy_version, 0))
        return consumer

    return make
