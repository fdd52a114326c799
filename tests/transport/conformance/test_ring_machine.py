"""The state machine over the model alone: the rules have the properties.

And over the compiled ring beside it: the ring keeps the rules.
"""

from against_model import AgainstModel
from compiled_ring import CompiledRing
from hypothesis import HealthCheck, Phase, settings
from model_ring import ModelRing
from ring_machine import ring_machine

STEADY = settings(
    max_examples=300,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)

TestModel = ring_machine(ModelRing).TestCase
TestModel.settings = STEADY

TestCompiledRing = ring_machine(lambda *shape: AgainstModel(CompiledRing(*shape))).TestCase
TestCompiledRing.settings = STEADY
