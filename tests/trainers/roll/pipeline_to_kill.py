"""`ShmAgenticPipeline` over ROLL's loop in short, to be killed: its weights list the groups it trained.

    python -m tests.trainers.roll.pipeline_to_kill BRIDGE FOLDER '{"steps": 6, "die": "save", "at": 4}'

Environment manager and pipeline are the adapter's; the loop, the checkpoints and Ray's calls are played here.
As ROLL's with FSDP2, weights may be written in the background, until the next checkpoint is begun.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

sys.modules["ray"] = ModuleType("ray")  # its calls are played, and it takes seconds to import
os.environ.pop("SHMBRIDGE_ROLL_CHECKOUT", None)  # so are ROLL's loop and classes

# The first puts the others where they are found.
# isort: off
from tests.trainers.roll.conftest import Call, Queue, manager_of  # noqa: E402
from roll.distributed.scheduler.protocol import DataProto  # noqa: E402
from roll.pipeline.agentic.agentic_pipeline import AgenticPipeline  # noqa: E402

SIZE = 2  # groups of a step


class Ahead(Queue):
    """Gives an episode for each release of a semaphore, and none before."""

    def __init__(self) -> None:
        super().__init__(999)
        self.allowed, self.arrived = threading.Semaphore(0), threading.Semaphore(0)
        self.get_episode_id.remote, self.put.remote = self._allowed, self._arrived

    def _allowed(self, group_id, env_id=None):
        self.allowed.acquire()
        return self._next(group_id, env_id)

    def _arrived(self, *given):
        self._put(*given)
        self.arrived.release()


class Steps(AgenticPipeline):
    """ROLL's loop; goes on from the newest checkpoint whose weights and state are both there."""

    def __init__(self, config) -> None:
        self.pipeline_config, self.plan, self.folder = config, config.plan, config.folder
        self.state, self.weights = SimpleNamespace(step=-1, log_history=[], kv={}), []
        if complete := checkpoints(self.folder):
            newest = max(complete, key=lambda each: int(each.name.partition("-")[2]))
            self.weights = json.loads((newest / "weights").read_text())
            self.state.step, self.state.kv = json.loads((newest / "state").read_text())

    def run(self) -> None:
        config, first = self.pipeline_config, True
        for step in range(self.state.step + 1, config.max_steps):
            config.manager.update_step(step, {})
            for _ in range(SIZE * (1 + config.async_generation_ratio * first)):
                config.queue.allowed.release()
            first = False
            while len(config.queue.rollouts) < SIZE:
                config.queue.arrived.acquire()
            batch = DataProto.concat([config.queue.rollouts.pop(0) for _ in range(SIZE)])
            batch = self.adjust_batch(batch)
            groups = [int(each) for each in dict.fromkeys(batch.non_tensor_batch["shm_group"])]
            self.die("train", step)
            if self.plan.get("poison") in groups:
                raise FloatingPointError(f"nan loss in {groups}")
            self.weights += groups
            self.state.step = step
            self.do_checkpoint(step)
        config.queue._left.clear()
        config.queue.allowed.release()
        if config.loop.ident:  # there was a step
            config.loop.join()

    def adjust_batch(self, data, mode="copy"):
        return data

    def do_checkpoint(self, global_step, is_last_step=None) -> None:
        config, last = self.pipeline_config, global_step == self.pipeline_config.max_steps - 1
        if global_step == 0 or not (last or global_step % config.save_steps == 0):
            return
        for earlier in self.folder.glob("*/weights.new"):
            earlier.rename(earlier.with_suffix(""))
        self.die("earlier", global_step)
        folder = self.folder / f"checkpoint-{global_step}"
        folder.mkdir(exist_ok=True)
        background = self.plan.get("background") and not last
        (folder / ("weights.new" if background else "weights")).write_text(json.dumps(self.weights))
        self.die("save", global_step)
        (folder / "state").write_text(json.dumps([self.state.step, self.state.kv]))
        self.die("saved", global_step)

    def die(self, where: str, step: int) -> None:
        if (where, step) == (self.plan.get("die"), self.plan.get("at")):
            os.kill(os.getpid(), signal.SIGKILL)


def checkpoints(folder: Path) -> list[Path]:
    """Returns the folders of those that are whole."""
    return [each.parent for each in folder.glob("*/state") if (each.parent / "weights").exists()]


def main(bridge: str, folder: Path, plan: dict) -> None:
    """Trains, and dies or fails where the plan says."""
    from shmbridge.consumers.roll import pipeline

    class Killed(pipeline.ShmAgenticPipeline, Steps):
        def _tell(self, **word) -> None:
            super()._tell(**word)
            self.die("told" if "saved" in word else "trained", self.state.step)

    saving = {"async_save_ckpt": plan["background"]}
    strategy = SimpleNamespace(strategy_name="fsdp2_train", strategy_config=saving)
    more = {
        "max_steps": plan["steps"],
        "resume_from_checkpoint": bool(checkpoints(folder)),
        "actor_train": SimpleNamespace(strategy_args=strategy),
        "plan": plan,
        "folder": folder,
        "queue": Ahead(),
    }
    given = {"size": SIZE, "lag": plan["lag"], "output": str(folder), "infer_logprobs": False}
    given["start"] = None if checkpoints(folder) else "from-scratch"
    manager = manager_of(bridge, more["queue"], pipeline=more, **given)
    config = manager.pipeline_config
    config.manager = manager
    pipeline.ray.get = lambda value: value
    pipeline.ray.get_actor = lambda name, namespace: SimpleNamespace(update_step=Call(manager.update_step))

    def play() -> None:
        try:
            manager.run_rollout_loop(DataProto(meta_info={"seed": 1}))
        except BaseException as wrong:
            print(repr(wrong), file=sys.stderr, flush=True)
            os._exit(3)

    config.loop = threading.Thread(target=play)
    made = Killed(config)
    begin = manager.update_step

    def begin_first(step, trace_meta) -> None:
        begin(step, trace_meta)
        if not config.loop.is_alive() and not trace_meta:
            config.loop.start()

    manager.update_step = begin_first
    try:
        made.run()
    except FloatingPointError as failed:
        print(failed, flush=True)
        os._exit(1)  # as Ray ends its workers


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), {"lag": 0, "background": False, **json.loads(sys.argv[3])})
