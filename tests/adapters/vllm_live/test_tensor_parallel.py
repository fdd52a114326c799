"""Two tensor-parallel workers each map the segment and take their part; they load a version together or not
at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import shmbridge
from shmbridge.weights import WeightsWriter


@pytest.fixture(scope="module")
def llm(make_llm: Callable[..., Any]) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the workers share what cores there are
        yield make_llm(tensor_parallel_size=2)


def tell(llm: Any, bridge: str, version: int) -> None:
    llm.start_weight_update()
    llm.update_weights({"update_info": {"bridge": bridge, "version": version}})
    llm.finish_weight_update(str(version))
    llm.reset_prefix_cache()


def test_each_worker_takes_its_part_and_a_version_that_does_not_fit_changes_neither(
    llm, bridge, make_model, greedy, vllm_greedy
):
    with WeightsWriter(bridge) as writer:
        for version in (1, 2, 3):
            model = make_model(version)
            writer.publish(version, model.named_parameters())
            tell(llm, bridge, version)
            assert vllm_greedy(llm) == greedy(model)
        with pytest.raises(Exception, match=r"version 9 .* holds 3"):
            tell(llm, bridge, 9)
        assert vllm_greedy(llm) == greedy(model)
    other = f"{bridge}-2"
    # four times as wide: each worker would find a part of the right size
    with WeightsWriter(other) as writer:
        tensors = dict(make_model(4).named_parameters())
        tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(64, 512)
        writer.publish(4, tensors.items())
        for _ in range(2):  # remains of a refused version must not be taken for the next one
            with pytest.raises(Exception, match=r"model\.layers\.1\.mlp\.down_proj\.weight"):
                tell(llm, other, 4)
            assert vllm_greedy(llm) == greedy(model)
    newest = make_model(5)
    with WeightsWriter(bridge) as writer:
        writer.publish(5, newest.named_parameters())
        tell(llm, bridge, 5)
        assert vllm_greedy(llm) == greedy(newest)
    llm.init_weight_transfer_engine({"init_info": {}})
    assert not shmbridge.clean(other, dry_run=False).kept
