"""Says beforehand whether an environment can be attached, stepped by gem, and evaluated: `checked`.

The script is imported in a process of its own, and its methods are read: nothing of it is set up, and no
server is asked. So it says what stands in the way in the code, not what a data set lacks.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_ALARMS = frozenset({"alarm", "setitimer", "signal", "set_wakeup_fd", "add_signal_handler"})
# Packages that set alarms themselves when they are called.
_ALARMING = frozenset({"math_verify"})
_DEPTH = 4  # from a script to what its helpers import

_parsing = threading.Lock()  # Python 3.11 raises SystemError where two threads make trees at once

TIMEOUT_S = 300.0
_ASKS = frozenset({"chat_completion", "completion", "tokens_and_logprobs_completion"})
_SHOWS_IMAGES = re.compile(r"'images'(?!\] = (\[None\]|None))")  # Atropos' field, not left empty
_CLIENTS = frozenset({"OpenAI", "AsyncOpenAI", "Anthropic", "AsyncAnthropic"})


@functools.lru_cache(256)
def wants_main_thread(script: Path) -> str:
    """Returns why an environment has to run in a main thread; "" where nothing says so. Reads files, once.

    Signals and alarms work there alone: `math_verify` sets an alarm for each answer. The script is looked at,
    and those modules beside it, and of atroposlib, that it imports.
    """
    for path, tree in _reached(script, set(), _DEPTH):
        for node in ast.walk(tree):
            for name in _imported(node):
                if name.partition(".")[0] in _ALARMING:
                    return f"{path.name} imports {name.partition('.')[0]}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                of = node.func.value
                is_signal = isinstance(of, ast.Name) and of.id == "signal"
                if node.func.attr in _ALARMS and (is_signal or node.func.attr == "add_signal_handler"):
                    return f"{path.name} calls {node.func.attr} in line {node.lineno}"
    return ""


def _reached(script: Path, seen: set[Path], depth: int) -> Iterator[tuple[Path, ast.Module]]:
    script = script.resolve()
    if script in seen or depth < 0:
        return
    seen.add(script)
    try:
        with _parsing:
            tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    yield script, tree
    for node in ast.walk(tree):
        for name in _imported(node, relative=True):
            helper = _file_of(name, script)
            if helper is not None:
                yield from _reached(helper, seen, depth - 1)


def _imported(node: ast.AST, relative: bool = False) -> list[str]:
    """Names of modules, and of what is imported from them, which may be modules."""
    if isinstance(node, ast.Import):
        return [each.name for each in node.names]
    if isinstance(node, ast.ImportFrom):
        place = "." * node.level * relative + (node.module or "")
        if node.level and not relative:
            return []
        return [place, *(f"{place}.{each.name}" if node.module else place + each.name for each in node.names)]
    return []


def _file_of(name: str, script: Path) -> Path | None:
    """The file of a module beside the script, above it up to the folder of its imports, or of atroposlib."""
    level = len(name) - len(name.lstrip("."))
    parts = name.lstrip(".").split(".")
    folders = [script.parents[level - 1]] if level else [script.parent]
    if not level and (parts[0] == "atroposlib" or parts[0] in script.parts):
        folders += [Path(each) for each in sys.path if each] + list(script.parents)
    for folder in folders:
        for path in (folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__init__.py")):
            if path.is_file():
                return path
    return None


@dataclass(frozen=True)
class Verdict:
    """Whether one thing can be done.

    Attributes:
        can: whether it can.
        why: why not, or under which conditions.
    """

    can: bool
    why: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return ("yes" if self.can else "no") + (f": {'; '.join(self.why)}" if self.why else "")


@dataclass(frozen=True)
class Checked:
    """What a script's environment can.

    Attributes:
        script: its path.
        environment: the class; "" where there is none.
        attached: its groups can go into a lane, with `shmbridge env`.
        stepped: it can be played turn by turn, with `AtroposGemEnv`.
        evaluated: its `evaluate` asks the model.
    """

    script: str
    environment: str
    attached: Verdict
    stepped: Verdict
    evaluated: Verdict

    def __str__(self) -> str:
        name = f"{self.script}, {self.environment}" if self.environment else self.script
        parts = ("attached", "stepped", "evaluated")
        return "\n".join([name, *(f"  {part + ':':11}{getattr(self, part)}" for part in parts)])


def checked(script: Path, timeout_s: float = TIMEOUT_S) -> Checked:
    """Returns what a script's environment can. Blocks while a process imports it; any thread."""
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+", errors="replace") as printed:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(script), str(said.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=printed,  # no pipe: what the script leaves behind would hold it open
            stderr=printed,
            pass_fds=[said.fileno()],
            start_new_session=True,
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return _none(script, f"importing it took more than {timeout_s:g} s")
        finally:
            with suppress(ProcessLookupError):  # nothing is left behind
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        printed.seek(0)
        answer, last = said.read(), printed.read().strip().splitlines()[-1:]
    if not answer:
        return _none(
            script, f"importing it ended the process, exit status {process.returncode}: {''.join(last)}"
        )
    given = json.loads(answer)
    attached, stepped, evaluated = (Verdict(**given[each]) for each in ("attached", "stepped", "evaluated"))
    return Checked(given["script"], given["environment"], attached, stepped, evaluated)


def _none(script: Path, why: str, environment: str = "") -> Checked:
    no = Verdict(False, [why])
    return Checked(str(script), environment, no, no, no)


def look_at(script: Path) -> Checked:
    """Returns what a script's environment can: `checked` does this in a process that is for it alone.

    Imports the script in this process, under the name of its file, and its folder takes the first place of
    `sys.path`; a script may begin threads, or end the process. Blocks meanwhile; main thread.
    """
    try:
        ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError) as wrong:
        return _none(script, f"it cannot be read: {wrong}")
    sys.path[0] = str(script.resolve().parent)
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[script.stem] = module
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as missing:
        return _none(script, f"it needs {missing.name}, which is not installed")
    except BaseException as error:  # a script may exit
        return _none(script, f"importing it raises {type(error).__name__}: {str(error)[:200]}")
    kind = _environment(module)
    if kind is None:
        return _none(script, "it has no subclass of BaseEnv that collects trajectories")
    try:
        kind.config_init()
    except BaseException as error:
        return _none(script, f"config_init raises {type(error).__name__}: {str(error)[:200]}", kind.__name__)
    lacking = _lacking(kind)
    methods = Methods(kind)
    attached = lacking + (
        [] if _begins(script) else [f"it begins nothing: end it with {kind.__name__}.cli()"]
    )
    asks = methods.requests("collect_trajectories", "collect_trajectory")
    silent = [] if asks else ["its trajectories ask the model for nothing"]
    if not asks and not _collects(methods):
        attached.append("it collects no trajectories; its evaluate is run with: python SCRIPT evaluate")
    return Checked(
        str(script),
        kind.__name__,
        Verdict(not attached, attached or silent),
        _stepped(kind, methods, script, lacking),
        _evaluated(methods, lacking),
    )


def _environment(module: Any) -> type[Any] | None:
    """The environment that a script begins: the last class of its own that can collect."""
    if "atroposlib.envs.base" not in sys.modules:
        return None  # nothing of the script has a base class of Atropos, whose import takes seconds
    from atroposlib.envs.base import BaseEnv

    own = [
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, BaseEnv) and each is not BaseEnv
    ]
    collects = [
        each for each in own if _has(each, "collect_trajectories") or _has(each, "collect_trajectory")
    ]
    here = [each for each in collects if each.__module__ == module.__name__]
    return (here or collects)[-1] if collects else None


def _has(kind: type[Any], name: str) -> bool:
    """Whether an environment has a method of its own."""
    from atroposlib.envs.base import BaseEnv

    return getattr(kind, name, None) is not getattr(BaseEnv, name, None)


def _lacking(kind: type[Any]) -> list[str]:
    abstract = kind.__abstractmethods__ - {"collect_trajectory", "collect_trajectories"}
    missing = abstract | {name for name in ("setup", "get_next_item") if not _has(kind, name)}
    return [f"{kind.__name__} has no {name}" for name in sorted(missing)]


def _begins(script: Path) -> bool:
    """Whether a script calls anything that may begin its environment when it is run."""
    for node in ast.walk(ast.parse(script.read_bytes())):
        if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
            return any(isinstance(each, ast.Call) for each in ast.walk(node))
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cli"
        for node in ast.walk(ast.parse(script.read_bytes()))
    )


class Methods:
    """The methods of an environment as they are written, with those that they call.

    Args:
        kind: its class.
    """

    def __init__(self, kind: type[Any]) -> None:
        self.kind = kind
        self._read: dict[str, ast.AST | None] = {}

    def tree(self, name: str) -> ast.AST | None:
        """Returns a method of the environment's own; None: it has none, or Atropos' own."""
        if name not in self._read:
            self._read[name] = self._parsed(name)
        return self._read[name]

    def _parsed(self, name: str) -> ast.AST | None:
        method = inspect.getattr_static(self.kind, name, None)
        method = getattr(method, "__func__", method)
        if not inspect.isfunction(method) or method.__module__.startswith("atroposlib."):
            return None
        try:
            return ast.parse(textwrap.dedent(inspect.getsource(method)))
        except (OSError, SyntaxError, TypeError):
            return None

    def reached(self, *names: str) -> dict[str, ast.AST]:
        """Returns these methods, and the environment's own that they call."""
        found: dict[str, ast.AST] = {}
        rest = list(names)
        while rest:
            name = rest.pop()
            tree = self.tree(name)
            if tree is None or name in found:
                continue
            found[name] = tree
            rest += [
                node.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            ]
        return found

    def requests(self, *names: str) -> list[tuple[str, ast.Call]]:
        """Returns each request for a completion in these methods and those they call, with its method."""
        return [
            (name, node)
            for name, tree in self.reached(*names).items()
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in _ASKS
            and not ast.unparse(node.func.value).endswith(("chat", "completions"))
        ]


def _collects(methods: Methods) -> bool:
    """Whether what collects trajectories makes any, by the words of it."""
    reached = methods.reached("collect_trajectories", "collect_trajectory", "score").values()
    return any("tokens" in ast.unparse(tree) for tree in reached)


def _stepped(kind: type[Any], methods: Methods, script: Path, lacking: list[str]) -> Verdict:
    against, under = list(lacking), []
    names = ("collect_trajectories", "collect_trajectory")
    reached = methods.reached(*names)
    requests = methods.requests(*names)
    judges = [each for each in requests if each[0] == "score" or "judge" in each[0].lower()]
    turns = [each for each in requests if each not in judges]
    text = "\n".join(ast.unparse(tree) for tree in reached.values())
    if not turns:
        clients = _called(reached.values(), _CLIENTS)
        how = "with a client of its own" if clients or ".completions.create" in text else "for no completion"
        against.append(f"it asks {how} where it collects a trajectory")
    if "get_logprobs(" in text:
        against.append("it asks for the log-probabilities of a prompt, which an action has not")
    if "image_url" in text or _SHOWS_IMAGES.search(text):
        against.append("it shows images, and an observation is text")
    for name, call in turns:
        many = _many(call)
        if many:
            when = "" if name in names else f"if it comes to {name}: "
            under.append(f"{when}it asks for n={many} completions of one prompt: replay=True")
    if any(word in text for word in ("run_in_executor(", "ThreadPoolExecutor(", "to_thread(")) and turns:
        under.append("if what it runs in threads asks for completions: replay=True")
    if judges:
        where = ", ".join(sorted({name for name, _ in judges}))
        under.append(f"it asks a judge in {where}: judge={{...}}")
    if (why := wants_main_thread(script)) != "":
        under.append(f"in a process of its own: {why}")
    if _drops(reached.values()) and "ScoredDataGroup" not in text:
        under.append("it may drop a group that has no ScoredDataGroup, whose score is then not known")
    if _several_groups(reached.values()):
        under.append("if it gives more than one row for an episode: reward_of=function")
    return Verdict(not against, list(dict.fromkeys(against or under)))


def _evaluated(methods: Methods, lacking: list[str]) -> Verdict:
    if lacking:
        return Verdict(False, lacking)
    if methods.tree("evaluate") is None:
        return Verdict(False, ["it has no evaluate"])
    reached = methods.reached("evaluate")
    if not methods.requests("evaluate"):
        text = "\n".join(ast.unparse(tree) for tree in reached.values())
        if "completions.create(" in text or _called(reached.values(), _CLIENTS):
            return Verdict(True, ["with a client of its own"])
        return Verdict(False, ["its evaluate asks the model for nothing"])
    return Verdict(True)


def _many(call: ast.Call) -> str:
    """How many completions a request asks for, where that is neither one nor the group's size."""
    for each in call.keywords:
        if each.arg == "n":
            said = ast.unparse(each.value)
            return "" if "group_size" in said or said == "1" or isinstance(each.value, ast.Name) else said
    return ""


def _called(trees: Any, names: frozenset[str]) -> bool:
    return any(
        isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in names
        for tree in trees
        for node in ast.walk(tree)
    )


def _drops(trees: Any) -> bool:
    """Whether a method returns None, or (None, something)."""
    return any(
        isinstance(node, ast.Return)
        and node.value is not None
        and ast.unparse(node.value).lstrip("(").startswith("None")
        for node in _nodes(trees)
    )


def _several_groups(trees: Any) -> bool:
    """Whether a method makes a list of ScoredDataGroups."""
    return any(
        isinstance(node, ast.AnnAssign) and "List[" in ast.unparse(node.annotation)
        and "ScoredDataGroup" in ast.unparse(node.annotation)
        for node in _nodes(trees)
    )  # fmt: skip


def _nodes(trees: Any) -> Iterator[ast.AST]:
    for tree in trees:
        yield from ast.walk(tree)


def _main(script: str, descriptor: str) -> None:
    """What the process of a check does: the answer goes where the script's own prints do not."""
    answer = json.dumps(asdict(look_at(Path(script))))
    os.write(int(descriptor), answer.encode())
    os._exit(0)  # whatever threads the script has begun


if __name__ == "__main__":
    _main(*sys.argv[1:])
