"""Runs SkyRL's trainers in children of this process, which die by SIGKILL at a given place of a given step.

Reads a line of JSON for each run, and answers with how it ended. SkyRL is imported once, and children are
forks. The names of the groups that an optimizer step trained are saved with the model, and loaded with it.
"""

import asyncio
import contextlib
import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[3]
GROUPS = 2  # of a step
STEPS = 6
KINDS = {
    "sync": [],
    "async": [
        "trainer.algorithm.policy_loss_type=rollout_is",
        "trainer.fully_async.enabled=true",
        "trainer.fully_async.max_staleness_steps=1",
        f"trainer.fully_async.num_parallel_generation_workers={2 * GROUPS}",
    ],
}


def settings(run):
    return [
        f"bridge.steps={STEPS}",
        "bridge.timeout_s=20",
        f"trainer.ckpt_path={run['folder']}",
        f"trainer.ckpt_interval={run['every']}",
        f"trainer.resume_mode={'latest' if run['every'] > 0 else 'none'}",
        *KINDS[run["kind"]],
        *([f"bridge.start={run['start']}"] if "start" in run else []),
    ]


def train(example, run):
    cfg = example.config(Path(run["model"]), run["bridge"], GROUPS, *settings(run))
    with example.experiment(cfg) as trainer:
        watch(trainer, run)
        asyncio.run(trainer.train())


def watch(trainer, run):
    """Makes the trainer die or fail where the run says; keeps the names of trained groups in the model."""
    names, group_of = [], {}

    def at(where):
        if (run.get("where"), run.get("step")) == (where, trainer.global_step):
            os.kill(os.getpid(), signal.SIGKILL)

    def wrapped(of, name, *, before=None, after=None):
        real = getattr(of, name)

        def call(*args, **options):
            if before is not None:
                before(*args)
            made = real(*args, **options)
            if after is not None:
                after(*args)
            return made

        setattr(of, name, call)

    def in_training():
        return [group_of[uid] for uid in trainer._in_training]

    def fail(*_):
        at("loss")
        if run.get("poison") in in_training():
            raise FloatingPointError("nan loss")

    def saved(_, folder, *__):
        (Path(folder) / "groups.json").write_text(json.dumps(names))
        at("model saved")

    generate = trainer.generator.generate

    async def noted(given):
        output = await generate(given)
        rows = zip(output["trajectory_ids"], output["env_metrics"], strict=True)
        group_of.update((each.instance_id, row["group_id"]) for each, row in rows)
        return output

    async def sync(real=trainer.dispatch.save_weights_for_sampler):
        if names and run["every"] < 0:
            at("sync")
        await real()

    trainer.generator.generate, trainer.dispatch.save_weights_for_sampler = noted, sync
    dispatch, feed = trainer.dispatch, trainer.generator.feed
    wrapped(dispatch, "forward_backward_from_staged", before=fail)
    wrapped(dispatch, "optim_step", after=lambda *_: names.extend(in_training()))
    wrapped(trainer, "train_critic_and_policy", after=lambda *_: at("trained"))
    wrapped(dispatch, "save_checkpoint", before=lambda *_: at("save"), after=saved)
    wrapped(
        dispatch,
        "load_checkpoint",
        after=lambda _, folder, **__: names.extend(json.loads((Path(folder) / "groups.json").read_text())),
    )
    wrapped(trainer, "_cleanup_old_checkpoints", before=lambda: at("pointer"))
    wrapped(feed, "checkpointed", before=lambda: at("release"))


def main():
    example = SimpleNamespace(**runpy.run_path(str(ROOT / "examples/skyrl_train.py"), run_name="example"))
    example.without_cuda()
    import shmbridge.consumers.skyrl.entrypoint  # noqa: F401

    print("ready", flush=True)
    for line in sys.stdin:
        run = json.loads(line)
        if (child := os.fork()) == 0:
            log = os.open(run["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            code = 1
            with contextlib.suppress(BaseException):
                try:
                    train(example, run)
                    code = 0
                except BaseException:
                    traceback.print_exc()
            os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
