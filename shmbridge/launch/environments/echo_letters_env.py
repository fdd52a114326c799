"""An Atropos environment: `:abc` asks for the same three letters back, `abc`.

    python examples/echo_letters_env.py process --env.total_steps 4 --env.use_wandb false \\
        --env.data_path_to_save_groups runs/groups.jsonl

`larger_digit_env.py` with other questions; it imports nothing of shmbridge either. `demo.py` runs both.
"""

import random
from collections.abc import Iterator

from larger_digit_env import Item, LargerDigitEnv, reward

__all__ = ["EchoLettersEnv", "reward"]


class EchoLettersEnv(LargerDigitEnv):
    name = "echo_letters"

    def questions(self) -> Iterator[Item]:
        return _echoes(random.Random(self.config.seed))

    def fixed_questions(self) -> list[Item]:
        echoes = _echoes(random.Random("eval"))
        return [next(echoes) for _ in range(16)]


def _echoes(stream: random.Random) -> Iterator[Item]:
    while True:
        letters = "".join(stream.choices("abcdefgh", k=3))
        yield f":{letters}", letters


if __name__ == "__main__":
    EchoLettersEnv.cli()
