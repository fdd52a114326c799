"""What the command lines of rollouts share: their flags, how SIGTERM stops them, and how they end."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from shmbridge import ShmBridgeError
from shmbridge.cli.base import Parser, bridge_name, is_of, refuse, refuse_missing, size
from shmbridge.errors import BadArgument
from shmbridge.producers.rollout.runner import NothingCame, Rollout, Runner
from shmbridge.producers.rollout.sampling import APIS, Sampling
from shmbridge.producers.rollout.survivors import Limits, TooManyFailures

EXIT_CODE = 128 + signal.SIGTERM

_GRACE_S = 3.0


class Stopped:
    """Whether SIGTERM was received."""

    def __init__(self) -> None:
        self.by_sigterm = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Does what SIGINT would do: asyncio cancels the main task, which flushes and sends a goodbye;
        without asyncio, raises KeyboardInterrupt.
        """
        self.by_sigterm = True
        as_if_interrupted = signal.getsignal(signal.SIGINT)
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)
        if callable(as_if_interrupted):
            as_if_interrupted(signal.SIGINT, frame)
        else:  # SIGINT is ignored, as in a background job of a shell
            raise KeyboardInterrupt


@contextlib.contextmanager
def orderly_sigterm() -> Iterator[Stopped]:
    """Within the block SIGTERM interrupts as Ctrl-C does; a script's own handler takes its place.

    In other threads it does nothing.
    """
    stopped = Stopped()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before = signal.signal(signal.SIGTERM, stopped)
    try:
        yield stopped
    finally:
        if signal.getsignal(signal.SIGTERM) is stopped:
            signal.signal(signal.SIGTERM, before)


def leave(code: int) -> NoReturn:
    """Ends the process. Python would wait for its threads, and so for a call of an environment that never
    returns: here they have three seconds.
    """
    give_up = time.monotonic() + _GRACE_S
    while (running := _threads()) and time.monotonic() < give_up:
        running[0].join(give_up - time.monotonic())
    if not running:
        sys.exit(code)
    print(f"{len(running)} calls of environments did not return within {_GRACE_S:g} s", file=sys.stderr)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _threads() -> list[threading.Thread]:
    """The threads that Python would wait for."""
    others = (each for each in threading.enumerate() if each is not threading.main_thread())
    return [each for each in others if not each.daemon]


def run_rollout(
    program: str, extra: str, run: Callable[[], int], mistakes: tuple[type[Exception], ...] = ()
) -> int:
    """Runs a rollout until it ends, fails or is told to end; returns its exit code. Main thread.

    Args:
        program: its name in errors.
        extra: shmbridge's, which has the packages that it needs.
        run: plays; returns the exit code.
        mistakes: errors besides the usual ones that are the user's: exit code 2 without a traceback.

    Returns:
        What `run` returns; 1: groups failed, too many in a row, or none came; 2: it could not start, or was
        refused; 143 after SIGTERM, 130 after Ctrl-C.
    """
    refused: tuple[type[Exception], ...] = (ShmBridgeError, ValueError, TypeError, OSError, *mistakes)
    with orderly_sigterm() as stopped:
        try:
            return run()
        except KeyboardInterrupt:
            return EXIT_CODE if stopped.by_sigterm else 130
        except (TooManyFailures, NothingCame) as error:
            refuse(program, error, "see --help")
            return 1
        except ModuleNotFoundError as missing:
            if is_of(missing, extra):
                refuse_missing(program, missing, extra)
            else:
                refuse(program, missing, "install it")
        except refused as error:
            refuse(program, error, "see --help")
    return 2


def exit_code(rollout: Runner[Any]) -> int:
    """Prints what was put and lost; returns 1 if groups were lost and none was put, else 0."""
    print(rollout.summary(), flush=True)
    return int(rollout.groups_put == 0 and rollout.losses.groups.total() > 0)


def setting(word: str) -> tuple[str, Any]:
    """Returns key and value of KEY=VALUE; a value that is not JSON is text. Raises BadArgument."""
    key, equals, value = word.partition("=")
    if not equals or not key:
        raise BadArgument(f"{word!r} is not KEY=VALUE", hint="see --help")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def add_rollout_flags(parser: Parser) -> None:
    """Adds the flags of bridge, server and sampling to `parser`."""
    add = parser.add_argument
    add("--bridge", required=True, type=bridge_name, metavar="NAME", help="the same as the consumer's")
    add_server_flags(parser)
    add("--api", choices=("auto", *APIS), default="auto", help="what the server speaks [auto: ask it]")
    add("--allow-retokenise", action="store_true", help="take a chat server that gives no token ids; "
        "rows are marked, and have no log-probabilities")  # fmt: skip
    add("--context", type=int, metavar="N", help="most tokens of a row [as many as the server takes]")
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="text that ends an answer; may be repeated",
    )
    add_runner_flags(parser)


def add_server_flags(parser: Parser) -> None:
    """Adds the flags of the inference server and of sampling to `parser`."""
    add = parser.add_argument
    add("--server", required=True, metavar="URL", help="inference server, such as http://127.0.0.1:9004")
    add("--model", help="name of the model in requests [the first that the server lists]")
    add("--tokenizer", required=True, metavar="DIR_OR_ID", help="the model's tokenizer")
    add("--max-tokens", type=int, metavar="N", help="most tokens of one answer [what is left of the context]")
    add("--temperature", type=float, default=1.0, help="of sampling [1.0]")
    add("--top-p", type=float, default=1.0, help="of sampling [1.0]")


def add_runner_flags(parser: Parser) -> None:
    """Adds the flags of groups, lane, deadlines and ends, which every rollout has, to `parser`."""
    add = parser.add_argument
    add("--group-size", type=int, default=8, metavar="N", help="episodes of one task [8]")
    add("--concurrency", type=int, default=8, metavar="N", help="groups generated at once [8]")
    add("--max-groups", type=int, metavar="N", help="end after N groups [run until the bridge drains]")
    add("--lane-bytes", type=size, default="64M", metavar="SIZE", help="size of the lane [64M]")
    add(
        "--on-full", choices=("block", "raise", "drop"), default="block", help="when the lane is full [block]"
    )
    add("--tickets", action="store_true", help="begin a group only when the consumer has room for it")
    limits = Limits()
    add("--episode-s", type=float, default=limits.episode_s, metavar="S",
        help=f"deadline of an episode, seconds [{limits.episode_s:g}; 0: none]")  # fmt: skip
    add("--group-s", type=float, default=limits.group_s, metavar="S",
        help=f"deadline of a group, seconds [{limits.group_s:g}; 0: none]")  # fmt: skip
    add("--refill", type=int, default=0, metavar="N",
        help="play up to N episodes of a group in place of lost ones [0]")  # fmt: skip
    add("--incomplete", choices=("put", "drop"), default="put",
        help="a group with lost episodes: put the others, or drop it [put]")  # fmt: skip
    add("--max-staleness", type=int, metavar="N",
        help="cancel a group in the making that is more than N versions behind [never]")  # fmt: skip
    add("--stop-after-failures", type=int, default=8, metavar="N",
        help="end after groups failed N times in a row [8; 0: never]")  # fmt: skip
    add("--stop-after-idle-s", type=float, metavar="S",
        help="end when no group was finished for S seconds [never]")  # fmt: skip
    add("--resume", metavar="FILE",
        help="keep in FILE which tasks are over, and go on behind them [begin with the first]")  # fmt: skip


def runner_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Returns what the flags of `add_runner_flags` say, as arguments of a `Runner`. Never blocks."""
    return {
        "group_size": options.group_size,
        "concurrency": options.concurrency,
        "limits": Limits(
            options.episode_s or None, options.group_s or None, options.refill, options.incomplete
        ),
        "stop_after_failures": options.stop_after_failures,
        "stop_after_idle_s": options.stop_after_idle_s or None,
        "max_staleness": options.max_staleness,
        "resume": options.resume,
        "tickets": options.tickets,
        "lane_bytes": options.lane_bytes,
        "on_full": options.on_full,
    }


def rollout_of(options: argparse.Namespace, env_name: str, **more: Any) -> Rollout:
    """Returns the `Rollout` that the flags ask for. Reserves the lane's memory."""
    return Rollout(
        options.bridge,
        options.server,
        options.tokenizer,
        env_name=env_name,
        sampling=Sampling(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            stop=tuple(options.stop),
        ),
        context=options.context,
        api=options.api,
        model=options.model,
        allow_retokenise=options.allow_retokenise,
        **runner_settings(options),
        **more,
    )
