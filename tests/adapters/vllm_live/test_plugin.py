"""vLLM has the backend in both of its factories, whatever is imported first, with an engine or without."""

import subprocess
import sys

import pytest

CHECK = """
import importlib, sys
for first in sys.argv[1:]:
    if first == "entry point":  # as vLLM does in each process of an engine, and more than once
        from vllm.plugins import load_general_plugins
        load_general_plugins()
        load_general_plugins()
    else:
        importlib.import_module(first)
from vllm.distributed.weight_transfer import factory
factories = factory.WeightTransferEngineFactory, factory.WeightTransferTrainerFactory
found = [each._registry["shmbridge"]() for each in factories]
from shmbridge.consumers.vllm import backend as ours
assert found == [ours.ShmBridgeWeightTransferEngine, ours.ShmBridgeTrainerWeightTransferEngine], found
"""
OURS = "shmbridge.consumers.vllm.backend"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "first",
    [("entry point",), ("vllm", "entry point"), (OURS,), ("vllm", OURS), (OURS, "entry point")],
    ids=", ".join,
)
def test_it_does_not_matter_what_is_imported_first(first):
    ran = subprocess.run([sys.executable, "-c", CHECK, *first], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
