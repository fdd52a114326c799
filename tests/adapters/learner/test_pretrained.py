"""A model that cannot be had is one line, soon, with one thing to do; nothing is asked twice."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from transformers import AutoModelForCausalLM

from shmbridge.consumers import pretrained
from shmbridge.errors import BadArgument


@pytest.fixture
def model(tiny_model, tmp_path, monkeypatch):
    """The folder of a model, `tiny`, in the present folder."""
    monkeypatch.chdir(tmp_path)
    tiny_model(1).save_pretrained("tiny")
    return tmp_path / "tiny"


def said(source) -> str:
    with pytest.raises(BadArgument) as refused:
        pretrained.load(AutoModelForCausalLM, source)
    text = str(refused.value)
    assert "\n" not in text
    assert text.count(" -> ") == 1
    return text


def test_a_folder_that_is_not_there_is_named_with_the_one_that_was_meant(model):
    assert said("./tinny") == "[SB106] there is no folder './tinny' with a model -> did you mean tiny?"
    assert said("/nowhere/at/all").startswith("[SB106] there is no folder '/nowhere/at/all' with a model -> ")
    assert said("").startswith("[SB106] there is no folder ''")


def test_a_file_is_named_with_its_folder(model):
    file = model / "model.safetensors"
    assert said(file) == f"[SB106] model {file} is a file -> give the folder that it is in: {model}"


def test_a_run_directory_is_named_with_its_newest_checkpoint(model):
    run = model.parent / "run"
    for step in (1, 2):
        (run / "checkpoints" / f"step-{step}").mkdir(parents=True)
        (run / "checkpoints" / f"step-{step}" / "config.json").write_text("{}")
    newest = run / "checkpoints" / "step-2"
    assert said(run) == f"[SB106] folder {run} has no config.json -> did you mean {newest}?"


def test_a_damaged_model_is_named(model):
    os.truncate(model / "model.safetensors", 40)
    assert said(model).startswith(f"[SB106] cannot load a model from {model}: ")
    (model / "model.safetensors").unlink()
    assert "model.safetensors" in said(model)
    (model / "config.json").write_text("{")
    assert "config" in said(model)


def start(program: str, *words: str, **surroundings: str) -> tuple[subprocess.CompletedProcess[str], float]:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", f"shmbridge.consumers.{program}", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | surroundings,
    )
    return done, time.monotonic() - began


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("policy_server", ["--port", "0"]),
        ("grpo", ["--bridge", "no-hub", "--steps", "1", "--device", "cpu", "--run-dir", "run"]),
    ],
)
def test_a_hub_that_does_not_answer_is_asked_once(program, words, tmp_path):
    words = [str(tmp_path / "run") if each == "run" else each for each in words]
    done, took_s = start(
        program,
        *words,
        "--model",
        "nowhere/at-all",
        HF_ENDPOINT="http://127.0.0.1:9",  # no server listens there
        HF_HOME=str(tmp_path),
        HF_HUB_OFFLINE="0",
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "model nowhere/at-all is no folder here, is not in the cache of Hugging Face, and " in line
    assert line.endswith("http://127.0.0.1:9 does not answer -> give the folder of a model, such as "
                         "save_pretrained writes")  # fmt: skip
    assert took_s < 30, "six tries with pauses take 31 s more"


class NoSuchModel(BaseHTTPRequestHandler):
    """A hub that has no models."""

    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.asked.append(self.path)
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *_: object) -> None:
        """Is silent."""


def test_a_name_that_the_hub_does_not_know(tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), NoSuchModel) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{hub.server_port}"
        done, _ = start(
            "policy_server", "--model", "nowhere/at-all", "--port", "0",
            HF_ENDPOINT=endpoint, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="0",
        )  # fmt: skip
        hub.shutdown()
    assert done.returncode == 1
    assert f" -> look at {endpoint}/nowhere/at-all: a private model needs `hf auth login`" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert NoSuchModel.asked
