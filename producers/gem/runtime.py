"""One Atropos environment that is set up, in an event loop of its own: `Runtime`, shared by equal ones."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from shmbridge.errors import BadArgument
from shmbridge.producers.atropos.upstream import PlainTokens
from shmbridge.producers.gem.scores import collects_alone, watch
from shmbridge.producers.gem.turns import (
    EnvFailed,
    NotSuspendable,
    ReplayedEpisode,
    SuspendedEpisode,
    SuspendedGroup,
)

T = TypeVar("T")

_LAST_S = 5.0  # for tasks that do not end when they are cancelled

_loading = threading.Lock()
_SEEDS = 4096  # items that are remembered by seed
_ANSWERS_S = 5.0  # an event loop that nothing blocks
BLOCKS = "an endless loop, or a wait without await; reset() begins in a fresh one"
_shared: weakref.WeakValueDictionary[tuple[Any, str], Runtime] = weakref.WeakValueDictionary()
_sharing = threading.Lock()


class EventLoopThread:
    """Runs an event loop until it is stopped. Any thread may make and use it; it installs no signal handlers.

    The thread is a daemon: what an environment never finishes does not keep the interpreter. Where a process
    is an environment's own, it is the main thread's loop instead.
    """

    def __init__(self, name: str) -> None:
        if MAIN.loop is not None:
            self.loop, self.thread = MAIN.loop, MAIN.thread
            return
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=_run, args=(self.loop,), name=name, daemon=True)
        self.thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Returns the future of a coroutine that runs in the loop. Never blocks."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)


class MainThread:
    """The main thread's event loop, where a process is one environment's own; for all its environments."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread = threading.main_thread()

    def take(self) -> None:
        """Has all environments of this process run in the main thread, from now on."""
        self.loop = asyncio.new_event_loop()

    def run(self) -> None:
        """Runs the loop without end. Main thread only."""
        assert self.loop is not None
        _run(self.loop)


MAIN = MainThread()


def is_main(thread: threading.Thread) -> bool:
    """Returns whether a loop's thread is the main thread, which goes on when an environment ends."""
    return MAIN.loop is not None and thread is MAIN.thread


def stop(loop: asyncio.AbstractEventLoop) -> None:
    """Tells a loop to cancel its tasks and to end, but the main thread's. Never blocks; any thread, again."""
    if loop is MAIN.loop:
        return
    with suppress(RuntimeError):  # it is closed
        loop.call_soon_threadsafe(loop.stop)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    stopped = False
    try:
        while not stopped:
            # A task that raises SystemExit or KeyboardInterrupt breaks out of the loop: go on for the others.
            with suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()
                stopped = True
    finally:
        with suppress(SystemExit, KeyboardInterrupt):
            loop.run_until_complete(_cancel_all())
        loop.close()


async def _cancel_all() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    if rest:
        await asyncio.wait(rest, timeout=_LAST_S)


def environment_class(environment: Any) -> type[Any]:
    """Returns the class of an Atropos environment. Blocks while its module is imported; any thread.

    Args:
        environment: the class itself, "package.module:Class", or "path/to/file.py:Class". A file's folder is
            added to the end of `sys.path`, for what lies beside it.

    Raises:
        BadArgument: there is no such class, or it is not an environment.
        Exception: whatever importing the module raises.
    """
    found = _named(environment) if isinstance(environment, str) else environment
    if not isinstance(found, type) or not hasattr(found, "collect_trajectories"):
        raise BadArgument(
            f"{environment!r} is no Atropos environment", hint="give a subclass of BaseEnv, or path.py:Class"
        )
    return found


def file_of(environment: Any) -> Path | None:
    """Returns the file of an environment that `environment_class` would find, without importing it.

    None where it is not known. The packages that a dotted name stands in are imported.
    """
    if not isinstance(environment, str):
        source = inspect.getsourcefile(environment) if isinstance(environment, type) else None
        return None if source is None else Path(source)
    place = environment.rpartition(":")[0]
    if place.endswith(".py"):
        return Path(place)
    try:
        spec = importlib.util.find_spec(place) if place else None
    except (ImportError, ValueError):
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _named(name: str) -> Any:
    place, separator, class_name = name.rpartition(":")
    if not separator or not place or not class_name:
        raise BadArgument(
            f"{name!r} names no class", hint='"package.module:Class" or "path/to/file.py:Class"'
        )
    module = _of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    try:
        return getattr(module, class_name)
    except AttributeError:
        raise BadArgument(f"{place} has no {class_name}", hint="name the environment's class") from None


def _of_file(path: Path) -> ModuleType:
    """The same module for the same file, so that classes are the same."""
    if not path.is_file():
        raise BadArgument(f"there is no file {path}", hint="give the path of the environment's .py file")
    path = path.resolve()
    name = f"shmbridge_env_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    with _loading:
        if name in sys.modules:
            return sys.modules[name]
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module


class Runtime:
    """An environment object, which any number of episodes use at once, as Atropos' own workers do.

    Made and used by `AtroposGemEnv`, from any thread. Its thread ends with the last reference to it.

    Args:
        kind: the environment's class.
        config: its config, ready.
        server_configs: as its class gives them; no server is asked.
        items: of its items, the first so many are taken, in turn; None: all, once.
        judge: answers a judge's completions; None: they are refused.
        judge_calls: methods in which a judge is asked; None: those that look like it.
    """

    def __init__(
        self,
        kind: type[Any],
        config: Any,
        server_configs: Any,
        items: int | None,
        judge: Mapping[str, Any] | None,
        judge_calls: Sequence[str] | None,
    ) -> None:
        self._thread = EventLoopThread(f"shmbridge-gem-{kind.__name__}")
        self.loop, self.thread = self._thread.loop, self._thread.thread
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        # Only the loop's thread adds to it and looks at it.
        self.episodes: weakref.WeakSet[SuspendedEpisode | ReplayedEpisode] = weakref.WeakSet()
        self._first, self._turn, self._count = list[Any](), 0, items
        self._items: OrderedDict[int, Any] = OrderedDict()
        self._asking, self._is_set_up = asyncio.Lock(), False
        self._joining = asyncio.Lock()
        self.stuck = False
        self._forming: dict[int | None, SuspendedGroup] = {}  # groups of siblings that are not all there
        self.size = 1 if collects_alone(kind) else int(config.group_size)
        self.stopping = weakref.finalize(self, stop, self.loop)
        try:
            made = _made(kind, config, server_configs, self.episodes, judge, judge_calls)
            self.env = self._thread.submit(made).result()
            watch(kind)
        except BaseException:
            self.stopping()
            raise

    @property
    def tokenizer(self) -> Any:
        """The environment's."""
        return self.env.tokenizer

    def is_stuck(self) -> bool:
        """Returns whether the environment, once set up, blocks its thread. Blocks for seconds at most.

        A stuck runtime is not shared again. A process of its own ends: its main thread cannot continue.
        """
        if not self._is_set_up:
            return False
        with suppress(TimeoutError):
            self._thread.submit(asyncio.sleep(0)).result(_ANSWERS_S)
            return False
        self.stuck = True
        with _sharing:
            _forget(self)
        if is_main(self.thread):
            print(f"the environment blocks the main thread: {BLOCKS}", file=sys.stderr, flush=True)
            os._exit(1)
        return True

    async def join(
        self, seed: int | None, begin: Callable[[Any, int], SuspendedGroup], item: Any = None
    ) -> SuspendedEpisode:
        """Returns a place in the group of a seed that is not full, else in a new one.

        Args:
            seed: siblings have the same.
            begin: makes a group of an item and so many siblings.
            item: what it plays; None: the seed's.

        Raises:
            EnvFailed, NotSuspendable: as `item`.
        """
        async with self._joining:
            group = self._forming.get(seed)
            if group is None or group.error is not None or (item is not None and group.item is not item):
                group = begin(await self.item(seed) if item is None else item, self.size)
                self._forming[seed], group.seed = group, seed
                group.when_over = partial(_formed, weakref.ref(self), group)
            member = group.join()
            self.episodes.add(member)
            if group.is_full:
                _formed(weakref.ref(self), group)
            return member

    async def item(self, seed: int | None) -> Any:
        """Returns a copy of the environment's next item; the same one for the same seed. Sets it up first.

        Raises:
            EnvFailed: the environment failed, or has no more items.
            NotSuspendable: it asks for a completion before any episode.
        """
        async with self._asking:
            try:
                if not self._is_set_up:
                    await self.env.setup()
                    self._is_set_up = True
                return copy.deepcopy(await self._next(seed))
            except (EnvFailed, NotSuspendable):
                raise
            except Exception as error:
                raise EnvFailed(
                    f"the environment raised {error!r} before the episode",
                    hint="its own traceback is the cause",
                ) from error

    async def _next(self, seed: int | None) -> Any:
        if self._count is not None:
            return await self._of_the_first(seed, self._count)
        if seed is not None and seed in self._items:
            self._items.move_to_end(seed)
            return self._items[seed]
        item = self.env.backlog.pop() if self.env.backlog else await self._drawn()
        if seed is not None:
            self._items[seed] = item
            if len(self._items) > _SEEDS:
                self._items.popitem(last=False)
        return item

    async def _of_the_first(self, seed: int | None, count: int) -> Any:
        """The seed alone decides the item's number, not the requests before."""
        if seed is None:
            seed, self._turn = self._turn, self._turn + 1
        while len(self._first) <= seed % count:
            self._first.append(await self._drawn())
        return self._first[seed % count]

    async def _drawn(self) -> Any:
        item = await self.env.get_next_item()
        if item is None:
            raise EnvFailed("the environment has no more items", hint="it ended by itself")
        return item


def runtime_of(
    kind: type[Any],
    config: Any,
    *,
    tokenizer: str | None,
    items: int | None,
    group_size: int,
    judge: Mapping[str, Any] | None,
    judge_calls: Sequence[str] | None,
    user: object,
) -> Runtime:
    """Returns the runtime of a class and config; an equal one that is in use is shared, and set up once.

    Blocks while the environment is made. `leave` it in the end.

    Args:
        kind: the class.
        config: fields that differ from the class's own config, or a whole config, but for its group size.
        tokenizer: name or folder, in place of the config's.
        items, judge, judge_calls: as of `Runtime`.
        group_size: so many siblings play a group.
        user: who uses it, until it leaves or is collected.

    Raises:
        BadArgument: the config has no such field, or a value of another type.
        Exception: whatever the environment's constructor raises.
    """
    whole, server_configs = _config_of(kind, config or {}, tokenizer, group_size)
    if items is not None and items < 1:
        raise BadArgument(f"items={items} is less than 1", hint="items=None takes all")
    key = (kind, f"{items} {whole!r} {judge!r} {judge_calls!r}")
    with _sharing:
        runtime = _shared.get(key)
        if runtime is None:
            runtime = _shared[key] = Runtime(kind, whole, server_configs, items, judge, judge_calls)
        runtime.users.add(user)
        return runtime


def leave(runtime: Runtime, user: object, timeout_s: float) -> None:
    """Ends the runtime if it has no other user. Blocks until its thread has ended, or `timeout_s` seconds."""
    with _sharing:
        runtime.users.discard(user)
        if runtime.users:
            return
        _forget(runtime)
    runtime.stopping()
    if runtime.thread is not threading.current_thread() and not is_main(runtime.thread):
        runtime.thread.join(timeout_s)


def _formed(of: weakref.ref[Runtime], group: SuspendedGroup) -> None:
    """The group takes no more siblings. It does not keep its runtime alive."""
    runtime, group.when_over = of(), None
    if runtime is not None and runtime._forming.get(group.seed) is group:
        del runtime._forming[group.seed]


def _forget(runtime: Runtime) -> None:
    for key, each in list(_shared.items()):
        if each is runtime:
            del _shared[key]


def _config_of(kind: type[Any], config: Any, tokenizer: str | None, group_size: int) -> tuple[Any, Any]:
    default, server_configs = kind.config_init()
    changes = {"group_size": group_size, **({} if tokenizer is None else {"tokenizer_name": tokenizer})}
    if isinstance(config, Mapping):
        unknown = sorted(set(config) - set(type(default).model_fields))
        if unknown:
            raise BadArgument(
                f"the config of {kind.__name__} has no {', '.join(unknown)}",
                hint=f"its fields: {', '.join(type(default).model_fields)}",
            )
        changes = {**config, **changes}
    else:
        default = config
    try:
        return type(default)(**{**dict(default), **changes}), server_configs
    except ValueError as wrong:
        raise BadArgument(
            f"the config of {kind.__name__} cannot be: {wrong}", hint="see its fields"
        ) from wrong


async def _made(
    kind: type[Any],
    config: Any,
    server_configs: Any,
    episodes: weakref.WeakSet[Any],
    judge: Mapping[str, Any] | None,
    judge_calls: Sequence[str] | None,
) -> Any:
    """The environment with a policy in place of its server; made in its event loop, where it will run."""
    from shmbridge.producers.gem.completions import AskingServer, Judge, tell_apart

    asked = None if judge is None else Judge(judge)

    taken = inspect.signature(kind).parameters
    anything = any(each.kind is each.VAR_KEYWORD for each in taken.values())
    # With testing, upstream's ServerManager makes no clients.
    options = {"slurm": False, "testing": True}
    env = kind(
        config, server_configs, **{name: options[name] for name in options if anything or name in taken}
    )
    env.tokenizer.apply_chat_template = PlainTokens(env.tokenizer)

    def outside(error: BaseException) -> None:
        for episode in list(episodes):
            episode.loop.call_soon_threadsafe(episode.fail, error)

    first = server_configs[0] if isinstance(server_configs, list) and server_configs else server_configs
    model_name = getattr(first, "model_name", "policy")
    parser = getattr(env.server, "tool_parser", None)
    env.server = AskingServer(env.tokenizer, model_name, outside, parser, asked)
    tell_apart(env, judge_calls)
    return env
