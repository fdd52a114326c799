"""A trainer of its own, over a Feed, as the adapters are: python counting_trainer.py BRIDGE FOLDER STEPS.

Its model is the list of groups that it was trained with, saved at every second step with the feed's state. It
goes on from its newest checkpoint.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from shmbridge import Run
from shmbridge.consumers import Drained, Feed

bridge, folder, last = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
folder.mkdir(exist_ok=True)
saved = max(folder.glob("step-*"), key=lambda each: int(each.name[5:]), default=None)
model: list[str] = json.loads((saved / "model.json").read_text()) if saved else []
step_number = int(saved.name[5:]) if saved else 0
print(f"begins at step {step_number}", flush=True)

run = Run(batch_size=4, max_token_len=64, num_steps=last, save_checkpoint_interval=2)
with Feed(bridge, groups=2, run=run, run_dir=folder) as feed:
    signal.signal(signal.SIGTERM, lambda *_: feed.drain())
    if saved:
        feed.load_state(saved)
    version = feed.begin_run(step_number)
    while step_number < last:
        try:
            step = feed.take(60)
        except Drained:
            print("drained", flush=True)
            break
        model += [group.group_id for group in step.groups]
        time.sleep(0.02)
        step_number, version = step_number + 1, version + 1
        feed.trained(step, version=version)
        if step_number % 2 == 0 or step_number == last:
            new = folder / f"new-{os.getpid()}-{step_number}"
            new.mkdir()
            (new / "model.json").write_text(json.dumps(model))
            feed.save_state(new)
            new.rename(folder / f"step-{step_number}")
            feed.checkpointed()
