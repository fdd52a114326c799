"""A version that several ranks write: parts by index, tickets, and what is refused or missing."""

import json
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

import shmbridge
from shmbridge.weights import WeightsPart, WeightsReader, WeightsWriter

SPECS = [
    ("w", "float32", (6, 4)),
    ("b", "bfloat16", (5,)),
    ("scalar", "int64", ()),
    ("none", "float32", (0, 3)),
]
W, B = torch.arange(24.0).reshape(6, 4), torch.arange(5.0).bfloat16()


@pytest.fixture
def ends(bridge):
    with WeightsWriter(bridge) as writer, WeightsReader(bridge) as reader, WeightsPart(bridge) as part:
        yield writer, reader, part


def fill_rest(filling) -> None:
    filling.write("b", B)
    filling.write("scalar", np.int64(7))


def expect_all(reader: WeightsReader, version: int, w=W) -> None:
    with reader.lease() as lease:
        assert lease.version == version
        assert np.array_equal(lease.tensors["w"], w.numpy())
        assert np.array_equal(lease.tensors["b"], B.view(torch.int16).numpy().view(np.uint16))
        assert (lease.tensors["scalar"] == 7, lease.tensors["none"].shape) == (True, (0, 3))


ROWS = [(slice(0, 2),), (slice(2, 6),)]
COLUMNS = [(slice(None), slice(0, 1)), (slice(None), slice(1, 4))]
STRIPES = [(slice(0, None, 2),), (slice(1, None, 2), slice(None))]
BLOCKS = [(slice(0, 3), slice(0, 2)), (slice(0, 3), slice(-2, None)), (slice(3, 99),)]


FORMS = {
    "view": lambda part: part,
    "numpy": lambda part: part.numpy(),
    "contiguous": lambda part: part.contiguous(),
    "parameter": lambda part: torch.nn.Parameter(part),
}


@pytest.mark.parametrize(
    "parts",
    [ROWS, COLUMNS, STRIPES, BLOCKS, [None], [()]],
    ids=["rows", "columns", "stripes", "blocks", "all", "()"],
)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_parts_come_together(ends, parts, form) -> None:
    writer, reader, part = ends
    with writer.fill(3, SPECS) as filling:
        assert filling.version == 3
        ticket = json.loads(json.dumps(filling.ticket))
        for number, index in enumerate(parts):
            values = form(W if index is None else W[index])
            if number % 2:
                filling.write("w", values, index)
            else:
                part.write(ticket, "w", values, index)
        fill_rest(filling)
        assert reader.version is None
    expect_all(reader, 3)
    writer.publish(4, [("w", W + 1)], changed_only=True)
    expect_all(reader, 4, W + 1)


def test_two_byte_values_come_in_stripes(ends) -> None:
    writer, reader, part = ends
    with writer.fill(0, [("b", "bfloat16", (5,)), ("f", "float8_e5m2", (4, 4))]) as filling:
        part.write(filling.ticket, "b", B[::2], (slice(None, None, 2),))
        part.write(filling.ticket, "b", B[1::2], (slice(1, None, 2),))
        for column in range(4):
            part.write(
                filling.ticket,
                "f",
                torch.full((4, 1), 2.0**column).to(torch.float8_e5m2),
                (slice(None), slice(column, column + 1)),
            )
    with reader.lease() as lease:
        assert torch.equal(torch.from_numpy(lease.tensors["b"].copy()).view(torch.bfloat16), B)
        rows = torch.from_numpy(lease.tensors["f"].copy()).view(torch.float8_e5m2).float()
    assert torch.equal(rows, torch.tensor([1.0, 2, 4, 8]).expand(4, 4))


@pytest.mark.parametrize(
    ("writes", "told"),
    [
        ([], "0 of 96 bytes of tensor 'w'"),
        ([ROWS[0]], "32 of 96 bytes of tensor 'w'"),
        ([None, ROWS[0]], "128 of 96 bytes of tensor 'w'"),
    ],
)
def test_a_version_that_is_not_whole_is_not_published(ends, writes, told) -> None:
    writer, reader, part = ends
    with pytest.raises(shmbridge.WeightsMismatch, match=told), writer.fill(1, SPECS) as filling:
        for index in writes:
            part.write(filling.ticket, "w", W if index is None else W[index], index)
        fill_rest(filling)
    assert reader.version is None
    with writer.fill(1, SPECS) as filling:
        filling.write("w", W)
        fill_rest(filling)
    expect_all(reader, 1)


def test_an_exception_publishes_nothing(ends) -> None:
    writer, reader, part = ends
    with pytest.raises(KeyError), writer.fill(1, SPECS) as filling:
        filling.write("w", W)
        fill_rest(filling)
        raise KeyError
    assert reader.version is None
    for over in (lambda: part.write(filling.ticket, "w", W), lambda: filling.write("w", W)):
        with pytest.raises(shmbridge.FillingOver, match="version 1"):
            over()


def test_a_ticket_is_for_one_filling(ends, bridge) -> None:
    writer, reader, part = ends
    tickets = []
    for version in (1, 2, 3):  # the third is in the first one's slot
        with writer.fill(version, SPECS) as filling:
            for earlier in tickets:
                with pytest.raises(shmbridge.FillingOver):
                    part.write(earlier, "w", -W)
            tickets.append(filling.ticket)
            part.write(filling.ticket, "w", W)
            fill_rest(filling)
        expect_all(reader, version)
    for ticket in tickets:
        with pytest.raises(shmbridge.FillingOver, match="is over"):
            part.write(ticket, "w", -W)
    expect_all(reader, 3)


def test_a_value_that_is_no_ticket_is_refused(ends) -> None:
    writer, reader, part = ends
    with writer.fill(1, SPECS) as filling:
        word = filling.ticket["filling"]
        others = [{"filling": number} for number in (-1, 0, 1 << 64, word ^ 1, word ^ 2, word + 4, "1", 1.5)]
        others += [{"segment": name} for name in ("", "00", filling.ticket["segment"].upper() + "0", 7)]
        for odd in (
            None,
            {},
            7,
            "x",
            [],
            {"filling": word},
            *({**filling.ticket, **other} for other in others),
        ):
            with pytest.raises(shmbridge.FillingOver):
                part.write(odd, "w", -W)
        filling.write("w", W)
        fill_rest(filling)
    expect_all(reader, 1)


def test_the_whole_is_a_part_too(ends) -> None:
    writer, reader, part = ends
    with writer.fill(1, SPECS) as filling:
        part.write(filling.ticket, "scalar", np.int64(7), ())
        filling.write("w", W, ())
        part.write(filling.ticket, "b", B, (slice(None),))
    expect_all(reader, 1)


@pytest.mark.parametrize(
    ("name", "tensor", "index", "told"),
    [
        ("v", W, None, "no tensor 'v'"),
        ("w", W.double(), None, r"'w' float64\[6, 4\] was given, the segment has float32\[6, 4\]"),
        ("w", W[:2], None, r"'w' float32\[2, 4\]"),
        ("w", W[:2], (slice(0, 3),), r"the part \[0:3\] of it is float32\[3, 4\]"),
        ("w", W[:2], (slice(4, 8, 2),), r"the part \[4:8:2\] of it is float32\[1, 4\]"),
        ("w", W[0], (0,), r"no part of tensor 'w' \[6, 4\] is \(0,\)"),
        ("w", W, (slice(None),) * 3, "no part"),
        ("w", W, [slice(None)], "no part"),
        ("w", W, (slice(None, None, -1),), "no part"),
        ("w", W, (slice(None, None, 0),), "no part"),
        ("w", W, (slice("a", None),), "no part"),
        ("scalar", np.int64(1), (slice(None),), "no part"),
        ("b", B.half(), None, "float16"),
    ],
)
def test_a_part_that_does_not_fit_is_refused_by_name_and_harms_nothing(
    ends, name, tensor, index, told
) -> None:
    writer, reader, part = ends
    with writer.fill(1, SPECS) as filling:
        for write in (filling.write, lambda *given: part.write(filling.ticket, *given)):
            with pytest.raises(shmbridge.WeightsMismatch, match=told):
                write(name, tensor, index)
        filling.write("w", W)
        fill_rest(filling)
    expect_all(reader, 1)


def test_one_filling_at_a_time(ends) -> None:
    writer, reader, _ = ends
    with writer.fill(1, SPECS) as filling:
        with pytest.raises(shmbridge.FillingOver, match="is being filled"):
            writer.publish(2, [("w", W)])
        with pytest.raises(shmbridge.FillingOver, match="is being filled"), writer.fill(2, SPECS):
            pass
        filling.write("w", W)
        fill_rest(filling)
    expect_all(reader, 1)


def test_a_second_version_is_not_written_while_one_is(ends) -> None:
    """The tensors' generator might do so: both would write into one slot, which the first to end would
    publish.
    """
    writer, reader, _ = ends

    tensors = [("w", W), ("b", B), ("scalar", np.int64(7)), ("none", np.empty((0, 3), np.float32))]

    def made(then: Callable[[], object]) -> Iterator[tuple[str, object]]:
        yield from tensors[:1]
        then()
        yield from tensors[1:]

    writer.publish(1, tensors)
    with pytest.raises(shmbridge.FillingOver, match=r"version 2 .* is being filled"):
        writer.publish(2, made(lambda: writer.publish(2, tensors)))
    assert reader.version == 1
    writer.publish(2, made(lambda: None))
    with pytest.raises(shmbridge.Closed):
        writer.publish(3, made(writer.close))
    assert reader.version == 2


def test_another_model_is_refused_by_name(ends) -> None:
    writer, _, _ = ends
    with writer.fill(1, SPECS) as filling:
        filling.write("w", W)
        fill_rest(filling)
    with (
        pytest.raises(shmbridge.WeightsMismatch, match="'b' is missing"),
        writer.fill(2, SPECS[:1] + SPECS[2:]),
    ):
        pass


def test_a_reader_holds_a_filling_up_and_not_its_ranks(ends) -> None:
    writer, reader, part = ends
    for version in (1, 2):
        with writer.fill(version, SPECS) as filling:
            filling.write("w", W)
            fill_rest(filling)
        if version == 1:
            held = reader.lease()
            held.__enter__()
    with pytest.raises(shmbridge.WeightsBusy, match="a reader"), writer.fill(3, SPECS, timeout_s=0.05):
        pass
    held.__exit__(None, None, None)
    with writer.fill(3, SPECS, timeout_s=0.05) as filling, reader.lease() as lease:
        part.write(filling.ticket, "w", W)
        fill_rest(filling)
        assert lease.version == 2
    expect_all(reader, 3)


def test_a_part_follows_its_writer_to_another_segment(bridge) -> None:
    with WeightsPart(bridge) as part, WeightsReader(bridge) as reader:
        for version, specs in ((1, SPECS), (2, [("other", "float32", (6, 4))])):
            with WeightsWriter(bridge) as writer, writer.fill(version, specs) as filling:
                part.write(filling.ticket, specs[0][0], W)
                if version == 1:
                    old = filling.ticket
                    fill_rest(filling)
        with pytest.raises(shmbridge.FillingOver):
            part.write(old, "w", W)
        assert reader.version == 2


def test_a_closed_part_says_so(bridge) -> None:
    part = WeightsPart(bridge)
    part.close()
    part.close()
    with pytest.raises(shmbridge.Closed):
        part.write({}, "w", W)
