"""Page-locks a file of the shared-memory mount on each GPU, and copies it there; prints an `Answer` as JSON.

    python -m shmbridge.doctor.gpu_process

It calls the CUDA driver and needs no torch.
"""

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from shmbridge.doctor.gpu import Answer, Device
from shmbridge.doctor.probe_file import MOUNT, probe_file
from shmbridge.doctor.shared_memory import LANE_BYTES

_ROUNDS = 5
_SMALLEST = 1 << 20
_READ_ONLY_REGISTERED = 113  # CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
_PORTABLE = 1


class DriverError(Exception):
    """A call of the driver failed."""


class Driver(Protocol):
    """The calls of the CUDA driver that are needed, for one GPU at a time."""

    def count(self) -> int:
        """How many GPUs there are."""
        ...

    def enter(self, number: int) -> str:
        """Makes a GPU the current one; returns its name."""
        ...

    def leave(self) -> None:
        """Gives the current GPU back."""
        ...

    def takes_read_only(self) -> bool:
        """Whether it registers memory that may only be read."""
        ...

    def allocate(self, size: int) -> int:
        """Returns the address of memory on the GPU."""
        ...

    def free(self, address: int) -> None:
        """Undoes that."""
        ...

    def register(self, address: int, size: int) -> int:
        """Page-locks memory of the host; 0, or the driver's error."""
        ...

    def unregister(self, address: int) -> None:
        """Undoes that."""
        ...

    def copy(self, to: int, address: int, size: int) -> None:
        """Copies from the host to the GPU; blocks until it is done."""
        ...


class CudaDriver:
    """The driver of this machine.

    Raises:
        OSError: it is not installed.
        DriverError: it does not start.
    """

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._device = ctypes.c_int()
        self._call("cuInit", ctypes.c_uint(0))

    def _call(self, name: str, *arguments: Any) -> None:
        if error := int(getattr(self._cuda, name)(*arguments)):
            raise DriverError(f"{name} fails with error {error}")

    def count(self) -> int:
        """As `Driver`."""
        found = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(found))
        return found.value

    def enter(self, number: int) -> str:
        """As `Driver`."""
        name, context = ctypes.create_string_buffer(100), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(self._device), ctypes.c_int(number))
        self._call("cuDeviceGetName", name, ctypes.c_int(len(name)), self._device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._call("cuCtxSetCurrent", context)
        return name.value.decode(errors="replace")

    def leave(self) -> None:
        """As `Driver`."""
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def takes_read_only(self) -> bool:
        """As `Driver`; False if the driver does not say."""
        answer = ctypes.c_int()
        asked = self._cuda.cuDeviceGetAttribute(
            ctypes.byref(answer), ctypes.c_int(_READ_ONLY_REGISTERED), self._device
        )
        return not asked and answer.value == 1

    def allocate(self, size: int) -> int:
        """As `Driver`."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def free(self, address: int) -> None:
        """As `Driver`."""
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def register(self, address: int, size: int) -> int:
        """As `Driver`."""
        flags = ctypes.c_uint(_PORTABLE)
        return int(self._cuda.cuMemHostRegister_v2(ctypes.c_void_p(address), ctypes.c_size_t(size), flags))

    def unregister(self, address: int) -> None:
        """As `Driver`."""
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def copy(self, to: int, address: int, size: int) -> None:
        """As `Driver`."""
        host, count = ctypes.c_void_p(address), ctypes.c_size_t(size)
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(to), host, count)
        self._call("cuCtxSynchronize")


def answer(start: Callable[[], Driver] = CudaDriver) -> Answer:
    """Returns what each GPU did with a file as large as a lane, or why there is none."""
    try:
        driver = start()
        return Answer([_measured(driver, number) for number in range(driver.count())])
    except (OSError, AttributeError, DriverError) as wrong:
        return Answer(trouble=str(wrong))


def _measured(driver: Driver, number: int) -> Device:
    """Copies the same file before and while it is page-locked."""
    name, size = driver.enter(number), _fitting(LANE_BYTES)
    try:
        with probe_file() as fd:
            os.posix_fallocate(fd, 0, size)
            with mmap.mmap(fd, size) as mapping:
                host = (ctypes.c_char * size).from_buffer(mapping)
                try:
                    return _rates(driver, number, name, ctypes.addressof(host), size)
                finally:
                    del host  # the mapping does not close while it is in use
    finally:
        driver.leave()


def _rates(driver: Driver, number: int, name: str, host: int, size: int) -> Device:
    to = driver.allocate(size)
    try:
        unpinned = _rate(driver, to, host, size)
        if refused := driver.register(host, size):
            return Device(number, name, size, unpinned, refused=refused)
        try:
            pinned = _rate(driver, to, host, size)
        finally:
            driver.unregister(host)
    finally:
        driver.free(to)
    return Device(number, name, size, unpinned, pinned, read_only=driver.takes_read_only())


def _rate(driver: Driver, to: int, host: int, size: int) -> float:
    """Returns the best of some rounds, in bytes a second."""
    took = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        driver.copy(to, host, size)
        took.append(time.perf_counter() - began)
    return size / max(min(took), 1e-9)


def _fitting(size: int) -> int:
    """Returns a size of which the mount has twice as much free, the smallest if need be."""
    about = os.statvfs(MOUNT)
    while about.f_blocks and size > _SMALLEST and 2 * size > about.f_bavail * about.f_frsize:
        size //= 2
    return size


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(answer()))
