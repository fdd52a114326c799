"""The policy server over HTTP: what Atropos and OpenAI clients send and get; how the program starts and ends.

What is sampled, and under which weights, is in `test_policy_engine.py`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import shmbridge
from shmbridge.consumers.policy_server.api import PolicyApi
from shmbridge.consumers.policy_server.engine import PolicyEngine
from shmbridge.consumers.policy_server.sampler import PolicyModel, Row
from shmbridge.consumers.policy_server.server import PolicyServer
from shmbridge.weights import WeightsWriter
from tests.adapters.served import Client, served

ROOT = Path(__file__).parents[3]
PYTHONPATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
PROMPTS = [[2, 25, 9, 13, 1, 3], [2, 27, 16, 17, 18, 1, 3], [25], [2, 27, 20, 1, 3]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    spec = importlib.util.spec_from_file_location("tiny_model", ROOT / "examples" / "tiny_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path = tmp_path_factory.mktemp("tiny")
    module.build(path, seed=1)
    return path


@pytest.fixture
def policy(folder: Path) -> PolicyModel:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return PolicyModel(model, AutoTokenizer.from_pretrained(folder), version=0, seed=3)


class Following:
    """Stands in for a weights follower: says once that a version was loaded."""

    loaded_total = 0
    arriving: int | None = None
    refused = None

    def refresh(self) -> int | None:
        version, self.arriving = self.arriving, None
        self.loaded_total += version is not None
        return version

    def close(self) -> None:
        pass


@pytest.fixture
def follower() -> Following:
    return Following()


@pytest.fixture
def engine(policy: PolicyModel, follower: Following) -> Iterator[PolicyEngine]:
    engine = PolicyEngine(policy, follower)
    engine.start()
    yield engine
    engine.close()


@pytest.fixture
async def client(engine: PolicyEngine, policy: PolicyModel) -> AsyncIterator[Client]:
    api = PolicyApi(policy.tokenizer, "tiny", policy.context, policy.vocab_size)
    async with served(PolicyServer(engine, api)) as client:
        yield client


def recomputed(model, prompt: list[int], answer: list[int], temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities of an answer from one forward pass without any cache or padding."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(answer)[:, None])[:, 0].numpy()


# --- requests and responses ---------------------------------------------------------------------------------


async def test_generate_speaks_the_dialect_of_atropos(client, policy):
    body = {
        "prompt": {"prompt_token_ids": PROMPTS[0]},
        "logprobs": 0,
        "n": 3,
        "max_tokens": 6,
        "temperature": 0.9,
    }
    response = await client.post("/generate", json=body)
    answer = await response.json()
    assert response.headers["X-Policy-Version"] == "0"
    assert answer["weight_version"] == 0
    assert answer["prompt_token_ids"] == PROMPTS[0]
    assert len(answer["logprobs"]) == len(answer["finish_reasons"]) == 3
    for tokens, entries in zip(answer["token_ids"], answer["logprobs"], strict=True):
        assert [int(next(iter(entry[0]))) for entry in entries] == tokens
        expected = recomputed(policy.model, PROMPTS[0], tokens, 0.9)
        np.testing.assert_allclose([next(iter(entry[0].values())) for entry in entries], expected, atol=1e-4)


async def test_the_token_route_of_vllm_gives_what_generate_gives(client, policy):
    """As verifiers' train client asks: ids in, ids out, the log-probability of each, alternatives on top."""
    sampling = {"n": 2, "max_tokens": 6, "temperature": 0.9, "seed": 5, "logprobs": 1}
    more = {"stop_token_ids": [], "skip_special_tokens": False, "detokenize": False}
    body = {"model": "m", "token_ids": PROMPTS[0], "sampling_params": sampling | more, "priority": 1}
    answer = await (await client.post("/inference/v1/generate", json=body)).json()
    twin = {"prompt": {"prompt_token_ids": PROMPTS[0]}, **sampling}
    same = await (await client.post("/generate", json=twin)).json()
    assert answer["prompt_token_ids"] == PROMPTS[0]
    assert [each["token_ids"] for each in answer["choices"]] == same["token_ids"]
    assert [each["weight_versions"] for each in answer["choices"]] == same["weight_versions"]
    for choice in answer["choices"]:
        entries = choice["logprobs"]["content"]
        assert [entry["token_id"] for entry in entries] == choice["token_ids"]
        assert all(entry["top_logprobs"][0]["logprob"] >= entry["logprob"] for entry in entries)
        expected = recomputed(policy.model, PROMPTS[0], choice["token_ids"], 0.9)
        np.testing.assert_allclose([entry["logprob"] for entry in entries], expected, atol=1e-4)


async def test_the_token_route_fills_the_context_unless_told_how_much(client, policy):
    body = {"token_ids": PROMPTS[0], "sampling_params": {"ignore_eos": True}}
    answer = await (await client.post("/inference/v1/generate", json=body)).json()
    (choice,) = answer["choices"]
    assert len(choice["token_ids"]) == policy.context - len(PROMPTS[0])
    assert choice["finish_reason"] == "length"


async def test_every_answer_names_the_versions_that_sampled_it(client, follower):
    """Batches are static: one version for all tokens of an answer, which each form says in its own way."""
    follower.arriving = 9
    asked = {"max_tokens": 4, "temperature": 0.9, "n": 2}
    body = await (await client.post("/generate", json=asked | {"prompt": ">37", "logprobs": 0})).json()
    assert body["weight_versions"] == [
        [{"version": "9", "start": 0, "end": len(tokens)}] for tokens in body["token_ids"]
    ]
    text = await (await client.post("/v1/completions", json=asked | {"prompt": [">37", ">3"]})).json()
    chat = await (
        await client.post(
            "/v1/chat/completions", json=asked | {"messages": [{"role": "user", "content": ">37"}]}
        )
    ).json()
    assert [(each["oldest_weight_version"], each["weight_version"]) for each in (text, chat)] == [(9, 9)] * 2
    assert [choice["prompt_token_ids"] for choice in text["choices"]] == [[25, 9, 13]] * 2 + [[25, 9]] * 2
    assert chat["prompt_token_ids"] == PROMPTS[0]


async def test_completions_take_all_four_forms_of_a_prompt(client):
    greedy = {"max_tokens": 4, "temperature": 0, "logprobs": 2}
    texts = []
    for prompt in (">37", [25, 9, 13], [">37", ">37"], [[25, 9, 13], [25, 9, 13]]):
        body = await (await client.post("/v1/completions", json=greedy | {"prompt": prompt})).json()
        assert [choice["index"] for choice in body["choices"]] == list(range(len(body["choices"])))
        texts += [choice["text"] for choice in body["choices"]]
        logprobs = body["choices"][0]["logprobs"]
        assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"])
    assert len(texts) == 6
    assert len(set(texts)) == 1
    assert body["usage"] == {"prompt_tokens": 6, "completion_tokens": 8, "total_tokens": 14}


async def test_chat_renders_the_template_and_reports_alternatives(client):
    ask = {"messages": [{"role": "user", "content": ">37"}], "temperature": 0, "max_tokens": 4}
    body = await (
        await client.post("/v1/chat/completions", json=ask | {"n": 2, "logprobs": True, "top_logprobs": 3})
    ).json()
    same = {"prompt": {"prompt_token_ids": PROMPTS[0]}, "temperature": 0, "max_tokens": 4, "logprobs": 0}
    twin = await (await client.post("/generate", json=same)).json()
    assert [choice["token_ids"] for choice in body["choices"]] == twin["token_ids"] * 2
    for entry in body["choices"][0]["logprobs"]["content"]:
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]  # greedy: the likeliest one
        assert len(entry["top_logprobs"]) == 3
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["usage"]["prompt_tokens"] == len(PROMPTS[0])


WRONG = [
    ("GET", "/generate", b"", 405, "POST "),
    ("POST", "/generat", {}, 404, "POST "),
    ("POST", "/generate", b"", 400, "empty"),
    ("POST", "/generate", b"{", 400, "not JSON"),
    ("POST", "/generate", b"[1]", 400, "no JSON object"),
    ("POST", "/generate", {"prompt": ""}, 400, "no tokens"),
    ("POST", "/generate", {"prompt": {"prompt_token_ids": []}}, 400, "no tokens"),
    ("POST", "/generate", {"prompt": [1]}, 400, "prompt: [1]"),
    ("POST", "/generate", {"prompt": {"prompt_token_ids": [3, 28]}}, 400, "token id 28"),
    ("POST", "/generate", {"prompt": {"prompt_token_ids": [3]}, "max_tokens": 128}, 400, "context of 128"),
    ("POST", "/generate", {"prompt": "1", "temperature": -1}, 400, "temperature: -1"),
    ("POST", "/generate", {"prompt": "1", "temperature": "hot"}, 400, "temperature: 'hot'"),
    ("POST", "/generate", {"prompt": "1", "seed": 1 << 65}, 400, "seed: 36893488147419103232"),
    ("POST", "/generate", {"prompt": "1", "n": 0}, 400, "n: 0"),
    ("POST", "/generate", {"prompt": "1", "n": 257}, 400, "at most 256"),
    ("POST", "/generate", {"prompt": "1", "top_k": 5}, 400, "top_k: 5"),
    ("POST", "/inference/v1/generate", b"{", 400, "truncated"),
    ("POST", "/inference/v1/generate", {"sampling_params": {}}, 400, "no token_ids"),
    ("POST", "/inference/v1/generate", {"token_ids": []}, 400, "no tokens"),
    ("POST", "/inference/v1/generate", {"token_ids": [3, 28]}, 400, "token id 28"),
    ("POST", "/inference/v1/generate", {"token_ids": "3"}, 400, "token_ids: '3'"),
    ("POST", "/inference/v1/generate", {"token_ids": [3], "sampling_params": [1]}, 400, "sampling_params"),
    ("POST", "/inference/v1/generate", {"token_ids": [3], "prompt": "1"}, 400, "'prompt'"),
    ("POST", "/inference/v1/generate", {"token_ids": [3], "sampling_params": {"top_k": 5}}, 400, "top_k: 5"),
    ("POST", "/inference/v1/generate", {"token_ids": [3], "features": {"mm": 1}}, 400, "features"),
    ("POST", "/inference/v1/generate", {"token_ids": [3] * 200}, 400, "200 token ids"),
    ("POST", "/v1/completions", {"prompt": "1", "stream": True}, 400, "stream"),
    ("POST", "/v1/completions", {"prompt": ["1", {}]}, 400, "prompt: {}"),
    ("POST", "/v1/completions", {"prompt": "1" * 128}, 400, "128 prompt and 16 new tokens"),
    ("POST", "/v1/completions", {"prompt": "1", "max_tokens": "many"}, 400, "max_tokens: 'many'"),
    ("POST", "/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("POST", "/v1/chat/completions", {"messages": [{"content": "no role"}]}, 400, "chat template"),
]


async def test_a_wrong_request_gets_the_reason_and_what_to_send(client):
    for method, path, body, status, named in WRONG:
        answer = await client.request(
            method, path, data=body if isinstance(body, bytes) else json.dumps(body).encode()
        )
        text = (await answer.json())["error"]["message"]
        assert (answer.status, named in text) == (status, True), (path, body, text)
        assert (text.count(" -> "), text.count("\n")) == (1, 0), text
        assert answer.headers["X-Policy-Version"] == "0"


async def test_health_and_models_name_the_version_that_idle_servers_pick_up(client, follower):
    follower.arriving = 9
    async with asyncio.timeout(10):
        while (health := await (await client.get("/health")).json())["weight_version"] != 9:
            await asyncio.sleep(0.005)
    assert (health["status"], health["weights_loaded_total"]) == ("ok", 1)
    models = await (await client.get("/v1/models")).json()
    assert (models["data"][0]["id"], models["data"][0]["max_model_len"]) == ("tiny", 128)
    assert (await client.get("/v1/nothing")).status == 404


async def test_atropos_own_server_class_gets_tokens_logprobs_and_prompt_scores(client, policy, folder):
    pytest.importorskip("atroposlib")
    from atroposlib.envs.server_handling.managed_server import ManagedServer
    from atroposlib.envs.server_handling.server_baseline import APIServerConfig
    from atroposlib.envs.server_handling.vllm_server import VLLMServer

    config = APIServerConfig(
        base_url=str(client.make_url("/v1")), api_key="x", model_name=str(folder), server_type="vllm"
    )
    server = VLLMServer(config)
    try:
        managed = ManagedServer(server, tokenizer=policy.tokenizer)
        messages = [{"role": "user", "content": ">37"}]
        await managed.chat_completion(messages=messages, n=4, max_tokens=6, temperature=0.8)
        for node in managed.get_state()["nodes"]:
            answer = [token for token in node.masked_tokens if token != -100]
            assert node.tokens == PROMPTS[0] + answer
            expected = recomputed(policy.model, PROMPTS[0], answer, 0.8)
            np.testing.assert_allclose(node.logprobs[len(PROMPTS[0]) :], expected, atol=1e-4)

        scored = await server.get_logprobs(input_ids=PROMPTS[0] + PROMPTS[1], top_k=2)
        own = [values[0] for values in scored["prompt_topk_logprobs"][len(PROMPTS[0]) :]]
        np.testing.assert_allclose(own, recomputed(policy.model, PROMPTS[0], PROMPTS[1]), atol=1e-4)

        chat = await server.chat_completion(messages=messages, n=2, max_tokens=3, temperature=0.0)
        assert [len(choice.token_ids) for choice in chat.choices] == [3, 3]
    finally:
        server.check_task.cancel()
        await server.openai.close()


class Gate:
    """Holds the model at its third forward pass until the test opens."""

    def __init__(self, forward: Callable) -> None:
        self.reached, self.opened, self.calls = threading.Event(), threading.Event(), 0
        self._forward = forward

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls == 3:
            self.reached.set()
            assert self.opened.wait(30)
        return self._forward(*args, **kwargs)


async def test_a_client_that_hangs_up_frees_its_rows_and_spares_the_others(client, policy, monkeypatch):
    gate = Gate(policy.model.forward)
    batch: list[Row] = []
    generate = policy.generate
    monkeypatch.setattr(policy.model, "forward", gate)
    monkeypatch.setattr(policy, "generate", lambda rows: (batch.extend(rows), generate(rows)))
    long = {"prompt": "0", "max_tokens": 100, "ignore_eos": True}
    short = {"prompt": "1", "max_tokens": 5, "ignore_eos": True}
    hanging = asyncio.create_task(client.post("/v1/completions", json=long))
    patient = asyncio.create_task(client.post("/v1/completions", json=short))
    await asyncio.to_thread(gate.reached.wait, 30)
    hanging.cancel()
    async with asyncio.timeout(10):
        while not any(row.abandoned for row in batch):
            await asyncio.sleep(0.001)
    gate.opened.set()

    assert [row.abandoned for row in batch] == [row.sampling.max_tokens == 100 for row in batch]
    body = await (await patient).json()
    assert len(body["choices"][0]["token_ids"]) == 5
    assert gate.calls == 5  # the abandoned hundred were never computed


# --- the program --------------------------------------------------------------------------------------------


@pytest.fixture
def bridge() -> Iterator[str]:
    name = f"policy-test-{os.getpid()}"
    yield name
    assert not shmbridge.clean(name, dry_run=False).kept


@contextmanager
def program(folder: Path, log: Path, *flags: str) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-m", "shmbridge.consumers.policy_server", "--model", str(folder), *flags]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=log.parent)
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)


async def address(process: subprocess.Popen, log: Path) -> str:
    async with asyncio.timeout(60):
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())):
            assert process.poll() is None, log.read_text()
            await asyncio.sleep(0.05)
    return found[0]


async def half_a_body() -> AsyncIterator[bytes]:
    yield b'{"prompt": "1'
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("signum", "status"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.long)]
)
async def test_the_program_serves_without_a_segment_and_ends_quietly_on_signals(
    folder, tmp_path, bridge, signum, status
):
    log = tmp_path / "server.log"
    with program(folder, log, "--bridge", bridge, "--port", "0") as process:
        url = await address(process, log)
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{url}/generate", json={"prompt": "1", "max_tokens": 3}) as response:
                assert (await response.json())["weight_version"] == 0
            # a request in flight must not hold the end up, nor may it be answered with half an answer
            body = {"prompt": "1", "n": 256, "max_tokens": 120, "ignore_eos": True}
            asked = asyncio.create_task(session.post(f"{url}/generate", json=body))
            half = asyncio.create_task(session.post(f"{url}/generate", data=half_a_body()))
            await asyncio.sleep(0.5)
            process.send_signal(signum)
            outcome, refused = await asyncio.gather(asked, half, return_exceptions=True)
            assert isinstance(refused, Exception) or refused.status == 503
            if isinstance(outcome, aiohttp.ClientResponse) and outcome.status == 200:
                assert [len(ids) for ids in (await outcome.json())["token_ids"]] == [120] * 256
        assert await asyncio.to_thread(process.wait, 30) == status
    assert "Traceback" not in log.read_text()


PUBLISH_AND_WAIT = """
import sys, time
from transformers import AutoModelForCausalLM
from shmbridge.weights import WeightsWriter
from tests.adapters.served import Client, served
model = AutoModelForCausalLM.from_pretrained(sys.argv[2])
writer = WeightsWriter(sys.argv[1])
writer.publish(7, [(name, p * 3) for name, p in model.named_parameters()])
print("published", flush=True)
time.sleep(600)
"""


async def test_the_program_follows_the_weights_of_a_bridge_over_their_writers_death(folder, tmp_path, bridge):
    log, greedy = tmp_path / "server.log", {"prompt": ">37", "max_tokens": 8, "temperature": 0, "logprobs": 0}
    command = [sys.executable, "-c", PUBLISH_AND_WAIT, bridge, str(folder)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": PYTHONPATH})
    try:
        with program(folder, log, "--bridge", bridge, "--port", "0") as process:
            url = await address(process, log)
            assert await asyncio.to_thread(writer.stdout.readline) == b"published\n"
            await version_reaches(url, 7)
            writer.kill()
            await asyncio.to_thread(writer.wait, 30)
            assert (await generated(url, greedy))["weight_version"] == 7

            model = AutoModelForCausalLM.from_pretrained(folder)
            with torch.no_grad(), WeightsWriter(bridge) as successor:
                successor.publish(8, [(name, p * -2) for name, p in model.named_parameters()])
                for parameter in model.parameters():
                    parameter.mul_(-2)
            await version_reaches(url, 8)
            (answer,) = (await generated(url, greedy))["logprobs"]
            tokens = [int(next(iter(entry[0]))) for entry in answer]
            values = [next(iter(entry[0].values())) for entry in answer]
            np.testing.assert_allclose(values, recomputed(model, [25, 9, 13], tokens), atol=1e-4)
    finally:
        writer.kill()
        writer.wait(30)
        writer.stdout.close()


async def generated(url: str, body: dict) -> dict:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/generate", json=body) as response:
        return await response.json()


async def version_reaches(url: str, version: int) -> None:
    async with asyncio.timeout(60), aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/health") as response:
                if (await response.json())["weight_version"] == version:
                    return
            await asyncio.sleep(0.02)


async def test_the_program_refuses_a_taken_port_and_a_missing_model_with_a_reason(folder, tmp_path, client):
    taken, missing = tmp_path / "taken.log", tmp_path / "missing.log"
    with (
        program(folder, taken, "--port", str(client.port)) as first,
        program(tmp_path / "nothing", missing, "--port", "0") as second,
    ):
        assert await asyncio.to_thread(first.wait, 60) == 1
        assert await asyncio.to_thread(second.wait, 60) == 1
    assert f"cannot listen on 127.0.0.1:{client.port}: the port is in use -> " in taken.read_text()
    assert "nothing" in missing.read_text()
    assert "Traceback" not in taken.read_text() + missing.read_text()
