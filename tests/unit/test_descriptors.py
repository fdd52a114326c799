"""Whatever is interrupted where, no descriptor is closed twice: by then its number may be another thread's."""

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from shmbridge import engine_folders, limits, liveness, participation, placement, segment
from shmbridge._ext.mapping import Descriptor

WATCHED = {each.__file__ for each in (engine_folders, limits, liveness, participation, placement, segment)}


class Stop(Exception):
    pass


def test_a_descriptor_is_closed_once() -> None:
    ours = Descriptor(os.eventfd(0))
    number = ours.fd
    ours.close()
    other = os.eventfd(0)
    assert (other, ours.fd) == (number, -1)
    ours.close()
    del ours
    os.fstat(other)
    os.close(other)


def test_a_mapping_keeps_its_descriptor_open(bridge) -> None:
    name, created = segment.create_lane(bridge, 1 << 16)
    mapping = segment.open_mapping(name)
    number = mapping.fd
    os.fstat(number)
    del mapping
    with pytest.raises(OSError):
        os.fstat(number)
    segment.unlink(created.fd, name)


def interrupt_at(call: Callable[[], object], number: int) -> list[int] | None:
    """Raises at one bytecode of the modules above; what was opened meanwhile, as by another thread. None if the call ended before."""
    seen, opened = 0, []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if frame.f_code.co_filename not in WATCHED:
            return None
        frame.f_trace_opcodes = True
        if seen > number:
            opened.append(os.eventfd(0))
        if event == "opcode":
            seen += 1
            if seen == number + 1:
                raise Stop
        return trace

    sys.settrace(trace)
    try:
        call()
    except Stop:
        pass
    finally:
        sys.settrace(None)
    return opened if seen > number else None


@pytest.mark.parametrize("what", ["create", "open", "remove", "enter", "engine folder"])
def test_interrupted_anywhere_nothing_is_closed_twice(what, bridge) -> None:
    def open_and_forget() -> None:
        name, mapping = segment.create_lane(bridge, 1 << 16)
        if what == "open":
            segment.open_mapping(name)
        del mapping
        participation.remove_lane(name)

    calls: dict[str, Callable[[], object]] = {
        "create": lambda: segment.create_lane(bridge, 1 << 16),
        "open": open_and_forget,
        "remove": open_and_forget,
        "enter": lambda: participation.open_control(bridge),
        "engine folder": lambda: engine_folders.EngineFolder(bridge).remove(),
    }
    number = 0
    while (opened := interrupt_at(calls[what], number)) is not None:
        for each in opened:
            os.close(each)  # OSError: somebody has
        number += 1
    assert number > 100
    participation.sweep(bridge, with_records=True)
