"""Runs any environment written for Atropos 0.4 on a bridge, unedited.

    python -m shmbridge.producers.atropos --bridge run1 path/to/env.py serve --env.group_size 8

The script runs as `python path/to/env.py serve ...` would; `BaseEnv`'s traffic with the rollout server takes
the bridge instead: scored groups go into a lane, registration and status over the control plane. All else in
BaseEnv (filters, throttling, evaluation, checkpoints, when to end) is untouched.

Knows BaseEnv; knows nothing of lanes or of the control plane's messages. Called from the command line, or
through `attach` by a program that makes its environments itself.
"""

from __future__ import annotations

import argparse
import functools
import logging
import runpy
import sys
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from shmbridge import ShmBridgeError
from shmbridge.config import check_bridge_name, parse_size
from shmbridge.producers.atropos_link import EnvLink, LinkOptions, OnFull
from shmbridge.producers.atropos_session import RolloutSession

log = logging.getLogger("shmbridge.producers.atropos")  # also where this is __main__

# What waits for room in the lane gets this long when an environment ends by itself, and when it is stopped.
FLUSH_S = 30.0
FLUSH_WHEN_STOPPED_S = 2.0

_Method: TypeAlias = Callable[..., Coroutine[Any, Any, Any]]

# The environment on whose behalf BaseEnv opens a session: the session itself is not told.
_asking: ContextVar[EnvLink | None] = ContextVar("link_of_the_asking_environment", default=None)

_attached: _Attachment | None = None


def attach(
    env_class: type[Any] | None = None,
    *,
    bridge: str,
    lane_bytes: int | str = "64M",
    on_full: OnFull = "block",
) -> None:
    """Send the traffic of an environment class over a bridge, from now until `detach`.

    Blocks while atroposlib is imported. Call it before the environment runs; one attachment at a time.

    Args:
        env_class: `BaseEnv` (None: all environments) or a subclass of it.
        bridge: name of the bridge.
        lane_bytes: size of each environment's lane.
        on_full: what happens to a group when the lane is full: "block" waits, "raise" and "drop" count it.

    Raises:
        ImportError: atroposlib is missing or broken.
        RuntimeError: something is attached already.
        BadBridgeName, ValueError: an argument is not what it should be.
    """
    global _attached
    options = LinkOptions(check_bridge_name(bridge), parse_size(lane_bytes), on_full)
    if _attached is not None:
        raise RuntimeError("an environment class is attached already: detach() first")
    from atroposlib.envs import base  # seconds of imports: arguments come first

    _attached = _Attachment(base, env_class or base.BaseEnv, options)


def detach() -> None:
    """Undo `attach`: environments that start from now on use the rollout server again. Never blocks."""
    global _attached
    if _attached is not None:
        _attached.undo()
        _attached = None


class _Attachment:
    """The methods of one class that are replaced, and the links of its environments."""

    def __init__(self, base: Any, env_class: type[Any], options: LinkOptions) -> None:
        self._options = options
        self._links: WeakKeyDictionary[Any, EnvLink] = WeakKeyDictionary()
        self._undo: list[Callable[[], None]] = []
        self._replace(base, "aiohttp", SimpleNamespace(ClientSession=_session(base.aiohttp.ClientSession)))
        for name, wrapped in {
            "setup_wandb": self._asks,
            "_register_env": self._asks,
            "get_server_info": self._asks,
            "get_status": self._gets_status,
            "_send_scored_data_to_api": self._sends,
            "env_manager": self._runs,
        }.items():
            self._replace(env_class, name, wrapped(getattr(env_class, name)))

    def undo(self) -> None:
        for put_back in reversed(self._undo):
            put_back()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        if name in vars(owner):
            self._undo.append(functools.partial(setattr, owner, name, vars(owner)[name]))
        else:
            self._undo.append(functools.partial(delattr, owner, name))
        setattr(owner, name, value)

    def _link(self, env: Any) -> EnvLink:
        """The environment's link, opened on first use, inside its event loop."""
        if env not in self._links:
            name = type(env).name or env.config.wandb_name or type(env).__name__
            link = self._links[env] = EnvLink(self._options, name)
            # On the instance, since subclasses may have their own: a worker is one call of it.
            env.handle_env = _stamped(link, env.handle_env)
        return self._links[env]

    # --- the replaced methods -----------------------------------------------------------------------------

    def _asks(self, original: _Method) -> _Method:
        """BaseEnv's method as it is, its sessions answered by the link."""

        @functools.wraps(original)
        async def ask(env: Any, *args: Any, **kwargs: Any) -> Any:
            token = _asking.set(self._link(env))
            try:
                return await original(env, *args, **kwargs)
            finally:
                _asking.reset(token)

        return ask

    def _gets_status(self, original: _Method) -> _Method:
        ask = self._asks(original)

        @functools.wraps(original)
        async def get_status(env: Any) -> None:
            link = self._link(env)
            run = link.run
            await ask(env)
            if link.run is not run:
                await _adopt_run(env, link)
            if link.holding:
                # With no worker allowed, BaseEnv adds none and lets those that run come to their end.
                env.max_num_workers = 0

        return get_status

    def _sends(self, original: _Method) -> _Method:
        @functools.wraps(original)
        async def send(env: Any, scored_data: dict[str, Any] | list[dict[str, Any]]) -> None:
            groups = scored_data if isinstance(scored_data, list) else [scored_data]
            for group in groups:
                group["env_id"] = getattr(env, "env_id", None)
            await self._link(env).send(groups)

        return send

    def _runs(self, original: _Method) -> _Method:
        @functools.wraps(original)
        async def env_manager(env: Any) -> None:
            flush_s = FLUSH_WHEN_STOPPED_S
            try:
                await original(env)
                flush_s = FLUSH_S
            finally:
                if link := self._links.pop(env, None):
                    del env.handle_env
                    await link.close(flush_s)

        return env_manager


def _session(real: Callable[..., Any]) -> Callable[..., Any]:
    def open_session(*args: Any, **kwargs: Any) -> Any:
        link = _asking.get()
        return RolloutSession(link) if link is not None else real(*args, **kwargs)

    return open_session


def _stamped(link: EnvLink, handle_env: _Method) -> _Method:
    @functools.wraps(handle_env)
    async def handle(*args: Any, **kwargs: Any) -> Any:
        link.generation_begins()
        return await handle_env(*args, **kwargs)

    return handle


async def _adopt_run(env: Any, link: EnvLink) -> None:
    """Another consumer may train with other batches: BaseEnv takes them as it did at its start."""
    try:
        await env.get_server_info()
    except ValueError as impossible:  # at its start it would end; now it goes on with what it knows
        log.error("the new consumer's run does not suit this environment: %s (%s)", impossible, link.run)


# --- the command line -------------------------------------------------------------------------------------


EXAMPLES = """\
examples:
  python -m shmbridge.producers.atropos --bridge run1 gsm8k_server.py serve --env.group_size 8
  python -m shmbridge.producers.atropos --bridge run1 --lane-bytes 256M env.py serve --config env.yaml

The environment waits until a consumer has announced its run:
  shmbridge.Consumer("run1", run=shmbridge.Run(batch_size=64, num_steps=100))
"""


def main(argv: list[str] | None = None) -> int:
    """Run an environment script on a bridge; returns the exit code, 2 if it could not start."""
    options = _parser().parse_args(argv)
    script = Path(options.script)
    if not script.is_file():
        return _refuse(
            f"there is no environment script {options.script}", "give the path of the env's .py file"
        )
    _log_to_stderr()
    try:
        attach(bridge=options.bridge, lane_bytes=options.lane_bytes, on_full=options.on_full)
    except ImportError as missing:
        return _refuse(f"atroposlib cannot be imported: {missing}", "pip install 'shmbridge[atropos]'")
    except ValueError as wrong:
        return _refuse(str(wrong), "see --help")
    try:
        _run_as_main(script, options.arguments)
    except ShmBridgeError as error:
        return _refuse(str(error), "")
    finally:
        detach()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m shmbridge.producers.atropos",
        description="Run an Atropos environment, unedited, with its groups going into shared memory.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--bridge", required=True, help="name of the bridge, the same as the consumer's")
    parser.add_argument("--lane-bytes", default="64M", metavar="SIZE", help="size of the lane (default: 64M)")
    parser.add_argument(
        "--on-full",
        choices=("block", "raise", "drop"),
        default="block",
        help="when the lane is full: wait (default), or count the group and go on",
    )
    parser.add_argument("script", help="the environment's script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments, such as: serve ...")
    return parser


def _run_as_main(script: Path, arguments: list[str]) -> None:
    """As `python script arguments` would, down to where its imports are looked for."""
    script = script.absolute()
    sys.argv = [str(script), *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


def _log_to_stderr() -> None:
    """A program, not a library: what the bridge has to say must be seen, whatever the script logs."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s shmbridge %(levelname)s %(message)s"))
    logger = logging.getLogger("shmbridge")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _refuse(message: str, hint: str) -> int:
    print(f"error: {message}" + (f"\nhint: {hint}" if hint else ""), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
