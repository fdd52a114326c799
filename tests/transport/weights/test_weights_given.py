"""Tensors and specs given by a trainer: wrong ones are refused with a message, and the last version stays."""

import numpy as np
import pytest
import torch

import shmbridge
from shmbridge.weights import WeightsReader, WeightsWriter


@pytest.fixture
def ends(bridge):
    with WeightsWriter(bridge) as writer, WeightsReader(bridge) as reader:
        yield writer, reader


def layer() -> torch.nn.Linear:
    return torch.nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (layer, "Linear was given"),
        (lambda: layer().state_dict(), "'weight' was given"),
        (lambda: layer().parameters(), "Parameter was given"),
        (lambda: [("weight",)], r"\('weight',\) was given"),
        (lambda: [(["weight"], torch.ones(2, 2))], "was given"),
        (lambda: None, "NoneType was given"),
        (
            lambda: [("weight", np.ma.array([1.0, 2.0], mask=[0, 1]))],
            "'weight' is a masked array, and 1 of its 2 values are masked",
        ),
        (lambda: [("weight", [[1.0], [2.0, 3.0]])], r"tensor 'weight' \(list\) is no array"),
    ],
    ids=["a model", "a dict", "parameters", "no tensor", "no name", "nothing", "masked", "ragged"],
)
def test_an_item_that_is_no_pair_of_name_and_tensor_is_refused_in_words(ends, given, told) -> None:
    writer, reader = ends
    for version in (1, 2):
        for changed_only in (False, True)[: 1 if version == 1 else 2]:
            with pytest.raises(shmbridge.WeightsMismatch, match=told):
                writer.publish(version, given(), changed_only=changed_only)
        writer.publish(version, layer().state_dict().items())
        assert reader.version == version


@pytest.mark.parametrize(
    ("specs", "told"),
    [
        ([("w", "float32")], "is no .name, type word, shape.: not enough values"),
        ([("w", "float32", 2)], "'int' object is not iterable"),
        ([("w", "float32", (2.0,))], "'float' object"),
        (None, "None is no .name, type word, shape."),
        ([("w", torch.float32, (2,))], r"'w' is torch.float32\[2\].* as \"bfloat16\""),
        ([("w", np.dtype("float32"), (2,))], r"'w' is dtype\('float32'\)\[2\]"),
        ([("w", ["float32"], (2,))], r"'w' is \['float32'\]\[2\]"),
    ],
)
def test_an_item_that_is_no_spec_is_refused_in_words(ends, specs, told) -> None:
    writer, reader = ends
    with pytest.raises(shmbridge.WeightsMismatch, match=told), writer.fill(1, specs):
        pytest.fail("it began")
    assert reader.version is None


def test_sizes_of_a_spec_may_be_of_numpy(ends) -> None:
    writer, reader = ends
    with writer.fill(1, [("w", "float32", np.array([2, 3]))]) as filling:
        filling.write("w", np.ones((2, 3), np.float32))
    assert reader.copy()[1]["w"].shape == (2, 3)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers_arrive_as_they_read(ends, dtype) -> None:
    writer, reader = ends
    plain = torch.arange(6).reshape(2, 3) + 1j * torch.ones(2, 3)
    source = {
        "conjugate": plain.to(dtype).conj(),
        "strided": plain.to(dtype).T,
        "negated": plain.to(dtype).conj().imag,
    }
    writer.publish(1, source.items())
    for name, array in reader.copy()[1].items():
        assert (array == source[name].resolve_conj().resolve_neg().numpy()).all()
