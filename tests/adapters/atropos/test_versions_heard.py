"""Versions end to end: from what an inference server says, through Atropos' own server classes and an
unedited environment, to the record.

The server is a stand-in over HTTP: it samples tokens at random, chooses a version for each, and keeps both to
compare with.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from waiting import until

import shmbridge

pytest.importorskip("atroposlib")
pytest.importorskip("torch")

from atroposlib.envs import base
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataItem
from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer

from shmbridge.producers import atropos
from shmbridge.producers.atropos import versions

pytestmark = pytest.mark.timeout(100)

RUN = shmbridge.Run(batch_size=16, max_token_len=4096, num_steps=1000)
PUBLISHED = 50  # what the learner has published: the sampler is behind, or ahead
FIRST, LAST = 6, 27  # characters of the tiny tokenizer


class StandIn:
    """Answers like an inference server whose weights change while it samples."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.random = random.Random(7)
        self.truth: list[tuple[list[int], list[int], list[int]]] = []  # prompt, output, versions
        self.version = 3
        self.updates = True  # within answers
        self.says = True
        self.names_tokens = True
        self.gate: asyncio.Event | None = None
        self.failures = 0  # answers of 500 to come
        self.broken = 0  # answers without logprobs to come
        self.asked: list[str] = []

    def application(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.post("/generate", self.generate),
                web.post("/v1/chat/completions", self.chat),
                web.post("/v1/completions", self.text),
                web.post("/sglang/generate", self.sglang),
            ]
        )
        return app

    async def sample(
        self, request: web.Request, prompt: list[int], n: int
    ) -> list[tuple[list[int], list[int]]]:
        """The requested answers, each token with the version that the stand-in names for it."""
        self.asked.append(request.path)
        if self.gate is not None:
            await self.gate.wait()
        if self.failures:
            self.failures -= 1
            raise web.HTTPInternalServerError
        answers = []
        for _ in range(n):
            output = [self.random.randint(FIRST, LAST) for _ in range(self.random.randint(6, 10))]
            at = self.random.randint(1, len(output) - 1)
            versions = [self.version] * at + [self.version + self.updates] * (len(output) - at)
            self.version += self.updates
            answers.append((output, versions))
            self.truth.append((prompt, output, versions))
        return answers

    async def generate(self, request: web.Request) -> web.Response:
        asked = await request.json()
        prompt = asked["prompt"]["prompt_token_ids"]
        answers = await self.sample(request, prompt, asked.get("n", 1))
        body = {
            "prompt_token_ids": prompt,
            "token_ids": [output for output, _ in answers],
            "logprobs": [[[{str(token): -0.5}] for token in output] for output, _ in answers],
            "finish_reasons": ["stop"] * len(answers),
        }
        if self.says:
            body["weight_versions"] = [spans(versions) for _, versions in answers]
        if self.broken:
            self.broken -= 1
            del body["logprobs"]
        return web.json_response(body)

    async def sglang(self, request: web.Request) -> web.Response:
        asked = await request.json()
        ((output, versions),) = await self.sample(request, asked["input_ids"], 1)
        meta = {
            "output_token_logprobs": [[-0.5, token, None] for token in output],
            "finish_reason": {"type": "stop"},
        }
        return web.json_response({"text": "", "meta_info": meta | {"weight_version": str(versions[-1])}})

    async def chat(self, request: web.Request) -> web.Response:
        asked = await request.json()
        text = self.tokenizer.apply_chat_template(
            asked["messages"], tokenize=False, add_generation_prompt=True
        )
        prompt = self.tokenizer.encode(text, add_special_tokens=False)
        body = await self.choices(request, asked, prompt)
        for choice in body["choices"]:
            choice["message"] = {"role": "assistant", "content": choice.pop("text")}
            choice.pop("prompt_token_ids", None)
        if self.names_tokens or asked.get("return_token_ids"):
            body["prompt_token_ids"] = prompt
        return web.json_response(body | {"object": "chat.completion"})

    async def text(self, request: web.Request) -> web.Response:
        asked = await request.json()
        return web.json_response(await self.choices(request, asked, self.tokenizer.encode(asked["prompt"])))

    async def choices(self, request: web.Request, asked: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
        """As the OpenAI API, with what a server of ours adds: versions where they are one for the whole
        answer, or their bounds.
        """
        answers = await self.sample(request, prompt, asked.get("n") or 1)
        sampled_under = [version for _, versions in answers for version in versions]
        choices: list[dict[str, Any]] = []
        for index, (output, _) in enumerate(answers):
            choices.append({"index": index, "text": self.tokenizer.decode(output), "finish_reason": "stop"})
            if self.names_tokens or asked.get("return_token_ids"):
                choices[-1] |= {"token_ids": output, "prompt_token_ids": prompt}
        told = (
            {"weight_version": max(sampled_under), "oldest_weight_version": min(sampled_under)}
            if self.says
            else {}
        )
        return {
            "id": "1",
            "object": "text_completion",
            "created": 1,
            "model": "policy",
            "choices": choices,
        } | told

    def versions_of(self, row: list[int]) -> list[int]:
        """The truth about a row: the versions of all answers that it begins with."""
        versions = [-1] * len(row)
        for prompt, output, of_output in self.truth:
            if row[: len(prompt) + len(output)] == prompt + output:
                versions[len(prompt) : len(prompt) + len(output)] = of_output
        return versions


def spans(versions: list[int]) -> list[dict[str, Any]]:
    runs, at = [], 0
    for version, tokens in itertools.groupby(versions):
        length = len(list(tokens))
        runs.append({"version": str(version), "start": at, "end": at + length})
        at += length
    return runs


# --- environments, as users write them ----------------------------------------------------------------------


class Managed(BaseEnv):
    """Rollouts of several turns, tokens by the ManagedServer; every item is a group of its own."""

    name = "managed"
    turns = 1

    async def setup(self) -> None:
        pass

    async def get_next_item(self) -> int:
        return 1

    async def rollout(self, managed: Any, item: int) -> None:
        messages = [{"role": "user", "content": f">{item:02}"}]
        for turn in range(self.turns):
            completion = await managed.chat_completion(messages=messages, n=1, max_tokens=10)
            messages += [
                {"role": "assistant", "content": completion.choices[0].message.content},
                {"role": "user", "content": f"?{turn}"},
            ]

    async def nodes(self, item: int) -> list[Any]:
        async def one() -> Any:
            async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
                await self.rollout(managed, item)
                return managed.get_state()["nodes"]

        return [
            node
            for nodes in await asyncio.gather(*(one() for _ in range(self.config.group_size)))
            for node in nodes
        ]

    def group(self, nodes: list[Any]) -> dict[str, Any]:
        return {
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "scores": [float(at) for at in range(len(nodes))],
            "inference_logprobs": [node.logprobs for node in nodes],
        }

    async def collect_trajectories(self, item: int) -> Any:
        return self.group(await self.nodes(item)), []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        await self.server.chat_completion(
            messages=[{"role": "user", "content": ">07"}], n=1, max_tokens=6, split="eval"
        )


class Together(Managed):
    """All rollouts of a group in one request."""

    async def nodes(self, item: int) -> list[Any]:
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.chat_completion(
                messages=[{"role": "user", "content": f">{item:02}"}], n=self.config.group_size, max_tokens=10
            )
            return managed.get_state()["nodes"]


class Tree(Managed):
    """Every turn is a row: what came before it is masked."""

    turns = 3

    async def nodes(self, item: int) -> list[Any]:
        managed = ManagedServer(self.server.servers[0], tokenizer=self.tokenizer, track_tree=True)
        text = f"<|user|>>{item:02}<|assistant|>"
        for turn in range(self.turns):
            completion = await managed.completion(prompt=text, n=1, max_tokens=10)
            text += completion.choices[0].text + (f"<|user|>?{turn}<|assistant|>" if turn else "")
        return list(managed.get_state()["sequences"].values())


class Chat(Managed):
    """Rows by the chat template, from text; put together by BaseEnv."""

    async def collect_trajectories(self, item: int) -> Any:
        return await BaseEnv.collect_trajectories(self, item)

    async def collect_trajectory(self, item: int) -> Any:
        messages = [{"role": "user", "content": f">{item:02}"}]
        for turn in range(self.turns):
            messages += [{"role": "user", "content": f"?{turn}"}] if turn else []
            completion = await self.server.chat_completion(messages=list(messages), n=1, max_tokens=6)
            messages.append({"role": "assistant", "content": completion.choices[0].message.content})
        row = tokenize_for_trainer(self.tokenizer, messages, train_on_all_assistant_turns=True)
        return ScoredDataItem(**row, scores=random.random(), advantages=None), []


# --- fixtures ---------------------------------------------------------------------------------------------


@pytest.fixture
async def server(model: Path) -> AsyncIterator[StandIn]:
    from transformers import AutoTokenizer

    stand_in = StandIn(AutoTokenizer.from_pretrained(model))
    async with TestServer(stand_in.application()) as running:
        stand_in.url = f"http://127.0.0.1:{running.port}"
        yield stand_in


@pytest.fixture
def consumer(bridge: str) -> Iterator[shmbridge.Consumer]:
    with shmbridge.Consumer(bridge, run=RUN) as consumer:
        consumer.publish_policy_version(PUBLISHED)
        yield consumer


@pytest.fixture
async def make_env(
    bridge: str, model: Path, server: StandIn, consumer: Any, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[..., Any]]:
    sleep = asyncio.sleep
    # between attempts
    monkeypatch.setattr("tenacity.asyncio._portable_async_sleep", lambda seconds: sleep(0))
    atropos.attach(bridge=bridge, lane_bytes="256K")

    async def make(
        env_class: type[BaseEnv],
        *,
        server_type: str = "vllm",
        path: str = "/v1",
        health_check: bool = False,
        **config: Any,
    ) -> Any:
        settings = {
            "group_size": 4,
            "use_wandb": False,
            "steps_per_eval": 0,
            "total_steps": 1000,
            "tokenizer_name": str(model),
        } | config
        config_of = APIServerConfig(
            model_name=str(model),
            base_url=server.url + path,
            api_key="x",
            server_type=server_type,
            health_check=health_check,
        )
        env = env_class(BaseEnvConfig(**settings), [config_of])
        await env.setup()
        await env.register_env()
        await env.get_server_info()
        await env.get_status()
        return env

    yield make
    await atropos.detach()


def work_on(env: Any, item: int) -> asyncio.Task[Any]:
    """A worker as add_train_workers makes it."""
    env.running_items[str(item)] = {"item": item, "worker": None, "start_time": 0}
    return asyncio.create_task(env.handle_env(str(item)))


async def record_of(env: Any, consumer: shmbridge.Consumer, item: int = 1) -> shmbridge.Record:
    await work_on(env, item)
    return await consumer.get_async(timeout_s=5)


def span(record: shmbridge.Record) -> tuple[int, int]:
    return record.meta.min_policy_version, record.meta.max_policy_version


def trained_of(versions: Any, record: shmbridge.Record) -> list[int]:
    rows = zip(versions, record["loss_mask"], strict=True)
    return [int(version) for row, mask in rows for version, on in zip(row, mask, strict=True) if on]


def as_it_was(record: shmbridge.Record, server: StandIn) -> None:
    """Every trained token has the version that sampled it, no other token has one, and the record's bounds
    are theirs.
    """
    expected = [server.versions_of(row.tolist()) for row in record["tokens"]]
    assert [row.tolist() for row in record["token_versions"]] == expected
    trained = trained_of(expected, record)
    assert min(trained) >= 0
    stamped = [version for row in expected for version in row if version >= 0]
    assert span(record) == (min(stamped), max(stamped))


# --- token by token ---------------------------------------------------------------------------------------


async def test_answers_of_one_request_that_span_an_update_have_both_versions(
    make_env: Any, consumer: Any, server: StandIn
) -> None:
    record = await record_of(await make_env(Together), consumer)
    assert "token_versions" not in record.to_scored_data(), "which is what the environment sent"
    as_it_was(record, server)
    assert span(record) == (3, 7)


async def test_several_turns_have_their_versions(make_env: Any, consumer: Any, server: StandIn) -> None:
    env = await make_env(Managed)
    env.turns = 3
    record = await record_of(env, consumer)
    as_it_was(record, server)
    assert len(server.truth) == 3 * 4
    assert all(
        len({version for version in row.tolist() if version >= 0}) > 3 for row in record["token_versions"]
    ), "of every turn"


async def test_a_tree_of_sequences_whose_earlier_turns_are_masked(
    make_env: Any, consumer: Any, server: StandIn
) -> None:
    record = await record_of(await make_env(Tree, group_size=3), consumer)
    as_it_was(record, server)
    last = max(record["token_versions"], key=len)
    assert len({version for version in last.tolist() if version >= 0}) >= 4


async def test_more_answers_than_a_request_may_ask_for_have_their_versions(
    make_env: Any, consumer: Any, server: StandIn
) -> None:
    class Many(Managed):
        async def collect_trajectories(self, item: int) -> Any:
            prompt, outputs, _, _ = await self.server.tokens_and_logprobs_completion(
                prompt=">01", n=12, max_tokens=10
            )
            rows = [prompt + output for output in outputs]
            masks = [[-100] * len(prompt) + output for output in outputs]
            return {"tokens": rows, "masks": masks, "scores": [float(at) for at in range(12)]}, []

    record = await record_of(await make_env(Many, group_size=12), consumer)
    assert len(server.asked) == 2
    as_it_was(record, server)


async def test_rows_that_the_environment_cut_or_ended(make_env: Any, consumer: Any, server: StandIn) -> None:
    class Ending(Together):
        def group(self, nodes: list[Any]) -> dict[str, Any]:
            group = super().group(nodes)
            for name, end in (("tokens", 1), ("masks", 1), ("inference_logprobs", 0.0)):
                group[name][0] = [*group[name][0], end]
                group[name][1] = group[name][1][:-1]
            return group

    record = await record_of(await make_env(Ending), consumer)
    added, dropped, *whole = record["token_versions"]
    assert added.tolist() == [*server.versions_of(record["tokens"][0].tolist()[:-1]), -1]
    (prompt, _, versions), *_ = [
        each for each in server.truth if (each[0] + each[1])[:-1] == record["tokens"][1].tolist()
    ]
    assert dropped.tolist() == [-1] * len(prompt) + versions[:-1]
    assert [row.tolist() for row in whole] == [
        server.versions_of(row.tolist()) for row in list(record["tokens"])[2:]
    ]
    assert span(record) == (3, 7), (
        "the token that was added is of nobody: it is no older than what the worker was answered"
    )


async def test_a_list_of_groups_of_one_worker(make_env: Any, consumer: Any, server: StandIn) -> None:
    class Steps(Together):
        async def collect_trajectories(self, item: int) -> Any:
            return [self.group(await self.nodes(step)) for step in range(3)], []

    env = await make_env(Steps)
    await work_on(env, 1)
    records = [await consumer.get_async(timeout_s=5) for _ in range(3)]
    for record in records:
        as_it_was(record, server)
    assert [span(record) for record in records] == [(3, 7), (7, 11), (11, 15)]


# --- several workers --------------------------------------------------------------------------------------


async def test_workers_beside_each_other_hear_their_own(
    make_env: Any, consumer: Any, server: StandIn
) -> None:
    env = await make_env(Managed)
    env.turns = 2
    workers = [work_on(env, item) for item in range(6)]
    await asyncio.gather(*workers)
    records = [await consumer.get_async(timeout_s=5) for _ in workers]
    for record in records:
        as_it_was(record, server)
    assert versions.heard() is None


async def test_a_cancelled_worker_leaves_nothing_behind(
    make_env: Any, consumer: Any, server: StandIn
) -> None:
    env = await make_env(Together)
    server.gate = asyncio.Event()
    worker = work_on(env, 1)
    await until(lambda: server.asked)
    worker.cancel()
    with pytest.raises(asyncio.CancelledError):
        await worker
    server.gate.set()
    as_it_was(await record_of(env, consumer, 1), server)


async def test_a_worker_cancelled_as_it_sends_delivers_its_stamps(
    make_env: Any, consumer: Any, server: StandIn
) -> None:
    env = await make_env(Together)
    sends = type(env)._send_scored_data_to_api

    async def cancelled(group: Any) -> None:
        sending = asyncio.ensure_future(sends(env, group))
        await asyncio.sleep(0)
        sending.cancel()
        raise asyncio.CancelledError

    env._send_scored_data_to_api = cancelled
    with pytest.raises(asyncio.CancelledError):
        await work_on(env, 1)
    as_it_was(await consumer.get_async(timeout_s=5), server)


@pytest.mark.parametrize("trouble", ["failures", "broken"])
async def test_answers_to_what_atropos_asks_again(
    make_env: Any, consumer: Any, server: StandIn, trouble: str
) -> None:
    """An error, and an answer that upstream's parser cannot read and asks for again: the rows are the last
    answer's.
    """
    setattr(server, trouble, 2)
    record = await record_of(await make_env(Together), consumer)
    assert len(server.asked) == 3
    as_it_was(record, server)


async def test_evaluation_is_not_heard_by_a_worker(make_env: Any, consumer: Any, server: StandIn) -> None:
    """The worker's rows come from text, so all its answers bound them; evaluation's answers are older and
    must not count.
    """
    server.names_tokens, server.updates = False, False
    env = await make_env(Chat, server_type="openai")
    await env.evaluate()
    server.version, server.gate = 8, asyncio.Event()
    worker = work_on(env, 1)
    await until(lambda: len(server.asked) == 5)
    server.version = 5
    evaluation = asyncio.create_task(env.evaluate())
    await until(lambda: len(server.asked) == 6)
    server.gate.set()
    await evaluation
    await worker
    assert span(await consumer.get_async(timeout_s=5)) == (5, 5)


async def test_health_checks_are_not_heard(
    make_env: Any, consumer: Any, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first worker that asks starts the health checks in its own context, so its ledger would grow for
    ever.
    """
    noted = []
    monkeypatch.setattr(versions.Ledger, "note", lambda ledger, answers: noted.extend(answers))
    env = await make_env(Chat, server_type="openai", health_check=True)
    await work_on(env, 1)
    await until(lambda: len(server.asked) > 5)
    assert len(noted) == 4
    env.server.servers[0].check_task.cancel()


# --- a real server ----------------------------------------------------------------------------------------


class Direct(Managed):
    """Two turns over tokens alone; new weights arrive between them."""

    between: Callable[[], Any]

    async def collect_trajectories(self, item: int) -> Any:
        prompt = self.tokenizer.encode(f">{item:02}")
        _, first, _, _ = await self.server.tokens_and_logprobs_completion(input_ids=prompt, n=4, max_tokens=6)
        await self.between()
        second = prompt + first[0] + [FIRST]
        _, then, _, _ = await self.server.tokens_and_logprobs_completion(input_ids=second, n=1, max_tokens=6)
        rows = [second + then[0], *(prompt + output for output in first[1:])]
        masks = [
            [-100] * len(prompt) + first[0] + [-100] + then[0],
            *([-100] * len(prompt) + output for output in first[1:]),
        ]
        return {"tokens": rows, "masks": masks, "scores": [1.0, 2.0, 3.0, 4.0]}, []


@pytest.mark.parametrize("pushed", [True, False])
async def test_the_policy_server_takes_new_weights_while_a_worker_generates(
    make_env: Any, consumer: Any, server: StandIn, bridge: str, model: Path, pushed: bool
) -> None:
    """The learner publishes one version before and one between two turns; each token's stamp is the version
    that the server held.
    """
    from transformers import AutoModelForCausalLM

    from shmbridge.consumers.policy_server.api import PolicyApi
    from shmbridge.consumers.policy_server.engine import PolicyEngine, WeightsFollower
    from shmbridge.consumers.policy_server.sampler import PolicyModel
    from shmbridge.consumers.policy_server.server import PolicyServer
    from shmbridge.weights import WeightsReader, WeightsWriter
    from tests.adapters.served import served

    learner = AutoModelForCausalLM.from_pretrained(model)
    policy = PolicyModel(AutoModelForCausalLM.from_pretrained(model), server.tokenizer, seed=5)
    engine = PolicyEngine(policy, WeightsFollower(WeightsReader(bridge), policy.model))
    api = PolicyApi(server.tokenizer, "tiny", policy.context, policy.vocab_size)
    with WeightsWriter(bridge) as writer:

        async def publish(version: int) -> None:
            await asyncio.to_thread(
                writer.publish,
                version,
                [(name, value.detach()) for name, value in learner.named_parameters()],
            )
            consumer.publish_policy_version(version)
            await until(lambda: engine.version == version)

        async with served(PolicyServer(engine, api)) as running:
            engine.start()
            try:
                server.url = f"http://127.0.0.1:{running.port}"
                env = await make_env(Direct)
                await publish(PUBLISHED + 1)
                env.between = lambda: publish(PUBLISHED + 2) if pushed else asyncio.sleep(0)
                record = await record_of(env, consumer)
            finally:
                await asyncio.to_thread(engine.close)
    first, second = PUBLISHED + 1, PUBLISHED + 1 + pushed
    assert span(record) == (first, second)
    versions, mask = record["token_versions"], record["loss_mask"]
    gap = next(at for at in range(4, len(mask[0])) if not mask[0][at])
    assert versions[0].tolist() == [-1] * 3 + [first] * (gap - 3) + [-1] + [second] * (len(mask[0]) - gap - 1)
    assert all(row.tolist() == [-1] * 3 + [first] * (len(row) - 3) for row in list(versions)[1:])


# --- less than tokens -------------------------------------------------------------------------------------


async def test_chats_with_tokens_are_found_in_rows_by_the_template(
    make_env: Any, consumer: Any, server: StandIn
) -> None:
    server.updates = False
    env = await make_env(Chat, server_type="openai")
    env.turns = 2
    record = await record_of(env, consumer)
    trained = trained_of(record["token_versions"], record)
    assert trained.count(-1) == 2 * 4, "the template's end tokens, which nobody sampled"
    assert set(trained) == {-1, 3}
    assert span(record) == (3, 3)


async def test_a_server_that_names_versions_is_asked_for_tokens(
    make_env: Any, consumer: Any, server: StandIn
) -> None:
    """vLLM's server names tokens only when asked to; other fields of the environment's request stay as they
    are.
    """
    server.updates = server.names_tokens = False
    env = await make_env(Chat, server_type="openai")
    first, second = await record_of(env, consumer), await record_of(env, consumer)
    assert ("token_versions" in first, span(first)) == (False, (3, 3))
    assert ("token_versions" in second, span(second)) == (True, (3, 3))
    server.says = False
    other = await make_env(Chat, server_type="openai")
    for _ in range(2):
        assert "token_versions" not in await record_of(other, consumer)


@pytest.mark.parametrize("names_tokens", [True, False])
async def test_chats_under_changing_weights_have_bounds(
    make_env: Any, consumer: Any, server: StandIn, names_tokens: bool
) -> None:
    server.names_tokens = names_tokens
    record = await record_of(await make_env(Chat, server_type="openai"), consumer)
    assert span(record) == (3, 7)
    assert "token_versions" not in record


async def test_choices_of_several_requests_that_upstream_puts_together(
    make_env: Any, consumer: Any, server: StandIn
) -> None:
    class Text(Managed):
        async def collect_trajectories(self, item: int) -> Any:
            completion = await self.server.completion(prompt=">01", n=4, max_tokens=10)
            prompt = self.tokenizer.encode(">01")
            rows = [self.tokenizer.encode(choice.text) for choice in completion.choices]
            masks = [[-100] * len(prompt) + row for row in rows]
            return {
                "tokens": [prompt + row for row in rows],
                "masks": masks,
                "scores": [1.0, 2.0, 3.0, 4.0],
            }, []

    server.updates = False
    env = await make_env(Text, server_type="openai")
    env.server.servers[0].config.n_kwarg_is_ignored = True
    record = await record_of(env, consumer)
    assert len(server.asked) == 4
    as_it_was(record, server)


async def test_sglang_bounds_the_newest(make_env: Any, consumer: Any, server: StandIn) -> None:
    """SGLang names only the version at the end; the oldest one may be any up to what the learner had
    published.
    """
    record = await record_of(await make_env(Managed, server_type="sglang", path="/sglang"), consumer)
    assert "token_versions" not in record
    assert span(record) == (4, 7)
    server.version = 70
    assert span(await record_of(await make_env(Managed, server_type="sglang", path="/sglang"), consumer)) == (
        PUBLISHED,
        74,
    )


# --- what the environment says itself, what the learner does of it ------------------------------------------


async def test_the_environments_own_versions_win_and_come_back(
    make_env: Any, consumer: Any, server: StandIn
) -> None:
    class Knowing(Together):
        def group(self, nodes: list[Any]) -> dict[str, Any]:
            return super().group(nodes) | {
                "token_versions": [[9] * len(node.tokens) for node in nodes],
                "seed": 1,
            }

    record = await record_of(await make_env(Knowing), consumer)
    assert set(record["token_versions"].values.tolist()) == {9}
    assert span(record) == (9, 9)
    back = record.to_scored_data()
    assert back["token_versions"] == [[9] * len(row) for row in back["tokens"]]
    assert record.json("extra") == {"seed": 1, "token_versions": back["token_versions"]}


async def test_the_cut_goes_by_the_oldest_that_sampled(make_env: Any, consumer: Any, server: StandIn) -> None:
    """The learner has published more than the sampler has loaded: a record is as old as the version that
    sampled it.
    """
    env = await make_env(Together)
    await work_on(env, 1)
    server.version = PUBLISHED - 1
    await work_on(env, 2)
    batch = await asyncio.to_thread(
        lambda: next(consumer.batches(groups=1, max_staleness=2, prefetch=0, timeout_s=5))
    )
    assert batch.meta[0].min_policy_version == PUBLISHED - 1
    assert consumer.stats()["discarded_total{stale}"] == 1
    batch.release()


async def test_responses_are_not_recorded_without_an_attachment(bridge: str) -> None:
    from aiohttp import ClientResponse
    from atroposlib.envs.server_handling import openai_server, sglang_server, vllm_server
    from openai.resources.chat.completions import AsyncCompletions as AsyncChatCompletions
    from openai.resources.completions import AsyncCompletions

    hooked = [
        (ClientResponse, "json"),
        (AsyncChatCompletions, "create"),
        (AsyncCompletions, "create"),
        *(
            (server, "check_server_status_task")
            for server in (openai_server.OpenAIServer, vllm_server.VLLMServer, sglang_server.SGLangServer)
        ),
    ]
    before = [vars(owner)[name] for owner, name in hooked]
    atropos.attach(bridge=bridge)
    assert all(vars(owner)[name] is not was for (owner, name), was in zip(hooked, before, strict=True))
    atropos.detach()
    assert [vars(owner)[name] for owner, name in hooked] == before
    assert base.BaseEnv.env_manager.__module__ == base.__name__
