"""Attaches environments of this process: replaces methods of `BaseEnv`.

Called through
`shmbridge.producers.atropos`.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType, SimpleNamespace
from typing import Any, Self, TypeAlias
from weakref import WeakKeyDictionary

from shmbridge.producers.atropos.control_link import EnvLink, logged, measured
from shmbridge.producers.atropos.lane import LinkOptions
from shmbridge.producers.atropos.upstream import Changes, PlainTokens, with_its_own_url
from shmbridge.producers.atropos.versions import listening, put_on_hooks

log = logging.getLogger(__name__)
# Groups that wait for room in the lane get this long when an environment ends by itself, and when it is
# stopped.
FLUSH_S = 30.0
FLUSH_WHEN_STOPPED_S = 2.0
_Method: TypeAlias = Callable[..., Coroutine[Any, Any, Any]]
# The environment for which BaseEnv opens a session: BaseEnv does not tell the session.
_asking: ContextVar[EnvLink | None] = ContextVar("link_of_the_asking_environment", default=None)
_closing: set[asyncio.Future[Any]] = set()


class RolloutSession:
    """`async with RolloutSession(link) as session, session.get(url) as response: await response.json()`."""

    def __init__(self, link: EnvLink) -> None:
        self._link = link

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        pass

    def get(self, url: str, *, json: Any = None) -> _Response:
        """Asks one of the routes; the request is sent when the response is entered."""
        link = self._link
        routes: dict[str, Callable[[], Awaitable[Mapping[str, Any]]]] = {
            "wandb_info": link.wandb_info,
            "register-env": lambda: link.register(json or {}),
            "info": link.info,
            "status-env": link.status,
            "scored_data": lambda: _sent(link, [json]),
            "scored_data_list": lambda: _sent(link, json),
        }
        route = url.rpartition("/")[2]
        if route not in routes:
            raise LookupError(
                f"BaseEnv asks for {url}, which a bridge does not answer; it answers {sorted(routes)}"
            )
        return _Response(routes[route])

    post = get  # routes differ by name, not by method


async def _sent(link: EnvLink, groups: Any) -> Mapping[str, Any]:
    await link.send(groups)
    return {"status": "received"}


class _Response:
    """As much of `aiohttp.ClientResponse` as BaseEnv uses; always a success: the link's answer says what to
    do.
    """

    status = 200

    def __init__(self, ask: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        self._ask = ask
        self._answer: Mapping[str, Any] = {}

    async def __aenter__(self) -> Self:
        self._answer = await self._ask()
        return self

    async def __aexit__(self, *raised: object) -> None:
        pass

    def raise_for_status(self) -> None:
        """Nothing to raise."""

    async def json(self) -> Mapping[str, Any]:
        """Returns the answer."""
        return self._answer

    async def text(self) -> str:
        """Returns the answer as BaseEnv logs it."""
        return json.dumps(self._answer)


class Departure:
    """The result of `detach`.

    Awaiting it returns once all groups that the environment handed over are in its lane, or counted, and the
    lane is closed. That happens also without awaiting.
    """

    def __init__(self, closing: asyncio.Task[None] | None = None) -> None:
        self._closing = closing

    def __await__(self) -> Generator[Any, None, None]:
        if self._closing is not None:
            yield from asyncio.shield(self._closing).__await__()


class _Seat:
    """The state of one attached environment."""

    def __init__(self, options: LinkOptions, *, alone: bool = False) -> None:
        self.options = options
        self.alone = alone  # the instance was attached, not its class
        self.link: EnvLink | None = None
        self.attached = Changes()
        self.running = Changes()  # as long as it has a link

    @property
    def runs(self) -> bool:
        """Whether it has a link that is not closed."""
        return self.link is not None and not self.link.closed


class Attachments:
    """All attachments of this process. For one thread: that of the environments' event loop."""

    def __init__(self, base: Any) -> None:
        self._base = base
        self._sends_upstream = base.BaseEnv._send_scored_data_to_api
        self._seats: WeakKeyDictionary[Any, _Seat] = WeakKeyDictionary()
        self.attached_class: type[Any] | None = None
        self._class_options: LinkOptions | None = None
        self._class_changes, self._base_changes = Changes(), Changes()
        self._methods: dict[str, Callable[[Any], Any]] = {
            "setup_wandb": self._asks,
            "_register_env": self._asks,
            "get_server_info": self._asks,
            "get_status": self._gets_status,
            "_send_scored_data_to_api": self._sends,
            "_post_json_with_compression": self._posts,
            "env_manager": self._runs,
        }

    def attach_class(self, env_class: type[Any] | None, options: LinkOptions) -> None:
        """Attaches all environments of a class, those that exist and those to come."""
        if self.attached_class is not None:
            raise RuntimeError(
                f"the environment class {self.attached_class.__name__} is attached already: detach() first"
            )
        self._answer_sessions()
        env_class = env_class or self._base.BaseEnv
        self.attached_class, self._class_options = env_class, options
        for name, wrapped in self._methods.items():
            self._class_changes.replace(env_class, name, wrapped(getattr(env_class, name)))
        self._class_changes.replace(self._base.BaseEnv, "__init__", self._begins(self._base.BaseEnv.__init__))

    def attach_instance(self, env: Any, options: LinkOptions) -> None:
        """Attaches one environment, before it runs, whether or not its class is attached."""
        seat = self._seats.get(env)
        if seat is not None and (seat.alone or seat.runs):
            raise RuntimeError(
                f"this {type(env).__name__} is attached to bridge {seat.options.bridge!r} already: "
                "detach(env) first"
            )
        self._answer_sessions()
        seat = self._seats[env] = _Seat(options, alone=True)
        for name, wrapped in self._methods.items():
            own = vars(env).get(name)
            original = getattr(type(env), name) if own is None else _without_self(own)
            seat.attached.replace(env, name, MethodType(wrapped(original), env))
        _give_plain_tokens(env, seat.attached)

    def detach_class(self) -> None:
        """Detaches a class: its environments that start from now on use the rollout server again."""
        self._class_changes.undo()
        self.attached_class = self._class_options = None
        self._leave_sessions()

    def detach_instance(self, env: Any) -> Departure:
        """Detaches one environment: it uses the rollout server from now on; groups it has handed over go into
        its lane.
        """
        seat = self._seats.get(env)
        if seat is None or not seat.alone:
            return Departure()
        link = seat.link
        running = _running_loop()
        if link is not None and not link.closed and link.loop is not running and link.loop.is_running():
            raise RuntimeError(
                "detach(env) is for the environment's own event loop, or for when that has ended"
            )
        del self._seats[env]
        seat.running.undo()
        seat.attached.undo()
        self._leave_sessions()
        if link is None or link.closed:
            return Departure()
        if link.loop is running:
            return Departure(_kept(link.loop.create_task(link.close(FLUSH_S))))
        link.leave()
        return Departure()

    def detach_all(self) -> Departure:
        """Detaches every class and every instance."""
        self.detach_class()
        closing = [
            task for env in list(self._seats) if (task := self.detach_instance(env)._closing) is not None
        ]
        return Departure(_kept(asyncio.ensure_future(_all(closing)))) if closing else Departure()

    @property
    def _in_use(self) -> bool:
        return self.attached_class is not None or any(seat.alone for seat in self._seats.values())

    def _answer_sessions(self) -> None:
        if not self._in_use:
            session = _session(self._base.aiohttp.ClientSession)
            self._base_changes.replace(self._base, "aiohttp", SimpleNamespace(ClientSession=session))
            put_on_hooks(self._base_changes)

    def _leave_sessions(self) -> None:
        if not self._in_use:
            self._base_changes.undo()

    def _link(self, env: Any) -> EnvLink:
        """The environment's link, opened on first use, inside its event loop."""
        seat = self._seats.get(env)
        if seat is None:
            assert self._class_options is not None
            seat = self._seats[env] = _Seat(self._class_options)
        if seat.link is None or seat.link.closed:
            name = str(env.name or env.config.wandb_name or type(env).__name__)
            seat.link = EnvLink(seat.options, name, getattr(env, "tokenizer", None))
            # On the instance, since subclasses may have their own: a worker is one call of it.
            seat.running.replace(env, "handle_env", _stamped(seat.link, env.handle_env))
            seat.running.replace(env, "evaluate_log", logged(env.evaluate_log))
            began, add = seat.link.evaluation_begins, seat.link.evaluated
            seat.running.replace(env, "evaluate", measured(env.evaluate, env, began, add))
        return seat.link

    # --- the replaced methods -----------------------------------------------------------------------------

    def _begins(self, original: Callable[..., None]) -> Callable[..., None]:
        """BaseEnv's constructor, with workarounds for environments of the attached class."""

        @functools.wraps(original)
        def begin(env: Any, *args: Any, **kwargs: Any) -> None:
            if self.attached_class is None or not isinstance(env, self.attached_class):
                original(env, *args, **kwargs)
                return
            bound = with_its_own_url(original, (env, *args), kwargs)
            original(*bound.args, **bound.kwargs)
            _give_plain_tokens(env)

        return begin

    def _asks(self, original: _Method) -> _Method:
        """BaseEnv's own method; the link answers its sessions."""

        @functools.wraps(original)
        async def ask(env: Any, *args: Any, **kwargs: Any) -> Any:
            with _on_behalf_of(self._link(env)):
                return await original(env, *args, **kwargs)

        return ask

    def _gets_status(self, original: _Method) -> _Method:
        ask = self._asks(original)

        @functools.wraps(original)
        async def get_status(env: Any) -> None:
            link = self._link(env)
            link.check()
            run = link.run
            await ask(env)
            env.env_id = link.env_id
            if link.run is not run:
                await _adopt_run(env, link)
            if link.holding:
                # With no worker allowed, BaseEnv adds none and lets the running ones end.
                env.max_num_workers = 0

        return get_status

    def _sends(self, original: _Method) -> _Method:
        """Sends groups into the lane, through the environment's own method if it has one."""

        @functools.wraps(original)
        async def send(env: Any, scored_data: dict[str, Any] | list[dict[str, Any]]) -> None:
            seat = self._seats.get(env)
            # A rollout that outlives its environment opens no second lane: it is counted by the first.
            link = seat.link if seat is not None and seat.link is not None else self._link(env)
            if original is not self._sends_upstream:
                with _on_behalf_of(link):
                    await original(env, scored_data)
                return
            groups = scored_data if isinstance(scored_data, list) else [scored_data]
            for group in groups:
                group["env_id"] = getattr(env, "env_id", None)
            await link.send(groups)

        return send

    def _posts(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The last step of BaseEnv's sending, if an environment's own method calls it."""

        @functools.wraps(original)
        def post(env: Any, session: Any, url: str, payload: Any, **options: Any) -> Any:
            if isinstance(session, RolloutSession):
                return session.post(url, json=payload)
            return original(env, session, url, payload, **options)

        return post

    def _runs(self, original: _Method) -> _Method:
        @functools.wraps(original)
        async def env_manager(env: Any) -> None:
            flush_s = FLUSH_WHEN_STOPPED_S
            try:
                await original(env)
                flush_s = FLUSH_S
            finally:
                seat = self._seats.get(env)
                if seat is not None and seat.runs and seat.link is not None:
                    for worker in env.workers:  # as BaseEnv does where it ends by itself
                        worker.cancel()
                    seat.running.undo()
                    await seat.link.close(flush_s)

        return env_manager


def _kept(task: Any) -> Any:
    """Keeps a task alive: the loop itself keeps only weak references."""
    _closing.add(task)
    task.add_done_callback(_closing.discard)
    return task


@contextmanager
def _on_behalf_of(link: EnvLink) -> Iterator[None]:
    """Sessions that BaseEnv opens within the block are answered by this link."""
    token = _asking.set(link)
    try:
        yield
    finally:
        _asking.reset(token)


async def _all(tasks: list[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _without_self(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def method(_: Any, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    return method


def _give_plain_tokens(env: Any, changes: Changes | None = None) -> None:
    """Patches the environment's own tokenizer, as long as it lives or until the changes are undone."""
    tokenizer = getattr(env, "tokenizer", None)
    if hasattr(tokenizer, "apply_chat_template") and not isinstance(
        vars(tokenizer).get("apply_chat_template"), PlainTokens
    ):
        (changes or Changes()).replace(tokenizer, "apply_chat_template", PlainTokens(tokenizer))


def _session(real: Callable[..., Any]) -> Callable[..., Any]:
    def open_session(*args: Any, **kwargs: Any) -> Any:
        link = _asking.get()
        return RolloutSession(link) if link is not None else real(*args, **kwargs)

    return open_session


def _stamped(link: EnvLink, handle_env: _Method) -> _Method:
    @functools.wraps(handle_env)
    async def handle(*args: Any, **kwargs: Any) -> Any:
        with await link.ticket():
            link.generation_begins()
            with listening():
                return await handle_env(*args, **kwargs)

    return handle


async def _adopt_run(env: Any, link: EnvLink) -> None:
    """Another consumer may train with other batch sizes: BaseEnv takes them as it did at its start."""
    try:
        await env.get_server_info()
    except ValueError as impossible:  # at its start this would end the environment; now it keeps its settings
        log.error("the new consumer's run does not suit this environment: %s (%s)", impossible, link.run)
