"""The middleware before a stand-in for vLLM's app: its own routes, the fields it adds, and clients that hang
up.

The engine is a stand-in, too: `tests/adapters/vllm_live/server/` has the real ones.
"""

from __future__ import annotations

import asyncio
import sys
import types
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from shmbridge.consumers.vllm.middleware import BODY_LIMIT, ShmBridge
from shmbridge.producers.rollout.sampling import completions_in
from shmbridge.weights import WeightsWriter


class Client:
    """Stands in for AsyncLLM."""

    errored = False
    tokenizer = None
    model_config = SimpleNamespace(is_multimodal_model=False)

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.label = "default"
        self.started = asyncio.Event()
        self.aborted = False
        self.hang = False
        self.error: Exception | None = None
        self.fails = ""  # the name of a call
        self.during = None  # what happens while a request is sampled
        self.reports = True  # which version sampled which token, as from 0.32 on

    def __getattr__(self, name):
        async def call(*args, **kwargs):
            self.calls.append(name)
            if name == self.fails:
                raise RuntimeError(f"{name} without a matching start")
            if name in ("finish_weight_update", "update_weight_version") and args:
                self.label = args[0]
            return name == "reset_prefix_cache"

        return call

    async def generate(self, prompt, params, request_id):
        self.started.set()
        if self.error:
            raise self.error
        try:
            await asyncio.sleep(60.0 if self.hang else 0)
        except asyncio.CancelledError:
            self.aborted = True
            raise
        if self.during:
            await self.during()
        span = SimpleNamespace(version=self.label, start=0, end=2)
        output = SimpleNamespace(text="ab", token_ids=[1, 2], logprobs=None, finish_reason="stop")
        if self.reports:
            output.weight_versions = [span]
        yield SimpleNamespace(prompt="p", prompt_token_ids=[5], prompt_logprobs=None, outputs=[output])


class ClientError(Exception):
    """Stands in for vLLM's."""


@pytest.fixture(autouse=True)
def _vllm(monkeypatch):
    """The modules of vLLM that are imported where it is called."""
    for name, members in {
        "vllm.exceptions": {"VLLMClientError": ClientError},
        "vllm.sampling_params": {
            "RequestOutputKind": SimpleNamespace(FINAL_ONLY=2),
            "SamplingParams": SimpleNamespace,
        },
        "vllm.distributed.weight_transfer.base": {"WeightTransferUpdateRequest": SimpleNamespace},
        "vllm.outputs": {"CompletionOutput": SimpleNamespace(weight_versions=None)},
    }.items():
        parts = name.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)


class Server:
    """A middleware with a lifespan of its own, over an app that answers completions."""

    def __init__(self, bridge: str, **config) -> None:
        self.client = Client()
        transfer = SimpleNamespace(backend=config.pop("backend", "shmbridge"))
        rank = config.pop("rank", 0)
        self.state = SimpleNamespace(
            engine_client=self.client,
            args=SimpleNamespace(api_key=config.pop("api_key", None)),
            openai_serving_models=SimpleNamespace(base_model_paths=[SimpleNamespace(name="policy")]),
            vllm_config=SimpleNamespace(
                additional_config={"shmbridge": {"bridge": bridge} | config},
                weight_transfer_config=transfer,
                parallel_config=SimpleNamespace(
                    _api_process_rank=rank, data_parallel_size=config.pop("engines", 1)
                ),
            ),
        )
        self.app = ShmBridge(self._inner)
        self.content_type = b"application/json"
        self.during = None
        self._lifespan: asyncio.Task | None = None
        self._stop = asyncio.Event()

    async def _inner(self, scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        if self.during:
            await self.during()
        headers = [(b"content-type", self.content_type), (b"content-length", b"8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"id"', "more_body": True})
        await send({"type": "http.response.body", "body": b":1}"})

    async def start(self) -> dict:
        said: asyncio.Queue = asyncio.Queue()
        first = [{"type": "lifespan.startup"}]

        async def receive():
            if first:
                return first.pop()
            await self._stop.wait()
            return {"type": "lifespan.shutdown"}

        scope = {"type": "lifespan", "app": SimpleNamespace(state=self.state)}
        self._lifespan = asyncio.create_task(self.app(scope, receive, said.put))
        return await said.get()

    async def stop(self) -> None:
        self._stop.set()
        if self._lifespan:
            await self._lifespan

    async def ask(
        self, method: str, path: str, body: bytes = b"", *, headers=(), gone: asyncio.Event | None = None
    ):
        """(status, headers, JSON); None if nothing was sent."""
        sent = []
        parts = [
            {"type": "http.request", "body": body[:3], "more_body": True},
            {"type": "http.request", "body": body[3:]},
        ]

        async def receive():
            if parts:
                return parts.pop(0)
            await (gone or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": list(headers),
            "app": SimpleNamespace(state=self.state),
        }
        await self.app(scope, receive, send)
        if not sent:
            return None
        raw = b"".join(each.get("body", b"") for each in sent[1:])
        headers = dict(sent[0]["headers"])
        assert int(headers[b"content-length"]) == len(raw)
        return sent[0]["status"], headers, msgspec.json.decode(raw)


@pytest.fixture
async def serving(bridge):
    servers = []

    async def make(**config) -> Server:
        server = Server(bridge, **config)
        servers.append(server)
        server.said = await server.start()
        return server

    yield make
    for server in servers:
        await server.stop()


@pytest.fixture
def writer(bridge):
    with WeightsWriter(bridge) as writer:
        yield writer


def publish(writer: WeightsWriter, version: int) -> None:
    writer.publish(version, [("w", np.zeros(3, np.float32))])


async def followed(server: Server, version: int) -> None:
    while (await server.ask("GET", "/policy_version"))[2]["version"] != version:
        await asyncio.sleep(0.005)


QUESTION = b'{"prompt": {"prompt_token_ids": [5]}}'


async def test_newest_version_is_loaded_before_the_server_listens(serving, writer, bridge):
    publish(writer, 7)
    server = await serving()
    assert server.said == {"type": "lifespan.startup.complete"}
    assert server.client.label == "7"
    status, headers, told = await server.ask("GET", "/policy_version")
    assert (status, headers[b"x-policy-version"]) == (200, b"7")
    assert (told["version"], told["bridge"], told["pause"], told["loaded_total"]) == (7, bridge, "keep", 1)
    steps = [call for call in server.client.calls if call != "is_paused"]
    assert steps == [
        "pause_generation",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "reset_prefix_cache",
        "resume_generation",
    ]


async def test_each_version_of_a_live_learner_is_taken(serving, writer):
    server = await serving()
    told = (await server.ask("GET", "/policy_version"))[2]
    assert told["version"] is None
    for version in (0, 1, 2):
        publish(writer, version)
        await followed(server, version)
    assert server.client.label == "2"


async def test_loaded_weights_that_get_no_label_are_of_no_version(serving, writer, monkeypatch):
    """Somebody else ends the update during the load: the engine has the new weights, and would go on with the
    old label.
    """
    monkeypatch.setattr("shmbridge.consumers.vllm.follow._FIRST_RETRY_S", 0.01)
    server = await serving()
    publish(writer, 1)
    await followed(server, 1)
    server.client.fails = "finish_weight_update"
    publish(writer, 2)
    while not (told := (await server.ask("GET", "/policy_version"))[2])["last_error"]:
        await asyncio.sleep(0.005)
    assert (told["version"], server.client.label) == (None, "unknown")
    assert "it has taken it: samples are of version 'unknown'" in told["last_error"]
    server.client.fails = ""
    publish(writer, 3)
    await followed(server, 3)
    assert server.client.label == "3"


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"backend": "nccl"}, '--weight-transfer-config \'{"backend": "shmbridge"}\''),
        ({"pause": "never"}, "Invalid enum value 'never'"),
    ],
)
async def test_server_that_could_not_follow_does_not_start(serving, config, told):
    server = await serving(**config)
    assert server.said["type"] == "lifespan.startup.failed"
    assert told in server.said["message"]


async def test_second_api_server_of_an_engine_answers_and_does_not_follow(serving, writer):
    publish(writer, 7)
    server = await serving(rank=1)
    assert not server.client.calls
    assert (await server.ask("GET", "/policy_version"))[2]["follows"] is False
    status, headers, told = await server.ask("POST", "/generate", QUESTION)
    assert (status, told["weight_version"]) == (200, None)
    assert b"x-policy-version" not in headers


async def test_generate_answers_with_the_version_of_each_token(serving, writer):
    publish(writer, 7)
    server = await serving()
    status, headers, told = await server.ask("POST", "/generate", QUESTION)
    assert (status, headers[b"x-policy-version"]) == (200, b"7")
    assert told["weight_versions"] == [[{"version": "7", "start": 0, "end": 2}]]
    assert told["weight_version"] == 7
    assert "oldest_weight_version" not in told


async def test_a_release_that_reports_no_versions_of_tokens_bounds_them(serving, writer, monkeypatch, caplog):
    """As vLLM before 0.32: known per token only where no update fell into the answer."""
    monkeypatch.setattr(sys.modules["vllm.outputs"], "CompletionOutput", SimpleNamespace())
    publish(writer, 7)
    server = await serving()
    assert "does not report which version sampled which token" in caplog.text
    server.client.reports = False

    async def during():
        publish(writer, 9)
        await followed(server, 9)

    server.client.during = during
    _, headers, over = await server.ask("POST", "/generate", QUESTION)
    assert (over["weight_versions"], headers[b"x-policy-version"]) == ([None], b"9")
    server.client.during = None
    after = (await server.ask("POST", "/generate", QUESTION))[2]
    read = [completions_in(told)[0] for told in (over, after)]
    assert [(each.oldest, each.newest, each.spans) for each in read] == [(7, 9, ()), (9, 9, ((9, 0, 2),))]


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, 400), (ClientError("too long"), 400), (ValueError("odd"), 400), (RuntimeError("broken"), 500)],
)
async def test_generate_says_why_not(serving, error, status):
    server = await serving()
    server.client.error = error
    found, _, told = await server.ask(
        "POST", "/generate", QUESTION if error else b'{"prompt": "a", "foo": 1}'
    )
    assert found == told["error"]["code"] == status
    assert (str(error) if error else "unknown field `foo`") in told["error"]["message"]


async def test_body_without_end_is_refused(serving):
    server = await serving()
    assert (await server.ask("POST", "/generate", b" " * (BODY_LIMIT + 1)))[0] == 413


async def test_client_that_hangs_up_aborts_its_request(serving):
    server = await serving()
    server.client.hang = True
    gone = asyncio.Event()
    asking = asyncio.create_task(server.ask("POST", "/generate", QUESTION, gone=gone))
    await server.client.started.wait()
    assert not asking.done()
    gone.set()
    assert await asyncio.wait_for(asking, 10.0) is None
    assert server.client.aborted


async def test_key_of_the_server_is_wanted_here_too(serving):
    server = await serving(api_key=["secret"])
    assert (await server.ask("POST", "/generate", QUESTION))[0] == 401
    assert (await server.ask("POST", "/generate", QUESTION, headers=[(b"authorization", b"Bearer other")]))[
        0
    ] == 401
    assert (await server.ask("POST", "/generate", QUESTION, headers=[(b"authorization", b"Bearer secret")]))[
        0
    ] == 200


async def test_completions_say_the_versions_of_their_tokens(serving, writer):
    publish(writer, 7)
    server = await serving()

    async def meanwhile() -> None:
        publish(writer, 8)
        await followed(server, 8)

    server.during = meanwhile
    status, headers, told = await server.ask("POST", "/v1/completions", b"{}")
    assert status == 200
    assert headers[b"x-policy-version"] == b"8"
    assert told == {"id": 1, "weight_version": 8, "oldest_weight_version": 7}


async def test_other_answers_get_the_header_alone(serving, writer):
    publish(writer, 7)
    server = await serving()
    _, headers, told = await server.ask("GET", "/v1/models")
    assert (headers[b"x-policy-version"], told) == (b"7", {"id": 1})
    server.content_type = b"text/event-stream"
    _, headers, told = await server.ask("POST", "/v1/chat/completions", b"{}")
    assert (headers[b"x-policy-version"], told) == (b"7", {"id": 1})


async def test_unknown_version_is_not_claimed(serving):
    server = await serving()
    _, headers, told = await server.ask("POST", "/v1/completions", b"{}")
    assert b"x-policy-version" not in headers
    assert told == {"id": 1}
