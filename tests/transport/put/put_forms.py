"""Every form that a column may have, and every mistake in one, with the result of `put`.

`put_forms.json` has the outcomes: bytes, or an error's type, code and place. A difference is a change of
`put`'s contract.
`python tests/transport/put/put_forms.py --write` writes them again.
"""

import array
import collections
import hashlib
import itertools
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import torch

import shmbridge
from shmbridge._ext import header

OUTCOMES = Path(__file__).with_suffix(".json")
SCHEMA = pa.schema(
    [
        pa.field("my_flags", pa.list_(pa.bool_())),
        pa.field("my_number", pa.int16()),
        pa.field("my_text", pa.utf8()),
        pa.field("one_list", pa.list_(pa.int32()), metadata={"per": "record"}),
        pa.field("one_number", pa.float32(), metadata={"per": "record"}),
        pa.field("one_text", pa.utf8(), metadata={"per": "record"}),
        pa.field("one_map", pa.map_(pa.utf8(), pa.float32()), metadata={"per": "record"}),
    ]
)
LENGTHS = (3, 1, 2)
NAN = float("nan")
EMPTY: dict[str, Any] = {
    "null": None,
    "[]": [],
    "()": (),
    "{}": {},
    "empty proxy": MappingProxyType({}),
    "0 x 4": np.empty((0, 4)),
}


class Rows(list):
    """A list, and not exactly one."""


class Number:
    """A number that is neither int nor float."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value

    def __float__(self) -> float:
        return float(self.value)

    def __repr__(self) -> str:
        return f"Number({self.value})"


def split(values: Any, lengths: tuple[int, ...] = LENGTHS) -> list[Any]:
    ends = list(itertools.accumulate(lengths))
    return [values[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def list_forms(dtype: str, other: str, rows: list[list[Any]]) -> dict[str, Any]:
    """A list column whose values fit `dtype` in every form; `other` is a dtype that has to be converted."""
    flat = np.array(list(itertools.chain(*rows)), dtype)
    lengths = [len(row) for row in rows]
    arrays = split(flat, tuple(lengths))
    padded = np.stack([np.resize(row, 3) for row in arrays])
    masked = np.ma.array(flat, mask=[0] * (len(flat) - 1) + [1])
    tensors = [torch.from_numpy(row.copy()) for row in arrays]
    objects = np.empty(len(rows), object)
    objects[:] = rows
    return {
        "lists": rows,
        "tuple of lists": tuple(rows),
        "list of tuples": [tuple(row) for row in rows],
        "subclasses of list": Rows(Rows(row) for row in rows),
        "deque": collections.deque(rows),
        "values of a dict": dict(enumerate(rows)).values(),
        "generator": (row for row in rows),
        "ranges": [range(len(row)) for row in rows],
        "array.array": [array.array("b", range(len(row))) for row in rows],
        "numbers that are neither int nor float": [[Number(1)] * len(row) for row in rows],
        "NumPy numbers": [list(row) for row in arrays],
        "arrays": arrays,
        "tuple of arrays": tuple(arrays),
        "arrays and lists": [arrays[0], *rows[1:]],
        "other dtype": [row.astype(other) for row in arrays],
        "big endian": [row.astype(np.dtype(dtype).newbyteorder(">")) for row in arrays],
        "strided": [np.repeat(row, 2)[::2] for row in arrays],
        "strided, other dtype": [np.repeat(row.astype(other), 2)[::2] for row in arrays],
        "reversed": [row[::-1].copy()[::-1] for row in arrays],
        "array of lists": objects,
        "object rows": [np.array(row, object) for row in rows],
        "text rows": [np.array(row, str) for row in rows],
        "rows of two dimensions": [row.reshape(1, -1) for row in arrays],
        "0-d": np.array(1),
        "1-d": flat,
        "3-d": np.zeros((3, 2, 2), dtype),
        "masked, nothing masked": [np.ma.array(row) for row in arrays],
        "masked": [*arrays[:-1], np.ma.array(arrays[-1], mask=[1] * len(arrays[-1]))],
        "matrix": padded,
        "matrix, strided": np.repeat(padded, 2, axis=1)[:, ::2],
        "matrix, Fortran": np.asfortranarray(padded),
        "matrix, other dtype": padded.astype(other),
        "masked matrix": np.ma.array(padded, mask=[[0, 0, 0], [0, 0, 1], [0, 0, 0]]),
        "np.matrix": np.asmatrix(padded),
        "tensors": tensors,
        "tensor": torch.from_numpy(padded.copy()),
        "strided tensor": torch.from_numpy(padded.copy()).t().contiguous().t(),
        "parameters": [torch.nn.Parameter(row.float()) for row in tensors],
        "tensors that need a gradient": [row.float().requires_grad_() for row in tensors],
        "bfloat16": [row.to(torch.bfloat16) for row in tensors],
        "nested tensor": torch.nested.nested_tensor(tensors),
        "sparse tensor": torch.from_numpy(padded.copy()).to_sparse(),
        "meta tensor": torch.zeros(3, 3, device="meta"),
        "flat, lengths list": (flat, lengths),
        "flat, lengths tuple": (flat, tuple(lengths)),
        "flat, lengths int64": (flat, np.array(lengths)),
        "flat, lengths int32": (flat, np.array(lengths, np.int32)),
        "flat, lengths uint32": (flat, np.array(lengths, np.uint32)),
        "flat, lengths uint8": (flat, np.array(lengths, np.uint8)),
        "flat, lengths strided": (flat, np.repeat(lengths, 2)[::2]),
        "flat, lengths tensor": (flat, torch.tensor(lengths)),
        "flat tensor": (torch.from_numpy(flat), lengths),
        "flat, other dtype": (flat.astype(other), lengths),
        "flat, strided": (np.repeat(flat, 2)[::2], lengths),
        "flat, lengths bool": (flat, [True, *lengths[1:]]),
        "flat, lengths too large": (flat, [*lengths, 1]),
        "flat, lengths negative": (flat, [-1, 1, *lengths]),
        "flat, lengths huge": (flat, [2**40, *lengths]),
        "flat, lengths beyond int64": (flat, [2**80, *lengths]),
        "flat, lengths floats": (flat, [float(length) for length in lengths]),
        "flat, lengths float array": (flat, np.array(lengths, float)),
        "flat, lengths 2-d": (flat, np.array([lengths])),
        "flat, lengths None": (flat, None),
        "flat, no lengths": (flat[:0], []),
        "flat, no lengths, array": (flat[:0], np.empty(0, np.int64)),
        "flat, masked": (masked, lengths),
        "flat, masked lengths": (flat, np.ma.array(lengths, mask=[1, 0, 0])),
        "flat list": (list(itertools.chain(*rows)), lengths),
        "two rows as a tuple": (arrays[0], arrays[1]),
        "a row of None": [None, *rows[1:]],
        "arrays and None": [arrays[0], None, arrays[2]],
        "tuple with None": (rows[0], rows[1], None),
        "all None": [None, None, None],
        "a value of None": [[None] * len(rows[0]), *rows[1:]],
        "text in a row": [["x"] * len(rows[0]), *rows[1:]],
        "a number too large": [*rows[:-1], [rows[-1][0], 10**400]],
        "a number of 2**31": [*rows[:-1], [rows[-1][0], 2**31]],
        "a negative number": [*rows[:-1], [rows[-1][0], -7]],
        "a negative number in an array": [*arrays[:-1], np.array([1, -7], np.int64)],
        "NaN": [*rows[:-1], [rows[-1][0], NAN]],
        "NaN in an array": [*arrays[:-1], np.array([0, NAN], np.float32)],
        "NaN in a strided array": [*arrays[:-1], np.array([0, 0, NAN, 0])[::2]],
        "numbers for rows": [1, 2, 3],
        "text for rows": ["ab", "c", "de"],
        "dicts for rows": [{1: 2}] * 3,
        "sets for rows": [{1, 2, 3}, {1}, {1, 2}],
        "rows of rows": [[[1]] * len(row) for row in rows],
        "a shorter row": [rows[0][:-1], *rows[1:]],
        "a row less": rows[:-1],
        "a row more": [*rows, [rows[0][0]]],
        "an empty row": [[], *rows[1:]],
        "only empty rows": [[], [], []],
        "one row": [rows[0]],
        "number": 5,
        "text": "abc",
        "dict": {"a": 1},
        "Arrow array": pa.array(rows),
        "Arrow chunks": pa.chunked_array([pa.array(rows)]),
        **EMPTY,
    }


def scalar_forms(dtype: str, values: list[Any]) -> dict[str, Any]:
    made = np.array(values, dtype)
    return {
        "list": values,
        "tuple": tuple(values),
        "deque": collections.deque(values),
        "ints": [1, 0, 1],
        "floats": [1.0, 0.0, 0.5],
        "bools": [True, False, True],
        "NumPy numbers": list(made),
        "numbers that are neither int nor float": [Number(1)] * 3,
        "array": made,
        "float array": made.astype(float),
        "int array": made.astype(np.int64),
        "bool array": made.astype(bool),
        "strided": np.repeat(made, 2)[::2],
        "big endian": made.astype(made.dtype.newbyteorder(">")),
        "object array": np.array(values, object),
        "masked": np.ma.array(made, mask=[0, 1, 0]),
        "masked, nothing masked": np.ma.array(made),
        "tensor": torch.from_numpy(made),
        "bfloat16": torch.from_numpy(made).to(torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.from_numpy(made).float()),
        "tensors": list(torch.from_numpy(made)),
        "2-d": made.reshape(3, 1),
        "0-d": made[0],
        "flat, lengths": (made, [1, 1, 1]),
        "Arrow array": pa.array(made),
        "None in it": [values[0], None, values[2]],
        "all None": [None, None, None],
        "tuple with None": (None, *values[1:]),
        "text in it": ["1", *values[1:]],
        "list in it": [[1.0], *values[1:]],
        "NaN in it": [NAN, *values[1:]],
        "NaN in an array": np.array([0.0, NAN, 1.0]),
        "too large": [*values[:2], 10**400],
        "a value less": values[:2],
        "array with a value less": made[:2],
        "empty array": made[:0],
        "number": 1.0,
        "text": "abc",
        "dict": {"a": 1},
        "generator": (value for value in values),
        **EMPTY,
    }


def some(forms: dict[str, Any]) -> dict[str, Any]:
    """Returns every fourth form, as other columns try the shared ones."""
    return dict(itertools.islice(forms.items(), 0, None, 4))


NESTED = [[[1, 2], [3], []], [[4]], [[5], [6, 7]]]
ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)
COLUMNS: dict[str, dict[str, Any]] = {
    "tokens": list_forms("int32", "int64", [[5, 6, 7], [8], [9, 300]]),
    "loss_mask": some(list_forms("uint8", "int64", [[0, 1, 1], [1], [0, 1]]))
    | {"bools": [[False, True, True], [True], [False, True]]},
    "masks": list_forms("int32", "int64", [[-100, 6, 7], [8], [-100, 300]]),
    "advantages": list_forms("float32", "float64", [[0.5, 1.0, -1.5], [0.1], [2.0, 3.0]]),
    "step_rewards": some(list_forms("float32", "float64", [[0.5, 1.0, -1.5], [0.1], [2.0, 3.0]])),
    "my_flags": some(list_forms("bool", "uint8", [[True, False, True], [True], [False, True]])),
    "score": scalar_forms("float64", [1.0, 0.0, 0.5]),
    "prompt_length": some(scalar_forms("int32", [1, 0, 1])),
    "is_last": some(scalar_forms("bool", [True, False, True])),
    "my_number": some(scalar_forms("int16", [7, -1, 300])),
    "one_number": scalar_forms("float32", [1.0, 0.0, 0.5])
    | {"list of one": [0.5], "array of one": np.array([0.5]), "of none": [None]},
    "one_list": {
        "list of one": [[1, 2]],
        "flat": (np.arange(2), [2]),
        "two": [[1], [2]],
        "matrix": np.arange(2).reshape(1, 2),
        **EMPTY,
    },
    "one_text": {"list of one": ["a"], "text": "a", "two": ["a", "b"], **EMPTY},
    "one_map": {"list of one": [{"a": 1.0}], "dict": {"a": 1.0}, "two": [{}, {"a": 1}], **EMPTY},
    "step_ends": {
        "fit": [[1, 3], [1], []],
        "fall": [[2, 1], [1], []],
        "beyond": [[1, 9], [1], []],
        "with None": [[3], None, [2]],
    },
    "distill_token_ids": {
        "lists": NESTED,
        "tuples": tuple(tuple(tuple(inner) for inner in row) for row in NESTED),
        "arrays": [[np.array(inner) for inner in row] for row in NESTED],
        "2-d arrays": [np.arange(2 * length).reshape(length, 2) for length in LENGTHS],
        "2-d tensors": [torch.arange(2 * length).reshape(length, 2) for length in LENGTHS],
        "array of rows": np.array([None, *NESTED], object)[1:],
        "3-d": np.arange(18).reshape(3, 3, 2),
        "with None": [None, *NESTED[1:]],
        "None within": [[None, [3], []], *NESTED[1:]],
        "None for a value": [[[None], [3], []], *NESTED[1:]],
        "masked": [[np.ma.array([1, 2], mask=[0, 1]), [3], []], *NESTED[1:]],
        "numbers": [1, 2, 3],
        "rows of numbers": [[1, 2, 3], [4], [5, 6]],
        "text within": [["ab", "c", "d"], *NESTED[1:]],
        "one too deep": [[[[1]], [3], []], *NESTED[1:]],
        "a position less": [NESTED[0][:2], *NESTED[1:]],
        "a row less": NESTED[:2],
        "too large": [*NESTED[:2], [[5], [6, 2**40]]],
        "pair of an array and lengths": (np.arange(6), [3, 1, 2]),
        **EMPTY,
    },
    "distill_logprobs": {
        "lists": [[[0.5, 1.0], [0.1], []], [[2.0]], [[NAN], [0, 1]]],
        "arrays": [np.ones((length, 2)) for length in LENGTHS],
        **EMPTY,
    },
    "reward_components": {
        "dicts": [{"a": 1.0, "ä": 2}, {}, {"b": 0.5}],
        "with None": [{"a": 1.0}, None, {}],
        "proxies": [MappingProxyType({"a": 1.0})] * 3,
        "pairs": [[("a", 1.0)], [], [("b", 2.0)]],
        "tuple": ({"a": 1.0}, {}, {}),
        "a key that is no text": [{1: 1.0}, {}, {}],
        "a key that is no Unicode": [{"\ud800": 1.0}, {}, {}],
        "a value that is no number": [{}, {"a": "b"}, {}],
        "None for a value": [{}, {"a": 1.0, "b": None}, {}],
        "NaN": [{}, {"a": 1.0, "b": NAN}, {}],
        "a row less": [{"a": 1.0}, {}],
        "one dict": {"a": 1.0},
        "numbers": [1.0, 2.0, 3.0],
        **EMPTY,
    },
    "instance_id": {
        "texts": ["a", "ä", ""],
        "bytes": [b"a", bytearray(b"b"), memoryview(b"c")],
        "with None": ["a", None, "c"],
        "tuple": ("a", "b", "c"),
        "array": np.array(["a", "b", "c"]),
        "objects": np.array(["a", None, "c"], object),
        "numbers": [1, 2, 3],
        "no Unicode": ["a", "\ud800", "c"],
        "bytes that are no text": ["a", b"\xff", "c"],
        "a row less": ["a", "b"],
        "one text": "abc",
        **EMPTY,
    },
    "my_text": {"texts": ["a", "ä", ""], "bytes that are no text": [b"\xff", "", ""]},
    "routed_experts": {
        "bytes": [b"\xff\x00", b"", b"\x01"],
        "texts": ["a", "b", "c"],
        "with None": [b"a", None, b""],
        "arrays": [np.zeros(2)] * 3,
    },
    "messages": {
        "values": [[{"role": "user", "content": "ä"}], [], [{"x": 1.5}]],
        "texts": ['[{"a":1}]', "[]", '"b"'],
        "bytes": [b"[1]", b"{}", b"null"],
        "with None": [[{"role": "user"}], None, []],
        "tuple": ([1], [2], [3]),
        "no JSON": ["{nope", "[]", "[]"],
        "no Unicode": ["\ud800", "[]", "[]"],
        "bytes that are no text": [b"\xff", "[]", "[]"],
        "NaN": [[NAN], [], []],
        "null and NaN": [[None], [None], []],
        "what JSON lacks": [[print], [], []],
        "endless": [ENDLESS, [], []],
        "a row less": [[1], [2]],
        "dict": {"a": 1},
        "number": 5,
        "text": "[]",
        "array": np.arange(3),
        **EMPTY,
    },
    "overrides": {"values": [{"a": 1}, {}, None], "NaN": [{"a": NAN}, {}, {}]},
    "images": {"values": [["a"], [], None]},
    "group_overrides": {
        "value": {"a": 1},
        "text": '{"a":1}',
        "list": [1],
        "no JSON": "{nope",
        "NaN": {"a": NAN},
        "number": 5,
        **EMPTY,
    },
    "generation_params": {"value": {"top_p": 0.5}, "what JSON lacks": {"a": print}, **EMPTY},
    "extra": {
        "value": {"a": 1},
        "text": '{"a":1}',
        "list": [1],
        "no JSON": "{nope",
        "what JSON lacks": {"a": print},
        **EMPTY,
    },
    "env_id": {
        "0": 0,
        "7": 7,
        "NumPy": np.int64(7),
        "True": True,
        "None": None,
        "-1": -1,
        "2**31": 2**31,
        "1.5": 1.5,
        "text": "a",
    },
    "scores": {
        "list": [1.0, 0.0, 0.5],
        "text in it": ["a", 1.0, 2.0],
        "NaN in it": [NAN, 1.0, 2.0],
        "a value less": [1.0],
        "text": "a",
    },
    "rewards": {
        "lists": [[0.5, 1.0, -1.5], [0.1], [2.0, 3.0]],
        "NaN": [[0.5, NAN, 0], [1], [2, 3]],
        "numbers": [1.0, 2.0, 3.0],
    },
    "unknown": {"list": [1, 2, 3], "what JSON lacks": print, "NaN": NAN, "None": None},
    "logprobs": {"lists": [[0.5, 1.0, -1.5], [0.1], [2.0, 3.0]]},
    "reward": {"list": [1.0, 2.0, 3.0]},
}
ODD_MASKS = {
    "neither -100 nor the token": [[-100, 1, 7], [8], [-100, 300]],
    "arrays, neither": [np.array([-100, 1, 7]), np.array([8]), np.array([-100, 300])],
    "tuples, neither": ([-100, 1, 7], (8,), [-100, 300]),
    "text, neither": [[-100, "x", 7], [8], [-100, 300]],
}
TOKENS = COLUMNS["tokens"]["lists"]
EMPTY_ROW = [TOKENS[0], [], TOKENS[2]]


def whole_groups() -> Iterator[tuple[str, Any]]:
    """Groups in which the form is not of one column."""
    lists, scored = (
        {"tokens": TOKENS},
        {"tokens": TOKENS, "scores": [1.0, 0.0, 0.5], "masks": COLUMNS["masks"]["lists"]},
    )
    yield "nothing", {}
    yield "no mapping: list", [TOKENS]
    yield "no mapping: None", None
    yield "no mapping: text", "group"
    yield "no mapping: number", 5
    yield "no mapping: table", pa.table({"tokens": pa.array(TOKENS)})
    yield "no tokens", {"score": [1.0]}
    yield "no tokens but input_ids", {"input_ids": TOKENS}
    yield "proxy", MappingProxyType(scored)
    yield "OrderedDict", collections.OrderedDict(scored)
    yield "defaultdict", collections.defaultdict(list, scored)
    yield "UserDict", collections.UserDict(scored)
    yield "a key that is no text", lists | {7: [1]}
    yield "a column twice", lists | {"score": [1.0] * 3, "scores": [1.0] * 3}
    yield (
        "masks and loss_mask",
        lists | {"masks": COLUMNS["masks"]["lists"], "loss_mask": COLUMNS["loss_mask"]["lists"]},
    )
    yield (
        "bad masks and loss_mask",
        lists | {"masks": [[7, 7, 7], [7], [7, 7]], "loss_mask": COLUMNS["loss_mask"]["lists"]},
    )
    yield "no masks and loss_mask", lists | {"masks": None, "loss_mask": COLUMNS["loss_mask"]["lists"]}
    for name, value in ODD_MASKS.items():
        yield f"masks: {name}", lists | {"masks": value}
        yield f"masks: {name}, tokens are arrays", {"tokens": COLUMNS["tokens"]["arrays"], "masks": value}
    for name in ("flat, lengths list", "matrix", "tensors", "arrays"):
        yield (
            f"masks fold with tokens: {name}",
            {"tokens": COLUMNS["tokens"][name], "masks": COLUMNS["masks"]["lists"]},
        )
    for name, columns in ODD_GROUPS.items():
        yield name, lists | columns
    for score in ([1.0, 0.0, 0.5], [1.0, None, 0.5], np.ones(3), None):
        yield f"an empty row and score {score}", {"tokens": EMPTY_ROW, "score": score}
    yield "an empty array and a score", {"tokens": (np.arange(5), [3, 0, 2]), "score": [1.0] * 3}
    yield "an empty row and raw_score", {"tokens": EMPTY_ROW, "raw_score": [1.0] * 3}
    yield (
        "Atropos' JSON",
        scored
        | {
            "messages": ["[]", "a", [1]],
            "overrides": [{}, {}, None],
            "group_overrides": {"a": 1},
            "images": None,
        },
    )
    yield (
        "unknown keys and extra",
        lists | {"extra": {"a": 1}, "unknown": 5, "other": [1], "score": [1.0] * 3},
    )
    yield "unknown keys and an extra list", lists | {"extra": [1], "unknown": 5}
    yield "unknown keys and no extra", lists | {"extra": None, "unknown": 5}
    batch = {"tokens": pa.array(TOKENS, pa.list_(pa.int32())), "score": pa.array([1.0, 0.0, 0.5])}
    yield "Arrow", pa.record_batch(batch)
    yield "Arrow, sliced", pa.record_batch(batch).slice(1)
    yield (
        "Arrow, large lists",
        pa.record_batch(batch | {"tokens": pa.array(TOKENS, pa.large_list(pa.int64()))}),
    )
    yield "Arrow, null row", pa.record_batch(batch | {"ref_logprobs": pa.array([[1.0] * 3, None, [1.0] * 2])})
    yield (
        "Arrow, null value",
        pa.record_batch(batch | {"ref_logprobs": pa.array([[1.0] * 3, [None], [1.0] * 2])}),
    )
    yield "Arrow, null score", pa.record_batch(batch | {"score": pa.array([1.0, None, 0.5])})
    yield (
        "Arrow, all null",
        pa.record_batch(batch | {"ref_logprobs": pa.array([None] * 3, pa.list_(pa.float32()))}),
    )
    yield "Arrow, nested", pa.record_batch(batch | {"distill_token_ids": pa.array(NESTED)})
    yield (
        "Arrow, map",
        pa.record_batch(
            batch
            | {"reward_components": pa.array([[("a", 1.0)], None, []], pa.map_(pa.utf8(), pa.float32()))}
        ),
    )
    yield (
        "Arrow, text",
        pa.record_batch(batch | {"instance_id": ["a", None, "c"], "messages": ["[]", "[1]", None]}),
    )
    yield (
        "Arrow, per record",
        pa.record_batch(batch | {"extra": ['{"a":1}'] * 3, "one_number": [0.5] * 3, "one_list": [[1]] * 3}),
    )
    yield (
        "Arrow, bools",
        pa.record_batch(
            batch | {"is_last": [True, False, True], "my_flags": [[True] * 3, [False], [True, False]]}
        ),
    )
    yield "Arrow, unknown", pa.record_batch(batch | {"unknown": [1, 2, 3]})
    yield "Arrow, no tokens", pa.record_batch({"score": [1.0]})
    yield "Arrow, empty", pa.record_batch({"tokens": pa.array([], pa.list_(pa.int32()))})
    yield "Arrow, NaN", pa.record_batch(batch | {"score": [NAN, 1.0, 2.0]})


# One mistake each, in a form of its own.
ODD_GROUPS: dict[str, dict[Any, Any]] = {
    "infinite score": {"score": [0.5, -math.inf, 0.0]},
    "infinite advantage": {"advantages": [[0.5, math.inf, 0.0], [1.0], [1.0, 2.0]]},
    "rewards masked in a flat array": {
        "rewards": (np.ma.array(np.ones(6), mask=[0, 0, 0, 1, 0, 0]), LENGTHS)
    },
    "masked, nested": {"distill_logprobs": [[np.ma.array([1.0, 2.0], mask=[1, 0]), [], []], [[]], [[], []]]},
    "prompt beyond its row": {"prompt_length": [3, 2, 1]},
    "prompt beyond its row, None before it": {"tokens": ((5, 6, 7), (8,)), "prompt_length": [None, 5]},
    "negative prompt": {"prompt_length": np.array([-2, 1, 1])},
    "more ends than steps": {"step_rewards": [[1.0], [1.0], []], "step_ends": [[1, 3], [1], []]},
    "ends that are equal": {"step_rewards": [[1.0, 2.0], [], []], "step_ends": [[2, 2], [], []]},
    "an end at 0": {"step_ends": [[0], [], []]},
    "0-d arrays for rows": {"tokens": [np.array(5)]},
    "a set for the row of a single token": {"tokens": [{1, 2}]},
    "a number among rows": {"tokens": [[1, 2], 3]},
    "floats in lists": {"tokens": [[1.5]]},
    "a nested mask": {"masks": [[[2]], [8], [9, 300]]},
    "float for rows": {"advantages": 1.0},
    "JSON that is no text": {"extra": b'"\xff"'},
    "names of reasons": {"finish_reason": ["stop", "length", "stop"]},
    "jagged tensor": {"rewards": torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)},
    "nearly a column": {"inference_logprob": [[1]]},
    "rewards twice": {"rewards": [[1.0]] * 3, "token_rewards": [[2.0]] * 3},
}
# One mistake each, found in different ways: which of two is reported?
MISTAKES = {
    "advantages": [[1.0], [1.0], [1.0, 2.0]],
    "score": [1.0],
    "scores": [1.0, 2.0, NAN],
    "masks": [None, [8], [9, 300]],
    "ref_logprobs": [1.0, 2.0, 3.0],
    "messages": [[1]],
    "overrides": [print, None, None],
    "extra": "{nope",
    "one_number": [1.0, 2.0],
    "instance_id": ["a", 5, "c"],
    "prompt_length": [1, 9, 1],
    "env_id": -1,
    "unknown": [1],
}


def cases() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Name, group and options of each."""
    for foreign in (False, True):
        options = {"foreign": True} if foreign else {}
        for column, forms in COLUMNS.items():
            for name, value in forms.items():
                yield f"{column}: {name}", {"tokens": TOKENS, column: value}, options
        for name, group in whole_groups():
            yield name, group, options
        for first, second in itertools.permutations(MISTAKES, 2) if not foreign else ():
            yield (
                f"{first} then {second}",
                {"tokens": TOKENS, first: MISTAKES[first], second: MISTAKES[second]},
                options,
            )
    yield "group_size less than rows", {"tokens": TOKENS}, {"group_size": 2}
    yield "group_size of more rows", {"tokens": tuple(TOKENS)}, {"group_size": 4, "group_id": "part"}
    yield "too big", {"tokens": [[1] * 20_000]}, {}
    yield "too big, flat", {"tokens": (np.arange(20_000), (20_000,))}, {}


class Ends:
    """A producer and a consumer that put cases; `outcome` returns the result of one."""

    def __init__(self, bridge: str) -> None:
        self.consumer = shmbridge.Consumer(bridge, schema=SCHEMA)
        self.producer = shmbridge.Producer(bridge, lane_bytes="64K", on_full="raise", schema=SCHEMA)
        self._memory = np.frombuffer(memoryview(self.producer._lane), np.uint8)
        self._data_at = self._memory.size - self.producer._writer.data_bytes
        assert self._data_at in header.lane_geometry(
            self.producer.lane_bytes, self.producer._writer.slot_count
        )

    def outcome(self, group: Any, options: dict[str, Any]) -> str:
        """The digest of the record's bytes and of its slot, or the error's type, code and place."""
        self._memory[self._data_at :] = 0  # bytes between columns belong to no column
        try:
            self.producer.put(group, **({"group_id": "g", "policy_version": 3} | options))
        except shmbridge.ShmBridgeError as error:
            assert self.consumer.poll() == []
            where = [getattr(error, name, None) for name in ("column", "row", "position")]
            return f"{type(error).__name__} {error.code} {where}"
        except Exception as error:
            return type(error).__name__
        with self.consumer.get(timeout_s=5) as record:
            meta = record.meta
            versions = (meta.min_policy_version, meta.max_policy_version)
            slot = (
                meta.group_id,
                meta.group_size,
                meta.env_id,
                *versions,
                meta.uneven,
                record.rows,
                record.token_count,
            )
            found = hashlib.sha256(bytes(memoryview(record)) + repr(slot).encode())
            return f"{found.hexdigest()[:12]} {' '.join(record.columns)}{' uneven' if meta.uneven else ''}"

    def close(self) -> None:
        del self._memory
        self.producer.close()
        self.consumer.close()


def outcomes(ends: Ends) -> dict[str, str]:
    """Returns the outcome of each case; for foreign groups only where it differs from that of own groups."""
    found: dict[str, str] = {}
    for name, group, options in cases():
        outcome = ends.outcome(group, options)
        if not options.get("foreign"):
            found[name] = outcome
        elif outcome != found.get(name):
            found[f"{name} (foreign)"] = outcome
    return found


def main() -> None:
    """Prints the outcomes, or writes them."""
    os.environ["SHMBRIDGE_CHECK_ROWS"] = "0"
    bridge = f"put-forms-{os.getpid()}"
    ends = Ends(bridge)
    text = json.dumps(outcomes(ends), indent=0, ensure_ascii=False)
    ends.close()
    shmbridge.clean(bridge, dry_run=False)
    if sys.argv[1:] == ["--write"]:
        OUTCOMES.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
