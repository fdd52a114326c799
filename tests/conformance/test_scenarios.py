"""The named stories, over each ring that there is."""

import pytest

from shmbridge.testing.against_model import AgainstModel
from shmbridge.testing.compiled_ring import CompiledRing
from shmbridge.testing.model_ring import ModelRing
from shmbridge.testing.scenarios import SCENARIOS, run_scenario

RINGS = {
    "model": ModelRing,
    "compiled": CompiledRing,
    "compiled beside the model": lambda *shape: AgainstModel(CompiledRing(*shape)),
}


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name, ring):
    run_scenario(name, RINGS[ring])
