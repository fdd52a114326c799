"""pyzmq over a Unix socket: PUSH and PULL, columns as frames, copy=False on both sides.

Does: any number of producers, one frame per column without serialising, reconnects, a bound on messages. Does
not: share memory: the kernel copies every byte in and out of a socket, libzmq once more into its frames;
messages on their way when a side dies are lost without an error. Half of the groups in flight may wait on
each side.
"""

import os
from typing import Any

import zmq

from shmbridge.bench import contract
from shmbridge.bench.baselines.memcpy_baseline import touch
from shmbridge.bench.contract import READ_TIMEOUT_S, Plan
from shmbridge.bench.groups import Array

NAME = "pyzmq ipc"
NEEDS = ("zmq",)
INSTALL = "pip install pyzmq"

_TIMEOUT_MS = int(1000 * READ_TIMEOUT_S)


class Reader(contract.Reader):
    """PULL on an abstract socket."""

    _sockets = 0

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        Reader._sockets += 1
        self.address = {"endpoint": f"ipc://@shmbridge-bench-{os.getpid()}-{Reader._sockets}"}
        self._context, self._socket = _socket(zmq.PULL, zmq.RCVHWM, plan)
        self._socket.bind(self.address["endpoint"])

    def read_one(self) -> int:
        return sum(touch(frame.buffer) for frame in self._socket.recv_multipart(copy=False))

    def close(self) -> None:
        self._context.destroy(linger=0)


class Writer(contract.Writer):
    """PUSH; libzmq sends straight from the arrays, which do not change."""

    def __init__(self, address: dict[str, str], plan: Plan) -> None:
        super().__init__(address, plan)
        self._context, self._socket = _socket(zmq.PUSH, zmq.SNDHWM, plan)
        self._socket.connect(address["endpoint"])

    def write_one(self, group: list[Array]) -> None:
        self._socket.send_multipart(group, copy=False)

    def close(self) -> None:
        self._context.destroy()


def _socket(kind: int, mark: int, plan: Plan) -> tuple[Any, Any]:
    context: Any = zmq.Context()
    socket = context.socket(kind)
    socket.setsockopt(mark, max(1, plan.in_flight // 2))
    socket.setsockopt(zmq.RCVTIMEO, _TIMEOUT_MS)
    socket.setsockopt(zmq.SNDTIMEO, _TIMEOUT_MS)
    return context, socket
