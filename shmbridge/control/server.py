"""Both sides of the control plane: conversations of a hub with the participants of its bridge.

Only conversations: shared state (policy version, pause, hub epoch) is in shared memory, and the data path
runs without any of this. The Unix socket lies in an owner-only directory on the shared-memory mount, so that
containers which share that mount can talk.

The hub owns a `ControlServer`; participants use a `ControlClient` or an `AsyncControlClient`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import stat
import threading
import time
import weakref
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, Self, TypeAlias

import msgspec
import zmq

from shmbridge._ext.header import Descriptor
from shmbridge.config import Run
from shmbridge.control import messages
from shmbridge.control.environments import Environments, EnvWeight, Evaluations, HubView, QueueView, fault_of
from shmbridge.control.messages import Answer, BadMessage, Refused, Register, Registered, Request, WaitForRun
from shmbridge.errors import Closed, NoConsumer, ShmBridgeError, ShmPermission
from shmbridge.segments import Joined, OneProcess, check_descriptors, remove_folder, socket_directory

# Beyond this the socket itself cuts a peer off; below it, an oversized message gets an answer.
CUT_OFF_BYTES = 16 * messages.MAX_MESSAGE_BYTES

_DESCRIPTORS = 12  # libzmq aborts the process when none is left

# A request without an answer is sent again: it may have died with the hub that read it.
REPEAT_AFTER_S = 0.5


def control_address(bridge: str) -> str:
    """Returns the ZeroMQ address of a bridge's control socket. Never blocks, touches nothing."""
    return f"ipc://{socket_directory(bridge) / 'control.sock'}"


class RequestRefused(ShmBridgeError):
    """The hub understood a request and refused it; `reason` is a constant of `shmbridge.control.messages`."""

    code = "SB407"

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message, hint=refused.hint)
        self.reason = refused.code


# What a conversation waits for: zmq.POLLOUT or zmq.POLLIN, and most seconds. Its result is whether it came.
_Wait: TypeAlias = tuple[int, float]
_Talk: TypeAlias = Generator[_Wait, bool, Answer]


class _Client(OneProcess):
    """The conversation, which never blocks: each client waits for what `_talk` yields."""

    def __init__(self, bridge: str, *, role: str, name: str) -> None:
        check_descriptors(_DESCRIPTORS, f"a control client of bridge {bridge!r}")
        self._bridge = bridge
        self._pid = os.getpid()
        self._hello = messages.Hello(role=role, name=name, pid=self._pid)
        self._ids = itertools.count(1)
        self._admitted: Register | None = None
        # If a context is collected before its socket, it waits for it for ever: the finalizer keeps both.
        context = zmq.Context()
        self._socket = socket = context.socket(zmq.DEALER)
        self._close = weakref.finalize(self, _destroy, context, socket, self._pid)
        # Send only to a connected hub: abandoned requests would pile up for the next one.
        socket.immediate = 1
        socket.linger = 0
        socket.reconnect_ivl = 20
        socket.reconnect_ivl_max = 500
        socket.maxmsgsize = CUT_OFF_BYTES
        socket.connect(control_address(bridge))

    def close(self) -> None:
        """Closes the socket. Never blocks; does nothing in a forked child."""
        self._close()

    def _talk(self, request: Request, timeout_s: float) -> _Talk:
        """One request and its answer; introduces us first to a hub that does not know us."""
        if os.getpid() != self._pid:
            raise Closed(
                f"this control client belongs to process {self._pid}, this is its child {os.getpid()}",
                hint="make a new client after fork",
            )
        deadline = time.monotonic() + timeout_s
        answer = yield from self._ask(request, deadline, timeout_s)
        if isinstance(answer, Refused) and answer.code == messages.UNKNOWN_ENV and self._admitted is not None:
            admission = yield from self._ask(self._admitted, deadline, timeout_s)
            if isinstance(admission, WaitForRun):
                return admission
            self._remember(self._admitted, admission)
            answer = yield from self._ask(request, deadline, timeout_s)
        if isinstance(answer, Refused):
            raise RequestRefused(answer)
        if isinstance(request, Register):
            self._remember(request, answer)
        return answer

    def _ask(self, request: Request, deadline: float, timeout_s: float) -> _Talk:
        request_id = next(self._ids)
        frames = messages.encode(request_id, request)
        while (left_s := deadline - time.monotonic()) > 0:
            if not (yield zmq.POLLOUT, left_s):
                continue
            try:
                self._socket.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:  # the hub left in between
                continue
            repeat_at = min(deadline, time.monotonic() + REPEAT_AFTER_S)
            while (left_s := repeat_at - time.monotonic()) > 0:
                if not (yield zmq.POLLIN, left_s):
                    continue
                try:
                    received = self._socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:  # announced, and lost with the hub that sent it
                    continue
                answer_id, answer = messages.decode_answer(received)
                if answer_id == request_id:
                    return messages.checked(request, answer)
        raise NoConsumer(
            f"no consumer of bridge {self._bridge!r} answered within {timeout_s:g} s",
            hint=f"start one, or look who holds the bridge: shmbridge inspect {self._bridge}",
        )

    def _remember(self, request: Register, answer: Answer) -> None:
        if isinstance(answer, Registered):
            self._admitted = msgspec.structs.replace(
                request, env_id=answer.env_id, wandb_name=answer.wandb_name
            )


class ControlClient(_Client):
    """Sends a request to the hub and waits for the answer. For one thread; in a forked child it raises
    `Closed`.
    """

    def hello(self, timeout_s: float = 5.0) -> Answer:
        """Introduces this participant, as `request` does."""
        return self.request(self._hello, timeout_s)

    def request(self, message: Request, timeout_s: float = 5.0) -> Answer:
        """Returns the hub's answer.

        Blocks until then or until the deadline. Survives a change of hub: the request goes to the present
        hub, and an environment that registered through this client is registered again first.

        Raises:
            NoConsumer: no hub answered in time.
            RequestRefused: the hub refused the request.
            BadMessage: the answer is not from a hub of this version.
        """
        talk = self._talk(message, timeout_s)
        try:
            flag, timeout_s = next(talk)
            while True:
                flag, timeout_s = talk.send(bool(self._socket.poll(_milliseconds(timeout_s), flag)))
        except StopIteration as end:
            answer: Answer = end.value
            return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class AsyncControlClient(_Client):
    """`ControlClient` for an event loop, which it never blocks. One request is in flight at a time."""

    def __init__(self, bridge: str, *, role: str, name: str) -> None:
        super().__init__(bridge, role=role, name=name)
        self._turn = asyncio.Lock()

    async def hello(self, timeout_s: float = 5.0) -> Answer:
        """Introduces this participant, as `request` does."""
        return await self.request(self._hello, timeout_s)

    async def request(self, message: Request, timeout_s: float = 5.0) -> Answer:
        """Returns the hub's answer, as `ControlClient.request` does; may be cancelled at any await."""
        async with self._turn:
            talk = self._talk(message, timeout_s)
            try:
                flag, timeout_s = next(talk)
                while True:
                    flag, timeout_s = talk.send(await self._poll(flag, timeout_s))
            except StopIteration as end:
                answer: Answer = end.value
                return answer

    async def _poll(self, flag: int, timeout_s: float) -> bool:
        from zmq.asyncio import Poller  # here, because the synchronous client does not need asyncio

        poller = Poller()
        poller.register(self._socket, flag)
        return bool(await poller.poll(_milliseconds(timeout_s)))


def _destroy(context: Any, socket: Any, pid: int) -> None:
    if os.getpid() == pid:
        socket.close(linger=0)
        context.destroy(linger=0)


def _milliseconds(timeout_s: float) -> int:
    return max(1, round(timeout_s * 1000))


log = logging.getLogger(__name__)

_NUMBERS = 1 << 31  # bound of the integers in environments' messages
_VERSIONS = 1 << 62
_HANDSHAKE_MS = 2000  # then a silent connection is cut off
_AFTER_STUMBLE_S = 0.1
# While a producer waits to begin a group: a death or a discard makes room without a notice.
_LOOK_AGAIN_S = 0.05
_GONE_AFTER_S = 5.0  # a waiting peer resends ten times in that time
_MOST_WAITING = 1024

_COUNTERS = ("requests_total", "malformed_total", "oversized_total", "refused_total")


class ControlServer:
    """Answers the participants of a bridge, in one daemon thread of the hub.

    Only the holder of the bridge's hub lock may construct one: it removes the socket of a dead predecessor.

    Attributes:
        evaluations: what environments measured, until somebody takes it.
    """

    def __init__(
        self,
        bridge: str,
        hub: HubView,
        queue: QueueView | None = None,
        *,
        first_env_id: int = 0,
        bell: threading.RLock | None = None,
    ) -> None:
        self._bridge = bridge
        self._hub = hub
        self._environments = Environments(hub, queue, first_env_id)
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._pid = os.getpid()
        self._closed = False
        self._closing = threading.Lock()
        # Held to ring, so that close() never closes the descriptor during a ring.
        self._bell = bell or threading.RLock()
        self.evaluations = Evaluations(self._bell)
        _make_private(socket_directory(bridge))
        self._context = zmq.Context()
        self._socket = self._bind()
        self._stop, self._again = (
            Descriptor(os.eventfd(0, os.EFD_CLOEXEC), kept_from_children=False) for _ in range(2)
        )
        # peer -> a request that has no answer yet, and when it came
        self._waiting: dict[bytes, tuple[list[bytes], float]] = {}
        self._look_again_s: float | None = None  # when, by time.monotonic()
        self._thread = Joined(self._serve, f"shmbridge-control-{bridge}")
        try:
            self._thread.start()
        except BaseException:
            self.close()
            raise

    def stats(self) -> dict[str, int]:
        """Returns counters of requests, and the number of known environments. Never blocks; any thread."""
        return {**self._counters, "environments": len(self._environments)}

    @property
    def shares(self) -> Mapping[str, EnvWeight]:
        """Returns the requests of the registered environments, by producer id: an immutable snapshot.

        Never blocks; any thread.
        """
        return self._environments.shares

    def look_again(self) -> None:
        """Retries the waiting requests, because something has changed. Never blocks; any thread."""
        with self._bell:
            if not self._closed:
                os.eventfd_write(self._again.fd, 1)

    def close(self) -> None:
        """Stops answering and removes the socket and its directory.

        Blocks until the answer being written is sent. Any thread; idempotent, and a repeated call finishes an
        interrupted one; does nothing in a forked child.
        """
        if os.getpid() != self._pid:
            return
        with self._closing:
            if self._again.fd < 0:
                return
            with self._bell:
                self._closed = True
            if self._stop.fd >= 0:
                os.eventfd_write(self._stop.fd, 1)
                self._thread.join()
                # An interrupted Context.destroy forgets the socket, and the next destroy waits for it for
                # ever.
                self._socket.close(linger=100)
                self._context.term()
                remove_folder(socket_directory(self._bridge))
                self._stop.close()
            self._again.close()

    def _bind(self) -> zmq.Socket[bytes]:
        address = control_address(self._bridge)
        Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
        socket = self._context.socket(zmq.ROUTER)
        socket.maxmsgsize = CUT_OFF_BYTES
        socket.handshake_ivl = _HANDSHAKE_MS
        socket.bind(address)
        return socket

    def _serve(self) -> None:
        poller = zmq.Poller()
        for each in (self._socket, self._stop.fd, self._again.fd):
            poller.register(each, zmq.POLLIN)
        while not self._closed:
            try:
                self._serve_once(dict(poller.poll(self._until_look_ms())))
            except Exception:  # the thread must outlive any peer
                log.exception("the control plane of bridge %r stumbled", self._bridge)
                time.sleep(_AFTER_STUMBLE_S)

    def _serve_once(self, ready: dict[Any, int]) -> None:
        if self._again.fd in ready:
            os.eventfd_read(self._again.fd)
        if self._again.fd in ready or self._until_look_ms() == 0:
            self._look_again_s = None
            now_s = time.monotonic()
            for peer, (frames, came_s) in list(self._waiting.items()):
                if now_s < came_s + _GONE_AFTER_S:
                    self._reply(peer, frames, came_s)
                else:
                    del self._waiting[peer]
        if self._socket in ready:
            peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            self._counters["requests_total"] += 1
            self._reply(peer, frames, time.monotonic())

    def _until_look_ms(self) -> int | None:
        return (
            None
            if self._look_again_s is None
            else max(math.ceil((self._look_again_s - time.monotonic()) * 1000), 0)
        )

    def _reply(self, peer: bytes, frames: list[bytes], came_s: float) -> None:
        request_id, answer = self._answer(frames)
        if answer is None:
            # One outstanding request per peer; a resend replaces it.
            self._waiting[peer] = frames, came_s
            if len(self._waiting) > _MOST_WAITING:  # mostly peers that are gone; a live one asks again
                del self._waiting[next(iter(self._waiting))]
            return
        self._waiting.pop(peer, None)
        with contextlib.suppress(zmq.Again):  # a peer that does not read its answers loses them
            self._socket.send_multipart([peer, *self._encode(request_id, answer)], zmq.NOBLOCK)

    def _encode(self, request_id: int, answer: Answer) -> list[bytes]:
        try:
            return messages.encode(request_id, answer)
        except Exception as error:  # for example a number beyond 64 bits
            log.exception("the answer %s cannot be said", answer)
            self._counters["refused_total"] += 1
            said = f"the answer cannot be said: {type(error).__name__}"
            return messages.encode(request_id, Refused(messages.INTERNAL, said, "see the consumer's log"))

    def _answer(self, frames: list[bytes]) -> tuple[int, Answer | None]:
        """Returns (request id, answer); None: not yet. Never raises: the thread must outlive any peer."""
        try:
            request_id, request = messages.decode_request(frames)
        except BadMessage as bad:
            self._counters["oversized_total" if bad.reason == messages.OVERSIZED else "malformed_total"] += 1
            return bad.request_id, Refused(bad.reason, bad.message, bad.hint)
        try:
            answer = self._do(request)
        except ValueError as wrong:
            answer = Refused(messages.BAD_VALUE, str(wrong), "correct the value")
        except Exception as error:
            log.exception("control request %s failed", request)
            answer = Refused(messages.INTERNAL, f"{type(error).__name__}: {error}", "see the consumer's log")
        self._counters["refused_total"] += isinstance(answer, Refused)
        return request_id, answer

    def _do(self, request: Request) -> Answer | None:
        hub = self._hub
        match request:
            case messages.StatusRequest(env_id):
                known = env_id in self._environments
                return self._environments.status(env_id) if known else _unknown(env_id)
            case Register():
                return _fault_of(request) or self._environments.admit(request)
            case messages.Hello():
                return messages.Welcome(os.getpid(), hub.hub_epoch, hub.policy_version, hub.run)
            case messages.RunInfoRequest():
                return messages.RunInfo(hub.run, hub.current_step, hub.hub_epoch, hub.refused_lanes())
            case messages.AnnounceRun(run):
                if (odd := _fault_of_run(run)) is not None:
                    return odd
                if run != hub.run:  # a repeated announcement must not restart the run
                    hub.announce_run(run)
            case messages.SetPolicyVersion(version):
                if version >= _VERSIONS:
                    raise ValueError(f"policy version {version} is not below {_VERSIONS}")
                hub.publish_policy_version(version)
            case messages.Pause():
                hub.pause()
            case messages.Resume():
                hub.resume()
            case messages.Drain():
                hub.drain()
            case messages.NextShare():
                return hub.next_share(request)
            case messages.SharesDone():
                return hub.shares_done(request)
            case messages.BeginGroup():
                if (answer := hub.begin_group(request)) is None and self._look_again_s is None:
                    self._look_again_s = time.monotonic() + _LOOK_AGAIN_S
                return answer
            case messages.Evaluated():
                if (odd := fault_of(request)) is not None:
                    return odd
                self.evaluations.note(request)
            case messages.Goodbye(env_id):
                self._environments.forget(env_id)
        return messages.Ack()


def _make_private(directory: Path) -> None:
    """Makes the directory ours alone, or raises: a process that may write there could answer in the hub's
    place.
    """
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ShmPermission(
            f"{directory} is not ours alone (owner {found.st_uid}, mode {found.st_mode:o})",
            hint="choose another bridge name, or let its owner remove it",
        )
    directory.chmod(0o700)


def _unknown(env_id: int) -> Refused:
    return Refused(messages.UNKNOWN_ENV, f"no environment {env_id} is registered here", "register again")


def _fault_of(wish: Register) -> Refused | None:
    """Returns the refusal of an environment whose numbers would make the steering arithmetic meaningless."""
    share = wish.min_batch_allocation
    if not (1 <= wish.group_size < _NUMBERS and 0 <= wish.max_token_length < _NUMBERS):
        fault = f"group_size {wish.group_size}, max_token_length {wish.max_token_length}"
    elif wish.env_id is not None and not 0 <= wish.env_id < _NUMBERS:
        fault = f"env_id {wish.env_id}"
    elif share is not None and not 0.0 <= share <= 1.0:
        fault = f"min_batch_allocation {share} is not within 0 and 1"
    elif not -1e12 < wish.weight < 1e12:  # also true for NaN
        fault = f"weight {wish.weight}"
    else:
        return None
    return Refused(
        messages.BAD_VALUE, f"cannot register {wish.desired_name!r}: {fault}", "correct its config"
    )


def _fault_of_run(run: Run) -> Refused | None:
    """Returns the refusal of a run whose numbers are out of range."""
    for name in ("batch_size", "max_token_len", "num_steps", "starting_step", "save_checkpoint_interval"):
        if not -_NUMBERS < getattr(run, name) < _NUMBERS:
            return Refused(
                messages.BAD_VALUE,
                f"cannot announce a run with {name} {getattr(run, name)}",
                "correct the run",
            )
    return None
