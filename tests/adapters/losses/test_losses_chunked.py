"""Log-probabilities from hidden states in chunks: equal to the plain computation, and never more than a chunk
of logits.
"""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shmbridge.consumers import losses

TOKENS, WIDTH, VOCABULARY = 37, 8, 50


class Largest(TorchDispatchMode):
    """Records the bytes of the largest tensor that an operation in the block made, in either pass, and the
    most bytes alive at once.

    Alive counts what is at least `watched` bytes large.
    """

    def __init__(self, watched=1):
        super().__init__()
        self.watched = watched
        self.largest = self.most_alive = 0
        self._living = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.largest = max(self.largest, storage.nbytes())
                if storage.nbytes() >= self.watched:
                    self._living[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self._living = {at: (ref, size) for at, (ref, size) in self._living.items() if not ref.expired()}
        self.most_alive = max(self.most_alive, sum(size for _, size in self._living.values()))
        return made


def inputs(tokens=TOKENS, width=WIDTH, vocabulary=VOCABULARY, dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = (
        torch.randn(vocabulary, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    )
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    temperature = 0.5 + torch.rand(tokens, generator=generator)
    return hidden, weight, targets, temperature


def plain(hidden, weight, targets, temperature):
    log_probabilities = losses.log_distribution(hidden @ weight.T, temperature)
    return losses.chosen_logprobs(log_probabilities, targets), losses.entropy(log_probabilities)


def push(tokens=TOKENS):
    generator = torch.Generator().manual_seed(8)
    return torch.randn(tokens, generator=generator), torch.randn(tokens, generator=generator)


@pytest.mark.parametrize("chunk", [1, 5, 36, 37, 1000])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients_are_those_of_the_plain_computation(chunk, with_entropy):
    hidden, weight, targets, temperature = inputs()
    expected = plain(hidden, weight, targets, temperature)
    for_logprobs, for_entropy = push()
    goal = (expected[0] * for_logprobs).sum() + ((expected[1] * for_entropy).sum() if with_entropy else 0.0)
    expected_gradients = torch.autograd.grad(goal, (hidden, weight))

    result = losses.chosen_logprobs_chunked(
        hidden, weight, targets, temperature, chunk, with_entropy=with_entropy
    )
    logprobs, entropy = result if with_entropy else (result, None)
    goal = (logprobs * for_logprobs).sum() + ((entropy * for_entropy).sum() if with_entropy else 0.0)
    gradients = torch.autograd.grad(goal, (hidden, weight))

    pairs = [(logprobs, expected[0]), *zip(gradients, expected_gradients, strict=True)]
    if with_entropy:
        pairs.append((entropy, expected[1]))
    assert max((got - wanted).abs().max().item() for got, wanted in pairs) < 1e-5


def test_entropy_alone_may_have_the_gradient():
    hidden, weight, targets, temperature = inputs()
    _, entropy = losses.chosen_logprobs_chunked(hidden, weight, targets, temperature, 5, with_entropy=True)
    (gradient,) = torch.autograd.grad(entropy.sum(), hidden)
    (expected,) = torch.autograd.grad(plain(hidden, weight, targets, temperature)[1].sum(), hidden)
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=0.0)


def test_a_number_is_the_temperature_of_all():
    hidden, weight, targets, _ = inputs()
    got = losses.chosen_logprobs_chunked(hidden, weight, targets, 0.7, 5)
    torch.testing.assert_close(got, plain(hidden, weight, targets, torch.full((TOKENS,), 0.7))[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_memory_is_bounded_by_the_chunk(with_entropy, dtype):
    tokens, chunk, vocabulary = 512, 16, 400  # all logits: 819,200 bytes of float32; a chunk's: 25,600
    chunk_bytes = 4 * chunk * vocabulary
    hidden, weight, targets, temperature = inputs(tokens, 2, vocabulary, dtype)  # 4,096 and 3,200 bytes
    with Largest(watched=chunk_bytes // 2) as seen:
        result = losses.chosen_logprobs_chunked(
            hidden, weight, targets, temperature, chunk, with_entropy=with_entropy
        )
        sum(each.sum() for each in (result if with_entropy else (result,))).backward()
    assert seen.largest == chunk_bytes
    assert seen.most_alive == 2 * chunk_bytes
    with Largest() as seen:
        sum(each.sum() for each in plain(hidden, weight, targets, temperature)).backward()
    assert seen.largest >= 4 * tokens * vocabulary  # the measure sees a whole tensor of logits


@pytest.mark.parametrize("with_entropy", [False, True])
def test_nothing_of_the_vocabulary_is_kept_for_the_backward_pass(with_entropy):
    hidden, weight, targets, temperature = inputs(512, WIDTH, 400)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.numel()) or tensor, lambda tensor: tensor
    ):
        losses.chosen_logprobs_chunked(hidden, weight, targets, temperature, 16, with_entropy=with_entropy)
    assert kept
    assert max(kept) <= max(hidden.numel(), weight.numel())


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_an_input_that_needs_no_gradient_gets_none(frozen):
    hidden, weight, targets, temperature = inputs()
    expected = torch.autograd.grad(plain(hidden, weight, targets, temperature)[0].sum(), (hidden, weight))
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    losses.chosen_logprobs_chunked(hidden, weight, targets, temperature, 5).sum().backward()
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (weight.grad is None) == (frozen == "weight")
    got, wanted = (weight.grad, expected[1]) if frozen == "hidden" else (hidden.grad, expected[0])
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0.0)


def test_logprobs_without_gradients_are_only_a_value():
    hidden, weight, targets, temperature = inputs()
    with torch.no_grad():
        got = losses.chosen_logprobs_chunked(hidden, weight, targets, temperature, 5)
    assert not got.requires_grad
    torch.testing.assert_close(got, plain(hidden, weight, targets, temperature)[0].detach())


def test_no_tokens_are_no_logprobs():
    hidden, weight, targets, temperature = inputs(0)
    losses.chosen_logprobs_chunked(hidden, weight, targets, temperature, 5).sum().backward()
    assert hidden.grad.shape == (0, WIDTH)
    assert (weight.grad == 0).all()


def test_the_product_under_autocast_is_that_of_a_linear_layer():
    hidden, weight, targets, temperature = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = plain(hidden, weight, targets, temperature)[0]
        got = losses.chosen_logprobs_chunked(hidden, weight, targets, temperature, 5)
    for_logprobs, _ = push()
    wanted = torch.autograd.grad((expected * for_logprobs).sum(), (hidden, weight))
    gradients = torch.autograd.grad((got * for_logprobs).sum(), (hidden, weight))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0.0)
    for mine, theirs in zip(gradients, wanted, strict=True):
        assert mine.dtype == torch.float32
        # theirs is rounded to bfloat16 once more
        torch.testing.assert_close(mine, theirs, atol=0.1, rtol=0.02)


def test_gradients_of_a_bfloat16_weight_are_added_up_in_float32():
    """Each chunk adds a small value to a large sum: in bfloat16 it would vanish."""
    tokens = 2048
    hidden = torch.ones(tokens, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    losses.chosen_logprobs_chunked(
        hidden, weight, torch.zeros(tokens, dtype=torch.int64), 1.0, 1
    ).sum().backward()
    assert weight.grad.flatten().tolist() == [tokens / 2, -tokens / 2]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"chunk": 0}, "chunk_tokens 0"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, r"targets \(3,\)"),
        ({"weight": torch.zeros(5, WIDTH + 1)}, "do not fit"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, complaint):
    hidden, weight, targets, temperature = inputs()
    with pytest.raises(ValueError, match=complaint):
        losses.chosen_logprobs_chunked(
            hidden,
            change.get("weight", weight),
            change.get("targets", targets),
            temperature,
            change.get("chunk", 5),
        )


def test_chunked_logprobs_are_those_of_the_model(tiny_model):
    """The learner's own path: logits of the whole model against its hidden states and output layer."""
    model = tiny_model(3)
    tokens = torch.arange(12).unsqueeze(0)
    targets, temperature = tokens[0, 1:], torch.full((11,), 1.3)
    output = model(tokens, output_hidden_states=True)
    expected = losses.chosen_logprobs(losses.log_distribution(output.logits[0, :-1], temperature), targets)
    got = losses.chosen_logprobs_chunked(
        output.hidden_states[-1][0, :-1], model.lm_head.weight, targets, temperature, 4
    )
    parameters = list(model.parameters())
    wanted = torch.autograd.grad(expected.sum(), parameters, retain_graph=True)
    gradients = torch.autograd.grad(got.sum(), parameters)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0.0)
    for mine, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
