"""The environment of trl_grpo.py: an answer of digits is asked for, then one of letters.

    python examples/trl_env.py --bridge run1 --server http://127.0.0.1:9004 --tokenizer runs/tiny

With --max-tokens 4. Each answer is a step, whose reward is the share of its tokens that are of the wanted
kind.
"""

import argparse
import asyncio
import random
from collections.abc import Iterator

from shmbridge.producers.rollout import Episode, Task, add_rollout_flags, rollout_of

LENGTH = 4
KINDS = ("0123456789", "abcdefgh")


def questions(seed: int) -> Iterator[Task[None]]:
    """Yields `>` and a digit that means nothing, without end."""
    stream = random.Random(seed)
    while True:
        yield Task([{"role": "user", "content": f">{stream.randrange(10)}"}], data=None)


async def play(episode: Episode, _: None) -> None:
    """Asks twice; the score is the mean of both rewards."""
    for number, wanted in enumerate(KINDS):
        if number:
            episode.observe([{"role": "user", "content": "?"}])
        answer = await episode.sample()
        episode.step_reward(sum(character in wanted for character in answer[:LENGTH]) / LENGTH)
    episode.score = sum(episode.step_rewards) / len(KINDS)


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_rollout_flags(parser)
    options = parser.parse_args()
    async with rollout_of(options, env_name="digits_then_letters") as rollout:
        groups = await rollout.run(questions(seed=1), play, max_groups=options.max_groups)
    print(f"{groups} groups")


if __name__ == "__main__":
    asyncio.run(main())
