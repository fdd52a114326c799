"""HttpServer returns the tokens of servers of each API, and refuses answers that are not exact."""

import asyncio
import contextlib
import socket
from math import nan

import pytest

from shmbridge.errors import BadArgument
from shmbridge.producers.rollout import (
    ChatFormat,
    ChatServer,
    ContextFull,
    Episode,
    HttpServer,
    NoTokens,
    Sampling,
    ServerFailed,
)
from shmbridge.schema import recorded_logprobs
from tests.environments.byte_tokenizer import byte_tokenizer
from tests.environments.scripted_server import ScriptedServer, serving

PROMPT = [5, 9, 33]


def scripted(**options) -> ScriptedServer:
    return ScriptedServer(byte_tokenizer(), lambda prompt: "abc", version=7, **options)


@pytest.mark.parametrize(
    ("api", "versions"),
    [
        ("generate", [7, 7, 7, 7]),
        ("vllm", [7, 7, 8, 8]),  # an update in the middle of the answer
        ("completions", [7, 7, 7, 7]),
        ("sglang", [-1, -1, -1, -1]),  # it names no version of a token
    ],
)
async def test_http_server_returns_what_was_sampled(api, versions):
    async with serving(scripted()) as served, HttpServer(served.url, api=api, model="m") as server:
        sampled = await server.sample(PROMPT, Sampling(max_tokens=9, stop=("x",), seed=3))
        tokens, logprobs = served.sampled(PROMPT)
        assert (sampled.token_ids, sampled.logprobs, sampled.versions) == (tokens, logprobs, versions)
        assert sampled.finish_reason == "stop"
        assert served.prompts == [PROMPT]


@pytest.mark.parametrize(
    ("owner", "without", "api"),
    [
        ("shmbridge", (), "generate"),
        ("vllm", (), "vllm"),
        ("vllm", ("/inference/v1/generate",), "completions"),
        ("sglang", (), "sglang"),
    ],
)
async def test_http_server_finds_the_api_of_a_server(owner, without, api):
    async with serving(scripted(owner=owner, without=without)) as served, HttpServer(served.url) as server:
        await asyncio.gather(*(server.sample(PROMPT, Sampling()) for _ in range(3)))
        assert server.api == api
        assert len(served.prompts) == 3


@pytest.mark.parametrize("api", ["vllm", "completions"])
@pytest.mark.parametrize("without", ["token_ids", "logprobs"])
async def test_http_server_refuses_answers_without_tokens_or_logprobs(api, without):
    async with serving(scripted(without=[without])) as served, HttpServer(served.url, api=api) as server:
        with pytest.raises(NoTokens, match="allow"):
            await server.sample(PROMPT, Sampling())


async def test_http_server_refuses_an_answer_to_another_prompt():
    served = scripted(without=["first prompt token"])
    async with serving(served), HttpServer(served.url, api="completions") as server:
        with pytest.raises(NoTokens, match="a prompt of 2 tokens, not after the 3"):
            await server.sample(PROMPT, Sampling())


async def test_http_server_asks_again_while_the_server_is_busy():
    served = scripted(statuses=[503, 429])
    async with serving(served), HttpServer(served.url, api="generate") as server:
        await server.sample(PROMPT, Sampling())
    assert served.statuses == []


async def test_http_server_failures_name_the_server():
    served = scripted(statuses=[400])
    async with serving(served), HttpServer(served.url, api="generate", patience_s=0) as server:
        with pytest.raises(ServerFailed, match="answered 400: not now"):
            await server.sample(PROMPT, Sampling())
    async with HttpServer(served.url, api="generate", patience_s=0) as server:
        with pytest.raises(ServerFailed, match="is the server running"):
            await server.sample(PROMPT, Sampling())


async def test_http_server_refuses_another_form():
    async with serving(scripted()) as served, HttpServer(served.url, api="sglang") as server:
        served._sglang = lambda body: {"text": "abc"}
        with pytest.raises(ServerFailed, match="name the API"):
            await server.sample(PROMPT, Sampling())


async def test_http_server_names_the_model_that_the_server_lists():
    async with serving(scripted()) as served, HttpServer(served.url, api="vllm") as server:
        await server.sample(PROMPT, Sampling(max_tokens=3))
        assert served.bodies[0]["model"] == "scripted"


async def test_a_log_probability_that_the_server_could_not_give_costs_no_answer():
    logprobs = [[[{"65": None}], [{"66": float("-inf")}], [{"67": -0.5}]]]
    answer = {"token_ids": [[65, 66, 67]], "logprobs": logprobs, "finish_reasons": ["stop"]}
    async with serving(scripted()) as served, HttpServer(served.url, api="generate") as server:
        served._generate = lambda body: answer
        sampled = await server.sample(PROMPT, Sampling())
    assert recorded_logprobs(sampled.logprobs).tolist() == pytest.approx([nan, nan, -0.5], nan_ok=True)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"logprobs": [[[{"65": -0.5}], [{"66": "much"}]]]}, NoTokens, "of token 1 is 'much'"),
        ({"logprobs": [[[{"65": -0.5}]]]}, ServerFailed, "not the response of the API"),
        ({"token_ids": [[-65, 66]]}, ServerFailed, "token 0 of the answer is -65"),
        ({"token_ids": [[65, 1 << 40]]}, ServerFailed, "token 1 of the answer is 1099511627776"),
        ({"token_ids": [["65", 66]]}, ServerFailed, "token 0 of the answer is '65'"),
        ({"token_ids": [[]], "logprobs": [[]]}, ServerFailed, "the answer is empty"),
        ({"finish_reasons": ["error"]}, ServerFailed, "ended the answer with an error"),
    ],
)
async def test_http_server_refuses_answers_that_cannot_be_trained_on(changes, error, says):
    good = {"token_ids": [[65, 66]], "logprobs": [[[{"65": -0.5}], [{"66": -0.5}]]]}
    async with serving(scripted()) as served, HttpServer(served.url, api="generate") as server:
        served._generate = lambda body: {**good, "finish_reasons": ["stop"], **changes}
        with pytest.raises(error, match=f"{served.url}/generate: .*{says}"):
            await server.sample(PROMPT, Sampling())


async def test_http_server_counts_log_probabilities():
    async with serving(scripted()) as served, HttpServer(served.url, api="completions") as server:
        answered = served._completions

        def one_short(body):
            said = answered(body)
            said["choices"][0]["logprobs"]["token_logprobs"].pop()
            return said

        served._completions = one_short
        with pytest.raises(NoTokens, match="3 log-probabilities for 4 tokens"):
            await server.sample(PROMPT, Sampling())


async def test_http_server_context_that_is_full_ends_an_episode():
    """As Episode(context=) does: without it the server's own counts, and no group is lost by it."""
    async with serving(scripted()) as served, HttpServer(served.url, api="vllm") as server:
        about = served._about
        limits = {"data": [{"id": "m", "max_model_len": 40}]}
        served._about = lambda path: limits if path == "/v1/models" else about(path)
        episode = Episode(server, ChatFormat(served.tokenizer), [{"role": "user", "content": "?"}])
        await episode.sample(max_tokens=100)
        assert served.bodies[0]["sampling_params"]["max_tokens"] == 40 - episode.prompt_length
        episode.observe([{"role": "user", "content": "x" * 50}])
        with pytest.raises(ContextFull, match="leave no room in the context of 40"):
            await episode.sample()
        assert (episode.finish_reason, len(served.bodies)) == ("length", 1)


@pytest.mark.parametrize("listed", [{"data": ["m"]}, {"data": {}}, {"data": [{"max_model_len": "9"}]}])
async def test_http_server_survives_an_odd_list_of_models(listed):
    async with serving(scripted()) as served, HttpServer(served.url, api="generate") as server:
        served._about = lambda path: listed
        with pytest.raises(BadArgument, match="does not list how long a context"):
            await server.sample(PROMPT, Sampling())


@pytest.mark.parametrize("url", ["127.0.0.1:9004", "localhost", "", "ftp://127.0.0.1"])
def test_http_server_addresses_have_a_scheme(url):
    with pytest.raises(BadArgument, match="is no address of a server"):
        HttpServer(url)


async def test_http_server_takes_an_address_with_v1():
    async with serving(scripted()) as served, HttpServer(f"{served.url}/v1/") as server:
        assert (await server.sample(PROMPT, Sampling())).token_ids == served.sampled(PROMPT)[0]


async def test_http_server_says_once_that_a_server_is_away(caplog):
    async with HttpServer("http://127.0.0.1:9", api="generate", patience_s=1.2) as server:
        asked = (server.sample(PROMPT, Sampling(max_tokens=2)) for _ in range(3))
        said = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(each) for each in said] == [ServerFailed] * 3
    assert len([each for each in caplog.messages if "asking again for 1.2 s" in each]) == 1


async def test_http_server_names_the_time_of_a_connection(monkeypatch):
    """A socket that accepts nobody, behind which further connections wait for ever."""
    monkeypatch.setattr("shmbridge.producers.rollout.servers._CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as stack:
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        async with HttpServer(url, api="generate", model="m", patience_s=0) as server:
            with pytest.raises(ServerFailed, match=r"no connection within 0\.2 s"):
                await server.sample(PROMPT, Sampling(max_tokens=2))


@pytest.mark.parametrize(("reason", "ends"), [("stop", True), ("length", False)])
async def test_chat_server_answers_that_were_cut_have_no_end_token(reason, ends):
    chat = ChatFormat(byte_tokenizer())
    async with serving(scripted()) as served, ChatServer(served.url, chat) as server:
        served._chat = lambda body: {"choices": [{"message": {"content": "abc"}, "finish_reason": reason}]}
        sampled = await server.sample([], Sampling(), [{"role": "user", "content": "?"}])
        assert (sampled.token_ids[-1] == chat.tokenizer.eos_token_id) is ends
        served._chat = lambda body: {"choices": [{"message": {"content": [{"text": "abc"}]}}]}
        with pytest.raises(ServerFailed, match="the answer is no text"):
            await server.sample([], Sampling(), [{"role": "user", "content": "?"}])


def test_http_server_knows_its_apis():
    with pytest.raises(ValueError, match="generate, vllm, completions, sglang"):
        HttpServer("http://127.0.0.1:1", api="soap")


async def test_http_server_asks_for_the_rest_of_the_context():
    async with serving(scripted()) as served, HttpServer(served.url, api="vllm") as server:
        await server.sample(PROMPT, Sampling())
        assert served.bodies[0]["sampling_params"]["max_tokens"] == 4096 - len(PROMPT)
