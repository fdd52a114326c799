"""Lanes in memory: huge pages and locked memory, each of which may be refused."""

import os
import resource

import pytest

import shmbridge
from shmbridge.segments import segment

MIB = 1 << 20


def test_a_large_lane_lies_in_huge_pages_if_there_are_any(make_producer, monkeypatch) -> None:
    stats = make_producer(lane_bytes="8M").stats()
    assert stats["lane_mapped_bytes"] >= 8 * MIB
    if not stats["lane_huge_bytes"]:
        pytest.skip("this kernel makes no huge pages on request (Linux 6.1 does), or has none left")
    assert stats["lane_huge_bytes"] == stats["lane_mapped_bytes"] // (2 * MIB) * 2 * MIB
    assert stats["lane_resident_bytes"] == stats["lane_mapped_bytes"]


def test_huge_pages_can_be_declined(make_producer, monkeypatch) -> None:
    monkeypatch.setenv("SHMBRIDGE_HUGE_PAGES", "never")
    stats = make_producer(lane_bytes="8M").stats()
    assert stats["lane_huge_bytes"] == 0
    assert stats["lane_resident_bytes"] < MIB


def test_a_kernel_without_them_changes_nothing(make_producer, consumer, monkeypatch) -> None:
    monkeypatch.setattr(segment, "fill_with_huge_pages", lambda *_: 0)
    producer = make_producer(lane_bytes="8M")
    assert os.fstat(producer._lane.fd).st_blocks * 512 == producer._lane.size + -producer._lane.size % 4096
    producer.put({"tokens": [[1, 2]]})
    with consumer.get(5) as record:
        assert record["tokens"].values.tolist() == [1, 2]


def test_every_byte_is_reserved_and_nothing_more(make_producer) -> None:
    lane = make_producer(lane_bytes="7M")._lane
    assert os.fstat(lane.fd).st_size == lane.size
    assert os.fstat(lane.fd).st_blocks * 512 == lane.size + -lane.size % 4096


def test_memory_is_locked_if_asked_and_allowed(make_producer, monkeypatch) -> None:
    monkeypatch.setenv("SHMBRIDGE_LOCK_MEMORY", "1")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and soft < MIB:
        pytest.skip(f"RLIMIT_MEMLOCK is {soft}")
    stats = make_producer(lane_bytes="64K").stats()
    assert stats["lane_locked_bytes"] == stats["lane_mapped_bytes"]


def test_a_small_limit_of_locked_memory_is_no_error(make_producer, monkeypatch) -> None:
    monkeypatch.setenv("SHMBRIDGE_LOCK_MEMORY", "1")
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, limits[1]))
    try:
        stats = make_producer(lane_bytes="64K").stats()
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)
    assert stats["lane_mapped_bytes"] > 0
    assert os.geteuid() == 0 or stats["lane_locked_bytes"] == 0


def test_a_consumer_says_what_its_lanes_take(make_producer, make_consumer) -> None:
    producers = [make_producer(lane_bytes="4M") for _ in range(2)]
    consumer: shmbridge.Consumer = make_consumer()
    stats = consumer.stats()
    assert stats["lane_mapped_bytes"] == sum(producer.stats()["lane_mapped_bytes"] for producer in producers)
    assert stats["lane_locked_bytes"] == 0
