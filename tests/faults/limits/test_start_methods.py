"""multiprocessing's start methods: ends opened in the child work, those of the parent are refused there, and
nothing is pickled.
"""

import multiprocessing
import os
import pickle
import queue

import pytest

import shmbridge

METHODS = ["spawn", "fork", "forkserver"]
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def put_own(bridge, number, answers) -> None:
    """In a child: a producer of its own."""
    with shmbridge.Producer(bridge, producer_id=f"p{number}", lane_bytes="64K") as producer:
        answers.put(("put", producer.put({"tokens": [[number]]})))


def take_own(bridge, answers) -> None:
    """In a child: a consumer of its own."""
    with shmbridge.Consumer(bridge) as consumer, consumer.get(10) as record:
        answers.put(("got", int(record["tokens"].values[0])))


def run(method, target, *arguments):
    """Returns the answer of a child of this start method, once it has ended well."""
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    process = context.Process(target=target, args=(*arguments, answers))
    process.start()
    try:
        answer = answers.get(timeout=30)
    except queue.Empty:
        answer = None
    process.join(30)
    assert process.exitcode == 0, f"{method}: the child ended with {process.exitcode}"
    return answer


@pytest.mark.parametrize("method", METHODS)
def test_ends_opened_in_the_child_work(method, bridge, make_producer, segments) -> None:
    parents = make_producer(producer_id="parent")
    assert run(method, put_own, bridge, 7) == ("put", 0)
    parents.put({"tokens": [[8]]})
    with shmbridge.Consumer(bridge) as consumer:
        found = []
        for _ in range(2):
            with consumer.get(10) as record:
                found.append(int(record["tokens"].values[0]))
        assert sorted(found) == [7, 8]
    parents.put({"tokens": [[9]]})
    assert run(method, take_own, bridge) == ("got", 9)
    parents.close()
    assert segments() == []


def words_of(producer, consumer) -> bytes:
    """Every byte of both segments: a child's change of a shared word would show."""
    return bytes(memoryview(producer._lane)) + bytes(memoryview(consumer._state.words.mapping))


def test_a_forked_child_touches_nothing_of_its_parents(bridge, producer, consumer) -> None:
    producer.put({"tokens": [[1, 2]]})
    record = consumer.get(5)
    view = record["tokens"]
    assert view.values.tolist() == [1, 2]
    calls = {
        "put": lambda: producer.put({"tokens": [[1]]}),
        "claim": lambda: producer.claim(1, {"tokens": [1]}),
        "producer.stats": producer.stats,
        "policy_version": lambda: producer.policy_version,
        "get": lambda: consumer.get(1),
        "poll": consumer.poll,
        "batches": lambda: next(iter(consumer.batches(groups=1, prefetch=0))),
        "publish": lambda: consumer.publish_policy_version(3),
        "consumer.stats": consumer.stats,
    }
    before = words_of(producer, consumer)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        for name, call in calls.items():
            try:
                call()
                said = "nothing"
            except BaseException as wrong:
                said = f"{type(wrong).__name__} {wrong}"
            os.write(write, f"{name}: {said}\n".encode())
        record.release()
        producer.close()
        consumer.close()
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        said = dict(line.split(": ", 1) for line in pipe.read().splitlines())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert set(said) == set(calls)
    wrong = {
        name: text
        for name, text in said.items()
        if not text.startswith("Closed [SB405]") or "fork" not in text
    }
    assert not wrong
    assert words_of(producer, consumer) == before
    assert view.values.tolist() == [1, 2]
    assert consumer.stats()["held"] == 1


@pytest.mark.parametrize("what", ["producer", "consumer", "record"])
def test_nothing_is_pickled(what, producer, consumer) -> None:
    producer.put({"tokens": [[1]]})
    thing = {"producer": producer, "consumer": consumer, "record": consumer.get(5)}[what]
    with pytest.raises(
        TypeError, match=f"a {what.capitalize()} cannot be pickled: it belongs to this process -> pass "
    ) as refused:
        pickle.dumps(thing)
    assert ("name" in str(refused.value)) == (what != "record")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_an_end_given_to_a_child_is_refused_before_the_child_starts(method, producer) -> None:
    context = multiprocessing.get_context(method)
    with pytest.raises(TypeError, match="pass the bridge's name"):
        context.Process(target=put_own, args=(producer, 1, None)).start()
