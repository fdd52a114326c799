"""Policy "atropos" is upstream's server: the same batches in the same order, the same buffers, the same
numbers, for any arrivals.
"""

import asyncio
import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmbridge._ext.groups import SizeBuffer
from shmbridge.control.environments import AtroposQueue, EnvWeight
from shmbridge.errors import NoWeight, UnknownEnvironment

server = pytest.importorskip("atroposlib.api.server")
utils = pytest.importorskip("atroposlib.api.utils")

SIZES = st.one_of(st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 12))
GROUP_SIZES = st.one_of(st.sampled_from([1, 2, 4, 8]), st.integers(1, 9))
ENVS = st.fixed_dictionaries(
    {
        "max_token_length": st.sampled_from([512, 2048]),
        "weight": st.sampled_from([0.1, 1.0, 2.5, 0.0, -1.0]),
        "group_size": GROUP_SIZES,
        "min_batch_allocation": st.sampled_from([None, None, 0.0, 0.1, 0.25, 0.5, 0.9]),
    }
)
POSTS = st.tuples(st.just("post"), st.one_of(st.none(), st.integers(0, 4)), SIZES)
OWN = st.tuples(st.just("own"), st.integers(0, 3), st.just(0))  # a group of its environment's size
STEPS = st.one_of(
    POSTS,
    OWN,
    OWN,
    OWN,
    st.tuples(st.just("batch"), st.just(0), st.just(0)),
    st.tuples(st.sampled_from(["status", "disconnect"]), st.integers(0, 3), st.just(0)),
)


@given(st.integers(1, 12), st.lists(st.integers(0, 14), max_size=30))
@settings(deadline=None, max_examples=100)
def test_a_buffer_gives_out_what_upstream_finds(target: int, sizes: list[int]) -> None:
    ours: SizeBuffer = SizeBuffer()
    theirs: list[dict] = []
    for number, size in enumerate(sizes):
        theirs.append({"number": number, "tokens": [[0]] * size})
        places = utils.find_groups_summing_to_target(theirs, target)
        wanted = [theirs[place]["number"] for place in places]
        for place in reversed(places):
            del theirs[place]
        assert [item for item, _ in ours.add(number, size, target)] == wanted
        assert ours.items == [each["number"] for each in theirs]
        assert ours.sequences == sum(len(each["tokens"]) for each in theirs)


def test_a_buffer_whose_target_has_changed_looks_at_everything_again() -> None:
    ours: SizeBuffer = SizeBuffer()
    assert [ours.add(number, 3, 4) for number in range(3)] == [[], [], []]
    assert ours.add(3, 5, 6) == [(0, 3), (1, 3)]
    assert ours.items == [2, 3]


class Upstream:
    """The app's own functions, over a state of their own."""

    def __init__(self, state: SimpleNamespace, batch_size: int) -> None:
        self.state = state
        self.ask(
            server.register,
            server.Registration(
                wandb_group="",
                wandb_project="",
                batch_size=batch_size,
                max_token_len=1,
                checkpoint_dir="",
                save_checkpoint_interval=-1,
                starting_step=3,
                num_steps=9,
            ),
        )
        state.started = True

    def ask(self, function, *arguments):
        return asyncio.run(function(*arguments))

    def register_env(self, env: dict) -> int:
        return self.ask(server.register_env_url, server.RegisterEnv(desired_name="e", **env))["env_id"]

    def post(self, number: int, size: int, env_id: int | None) -> dict:
        tokens = [[number]] * size
        data = server.ScoredData(
            tokens=tokens, masks=tokens, scores=[0.0] * size, images=number, env_id=env_id
        )
        return self.ask(server.scored_data, data)

    def batch(self) -> list[int] | None:
        batch = self.ask(server.get_batch)["batch"]
        return None if batch is None else [group["images"] for group in batch]

    def status(self, env_id: int) -> dict:
        return self.ask(server.get_status_env, server.EnvIdentifier(env_id=env_id))


def follow(upstream, batch_size: int, envs: list[dict], steps: list[tuple]) -> None:
    """Makes the same call on both, and compares all visible state."""
    ours: AtroposQueue[int] = AtroposQueue(batch_size, step=3)
    late = [env for env in envs if env.get("late")]
    envs = [env for env in envs if not env.get("late")]

    def register(env: dict) -> None:
        number = upstream.register_env({key: value for key, value in env.items() if key != "late"})
        ours.register(
            EnvWeight(
                number,
                "e",
                env["weight"],
                env["min_batch_allocation"],
                env["group_size"],
                env["max_token_length"],
            )
        )

    for env in envs:
        register(env)
    for number, (what, env_id, size) in enumerate(steps):
        if late and number == len(steps) // 2:
            envs.append(late.pop())
            register(envs[-1])
        if what in ("post", "own"):
            if what == "own":
                if env_id >= len(envs):
                    continue
                size = envs[env_id]["group_size"]
            wanted = upstream.post(number, size, env_id)
            _, buffered = ours.add(number, size, env_id)
            assert buffered == wanted.get("buffer_size")
        elif what == "batch":
            assert ours.next_batch() == upstream.batch()
        elif env_id >= len(envs):
            with pytest.raises(UnknownEnvironment):
                ours.status_env(env_id)
        elif what == "disconnect":
            upstream.state.envs[env_id]["connected"] = False
            ours.disconnect(env_id)
        else:
            try:
                wanted = upstream.status(env_id)
            except ZeroDivisionError:
                with pytest.raises(NoWeight):
                    ours.status_env(env_id)
            else:
                assert ours.status_env(env_id) == wanted
        assert ours.queue_size == len(upstream.state.queue)
        assert ours.step == upstream.state.status_dict["step"]
    while (wanted := upstream.batch()) is not None:
        assert ours.next_batch() == wanted
    assert ours.next_batch() is None


@given(st.sampled_from([4, 8, 12, 16, 24, 7]), st.lists(ENVS, max_size=4), st.lists(STEPS, max_size=70))
@settings(deadline=None, max_examples=100)
def test_any_script_ends_as_upstreams(batch_size: int, envs: list[dict], steps: list[tuple]) -> None:
    state, before = SimpleNamespace(), server.app.state
    server.app.state = state
    try:
        follow(Upstream(state, batch_size), batch_size, envs, steps)
    finally:
        server.app.state = before


def crowded(rng: random.Random) -> tuple[int, list[dict], list[tuple]]:
    """A script with a long queue when a batch is requested, so that the order of packs and the scaling of
    minima decide.
    """
    sizes = rng.choice([(1, 2, 4, 8), (2, 4), (1, 2, 3, 6, 4), (4, 8, 16)])
    envs = [
        {
            "max_token_length": rng.choice([512, 2048]),
            "weight": rng.choice([0.5, 1.0, 3.0]),
            "group_size": rng.choice(sizes),
            "min_batch_allocation": rng.choice([None, 0.1, 0.3, 0.5, 0.7]) if rng.random() < 0.7 else None,
            # it has posted before it registers, groups of any size
            "late": number == 1 and rng.random() < 0.5,
        }
        for number in range(rng.randint(1, 4))
    ]
    early, known = sum(not env["late"] for env in envs), len(envs)
    steps = []
    for _ in range(rng.randint(20, 90)):
        what = rng.choices(["post", "own", "batch", "status", "disconnect"], [4, 6, 0.7, 1, 0.05])[0]
        unregistered = rng.random() < 0.5
        env_id = rng.choice([None, early]) if what == "post" and unregistered else rng.randrange(known)
        steps.append((what, env_id, rng.choice(sizes)))
    return rng.choice([8, 12, 16, 32]), envs, steps


@pytest.mark.parametrize("scripts", [50, pytest.param(600, marks=pytest.mark.long)])
def test_a_crowded_script_ends_as_upstreams(scripts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    @given(st.integers(0, 2**32))
    @settings(deadline=None, max_examples=scripts)
    def compare(seed: int) -> None:
        monkeypatch.setattr(server.app, "state", SimpleNamespace())
        batch_size, envs, steps = crowded(random.Random(seed))
        follow(Upstream(server.app.state, batch_size), batch_size, envs, steps)

    compare()


class OverHttp(Upstream):
    """The app behind its own protocol."""

    def __init__(self, client, batch_size: int) -> None:
        self.client, self.state = client, server.app.state
        client.get("/reset_data")
        self.state.queue = []
        del self.state.queue
        self.say(
            "post",
            "/register",
            wandb_group="",
            wandb_project="",
            batch_size=batch_size,
            max_token_len=1,
            checkpoint_dir="",
            save_checkpoint_interval=-1,
            starting_step=3,
            num_steps=9,
        )
        self.state.started = True

    def say(self, method: str, path: str, **body) -> dict:
        answer = self.client.request(method, path, json=body)
        if answer.status_code == 500:
            raise ZeroDivisionError
        return answer.json()

    def register_env(self, env: dict) -> int:
        return self.say("post", "/register-env", desired_name="e", **env)["env_id"]

    def post(self, number: int, size: int, env_id: int | None) -> dict:
        tokens = [[number]] * size
        return self.say(
            "post",
            "/scored_data",
            tokens=tokens,
            masks=tokens,
            scores=[0.0] * size,
            images=number,
            env_id=env_id,
        )

    def batch(self) -> list[int] | None:
        batch = self.say("get", "/batch")["batch"]
        return None if batch is None else [group["images"] for group in batch]

    def status(self, env_id: int) -> dict:
        return self.say("get", "/status-env", env_id=env_id)


def test_any_script_ends_as_the_real_apps() -> None:
    pytest.importorskip("httpx")
    from starlette.testclient import TestClient

    with TestClient(server.app, raise_server_exceptions=False) as client:

        @given(
            st.sampled_from([4, 8, 12, 16]),
            st.lists(ENVS, min_size=1, max_size=3),
            st.lists(STEPS, max_size=25),
        )
        @settings(deadline=None, max_examples=25)
        def compare(batch_size: int, envs: list[dict], steps: list[tuple]) -> None:
            client.get("/reset_data")
            server.app.state.queue = []
            follow(OverHttp(client, batch_size), batch_size, envs, steps)

        compare()
        for seed in range(20):
            server.app.state.queue = []
            batch_size, envs, steps = crowded(random.Random(seed))
            follow(OverHttp(client, batch_size), batch_size, envs, steps)


def test_a_batch_put_back_whole_comes_next_and_is_no_further_step() -> None:
    ours: AtroposQueue[str] = AtroposQueue(4)
    for name in "abcd":
        ours.add(name, 2, None)
    assert (ours.next_batch(), ours.step) == (["c", "d"], 2)
    ours.put_back([("c", 2, None), ("d", 2, None)])
    assert (ours.next_batch(), ours.next_batch(), ours.step) == (["c", "d"], ["a", "b"], 2)
    ours.put_back([(name, 2, None) for name in "abcd"])
    assert (ours.next_batch(), ours.next_batch(), ours.next_batch(), ours.step) == (
        ["a", "b"],
        ["c", "d"],
        None,
        2,
    )
    ours.put_back([])
    assert ours.next_batch() is None


def test_groups_put_back_in_part_stand_before_all_others() -> None:
    ours: AtroposQueue[str] = AtroposQueue(4)
    for name in "abc":
        ours.add(name, 2, None)
    assert ours.next_batch() == ["a", "b"]
    ours.put_back([("b", 2, None)])
    assert (list(ours), ours.next_batch()) == (["b", "c"], ["b", "c"])


def test_a_removed_group_is_in_no_batch_and_undoes_the_one_it_was_in() -> None:
    ours: AtroposQueue[str] = AtroposQueue(2)
    ours.register(EnvWeight(0, "e", 1.0, None, 2))
    for name in "abcdef":
        ours.add(name, 1, None)
    ours.add("part", 1, 0)
    assert ours.next_batch() == ["e", "f"]
    ours.remove([name for name in ours if name in ("b", "part")])
    assert (ours.step, ours.queue_size, ours.buffered) == (2, 1, 0)
    ours.add("g", 1, None)
    assert [ours.next_batch() for _ in range(3)] == [["c", "d"], ["a", "g"], None]
