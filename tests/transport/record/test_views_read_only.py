"""Views of a lane cannot be written: exports are read-only, or refused by an error that names to_torch(); so
is the memory itself.
"""

import ctypes
import pickle
import subprocess
import sys

import numpy as np
import pytest

import shmbridge
from shmbridge.record import lane_name, map_lane_writable
from shmbridge.segments import open_mapping

GROUP = {"tokens": [[1, 2, 3], [4]], "advantages": [[0.5, 1.5, 2.5], [3.5]], "score": [1.0, 2.0]}


@pytest.fixture(params=["hub", "rank"])
def get(request, producer, make_consumer, make_rank):
    """Call it for the record, as a hub or a rank has it."""
    consumer = make_consumer()
    producer.put(GROUP)

    def take() -> shmbridge.Record:
        if request.param == "hub":
            return consumer.get(1)
        consumer.serve_ranks(world_size=1, groups=1)
        return next(make_rank().batches(hold="caller")).records[0]

    return take


def view_of(record: shmbridge.Record, which: str) -> np.ndarray:
    if which == "scalars":
        return record["score"]
    values = record["advantages"]
    return {"values": values.values, "row": values[0], "slice": values.values[1:]}[which]


views = pytest.mark.parametrize("which", ["values", "row", "slice", "scalars"])


@views
def test_numpy_cannot_write_a_view(get, which) -> None:
    view = view_of(get(), which)
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 9
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(view)[0] = 9
    with pytest.raises(ValueError, match="read-only"):
        np.add(view, 1, out=view)
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.setflags(write=True)
    with pytest.raises(BufferError, match="to_torch"):
        np.from_dlpack(view)


@views
def test_a_result_computed_from_a_view_is_no_view(get, which) -> None:
    view = view_of(get(), which)
    made = view * 2
    made[0] = 9
    assert type(made) is np.ndarray
    assert np.from_dlpack(view.copy())[0] == view[0]
    assert type(pickle.loads(pickle.dumps(view))) is np.ndarray
    assert repr(view) == repr(np.array(view))
    assert isinstance(view.sum(), np.floating)


@views
def test_memoryview_and_ctypes_cannot_write_a_view(get, which) -> None:
    record = get()
    view = view_of(record, which)
    for exporter in (view, record):
        assert memoryview(exporter).readonly
        with pytest.raises((TypeError, BufferError)):
            (ctypes.c_char * 4).from_buffer(exporter)
    with pytest.raises(TypeError):
        memoryview(record)[0] = 1


def test_pyarrow_cannot_write_a_view(get) -> None:
    record = get()
    pyarrow = pytest.importorskip("pyarrow")
    assert not pyarrow.py_buffer(record["advantages"].values).is_mutable
    table = record.to_arrow()
    for buffer in table["advantages"].values.buffers():
        assert buffer is None or not buffer.is_mutable
    assert not table["advantages"].values.to_numpy(zero_copy_only=True).flags.writeable


@views
def test_torch_is_refused_dlpack_and_told_what_copies(get, which) -> None:
    record = get()
    view = view_of(record, which)
    torch = pytest.importorskip("torch")
    with pytest.raises(BufferError, match="to_torch"):
        torch.from_dlpack(view)
    before = view.tolist()
    for made in (
        view.to_torch(),
        torch.tensor(view),
        torch.from_dlpack(view.copy()),
        torch.from_dlpack(view * 1),
    ):
        assert made.tolist() == before
        made.mul_(10)
    assert view.tolist() == before
    flat = record["advantages"].to_torch()
    flat.mul_(10)
    assert record["advantages"].values.tolist() == [0.5, 1.5, 2.5, 3.5]


@views
def test_torch_warns_where_it_asks_for_no_dlpack(get, which) -> None:
    """from_numpy and as_tensor do not ask the exporter: torch warns once per process, and reading is safe."""
    view = view_of(get(), which)
    torch = pytest.importorskip("torch")
    torch.set_warn_always(True)
    try:
        for take in (torch.from_numpy, torch.as_tensor, torch.asarray):
            with pytest.warns(UserWarning, match="not writable"):
                made = take(view)
            assert made.tolist() == view.tolist()
    finally:
        torch.set_warn_always(False)


def rights(lane: str) -> dict[int, str]:
    """The rights of this process' mappings of a segment: offset -> rights, for readers only."""
    with open("/proc/self/maps") as maps:
        fields = [line.split() for line in maps if line.rstrip().endswith(lane)]
    return {int(offset, 16): mode for _, mode, offset, *_ in fields}


def test_the_hub_maps_data_read_only_and_the_rest_writable(bridge, child, consumer) -> None:
    child(
        f"import shmbridge\np = shmbridge.Producer(bridge, lane_bytes='4M'); p.put({GROUP}); print('ready', "
        "flush=True); input()"
    )
    record = consumer.get(1)
    found = rights(lane_name(record))
    assert found == {0: "rw-s", record._lane_reader.data_at: "r--s"}
    assert record._lane_reader.data_at % 4096 == 0
    record.release()
    assert consumer.poll() == []


CULPRIT = """
import shmbridge, sys, warnings
warnings.simplefilter("ignore")
import torch
consumer = shmbridge.Consumer(sys.argv[1])
record = consumer.get(5)
tensor = torch.from_numpy(record["advantages"].values)
print(tensor.tolist(), flush=True)
tensor.mul_(10)
print("wrote", flush=True)
"""


def test_a_write_through_torch_changes_no_committed_record(bridge, producer, make_consumer) -> None:
    """A process that ignores torch's warning dies of SIGSEGV; the next consumer reads the values that were
    put.
    """
    pytest.importorskip("torch")
    producer.put(GROUP)
    ended = subprocess.run([sys.executable, "-c", CULPRIT, bridge], capture_output=True, text=True)
    assert (ended.stdout, ended.returncode) == ("[0.5, 1.5, 2.5, 3.5]\n", -11)
    with make_consumer().get(1) as record:
        assert record.meta.redelivered
        assert record["advantages"].values.tolist() == [0.5, 1.5, 2.5, 3.5]


def test_a_lane_mapped_writable_for_a_gpu_is_shown(bridge, producer, consumer, caplog) -> None:
    producer.put(GROUP)
    record = consumer.get(1)

    def shown() -> bool:
        (info,) = (info for info in shmbridge.list_bridges() if info.name == bridge)
        return info.lanes[0].data_writable

    assert not shown()
    map_lane_writable(record)
    map_lane_writable(record)
    assert shown()
    assert sum("is mapped writable here" in line for line in caplog.messages) == 1
    assert not record["advantages"].values.flags.writeable
    assert memoryview(record).readonly


def test_the_data_area_begins_on_a_page_of_its_own(producer) -> None:
    lane = open_mapping(producer.lane_name, readonly=True)
    words = np.frombuffer(memoryview(lane), "<u8", 10)
    released_at, data_at = words[7], words[8]
    assert data_at % 4096 == 0
    assert data_at > released_at
