"""How long an environment's event loop is held per group: by an attached environment's send, beside
upstream's own client. "with versions": the worker's server named the policy version of each answer, and
`send` looks each row up among them.

One process, one thread, CPU time of that thread, in turn within each round. Upstream's is the encoding in
BaseEnv (json.dumps and gzip), without the socket; ours is all of `send`, to the return. Lists as BaseEnv has
them, of SOURCES groups in turn. Method: bench/README.md.
"""

import asyncio
import os
import statistics
import time
from types import SimpleNamespace

import pytest

import shmbridge
from shmbridge.bench.atropos_http import group_of
from shmbridge.bench.groups import ROWS, SOURCES

base = pytest.importorskip("atroposlib.envs.base")

from shmbridge.producers.atropos.control_link import EnvLink  # noqa: E402
from shmbridge.producers.atropos.lane import LinkOptions  # noqa: E402
from shmbridge.producers.atropos.versions import heard, listening  # noqa: E402
from shmbridge.producers.rollout.sampling import Completion  # noqa: E402
from shmbridge.put import token_array  # noqa: E402

CASES = {"8 x 2048": 2048, "8 x 8192": 8192}
MODES = ("core", "with messages", "with versions")
PROMPT = 256  # tokens of a row that its answer does not have
CHAT = [{"role": role, "content": "to be or not to be " * 40} for role in ("system", "user", "assistant")]


def with_everything(group):
    """Side data that becomes JSON here, too: a chat per row, overrides, parameters."""
    rows = len(group["tokens"])
    more = {
        "messages": [CHAT] * rows,
        "overrides": [{"weight": 1.0}] * rows,
        "generation_params": {"temperature": 0.7},
        "seed": 3,
    }
    return group | more


def answers_to(group):
    return [
        Completion(prompt=token_array(row[:PROMPT]), output=token_array(row[PROMPT:]), newest=3)
        for row in group["tokens"]
    ]


def groups_of(length, mode):
    groups = [
        group_of(length, "lists", number) | {"env_id": 0, "ref_logprobs": None, "group_overrides": {}}
        for number in range(SOURCES)
    ]
    return [with_everything(group) for group in groups] if mode == "with messages" else groups


def upstream(group):
    sink = SimpleNamespace(post=lambda url, data, headers: None)
    base.BaseEnv._post_json_with_compression(None, sink, "http://127.0.0.1:9/scored_data", group)


async def held(link, consumer, groups, answers, rounds):
    """Milliseconds of the loop's thread per group, (ours, upstream's); medians of rounds."""
    ours, theirs = [], []
    for _ in range(rounds):
        began = time.thread_time_ns()
        for group, completions in zip(groups, answers, strict=True):
            with listening():
                heard().note(completions)
                await link.send([group])
        ours.append((time.thread_time_ns() - began) / len(groups) / 1e6)
        for record in consumer.poll(1000):
            record.release()
        began = time.thread_time_ns()
        upstream(groups[0])
        theirs.append((time.thread_time_ns() - began) / 1e6)
    return statistics.median(ours), statistics.median(theirs)


@pytest.mark.benchmark(group="event loop")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_event_loop_per_group(benchmark, per_operation, quick, case, mode):
    name = f"bench-loop-{os.getpid()}"
    groups = groups_of(CASES[case], mode)
    answers = [answers_to(group) if mode == "with versions" else [] for group in groups]

    async def measure():
        with shmbridge.Consumer(name) as consumer:
            link = EnvLink(LinkOptions(name), "bench")
            await held(link, consumer, groups, answers, 1)
            found = await held(link, consumer, groups, answers, 4 if quick else 15)
            link.leave()
            return found

    try:
        ours, theirs = benchmark.pedantic(lambda: asyncio.run(measure()), rounds=1)
    finally:
        shmbridge.clean(name, dry_run=False)
    per_operation([ours / 1e3], tokens=ROWS * CASES[case])
    label = f"{case} {mode}"
    benchmark.extra_info.update(
        {"label": label, "ms_per_group": ours, "upstream_ms_per_group": theirs, "ratio": theirs / ours}
    )
    print(f"\n{label}: {ours:.3f} ms, upstream {theirs:.1f} ms, {theirs / ours:.0f}x")
