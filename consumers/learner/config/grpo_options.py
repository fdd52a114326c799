"""The command line of the GRPO learner: its flags, in groups, with their defaults.

Knows nothing of torch. Called by `grpo.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from shmbridge.consumers.learner.config.compute_options import add_compute
from shmbridge.consumers.learner.config.engine_options import add_engines
from shmbridge.consumers.learner.config.evaluation_options import add_evaluation
from shmbridge.consumers.learner.config.logging_options import add_logging
from shmbridge.consumers.learner.config.objective_options import add_objective
from shmbridge.consumers.learner.config.optimizer_options import add_optimizer
from shmbridge.consumers.learner.config.option_types import above_zero, positive, seed, zero_or_above
from shmbridge.consumers.learner.config.rank_options import add_rank_options
from shmbridge.consumers.learner.config.staleness_options import add_staleness

_EXAMPLES = """\
examples:
  # a small random model on the CPU, against environments that send 8 answers per prompt
  python -m shmbridge.consumers.grpo --bridge demo --model ./tiny --steps 400 --groups 16 --group-size 8 \\
      --lr 2e-3 --entropy 0.1 --device cpu --threads 1

  # a pretrained model on a GPU; batches at most four versions old; weights leave as bfloat16
  python -m shmbridge.consumers.grpo --bridge run1 --model Qwen/Qwen2.5-1.5B-Instruct --steps 500 \\
      --groups 64 --lr 1e-6 --max-staleness 4 --precision bfloat16 --gradient-checkpointing

  # go on after a crash, from the newest checkpoint of the run directory (a fresh start if there is none)
  python -m shmbridge.consumers.grpo --bridge run1 --model Qwen/Qwen2.5-1.5B-Instruct --steps 500 --resume

  # the limits of the Atropos recipe for verl: 10 attempts of 30 s for a batch, but 30 s in all; advantages
  # wanted
  python -m shmbridge.consumers.grpo --bridge run1 --model Qwen/Qwen2.5-1.5B-Instruct --steps 500 \\
      --batch-timeout 30 --batch-attempts 10 --batch-retry-delay 0.5 --max-wait-time 30 --no-fallback-to-grpo

  # four GPUs of this machine, one process for each; a part of each tensor on each
  torchrun --standalone --nproc-per-node 4 -m shmbridge.consumers.grpo --bridge run1 \\
      --model Qwen/Qwen2.5-7B-Instruct --steps 500 --groups 64 --precision bfloat16 --parallel fsdp2

  # adapters on a model in bfloat16, four batches a step, a cosine that ends at a tenth; stop when it is good
  python -m shmbridge.consumers.grpo --bridge run1 --model Qwen/Qwen2.5-7B-Instruct --steps 500 \\
      --lora-rank 16 --param-dtype bfloat16 --precision bfloat16 --lr 1e-5 --accumulate 4 \\
      --schedule cosine_with_min_lr --schedule-option min_lr_rate=0.1 \\
      --stop-when 'reward_mean>=0.95' --stop-patience 5 --tensorboard

  # two vLLM servers, started with VLLM_SERVER_DEV_MODE=1, get every second version; what they are generating
  # goes on
  python -m shmbridge.consumers.grpo --bridge run1 --model Qwen/Qwen2.5-1.5B-Instruct --steps 500 \\
      --precision bfloat16 --engine http://127.0.0.1:8000 --engine http://127.0.0.1:8001 \\
      --pause keep --publish-every 2

exit status: 0 all steps done, stopped early, or the bridge was drained; 1 refused to start, or a group had
no advantages under --no-fallback-to-grpo; 3 no batch came within the limits; 4 another rank is gone; 5 a step
could not be computed, for want of memory or by an error; 130 or 143 stopped by SIGINT or SIGTERM. The
unfinished batch goes to the next learner, finished steps are saved.
"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of `python -m shmbridge.consumers.grpo`."""
    root = argparse.ArgumentParser(
        prog="python -m shmbridge.consumers.grpo",
        description="Train a causal language model with GRPO on the trajectory groups of a bridge.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("--bridge", required=True, metavar="NAME", help="bridge to be the hub of")
    root.add_argument("--model", required=True, metavar="DIR_OR_ID", help="model folder or Hugging Face id")
    root.add_argument(
        "--steps", type=positive, metavar="N", required=True, help="optimizer steps of the whole run"
    )
    _run(root.add_argument_group("run directory"))
    _batch(root.add_argument_group("batch"))
    add_staleness(root)
    _waiting(root.add_argument_group("waiting for a batch (for ever, if none of these is given)"))
    add_objective(root)
    add_optimizer(root)
    add_compute(root.add_argument_group("compute"))
    add_rank_options(root)
    add_engines(root)
    _registration(root.add_argument_group("registration (what environments are told)"))
    add_evaluation(root)
    add_logging(root)
    return root


def _run(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="metrics.jsonl and checkpoints/ [runs/<bridge>]"
    )
    group.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    group.add_argument(
        "--save-every", type=positive, metavar="N", default=50, help="steps between checkpoints [50]"
    )
    group.add_argument("--keep", type=positive, metavar="N", default=2, help="newest checkpoints to keep [2]")
    group.add_argument(
        "--hold-until-saved",
        action="store_true",
        help="hold every group until a checkpoint has it: a killed run loses none, and lanes must have room "
        "for --save-every steps",
    )
    group.add_argument("--seed", type=seed, metavar="N", default=0, help="random seed of the learner [0]")


def _batch(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--groups", type=positive, metavar="N", default=16, help="trajectory groups of a batch [16]"
    )
    group.add_argument(
        "--group-size",
        type=positive,
        metavar="N",
        default=8,
        help="trajectories per group, for the registration [8]",
    )
    group.add_argument(
        "--lanes",
        type=positive,
        metavar="N",
        help="environments to take from at once; more wait for their turn [as many as descriptors allow, "
        "1024 at most]",
    )
    group.add_argument(
        "--allocation-wait",
        type=zero_or_above,
        metavar="SECONDS",
        default=10.0,
        help="under fair, hold a batch back so long for an environment that is promised a part of it [10]",
    )


def _waiting(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--batch-timeout", type=above_zero, metavar="SECONDS", help="of one attempt [30 if others are given]"
    )
    group.add_argument(
        "--batch-attempts", type=positive, metavar="N", help="then give up [10 if others are given]"
    )
    group.add_argument(
        "--batch-retry-delay",
        type=zero_or_above,
        metavar="SECONDS",
        help="after the first attempt, then 1.5 times as long each time up to 3 s; a batch that comes "
        "meanwhile is taken [0.5 if others are given]",
    )
    group.add_argument(
        "--max-wait-time",
        type=above_zero,
        metavar="SECONDS",
        help="for one batch, over all attempts [no limit]",
    )


def _registration(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-token-len", type=positive, metavar="N", default=2048, help="of one trajectory [2048]"
    )
    group.add_argument("--wandb-project", default="", help="passed on to environments that log")
    group.add_argument("--wandb-group", default="", help="passed on to environments that log")
