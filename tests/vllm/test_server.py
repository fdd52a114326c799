"""vLLM's own server, started as anybody would with the middleware: versions of a learner in another process, requests and an environment.

One server for all tests here; each publishes versions of its own, above those before.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from soak import MODELS, descendants, measured, soak

import shmbridge

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PYTHONPATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
PROMPT = [2, 7, 9, 12, 3]
PATIENCE_S = 180.0

pytestmark = pytest.mark.timeout(420)


def until(condition: Callable[[], Any], what: str = "") -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
    return value


class Server:
    """vLLM's OpenAI server in a process group of its own."""

    def __init__(self, folder: Path, bridge: str, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = log
        words = ["--model", folder, "--served-model-name", "policy", "--host", "127.0.0.1", "--port", self.port]
        words += ["--dtype", "float32", "--max-model-len", 512, "--max-num-seqs", 32, "--enforce-eager"]
        words += ["--weight-transfer-config", json.dumps({"backend": "shmbridge"})]
        words += ["--middleware", "shmbridge.consumers.vllm.middleware.ShmBridge"]
        words += ["--additional-config", json.dumps({"shmbridge": {"bridge": bridge, "pause": "keep"}})]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *map(str, words)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                env=os.environ | {"PYTHONPATH": PYTHONPATH, "VLLM_LOGGING_LEVEL": "INFO"},
            )  # fmt: skip

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str, body: Any = None, timeout_s: float = 60.0) -> tuple[int, Any, dict[str, str]]:
        raw = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, raw, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.status, json.loads(answer.read() or b"null"), {k.lower(): v for k, v in answer.headers.items()}
        except urllib.error.HTTPError as refused:
            return refused.code, json.loads(refused.read()), {}

    def is_up(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        try:
            return self.ask("/health", timeout_s=2.0)[0] == 200
        except OSError:
            return False

    def generate(self, prompt: list[int] = PROMPT, tokens: int = 16, **fields: Any) -> dict[str, Any]:
        greedy = {"prompt": {"prompt_token_ids": prompt}, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        status, body, _ = self.ask("/generate", greedy | fields)
        assert status == 200, body
        return body

    def policy(self) -> dict[str, Any]:
        return self.ask("/policy_version")[1]

    def has(self, version: int) -> None:
        until(lambda: self.policy()["version"] == version, f"{version}: {self.policy()}")

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Learner:
    """`publishing_learner.py` in the environment of learners."""

    def __init__(self, python: str, bridge: str) -> None:
        self.process = subprocess.Popen(
            [python, str(HERE / "publishing_learner.py"), bridge], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": PYTHONPATH},
        )  # fmt: skip

    def does(self, what: str, version: int, folder: Path) -> str:
        self.process.stdin.write(f"{what} {version} {folder}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def bridge() -> Iterator[str]:
    name = f"vllm-server-{os.getpid()}"
    yield name
    until(lambda: not shmbridge.clean(name, dry_run=False).kept, "a segment is still in use")


@pytest.fixture(scope="module")
def server(tiny_folder, bridge, tmp_path_factory) -> Iterator[Server]:
    server = Server(tiny_folder(0), bridge, tmp_path_factory.mktemp("server") / "server.log")
    try:
        until(server.is_up, "the server did not come up")
        yield server
    finally:
        server.end()


@pytest.fixture
def learner(learner_python, bridge) -> Iterator[Callable[[], Learner]]:
    """Yield a maker of learners, one at a time; the last is ended."""
    made: list[Learner] = []

    def make() -> Learner:
        made.append(Learner(learner_python, bridge))
        return made[-1]

    yield make
    for each in made:
        each.kill()


def spans(answer: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Of the first answer; they follow each other and cover its tokens."""
    found = [(span["version"], span["start"], span["end"]) for span in answer["weight_versions"][0]]
    assert [start for _, start, _ in found] == [0, *(end for _, _, end in found[:-1])]
    assert found[-1][2] == len(answer["token_ids"][0])
    return found


def logprobs_of(model: Any, prompt: list[int], tokens: list[int]) -> list[float]:
    """What Hugging Face says of these tokens, in nats."""
    import torch

    with torch.no_grad():
        rows = torch.log_softmax(model(torch.tensor([prompt + tokens])).logits[0].float(), -1)
    return [float(rows[len(prompt) + place - 1, token]) for place, token in enumerate(tokens)]


def test_before_the_first_version_nothing_is_claimed(server, greedy, make_model):
    answer = server.generate()
    assert answer["token_ids"][0] == greedy(make_model(0))
    assert answer["weight_version"] is None
    assert server.policy()["version"] is None
    assert "x-policy-version" not in server.ask("/v1/models")[2]


def test_three_versions_of_a_learner_token_by_token(server, learner, tiny_folder, make_model, greedy):
    """Leave the push out, and both the version and the tokens are those of the weights before."""
    process = learner()
    before = server.generate()["token_ids"][0]
    for version in (1, 2, 3):
        expected = greedy(make_model(version))
        assert expected != before, "these models can be told apart"
        assert server.generate()["token_ids"][0] == before, "nothing changes by itself"
        assert process.does("publish", version, tiny_folder(version)) == f"published {version}"
        server.has(version)
        answer = server.generate()
        assert answer["token_ids"][0] == expected
        assert spans(answer) == [(str(version), 0, 16)]
        assert answer["weight_version"] == version
        before = expected
    status, completion, headers = server.ask("/v1/completions", {"model": "policy", "prompt": PROMPT, "max_tokens": 4})
    assert status == 200
    assert (completion["weight_version"], completion["oldest_weight_version"], headers["x-policy-version"]) == (3, 3, "3")
    assert server.policy()["failed_total"] == 0


def test_requests_in_flight_span_updates_and_can_be_scored(server, learner, tiny_folder, make_model):
    process = learner()
    folders = {version: tiny_folder(version) for version in range(10, 25)}
    for first in range(10, 25, 3):  # again, should two updates have taken longer than 480 tokens
        process.does("publish", first, folders[first])
        server.has(first)
        with ThreadPoolExecutor(4) as clients:
            asked = [clients.submit(server.generate, [*PROMPT, 6 + place], 480) for place in range(4)]
            until(lambda: running(server) > 0)
            for version in (first + 1, first + 2):
                process.does("publish", version, folders[version])
                server.has(version)
            answers = [each.result() for each in asked]
        models = {str(version): make_model(version) for version in (first, first + 1, first + 2)}
        for place, answer in enumerate(answers):
            assert answer["finish_reasons"] == ["length"]
            assert str(answer["weight_version"]) == spans(answer)[-1][0]
            tokens = answer["token_ids"][0]
            sampled = [next(iter(entry[0].values())) for entry in answer["logprobs"][0]]
            for version, start, end in spans(answer):
                scored = logprobs_of(models[version], [*PROMPT, 6 + place], tokens)[start:end]
                assert sampled[start:end] == pytest.approx(scored, abs=1e-4), "each span under its own version, KV cache included"
        if all([version for version, _, _ in spans(answer)] == list(models) for answer in answers):
            return
    pytest.fail(f"no request spanned two updates: {spans(answers[0])}")


def test_prefix_cache_forgets_the_version_before(server, learner, tiny_folder, make_model, greedy):
    prompt = [2, *range(6, 26), *range(6, 26), *range(6, 26), 3]  # several whole blocks
    process = learner()
    for version in (26, 27):
        process.does("publish", version, tiny_folder(version))
        server.has(version)
        for _ in range(2):
            assert server.generate(prompt)["token_ids"][0] == greedy(make_model(version), prompt)


def test_learner_killed_while_it_publishes(server, learner, tiny_folder, make_model, greedy):
    process = learner()
    process.does("publish", 30, tiny_folder(30))
    server.has(30)
    stop, wrong = threading.Event(), []

    def keep_asking() -> None:
        while not stop.is_set():
            answer = server.generate()
            if (answer["weight_version"], answer["token_ids"][0]) != (30, expected):
                wrong.append(answer)

    expected = greedy(make_model(30))
    asking = threading.Thread(target=keep_asking)
    asking.start()
    assert process.does("half", 31, tiny_folder(31)) == "half"
    process.kill()
    time.sleep(1.5)
    stop.set()
    asking.join()
    assert not wrong, "the last complete version serves on"
    assert server.policy()["last_error"] is None

    assert learner().does("publish", 32, tiny_folder(32)) == "published 32"
    server.has(32)
    assert server.generate()["token_ids"][0] == greedy(make_model(32))


def test_weights_of_another_model_change_nothing(server, learner, tiny_folder, make_model, greedy, tmp_path):
    from safetensors.numpy import load_file, save_file

    process = learner()
    process.does("publish", 40, tiny_folder(40))
    server.has(40)
    process.kill()
    tensors = load_file(tiny_folder(41) / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].copy()
    save_file(tensors, tmp_path / "model.safetensors")
    other = learner()
    assert other.does("publish", 41, tmp_path) == "published 41"
    said = until(lambda: server.policy()["last_error"])
    assert "policy version 41 was not loaded" in said
    assert "model.norm.weight" in said
    assert server.policy()["version"] == 40
    answer = server.generate()
    assert answer["token_ids"][0] == greedy(make_model(40))
    assert spans(answer) == [("40", 0, 16)]
    other.kill()
    learner().does("publish", 42, tiny_folder(42))
    server.has(42)
    assert server.policy()["last_error"] is None


def test_environment_generates_meanwhile(server, learner, learner_python, bridge, tiny_folder, make_model, tmp_path):
    # A tokenizer that transformers 5 has saved is none for transformers 4, which the environment may have.
    subprocess.run([learner_python, str(ROOT / "examples/tiny_model.py"), str(tmp_path / "tiny")], check=True, capture_output=True)
    process = learner()
    process.does("publish", 50, tiny_folder(50))
    server.has(50)
    command = environment_command(learner_python, bridge, ROOT / "examples/larger_digit_env.py", server, tmp_path)
    models = {version: make_model(version) for version in (50, 51, 52)}
    seen: set[int] = set()
    with shmbridge.Consumer(bridge, run=shmbridge.Run(batch_size=16, max_token_len=512, num_steps=10**6)) as consumer:
        log = tmp_path / "env.log"
        with log.open("wb") as output:
            env = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": PYTHONPATH}, stdout=output, stderr=output)
        try:
            for version in (50, 51, 52):
                if version > 50:
                    process.does("publish", version, tiny_folder(version))
                deadline = time.monotonic() + PATIENCE_S
                while version not in seen and time.monotonic() < deadline:
                    assert env.poll() is None, log.read_text()[-3000:]
                    for record in consumer.poll():
                        with record:
                            seen |= {explained_by(models, record, row) for row in range(len(record))}
                            stamped_with_what_sampled_it(models, record)
                    time.sleep(0.05)
        finally:
            env.kill()
            env.wait()
    assert seen >= {50, 51, 52}, "rollouts of every version came into the bridge"


def stamped_with_what_sampled_it(models: dict[int, Any], record: Any) -> None:
    columns = (record[column] for column in ("tokens", "token_versions", "loss_mask", "inference_logprobs"))
    for tokens, versions, mask, told in zip(*columns, strict=True):
        first = int(mask.argmax())
        by = set(versions[first:].tolist())
        assert by <= models.keys(), by
        if len(by) == 1:
            scored = logprobs_of(models[by.pop()], tokens[:first].tolist(), tokens[first:].tolist())
            assert max(abs(mine - its) for mine, its in zip(scored, told[first:].tolist(), strict=True)) < 1e-3, (versions, scored, told)


def test_tokens_of_answers_that_span_an_update_have_the_version_that_sampled_them(
    server, learner, learner_python, bridge, tiny_folder, make_model, tmp_path
):
    """The first span's log-probabilities are those of its version's weights, to the last token; those after it are not."""
    subprocess.run([learner_python, str(ROOT / "examples/tiny_model.py"), str(tmp_path / "tiny")], check=True, capture_output=True)
    process, version = learner(), 60
    process.does("publish", version, tiny_folder(version))
    server.has(version)
    command = environment_command(learner_python, bridge, HERE / "long_answers_env.py", server, tmp_path)
    spanning: list[tuple[Any, ...]] = []
    with shmbridge.Consumer(bridge, run=shmbridge.Run(batch_size=16, max_token_len=512, num_steps=10**6)) as consumer:
        log = tmp_path / "env.log"
        with log.open("wb") as output:
            env = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": PYTHONPATH}, stdout=output, stderr=output)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not spanning:
                assert env.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                if running(server) > 0:
                    version += 1
                    process.does("publish", version, tiny_folder(version))
                    server.has(version)
                for record in consumer.poll():
                    with record:
                        spanning += spanning_rows(record)
        finally:
            env.kill()
            env.wait()
    for tokens, first, end, by, told in spanning:
        scored = logprobs_of(make_model(by), tokens[:first], tokens[first:])
        errors = [abs(mine - its) for mine, its in zip(scored, told, strict=True)]
        assert max(errors[: end - first]) < 1e-3
        assert max(errors[end - first : end - first + 5]) > 1e-2


def spanning_rows(record: Any) -> Iterator[tuple[Any, ...]]:
    """Rows of more than one version: tokens, where the answer and its second span begin, the first span's version, log-probabilities."""
    columns = (record[column] for column in ("tokens", "token_versions", "loss_mask", "inference_logprobs"))
    for tokens, versions, mask, told in zip(*columns, strict=True):
        first = int(mask.argmax())
        sampled = versions[first:].tolist()
        if sampled[0] < 60:
            continue  # of the version before, where its group began
        assert sampled == sorted(sampled)
        assert record.meta.min_policy_version <= sampled[0] <= sampled[-1] <= record.meta.max_policy_version
        if sampled[0] < sampled[-1]:
            yield tokens.tolist(), first, first + sampled.count(sampled[0]), sampled[0], told[first:].tolist()


def environment_command(python: str, bridge: str, script: Path, server: Server, folder: Path) -> list[str]:
    words = ["--env.group_size=4", "--env.total_steps=1000000", "--env.use_wandb=false", "--env.steps_per_eval=0"]
    words += [f"--env.tokenizer_name={folder}/tiny", f"--openai.tokenizer_name={folder}/tiny", "--openai.server_type=vllm"]
    words += [f"--openai.base_url={server.url}/v1", "--openai.model_name=policy", "--openai.api_key=x"]
    return [python, "-m", "shmbridge.producers.atropos", "--bridge", bridge, str(script), "serve", *words]


def explained_by(models: dict[int, Any], record: Any, row: int) -> int:
    """The version under which the sampler's log-probabilities of the last tokens are what they are; -1 if none."""
    tokens, mask, told = (record[column][row] for column in ("tokens", "loss_mask", "inference_logprobs"))
    first = int(mask.argmax())
    for version, model in models.items():
        scored = logprobs_of(model, tokens[:first].tolist(), tokens[first:].tolist())
        if abs(scored[-1] - told[-1]) < 1e-3:
            return version
    return -1


def test_thirty_versions_under_load_leave_nothing_behind(server, learner, bridge, tiny_folder, make_model):
    """`soak.py` does hundreds, and looks at memory, too: here the engine's cache is still being touched for the first time."""
    process, models = learner(), [make_model(seed) for seed in range(MODELS)]
    pids = {str(pid): pid for pid in descendants(server.process.pid)}
    seen = soak(
        server.url,
        lambda version: process.does("publish", version, tiny_folder(version % MODELS)),
        models,
        range(1000, 1030),
        lambda: measured(pids, bridge),
    )
    assert not seen["trouble"]
    assert seen["answers"] > 0
    assert not {name for name in seen["grown"] if not name.endswith("bytes") or name == "shared bytes"}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"prompt": "a", "temperature": -1}, "temperature must be non-negative"),
        ({"prompt": "a", "use_beam_search": True}, "unknown field `use_beam_search`"),
        ({"prompt": {"prompt_token_ids": []}}, "cannot be empty"),
        ({"prompt": {"prompt_token_ids": [99]}}, "out of vocabulary"),
        ({"prompt": {"prompt_token_ids": [5] * 600}}, "maximum context length"),
        ({"prompt": "a", "logprobs": 50}, "greater than max allowed"),
    ],
)
def test_what_the_engine_refuses_is_said(server, body, told):
    status, said, _ = server.ask("/generate", body)
    assert (status, said["error"]["code"]) == (400, 400)
    assert told in said["error"]["message"]


def test_client_that_hangs_up_frees_its_place(server):
    body = json.dumps({"prompt": {"prompt_token_ids": PROMPT}, "max_tokens": 500, "n": 64, "ignore_eos": True}).encode()
    for _ in range(5):  # now and then all of it is answered before the metrics say that it runs
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            seen = until(lambda: "runs" if running(server) > 0 else "answered" if readable(client) else "")
        if seen == "runs":
            break
    assert seen == "runs"
    until(lambda: running(server) == 0)


def readable(client: socket.socket) -> bool:
    return bool(select.select([client], [], [], 0)[0])


def running(server: Server) -> float:
    """Requests in the engine, by vLLM's own metrics."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60.0) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting{")))


def test_following_costs_nothing_while_nothing_comes(server):
    """The whole API server's CPU; the engine's own processes follow nothing."""
    began, cpu = time.monotonic(), cpu_s(server.process.pid)
    time.sleep(5.0)
    assert (cpu_s(server.process.pid) - cpu) / (time.monotonic() - began) < 0.02


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
