"""An Atropos environment, unedited, as a `gem.Env`: each group goes turn by turn into a lane.

    python examples/gem_env.py --bridge run1 --server http://127.0.0.1:9004 --tokenizer runs/tiny

`AtroposGemEnv` has gem's `reset` and `step`: whatever steps gem environments can take it, ROLL for one.
"""

import argparse
import asyncio
from pathlib import Path

from shmbridge.producers.gem import AtroposGemEnv, GemGame
from shmbridge.producers.rollout import add_rollout_flags, rollout_of

ENVIRONMENT = f"{Path(__file__).parent / 'larger_digit_env.py'}:LargerDigitEnv"


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_rollout_flags(parser)
    options = parser.parse_args()

    def make() -> AtroposGemEnv:
        return AtroposGemEnv(ENVIRONMENT, tokenizer=options.tokenizer)

    async with (
        GemGame(make, group_size=options.group_size) as game,
        rollout_of(options, env_name="larger_digit") as rollout,
    ):
        groups = await rollout.run(game.tasks(), game.play, max_groups=options.max_groups)
    print(f"{groups} groups")


if __name__ == "__main__":
    asyncio.run(main())
