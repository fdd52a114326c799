"""The cost of bodies: time grows with their size only, memory is booked before it is used, and bodies that no
route takes cost nothing.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
from collections.abc import Callable

import pytest
from gateway_clients import GatewayProcess, RawClient, group

from shmbridge.httpd.gate import Booking, HeldBytes, gunzip

MIB = 1 << 20
ZIPPED = {"content-encoding": "gzip", "content-type": "application/json"}


def test_gzip_members_cost_linear_time():
    """Sixteen times as many empty members take sixteen times as long, not 256 times."""
    member = gzip.compress(b"")

    def seconds(count: int) -> float:
        body, tries = member * count, []
        for _ in range(3):
            begun = time.thread_time()
            assert gunzip(body, MIB) == b""
            tries.append(time.thread_time() - begun)
        return min(tries)

    assert seconds(80_000) < 64 * seconds(5_000)


def test_gunzip_takes_what_gzip_takes():
    """Members, padding behind them, an end that comes too early; never more than the limit and one byte."""
    parts = [b"a" * 1000, b"", bytes(range(256)) * 4000, b"z"]
    body = b"".join(gzip.compress(part) + b"\0" * number for number, part in enumerate(parts))
    whole = b"".join(parts)
    assert gunzip(body, len(whole)) == whole == gzip.decompress(body)
    assert gunzip(body, len(whole) - 1) is None
    with pytest.raises(Exception, match="too early"):
        gunzip(body[:-5], len(whole))


def at_once(gateway: GatewayProcess, path: str, body: bytes, count: int) -> list[int]:
    statuses: list[int] = []
    threads = [
        threading.Thread(
            target=lambda: statuses.append(
                gateway.post(path, data=body, headers=ZIPPED, timeout=120).status_code
            )
        )
        for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses


def peak_bytes(gateway: GatewayProcess) -> int:
    with open(f"/proc/{gateway.pid}/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def test_a_dozen_bombs_at_once_have_the_memory_of_one(start_gateway: Callable[..., GatewayProcess]):
    """48 MiB of blanks each, 47 KiB when gzipped: they are unpacked one after the other, and on other paths
    not at all.
    """
    gateway = start_gateway("--held-bytes", "64M", "--max-body", "64M")
    gateway.start()
    before = peak_bytes(gateway)
    bomb = gzip.compress(b" " * (48 * MIB), 9)
    assert at_once(gateway, "/register", bomb, 12) == [413] * 12
    assert peak_bytes(gateway) - before < 48 * MIB
    assert at_once(gateway, "/scored_data", bomb, 12) == [422] * 12
    assert peak_bytes(gateway) - before < 8 * 48 * MIB
    gateway.until("held_bytes", 0)
    gateway.put(0)


def test_a_body_that_no_route_takes_is_not_read(gateway: GatewayProcess):
    """The answer comes before the body: to an unknown path, a wrong method, and where nothing as large is
    taken.
    """
    for method, path, size, status in (
        ("POST", "/nowhere", 4 * MIB, 404),
        ("GET", "/nowhere", 4 * MIB, 404),
        ("POST", "/batch", 4 * MIB, 405),
        ("GET", "/scored_data", 4 * MIB, 405),
        ("POST", "/register", 4 * MIB, 413),
        ("GET", "/status-env", MIB + 1, 413),
    ):
        client = RawClient(gateway)
        client.ask(path, f"content-length: {size}", method=method)
        client.read_head()
        assert client.head.startswith(f"http/1.1 {status}"), (method, path)
        client.close()


def test_a_body_larger_than_it_looked_goes_in(start_gateway: Callable[..., GatewayProcess]):
    """Its memory is booked in steps, and it is unpacked again with more room; the booking ends at its real
    size.
    """
    gateway = start_gateway("--held-bytes", "1M")
    gateway.start(batch_size=4)
    posted = group(1) | {"images": "x" * 300_000}
    body = gzip.compress(json.dumps(posted).encode())
    assert len(body) < 2000
    assert gateway.post("/scored_data", data=body, headers=ZIPPED).json() == {"status": "received"}
    assert gateway.batch()[0]["images"] == posted["images"]
    gateway.until("held_bytes", 0)


async def test_a_body_that_waits_for_more_memory_gives_its_own_back_first():
    """Two that both need more than is left do not wait for each other."""
    memory = HeldBytes(100)
    one, two = Booking(memory), Booking(memory)
    soon = time.monotonic() + 0.05
    assert await one.take(50, 0, soon)
    assert await two.take(50, 0, soon)
    assert not await one.take(90, 5, soon)
    assert (memory.held, one.size) == (55, 5)
    assert await two.take(500, 5, soon + 10)  # no other body has all it asked for
    two.settle(20)
    assert memory.held == 25
    assert not await Booking(memory).take(90, 0, time.monotonic() + 0.05)
    two.release()
    two.release()
    assert await one.take(90, 5, soon + 10)
    one.release()
    assert (memory.held, memory.whole) == (0, 0)


async def test_what_fits_waits_behind_nobody_where_there_is_no_line():
    """A body that did not fit at first is granted as soon as it fits; in line, after those before it."""
    for in_line in (True, False):
        memory = HeldBytes(100, in_line=in_line)
        for _ in range(9):
            assert await memory.acquire(10, 0)
        large = asyncio.create_task(memory.acquire(50, 20))
        await asyncio.sleep(0)
        small = asyncio.create_task(memory.acquire(20, 20))
        await asyncio.sleep(0)
        memory.give_back(10, whole=True)
        if in_line:
            assert not (await asyncio.wait({small, large}, timeout=0.1))[0]
        else:
            assert await asyncio.wait_for(small, 5)
            assert not large.done()
        for _ in range(5):
            memory.give_back(10, whole=True)
        assert await asyncio.wait_for(asyncio.gather(small, large), 5) == [True, True]
        assert memory.held == 100
