"""The error of a step that cannot be computed: which step, what was saved, and what to change."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import suppress

import torch

from shmbridge.consumers.feed import lacks_memory
from shmbridge.consumers.learner.config.options import ComputeConfig
from shmbridge.consumers.learner.train.grpo_update import Learner


class BrokenStep(Exception):
    """A step could not be computed.

    Attributes:
        details: the traceback; "" if memory ran out.
    """

    details = ""


def broken_step(
    error: Exception, compute: ComputeConfig, learner: Learner, rescue: Callable[[], str]
) -> BrokenStep:
    """Saves what was trained and returns the error to report. Blocks for the disk.

    Args:
        error: the original exception; its frames in the computation are cleared.
        compute: of the configuration.
        learner: the learner that was training.
        rescue: saves, and returns what is on disk: `Saver.rescue`.
    """
    notes = getattr(error, "__notes__", [])
    what, step = "; ".join([(str(error).splitlines() or [""])[0], *notes]), learner.step + 1
    details = "" if lacks_memory(error) else "".join(traceback.format_exception(error))
    free_activations(error)
    for free in (learner.drop_gradient, torch.cuda.empty_cache):
        # a broken device raises at each call; report the first error
        with suppress(RuntimeError):
            free()
    saved = rescue()
    if lacks_memory(error):
        place = "the update" if not learner.consistent else "forward or backward"
        found = BrokenStep(
            f"out of memory in {place} of step {step}: {what}; {saved} -> {_lower(compute, learner)}, then "
            "--resume"
        )
    else:
        found = BrokenStep(
            f"step {step} broke off: {type(error).__name__}: {what}; {saved} -> the batch comes again with "
            "--resume"
        )
    found.details = details
    return found


def free_activations(error: Exception) -> None:
    """Clears the frames of the computation, which hold the activations.

    The calling frames still hold the batch; it is not released and is redelivered.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals is not Learner.accumulate.__globals__:
        trace = trace.tb_next
    traceback.clear_frames(trace)


def is_of_device(error: BaseException) -> bool:
    """Returns whether an error leaves the device useless for this process: every later call fails, too."""
    return not lacks_memory(error) and (
        "CUDA error" in str(error) or type(error).__name__ == "AcceleratorError"
    )


def _lower(compute: ComputeConfig, learner: Learner) -> str:
    """Returns the options that would save memory and are not in use yet."""
    if not learner.consistent:
        return "--param-dtype bfloat16, --lora-rank, or --parallel fsdp2 on more GPUs"
    now = learner.objective.micro_tokens  # halved, down to the longest row, in a run of one process
    ways = [f"lower --micro-tokens ({now} now)"] if now == compute.micro_tokens else []
    if not compute.gradient_checkpointing:
        ways.append("give --gradient-checkpointing")
    if compute.precision == "float32":
        ways.append("--precision bfloat16")
    ways = ways or ["--max-token-len with --leave-out-long-rows, or --param-dtype bfloat16"]
    return " or ".join([", ".join(ways[:-1]), ways[-1]] if len(ways) > 1 else ways)
