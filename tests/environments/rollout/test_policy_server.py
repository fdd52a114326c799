"""Rollout against the real policy server: the example environment, and the log-probabilities of its model."""

import asyncio
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[3]


async def test_own_env_example_rows_are_what_the_model_sampled(bridge, make_consumer, tiny, policy_server):
    from transformers import AutoModelForCausalLM

    consumer = make_consumer()
    words = ["--bridge", bridge, "--server", policy_server, "--tokenizer", str(tiny), "--max-tokens", "4"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(ROOT / "examples/own_env.py"), *words, "--max-groups", "3", "--group-size", "4",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await asyncio.wait_for(process.communicate(), 90)
    assert (process.returncode, out) == (0, b"3 groups\n")
    model = AutoModelForCausalLM.from_pretrained(tiny).eval()
    for _ in range(3):
        with consumer.get(timeout_s=5) as record:
            assert (record.meta.min_policy_version, record.meta.max_policy_version) == (5, 5)
            for row in range(4):
                tokens = torch.tensor(record["tokens"][row].copy())
                with torch.inference_mode():
                    expected = (
                        model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
                    )
                trained = torch.tensor(record["loss_mask"][row][1:].copy()).bool()
                said = torch.tensor(record["inference_logprobs"][row][1:].copy())
                torch.testing.assert_close(said[trained], expected[trained], atol=2e-4, rtol=2e-4)
                assert len(record["step_rewards"][row]) == len(record["turn_ends"][row]) in (1, 2)
