"""Groups in which one token has an advantage: what a trainer must learn from them is known."""

import numpy as np

TARGET = 7


def group(seed: int, rows: int = 4, **more) -> dict:
    """Rows of a prompt of three tokens and a completion of four; only TARGET has an advantage."""
    random = np.random.default_rng(seed)
    tokens = random.integers(2, 64, (rows, 7))
    tokens[:, :4] = (2, 3, 4, TARGET)
    advantages = (tokens == TARGET) * np.array([0, 0, 0, 1, 0, 0, 0])
    made = {
        "tokens": list(tokens),
        "prompt_length": [3] * rows,
        "loss_mask": [[0, 0, 0, 1, 1, 1, 1]] * rows,
        "advantages": list(advantages.astype(np.float32)),
        "score": list(range(rows)),
    }
    return made | more
