"""An evaluation hook that calls the model, on every rank, and needs its tokenizer."""

import torch


def score(step, model, tokenizer):
    with torch.no_grad():
        ids = torch.tensor([tokenizer.encode("3+4?")])
        first = model(input_ids=ids).logits
        again = model(input_ids=ids).logits
    assert torch.equal(first, again)
    return {"logits": float(first.abs().sum()), "step": step}
