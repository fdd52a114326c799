"""Log-probabilities of trained tokens: in chunks or whole, packed or padded, the numbers and gradients of the
model's own logits.
"""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from shmbridge.consumers.learner.data.microbatch import micro_batches
from shmbridge.consumers.learner.data.training_rows import prepare
from shmbridge.consumers.learner.model import attention, forward

CPU = torch.device("cpu")
ROWS = [[3, 4, 5, 6, 7, 8, 9], [10, 11, 12], [1, 2, 3, 4, 5], [20, 21], [8, 8, 8, 9, 9, 1, 2, 3, 4, 5, 6]]
MASKS = [[0, 0, 1, 1, 0, 1, 1], [1, 1, 1], [0, 0, 0, 0, 1], [0, 1], [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0]]
SIZES = {
    "vocab_size": 28,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
FAMILIES = {
    "plain": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False)),
    "tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "bias": lambda: PhiForCausalLM(PhiConfig(**SIZES, attn_implementation="eager")),
    "capped": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=2.0, attn_implementation="eager")
    ),
    "scaled up": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=3.0)),
    "scaled down": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0)),
    "other names": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=28, n_embd=32, n_layer=2, n_head=2, initializer_range=0.2)
    ),
}
CHUNKED = {"plain", "tied", "bias", "other names"}


def family(name):
    torch.manual_seed(4)
    made = FAMILIES[name]().eval()
    head = made.get_output_embeddings()
    if head.bias is not None:
        torch.nn.init.normal_(head.bias)
    return made


def lora(name, targets):
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    made = peft.get_peft_model(
        family(name), peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    )
    return made.eval()


def micros(packed_batch, layout="padded"):
    rows, _ = prepare(
        packed_batch(ROWS, masks=MASKS, temperatures=[0.7, 1.0, 1.3, 0.5, 1.0], groups=range(5)), 1.0
    )
    return list(micro_batches(rows, 24, CPU, layout))


def results(model, parts, **how):
    """Log-probabilities, entropies, and the gradient of some function of both."""
    model.zero_grad(set_to_none=True)
    found = [
        forward.trained_logprobs(model, micro, precision=torch.float32, with_entropy=True, **how)
        for micro in parts
    ]
    logprobs, entropy = (torch.cat([pair[at] for pair in found]) for at in (0, 1))
    (logprobs * torch.arange(1.0, len(logprobs) + 1) + entropy.square()).sum().backward()
    return (
        logprobs.detach(),
        entropy.detach(),
        {name: each.grad for name, each in model.named_parameters() if each.grad is not None},
    )


def by_hand(model, parts):
    """The same from all logits of the model."""
    model.zero_grad(set_to_none=True)
    logprobs, entropies = [], []
    for micro in parts:
        logits = model(
            input_ids=micro.tokens, attention_mask=torch.ones_like(micro.tokens), use_cache=False
        ).logits
        for row, heat in enumerate(micro.temperature.tolist()):
            at = micro.trained[row].nonzero()[:, 0]
            spread = torch.distributions.Categorical(logits=logits[row, at - 1] / heat)
            logprobs.append(spread.log_prob(micro.tokens[row, at]))
            entropies.append(spread.entropy())
    logprobs, entropy = torch.cat(logprobs), torch.cat(entropies)
    (logprobs * torch.arange(1.0, len(logprobs) + 1) + entropy.square()).sum().backward()
    return (
        logprobs.detach(),
        entropy.detach(),
        {name: each.grad for name, each in model.named_parameters() if each.grad is not None},
    )


def assert_equal(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5)
    assert set(found[2]) == set(expected[2])
    for name, each in expected[2].items():
        torch.testing.assert_close(found[2][name], each, rtol=1e-4, atol=1e-4 * float(each.abs().max()))


@pytest.mark.parametrize("chunk", [None, 1, 4, 1000])
@pytest.mark.parametrize("name", FAMILIES)
def test_values_and_gradients_are_those_of_all_logits(packed_batch, name, chunk):
    model = family(name)
    parts = micros(packed_batch)
    assert_equal(results(model, parts, chunk_tokens=chunk), by_hand(model, parts))
    if chunk is not None:
        assert forward.leaves_logits_alone(model) == (name in CHUNKED)


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj", "lm_head"]])
def test_adapters_have_the_values_and_gradients_of_all_logits(packed_batch, targets, chunk):
    model = lora("plain", targets)
    parts = micros(packed_batch)
    assert_equal(results(model, parts, chunk_tokens=chunk), by_hand(model, parts))
    assert forward.leaves_logits_alone(model)


@pytest.mark.parametrize("chunk", [None, 3])
def test_packed_values_are_padded_ones(packed_batch, chunk):
    model = family("plain")
    padded = results(model, micros(packed_batch), chunk_tokens=None)[0]
    attention.use(model, attention.ROWS)
    packed = results(model, micros(packed_batch, "packed"), chunk_tokens=chunk)[0]
    torch.testing.assert_close(packed.sort().values, padded.sort().values, rtol=1e-5, atol=1e-5)


def test_a_model_that_changes_its_logits_is_named_once(packed_batch, caplog):
    model = family("capped")
    with caplog.at_level(logging.WARNING):
        results(model, micros(packed_batch), chunk_tokens=2)
    assert [record.message for record in caplog.records if "all at once" in record.message] == [
        "Gemma2ForCausalLM changes its logits behind its output layer, so they are made all at once"
    ]


def test_the_output_layer_is_its_own_again(packed_batch):
    model, parts = family("plain"), micros(packed_batch)
    forward.trained_logprobs(model, parts[0], precision=torch.float32, chunk_tokens=2, with_entropy=False)
    assert "forward" not in vars(model.lm_head)
    broken = parts[0].__class__(**{**vars(parts[0]), "tokens": parts[0].tokens + 1000})
    with pytest.raises(IndexError):
        forward.trained_logprobs(model, broken, precision=torch.float32, chunk_tokens=2, with_entropy=False)
    assert "forward" not in vars(model.lm_head)


def test_bfloat16_in_chunks_is_bfloat16_whole(packed_batch):
    model, parts = family("plain"), micros(packed_batch)
    half = {"precision": torch.bfloat16, "with_entropy": False}
    whole, chunked = (
        torch.cat([forward.trained_logprobs(model, each, chunk_tokens=chunk, **half)[0] for each in parts])
        for chunk in (None, 3)
    )
    torch.testing.assert_close(chunked, whole, rtol=1e-3, atol=1e-3)


def test_chunks_by_default_only_for_what_is_large():
    assert forward.chunk_tokens_for(28, 8192) is None
    assert forward.chunk_tokens_for(32_000, 8192) is None
    assert forward.chunk_tokens_for(151_936, 8192) == 441  # 256 MiB of float32
    assert forward.chunk_tokens_for(10**12, 8192) == 1


PEAK = """
import resource, sys
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from shmbridge.consumers.learner.model import attention
from shmbridge.consumers.learner.model import forward
from shmbridge.consumers.learner.data.microbatch import MicroBatch

chunk, tokens, length = int(sys.argv[1]), int(sys.argv[2]), 512
torch.set_num_threads(1)
sizes = dict(vocab_size=150_000, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=1, num_key_value_heads=1))
attention.use(model, attention.ROWS)
count = tokens // length
trained = torch.zeros(1, tokens, dtype=torch.bool)
trained[0, 8::int(sys.argv[3])] = True
trained[0, ::length] = False
nothing = torch.zeros(1, tokens)
lengths = trained[0].view(count, length).sum(1)
micro = MicroBatch(
    tokens=torch.randint(0, 150_000, (1, tokens)), trained=trained, advantages=nothing,
    sampled_logprobs=nothing,
    temperature=torch.ones(count), trained_lengths=lengths, row_lengths=(length,) * count,
    position_ids=torch.arange(length).repeat(count)[None],
    cu_seqlens=torch.arange(0, tokens + 1, length, dtype=torch.int32),
)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
logprobs, _ = forward.trained_logprobs(
    model, micro, precision=torch.float32, chunk_tokens=chunk or None, with_entropy=False
)
logprobs.sum().backward()
print(int(trained.sum()), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def peak_mib(chunk, tokens, every):
    """Trained tokens, and what a forward and backward pass over so many tokens took beyond what was there
    before.
    """
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(chunk), str(tokens), str(every)],
        capture_output=True,
        text=True,
        check=True,
    )
    trained, mib = done.stdout.split()
    return int(trained), int(mib)


def test_131072_tokens_of_a_large_vocabulary_never_have_all_their_logits():
    """One trained token of 80, so that two cores do it in seconds; docs/explanation/batches.md has a longer
    run.
    """
    trained, mib = peak_mib(64, 131_072, 80)
    all_logits = trained * 150_000 * 4 / 2**20
    assert all_logits > 400
    assert mib < all_logits / 2
    _, mib = peak_mib(0, 16_384, 10)
    assert mib > all_logits  # so the measure sees them where they are
