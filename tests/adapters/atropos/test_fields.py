"""Every field of a group arrives as upstream's own server would have delivered it, or is refused where it was
made.

Equal means: the same value and type under each of the fourteen keys; a key that was not sent is null on
upstream's wire and absent here, and both read as None; floats per token are those of upstream rounded to
float32; scores are not rounded.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shmbridge

server = pytest.importorskip("atroposlib.api.server")
testclient = pytest.importorskip("starlette.testclient")

INT32 = st.integers(-(2**31), 2**31 - 1)
TOKEN = st.integers(0, 2**31 - 1)  # a negative one is refused, which upstream carries
FLOAT = st.floats(min_value=-3.4e38, max_value=3.4e38)
LOGPROB = st.floats(-50, 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
KEYED = st.dictionaries(TEXT, JSON, max_size=3)
MESSAGE = st.fixed_dictionaries(
    {"role": TEXT, "content": JSON}, optional={"reward": FLOAT | st.none(), "tool_calls": JSON}
)
LOGPROBS = ("ref_logprobs", "inference_logprobs")
PER_TOKEN = ("advantages", *LOGPROBS)
KEYS = (
    "tokens",
    "masks",
    "scores",
    *PER_TOKEN,
    "messages",
    "generation_params",
    "overrides",
    "group_overrides",
    "images",
    "env_id",
    "distill_token_ids",
    "distill_logprobs",
)
REGISTRATION = {
    "wandb_group": "g",
    "wandb_project": "p",
    "checkpoint_dir": "",
    "save_checkpoint_interval": -1,
    "starting_step": 0,
}


@st.composite
def groups(draw: st.DrawFn, rows: int | None = None) -> dict[str, Any]:
    """A group of any kind that upstream takes: fields there, null, empty or absent; rows that agree or do
    not.
    """
    rows = draw(st.integers(1, 5)) if rows is None else rows
    tokens = [draw(st.lists(TOKEN, max_size=6)) for _ in range(rows)]

    def like_tokens(value: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.tuples(*(st.lists(value, min_size=len(row), max_size=len(row)) for row in tokens)).map(list)

    def per_token(value: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return like_tokens(value) | st.lists(st.lists(value, max_size=6), max_size=rows + 1)

    def masked(trained: list[list[bool]]) -> list[list[int]]:
        return [
            [token if on else -100 for token, on in zip(*pair, strict=True)]
            for pair in zip(tokens, trained, strict=True)
        ]

    group = {
        "tokens": tokens,
        "masks": draw(like_tokens(st.booleans()).map(masked) | per_token(INT32)),
        "scores": draw(st.lists(FLOAT, min_size=rows, max_size=rows) | st.lists(FLOAT, max_size=3)),
    }
    optional = {
        **dict.fromkeys(PER_TOKEN, per_token(LOGPROB | FLOAT)),
        "messages": st.lists(st.lists(MESSAGE, max_size=3), max_size=rows + 1),
        "generation_params": KEYED,
        "overrides": st.lists(KEYED, min_size=rows, max_size=rows) | st.lists(KEYED, max_size=rows + 1),
        "group_overrides": KEYED,
        "images": JSON | st.lists(JSON, min_size=rows, max_size=rows),
        "env_id": st.integers(0, 2**31 - 1),
        "distill_token_ids": per_token(st.lists(INT32, max_size=3)),
        "distill_logprobs": per_token(st.lists(LOGPROB, max_size=3)),
    }
    for name, values in optional.items():
        how = draw(st.sampled_from(["absent", "null", "values", "values"]))
        if how != "absent":
            group[name] = None if how == "null" else draw(values)
    return group


class Upstream:
    """The original rollout server, in this process: what goes in by POST /scored_data comes out by GET
    /batch.
    """

    def __init__(self) -> None:
        self._client = testclient.TestClient(server.app, raise_server_exceptions=False)

    def deliver(self, sent: dict[str, Any] | list[dict[str, Any]]) -> list[dict[str, Any]]:
        """One batch of all that is sent: a group, or a list of them. Raises where the server answers 500."""
        route, groups = ("scored_data_list", sent) if isinstance(sent, list) else ("scored_data", [sent])
        server.app.state = SimpleNamespace()
        rows = sum(len(group["tokens"]) for group in groups)
        self._client.post(
            "/register", json=REGISTRATION | {"batch_size": rows, "max_token_len": -1, "num_steps": 1}
        ).raise_for_status()
        assert self._client.get("/batch").json() == {"batch": None}
        body = json.dumps(sent)  # as BaseEnv's client: NaN stays NaN
        self._client.post(
            f"/{route}", content=body, headers={"Content-Type": "application/json"}
        ).raise_for_status()
        return self._client.get("/batch").raise_for_status().json()["batch"]


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> Upstream:
    monkeypatch.setattr(server.app, "state", server.app.state)  # put back at the end
    return Upstream()


@pytest.fixture
def bridged(
    make_producer: Callable[..., Any], consumer: shmbridge.Consumer
) -> Iterator[Callable[[dict], dict]]:
    producer = make_producer(lane_bytes="1M", on_full="raise")

    def deliver(group: dict[str, Any]) -> dict[str, Any]:
        producer.put(group, foreign=True)
        with consumer.get(timeout_s=5) as record:
            return record.to_scored_data()

    deliver.producer, deliver.consumer = producer, consumer
    return deliver


def float32(value: Any) -> Any:
    return [float32(each) for each in value] if isinstance(value, list) else float(np.float32(value))


def recorded(value: Any) -> Any:
    """Log-probabilities as a lane keeps them, with Atropos' mark for none."""
    if isinstance(value, list):
        return [recorded(each) for each in value]
    return 1.0 if not -9998 < value <= np.float32(1e-3) else 0.0 if value > 0 else value


def comparable(group: dict[str, Any], *, rounded: bool) -> dict[str, str]:
    """Every key as text that tells 1 from 1.0 and True, and -0.0 from 0.0."""
    floats = (*PER_TOKEN, "distill_logprobs")
    values = {key: group.get(key) for key in KEYS}
    if rounded:
        values |= {key: float32(values[key]) for key in floats if values[key] is not None}
        values |= {key: recorded(values[key]) for key in LOGPROBS if values[key] is not None}
    return {key: repr(value) for key, value in values.items()}


SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
EXAMPLES = settings(max_examples=120, deadline=None, suppress_health_check=SLOW)


@EXAMPLES
@given(group=groups())
def test_a_group_is_what_upstream_delivers(
    upstream: Upstream, bridged: Callable[[dict], dict], group: dict[str, Any]
) -> None:
    [theirs] = upstream.deliver(copy.deepcopy(group))
    ours = bridged(copy.deepcopy(group))
    assert comparable(ours, rounded=False) == comparable(theirs, rounded=True)
    assert set(ours) - set(KEYS) == set()


@settings(EXAMPLES, max_examples=25)
@given(data=st.data(), rows=st.integers(1, 4))
def test_a_list_of_groups_is_what_upstream_delivers(
    upstream: Upstream, bridged: Callable[[dict], dict], data: Any, rows: int
) -> None:
    sent = data.draw(st.lists(groups(rows), min_size=1, max_size=4))
    theirs = upstream.deliver(copy.deepcopy(sent))
    ours = [bridged(copy.deepcopy(group)) for group in sent]
    assert [comparable(each, rounded=False) for each in ours] == [
        comparable(each, rounded=True) for each in theirs
    ]


@settings(EXAMPLES, max_examples=40)
@given(
    group=groups(),
    unknown=st.dictionaries(
        st.sampled_from(["seed", "parsed_actions", "ground_truths", "ä"]), JSON, min_size=1
    ),
)
def test_unknown_keys_which_upstream_loses_are_carried(
    bridged: Callable[[dict], dict], group: dict[str, Any], unknown: dict
) -> None:
    back = bridged({**group, **copy.deepcopy(unknown)})
    assert repr({key: back[key] for key in unknown}) == repr(unknown)


FULL = {
    "tokens": [[5, 6, 7], [8, 9]],
    "masks": [[-100, 6, 7], [-100, 9]],
    "scores": [1.0, -1.0],
    **{name: [[0.0, 0.5, 1.0], [0.0, 0.5]] for name in PER_TOKEN},
    "distill_token_ids": [[[1], [2], [3]], [[4], [5]]],
    "distill_logprobs": [[[0.5], [0.5], [0.5]], [[0.5], [0.5]]],
    "messages": [[{"role": "user", "content": "x"}], [{"role": "user", "content": 0.5}]],
    "generation_params": {"temperature": 0.7},
    "overrides": [{}, {"weight": 1.0}],
    "group_overrides": {"weight": 1.0},
    "images": [None, {"scale": 1.0}],
}
# field -> (row that is named, where in the field the number stands)
SPOILED: dict[str, tuple[int, Callable[[Any, float], None]]] = {
    "scores": (1, lambda field, bad: field.__setitem__(1, bad)),
    **dict.fromkeys(PER_TOKEN, (1, lambda field, bad: field[1].__setitem__(0, bad))),
    "distill_logprobs": (1, lambda field, bad: field[1][1].__setitem__(0, bad)),
    "messages": (1, lambda field, bad: field[1][0].__setitem__("content", bad)),
    "generation_params": (0, lambda field, bad: field.__setitem__("temperature", bad)),
    "overrides": (1, lambda field, bad: field[1].__setitem__("weight", bad)),
    "group_overrides": (0, lambda field, bad: field.__setitem__("weight", bad)),
    "images": (1, lambda field, bad: field[1].__setitem__("scale", bad)),
}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("name", "alone"), [*((name, False) for name in SPOILED), *((name, True) for name in PER_TOKEN)]
)
def test_a_value_that_has_no_json_is_refused_with_its_field_and_row(
    upstream: Upstream, bridged: Any, name: str, alone: bool, bad: float
) -> None:
    row, spoil = SPOILED[name]
    group = {key: FULL[key] for key in ("tokens", "masks", "scores", name)} if alone else FULL
    group = copy.deepcopy(group)
    assert comparable(bridged(group), rounded=False) == comparable(upstream.deliver(group)[0], rounded=True)
    spoil(group[name], bad)
    with pytest.raises(Exception, match="500"):  # there the whole batch is lost, and counted as a step
        upstream.deliver(copy.deepcopy(group))
    if name in LOGPROBS:  # here such a token has none
        assert bridged(group)[name][row][0] == 1.0
        return
    with pytest.raises(shmbridge.InvalidRecord) as refused:
        bridged(group)
    assert (refused.value.column, refused.value.row) == (name, row)
    assert bridged.producer.stats()["dropped_total{invalid}"] == 1
    assert bridged.consumer.poll() == []


def test_floats_per_token_beyond_float32_are_refused_and_not_made_infinite(bridged: Any) -> None:
    for name in ("advantages", "distill_logprobs"):
        group = copy.deepcopy(FULL)
        SPOILED[name][1](group[name], 1e39)
        with pytest.raises(shmbridge.InvalidRecord, match=name):
            bridged(group)
