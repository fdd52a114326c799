"""The messages between participants of a bridge and its hub over the control socket, and their encoding.

A request and its answer are two frames each: a header (protocol number, request id) and a msgpack body, told
apart by its `kind`. The header is readable across protocol numbers, so that a peer of another version gets an
error. Every request is idempotent.

Used by `shmbridge.control.server` and `client`; the structs are public.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import msgspec

from shmbridge.config import Run
from shmbridge.errors import ShmBridgeError

PROTOCOL = 1

T = TypeVar("T")

# The largest message either side accepts. The longest real one is a manifest: some 20 bytes a record and 50 a
# lane.
MAX_MESSAGE_BYTES = 1024 * 1024

# Of one `Evaluated`.
MOST_METRICS, LONGEST_NAME = 256, 128

# Codes of `Refused`, for programs; the text beside them is for people.
MALFORMED = "malformed"
OVERSIZED = "oversized"
OTHER_PROTOCOL = "other-protocol"
UNKNOWN_ENV = "unknown-env"
BAD_VALUE = "bad-value"
INTERNAL = "internal"
NO_RANKS = "no-ranks"
NO_MORE_BATCHES = "no-more-batches"
OTHER_EPOCH = "other-epoch"


class Message(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag=str.lower):
    """Anything that travels over the control socket."""


# --- requests ---------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """A participant introduces itself; answered with `Welcome`."""

    role: str
    name: str
    pid: int
    producer_id: str = ""
    env_name: str = ""


class Register(Message, frozen=True):
    """An environment asks to be admitted; answered with `Registered`, or `WaitForRun` before a run is
    announced.

    A hub answers the same `producer_id` with the same `env_id`. A later hub has no table yet: with `env_id`
    and `wandb_name` of an earlier admission an environment keeps them.
    """

    desired_name: str
    max_token_length: int
    group_size: int
    weight: float = 1.0
    min_batch_allocation: float | None = None  # share of a batch, 0 to 1
    producer_id: str = ""
    env_id: int | None = None
    wandb_name: str = ""


class StatusRequest(Message, frozen=True):
    """Asks for the numbers an environment steers by; answered with `Status`."""

    env_id: int


class RunInfoRequest(Message, frozen=True):
    """Asks for the announced run; answered with `RunInfo`."""


class AnnounceRun(Message, frozen=True):
    """A learner that is not the hub announces its run; the last announcement holds."""

    run: Run


class SetPolicyVersion(Message, frozen=True):
    """A learner that is not the hub has published weights."""

    version: int


class Pause(Message, frozen=True):
    """Asks environments to begin no new groups."""


class Resume(Message, frozen=True):
    """Ends a `Pause`."""


class Drain(Message, frozen=True):
    """Asks environments to begin no new groups, because the run ends once the lanes are empty."""


class Goodbye(Message, frozen=True):
    """An environment leaves: its weight and its share of a batch are free again."""

    env_id: int


class Evaluated(Message, frozen=True):
    """What an environment measured when it evaluated the policy, by name.

    `number` rises from one evaluation of a producer to its next: one that is sent again is noted once.
    `policy_version` and `step` are those when it began, -1 if unknown. See `Consumer.take_evaluations`.
    """

    producer_id: str
    env_name: str
    number: int
    metrics: dict[str, float]
    policy_version: int = -1
    step: int = -1


class NextShare(Message, frozen=True):
    """A learner rank asks for its next share; answered with `Manifest`, once there is one, or `NoMoreShares`.

    `member` is one incarnation of the rank, rising from one to the next. `after` is the number of the last
    share received (-1: none yet), so that a lost answer is repeated.
    """

    rank: int
    world_size: int
    member: int
    epoch: int
    after: int = -1


class SharesDone(Message, frozen=True):
    """A learner rank no longer reads these shares; answered with `Ack`.

    `failed` names shares that it still reads, and whose step failed: number of the share, and the places of
    the groups at fault in it, all if there are none.
    """

    rank: int
    member: int
    epoch: int
    numbers: list[int]
    failed: dict[int, list[int]] = {}


class BeginGroup(Message, frozen=True):
    """A producer asks for one ticket more than the `running` it holds; answered with `MayBegin`, once there
    is room.

    With `wait` False it is answered at once, possibly with `Full`.
    """

    lane: str
    running: int
    wait: bool = True


# --- answers ----------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """The hub introduces itself."""

    hub_pid: int
    hub_epoch: int
    policy_version: int
    run: Run | None = None
    protocol: int = PROTOCOL


class Registered(Message, frozen=True):
    """An environment is admitted."""

    env_id: int
    wandb_name: str
    run: Run
    current_step: int
    hub_epoch: int
    policy_version: int


class WaitForRun(Message, frozen=True):
    """There is a hub, but no run is announced yet."""

    hub_epoch: int


class Status(Message, frozen=True):
    """The numbers an environment steers by; queues count groups of the asking environment's size."""

    current_step: int
    queue_groups: int
    self_queue_groups: int
    unallocated_fraction: float
    max_group_size: int
    env_weight: float
    policy_version: int
    hub_epoch: int
    paused: bool = False
    draining: bool = False


class RunInfo(Message, frozen=True):
    """The announced run, if there is one; `refused_lanes`: names of lanes that the hub will not read, and
    why.
    """

    run: Run | None
    current_step: int
    hub_epoch: int
    refused_lanes: dict[str, str] = {}


class RecordPlace(msgspec.Struct, frozen=True, array_like=True):
    """The place of a record: `lane` is an index into `Manifest.lanes`; the rest must agree with the lane."""

    lane: int
    slot: int
    generation: int
    sequence: int
    redelivered: bool


class GroupPlaces(msgspec.Struct, frozen=True, array_like=True):
    """A whole group: its size in rows, and its records."""

    size: int
    records: list[RecordPlace]


class Manifest(Message, frozen=True):
    """One rank's share of a batch; docs/reference/manifest.md describes each field."""

    epoch: int
    number: int
    step: int
    rank: int
    world_size: int
    mode: str
    reissued: bool
    policy_version: int
    batch_groups: int
    batch_rows: int
    batch_tokens: int
    lanes: list[str]
    groups: list[GroupPlaces]


class MayBegin(Message, frozen=True):
    """Grants one ticket, if the producer's lane shows it before `until_ns` (CLOCK_MONOTONIC) and the hub is
    still the same.
    """

    hub_epoch: int
    policy_version: int
    until_ns: int


class Full(Message, frozen=True):
    """No ticket now: `running` and `committed` groups are under way, and `limit` is the most allowed."""

    limit: int
    running: int
    committed: int


class NoMoreShares(Message, frozen=True):
    """The bridge was drained, and every share has been handed out."""


class Ack(Message, frozen=True):
    """The request was done."""


class Refused(Message, frozen=True):
    """The request was refused; `code` is one of the constants of this module."""

    code: str
    message: str
    hint: str = ""


Request: TypeAlias = (
    Hello
    | Register
    | StatusRequest
    | RunInfoRequest
    | AnnounceRun
    | SetPolicyVersion
    | Pause
    | Resume
    | Drain
    | Goodbye
    | Evaluated
    | NextShare
    | SharesDone
    | BeginGroup
)
Answer: TypeAlias = (
    Welcome
    | Registered
    | WaitForRun
    | Status
    | RunInfo
    | Manifest
    | NoMoreShares
    | MayBegin
    | Full
    | Ack
    | Refused
)


# --- the bytes --------------------------------------------------------------------------------------------


class BadMessage(ShmBridgeError, ValueError):
    """Frames that are not a message of this protocol."""

    code = "SB406"

    def __init__(self, reason: str, message: str, request_id: int = 0) -> None:
        super().__init__(message, hint="run the same shmbridge version on both sides")
        self.reason = reason
        self.request_id = request_id


class Header(msgspec.Struct, frozen=True, array_like=True):
    """The first frame. Its shape never changes; everything else may change with the protocol number."""

    protocol: int
    request_id: int


# Errors of decoding foreign bytes: bad structure, bad UTF-8, endless nesting.
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)

_encoder = msgspec.msgpack.Encoder()
_header = msgspec.msgpack.Decoder(Header)
_request = msgspec.msgpack.Decoder(Request)
_answer = msgspec.msgpack.Decoder(Answer)


def encode(request_id: int, message: Request | Answer) -> list[bytes]:
    """Returns the two frames of a message. Never blocks."""
    return [_encoder.encode(Header(PROTOCOL, request_id)), _encoder.encode(message)]


def decode_request(frames: Sequence[bytes]) -> tuple[int, Request]:
    """Returns the request id and the request of two frames, or raises `BadMessage`. Never blocks."""
    return _decode(frames, _request, "request")


def decode_answer(frames: Sequence[bytes]) -> tuple[int, Answer]:
    """Returns the request id and the answer of two frames, or raises `BadMessage`. Never blocks."""
    return _decode(frames, _answer, "answer")


def _decode(frames: Sequence[bytes], decoder: msgspec.msgpack.Decoder[T], kind: str) -> tuple[int, T]:
    request_id, body = _open(frames)
    try:
        return request_id, decoder.decode(body)
    except _UNREADABLE as error:
        raise BadMessage(MALFORMED, f"no {kind} of protocol {PROTOCOL}: {error}", request_id) from error


_ANSWERS: dict[type[Request], tuple[type[Answer], ...]] = {
    Hello: (Welcome,),
    Register: (Registered, WaitForRun),
    StatusRequest: (Status,),
    RunInfoRequest: (RunInfo,),
    NextShare: (Manifest, NoMoreShares),
    BeginGroup: (MayBegin, Full),
}


def checked(request: Request, answer: Answer) -> Answer:
    """Returns the answer, or raises `BadMessage` if its kind does not answer this request."""
    if not isinstance(answer, (Refused, *_ANSWERS.get(type(request), (Ack,)))):
        raise BadMessage(MALFORMED, f"{type(request).__name__} was answered by {type(answer).__name__}")
    return answer


def _open(frames: Sequence[bytes]) -> tuple[int, bytes]:
    size = sum(map(len, frames))
    if size > MAX_MESSAGE_BYTES:
        raise BadMessage(OVERSIZED, f"a message of {size} bytes, at most {MAX_MESSAGE_BYTES} are read")
    if len(frames) != 2:
        raise BadMessage(MALFORMED, f"a message of {len(frames)} frames instead of 2")
    try:
        header = _header.decode(frames[0])
    except _UNREADABLE as error:
        raise BadMessage(MALFORMED, f"no message header: {error}") from error
    if header.protocol != PROTOCOL:
        said = f"the peer speaks protocol {header.protocol}, this side {PROTOCOL}"
        raise BadMessage(OTHER_PROTOCOL, said, header.request_id)
    return header.request_id, frames[1]
