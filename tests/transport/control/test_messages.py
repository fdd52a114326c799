"""The bytes of the control plane: every message survives them, and no other bytes are taken for one."""

import contextlib
import random

import msgspec
import pytest

from shmbridge.config import Run
from shmbridge.control import messages
from shmbridge.control.messages import BadMessage

RUN = Run(batch_size=16, max_token_len=2048, num_steps=50, checkpoint_dir="/ckpt", wandb_project="p")

REQUESTS = [
    messages.Hello(role="env", name="gsm8k_0", pid=4711, producer_id="a1", env_name="gsm8k"),
    messages.Register(
        desired_name="gsm8k",
        max_token_length=512,
        group_size=8,
        weight=0.5,
        min_batch_allocation=0.25,
        producer_id="a1",
    ),
    messages.StatusRequest(env_id=3),
    messages.RunInfoRequest(),
    messages.AnnounceRun(RUN),
    messages.SetPolicyVersion(version=2**40),
    messages.Pause(),
    messages.Resume(),
    messages.Drain(),
    messages.Goodbye(env_id=3),
    messages.Evaluated("a1", "gsm8k", 2, {"eval/percent_correct": 0.5}, policy_version=7, step=25),
]
ANSWERS = [
    messages.Welcome(hub_pid=1, hub_epoch=2, policy_version=-1, run=RUN),
    messages.Registered(
        env_id=0, wandb_name="gsm8k_0", run=RUN, current_step=7, hub_epoch=2, policy_version=4
    ),
    messages.WaitForRun(hub_epoch=2),
    messages.Status(7, 3, 2, 0.75, 8, 0.5, policy_version=4, hub_epoch=2, paused=True),
    messages.RunInfo(run=None, current_step=0, hub_epoch=2),
    messages.Ack(),
    messages.Refused(messages.UNKNOWN_ENV, "no environment 3", "register again"),
]


@pytest.mark.parametrize("message", REQUESTS, ids=lambda message: type(message).__name__)
def test_every_request_survives_the_wire(message: messages.Request) -> None:
    assert messages.decode_request(messages.encode(9, message)) == (9, message)


@pytest.mark.parametrize("message", ANSWERS, ids=lambda message: type(message).__name__)
def test_every_answer_survives_the_wire(message: messages.Answer) -> None:
    assert messages.decode_answer(messages.encode(9, message)) == (9, message)


def test_an_answer_is_no_request() -> None:
    with pytest.raises(BadMessage) as caught:
        messages.decode_request(messages.encode(9, messages.Ack()))
    assert caught.value.reason == messages.MALFORMED
    assert caught.value.request_id == 9


def test_a_field_of_another_type_is_refused_by_its_path() -> None:
    header, _ = messages.encode(1, messages.Pause())
    body = msgspec.msgpack.encode({"kind": "statusrequest", "env_id": "three"})
    with pytest.raises(BadMessage, match="env_id"):
        messages.decode_request([header, body])


def test_another_protocol_is_named_even_if_its_body_cannot_be_read() -> None:
    header = msgspec.msgpack.encode([messages.PROTOCOL + 1, 9])
    sides = f"protocol {messages.PROTOCOL + 1}, this side {messages.PROTOCOL}"
    with pytest.raises(BadMessage, match=sides) as caught:
        messages.decode_request([header, b"\xc1 not msgpack"])
    assert caught.value.reason == messages.OTHER_PROTOCOL
    assert caught.value.request_id == 9


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_message_has_two_frames(count: int) -> None:
    frames = (messages.encode(9, messages.Pause()) * 2)[:count]
    with pytest.raises(BadMessage, match=f"{count} frames"):
        messages.decode_request(frames)


def test_an_oversized_message_is_refused_unread() -> None:
    huge = messages.encode(9, messages.Hello(role="x" * messages.MAX_MESSAGE_BYTES, name="", pid=1))
    with pytest.raises(BadMessage) as caught:
        messages.decode_request(huge)
    assert caught.value.reason == messages.OVERSIZED


def test_no_bytes_raise_anything_but_bad_message() -> None:
    """5000 mutations of real messages and pure noise; the seed is fixed."""
    rng = random.Random(20)
    for _ in range(5000):
        frames = [bytearray(frame) for frame in messages.encode(rng.randrange(1000), rng.choice(REQUESTS))]
        for frame in frames:
            for _ in range(rng.randrange(4)):
                frame[rng.randrange(len(frame))] = rng.randrange(256)
        if rng.random() < 0.2:
            frames = [bytearray(rng.randbytes(rng.randrange(40))) for _ in range(rng.randrange(4))]
        for decode in (messages.decode_request, messages.decode_answer):
            with contextlib.suppress(BadMessage):
                decode([bytes(frame) for frame in frames])
