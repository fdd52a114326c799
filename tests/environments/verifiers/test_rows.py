"""Which rows become of verifiers' episodes: branches, several players, sick ones, and columns few have."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmbridge
from shmbridge.producers.rollout import HttpServer, Limits
from shmbridge.producers.verifiers import EpisodeFailed, NoTokenRoute, VerifiersRollout
from shmbridge.producers.verifiers.door import GENERATE, Door, Heard, key_of
from shmbridge.producers.verifiers.rollout import Run, _schema, group_of
from tests.environments.verifiers.conftest import HERE_ALONE, ROOT

PLAYER = {**HERE_ALONE, "harness": {"id": "pairs"}}


def pairs(*fails: str) -> dict[str, Any]:
    seats = dict.fromkeys(("first", "second", "judge"), PLAYER)
    return {"taskset": {"id": "pairs", "fails": list(fails)}, **seats}


async def played(bridge: str, url: str, tiny: Path, *fails: str, **how: Any) -> tuple[int, VerifiersRollout]:
    sampling = {"max_tokens": 3}
    rollout = VerifiersRollout(
        bridge, url, str(tiny), pairs(*fails), group_size=4, lane_bytes="4M", sampling=sampling, **how
    )
    async with rollout:
        return await rollout.run(rollout.tasks(epochs=1), rollout.play), rollout


async def test_a_row_for_each_player_that_trains(
    bridge: str, consumer: shmbridge.Consumer, tiny: Path, policy_server: str
) -> None:
    put, rollout = await played(bridge, policy_server, tiny, "")
    assert (put, rollout.losses.episodes) == (1, {})
    with consumer.get(5) as record:
        about = record.json("extra")["rows"]
        assert [each["agent"] for each in about] == ["first", "second"] * 4
        assert record["repetition_id"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert record["row_index"].tolist() == [0, 1] * 4
        assert record["is_last"].tolist() == [False, True] * 4
        assert set(record["score"].tolist()) == {3.0}
        assert dict(record["reward_components"][0]) == {"one": 1.0, "together": 2.0}
        assert record.meta.group_size == 8


@pytest.mark.parametrize(
    ("fails", "kind", "rows", "lost"),
    [
        ("harness", "HarnessError", 6, 2),
        ("player", "HarnessError", 4, 4),
        ("reward", "TaskError", 6, 2),
        ("finalize", "EnvError", 4, 2),
        ("hang", "late", 4, 2),
    ],
)
async def test_what_fails_leaves_and_is_counted(
    bridge: str,
    consumer: shmbridge.Consumer,
    tiny: Path,
    policy_server: str,
    fails: str,
    kind: str,
    rows: int,
    lost: int,
) -> None:
    """A trace that fails leaves alone; an environment's own hook or our deadline costs the whole episode."""
    limits = Limits(episode_s=10 if fails == "hang" else 60)
    put, rollout = await played(bridge, policy_server, tiny, fails, limits=limits)
    assert put == 1
    assert rollout.losses.episodes == {kind: lost}
    with consumer.get(5) as record:
        assert len(record) == rows
        found = consumer.stats()
        assert found[f"episodes_lost_total{{{'late' if kind == 'late' else 'failed'}}}"] == lost
    assert not rollout._door.heard


async def test_a_server_without_the_route_is_named(
    bridge: str, tiny: Path, child_environment: dict[str, str]
) -> None:
    from aiohttp import web

    async def models(request: Any) -> Any:
        return web.json_response({"data": [{"id": "some"}]})

    application = web.Application()
    application.router.add_get("/v1/models", models)
    runner = web.AppRunner(application, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        with pytest.raises(NoTokenRoute, match="no /inference/v1/generate"):
            await played(bridge, "http://{}:{}".format(*runner.addresses[0]), tiny, "")
    finally:
        await runner.cleanup()


def node(ids: list[int], sampled: int, parent: int | None, **columns: Any) -> Any:
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.types import AssistantMessage, UserMessage

    message = AssistantMessage(content="a") if sampled else UserMessage(content="u")
    mask = [False] * (len(ids) - sampled) + [True] * sampled
    return MessageNode(
        parent=parent, message=message, sampled=bool(sampled), token_ids=ids, mask=mask, **columns
    )


def trace_of(nodes: list[Any]) -> Any:
    import verifiers.v1 as vf
    from verifiers.v1.trace import AgentInfo, TraceTask

    task = TraceTask(type="Task", data=vf.TaskData(prompt="u"), key="k")
    trace = vf.Trace(task=task, agent=AgentInfo(config=vf.AgentConfig()), nodes=nodes, ok=True)
    trace.record_reward("right", 1.0, 0.5)
    return trace


def test_every_column_of_a_branch(bridge: str, consumer: shmbridge.Consumer) -> None:
    """Two branches of one trace: routes, masks, advantages and reference, and a log-probability that is not
    there."""
    from verifiers.v1.types import SamplingMask

    def routes(tokens: int) -> Any:
        return np.arange(tokens * 6, dtype=np.uint8).reshape(tokens, 2, 3)

    kept = SamplingMask(ids=np.int32([4, 5, 6]), counts=np.int32([2, 1]))
    columns = {"advantages": [0.5, -0.5], "reference_logprobs": [-1.0, -2.0], "sampling_mask": kept}
    trace = trace_of(
        [
            node([1, 2], 0, None, routed_experts=routes(2)),
            node([3, 4, 5], 2, 0, logprobs=[-0.25, -0.5], routed_experts=routes(3), **columns),
            node([3, 6, 7], 2, 0, routed_experts=routes(3), **columns),
        ]
    )
    run = Run("k", 0, 0.7, [trace])
    run.require_finished()
    with shmbridge.Producer(bridge, schema=_schema()) as producer:
        producer.put(group_of([run]))
    with consumer.get(5) as record:
        assert [each.tolist() for each in record["tokens"]] == [[1, 2, 3, 4, 5], [1, 2, 3, 6, 7]]
        assert [each.tolist() for each in record["loss_mask"]] == [[0, 0, 0, 1, 1]] * 2
        first, second = (each.tolist() for each in record["inference_logprobs"])
        assert first == [0, 0, 0, -0.25, -0.5]
        assert np.isnan(second[3:]).all()
        assert [each.tolist() for each in record["advantages"]] == [[0, 0, 0, 0.5, -0.5]] * 2
        assert record["ref_logprobs"][0].tolist() == [0, 0, 0, -1.0, -2.0]
        assert [each.tolist() for each in record["token_versions"]] == [[-1] * 5] * 2
        assert record["score"].tolist() == [0.5, 0.5]
        assert record["prompt_length"].tolist() == [3, 3]
        branch = trace.branches[0]
        assert record["routed_experts"][0] == branch.routed_experts.tobytes()
        about = record.json("extra")["rows"][0]["routed_experts"]
        assert about == {"shape": [5, 2, 3], "dtype": "uint8"}
        mask = np.frombuffer(record["sampling_mask"][0], np.int32)
        assert mask[:5].tolist() == [0, 0, 0, 2, 1]
        assert mask[5:].tolist() == [4, 5, 6]


def test_what_only_some_rows_have_is_kept_or_counted(bridge: str, consumer: shmbridge.Consumer) -> None:
    """And routes of more than 256 experts are not cut."""
    routes = np.int16([[[300]], [[511]]])
    rich = [node([1], 0, None, routed_experts=routes[:1]), node([2], 1, 0, logprobs=[-1.0], advantages=[1.0])]
    rich[1].routed_experts = routes[1:]
    poor = trace_of([node([1], 0, None), node([3], 1, 0, logprobs=[-1.0])])
    poor.rewards.clear()
    left_out: Counter[str] = Counter()
    group = group_of([Run("k", 0, 1.0, [trace_of(rich)]), Run("k", 1, 1.0, [poor])], left_out)
    with shmbridge.Producer(bridge, schema=_schema()) as producer:
        producer.put(group)
    with consumer.get(5) as record:
        assert record["routed_experts"] == [np.int16([300, 511]).tobytes(), b""]
        assert record.json("extra")["rows"][0]["routed_experts"] == {"shape": [2, 1, 1], "dtype": "int16"}
        assert record["reward_components"] == [{"right": 0.5}, {}]
        assert "advantages" not in record
    assert left_out == {"advantages": 1}


def test_an_episode_without_sampled_tokens_is_refused() -> None:
    run = Run("k", 3, 1.0, [trace_of([node([1, 2], 0, None)])])
    with pytest.raises(EpisodeFailed, match="episode 3 of task 'k' has no trainable branch"):
        run.require_finished()


async def test_an_answer_that_was_aborted_is_asked_for_again(
    bridge: str, consumer: shmbridge.Consumer, tiny: Path
) -> None:
    """Before its first token; the versions are those of the answer that came."""
    from aiohttp import web

    asked = 0

    async def models(request: Any) -> Any:
        return web.json_response({"data": [{"id": "some", "max_model_len": 64}]})

    async def generate(request: Any) -> Any:
        nonlocal asked
        body = await request.json()
        if "token_ids" not in body:
            return web.json_response({}, status=400)
        asked += 1
        ids, reason = ([], "abort") if asked % 2 else ([7, 8], "stop")
        content = [{"token": f"token_id:{each}", "logprob": -1.0} for each in ids]
        spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
        choice = {"token_ids": ids, "finish_reason": reason, "logprobs": {"content": content}}
        return web.json_response({"choices": [choice | ({"weight_versions": spans} if ids else {})]})

    application = web.Application()
    application.router.add_get("/v1/models", models)
    application.router.add_post("/inference/v1/generate", generate)
    runner = web.AppRunner(application, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = "http://{}:{}".format(*runner.addresses[0])
        put, rollout = await played(bridge, url, tiny, "", concurrency=1)
    finally:
        await runner.cleanup()
    assert (put, rollout.losses.episodes) == (1, {})
    assert asked == 24  # by three players of four episodes
    assert 0 < rollout.losses.asked_again <= 12
    with consumer.get(5) as record:
        for row in range(8):
            assert record["token_versions"][row].tolist()[-2:] == [3, 4]


async def test_the_server_works_for_no_client_that_is_gone() -> None:
    """A request of an episode that is over ends at the server, too, and is not asked again."""
    from aiohttp import ClientSession, ClientTimeout, web

    begun, over = asyncio.Event(), asyncio.Event()

    async def generate(request: Any) -> Any:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            over.set()

    application = web.Application()
    application.router.add_post(GENERATE, generate)
    runner = web.AppRunner(application, shutdown_timeout=1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server = HttpServer("http://{}:{}".format(*runner.addresses[0]), api="vllm")
    try:
        async with Door(server) as door, ClientSession(timeout=ClientTimeout(total=60)) as client:
            url = door.url.removesuffix("/v1") + GENERATE
            asking = asyncio.create_task(client.post(url, json={"token_ids": [1]}, headers=door.headers))
            await asyncio.wait_for(begun.wait(), 20)
            asking.cancel()
            await asyncio.wait_for(over.wait(), 20)
    finally:
        await server.close()
        await runner.cleanup()


class Passed:
    """A door before a stand-in of an inference server, which gives `said` for every request, and keeps the
    targets in `came`; `hangs`: it begins no answer.
    """

    def __init__(self) -> None:
        self.said: Any = {}
        self.came: list[str] = []
        self.hangs = False
        self.begun, self.ended = asyncio.Event(), asyncio.Event()

    async def _answer(self, request: Any) -> Any:
        from aiohttp import web

        self.came.append(request.raw_path)
        if self.hangs:
            self.begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.ended.set()
        return web.json_response(self.said)

    async def __aenter__(self) -> Passed:
        from aiohttp import web

        application = web.Application()
        application.router.add_route("*", "/{any:.*}", self._answer)
        self._runner = web.AppRunner(application, shutdown_timeout=1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._server = HttpServer("http://{}:{}".format(*self._runner.addresses[0]), api="vllm", patience_s=1)
        self.door = await Door(self._server).__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.door.__aexit__(*exc)
        await self._server.close()
        await self._runner.cleanup()

    async def asks(self, target: str, *lines: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(self.door.url.split(":")[2][:-3]))
        own = [f"{name}: {value}" for name, value in self.door.headers.items()]
        head = [f"GET {target} HTTP/1.1", "Host: localhost", "Connection: close", *own, *lines]
        writer.write("".join(f"{line}\r\n" for line in [*head, ""]).encode())
        return reader, writer


async def test_a_target_is_passed_on_as_it_came() -> None:
    """Query and escapes are kept; a target that is not a path is refused and reaches no server."""
    kept = ["/v1/models?x=1&y=%26", "/v1/models%3Fq=1", "/a%23b", "/a%252Fb", "/a%20b"]
    async with Passed() as passed:
        for target in [*kept, "@127.0.0.1:9/x", "//127.0.0.1:9/x", "http://127.0.0.1:9/x", "*"]:
            reader, writer = await passed.asks(target)
            said = await asyncio.wait_for(reader.read(), 20)
            writer.close()
            assert said.startswith(b"HTTP/1.1 200" if target in kept else b"HTTP/1.1 400"), (target, said)
            assert target in kept or b"does not begin with exactly one /" in said
        assert passed.came == kept


@pytest.mark.parametrize("lines", [(), ("Content-Length: 0",)])
async def test_a_get_whose_client_is_gone_ends_at_the_server(lines: tuple[str, ...]) -> None:
    async with Passed() as passed:
        passed.hangs = True
        _, writer = await passed.asks("/v1/models", *lines)
        await asyncio.wait_for(passed.begun.wait(), 20)
        writer.transport.abort()
        await asyncio.wait_for(passed.ended.wait(), 20)


async def test_the_door_waits_for_what_it_cancels_as_it_closes(caplog: pytest.LogCaptureFixture) -> None:
    """The server ends the requests before the door is closed; the client is told to ask again."""
    async with Passed() as passed:
        passed.hangs = True
        reader, writer = await passed.asks("/v1/models")
        await asyncio.wait_for(passed.begun.wait(), 20)
        await passed.door.__aexit__(None, None, None)
        await asyncio.wait_for(passed.ended.wait(), 1)
        said = await asyncio.wait_for(reader.read(), 20)
        writer.close()
    assert said.startswith(b"HTTP/1.1 503")
    assert b"the server ends -> send it again" in said
    assert "Traceback" not in caplog.text


async def test_an_odd_answer_or_request_passes_through_the_door() -> None:
    """Nothing of it is noted. A request's token ids are read where the answer lacks them alone, and each
    reason belongs to its own choice.
    """
    from aiohttp import ClientSession, ClientTimeout

    good = {"choices": [{"token_ids": [1, 2], "finish_reason": "stop"}]}
    asked = [["a"], [99999999999], [[1, 2]], None, 5, {}]
    odd = [(good, json.dumps({"token_ids": ids})) for ids in asked] + [
        (good, "[]"),
        (good, "{}"),
        (good, "x"),
    ]
    forms: list[Any] = [[], None, 5, {"choices": [None]}, {"choices": {"a": 1}}, {"token_ids": [[1, 2]]}]
    forms += [[{"meta_info": {}}], {"choices": [{"token_ids": ["a"]}]}, {"choices": 3}]
    odd += [(form, '{"token_ids": [1]}') for form in forms]
    async with Passed() as passed, ClientSession(timeout=ClientTimeout(total=60)) as client:
        url, headers = (
            passed.door.url.removesuffix("/v1") + GENERATE,
            passed.door.headers | {"X-Session-Id": "t"},
        )

        async def heard(answer: Any, body: str) -> Heard:
            passed.said, noted = answer, Heard()
            passed.door.heard["t"] = noted
            async with client.post(url, data=body, headers=headers) as response:
                assert (response.status, await response.json()) == (200, answer), (answer, body)
            return noted

        for answer, body in odd:
            noted = await heard(answer, body)
            assert not noted.versions, (answer, body)
            assert not noted.reasons
        named = {"prompt_token_ids": [7], "oldest_weight_version": 3, "weight_version": 3}
        noted = await heard(good | named, '{"features": [1]}')
        ((key, versions),) = noted.versions.items()
        assert versions.tolist() == [3, 3]
        assert noted.reasons == {key: "stop"} == {key_of(np.array([7, 1, 2]), 1): "stop"}
        ends = [{"token_ids": [], "finish_reason": "stop"}, {"token_ids": [5], "finish_reason": "length"}]
        noted = await heard({"choices": ends}, '{"token_ids": [1]}')
        assert noted.reasons == {key_of(np.array([1, 5]), 1): "length"}


async def test_evaluation_is_kept_out_of_training(
    bridge: str, consumer: shmbridge.Consumer, tiny: Path, policy_server: str, program: Callable[..., Any]
) -> None:
    """At the start and after each two versions, of another taskset configuration."""
    environment = program(
        "shmbridge",
        *("env", "--verifiers", "larger_digit", "--bridge", bridge, "--server", policy_server),
        *("--tokenizer", tiny, "--env-config", "agent.runtime.type=subprocess", "taskset.tasks=5"),
        *("--group-size", 2, "--max-tokens", 3, "--lane-bytes", "1M", "--concurrency", 2),
        *("--eval-every", 2, "--eval-tasks", 2, "--eval-config", "taskset.first=100"),
    )
    consumer.publish_policy_version(5)
    names: dict[str, list[str]] = {"train": [], "eval": []}
    while len(names["eval"]) < 4:
        with await asyncio.to_thread(consumer.get, 60) as record:
            names[record.meta.split].append(json.loads(json.dumps(record.json("messages")[0][0]["content"])))
        if len(names["eval"]) == 2:
            consumer.publish_policy_version(7)
    assert environment.poll() is None
    assert names["eval"] == [">1:", ">2:"] * 2  # tasks 100 and 101
    assert len(names["train"]) > 4


async def test_the_pages_example_runs(
    bridge: str, consumer: shmbridge.Consumer, tiny: Path, policy_server: str
) -> None:
    page = ROOT / "docs/how-to/verifiers.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    scope: dict[str, Any] = {}
    exec(compile(block, str(page), "exec"), scope)
    assert await scope["main"](bridge, policy_server, str(tiny)) == (8, {})
    with consumer.get(5) as record:
        assert len(record) == 4
