"""`WeightSync` around an offline `LLM`, as a trainer in one process has it."""

from __future__ import annotations

import pytest
import torch

from shmbridge.consumers.weight_sync import EngineFailed, WeightSync

# an engine starts in half a minute on an idle machine
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def llm(make_llm):
    return make_llm()


def test_rollouts_are_those_of_the_model_that_is_trained(llm, bridge, make_model, greedy, vllm_greedy):
    """Train, roll out, three times; without the push inside, the rollout is that of the version before."""
    model, said = make_model(1), []
    with WeightSync(bridge, llm) as sync:
        for version in range(3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.05 * torch.randn_like(parameter))
            assert vllm_greedy(llm) != greedy(model)
            with sync.updated(model) as engine:
                assert engine is llm
                assert engine.get_weight_version() == str(version)
                said.append(vllm_greedy(engine))
            assert said[-1] == greedy(model)
        with pytest.raises(KeyError), sync.updated(make_model(2)):
            raise KeyError
        assert vllm_greedy(llm) == greedy(make_model(2))
        wrong = dict(make_model(3).named_parameters())
        wrong["model.norm.weight"] = torch.zeros(32)
        with pytest.raises(ValueError, match=r"model\.norm\.weight"):  # the segment carries one model
            sync.push(wrong)
        assert sync.push(make_model(4), version=9) == 9
        assert (llm.get_weight_version(), vllm_greedy(llm)) == ("9", greedy(make_model(4)))
    assert len({tuple(each) for each in said}) == 3
    with WeightSync(f"{bridge}-2", llm) as other:
        with pytest.raises(EngineFailed, match=r"the LLM of .*model\.norm\.weight"):
            other.push(wrong)
        assert vllm_greedy(llm) == greedy(make_model(4))
        llm.init_weight_transfer_engine({"init_info": {}})
