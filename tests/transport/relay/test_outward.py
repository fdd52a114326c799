"""Weights read on one node and written on another: whole or not at all, in order, and once."""

import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from relaying import exchange

from shmbridge.errors import ConsumerTaken, FillingOver, LayoutMismatch, WeightsMismatch
from shmbridge.relay import weights as outward
from shmbridge.relay.weights import Head, WeightsReceiver, WeightsSender
from shmbridge.weights import TensorSpec, WeightsReader, WeightsWriter

PART = 1000  # no multiple of anything: parts begin within tensors, and within values


def model(version: int) -> dict[str, torch.Tensor]:
    seed = torch.Generator().manual_seed(version)
    return {
        "embedding": torch.randn(70, 33, generator=seed),
        "bias": torch.randn(5, generator=seed).bfloat16(),
        "none": torch.zeros(0, 3),
        "quantized": torch.randn(900, generator=seed).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(version),
        "mask": torch.tensor([True, False, True]),
    }


@pytest.fixture
def writer(bridge) -> Iterator[WeightsWriter]:
    with WeightsWriter(bridge) as writer:
        yield writer


@pytest.fixture
def there(bridge, writer) -> Iterator[WeightsSender]:
    with WeightsSender(bridge, PART) as there:
        yield there


@pytest.fixture
def inward(elsewhere) -> Iterator[WeightsReceiver]:
    with WeightsReceiver(elsewhere) as inward:
        yield inward


@pytest.fixture
def engine(elsewhere) -> Iterator[WeightsReader]:
    """What reads the weights of the other node."""
    with WeightsReader(elsewhere) as engine:
        yield engine


def send(there: WeightsSender, inward: WeightsReceiver, parts: Iterable[int] | None = None) -> Head:
    """Sends the newest version, all parts or only these, in that order, and does not commit it."""
    with there.read() as offer:
        head = outward.decode_head(outward.encode_head(offer.head))
        assert inward.begin(head)
        for number in range(head.parts) if parts is None else parts:
            inward.write(head.transfer, number, np.array(offer.part(number)))
    return head


def is_model(engine: WeightsReader, version: int) -> bool:
    """Whether the newest version there is that one, bit by bit."""
    with engine.lease() as lease:
        assert lease.version == version
        mine = model(version)
        assert lease.dtypes == {name: str(each.dtype).removeprefix("torch.") for name, each in mine.items()}
        return all(
            lease.tensors[name].tobytes() == each.reshape(-1).view(torch.uint8).numpy().tobytes()
            and lease.tensors[name].shape == tuple(each.shape)
            for name, each in mine.items()
            if each.numel()
        )


def test_versions_come_as_they_are(writer, there, inward, engine):
    assert (there.version, inward.version) == (-1, -1)
    for version in (0, 1, 7):  # the last one's parts in another order
        writer.publish(version, model(version).items())
        with there.read() as offer:
            numbers = range(offer.head.parts)
        head = send(there, inward, reversed(numbers) if version == 7 else numbers)
        assert head.parts > 5
        assert engine.version != version
        assert inward.commit(head.transfer) == there.version == inward.version == version
        assert is_model(engine, version)


def test_wait_is_woken_by_a_version(writer, there):
    assert not there.wait(-1, 0.01)
    writer.publish(3, model(3).items())
    assert there.wait(-1, 5)
    assert not there.wait(3, 0.01)


def test_a_newer_version_replaces_one_under_way(writer, there, inward, engine):
    writer.publish(1, model(1).items())
    inward.commit(send(there, inward).transfer)
    writer.publish(2, model(2).items())
    old = send(there, inward, [0, 1])
    writer.publish(3, model(3).items())
    new = send(there, inward)
    with pytest.raises(FillingOver):
        inward.write(old.transfer, 2, np.zeros(PART, np.uint8))
    with pytest.raises(FillingOver):
        inward.commit(old.transfer)
    assert is_model(engine, 1)
    inward.commit(new.transfer)
    assert is_model(engine, 3)


def test_versions_never_go_back(writer, there, inward, engine, elsewhere):
    for version in (1, 2):
        writer.publish(version, model(version).items())
        head = send(there, inward)
        inward.commit(head.transfer)
    again = msgspec.structs.replace(head, transfer="another")
    assert not inward.begin(again)
    assert not inward.begin(msgspec.structs.replace(again, version=0))
    assert is_model(engine, 2)
    inward.close()
    with WeightsReceiver(elsewhere) as successor:
        assert successor.version == 2
        assert not successor.begin(again)
        writer.publish(3, model(3).items())
        successor.commit(send(there, successor).transfer)
    assert is_model(engine, 3)


@pytest.mark.parametrize("parts", [[0, 1, 2], [0, 0, *range(1, 11)]], ids=["missing", "twice"])
def test_what_is_not_whole_is_no_version(writer, there, inward, engine, parts):
    writer.publish(1, model(1).items())
    inward.commit(send(there, inward).transfer)
    writer.publish(2, model(2).items())
    head = send(there, inward, parts)
    with pytest.raises(WeightsMismatch, match="not whole"):
        inward.commit(head.transfer)
    assert is_model(engine, 1)
    inward.commit(send(there, inward).transfer)
    assert is_model(engine, 2)


def test_tensors_in_another_order_find_their_places(writer, there, inward, engine, bridge):
    """A learner that begins again may give them in another order than the segment elsewhere has."""
    writer.publish(1, reversed(model(1).items()))
    inward.commit(send(there, inward).transfer)
    writer.close()
    with WeightsWriter(bridge) as other:
        other.publish(2, [("another model", torch.zeros(3))])
    with WeightsWriter(bridge) as third:
        third.publish(3, model(3).items())
        inward.commit(send(there, inward).transfer)
    assert is_model(engine, 3)


@pytest.mark.parametrize("same_relay", [True, False])
def test_another_model_takes_the_place(writer, there, elsewhere, engine, bridge, same_relay):
    writer.publish(1, model(1).items())
    inward = WeightsReceiver(elsewhere)
    inward.commit(send(there, inward).transfer)
    writer.close()
    if not same_relay:
        inward.close()
        inward = WeightsReceiver(elsewhere)
    with WeightsWriter(bridge) as other, inward:
        other.publish(2, [("w", torch.arange(4000.0))])
        inward.commit(send(there, inward).transfer)
    with engine.lease() as lease:
        assert (lease.version, lease.tensors["w"].tolist()) == (2, list(range(4000)))


def test_a_relay_killed_in_the_middle_leaves_the_version_before(
    writer, there, elsewhere, engine, tmp_path: Path
):
    writer.publish(1, model(1).items())
    with WeightsReceiver(elsewhere) as inward:
        inward.commit(send(there, inward).transfer)
    writer.publish(2, model(2).items())
    with there.read() as offer:
        (tmp_path / "head").write_bytes(outward.encode_head(offer.head))
        for number in range(3):
            offer.part(number).tofile(tmp_path / str(number))
    files = [tmp_path / name for name in ("head", "0", "1", "2")]
    command = [sys.executable, Path(__file__).parent / "write_weights.py", elsewhere, *files]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as relay:
        assert relay.stdout.readline() == "written\n"
        assert is_model(engine, 1)
        with pytest.raises(ConsumerTaken, match=str(relay.pid)):
            WeightsReceiver(elsewhere)
        relay.kill()
    assert is_model(engine, 1)
    with WeightsReceiver(elsewhere) as successor:
        assert successor.version == 1
        successor.commit(send(there, successor).transfer)
    assert is_model(engine, 2)


def test_what_another_build_sends_is_refused(writer, there, inward):
    writer.publish(1, model(1).items())
    with there.read() as offer:
        head, part = offer.head, np.array(offer.part(0))
    replace = msgspec.structs.replace
    with pytest.raises(LayoutMismatch, match=f"layout {head.layout + 1}, and this node has {head.layout}"):
        outward.decode_head(outward.encode_head(replace(head, layout=head.layout + 1)))
    with pytest.raises(WeightsMismatch, match="no head"):
        outward.decode_head(b"\x93\x01\x02\x03")
    for wrong in (
        replace(head, part_bytes=0),
        replace(head, tensors=head.tensors[::-1]),
        replace(head, tensors=[*head.tensors, replace(head.tensors[0], offset=head.slot_bytes)]),
        replace(head, tensors=[TensorSpec("w", "complex7", (3,), 0, 24)]),
    ):
        with pytest.raises(WeightsMismatch):
            inward.begin(wrong)
    assert inward.begin(head)
    for number, wrong in ((0, part[1:]), (-1, part), (head.parts - 1, part), (head.parts, part)):
        with pytest.raises(WeightsMismatch, match="part"):
            inward.write(head.transfer, number, wrong)
    with pytest.raises(FillingOver):
        inward.write("another", 0, part)
    longer = replace(head.tensors[0], size_bytes=2 * head.tensors[0].size_bytes)
    assert inward.begin(replace(head, tensors=[longer], transfer="lies"))
    with pytest.raises(WeightsMismatch, match="it has 9240"):
        for number in range(head.parts):
            inward.write("lies", number, part[: min(PART, head.slot_bytes - number * PART)])
    inward.abandon()
    assert inward.version == -1


def test_a_policy_version_waits_for_its_weights(
    writer, there, inward, make_source, make_destination, put_there, consumer
):
    """An environment elsewhere hears of a version once its weights are whole there."""
    source, destination, producer = make_source(), make_destination(weights=True), put_there()

    def heard(announced: int) -> int:
        if announced > consumer.policy_version:
            consumer.publish_policy_version(announced)
        exchange(source, destination)
        return producer.policy_version

    assert heard(1) == 1  # the learner has no weights yet
    writer.publish(2, model(2).items())
    assert heard(2) == 1
    inward.commit(send(there, inward).transfer)
    assert heard(2) == 2
    assert heard(4) == 4  # versions 3 and 4 changed no weights
    writer.publish(5, model(5).items())
    assert heard(5) == 4
    under_way = send(there, inward)
    assert heard(5) == 4
    inward.commit(under_way.transfer)
    writer.publish(6, model(6).items())
    assert heard(5) == heard(6) == 5
