"""Sessions behind OpenEnv's capture proxy: what arrives is what the engine sampled, with its versions."""

import asyncio
import json
import random

import anthropic
import openai
import pytest

import shmbridge
from shmbridge.producers.openenv import AgentRollout, Capture
from shmbridge.producers.rollout import Limits, NoTokens, Task
from tests.environments.openenv.engine import Engine, serving

TURNS = 20
BASH = {"command": {"type": "string"}}
SCHEMA = {"type": "object", "properties": BASH, "required": ["command"]}


def counting(messages) -> tuple[str, dict | None]:
    """Calls the tool until it has answered 19 times, then says so."""
    turn = sum(message["role"] == "tool" for message in messages)
    if turn == TURNS - 1:
        return f"done after {turn} calls", None
    return f"step {turn}: ", {"command": f'echo "{turn}"', "why": "a {nested} \u00e9"}


def silent(messages) -> tuple[str, dict | None]:
    """The same without words before a call: OpenEnv makes two messages of a Responses answer with both."""
    text, arguments = counting(messages)
    return ("" if arguments else text), arguments


def tool(arguments: dict) -> str:
    return f"ran {arguments['command']}\n"


async def chat_agent(episode, stream: bool) -> int:
    client = openai.AsyncOpenAI(base_url=f"{episode.url}/v1", api_key=episode.key, max_retries=0)
    tools = [{"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}]
    messages, calls = [*episode.messages], 0
    while True:
        calls += 1
        asked = {"model": "mine", "messages": messages, "tools": tools, "top_p": 0.5}
        if stream:
            text, found = "", {}
            async for part in await client.chat.completions.create(stream=True, **asked):
                for choice in part.choices:
                    text += choice.delta.content or ""
                    for call in choice.delta.tool_calls or ():
                        kept = found.setdefault(call.index, {"id": "", "name": "", "arguments": ""})
                        kept["id"] = call.id or kept["id"]
                        kept["name"] += call.function.name or ""
                        kept["arguments"] += call.function.arguments or ""
            found = list(found.values())
        else:
            message = (await client.chat.completions.create(**asked)).choices[0].message
            text = message.content
            found = [{"id": c.id, **c.function.model_dump()} for c in message.tool_calls or ()]
        if not found:
            return calls
        said = {"role": "assistant", "content": text, "tool_calls": [
            {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
            for c in found
        ]}  # fmt: skip
        messages.append(said)
        for call in found:
            result = tool(json.loads(call["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


async def anthropic_agent(episode, stream: bool) -> int:
    client = anthropic.AsyncAnthropic(base_url=episode.url, api_key=episode.key, max_retries=0)
    tools = [{"name": "bash", "input_schema": SCHEMA}]
    messages, calls = [*episode.messages], 0
    while True:
        calls += 1
        asked = {"model": "mine", "messages": messages, "tools": tools, "max_tokens": 500}
        if stream:
            async with client.messages.stream(**asked) as streamed:
                answer = await streamed.get_final_message()
        else:
            answer = await client.messages.create(**asked)
        messages.append({"role": "assistant", "content": [part.model_dump() for part in answer.content]})
        results = [
            {"type": "tool_result", "tool_use_id": part.id, "content": tool(part.input)}
            for part in answer.content
            if part.type == "tool_use"
        ]
        if not results:
            return calls
        messages.append({"role": "user", "content": results})


async def responses_agent(episode, stream: bool) -> int:
    client = openai.AsyncOpenAI(base_url=f"{episode.url}/v1", api_key=episode.key, max_retries=0)
    tools = [{"type": "function", "name": "bash", "parameters": SCHEMA, "strict": False}]
    items, calls = [*episode.messages], 0
    while True:
        calls += 1
        asked = {"model": "mine", "input": items, "tools": tools}
        if stream:
            async for event in await client.responses.create(stream=True, **asked):
                if event.type == "response.completed":
                    answer = event.response
        else:
            answer = await client.responses.create(**asked)
        items += [part.model_dump(exclude_none=True) for part in answer.output]
        results = [
            {
                "type": "function_call_output",
                "call_id": part.call_id,
                "output": tool(json.loads(part.arguments)),
            }
            for part in answer.output
            if part.type == "function_call"
        ]
        if not results:
            return calls
        items += results


AGENTS = {"chat": chat_agent, "anthropic": anthropic_agent, "responses": responses_agent}


class Updates:
    """Versions of an engine whose weights are replaced in the middle of an answer."""

    def __init__(self, at_answer: int) -> None:
        self.at, self.version, self.asked = at_answer, 5, 0

    def __call__(self, tokens: int) -> list[int]:
        self.asked += 1
        if self.asked == self.at:
            self.version += 1
            return [self.version - 1] * (tokens // 2) + [self.version] * (tokens - tokens // 2)
        return [self.version] * tokens


@pytest.mark.parametrize("stream", [False, True], ids=("whole", "streamed"))
@pytest.mark.parametrize("dialect", AGENTS)
async def test_a_session_of_twenty_turns_is_one_row_of_what_was_sampled(
    bridge, make_consumer, dialect, stream
):
    """Tool calls in every turn; an update in the middle of an answer splits its versions token by token."""
    consumer, calls = make_consumer(), []

    async def play(episode, data):
        calls.append(await AGENTS[dialect](episode, stream))
        episode.score, episode.components = float(data), {"solved": 1.0}

    begin = [{"role": "user", "content": "count to nineteen"}]
    say = silent if dialect == "responses" else counting
    async with (
        serving(Engine(say, Updates(at_answer=12))) as engine,
        AgentRollout(bridge, engine.url, group_size=1) as rollout,
    ):
        assert await rollout.run([Task(begin, data=3, instance_id="count")], play) == 1
        assert rollout.losses.episodes == {}
        assert not rollout.capture.registry.list_ids()
    assert calls == [TURNS]
    with consumer.get(timeout_s=5) as record:
        assert len(record) == 1
        assert (record.meta.min_policy_version, record.meta.max_policy_version) == (5, 6)
        tokens, mask = record["tokens"][0].tolist(), record["loss_mask"][0].tolist()
        versions, logprobs = record["token_versions"][0].tolist(), record["inference_logprobs"][0].tolist()
        messages = record.json("messages")[0]
        assert record["turn_ends"][0].tolist() == [len(prompt + said) for prompt, said, _ in engine.answers]
        assert record["prompt_length"][0] == len(engine.answers[0][0])
        assert (record["score"][0], record["temperature"][0]) == (3.0, 1.0)
        assert (record["row_index"].tolist(), record["is_last"].tolist()) == ([0], [True])
        assert record["instance_id"] == ["count"]
    # the session, made tokens of again, is the row; so is what the engine sampled, in its place
    assert tokens == engine.rendered(messages, engine.bodies[-1]["tools"], ask=False)
    assert [message["role"] for message in messages].count("tool") == TURNS - 1
    asked, said = [0] * len(tokens), [-1] * len(tokens)
    for prompt, sampled, its_versions in engine.answers:
        place = slice(len(prompt), len(prompt) + len(sampled))
        assert (tokens[: place.start], tokens[place]) == (prompt, sampled)
        assert logprobs[place] == [-(i + 1) / 128 for i in range(len(sampled))]
        asked[place], said[place] = [1] * len(sampled), its_versions
    assert (mask, versions) == (asked, said)
    assert set(engine.answers[11][2]) == {5, 6}
    assert sum(mask) == sum(len(each) for _, each, _ in engine.answers)
    assert all(body["top_p"] == 1.0 and body["temperature"] == 1.0 for body in engine.bodies)


async def test_calls_that_do_not_go_on_become_rows_of_their_own(bridge, make_consumer):
    """A sub-agent, a compaction and a fork: no token is trained twice, rows of an episode stay together."""
    consumer = make_consumer()
    tools = [{"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}]
    chance = random.Random(7)

    async def play(episode, data):
        client = openai.AsyncOpenAI(base_url=f"{episode.url}/v1", api_key=episode.key, max_retries=0)

        async def ask(messages):
            made = await client.chat.completions.create(model="mine", messages=messages, tools=tools)
            return [*messages, {"role": "assistant", "content": made.choices[0].message.content}]

        main = await ask([{"role": "user", "content": "begin"}])
        await ask([{"role": "user", "content": "you are a sub-agent"}])
        main = await ask([*main, {"role": "user", "content": "go on"}])
        one, other = await asyncio.gather(
            *(ask([*main, {"role": "user", "content": said}]) for said in ("left", "right"))
        )
        await ask([{"role": "user", "content": f"in short: {len(one) + len(other)}"}])
        episode.score = float(episode.repetition_id)

    engine = Engine(lambda messages: (str(chance.random()), None), Updates(at_answer=3))
    async with serving(engine), AgentRollout(bridge, engine.url, group_size=2) as rollout:
        assert await rollout.run([Task([], None, instance_id="fork")], play) == 1
    with consumer.get(timeout_s=5) as record:
        assert len(record) == 8
        assert record["repetition_id"].tolist() == [0] * 4 + [1] * 4
        assert record["row_index"].tolist() == [0, 1, 2, 3] * 2
        assert record["is_last"].tolist() == [False, False, False, True] * 2
        assert record["instance_id"] == ["fork"] * 8
        assert record["score"].tolist() == [0.0] * 4 + [1.0] * 4
        assert sorted(len(record["turn_ends"][row]) for row in range(4)) == [1, 1, 1, 3]
        trained = [
            (tuple(record["tokens"][row].tolist()[:end]), record["token_versions"][row].tolist()[end - 1])
            for row in range(8)
            for end in record["turn_ends"][row].tolist()
        ]
        sampled = sum(int(record["loss_mask"][row].sum()) for row in range(8))
    answers = [(tuple(prompt + said), versions[-1]) for prompt, said, versions in engine.answers]
    assert sorted(trained) == sorted(answers)
    assert sampled == sum(len(said) for _, said, _ in engine.answers)


async def test_lost_sessions_cost_their_rows_and_are_counted(bridge, make_consumer):
    """One agent hangs, one asks nothing: the third is put alone."""
    consumer = make_consumer()
    ends = {}

    async def play(episode, data):
        ends[episode.repetition_id] = episode
        episode.score = 1.0
        if episode.repetition_id == 0:
            await asyncio.Event().wait()
        if episode.repetition_id != 1:
            await chat_agent(episode, stream=False)

    limits = Limits(episode_s=4)
    async with (
        serving(Engine(counting)) as engine,
        AgentRollout(bridge, engine.url, group_size=3, limits=limits) as rollout,
    ):
        assert await rollout.run([Task([{"role": "user", "content": "?"}], None)], play) == 1
        assert rollout.losses.episodes == {"late": 1, "SessionUnusable": 1}
        late = openai.AsyncOpenAI(base_url=f"{ends[0].url}/v1", api_key=ends[0].key, max_retries=0)
        with pytest.raises(openai.AuthenticationError):  # its session has ended
            await late.chat.completions.create(model="mine", messages=[{"role": "user", "content": "?"}])
    with consumer.get(timeout_s=5) as record:
        assert record["repetition_id"].tolist() == [2]
    stats = consumer.stats()
    assert (stats["episodes_lost_total{late}"], stats["episodes_lost_total{failed}"]) == (1, 1)


async def test_a_server_without_tokens_is_refused_at_the_start(bridge, make_consumer):
    make_consumer()
    async with serving(Engine(counting, without=("token_ids",))) as engine:
        rollout = AgentRollout(bridge, engine.url)
        with pytest.raises(NoTokens, match="no token ids"):
            async with rollout:
                pass
        with pytest.raises(shmbridge.Closed):
            rollout.producer.put({"tokens": [[1]]})


async def test_the_limit_of_calls_ends_an_agent_and_its_row_says_so(bridge, make_consumer):
    consumer = make_consumer()

    async def play(episode, data):
        assert await chat_agent(episode, stream=True) == 4  # three, and the proxy's own words
        episode.score = 0.0

    async with serving(Engine(counting)) as engine:
        capture = Capture(engine.url, max_calls=3)
        async with AgentRollout(bridge, capture, group_size=1) as rollout:
            assert await rollout.run([Task([{"role": "user", "content": "?"}], None)], play) == 1
    assert len(engine.answers) == 3
    with consumer.get(timeout_s=5) as record:
        assert record["finish_reason"].tolist() == [1]  # length
        prompt, said, _ = engine.answers[2]
        assert record["tokens"][0].tolist() == prompt + said


async def test_two_sessions_do_not_mix(bridge, make_consumer):
    """Eight at once over one proxy, versions that change all the time: each row has its own."""
    consumer, chance = make_consumer(), random.Random(2)

    async def play(episode, data):
        await chat_agent(episode, stream=bool(episode.repetition_id % 2))
        episode.score = 0.0

    def say(messages):
        turn = sum(message["role"] == "tool" for message in messages)
        return f"{chance.random()} ", {"command": str(chance.random())} if turn < 4 else None

    engine = Engine(say, lambda tokens: [chance.randrange(1000) for _ in range(tokens)])
    async with serving(engine), AgentRollout(bridge, engine.url, group_size=8) as rollout:
        assert await rollout.run([Task([{"role": "user", "content": "?"}], None)], play) == 1
    with consumer.get(timeout_s=5) as record:
        assert (len(record), len(engine.answers)) == (8, 40)
        for row in range(8):
            tokens, versions = record["tokens"][row].tolist(), record["token_versions"][row].tolist()
            mine = [each for each in engine.answers if tokens[: len(each[0] + each[1])] == each[0] + each[1]]
            assert len(mine) == 5
            for prompt, said, its_versions in mine:
                assert versions[len(prompt) : len(prompt + said)] == its_versions
