"""Rollouts of plain environments sample from a live vLLM by each of its APIs: exact tokens, the model's own
log-probabilities, and the version.
"""

from __future__ import annotations

import asyncio

import pytest
from live_server import PROMPT, REPORTS_SPANS, logprobs_of

from shmbridge.producers.rollout import HttpServer, Sampling

pytestmark = pytest.mark.timeout(420)


@pytest.mark.parametrize("api", ["generate", "vllm", "completions"])
def test_http_server_samples_exact_tokens_from_vllm(
    server, learner, new_versions, tiny_folder, make_model, greedy, api
):
    process, (version,) = learner(), new_versions(1)
    process.does("publish", version, tiny_folder(version))
    server.has(version)
    sampling = Sampling(max_tokens=12, temperature=0.0, extra={"ignore_eos": True})

    async def ask():
        async with HttpServer(server.url, api=api, model="policy") as asked:
            return await asyncio.gather(*(asked.sample(PROMPT, sampling) for _ in range(3)))

    model = make_model(version)
    for sampled in asyncio.run(ask()):
        assert sampled.token_ids == greedy(model, PROMPT, 12)
        assert sampled.logprobs == pytest.approx(logprobs_of(model, PROMPT, sampled.token_ids), abs=1e-3)
        assert sampled.finish_reason == "length"
        if api == "generate" or (api == "vllm" and REPORTS_SPANS):  # elsewhere vLLM names no version
            assert sampled.versions == [version] * 12
