"""The state machine over the compiled ring beside the model: the ring keeps the rules."""

from hypothesis import HealthCheck, Phase, settings
from ring_machine import RingMachine

TestCompiledRing = RingMachine.TestCase
TestCompiledRing.settings = settings(
    max_examples=300,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
