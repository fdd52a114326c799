"""What pages tell users to type exists: commands, their flags, keys of launch and learner files."""

import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from shmbridge.cli.base import Parser
from shmbridge.cli.commands import COMMANDS, parser_of
from shmbridge.config import read_yaml
from shmbridge.launch import config as launch_config
from shmbridge.launch.plan import plan_of

ROOT = Path(__file__).parents[3]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for page in (ROOT / "docs").rglob("*.md") if "adr" not in page.parts and page.name != "cli.md"),
    *(ROOT / "examples").rglob("*.md"),
]
PROGRAMS = {
    "shmbridge.consumers.grpo": "train",
    "shmbridge.consumers.policy_server": "serve",
    "shmbridge.producers.atropos": "env",
}
ENV_OWN = re.compile(r"--(env|openai|slurm)\b")  # flags of the environment's script


def shell_lines(text: str) -> Iterator[str]:
    """Yields code in sentences, and the lines of blocks that are no program text, continued ones joined."""
    text = re.sub(r"^```(python|yaml|json|js)[^\n]*\n.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from re.findall(r"`([^`\n]+)`", text)
    yield from re.sub(r" *\\\n *", " ", text).splitlines()


def called(line: str) -> tuple[str, list[str]] | None:
    """Returns the command of a line and its words, or nothing."""
    found = re.match(r"(?:\$ |[\w.]+/bin/)?(?:python -m )?(shmbridge[\w.]*)(?: +(.*))?$", line.strip())
    if not found or not found[2]:
        return None
    rest = re.split(r" [|&;>#] ?| {2,}", found[2])[0]
    try:
        words = shlex.split(rest)
    except ValueError:
        return None
    if found[1] in PROGRAMS:
        return PROGRAMS[found[1]], words
    return (words[0], words[1:]) if found[1] == "shmbridge" and words else None


CALLS = [
    pytest.param(*call, id=f"{page.relative_to(ROOT)}-{number}-{call[0]}")
    for page in PAGES
    for number, line in enumerate(shell_lines(page.read_text()))
    if (call := called(line)) and re.fullmatch(r"[a-z]+", call[0])
]


def flags_of(parser: Parser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


def test_pages_call_most_commands() -> None:
    named = {each.values[0] for each in CALLS}
    assert len(CALLS) > 100
    assert set(COMMANDS) - named <= {"completion"}


@pytest.mark.parametrize(("command", "words"), CALLS)
def test_the_command_has_these_flags(command: str, words: list[str]) -> None:
    assert command in COMMANDS
    known = flags_of(parser_of(command))
    typed = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
    assert {each for each in typed - known if not (command == "env" and ENV_OWN.match(each))} == set()


LINES = [(page, line) for page in PAGES for line in shell_lines(page.read_text())]


def test_what_make_is_asked_for_is_a_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    trainers = re.findall(r"^TRAINERS := (.*)$", makefile, re.MULTILINE)[0].split()
    targets |= {f"test-{each}" for each in trainers}
    asked = {
        (str(page.relative_to(ROOT)), word)
        for page in PAGES
        for word in re.findall(
            r"(?:`|^```\n|^    )(?:[A-Z]+=\S+ )*make ([a-z][a-z-]*)", page.read_text(), re.MULTILINE
        )
    }
    assert {each for each in asked if each[1] not in targets} == set()
    assert len({word for _, word in asked}) > 15


def test_programs_and_examples_are_there() -> None:
    missing = set()
    for page, line in LINES:
        modules = re.findall(r"-m (shmbridge[\w.]*\w)", line)
        missing |= {(page.name, each) for each in modules if find_spec(each) is None}
        files = re.findall(r"\bpython3? ((?:examples|docs|bench|tests)/[\w./-]+)", line)
        missing |= {(page.name, each) for each in files if not (ROOT / each).exists()}
    assert missing == set()


def yaml_blocks(page: str) -> list[dict[str, object]]:
    blocks = re.findall(r"^```yaml\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return [read_yaml(block) for block in blocks]


def test_the_launch_files_of_the_page_are_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, vllm, trainer = yaml_blocks("docs/how-to/launch.md")
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".venvs/vllm/bin").mkdir(parents=True)
    for named in ("gsm8k_server.py", ".venvs/vllm/bin/python"):
        (tmp_path / named).touch()
    assert launch_config.parse(whole).bridge == "run1"
    del whole["policy_server"]
    assert launch_config.parse(whole | vllm).vllm is not None
    del whole["learner"]
    (tmp_path / ".venvs/trl/bin").mkdir(parents=True)
    (tmp_path / ".venvs/trl/bin/python").touch()
    assert launch_config.parse(whole | vllm | trainer).trainer.command is not None


@pytest.mark.parametrize("page", ["verl", "trl", "skyrl", "roll"])
def test_the_launch_file_of_a_trainers_page_is_one(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (given,) = [each for each in yaml_blocks(f"docs/how-to/{page}.md") if "bridge" in each]
    monkeypatch.chdir(tmp_path)
    for named in ("gsm8k_server.py", ".venvs/vllm/bin/python", f".venvs/{page}/bin/python"):
        (tmp_path / named).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / named).touch()
    plan = plan_of(launch_config.parse(given), Parser("shmbridge gateway", description=""))
    assert [service.name for service in plan.services][:2] == ["vllm", "trainer"]
    words = plan.services[1].command
    assert str(tmp_path / f".venvs/{page}/bin/python") == words[0]
    assert any("run1" in each for each in words)
    files = [each for each in words[1:] if each.startswith("examples/")]
    assert all((ROOT / each).is_file() for each in files)


def test_the_learners_file_of_the_page_is_one(tmp_path: Path) -> None:
    from shmbridge.consumers.learner.config import flags

    text = re.findall(
        r"^```yaml\n(.*?)^```", (ROOT / "docs/how-to/train.md").read_text(), re.DOTALL | re.MULTILINE
    )[0]
    (tmp_path / "run.yaml").write_text(text)
    assert flags.parse(["--config", str(tmp_path / "run.yaml")]).run.steps == 500
