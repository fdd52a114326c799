"""TRL's GRPOTrainer as one process of a run that `shmbridge launch` starts: docs/how-to/trl.md has the file.

    python examples/trl_train.py BRIDGE MODEL FOLDER --steps 500

It goes on from the newest checkpoint in FOLDER. Started again before the first one, with --from-bridge, it
begins with the weights that it had published.
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

from shmbridge.consumers import load_published
from shmbridge.consumers.trl import ShmGRPOTrainer, Unsupported, shm_rollout_func
from shmbridge.consumers.weight_sync import WeightSync
from shmbridge.errors import NotReady

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name in ("bridge", "model", "folder"):
    parser.add_argument(name)
parser.add_argument("--steps", type=int, default=500, help="optimizer steps [500]")
parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints [50]")
parser.add_argument("--rows", type=int, default=32, help="rows of a step: whole groups [32]")
parser.add_argument("--group-size", type=int, default=8, help="rows of a group [8]")
parser.add_argument("--max-staleness", type=int, default=4, help="versions that groups may be old [4]")
parser.add_argument("--cpu", action="store_true", help="train on the CPU")
parser.add_argument(
    "--from-bridge", action="store_true", help="begin with the bridge's weights, if it has any"
)
options = parser.parse_args()

args = GRPOConfig(
    output_dir=options.folder,
    max_steps=options.steps,
    save_steps=options.save_every,
    per_device_train_batch_size=options.rows,
    num_generations=options.group_size,
    gradient_accumulation_steps=1,
    use_cpu=options.cpu,
    bf16=not options.cpu,
    report_to=[],
    logging_steps=1,
    disable_tqdm=True,
)
model, start = AutoModelForCausalLM.from_pretrained(options.model), None
if options.from_bridge:
    try:
        version = load_published(options.bridge, model)
        start = "from-bridge"
        print(f"begins with version {version} of the bridge, unless there is a checkpoint", flush=True)
    except NotReady:  # it was killed before it had published any
        pass
with (
    shm_rollout_func(options.bridge, max_staleness=options.max_staleness, start=start) as rollouts,
    WeightSync(options.bridge, []) as weights,
):
    trainer = ShmGRPOTrainer(
        model,
        args=args,
        rollout_func=rollouts,
        weights=weights,
        processing_class=AutoTokenizer.from_pretrained(options.model, padding_side="left"),
    )
    try:
        trainer.train(resume_from_checkpoint=True)
    except Unsupported:  # there is no checkpoint yet
        trainer.train()
