"""A mixture of experts: several tensors of the learner's lie in one parameter of vLLM's, which its CPU build
packs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import shmbridge
from shmbridge.weights import WeightsWriter

Tensors = dict[str, torch.Tensor]
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tensors]:
    """Call it with a seed for the tensors of a Qwen3 with four experts, two of them asked, by the names of
    its checkpoints.
    """
    from safetensors.torch import load_file
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    def make(seed: int, folder: Path | None = None) -> Tensors:
        torch.manual_seed(seed)
        config = Qwen3MoeConfig(
            vocab_size=28,
            hidden_size=64,
            intermediate_size=128,
            moe_intermediate_size=48,  # vLLM pads it to 64
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            initializer_range=0.1,
            tie_word_embeddings=False,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
        model = Qwen3MoeForCausalLM(config)
        for name, parameter in model.named_parameters():
            if "experts" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        folder = folder or tmp_path_factory.mktemp("moe")
        model.save_pretrained(folder)
        return load_file(folder / "model.safetensors")

    return make


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Tensors], tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("moe-0")
    checkpoint(0, made)
    return made


@pytest.fixture(scope="module")
def said_by(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Tensors, list[int]], list[float]]:
    """Call it with tensors and tokens for the log-probability, in nats, that Hugging Face gives each token
    but the first.
    """
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    def logprobs(tensors: Tensors, tokens: list[int]) -> list[float]:
        made = tmp_path_factory.mktemp("reference")
        (made / "config.json").write_text((folder / "config.json").read_text())
        save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(made).eval()
        with torch.no_grad():
            rows = torch.log_softmax(model(torch.tensor([tokens])).logits[0].float(), -1)
        return [float(rows[place, token]) for place, token in enumerate(tokens[1:])]

    return logprobs


@pytest.fixture(scope="module")
def llm(folder: Path, make_llm: Callable[..., Any]) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield make_llm(folder, skip_tokenizer_init=True)


TOKENS = [2, 7, 9, 12, 3, 20, 5, 5, 18, 26, 11, 4]


def said(llm: Any) -> list[float]:
    from vllm import SamplingParams

    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    found = llm.generate([{"prompt_token_ids": TOKENS}], asked, use_tqdm=False)[0].prompt_logprobs
    return [entry[token].logprob for entry, token in zip(found[1:], TOKENS[1:], strict=True)]


def tell(llm: Any, bridge: str, version: int) -> None:
    llm.start_weight_update()
    llm.update_weights({"update_info": {"bridge": bridge, "version": version}})
    llm.finish_weight_update(str(version))
    llm.reset_prefix_cache()


def test_experts_are_those_of_the_newest_version(llm, bridge, checkpoint, said_by):
    """All of them, then one alone; each version is another model."""
    seen: list[list[float]] = []
    with WeightsWriter(bridge) as writer:
        for version in (1, 2, 3):
            tensors = checkpoint(version)
            writer.publish(version, tensors.items())
            tell(llm, bridge, version)
            seen.append(said(llm))
            assert seen[-1] == pytest.approx(said_by(tensors, TOKENS), abs=1e-3)
        torch.nn.init.normal_(tensors[EXPERT])
        writer.publish(4, [(EXPERT, tensors[EXPERT])], changed_only=True)
        tell(llm, bridge, 4)
        seen.append(said(llm))
        assert seen[-1] == pytest.approx(said_by(tensors, TOKENS), abs=1e-3)
    assert all(one != pytest.approx(other, abs=0.1) for one, other in pairwise(seen))
    llm.init_weight_transfer_engine({"init_info": {}})


@pytest.mark.parametrize(
    "spoilt", [None, (24, 64), (96, 64), (48, 32)], ids=["missing", "shorter", "longer", "narrower"]
)
def test_an_expert_that_does_not_fit_is_named_and_the_old_ones_serve(
    llm, bridge, checkpoint, said_by, spoilt
):
    fits, other = checkpoint(5), checkpoint(6)
    del other[EXPERT]
    if spoilt is not None:
        other[EXPERT] = torch.zeros(spoilt)
    with WeightsWriter(bridge) as writer:
        writer.publish(1, fits.items())
        tell(llm, bridge, 1)
    with WeightsWriter(f"{bridge}-2") as writer:
        writer.publish(2, other.items())
        with pytest.raises(shmbridge.WeightsMismatch, match=r"model\.layers\.1\.mlp\.experts"):
            tell(llm, f"{bridge}-2", 2)
    llm.reset_prefix_cache()
    assert said(llm) == pytest.approx(said_by(fits, TOKENS), abs=1e-3)
    llm.init_weight_transfer_engine({"init_info": {}})
    assert not shmbridge.clean(f"{bridge}-2", dry_run=False).kept


def test_a_load_that_fails_between_layers_leaves_the_old_experts(
    llm, bridge, checkpoint, said_by, monkeypatch
):
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    from shmbridge.consumers.vllm.loading import WeightsNotLoaded

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    fits = checkpoint(7)
    with WeightsWriter(bridge) as writer:
        writer.publish(1, fits.items())
        tell(llm, bridge, 1)
        writer.publish(2, checkpoint(8).items())
        with monkeypatch.context() as patch:
            patch.setattr(UnquantizedEmbeddingMethod, "process_weights_after_loading", fail)
            with pytest.raises(WeightsNotLoaded, match="no room"):
                tell(llm, bridge, 2)
        llm.reset_prefix_cache()
        assert said(llm) == pytest.approx(said_by(fits, TOKENS), abs=1e-3)
    llm.init_weight_transfer_engine({"init_info": {}})
