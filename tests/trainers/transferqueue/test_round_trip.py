"""What one process puts another one gets: every form of value, any rows of any puts, in any order."""

import asyncio

import numpy as np
import pytest
import torch
import transfer_queue as tq
from tensordict import NonTensorStack, TensorDict
from transfer_queue.metadata import extract_field_schema

import shmbridge
from shmbridge.consumers.transfer_queue.backend import _schema
from shmbridge.consumers.transfer_queue.columns import Column
from shmbridge.segments import value_names

ROWS = [torch.arange(4.0), torch.zeros(0), torch.arange(7.0) - 3]


def jagged(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


ARRAYS = [{"x": np.arange(n, dtype=np.uint8), "s": np.float32(n)} for n in (0, 1, 2)]

# name -> (what is put, the rows that must come back)
FORMS = {
    "dense": (torch.arange(12.0).view(3, 4), list(torch.arange(12.0).view(3, 4))),
    "numbers": (torch.tensor([3, 1, 2]), list(torch.tensor([3, 1, 2]))),
    "jagged": (jagged(ROWS), ROWS),
    "jagged bfloat16": (jagged([row.bfloat16() for row in ROWS]), [row.bfloat16() for row in ROWS]),
    "jagged bool": (jagged([row > 0 for row in ROWS]), [row > 0 for row in ROWS]),
    "jagged matrices": (jagged([torch.ones(n, 2, dtype=torch.int16) * n for n in (1, 3, 2)]),
                        [torch.ones(n, 2, dtype=torch.int16) * n for n in (1, 3, 2)]),
    "strided matrices": (torch.nested.nested_tensor([torch.full((2, n), float(n)) for n in (1, 3, 2)]),
                         [torch.full((2, n), float(n)) for n in (1, 3, 2)]),
    "not contiguous": (torch.arange(12).view(4, 3).t(), list(torch.arange(12).view(4, 3).t())),
    "special floats": (torch.tensor([[np.nan, np.inf], [-np.inf, -0.0], [1e-45, 3e38]]),
                       list(torch.tensor([[np.nan, np.inf], [-np.inf, -0.0], [1e-45, 3e38]]))),
    "text": (NonTensorStack("a", "", "ü"), ["a", "", "ü"]),
    "dicts": (NonTensorStack({"a": [1, None]}, {}, {"b": {"c": 1.5}, "t": (1, "x")}),
              [{"a": [1, None]}, {}, {"b": {"c": 1.5}, "t": (1, "x")}]),
    "mixed": (NonTensorStack(torch.ones(2), None, 3), [torch.ones(2), None, 3]),
    "arrays in dicts": (NonTensorStack(*ARRAYS), ARRAYS),
    "bytes": (np.array([b"x", b"yy", b""], dtype="S2"), [np.bytes_(b"x"), np.bytes_(b"yy"), np.bytes_(b"")]),
}  # fmt: skip


def same(one, other) -> bool:
    """Whether the types, the shapes and every bit are equal."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and torch.equal(bits(one), bits(other))
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    return type(one) is type(other) and one == other


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def rows_of(field):
    return list(field.unbind()) if isinstance(field, torch.Tensor) else list(field)


def put(keys, partition, fields):
    tq.kv_batch_put(keys, partition, TensorDict(fields, batch_size=len(keys)))


def get(keys, partition, *fields):
    found = tq.kv_batch_get(keys, partition, select_fields=list(fields) or None)
    return {name: rows_of(found[name]) for name in found.keys()}  # noqa: SIM118


KEYS = ["k0", "k1", "k2"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_comes_back_in_another_process(form, partition, there):
    given, wanted = FORMS[form]
    put(KEYS, partition, {"it": given})
    for found in (get(KEYS, partition)["it"], there(get, KEYS, partition)["it"]):
        assert len(found) == 3
        assert all(same(one, other) for one, other in zip(found, wanted, strict=True))


def test_what_another_process_put_comes_here(partition, there):
    there(put, KEYS, partition, {name.replace(" ", "_"): given for name, (given, _) in FORMS.items()})
    found = get(KEYS, partition)
    for name, (_, wanted) in FORMS.items():
        assert all(same(*pair) for pair in zip(found[name.replace(" ", "_")], wanted, strict=True)), name


def test_the_kinds_are_those_of_simple_storage(partition):
    """Numbers are stacked, tensors are jagged, shapes that differ elsewhere strided, the rest is a list."""
    put(KEYS, partition, {name.replace(" ", "_"): given for name, (given, _) in FORMS.items()})
    found = tq.kv_batch_get(KEYS, partition)
    assert found["numbers"].shape == (3,)
    assert all(found[name].layout == torch.jagged for name in ("dense", "jagged", "jagged_bool"))
    assert found["strided_matrices"].is_nested
    assert found["strided_matrices"].layout == torch.strided
    assert found["jagged"].offsets().tolist() == [0, 4, 4, 11]
    assert list(found["text"]) == ["a", "", "ü"]


def test_rows_of_several_puts_in_any_order(partition, there):
    there(put, ["a", "b", "c"], partition, {"x": jagged([torch.full((n,), n) for n in (1, 2, 3)])})
    put(["d", "e"], partition, {"x": jagged([torch.full((n,), n) for n in (4, 5)])})
    for keys, wanted in (("bc", [2, 3]), ("cab", [3, 1, 2]), ("edcba", [5, 4, 3, 2, 1]), ("dbe", [4, 2, 5])):
        found = there(get, list(keys), partition)["x"]
        assert [row.tolist() for row in found] == [[n] * n for n in wanted]


def test_fields_of_a_row_come_from_different_processes(partition, there):
    put(KEYS, partition, {"x": torch.arange(6).view(3, 2), "y": torch.arange(3)})
    there(put, KEYS[1:], partition, {"z": torch.tensor([[5.0], [6.0]])})
    found = get(KEYS[1:], partition, "x", "z")
    assert [row.tolist() for row in found["x"] + found["z"]] == [[2, 3], [4, 5], [5.0], [6.0]]


def test_the_last_put_of_a_field_counts(partition, there):
    put(KEYS, partition, {"x": torch.zeros(3, 2)})
    there(put, KEYS[:2], partition, {"x": torch.ones(2, 5)})
    assert [row.tolist() for row in there(get, KEYS, partition)["x"]] == [[1] * 5, [1] * 5, [0, 0]]


def test_dense_then_ragged_rows_join(partition):
    put(["a"], partition, {"x": torch.zeros(1, 2)})
    put(["b"], partition, {"x": jagged([torch.ones(5)])})
    assert [len(row) for row in get(["a", "b"], partition)["x"]] == [2, 5]


def test_what_a_reader_writes_nobody_else_sees(partition, there):
    put(KEYS, partition, {"x": torch.zeros(3, 4)})
    mine = tq.kv_batch_get(KEYS, partition)["x"]
    mine.values().fill_(7)
    assert float(tq.kv_batch_get(KEYS, partition)["x"].values().sum()) == 0
    assert all(row.sum() == 0 for row in there(get, KEYS, partition)["x"])


def test_what_the_writer_changes_later_was_not_put(partition):
    given = torch.zeros(3, 4)
    put(KEYS, partition, {"x": given})
    given.fill_(9)
    assert float(tq.kv_batch_get(KEYS, partition)["x"].values().sum()) == 0


def test_a_view_outlives_the_clear(queue, partition):
    put(KEYS, partition, {"x": torch.arange(3 * 4096.0).view(3, 4096)})
    view = tq.kv_batch_get(KEYS, partition)["x"]
    tq.kv_clear(KEYS, partition)
    assert value_names(queue) == []
    put(KEYS, partition, {"x": torch.zeros(3, 4096)})
    assert torch.equal(view.values(), torch.arange(3 * 4096.0))


def test_a_read_of_whole_puts_copies_nothing(partition):
    """Its pages are those of the segment: mapped, and not in this process' own memory."""
    put(KEYS, partition, {"x": torch.ones(3, 4096)})
    found = tq.kv_batch_get(KEYS, partition)["x"].values()
    with open("/proc/self/maps") as lines:
        places = [line.split() for line in lines if "shmbridge." in line and ".v." in line]
    ranges = [tuple(int(end, 16) for end in place[0].split("-")) for place in places]
    assert any(low <= found.data_ptr() < high for low, high in ranges)


def test_in_an_event_loop(partition):
    async def there_and_back():
        fields = TensorDict({"x": torch.arange(6).view(3, 2)}, batch_size=3)
        await tq.async_kv_batch_put(KEYS, partition, fields, [{"n": n} for n in range(3)])
        return await tq.async_kv_batch_get(KEYS, partition)

    found = asyncio.run(there_and_back())
    assert found["x"].values().tolist() == [0, 1, 2, 3, 4, 5]
    assert [tag["n"] for tag in tq.kv_list(partition)[partition].values()] == [0, 1, 2]


def test_one_row_by_itself(partition):
    tq.kv_put("one", partition, {"x": torch.arange(4), "t": "text"}, tag={"a": 1})
    found = tq.kv_batch_get("one", partition)
    assert found["x"].values().tolist() == [0, 1, 2, 3]
    assert list(found["t"]) == ["text"]


@pytest.mark.parametrize("form", FORMS)
def test_the_schema_is_what_transfer_queue_makes(form):
    """The controller is told the same as by TransferQueue's own function; a new release may say more."""
    data = TensorDict({"it": FORMS[form][0]}, batch_size=3)
    assert _schema(data["it"], Column("it", data["it"], 3)) == extract_field_schema(data)["it"]


class Odd:
    pass


@pytest.mark.parametrize(
    ("value", "named"),
    [(Odd(), "Odd"), ({"deep": [Odd()]}, "Odd"), (1 << 80, "81 bits"), ({(1,): 2}, "key of type tuple"),
     ({(): 2}, "key of type tuple"), ({None: 2}, "key of type NoneType"), ({0.0: 2}, "key of type float"),
     (torch.eye(2).to_sparse(), "sparse")],
)  # fmt: skip
def test_what_has_no_bytes_is_refused_before_anything_is_stored(value, named, queue, partition):
    with pytest.raises(shmbridge.InvalidRecord, match=rf"field 'bad', row 1: .*{named}") as wrong:
        put(KEYS, partition, {"good": torch.zeros(3, 1), "bad": NonTensorStack(1, value, 2)})
    assert (wrong.value.column, wrong.value.row) == ("bad", 1)
    assert value_names(queue) == []


def test_a_parser_is_refused(partition):
    with pytest.raises(NotImplementedError, match="parse before the put"):
        tq.kv_batch_put(
            KEYS, partition, TensorDict({"x": torch.zeros(3, 1)}, batch_size=3), data_parser=print
        )


def test_what_a_put_returns_reads_it_back(partition):
    """TransferQueue's own client hands the metadata on, without asking the controller again."""
    client = tq.get_client()
    known = client.put(TensorDict({"x": torch.arange(6).view(3, 2)}, batch_size=3), partition_id=partition)
    assert client.get_data(known)["x"].values().tolist() == [0, 1, 2, 3, 4, 5]
    client.clear_samples(known)
