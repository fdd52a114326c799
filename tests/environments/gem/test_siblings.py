"""AtroposGemEnv: siblings of one group are one group of the environment; judges are no turns."""

import gc
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random

import pytest

from shmbridge.errors import BadArgument
from shmbridge.producers.atropos.upstream import PlainTokens
from shmbridge.producers.gem import Action, EnvFailed, NotSuspendable
from shmbridge.producers.gem.scores import rows_of
from shmbridge.producers.gem.turns import Answer, Request, Spoken
from shmbridge.testing import wait_until
from tests.environments.byte_tokenizer import byte_tokenizer


def action(text: str) -> Action:
    """An answer as a model samples it, end token included."""
    tokens = [*byte_tokenizer().encode(text, add_special_tokens=False), byte_tokenizer().eos_token_id]
    return Action(text, tokens, [-0.25] * len(tokens))


def play(env, answers, seed=1, after=lambda observation: None):
    """Plays an episode with these answers; returns what the last step gave."""
    after(env.reset(seed=seed)[0])
    for text in answers:
        last = env.step(text if isinstance(text, Action) else action(text))
    return last


def together(envs, answers, seed=1):
    """Plays siblings, each in a thread of its own, as ROLL does; results, or the exceptions."""

    def one(env, said):
        try:
            return play(env, said, seed)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(envs)) as threads:
        return list(threads.map(one, envs, answers))


@pytest.mark.parametrize(("said", "score"), [("right", None), ("wrong", -1.0), ("rightly so", None)])
def test_an_equal_score_filter_does_not_hide_the_score(make_env, envs, said, score):
    """A group of one has equal scores: the environment drops it, and its own score is what counts."""
    env = make_env("FilteredEnv")
    _, reward, terminated, _, info = play(env, [said])
    own = envs.FilteredEnv.scored[-1][said]
    assert (reward, info["raw_score"], terminated, info["filtered"]) == (own, own, True, True)
    assert score in (None, own)
    (tokens,) = info["group"]["tokens"]
    assert byte_tokenizer().decode(tokens).endswith(f"{said}<|end|>")
    assert info["group"]["inference_logprobs"][0][-1] == -0.25


def test_siblings_are_scored_as_one_group(make_env, envs):
    """The environment shuffles its rows; each sibling gets its own. All right: the long one is worth less."""
    siblings = [make_env("FilteredEnv", options={"group_size": 4}) for _ in range(4)]
    said = ["right", "right, and long", "wrong one", "wrong too"]
    for seed in range(20):
        results = together(siblings, [[each] for each in said], seed)
        assert [result[1] for result in results] == [1.0, 1.0, -1.0, -1.0]
        for text, (*_, info) in zip(said, results, strict=True):
            assert sorted(info["sibling_scores"]) == [-1.0, -1.0, 1.0, 1.0]
            assert not info["filtered"]
            (tokens,) = info["group"]["tokens"]
            assert byte_tokenizer().decode(tokens).endswith(f"{text}<|end|>")
    assert siblings[0]._runtime.env.runs == list(range(1, 21)), "one body for all four"
    results = together(siblings, [["right"], ["right on"], ["right again"], ["rightly"]], 99)
    scored = envs.FilteredEnv.scored[-1]
    assert [result[1] for result in results] == [
        scored[text] for text in ("right", "right on", "right again", "rightly")
    ]
    assert len({result[1] for result in results}) == 4


def test_siblings_whose_group_is_dropped_have_its_scores(make_env):
    siblings = [make_env("FilteredEnv", options={"group_size": 3}) for _ in range(3)]
    results = together(siblings, [["wrong"], ["wrong"], ["wrong indeed"]])
    assert [result[1] for result in results] == [-1.0] * 3
    assert all(result[4]["filtered"] for result in results)
    assert len({id(result[4]["group"]["tokens"][0]) for result in results}) == 3, (
        "equal answers: a row for each"
    )


def test_an_answer_that_is_left_out_is_an_error_or_what_the_caller_says(make_env):
    siblings = [make_env("FilteredEnv", options={"group_size": 3}) for _ in range(3)]
    first, second, third = together(siblings, [["right"], ["wrong"], ["x"]])
    assert (first[1], second[1]) == (1.0, -1.0)
    assert isinstance(third, EnvFailed)
    assert "left this answer out" in str(third)
    siblings = [make_env("FilteredEnv", options={"group_size": 3, "left_out": -2.0}) for _ in range(3)]
    *_, third = together(siblings, [["right"], ["wrong"], ["x"]])
    assert (third[1], third[4]["group"]) == (-2.0, None)


@pytest.mark.parametrize("leaves", ["reset", "close"])
def test_a_sibling_that_leaves_has_answered_nothing(make_env, leaves):
    """As ROLL's, when a conversation is too long: the others are scored, as beside an answer that was cut."""
    siblings = [make_env("FilteredEnv", options={"group_size": 3}) for _ in range(3)]
    for env in siblings:
        env.reset(seed=1)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(siblings[0].step, action("right"))
        second = threads.submit(siblings[1].step, action("wrong"))
        siblings[2].close() if leaves == "close" else siblings[2].reset(seed=2)
        assert (first.result(20)[1], second.result(20)[1]) == (1.0, -1.0)
    assert len(first.result()[4]["sibling_scores"]) == 2, "the empty answer is too short for this environment"


def test_a_place_that_was_left_before_the_group_was_full_is_free_again(make_env):
    siblings = [make_env("FilteredEnv", options={"group_size": 2}) for _ in range(3)]
    siblings[0].reset(seed=5)
    siblings[0].close()
    results = together(siblings[1:], [["right"], ["wrong"]], 5)
    assert [result[1] for result in results] == [1.0, -1.0]


def test_siblings_that_do_not_come_are_named(make_env):
    env = make_env("FilteredEnv", options={"group_size": 3, "timeout_s": 0.3})
    env.reset(seed=1)
    with pytest.raises(EnvFailed, match="of its 3 siblings 2 have not begun, 0 have not answered"):
        env.step(action("right"))


@pytest.mark.parametrize("name", ["RoundsEnv", "TasksEnv"])
def test_siblings_keep_their_own_conversations(make_env, name):
    siblings = [make_env(name, turns=3, options={"group_size": 3}) for _ in range(3)]
    said = [["a", "bb", "c"], ["dd", "e", "ffff"], ["g", "hh", "iii"]]
    for _ in range(5):
        results = together(siblings, said)
        for texts, (_, reward, terminated, _, info) in zip(said, results, strict=True):
            assert terminated
            assert reward == (len(texts[-1]) if name == "RoundsEnv" else 7.0)
            text = byte_tokenizer().decode(info["group"]["tokens"][0])
            assert [text.find(each) >= 0 for each in texts] == [True] * 3


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ("begin", [["be", "m"], ["e", "ore"]]),
        ("begin", [["b", "g"], ["i", "mo"], ["g", "r"], ["n", "ore"]]),
        ("[A], [B] or [CCC]?", [["A", "B"], ["B", "CCC"], ["CCC", "A"], ["A", "CCC"]]),
        ("begin", [["a", "xx"], ["ab", "x"], ["a", "x"], ["a", "xx"]]),
    ],
)
@pytest.mark.parametrize("backwards", [False, True])
def test_short_answers_that_prompts_have_too(make_env, envs, monkeypatch, question, said, backwards):
    """Only the last turn is trained, the rows are shuffled, and some answers stand in all rows."""
    monkeypatch.setattr(envs.RoundsEnv, "question", question)
    monkeypatch.setattr(envs.RoundsEnv, "backwards", backwards)
    siblings = [make_env("RoundsEnv", turns=2, options={"group_size": len(said)}) for _ in said]
    for seed in range(10):
        results = together(siblings, said, seed)
        assert [result[1] for result in results] == [len(each[-1]) for each in said]
        for texts, result in zip(said, results, strict=True):
            chat = byte_tokenizer().decode(result[4]["group"]["tokens"][0])
            assert [part.partition("<|end|>")[0] for part in chat.split("<|assistant|>")[1:]] == texts


def test_rows_that_do_not_say_whose_they_are_are_no_score(make_env, envs, monkeypatch):
    monkeypatch.setattr(envs.RoundsEnv, "form", "last")
    monkeypatch.setattr(envs.RoundsEnv, "worth", lambda self, before, last: float(len(before[0])))
    siblings = [make_env("RoundsEnv", turns=2, options={"group_size": 3}) for _ in range(3)]
    first, second, third = together(siblings, [["a", "same"], ["bbb", "same"], ["cc", "other"]])
    assert third[1] == 2.0, "it alone ended so"
    for each in (first, second):
        assert isinstance(each, EnvFailed)
        assert "cannot tell siblings apart: 2 of 3 rows" in str(each)
    results = together(siblings, [["aa", "same"], ["bb", "same"], ["cc", "other"]], 2)
    assert [result[1] for result in results] == [2.0] * 3, "equal scores need not be told apart"


def test_rows_that_fit_nobody_leave_nobody_out(make_env, envs, monkeypatch):
    monkeypatch.setattr(envs.RoundsEnv, "form", "changed")
    siblings = [make_env("RoundsEnv", turns=1, options={"group_size": 2, "left_out": -2.0}) for _ in "ab"]
    for each in together(siblings, [["a"], ["bbb"]]):
        assert isinstance(each, EnvFailed)
        assert "cannot tell siblings apart" in str(each)


def conversation(answers: list[str], prompts: list[str]) -> list[dict[str, str]]:
    """A chat in which prompts and answers take turns."""
    pairs = zip(prompts, answers, strict=True)
    return [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


@pytest.mark.parametrize("form", ["whole", "goes_on", "without_first", "trained", "bare"])
@pytest.mark.parametrize("left_out", [0, 1])
@pytest.mark.parametrize("groups", [100, pytest.param(300, marks=pytest.mark.long)])
def test_a_row_is_never_another_siblings(form, left_out, groups):
    """Random groups of short answers: each sibling gets a row of its own conversation, or EnvFailed."""
    tokenizer, random = byte_tokenizer(), Random(f"{form} {left_out}")
    tokenizer.apply_chat_template = PlainTokens(tokenizer)  # as of an environment that is played
    told = failed = 0
    for _ in range(groups):
        turns, size = random.randint(1, 3), random.randint(2, 5)
        prompts = [random.choice(["a or b?", "more", "ab", "1"]) for _ in range(turns)]
        words = ["a", "b", "ab", "or", "1", "mo", "a long answer"]
        said = [[random.choice(words) for _ in range(turns)] for _ in range(size)]
        rows = []
        for number, answers in enumerate(said):
            chat = conversation(answers, prompts)
            if form == "goes_on":
                chat.append({"role": "user", "content": "over, a b"})
            if form == "without_first":
                chat = chat[1:] if turns == 1 else chat[2:]
            tokens = tokenizer.apply_chat_template(chat)
            trained = tokenizer.encode(answers[-1])
            if form == "bare":
                tokens = trained
            masks = tokens
            if form in ("trained", "without_first"):
                masks = [-100] * len(tokens)
                start = len(tokens) - len(trained) - 2  # its end, and a line's
                masks[start : start + len(trained)] = trained
            rows.append((number, tokens, masks))
        random.shuffle(rows)
        rows = rows[left_out:]
        siblings = [
            Spoken(Request(conversation(answers, prompts)[:-1]), [
                Answer(text, tokenizer.encode(text), None, "stop", False) for text in answers
            ])
            for answers in said
        ]  # fmt: skip
        group = {"tokens": [row[1] for row in rows], "masks": [row[2] for row in rows]}
        for at, row in enumerate(rows_of(group, siblings, tokenizer, [row[0] for row in rows])):
            failed += isinstance(row, EnvFailed)
            told += isinstance(row, int)
            if isinstance(row, int):
                assert said[rows[row][0]] == said[at]
            if row is None:
                here = [said[number] for number, *_ in rows]
                assert said.count(said[at]) > here.count(said[at])
    assert told > groups / 3
    assert not failed or form not in ("whole", "goes_on", "trained")


def test_siblings_of_different_lengths(make_env):
    siblings = [make_env("TasksEnv", turns=3, options={"group_size": 3}) for _ in range(3)]
    results = together(siblings, [["a", "b", "c"], ["stop"], ["d", "stop"]])
    assert [result[1] for result in results] == [7.0, 2.0, 4.0]


def test_a_group_that_never_was_full_is_forgotten(make_env):
    siblings = [make_env("FilteredEnv", options={"group_size": 3, "timeout_s": 0.3}) for _ in range(2)]
    for seed in range(3):
        said = [str(error) for error in together(siblings, [["right"], ["wrong"]], seed)]
        assert ["1 have not begun" in each for each in said] == [True, True]
    runtime = siblings[0]._runtime

    def forgotten():
        gc.collect()
        return not runtime._forming and not runtime.episodes

    wait_until(forgotten, 20)


def test_an_environment_that_blocks_its_thread_gets_a_fresh_one(make_env, envs, monkeypatch):
    monkeypatch.setattr(envs.OddEnv, "ends", "block")
    env, other = (make_env("OddEnv", options={"timeout_s": 1.0}) for _ in range(2))
    env.reset(seed=1)
    with pytest.raises(EnvFailed, match="did nothing for 1 s, and blocks its thread"):
        env.step(action("x"))
    monkeypatch.setattr(envs.OddEnv, "ends", "postprocessed")
    for each in (env, other, make_env("OddEnv", options={"timeout_s": 1.0})):
        assert play(each, ["x"])[1] == 11.0


def test_a_request_that_the_environment_gave_up_waits_for_nobody(make_env):
    """Also where its place was taken by another: a sibling that began again before the group was full."""
    siblings = [make_env("PatientEnv", options={"group_size": 3}) for _ in range(3)]
    for env in (siblings[0], siblings[1], siblings[0]):
        env.reset(seed=1)
    episode = siblings[0]._running.episode
    wait_until(lambda: len(siblings[0]._runtime.env.said) >= 2, 20)
    siblings[2].reset(seed=1)
    assert episode.group.error is None
    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(lambda env: env.step(action("ab"))[1], siblings))
    assert results == [2.0] * 3


def test_trajectories_that_are_played_alone_stay_alone(make_env):
    """BaseEnv's collect_trajectories only puts rows side by side: nobody waits for siblings."""
    env = make_env("ChatEnv", turns=1, options={"group_size": 4})
    assert play(env, ["x"])[1] == 1.0


def test_siblings_exclude_what_has_no_rows(make_env):
    for other in ({"replay": True}, {"reward_of": len}):
        with pytest.raises(BadArgument, match="group_size=2 with"):
            make_env("FilteredEnv", options={"group_size": 2, **other})


def test_siblings_are_spawned(make_env):
    first = make_env("FilteredEnv", options={"group_size": 2})
    first.reset(seed=6)
    with first.spawn(same_state=True) as second, ThreadPoolExecutor(2) as threads:
        results = list(
            threads.map(lambda pair: pair[0].step(action(pair[1])), [(first, "right"), (second, "no!")])
        )
    assert [result[1] for result in results] == [1.0, -1.0]


@pytest.fixture
def judge() -> Iterator[tuple[str, list[str]]]:
    """An OpenAI server that gives the number of letters "a" in what it is asked about; its questions."""
    asked: list[str] = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body["messages"][-1]["content"])
            said = str(asked[-1].rpartition("?")[2].count("a"))
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}
            answer = {"id": "1", "created": 1, "model": "judge", "object": "chat.completion"}
            answer["choices"] = [choice]
            text = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *said: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_judge_is_no_turn(make_env, judge):
    url, asked = judge
    env = make_env("JudgedEnv", options={"judge": {"base_url": url, "model_name": "judge"}})
    _, reward, terminated, _, _ = play(env, ["banana"])
    assert (reward, terminated) == (3.0, True)
    assert asked == ["How good is this, from 0 to 9? banana"]
    siblings = [
        make_env("JudgedEnv", options={"group_size": 2, "judge": {"base_url": url, "model_name": "judge"}})
        for _ in range(2)
    ]
    assert [each[1] for each in together(siblings, [["banana"], ["papaya a"]])] == [3.0, 4.0]


def test_a_judge_that_nobody_is_refused(make_env):
    with pytest.raises(NotSuspendable, match="asks a judge, in score") as refused:
        play(make_env("JudgedEnv"), ["banana"])
    assert "judge={'base_url'" in str(refused.value)


def test_a_judge_in_a_method_of_another_name_is_refused_or_named(make_env, envs, judge, monkeypatch):
    monkeypatch.setattr(envs.JudgedEnv, "where", "weigh")
    with pytest.raises(NotSuspendable, match="quotes the answer in another conversation"):
        play(make_env("JudgedEnv"), ["banana"])
    named = {"judge": {"base_url": judge[0], "model_name": "judge"}, "judge_calls": ["weigh"]}
    assert play(make_env("JudgedEnv", options=named), ["banana"])[1] == 3.0
    with pytest.raises(BadArgument, match="no coroutine method wiegh"):
        make_env("JudgedEnv", options={**named, "judge_calls": ["wiegh"]})
    with pytest.raises(BadArgument, match="is no server"):
        make_env("JudgedEnv", options={"judge": {"url": judge[0]}})
    env = make_env("JudgedEnv", options={"judge_calls": ()})
    env.reset()
    observation, *_, info = env.step("banana")
    assert observation.startswith("How good"), "all are turns, by choice"
    assert info["rewritten"]
    assert env.step("7")[1] == 7.0
