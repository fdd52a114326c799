"""A process that uses a bridge ends silently, with its own exit code, and leaves only undelivered records on
the mount.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import shmbridge

ROOT = str(Path(shmbridge.__file__).parents[1])
PREAMBLE = """
import asyncio, atexit, os, sys, threading
import numpy as np
import shmbridge
bridge = sys.argv[1]
group = {"tokens": [[1, 2, 3], [4, 5]], "scores": [1.0, 0.5], "prompt_length": [0, 0]}
big = {"tokens": [list(range(6000))], "prompt_length": [0]}
"""


@pytest.fixture
def run(bridge):
    """Runs code in a child to its end: (exit code, standard output, standard error)."""

    def run_child(code: str, *interpreter: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, *interpreter, "-c", PREAMBLE + textwrap.dedent(code), bridge],
            cwd="/",
            env={**os.environ, "PYTHONPATH": ROOT},
            capture_output=True,
            text=True,
            timeout=90,  # a child that imports torch, on a busy machine
        )
        return done.returncode, done.stdout, done.stderr

    return run_child


@pytest.fixture
def next_consumer(make_consumer, segments):
    """Returns the records of the next consumer, [(sequence, redelivered)]; nothing of the bridge is left
    after it.
    """

    def take() -> list[tuple[int, bool]]:
        consumer = make_consumer()
        taken = []
        for record in consumer.poll():
            with record:
                taken.append((record.meta.sequence, record.meta.redelivered))
        consumer.close()
        assert segments() == []
        return taken

    return take


LEAVING_NOTHING = {
    "import only": "",
    "public names": "[getattr(shmbridge, name) for name in dir(shmbridge)]",
    "producer closed": "shmbridge.Producer(bridge, lane_bytes='64K').close()",
    "producer, with": "with shmbridge.Producer(bridge, lane_bytes='64K'): pass",
    "consumer closed": "shmbridge.Consumer(bridge).close()",
    "consumer, with": "with shmbridge.Consumer(bridge): pass",
    "both, closed inside out": """
        with shmbridge.Consumer(bridge) as consumer, shmbridge.Producer(bridge, lane_bytes='64K') as producer:
            producer.put(group)
            consumer.get(5).release()
    """,
    "both, closed outside in": """
        with shmbridge.Producer(bridge, lane_bytes='64K') as producer, shmbridge.Consumer(bridge) as consumer:
            producer.put(group)
            consumer.get(5).release()
    """,
    "closed twice": """
        producer, consumer = shmbridge.Producer(bridge, lane_bytes='64K'), shmbridge.Consumer(bridge)
        for each in (producer, consumer, producer, consumer): each.close()
    """,
    "a view kept until after close": """
        with shmbridge.Producer(bridge, lane_bytes='64K') as producer, shmbridge.Consumer(bridge) as consumer:
            producer.put(group)
            with consumer.get(5) as record:
                view = record["tokens"].values
        assert view.tolist() == [1, 2, 3, 4, 5]
        del view, record, consumer, producer
    """,
    "put_async": """
        async def main():
            asyncio.get_running_loop().slow_callback_duration = 60  # of interest to -X dev only
            lane = shmbridge.Producer(bridge, lane_bytes='64K')
            with lane as producer, shmbridge.Consumer(bridge) as consumer:
                await producer.put_async(group)
                (await consumer.get_async(5)).release()
        asyncio.run(main())
    """,
    "batches, prefetched": """
        with shmbridge.Producer(bridge, lane_bytes='64K') as producer, shmbridge.Consumer(bridge) as consumer:
            for _ in range(4): producer.put(group)
            batches = consumer.batches(groups=2, prefetch=1)
            for _ in range(2):
                batch = next(batches)
                batch.release()
            del batches, batch
    """,
    "an error before anything is made": """
        try: shmbridge.Producer("not a name")
        except shmbridge.BadBridgeName: pass
    """,
    "too little memory": """
        try: shmbridge.Producer(bridge, lane_bytes=1 << 50)
        except shmbridge.ShmTooSmall: pass
        else: raise SystemExit("there is no such memory")
    """,
    "a second consumer is refused": """
        with shmbridge.Consumer(bridge):
            try: shmbridge.Consumer(bridge)
            except shmbridge.ConsumerTaken: pass
    """,
    "consumer in a thread": """
        def work():
            with shmbridge.Consumer(bridge) as consumer:
                try: consumer.get(0.01)
                except shmbridge.ConsumerEmpty: pass
        thread = threading.Thread(target=work); thread.start(); thread.join()
    """,
    "sys.exit inside with": """
        with shmbridge.Producer(bridge, lane_bytes='64K') as producer, shmbridge.Consumer(bridge) as consumer:
            producer.put(group)
            consumer.get(5).release()
            sys.exit(0)
    """,
    "a forked child that ends before its parent": """
        with shmbridge.Producer(bridge, lane_bytes='64K') as producer, shmbridge.Consumer(bridge) as consumer:
            producer.put(group)
            record = consumer.get(5)
            child = os.fork()
            if child:
                assert os.waitpid(child, 0)[1] == 0
                record.release()
                del record
            else:
                sys.exit(0)
    """,
}


@pytest.mark.parametrize("case", LEAVING_NOTHING)
def test_a_process_that_closes_its_ends_leaves_and_prints_nothing(case, run, segments):
    assert run(LEAVING_NOTHING[case]) == (0, "", "")
    assert segments() == []


@pytest.mark.parametrize(
    "case", ["both, closed inside out", "put_async", "batches, prefetched", "a view kept until after close"]
)
def test_dev_mode_has_nothing_to_say_either(case, run, segments):
    """Unclosed files, wrong uses of the allocator, unraisable errors: all would be on standard error."""
    assert run(LEAVING_NOTHING[case], "-X", "dev") == (0, "", "")
    assert segments() == []


# Nothing here is closed: the process' leases end with it, and its committed records stay.
UNCLOSED = {
    "producer": ("producer = shmbridge.Producer(bridge, lane_bytes='64K')", []),
    "producer with records": (
        "producer = shmbridge.Producer(bridge, lane_bytes='64K'); producer.put(group); producer.put(group)",
        [(0, False), (1, False)],
    ),
    "producer closed with records": (
        "with shmbridge.Producer(bridge, lane_bytes='64K') as producer: producer.put(group)",
        [(0, False)],
    ),
    "producer in a cycle": (
        (
            "producer = shmbridge.Producer(bridge, lane_bytes='64K'); producer.put(group); producer.itself = "
            "producer; del producer"
        ),
        [(0, False)],
    ),
    "consumer": ("consumer = shmbridge.Consumer(bridge)", []),
    "consumer that waits in a daemon thread": (
        """
        consumer = shmbridge.Consumer(bridge)
        threading.Thread(target=consumer.get, daemon=True).start()
        """,
        [],
    ),
    "a record held": (
        """
        producer, consumer = shmbridge.Producer(bridge, lane_bytes='64K'), shmbridge.Consumer(bridge)
        for _ in range(3): producer.put(group)
        consumer.get(5).release()
        held = consumer.get(5)
        """,
        [(1, True), (2, False)],
    ),
    "live views": (
        """
        producer, consumer = shmbridge.Producer(bridge, lane_bytes='64K'), shmbridge.Consumer(bridge)
        producer.put(group)
        views = [consumer.get(5)["tokens"].values]
        """,
        [(0, True)],
    ),
    "live views after close": (
        """
        producer, consumer = shmbridge.Producer(bridge, lane_bytes='64K'), shmbridge.Consumer(bridge)
        producer.put(group)
        record = consumer.get(5)
        views = [record["tokens"].values]
        producer.close(); consumer.close()
        """,
        [(0, True)],  # dropped without a word: it comes again
    ),
    "a batch in hand": (
        """
        producer, consumer = shmbridge.Producer(bridge, lane_bytes='64K'), shmbridge.Consumer(bridge)
        for _ in range(4): producer.put(group)
        batches = consumer.batches(groups=2, prefetch=0)
        batch = next(batches)
        """,
        [(0, True), (1, True), (2, False), (3, False)],
    ),
    "an iteration of records": (
        """
        producer, consumer = shmbridge.Producer(bridge, lane_bytes='64K'), shmbridge.Consumer(bridge)
        for _ in range(2): producer.put(group)
        records = iter(consumer)
        record = next(records)
        """,
        [(0, True), (1, False)],
    ),
    "iterations of both ends closed, in a cycle": (
        """
        producer, consumer = shmbridge.Producer(bridge, lane_bytes='64K'), shmbridge.Consumer(bridge)
        for _ in range(3): producer.put(group)
        class Loop: pass
        loop = Loop(); loop.itself = loop
        loop.batches = iter(consumer.batches(groups=1, prefetch=0)); next(loop.batches); next(loop.batches)
        producer.close(); consumer.close()
        """,
        [(1, True), (2, False)],
    ),
    "a rank's iteration": (
        """
        consumer = shmbridge.Consumer(bridge)
        producer = shmbridge.Producer(bridge, lane_bytes='64K')
        producer.put(group)
        shares = consumer.serve_ranks(1, groups=1)
        rank = shmbridge.Rank(bridge, 0, 1)
        batches = iter(rank.batches(timeout_s=5))
        batch = next(batches)
        """,
        [(0, True)],
    ),
    "a data set's iteration": (
        """
        from shmbridge.consumers import BridgeDataset
        producer = shmbridge.Producer(bridge, lane_bytes='64K')
        for _ in range(3): producer.put(group)
        items = iter(BridgeDataset(bridge, groups=1, prefetch=0, timeout_s=5))
        item = next(items)
        """,
        [(0, True), (1, False), (2, False)],
    ),
    "a data set's iteration that has gathered ahead": (
        """
        import time
        from shmbridge.consumers import BridgeDataset
        producer = shmbridge.Producer(bridge, lane_bytes='64K')
        for _ in range(3): producer.put(group)
        data = BridgeDataset(bridge, groups=1, prefetch=1, timeout_s=5)
        items = iter(data)
        item = next(items)
        while data.stats()["queue_groups"] > 1: time.sleep(0.01)
        """,
        [(0, True), (1, True), (2, False)],  # 1 had left its lane for the batch gathered ahead
    ),
    "a claim open": (
        """
        producer = shmbridge.Producer(bridge, lane_bytes='64K')
        producer.put(group)
        slot = producer.claim(1, {"tokens": [4], "loss_mask": [4]}); slot.__enter__()["tokens"][:] = 7
        """,
        [(0, False)],
    ),
    "put_async pending, loop ended": (
        """
        async def main():
            global producer
            producer = shmbridge.Producer(bridge, lane_bytes='64K')
            assert await producer.put_async(big) == 0
            assert await producer.put_async(big) == 1
            task = asyncio.create_task(producer.put_async(big))
            await asyncio.sleep(0.02)
            assert not task.done()
        asyncio.run(main())
        """,
        [(0, False), (1, False)],
    ),
    "put_async pending, closed": (
        """
        async def main():
            with shmbridge.Producer(bridge, lane_bytes='64K') as producer:
                for _ in range(2): await producer.put_async(big)
                task = asyncio.create_task(producer.put_async(big))
                await asyncio.sleep(0.02)
            await asyncio.gather(task, return_exceptions=True)
            assert producer.stats()["records_total"] + producer.stats()["dropped_total{cancelled}"] == 3
        asyncio.run(main())
        """,
        [(0, False), (1, False)],
    ),
    "put_async pending, cancelled": (
        """
        async def main():
            global producer
            producer = shmbridge.Producer(bridge, lane_bytes='64K')
            for _ in range(2): await producer.put_async(big)
            task = asyncio.create_task(producer.put_async(big))
            await asyncio.sleep(0.02)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        asyncio.run(main())
        """,
        [(0, False), (1, False)],
    ),
    "os._exit": (
        "producer = shmbridge.Producer(bridge, lane_bytes='64K'); producer.put(group); os._exit(0)",
        [(0, False)],
    ),
    "in atexit": (
        """
        producer = shmbridge.Producer(bridge, lane_bytes='64K')
        atexit.register(lambda: producer.put(group))
        """,
        [(0, False)],
    ),
    "a forked child that outlives nobody": (
        """
        producer, consumer = shmbridge.Producer(bridge, lane_bytes='64K'), shmbridge.Consumer(bridge)
        producer.put(group)
        record = consumer.get(5)
        child = os.fork()
        if child: assert os.waitpid(child, 0)[1] == 0
        """,
        [(0, True)],
    ),
}


@pytest.mark.parametrize("case", UNCLOSED)
def test_an_unclosed_end_prints_and_loses_nothing(case, run, next_consumer):
    code, left = UNCLOSED[case]
    assert run(code) == (0, "", "")
    assert next_consumer() == left


@pytest.mark.parametrize("case", [case for case, (_, left) in UNCLOSED.items() if not left])
def test_an_unclosed_end_is_swept_by_any_start(case, run, make_producer, segments):
    assert run(UNCLOSED[case][0])[0] == 0
    make_producer().close()
    assert segments() == []


def test_an_exception_shows_itself_and_nothing_else(run, next_consumer):
    """Inside `with`: the consumer's records come again, the producer's stay."""
    code, out, err = run("""
        with shmbridge.Producer(bridge, lane_bytes='64K') as producer, shmbridge.Consumer(bridge) as consumer:
            for _ in range(3): producer.put(group)
            consumer.get(5).release()
            record = consumer.get(5)
            raise ValueError("boom")
    """)
    assert (code, out) == (1, "")
    assert err.startswith("Traceback (most recent call last):\n")
    assert err.endswith("ValueError: boom\n")
    assert err.count("\n") == 3, err
    assert next_consumer() == [(1, True), (2, False)]


def test_an_uncaught_exception_with_nothing_closed(run, next_consumer):
    code, out, err = run("""
        producer, consumer = shmbridge.Producer(bridge, lane_bytes='64K'), shmbridge.Consumer(bridge)
        for _ in range(2): producer.put(group)
        record = consumer.get(5); view = record["tokens"].values
        raise ValueError("boom")
    """)
    assert (code, out) == (1, "")
    assert err.endswith("ValueError: boom\n")
    assert err.count("\n") == 3, err
    assert next_consumer() == [(0, True), (1, False)]


def test_sys_exit_keeps_its_code(run, next_consumer):
    assert run("""
        with shmbridge.Producer(bridge, lane_bytes='64K') as producer:
            producer.put(group)
            sys.exit(7)
    """) == (7, "", "")
    assert next_consumer() == [(0, False)]


def test_a_consumer_is_interrupted_while_it_waits(run, next_consumer):
    """As Ctrl-C does, while it waits for a record."""
    code, out, err = run("""
        import signal
        # a background job of a shell inherits it ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with shmbridge.Producer(bridge, lane_bytes='64K') as producer, shmbridge.Consumer(bridge) as consumer:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
            consumer.get(20)
    """)
    assert (code, out) == (-2, "")
    assert err.endswith("KeyboardInterrupt\n")
    assert err.count("Traceback") == 1
    assert next_consumer() == []


@pytest.mark.parametrize("closed", ["closed", "unclosed"])
def test_views_at_exit_do_not_release_what_the_next_consumer_holds(closed, run, make_consumer, segments):
    """The interpreter's end frees the hub lock before it drops the last views: from then on they may not
    touch the lane.

    An exit handler registered before the bridge was opened runs after the bridge's own: it plays the next
    consumer in that gap.
    """
    code, out, err = run(f"""
        from shmbridge.segments import lane_info, lane_names

        def next_consumer():
            global record, view
            held = lambda: sum(lane_info(name).held for name in lane_names(bridge))
            try:
                consumer = shmbridge.Consumer(bridge)
            except shmbridge.ConsumerTaken:
                return print("taken")
            record_again, before = consumer.get(5), held()
            record = view = None
            print(record_again.meta.redelivered, before, held())

        atexit.register(next_consumer)
        producer, consumer = shmbridge.Producer(bridge, lane_bytes='64K'), shmbridge.Consumer(bridge)
        producer.put(group)
        record = consumer.get(5)
        view = record["tokens"].values
        if {closed == "closed"}:
            consumer.close()
    """)
    assert (code, err) == (0, "")
    assert out in ("taken\n", "True 1 1\n"), "redelivered, held before and after the old view went"
    make_consumer().close()
