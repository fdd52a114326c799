"""A child of fork has none of its parent's ends of the weights: leaving their `with` blocks there changes
nothing and does not crash.
"""

import os
import traceback
from collections.abc import Callable

import numpy as np
import pytest

import shmbridge
from shmbridge.weights import WeightsPart, WeightsReader, WeightsWriter

SPECS = [("w", "float64", (5,))]


def in_child(action: Callable[[], object]) -> int:
    """Returns the exit status of a child of fork that runs this: 0, 1 for an exception, negative for a
    signal.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            action()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def given(version: int) -> list[tuple[str, np.ndarray]]:
    return [("w", np.full(5, float(version)))]


def test_closing_is_for_the_process_that_opened(bridge) -> None:
    with WeightsWriter(bridge) as writer, WeightsReader(bridge) as reader, WeightsPart(bridge) as part:
        writer.publish(1, given(1))
        assert reader.version == 1
        for end in (reader, part, writer):
            assert in_child(end.close) == 0
        with pytest.raises(shmbridge.ConsumerTaken):
            WeightsWriter(bridge)
        with writer.fill(2, SPECS) as filling:
            part.write(filling.ticket, *given(2)[0])
        assert reader.copy()[1]["w"].tolist() == [2.0] * 5


def test_a_childs_way_out_of_a_lease_ends_none(bridge) -> None:
    with WeightsWriter(bridge) as writer, WeightsReader(bridge) as reader:
        writer.publish(1, given(1))
        lease = reader.lease()
        held = lease.__enter__()
        assert in_child(lambda: lease.__exit__(None, None, None)) == 0
        writer.publish(2, given(2))
        with pytest.raises(shmbridge.WeightsBusy):
            writer.publish(3, given(3), timeout_s=0)
        assert held.tensors["w"].tolist() == [1.0] * 5
        lease.__exit__(None, None, None)
        writer.publish(3, given(3), timeout_s=0)


def test_a_childs_way_out_of_a_filling_writes_nothing(bridge) -> None:
    with WeightsWriter(bridge) as writer, WeightsReader(bridge) as reader:
        around = writer.fill(1, SPECS)
        filling = around.__enter__()

        def goes_on() -> None:
            with pytest.raises(shmbridge.FillingOver, match="the parent process"):
                filling.write(*given(9)[0])
            with pytest.raises(shmbridge.Closed):
                around.__exit__(None, None, None)

        assert in_child(goes_on) == 0
        assert in_child(lambda: around.__exit__(KeyError, KeyError(), None)) == 0
        filling.write(*given(1)[0])
        around.__exit__(None, None, None)
        assert reader.copy()[1]["w"].tolist() == [1.0] * 5
