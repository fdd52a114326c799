"""The program around verifiers' environments: what is started, what is logged, and how it ends.

Called as `python -m shmbridge.producers.verifiers`, and by `shmbridge env --verifiers NAME`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from contextlib import suppress
from typing import Any

from shmbridge.cli.base import run_program
from shmbridge.producers.rollout import exit_code, leave, run_rollout, runner_settings
from shmbridge.producers.verifiers.options import config_of, parse, settings
from shmbridge.producers.verifiers.rollout import VerifiersRollout

_PROGRAM = "shmbridge.producers.verifiers"


def main(argv: list[str] | None = None) -> int:
    """Plays environments until the bridge drains, or as long as the flags say; returns the exit code."""
    options = parse(argv)
    logging.getLogger("verifiers").setLevel(logging.WARNING)  # it logs each episode
    # AttributeError: what verifiers raises for a module without a taskset
    return run_rollout(_PROGRAM, "verifiers", lambda: asyncio.run(_run(options)), (AttributeError,))


async def _run(options: argparse.Namespace) -> int:
    name, env_id = options.verifiers, options.env_id
    sampling: dict[str, Any] = {"temperature": options.temperature, "top_p": options.top_p}
    if options.max_tokens is not None:
        sampling["max_tokens"] = options.max_tokens
    evaluation = None
    if options.eval_every is not None:
        evaluation = config_of(name, env_id, [*options.env_config, *options.eval_config])
    rollout = VerifiersRollout(
        options.bridge,
        options.server,
        options.tokenizer,
        config_of(name, env_id, options.env_config),
        evaluation=evaluation,
        model=options.model,
        renderer=settings(options.renderer[1:], {"name": options.renderer[0]}) if options.renderer else None,
        sampling=sampling,
        **runner_settings(options),
    )
    async with rollout:
        tasks = rollout.tasks(epochs=options.epochs, shuffle=options.shuffle)
        playing = asyncio.create_task(rollout.run(tasks, rollout.play, options.max_groups))
        works: set[asyncio.Task[Any]] = {playing}
        if evaluation is not None:
            works.add(asyncio.create_task(rollout.evaluate_every(options.eval_every, options.eval_tasks)))
        try:
            await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
            for each in works:
                if each.done():
                    each.result()
        finally:
            for each in works:
                each.cancel()
            for each in works:
                with suppress(asyncio.CancelledError, Exception):
                    await each
    return exit_code(rollout)


if __name__ == "__main__":
    leave(run_program("verifiers", main))
