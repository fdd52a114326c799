"""The CUDA driver, as far as it registers memory of this process.

It is the driver and not the runtime: an error of the runtime would be raised again by the next, unrelated
kernel.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Protocol

log = logging.getLogger(__name__)

_PORTABLE, _READ_ONLY = 1, 8  # for all contexts; the device only reads
_READ_ONLY_REGISTERED = 113  # CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED


class Driver(Protocol):
    """The interface of the CUDA driver that registers memory."""

    def takes_read_only(self) -> bool:
        """Whether it registers memory that may only be read."""
        ...

    def register(self, address: int, size: int, *, written: bool = False) -> int:
        """Registers page-aligned memory, which the device reads, or also writes; 0, or the driver's error."""
        ...

    def unregister(self, address: int) -> int:
        """Undoes that; 0, or the driver's error."""
        ...


class CudaDriver:
    """The driver of this machine. The calling thread needs a current context.

    Raises:
        OSError: there is none.
    """

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._cuda.cuMemHostRegister_v2.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        self._cuda.cuMemHostUnregister.argtypes = [ctypes.c_void_p]

    def takes_read_only(self) -> bool:
        """As `Driver`; False if the driver does not say."""
        device, answer = ctypes.c_int(), ctypes.c_int()
        if self._cuda.cuCtxGetDevice(ctypes.byref(device)):
            return False
        refused = self._cuda.cuDeviceGetAttribute(ctypes.byref(answer), _READ_ONLY_REGISTERED, device)
        return not refused and answer.value == 1

    def register(self, address: int, size: int, *, written: bool = False) -> int:
        """As `Driver`.

        A mapping that may only be read needs the read-only flag, which not every device has. With that flag a
        copy from the device into the memory fails: "invalid argument".
        """
        if not written and not self._cuda.cuMemHostRegister_v2(address, size, _PORTABLE | _READ_ONLY):
            return 0
        return int(self._cuda.cuMemHostRegister_v2(address, size, _PORTABLE))

    def unregister(self, address: int) -> int:
        """As `Driver`."""
        return int(self._cuda.cuMemHostUnregister(address))


def cuda_driver() -> CudaDriver | None:
    """Returns this machine's driver; None, logged, if it cannot be loaded: then copies are slower."""
    try:
        return CudaDriver()
    except (OSError, AttributeError) as error:
        log.warning("shared memory is not registered with CUDA, copies are slower: %s", error)
        return None
