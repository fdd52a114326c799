"""A guard that sees speed go: `put`, `get`, views and `release` take no more instructions, calls and passes
over the bytes than instructions.json says. All of it is counted, and does not depend on what else runs.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import instructions
from tests.bench.instructions import FIGURES, ROOT, Figures, count, missing, versions

TOLERATED = 1.03
SLOWER = 0.1
RENEW = "python tests/bench/instructions.py --write"
pytestmark = pytest.mark.timeout(900)


def git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def most(name: str, allowed: float) -> float:
    """What a figure may be: of calls, now and then one more, as where a list grows; of the bytes read, some
    that libc reads twice, as the addresses of a process are. One more pass over them would be 1.
    """
    return allowed * TOLERATED + {"libc": 0.1, "python": 0.1, "read": 0.15}.get(name, 0.0)


def worse(found: Figures, allowed: Figures) -> list[str]:
    """Each figure that is higher than it may be, with both numbers."""
    return [
        f"{what}: {name} {value:,.2f}, allowed {allowed[what][name]:,.2f} and 3 % more"
        for what, counted in found.items()
        for name, value in counted.items()
        if value > most(name, allowed[what][name])
    ]


def better(found: Figures, allowed: Figures) -> list[str]:
    """Each figure by which a lower one could be held from now on."""
    return [
        f"{what}: {name} {value:,.2f} of {allowed[what][name]:,.2f}"
        for what, counted in found.items()
        for name, value in counted.items()
        if most(name, value) < allowed[what][name]
    ]


@pytest.fixture(scope="module")
def found() -> Figures:
    if (what := missing()) is not None:
        pytest.skip(f"the guard of the speed cannot count: {what}")
    return count()


@pytest.fixture(scope="module")
def allowed(tmp_path_factory: pytest.TempPathFactory) -> Figures:
    """What is committed; with other versions of Python, compiler, libc or valgrind than it was counted with,
    the counts of the commit that it was made for, which is built here.
    """
    committed = json.loads(FIGURES.read_text())
    if committed["versions"] == versions():
        figures: Figures = committed["figures"]
        return figures
    base = git("log", "-1", "--format=%H", "--", str(FIGURES))
    if not base or git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip(
            f"the figures were counted with {committed['versions']}, here are {versions()}, and this clone "
            f"lacks the commit that made them -> git fetch --unshallow, or {RENEW} on a good tree"
        )
    return counted_at(base, tmp_path_factory.mktemp("base") / "tree")


def counted_at(commit: str, tree: Path) -> Figures:
    """The figures of another commit, which is built for that."""
    assert (
        subprocess.run(
            ["git", "-C", str(ROOT), "worktree", "add", "--detach", str(tree), commit], check=False
        ).returncode
        == 0
    ), f"no tree of {commit}"
    try:
        build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        subprocess.run(build, cwd=tree, check=True)
        return count(tree)
    finally:
        git("worktree", "remove", "--force", str(tree))


def test_no_call_takes_more_work_than_it_did(found, allowed) -> None:
    for line in better(found, allowed):
        print(f"less than is held, {line} -> {RENEW}")
    assert worse(found, allowed) == []


def test_a_tenth_more_work_is_seen_in_each_call(found) -> None:
    planted = count(slower=SLOWER)
    for what, counted in planted.items():
        red = worse({what: counted}, found)
        name = "written" if "written" in counted else "instructions"
        assert any(f"{what}: {name} " in line for line in red), (what, counted, found[what])


def test_what_cannot_be_counted_is_said(monkeypatch) -> None:
    monkeypatch.setattr(
        instructions.shutil, "which", lambda name: None if name == "valgrind" else "/usr/bin/cc"
    )
    assert "apt-get install valgrind" in str(missing())
    with pytest.raises(instructions.CannotCount, match="valgrind"):
        count()
