"""Upstream's bugs: attaching works around them, or an error says what to do."""

from __future__ import annotations

import logging
import sys
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("atroposlib")

from atroposlib.envs import base
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from shmbridge.producers import atropos
from shmbridge.producers.atropos import __main__ as command_line
from shmbridge.producers.atropos import upstream

CHAT = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]


class BatchEncoding(UserDict):
    """The result as transformers 5 returns it: its length is the number of its keys."""


@pytest.fixture
def like_five(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply_chat_template(
        self: Any, chat: list[Any], *, return_dict: bool = True, tokenize: bool = True, **_: Any
    ) -> Any:
        ids = list(range(3 * len(chat)))
        return (
            BatchEncoding(input_ids=ids, attention_mask=[1] * len(ids))
            if tokenize and return_dict
            else ids
            if tokenize
            else "text"
        )

    monkeypatch.setattr(PreTrainedTokenizerBase, "apply_chat_template", apply_chat_template)
    if "apply_chat_template" in vars(PreTrainedTokenizerFast):
        monkeypatch.delattr(PreTrainedTokenizerFast, "apply_chat_template")


@pytest.mark.parametrize("how", ["class", "instance"])
@pytest.mark.usefixtures("like_five")
def test_chat_templates_of_transformers_5_are_tokens_for_attached_environments(
    make_env: Callable[..., Any], bridge: str, how: str
) -> None:
    alone = make_env()
    if how == "class":
        atropos.attach(bridge=bridge)
    env = make_env()
    if how == "instance":
        atropos.attach(env, bridge=bridge)
    row = tokenize_for_trainer(env.tokenizer, CHAT, train_on_all_assistant_turns=True)
    assert row == {"tokens": [0, 1, 2, 3, 4, 5], "masks": [-100, -100, -100, 3, 4, 5]}
    assert isinstance(env.tokenizer.apply_chat_template(CHAT, return_dict=True), BatchEncoding)
    assert env.tokenizer.apply_chat_template(CHAT, return_dict=False) == [0, 1, 2, 3, 4, 5]
    assert env.tokenizer.apply_chat_template(CHAT, tokenize=False) == "text"
    assert isinstance(alone.tokenizer.apply_chat_template(CHAT), BatchEncoding)


@pytest.mark.usefixtures("like_five")
def test_chat_templates_of_a_scripts_own_tokenizers_are_tokens_on_the_command_line(
    bridge: str,
    tokenizer: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from transformers import AutoTokenizer\n"
        f"print(AutoTokenizer.from_pretrained({tokenizer!r}).apply_chat_template([{{'role': 'user', "
        f"'content': 'w1'}}]))\n"
    )
    assert run(monkeypatch, bridge, script) == 2, "it begins no environment"
    assert "[0, 1, 2]" in capsys.readouterr().out
    assert isinstance(
        PreTrainedTokenizerFast.from_pretrained(tokenizer).apply_chat_template(CHAT), BatchEncoding
    )


def run(monkeypatch: pytest.MonkeyPatch, bridge: str, script: Path) -> int:
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return command_line.main(["--bridge", bridge, str(script), "serve"])


# --- a lone server config ---------------------------------------------------------------------------------


@pytest.fixture
def lone() -> base.APIServerConfig:
    return base.APIServerConfig(
        model_name="m", base_url="http://127.0.0.1:9/v1", api_key="x", health_check=False
    )


def urls(env: Any) -> list[str]:
    return [server.config.base_url for server in env.server.servers]


def test_a_lone_server_config_is_the_server_that_is_asked(
    make_env: Callable[..., Any],
    script: Any,
    bridge: str,
    tokenizer: str,
    lone: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = script.SeededConfig(
        **script.SeededEnv.config_init()[0].model_dump() | {"tokenizer_name": tokenizer}
    )
    assert len(urls(script.SeededEnv(config, lone))) == 4  # upstream: localhost, 9004 to 9007
    atropos.attach(script.SeededEnv, bridge=bridge)
    with caplog.at_level(logging.WARNING, "shmbridge"):
        for env in (script.SeededEnv(config, lone), script.SeededEnv(config=config, server_configs=lone)):
            assert urls(env) == [lone.base_url]
    assert f"{lone.base_url} is used" in caplog.text
    assert urls(script.SeededEnv(config, [lone, lone])) == [lone.base_url] * 2
    # it names no server: upstream's choice
    assert len(urls(script.SeededEnv(config, base.ServerBaseline()))) == 4
    atropos.detach()
    assert len(urls(script.SeededEnv(config, lone))) == 4


def test_a_lone_server_config_on_a_cluster_is_left_to_upstream(
    monkeypatch: pytest.MonkeyPatch, lone: Any
) -> None:
    def begin(env: Any, config: Any, server_configs: Any, slurm: bool = False, testing: bool = False) -> None:
        pass

    def servers(**more: Any) -> Any:
        return upstream.with_its_own_url(begin, (None, None, lone), more).arguments["server_configs"]

    assert servers() == [lone]
    assert servers(slurm=True) is servers(testing=True) is lone
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    assert servers() is lone


# --- scripts that end before they begin -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "hint"),
    [
        (
            "class Env:\n    def __init__(self): pass\nEnv(teacher_server_configs=None)",
            "has to take teacher_server_configs",
        ),
        ("from atroposlib.envs.base import OpenaiConfig", "is called APIServerConfig"),
        (
            "import atroposlib.utils.tokenize_for_trainer as t\nt.tokenize_for_trainer_dpo",
            "has no tokenize_for_trainer_dpo any more",
        ),
        (
            "raise RuntimeError('Environment version v3 for `Taxi-v3` is deprecated')",
            "pip install 'gymnasium<1.3'",
        ),
        ("import no_such_package_as_this", "needs the package 'no_such_package_as_this'"),
    ],
)
def test_a_broken_script_ends_with_upstreams_error_and_one_hint(
    bridge: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    hint: str,
) -> None:
    path = tmp_path / "env.py"
    path.write_text(script)
    assert run(monkeypatch, bridge, path) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("Traceback")
    assert said[-1].startswith("shmbridge.producers.atropos: error: ")
    assert " -> " in said[-1]
    assert hint in said[-1]


def test_other_errors_are_the_scripts_own(
    bridge: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "env.py"
    path.write_text("raise ZeroDivisionError('mine')")
    with pytest.raises(ZeroDivisionError, match="mine"):
        run(monkeypatch, bridge, path)


def test_hints_are_given_for_what_is_known() -> None:
    assert "transformers<5" in upstream.hint_for(
        TypeError("Object of type BatchEncoding is not JSON serializable")
    )
    assert upstream.hint_for(ValueError("x")) == ""
