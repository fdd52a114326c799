"""An environment of one's own, without a framework: which digit is larger? A wrong answer gets a second try.

    python examples/own_env.py --bridge run1 --server http://127.0.0.1:9004 --tokenizer runs/tiny

Each try is a step with a reward of its own; what the environment says between the tries is in the row,
untrained. Add --max-tokens 4 for the tiny model.
"""

import argparse
import asyncio
import random
from collections.abc import Iterator

from shmbridge.producers.rollout import Episode, Task, add_rollout_flags, rollout_of


def questions(seed: int) -> Iterator[Task[str]]:
    """Yields `>37` and the larger digit, without end."""
    stream = random.Random(seed)
    while True:
        one, other = stream.sample("0123456789", 2)
        yield Task([{"role": "user", "content": f">{one}{other}"}], data=max(one, other))


async def play(episode: Episode, larger: str) -> None:
    """Asks twice at most: 1 point for the first answer, half a point for the second."""
    for points in (1.0, 0.5):
        said = await episode.sample()
        # the right digit first; the less behind it, the better: partial credit gets a random model started
        episode.step_reward(points * said.startswith(larger) / max(len(said), 1))
        if said == larger:
            break
        episode.observe([{"role": "user", "content": "?"}])
    episode.score = sum(episode.step_rewards)


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_rollout_flags(parser)
    options = parser.parse_args()
    async with rollout_of(options, env_name="larger_digit") as rollout:
        groups = await rollout.run(questions(seed=1), play, max_groups=options.max_groups)
    print(f"{groups} groups")


if __name__ == "__main__":
    asyncio.run(main())
