"""batch_logprobs: value i belongs to token i, rows apart, in both layouts."""

import numpy as np
import pytest
import torch

from shmbridge.consumers.losses import batch_logprobs

ROWS = [[1, 2, 3, 4], [5], [6, 7]]


class Tiny(torch.nn.Module):
    """Sees the tokens so far of its row, by their running sum."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(8, 16)
        self.head = torch.nn.Linear(16, 8)

    def forward(self, input_ids, attention_mask):
        return self.head((self.table(input_ids) * attention_mask[..., None]).cumsum(1))


def expected(model, temperature=1.0):
    rows = []
    for row in ROWS:
        ids = torch.tensor([row])
        logits = model(ids, torch.ones_like(ids))[0] / temperature
        logged = torch.log_softmax(logits, -1)
        rows.append([0.0] + [logged[i, token].item() for i, token in enumerate(row[1:])])
    return rows


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("temperature", [None, 0.5])
def test_against_row_by_row(producer, consumer, layout, temperature):
    columns = {} if temperature is None else {"temperature": [temperature] * 3}
    producer.put({"tokens": ROWS, "prompt_length": [0] * 3, **columns})
    batch = next(consumer.batches(groups=1, layout=layout, timeout_s=5))
    batch.release()
    model = Tiny()
    found = batch_logprobs(model, batch)
    assert found.shape == batch.tokens.shape
    assert found.dtype == torch.float32
    rows = expected(model, temperature or 1.0)
    if layout == "padded":
        rows = [row + [0.0] * (4 - len(row)) for row in rows]
        np.testing.assert_allclose(found.detach().numpy(), rows, rtol=1e-5, atol=1e-6)
    else:
        np.testing.assert_allclose(
            found.detach().numpy(), [each for row in rows for each in row], rtol=1e-5, atol=1e-6
        )
    found.sum().backward()
    assert model.head.weight.grad.abs().sum() > 0


def test_rows_of_one_token(producer, consumer):
    producer.put({"tokens": [[3]], "prompt_length": [0]})
    batch = next(consumer.batches(groups=1, timeout_s=5))
    assert batch_logprobs(Tiny(), batch).tolist() == [0.0]
