"""The read of every byte, and the limit: two sides of one segment move what was written, and give up on a
side that is gone.
"""

import threading

import numpy as np
import pytest

from shmbridge.bench.baselines.memcpy_baseline import MemcpyBaseline, segment_bytes, slots_in, touch

RECORD, LANE = 4096, 16384  # four slots


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000, 4099])
@pytest.mark.parametrize("kind", [bytes, memoryview, np.asarray], ids=["bytes", "memoryview", "ndarray"])
def test_touch_sums_words_and_the_bytes_after_them(size, kind):
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    words = size // 8 * 8
    wanted = (int(data[:words].view(np.uint64).sum()) + int(data[words:].sum())) % 2**64
    assert touch(kind(data)) == wanted


def test_touch_reads_from_an_odd_address_and_any_type():
    data = np.arange(100, dtype=np.uint8)
    assert touch(data[3:]) == touch(bytes(data[3:]))
    values = np.linspace(0, 1, 33, dtype=np.float32)
    assert touch(values) == touch(values.tobytes())


def test_touch_takes_contiguous_buffers_only():
    with pytest.raises(ValueError):
        touch(np.arange(10)[::2])
    with pytest.raises(TypeError):
        touch("text")


@pytest.fixture(params=[False, True], ids=["plain", "past the cache"])
def sides(request):
    segment = bytearray(segment_bytes(LANE, RECORD))
    return MemcpyBaseline(segment, LANE, RECORD, request.param), MemcpyBaseline(segment, LANE, RECORD)


def test_the_limit_moves_what_was_written(sides):
    writer, reader = sides
    source = np.random.default_rng(1).integers(0, 2**63, 3 * RECORD // 8, dtype=np.uint64)
    thread = threading.Thread(target=writer.write, args=(source, 100))
    thread.start()
    total = reader.read(100)
    thread.join()
    records = source.reshape(3, -1)
    assert total == sum(int(records[n % 3].sum()) for n in range(100)) % 2**64


def test_neither_side_waits_for_ever(sides):
    writer, reader = sides
    with pytest.raises(TimeoutError, match="0 of 1 were read"):
        reader.read(1, 0.01)
    with pytest.raises(TimeoutError, match="4 of 5 were written"):
        writer.write(bytes(RECORD), 5, 0.01)
    reader.read(4)


@pytest.mark.parametrize(("lane", "record"), [(LANE, 12), (LANE, 0), (64, 64)])
def test_sizes_that_cannot_be_are_refused(lane, record):
    with pytest.raises(ValueError):
        MemcpyBaseline(bytearray(4096), lane, record)


def test_a_segment_too_small_and_a_closed_side_are_errors(sides):
    assert slots_in(LANE, RECORD) == 4
    with pytest.raises(ValueError, match="are needed"):
        MemcpyBaseline(bytearray(100), LANE, RECORD)
    for side in sides:
        side.close()
        side.close()
    with pytest.raises(ValueError):
        sides[0].write(bytes(RECORD), 1)
    with pytest.raises(ValueError):
        sides[1].read(1)
