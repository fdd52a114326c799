"""OpenEnv's capture in front of the real policy server, whose weights are replaced while an agent works."""

import asyncio
import os
import sys

import openai
import torch

from shmbridge.producers.openenv import AgentRollout, Capture
from shmbridge.producers.rollout import Task
from shmbridge.weights import WeightsWriter


async def test_each_token_has_the_version_and_log_probability_of_the_weights_that_sampled_it(
    bridge, make_consumer, tiny, tmp_path
):
    """Twenty turns; the learner publishes after the tenth. What the model of a token's version says of it is
    its log-probability, and what the other says is not.
    """
    from transformers import AutoModelForCausalLM

    consumer = make_consumer()
    models = {version: AutoModelForCausalLM.from_pretrained(tiny).eval() for version in (5, 6)}
    with torch.no_grad():
        for value in models[6].parameters():
            value.mul_(1.5)
    log = (tmp_path / "server.log").open("w+")
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "shmbridge.consumers.policy_server", "--model", str(tiny), "--bridge", bridge,
        "--port", "0", "--model-version", "5",
        stdout=asyncio.subprocess.PIPE, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        line = (await server.stdout.readline()).decode()
        assert "http://" in line, (line, log.seek(0), log.read())
        url = "http://" + line.split("http://")[1].split()[0]

        async def play(episode, data):
            client = openai.AsyncOpenAI(base_url=f"{episode.url}/v1", api_key=episode.key, max_retries=0)
            messages = [*episode.messages]
            for turn in range(20):
                if turn % 7 == 6:  # a compaction: the context is one of 128 tokens
                    messages = [*episode.messages, *messages[-2:]]
                if turn == 10:
                    named = [(name, value.detach()) for name, value in models[6].named_parameters()]
                    await asyncio.to_thread(writer.publish, 6, named)
                    server_itself = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-")
                    while (await server_itself.models.list()).data[0].weight_version != 6:
                        await asyncio.sleep(0.02)
                answer = await client.chat.completions.create(
                    model="mine", messages=messages, max_tokens=3, temperature=0.2
                )
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                messages.append({"role": "user", "content": f"{turn}?"})
            episode.score = 1.0

        with WeightsWriter(bridge) as writer:
            async with AgentRollout(bridge, Capture(url), group_size=1) as rollout:
                begin = [{"role": "user", "content": ">37"}]
                assert await rollout.run([Task(begin, None)], play) == 1
                left_out = rollout.left_out["discarded"]  # an attempt that led nowhere, as OpenEnv sees it
                assert rollout.left_out.total() == left_out <= 2
    finally:
        server.terminate()
        await server.wait()
        log.close()
    turns = 0
    with consumer.get(timeout_s=5) as record:
        assert (record.meta.min_policy_version, record.meta.max_policy_version) == (5, 6)
        extra = record.json("extra")
        assert not left_out or extra["rows"][0]["calls_left_out"] == {"discarded": left_out}
        for row in range(len(record)):
            tokens = torch.tensor(record["tokens"][row].copy())
            versions, mask = record["token_versions"][row][1:], record["loss_mask"][row][1:].astype(bool)
            said = torch.tensor(record["inference_logprobs"][row][1:].copy())
            turns += len(record["turn_ends"][row])
            assert set(versions[mask].tolist()) <= {5, 6}
            for version, other in ((5, 6), (6, 5)):
                where = torch.tensor(mask & (versions == version))
                if not where.any():
                    continue
                with torch.inference_mode():
                    right, wrong = (
                        models[each](tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])
                        for each in (version, other)
                    )
                torch.testing.assert_close(said[where], right[where, 0], atol=2e-4, rtol=2e-4)
                assert not torch.allclose(said[where], wrong[where, 0], atol=1e-2)
    assert turns + left_out == 20
