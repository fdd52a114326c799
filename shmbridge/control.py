"""The control plane: conversations between participants of a bridge and its hub, over one Unix socket.

Only conversations: what everybody must agree on (policy version, pause, hub epoch) is in shared memory, and
the data path runs without any of this. The socket lies in an owner-only directory on the shared-memory mount,
so that containers which share that mount can talk.

Knows nothing of lanes and records. The hub owns a `ControlServer`; everybody else uses a client.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import stat
import threading
import time
import weakref
from collections.abc import Generator
from pathlib import Path
from typing import Any, Self, TypeAlias

import msgspec
import zmq

from shmbridge import messages
from shmbridge.environments import Environments, HubView
from shmbridge.errors import Closed, NoConsumer, ShmBridgeError, ShmPermission
from shmbridge.messages import Answer, BadMessage, Refused, Register, Registered, Request, WaitForRun
from shmbridge.segment import socket_directory

__all__ = [
    "AsyncControlClient",
    "ControlClient",
    "ControlServer",
    "HubView",
    "RequestRefused",
    "control_address",
]

log = logging.getLogger(__name__)

# A peer that sends more than this is cut off by the socket itself; below it, it gets an answer.
CUT_OFF_BYTES = 16 * messages.MAX_MESSAGE_BYTES

# A request without an answer is sent again: it may have died with the hub that read it.
REPEAT_AFTER_S = 0.5

_COUNTERS = ("requests_total", "malformed_total", "oversized_total", "refused_total")


def control_address(bridge: str) -> str:
    """Return the ZeroMQ address of a bridge's control socket. Never blocks, touches nothing."""
    return f"ipc://{socket_directory(bridge) / 'control.sock'}"


class RequestRefused(ShmBridgeError):
    """The hub understood a request and will not do it; `reason` is a constant of `shmbridge.messages`."""

    code = "SB407"

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message, hint=refused.hint)
        self.reason = refused.code


# --- the hub's side ---------------------------------------------------------------------------------------


class ControlServer:
    """Answers the participants of a bridge, in one daemon thread of the hub.

    Only the holder of the bridge's hub lock may construct one: it removes the socket of a dead predecessor.
    """

    def __init__(self, bridge: str, hub: HubView) -> None:
        self._bridge = bridge
        self._hub = hub
        self._environments = Environments(hub)
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._pid = os.getpid()
        self._closed = False
        _make_private(socket_directory(bridge))
        self._context = zmq.Context()
        self._socket = self._bind()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name=f"shmbridge-control-{bridge}", daemon=True)
        self._thread.start()

    def stats(self) -> dict[str, int]:
        """Return counters of requests, and how many environments are known. Never blocks; any thread."""
        return {**self._counters, "environments": len(self._environments)}

    def close(self) -> None:
        """Stop answering and remove the socket and its directory.

        Blocks until the answer being written is out. Any thread; more than once is fine; does nothing in a
        forked child.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)
        self._context.destroy(linger=100)
        shutil.rmtree(socket_directory(self._bridge), ignore_errors=True)

    def _bind(self) -> zmq.Socket[bytes]:
        address = control_address(self._bridge)
        Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
        socket = self._context.socket(zmq.ROUTER)
        socket.maxmsgsize = CUT_OFF_BYTES
        socket.bind(address)
        return socket

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stop, zmq.POLLIN)
        while self._stop not in dict(poller.poll()):
            peer, *frames = self._socket.recv_multipart()
            request_id, answer = self._answer(frames)
            with contextlib.suppress(zmq.Again):  # a peer that does not read its answers loses them
                self._socket.send_multipart([peer, *messages.encode(request_id, answer)], zmq.NOBLOCK)

    def _answer(self, frames: list[bytes]) -> tuple[int, Answer]:
        """Never raises: the thread must outlive any peer."""
        self._counters["requests_total"] += 1
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

    def _do(self, request: Request) -> Answer:
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
                return messages.RunInfo(hub.run, hub.current_step, hub.hub_epoch)
            case messages.AnnounceRun(run):
                if run != hub.run:  # said again, it must not begin the run again
                    hub.announce_run(run)
            case messages.SetPolicyVersion(version):
                hub.publish_policy_version(version)
            case messages.Pause():
                hub.pause()
            case messages.Resume():
                hub.resume()
            case messages.Drain():
                hub.drain()
            case messages.Goodbye(env_id):
                self._environments.forget(env_id)
        return messages.Ack()


def _make_private(directory: Path) -> None:
    """Make it ours and ours alone, or refuse: whoever may write there could answer in the hub's place."""
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
    """Return the refusal of an environment whose numbers would make the steering arithmetic meaningless."""
    share = wish.min_batch_allocation
    if wish.group_size < 1 or wish.max_token_length < 0:
        fault = f"group_size {wish.group_size}, max_token_length {wish.max_token_length}"
    elif share is not None and not 0.0 <= share <= 1.0:
        fault = f"min_batch_allocation {share} is not within 0 and 1"
    elif not -1e12 < wish.weight < 1e12:  # so for NaN too
        fault = f"weight {wish.weight}"
    else:
        return None
    return Refused(
        messages.BAD_VALUE, f"cannot register {wish.desired_name!r}: {fault}", "correct its config"
    )


# --- everybody else's side --------------------------------------------------------------------------------


class _Send(msgspec.Struct, frozen=True):
    """Put these frames on the wire once a hub is connected; performed: True."""

    frames: list[bytes]
    timeout_s: float


class _Receive(msgspec.Struct, frozen=True):
    """Take the next frames off the wire; after the timeout: None."""

    timeout_s: float


_Step: TypeAlias = _Send | _Receive
_Performed: TypeAlias = bool | list[bytes] | None
_Talk: TypeAlias = Generator[_Step, _Performed, Answer]


class _Client:
    """The conversation, without doing any of it: each client performs the steps that `_talk` asks for."""

    def __init__(self, bridge: str, role: str, name: str) -> None:
        self._bridge = bridge
        self._pid = os.getpid()
        self._hello = messages.Hello(role=role, name=name, pid=self._pid)
        self._ids = itertools.count(1)
        self._admitted: Register | None = None

    def close(self) -> None:
        """Close the socket. Never blocks; does nothing in a forked child."""
        self._close()

    def _connect(self, context: Any) -> Any:
        socket = context.socket(zmq.DEALER)
        # A context that is collected before its socket would wait for it for ever: this keeps both.
        self._close = weakref.finalize(self, _destroy, context, socket, self._pid)
        # Only to a hub that is there: requests nobody waits for any more would pile up for the next one.
        socket.immediate = 1
        socket.linger = 0
        socket.reconnect_ivl = 20
        socket.reconnect_ivl_max = 500
        socket.maxmsgsize = CUT_OFF_BYTES
        socket.connect(control_address(self._bridge))
        return socket

    def _talk(self, request: Request, timeout_s: float) -> _Talk:
        """One request and its answer; to a hub that does not know us any more we are introduced first."""
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
            if not (yield _Send(frames, left_s)):
                break
            repeat_at = min(deadline, time.monotonic() + REPEAT_AFTER_S)
            while (left_s := repeat_at - time.monotonic()) > 0:
                received = yield _Receive(left_s)
                if isinstance(received, list):
                    answer_id, answer = messages.decode_answer(received)
                    if answer_id == request_id:
                        return answer
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
    """Asks the hub, and waits for the answer. For one thread; in a forked child it raises `Closed`."""

    def __init__(self, bridge: str, *, role: str, name: str) -> None:
        super().__init__(bridge, role, name)
        self._socket = self._connect(zmq.Context())

    def hello(self, timeout_s: float = 5.0) -> Answer:
        """Introduce this participant, as `request` does."""
        return self.request(self._hello, timeout_s)

    def request(self, message: Request, timeout_s: float = 5.0) -> Answer:
        """Return the hub's answer.

        Blocks until then or until the deadline. Survives a change of hub: the request goes to whoever is
        there, and an environment that registered through this client is registered again first.

        Raises:
            NoConsumer: nobody answered in time.
            RequestRefused: the hub will not.
            BadMessage: what answers is no hub of this version.
        """
        talk = self._talk(message, timeout_s)
        try:
            step = next(talk)
            while True:
                step = talk.send(self._perform(step))
        except StopIteration as end:
            answer: Answer = end.value
            return answer

    def _perform(self, step: _Step) -> _Performed:
        timeout_ms = _milliseconds(step.timeout_s)
        if isinstance(step, _Receive):
            return self._socket.recv_multipart() if self._socket.poll(timeout_ms, zmq.POLLIN) else None
        if not self._socket.poll(timeout_ms, zmq.POLLOUT):
            return False
        self._socket.send_multipart(step.frames)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class AsyncControlClient(_Client):
    """`ControlClient` for an event loop, which it never blocks. One request is in flight at a time."""

    def __init__(self, bridge: str, *, role: str, name: str) -> None:
        import zmq.asyncio  # here, because the synchronous client does not need asyncio

        super().__init__(bridge, role, name)
        self._socket = self._connect(zmq.asyncio.Context())
        self._turn = asyncio.Lock()

    async def hello(self, timeout_s: float = 5.0) -> Answer:
        """Introduce this participant, as `request` does."""
        return await self.request(self._hello, timeout_s)

    async def request(self, message: Request, timeout_s: float = 5.0) -> Answer:
        """Return the hub's answer, as `ControlClient.request` does; may be cancelled at any await."""
        async with self._turn:
            talk = self._talk(message, timeout_s)
            try:
                step = next(talk)
                while True:
                    step = talk.send(await self._perform(step))
            except StopIteration as end:
                answer: Answer = end.value
                return answer

    async def _perform(self, step: _Step) -> _Performed:
        timeout_ms = _milliseconds(step.timeout_s)
        if isinstance(step, _Receive):
            if not await self._socket.poll(timeout_ms, zmq.POLLIN):
                return None
            frames: list[bytes] = await self._socket.recv_multipart()
            return frames
        if not await self._socket.poll(timeout_ms, zmq.POLLOUT):
            return False
        await self._socket.send_multipart(step.frames)
        return True


def _destroy(context: Any, socket: Any, pid: int) -> None:
    if os.getpid() == pid:
        socket.close(linger=0)
        context.destroy(linger=0)


def _milliseconds(timeout_s: float) -> int:
    return max(1, round(timeout_s * 1000))
