"""A trainer of SkyRL in a process of its own, which stands still in its step until it is killed.

python dying_trainer.py BRIDGE MODEL before|after
"""

import asyncio
import runpy
import sys
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[3]


def stand_still() -> None:
    print("STANDS STILL", flush=True)
    while True:
        time.sleep(60)


def main(bridge: str, model: str, where: str) -> None:
    example = SimpleNamespace(**runpy.run_path(str(ROOT / "examples/skyrl_train.py"), run_name="example"))
    cfg = example.config(Path(model), bridge, 2, "trainer.max_training_steps=2")
    with example.experiment(cfg) as trainer:
        step = trainer.dispatch.optim_step
        steps = []

        def optim_step(model, **options):
            if where == "before":
                stand_still()
            steps.append(step(model, **options))
            return steps[-1]

        trainer.dispatch.optim_step = optim_step
        if where == "after":
            trainer.dispatch.save_weights_for_sampler = sync_until_trained(
                trainer.dispatch.save_weights_for_sampler, steps
            )
        asyncio.run(trainer.train())


def sync_until_trained(real, steps):
    async def save_weights_for_sampler():
        if steps:
            stand_still()
        await real()

    return save_weights_for_sampler


if __name__ == "__main__":
    main(*sys.argv[1:])
