"""The participants' side of the control plane: one request, one answer, over the control socket of a bridge.

If the hub dies before it answers and another one starts, the request is sent again.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
import weakref
from collections.abc import Generator
from typing import Any, Self, TypeAlias

import msgspec
import zmq

from shmbridge.control import messages
from shmbridge.control.messages import Answer, Refused, Register, Registered, Request, WaitForRun
from shmbridge.errors import Closed, NoConsumer, ShmBridgeError
from shmbridge.segments import OneProcess, check_descriptors, socket_directory

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
