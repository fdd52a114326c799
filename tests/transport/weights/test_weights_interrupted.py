"""A signal handler that raises, at any point where Python runs handlers, leaves no slot of the weights held
and no filling open.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shmbridge.weights import WeightsPart, WeightsReader, WeightsWriter

SPECS = [("large", "int64", (2000,)), ("scalar", "int64", ())]
OURS = (
    "shmbridge/weights/writer.py",
    "shmbridge/weights/reader.py",
    "shmbridge/weights/writer.py",
    "shmbridge/segments/locks.py",
)


class Interrupted(BaseException):
    """Raised by a handler, like KeyboardInterrupt."""


def interrupted(action: Callable[[], object], moment: int) -> bool:
    """Runs the action; whether it was interrupted, at the entry of a function, or after a call that ended, of
    this number.
    """
    left = moment

    def look(frame: Any, event: str, _: object) -> None:
        nonlocal left
        if event in ("call", "c_return") and frame.f_code.co_filename.endswith(OURS):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise Interrupted

    sys.setprofile(look)
    try:
        action()
    except Interrupted:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.parametrize("action", ["lease", "nested", "copy", "publish", "changed_only", "fill"])
def test_an_interrupted_end_leaves_the_others_free(bridge: str, action: str) -> None:
    with WeightsWriter(bridge) as writer, WeightsReader(bridge) as reader, WeightsPart(bridge) as part:

        def given() -> list[tuple[str, np.ndarray[Any, Any]]]:
            return [(name, np.full(shape, following())) for name, _, shape in SPECS]

        def following() -> int:
            return 0 if writer.last_version is None else writer.last_version + 1

        def lease() -> None:
            with reader.lease(timeout_s=0.1):
                pass

        def nested() -> None:
            with reader.lease(timeout_s=0.1), reader.lease(timeout_s=0.1):
                pass

        def fill() -> None:
            with writer.fill(following(), SPECS, timeout_s=0.1) as filling:
                for name, array in given():
                    part.write(filling.ticket, name, array)

        def publish() -> None:
            writer.publish(following(), given(), timeout_s=0.1)

        def changed_only() -> None:
            writer.publish(following(), given()[:1], changed_only=True, timeout_s=0.1)

        publish()
        actions = {
            "lease": lease,
            "nested": nested,
            "copy": reader.copy,
            "publish": publish,
            "changed_only": changed_only,
            "fill": fill,
        }
        moment = 1
        while interrupted(actions[action], moment):
            for check in (publish, publish, fill, lease, changed_only):
                check()
            publish()
            version, tensors = reader.copy()
            assert version == writer.last_version
            assert all((tensor == version).all() for tensor in tensors.values())
            moment += 1
        assert moment > 10
