"""Packs: a row's results are those of the row alone, whatever rows stand beside it, with every attention
available here.
"""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from transformers import (
    AttentionInterface,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from shmbridge.consumers.learner.data.microbatch import micro_batches
from shmbridge.consumers.learner.data.training_rows import prepare
from shmbridge.consumers.learner.model import attention
from shmbridge.consumers.learner.model.forward import trained_logprobs

CPU = torch.device("cpu")
ROWS = [
    [3, 4, 5, 6, 7, 8, 9],
    [10, 11, 12],
    [1, 2, 3, 4, 5],
    [20, 21],
    [8, 8, 8, 9, 9, 1, 2, 3, 4, 5, 6],
    [13, 14],
]


def model(implementation, *, key_heads=2, window=None):
    torch.manual_seed(1)
    made = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=28,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=key_heads,
            initializer_range=0.1,
            use_sliding_window=window is not None,
            sliding_window=window,
            max_window_layers=0,
        )
    ).eval()
    attention.use(made, implementation)
    assert made.config._attn_implementation == implementation
    return made


def logprobs(own, batch, layout, budget=1000):
    """{row's tokens: log-probabilities of all but its first}"""
    rows, _ = prepare(batch, 1.0)
    found = {}
    for micro in micro_batches(rows, budget, CPU, layout):
        values, _ = trained_logprobs(
            own, micro, precision=torch.float32, chunk_tokens=None, with_entropy=False
        )
        row_tokens = micro.tokens[0].split(micro.row_lengths) if layout == "packed" else micro.tokens
        for tokens, length, each in zip(
            row_tokens, micro.row_lengths, values.split(micro.trained_lengths.tolist()), strict=True
        ):
            found[tuple(tokens[:length].tolist())] = each
    return found


@pytest.mark.parametrize(
    ("implementation", "window"),
    [
        *((name, window) for name in ("sdpa", "eager", attention.ROWS) for window in (None, 3)),
        ("flex_attention", None),
    ],
)
def test_a_row_of_a_pack_gives_what_it_gives_alone(packed_batch, implementation, window):
    own = model(implementation, window=window)
    plain = model("eager", window=window)
    with torch.no_grad():
        packed = logprobs(own, packed_batch(ROWS), "packed")
        assert set(packed) == {tuple(row) for row in ROWS}
        for row in ROWS:
            logs = torch.log_softmax(plain(torch.tensor([row])).logits[0], dim=-1)
            alone = logs[:-1].gather(1, torch.tensor(row[1:])[:, None])[:, 0]
            torch.testing.assert_close(packed[tuple(row)], alone, rtol=1e-5, atol=1e-5)

        others = [[7] * len(row) for row in ROWS]
        others[2] = ROWS[2]
        after = logprobs(own, packed_batch(others), "packed")[tuple(ROWS[2])]
    torch.testing.assert_close(after, packed[tuple(ROWS[2])], rtol=0, atol=1e-6)
    if implementation != "flex_attention":  # which is compiled again for each length
        assert attention.keeps_rows_apart(own)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", attention.ROWS])
def test_gradients_of_packs_are_those_of_padded_rows(packed_batch, implementation):
    def gradients(layout, own):
        torch.cat(
            list(logprobs(own, packed_batch(ROWS), layout, budget=16).values())
        ).square().sum().backward()
        return {name: each.grad for name, each in own.named_parameters()}

    padded = gradients("padded", model("sdpa", key_heads=4))
    for name, each in gradients("packed", model(implementation, key_heads=4)).items():
        assert (each - padded[name]).abs().max() <= 1e-5 * padded[name].abs().max()


def test_gradient_checkpointing_knows_the_rows_in_the_backward_pass_too(packed_batch):
    def gradients(frugal):
        own = model(attention.ROWS)
        if frugal:
            own.gradient_checkpointing_enable()
            own.train()
        torch.cat(list(logprobs(own, packed_batch(ROWS), "packed").values())).sum().backward()
        return {name: each.grad for name, each in own.named_parameters()}

    plain = gradients(frugal=False)
    for name, each in gradients(frugal=True).items():
        torch.testing.assert_close(each, plain[name], rtol=1e-4, atol=1e-6)


def leaky(module, query, key, value, attention_mask, dropout=0.0, scaling=None, row_lengths=None, **rest):
    return sdpa_attention_forward(module, query, key, value, None, dropout, scaling)


def test_a_model_that_mixes_rows_is_seen_and_gets_padded_batches():
    AttentionInterface.register("leaky", leaky)
    own = model("sdpa")
    assert attention.keeps_rows_apart(own)
    own.set_attn_implementation("leaky")
    assert not attention.keeps_rows_apart(own)


def test_auto_packs_with_an_attention_that_needs_no_mask(monkeypatch):
    said = []
    own = model("sdpa")
    assert attention.settle(own, "auto", torch.float32, said.append) == "packed"
    assert own.config._attn_implementation == attention.ROWS
    assert attention.settle(own, "auto", torch.bfloat16, said.append) == "packed"
    assert said == []
    own = model("eager")
    assert attention.settle(own, "padded", torch.float32, said.append) == "padded"
    assert own.config._attn_implementation == "eager"
    own = model("flex_attention")
    # seen above; here it compiles for long
    monkeypatch.setattr(attention, "keeps_rows_apart", lambda model, precision: True)
    assert attention.settle(own, "auto", torch.float32, said.append) == "packed"
    assert own.config._attn_implementation == "flex_attention"


def test_auto_pads_and_packed_is_refused_where_rows_cannot_be_kept_apart(monkeypatch):
    monkeypatch.setattr(attention, "keeps_rows_apart", lambda model, precision: False)
    said, own = [], model("sdpa")
    assert attention.settle(own, "auto", torch.float32, said.append) == "padded"
    assert own.config._attn_implementation == "sdpa"
    assert "Qwen2ForCausalLM with sdpa attention" in said[0]
    with pytest.raises(attention.LayoutUnfit, match="--batch-layout padded"):
        attention.settle(own, "packed", torch.float32, said.append)


def grown(own):
    """Weights so large that any leak between rows shows."""
    torch.manual_seed(0)
    for each in own.parameters():
        if each.dim() > 1:
            torch.nn.init.normal_(each, std=0.3)
    return own


def test_families_that_pack():
    sizes = {
        "vocab_size": 28,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    for own in (
        LlamaForCausalLM(LlamaConfig(**sizes)),
        GPTNeoXForCausalLM(GPTNeoXConfig(**sizes)),
        Gemma3ForCausalLM(Gemma3TextConfig(**sizes, num_key_value_heads=2, head_dim=8, sliding_window=4)),
    ):
        assert attention.settle(grown(own), "auto", torch.float32, print) == "packed"
        assert own.config._attn_implementation == attention.ROWS


def test_families_that_take_no_borders_or_mix_rows_are_padded(packed_batch):
    """Some raise on unknown arguments, some carry a state from token to token; training continues with all of
    them.
    """
    for own in (
        BloomForCausalLM(BloomConfig(vocab_size=28, hidden_size=32, n_layer=2, n_head=4)),
        MambaForCausalLM(MambaConfig(vocab_size=28, hidden_size=32, num_hidden_layers=2, state_size=4)),
    ):
        before = own.config._attn_implementation
        assert attention.settle(grown(own), "auto", torch.float32, print) == "padded"
        assert own.config._attn_implementation == before
        assert len(logprobs(own, packed_batch(ROWS), "padded")) == len(ROWS)


def test_an_attention_that_knows_more_than_the_one_for_packs_stays():
    """Without its sinks, capped scores or chunks the model would be a different one, although rows stayed
    apart.
    """
    sizes = {
        "vocab_size": 28,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    grouped = {"num_key_value_heads": 2, "head_dim": 8}
    sinks = GptOssForCausalLM(
        GptOssConfig(**sizes, **grouped, num_local_experts=2, num_experts_per_tok=1, sliding_window=8)
    )
    capped = Gemma2ForCausalLM(
        Gemma2Config(
            **sizes,
            **grouped,
            attn_logit_softcapping=1.0,
            query_pre_attn_scalar=8,
            attn_implementation="eager",
        )
    )
    chunks = Llama4ForCausalLM(
        Llama4TextConfig(
            **sizes, **grouped, attention_chunk_size=8, num_local_experts=2, intermediate_size_mlp=64
        )
    )
    tokens = torch.randint(0, 28, (1, 30))
    for own in (sinks, capped, chunks):
        before = own.config._attn_implementation
        grown(own).eval()
        with torch.no_grad():
            alone = own(tokens, attention_mask=torch.ones_like(tokens)).logits
            assert attention.settle(own, "auto", torch.float32, print) == "padded"
            torch.testing.assert_close(own(tokens, attention_mask=torch.ones_like(tokens)).logits, alone)
        assert own.config._attn_implementation == before


def test_an_attention_that_gives_other_numbers_than_the_models_own_is_not_taken():
    def doubled(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **rest):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, 2.0 * scaling)

    AttentionInterface.register("doubled", doubled)
    own = grown(model("sdpa"))
    own.set_attn_implementation("doubled")
    assert attention.settle(own, "auto", torch.float32, print) == "padded"
    assert own.config._attn_implementation == "doubled"


def test_a_padded_mask_still_counts_with_the_attention_for_packs():
    own, plain = model(attention.ROWS), model("sdpa")
    tokens, mask = torch.tensor([[0, 0, 3, 4, 5]]), torch.tensor([[0, 0, 1, 1, 1]])
    with torch.no_grad():
        torch.testing.assert_close(
            own(tokens, attention_mask=mask).logits[:, 2:], plain(tokens, attention_mask=mask).logits[:, 2:]
        )
        torch.testing.assert_close(own(tokens).logits, plain(tokens).logits)


def test_a_checkpoint_names_no_attention_of_ours(tmp_path):
    own = model(attention.ROWS)
    own.save_pretrained(tmp_path)
    assert attention.ROWS not in json.dumps(json.loads((tmp_path / "config.json").read_text()))


def a_qwen2(**options):
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=28,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=5,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.2,
            **options,
        )
    )


def test_an_attention_that_is_there_but_does_not_run_is_no_reason_to_pad(monkeypatch):
    """Like flash attention on a GPU that is too old for it: the next attention is tried."""

    def broken(*args, **named):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")

    tried = ["does_not_run", "not_installed", attention.ROWS]
    AttentionInterface.register("does_not_run", broken)
    monkeypatch.setattr(attention, "attentions_for_packs", lambda device, precision: tried)
    model, said = a_qwen2(), []
    assert attention.settle(model, "auto", torch.float32, said.append) == "packed"
    assert model.config._attn_implementation == attention.ROWS
    (line,) = said
    assert "does_not_run is there and is not used" in line
    said.clear()
    monkeypatch.setattr(attention, "attentions_for_packs", lambda device, precision: tried[:2])
    model = a_qwen2()
    before = model.config._attn_implementation
    assert attention.settle(model, "auto", torch.float32, said.append) == "padded"
    assert (model.config._attn_implementation, len(said)) == (before, 2)


def old_kernel(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    """Torch's attention for packs as releases before 2.12 have it: it runs on GPUs only, this stands for it
    on a CPU.
    """
    assert query.shape[1] == key.shape[1], "as many heads of keys as of queries"
    assert window_size == (-1, 0)
    rows = []
    for begin, end in pairwise(cu_seq_q.tolist()):
        q, k, v = (each[begin:end].transpose(0, 1) for each in (query, key, value))
        rows.append(
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(
                0, 1
            )
        )
    return torch.cat(rows)


def new_kernel(query, key, value, *rest, enable_gqa=False, **named):
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    return old_kernel(query, key, value, *rest, **named)


@pytest.mark.parametrize("kernel", [old_kernel, new_kernel])
def test_grouped_heads_pass_through_old_and_new_kernels_for_packs(monkeypatch, kernel):
    pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    attention._kernel_takes.cache_clear()
    monkeypatch.setattr(attention, "attentions_for_packs", lambda device, precision: [attention.VARLEN])
    model, said = a_qwen2(), []
    try:
        assert attention.settle(model, "auto", torch.float32, said.append) == "packed"
    finally:
        attention._kernel_takes.cache_clear()
    assert (model.config._attn_implementation, said) == (attention.VARLEN, [])


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_attentions_tried_depend_on_the_device_and_the_precision(monkeypatch, precision):
    there = {"flash_attn", "torch.nn.attention.varlen"}
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: name if name in there else None)
    assert attention.attentions_for_packs(CPU, precision) == [attention.ROWS]
    on_gpu = attention.attentions_for_packs(torch.device("cuda"), precision)
    assert on_gpu[-1] == attention.ROWS
    assert on_gpu[:-1] == ([] if precision == torch.float32 else ["flash_attention_2", attention.VARLEN])


@pytest.mark.parametrize("windows", [False, True])
def test_a_model_that_comes_in_parts_is_settled_by_a_few_layers_on_its_device(monkeypatch, windows):
    """A model of a few layers decides, on the device of the passes; the whole model gets its attention."""
    options = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 3} if windows else {}
    model = a_qwen2(**options)
    seen = []
    settle = attention.settle
    monkeypatch.setattr(attention, "settle", lambda few, *rest: seen.append(few) or settle(few, *rest))
    assert attention.settle_for(CPU, model, "auto", torch.float32, print) == "packed"
    assert model.config._attn_implementation == attention.ROWS
    assert seen[0] is not model
    assert len(seen[0].model.layers) == (4 if windows else 2)
    assert len(model.model.layers) == model.config.num_hidden_layers == 5


def test_a_model_of_which_no_few_layers_can_be_made_is_looked_at_itself(monkeypatch):
    model = a_qwen2()
    monkeypatch.setattr(
        type(model.config), "get_text_config", lambda self, **named: (_ for _ in ()).throw(KeyError("layers"))
    )
    assert attention._few_layers(model, CPU) is None
