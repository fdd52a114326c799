"""TRL's `GRPOTrainer` on a bridge: advantages per token, and the sampler's log-probabilities as old ones.

TRL 1.16 takes advantages of shape (B, T) from subclasses; this is one. `_generate_and_score_completions` is
TRL's own private method: a test holds its signature, and other releases are named by a warning.

**Released**: once a checkpoint contains the optimizer step with the last part of a generation batch; where
nothing is saved (`save_strategy="no"`), at that step's end (`on_step_end`), in every process. With
`gradient_accumulation_steps`, `steps_per_generation` or `num_iterations` above 1 a batch serves several parts
or steps; it is held until the last. A step that a gradient scaler skipped counts as one.

**Again after a kill**: what is not released, whole, `redelivered`; also a batch in the middle of which
`max_steps` ended training. Each checkpoint lists the groups that it contains (`shmbridge.json`), and these
are not trained again by a run that resumes from it.

**A step that fails** is noted before its exception ends training: a group at which steps failed twice is set
aside into `set_aside/` of `output_dir` when training is resumed, as `Feed` describes.

**Hub**: rank 0's process, one `shmbridge.Rank` in each process if there are several (DDP over accelerate).
Every process gets its share of each batch from shared memory; nothing of it goes through collectives. A
process that fails tells the hub which groups it had, before the others lose it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOConfig, GRPOTrainer

from shmbridge.consumers.feed import STATE, Refused, refuse, warn_if_untested
from shmbridge.consumers.trl.rollouts import ShmRollouts
from shmbridge.consumers.weight_sync import WeightSync, push_from_ranks

TESTED = ("trl", "1.16", "1.17")
_ROUNDS = 1024  # generation batches in an epoch of the placeholder data set, at least
REFUSED = (
    Refused("use_vllm", "it makes TRL sample, and here the environments do", "use_vllm=False"),
    Refused("eval_strategy", "an evaluation would need rollouts of its own prompts", "eval_strategy='no'",
            lambda value, args: value != "no"),
)  # fmt: skip


class Unsupported(ValueError):
    """An option of the trainer contradicts rollouts from a bridge; the message says which."""


def environment_scores(
    completions: list[Any], score: list[float | None] | None = None, **_: Any
) -> list[float | None]:
    """Returns the environments' own scores, for TRL's reward metrics; no advantage is made of them.

    A reward function of TRL; other ones get every column of the records as a keyword, too. None where a row
    has no score. Never blocks.
    """
    return [None] * len(completions) if score is None else score


def placeholder_prompts(args: GRPOConfig) -> Dataset:
    """Returns empty prompts, which only pace the steps: whole generation batches and whole optimizer steps.

    Never blocks.
    """
    every = args.steps_per_generation * args.num_iterations
    whole = args.gradient_accumulation_steps // math.gcd(args.gradient_accumulation_steps, every)
    rounds = math.ceil(_ROUNDS / whole) * whole
    return Dataset.from_dict({"prompt": [""] * (rounds * args.generation_batch_size // args.num_generations)})


class ShmGRPOTrainer(GRPOTrainer):
    """A GRPOTrainer whose generation batches come from a bridge.

    Also a mixin: `class Mine(ShmGRPOTrainer, MyGRPOTrainer)` if yours computes another loss.

    TRL's own normalisation of rewards (`scale_rewards`, `reward_weights`) reaches only its logs. `beta` above
    0 needs TRL's reference model, as ever. Generation options (`max_completion_length`, `top_p`, ...) have no
    effect on rollouts, but `loss_type="dr_grpo"` divides by `max_completion_length`.

    Args:
        model, args, processing_class, callbacks, ...: as for GRPOTrainer.
        reward_funcs: for metrics only; None: `environment_scores`.
        train_dataset: only paces steps; None: `placeholder_prompts`, which needs `args.max_steps`.
        rollout_func: `shm_rollout_func(...)`; opened here, closed by the caller.
        weights: where to push the weights of each version before it is published; None: nowhere. Given in
            rank 0's process alone is enough. Closed by the caller.
        publish_every: optimizer steps from one published version to the next; versions count all steps.

    Raises:
        Unsupported: an option contradicts rollouts from a bridge; nothing was opened.
        ConsumerTaken, RankTaken: the bridge has a consumer already.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        *more: Any,
        rollout_func: ShmRollouts,
        weights: WeightSync | None = None,
        publish_every: int = 1,
        **options: Any,
    ) -> None:
        warn_if_untested(*TESTED)
        if args is None:
            raise Unsupported("args=None -> GRPOConfig(max_steps=..., use_vllm=False, ...)")
        groups = _groups_of(args, rollout_func, options)
        if not isinstance(weights, WeightSync | None):
            raise Unsupported(f"weights={weights!r} -> WeightSync(bridge, url), or leave it out")
        if train_dataset is None:
            if args.max_steps <= 0:
                raise Unsupported(f"max_steps={args.max_steps} without a data set -> max_steps above 0")
            train_dataset = placeholder_prompts(args)
        super().__init__(
            model,
            environment_scores if reward_funcs is None else reward_funcs,
            args,
            train_dataset,
            *more,
            rollout_func=rollout_func,
            **options,
        )
        self.rollouts, self.weights, self.publish_every = rollout_func, weights, max(publish_every, 1)
        self._lift, self._pushes = 0, False  # added to TRL's step to make the policy version; any rank pushes
        processes = self.accelerator
        # TRL judges by a row's last token, which may be a tool's or of a chat template; the rollouts mask
        self.mask_truncated_completions = False
        rollout_func.join(
            self, rank=processes.process_index, world_size=processes.num_processes, groups=groups
        )
        self.add_callback(_BridgeSteps(self))

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Adds (B, T) advantages and old log-probabilities to what TRL makes of a generation batch."""
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        rows = self.rollouts.latest
        assert rows is not None
        width, device = output["completion_ids"].size(1), output["completion_ids"].device
        output["advantages"] = torch.from_numpy(rows.padded("advantages", width)).to(device)
        unscored = torch.from_numpy(rows.unscored).to(device)
        sampled = torch.from_numpy(rows.padded("logprobs", width)).to(device)
        own = self._own_logprobs(output, mixed=bool(rows.scored.any() and rows.unscored.any()))
        if own is not None:
            output["old_per_token_logps"] = torch.where(unscored[:, None], own, sampled)
        elif not unscored.any():
            output["old_per_token_logps"] = sampled
        return output

    def _own_logprobs(self, output: dict[str, Any], *, mixed: bool) -> torch.Tensor | None:
        """Returns the trained model's own log-probabilities (B, T) if some rows need them; None if none do.

        They are needed where only a part of the rows has the sampler's: without any, TRL takes those of the
        loss's own forward pass. All processes agree, because a sharded model's forward pass is a collective.
        """
        computed: torch.Tensor | None = output.get("old_per_token_logps")
        if computed is not None:
            return computed
        needed = torch.tensor(float(mixed), device=output["completion_ids"].device)
        if not self.accelerator.reduce(needed, reduction="sum"):
            return None
        prompts, completions = output["prompt_ids"], output["completion_ids"]
        with torch.no_grad():
            computed, _, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([prompts, completions], dim=1),
                torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
                completions.size(1),
                batch_size=self.args.per_device_train_batch_size,
            )
        return computed

    def train(self, resume_from_checkpoint: str | bool | None = None, *more: Any, **options: Any) -> Any:
        """As of Trainer. `resume_from_checkpoint=True` takes the newest checkpoint that was saved to its end.

        Raises BridgeAhead: the bridge was trained before, no checkpoint of that run is given, and `start=` of
        the rollouts does not say how to go on. Unsupported: the checkpoint was not saved to its end.
        """
        checkpoint = _checkpoint(resume_from_checkpoint, self.args.output_dir)
        if self.rollouts.begin(checkpoint):  # its generation batch comes again
            self._step, self._buffered_inputs = 0, None
        return super().train(checkpoint, *more, **options)

    def training_step(self, *inputs: Any, **more: Any) -> Any:
        """As of Trainer; counts the parts of a generation batch, and notes a step that fails."""
        try:
            output = super().training_step(*inputs, **more)
        except BaseException as error:
            self.rollouts.failed(error)
            raise
        self.rollouts.micro_step_done()
        return output

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As of Trainer, which writes its state last: a checkpoint with it is whole, and lists its groups."""
        folder = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        if (feed := self.rollouts.feed) is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
            feed.save_state(folder)
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()  # every process has written its part
        if feed is not None:
            feed.checkpointed()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As of Trainer, with `bridge/...` metrics."""
        super().log(logs | self.rollouts.metrics(), start_time)

    # -- what `_BridgeSteps` calls

    def begin_versions(self, step: int) -> None:
        """Publishes the version of the weights before the first step. Blocks for `weights`.

        A version that this bridge has seen is not given to other weights: versions go on above it.
        """
        pushes = torch.tensor(float(self.weights is not None), device=self.accelerator.device)
        self._pushes = bool(self.accelerator.reduce(pushes, reduction="sum"))
        if self.rollouts.is_hub:
            known = self.rollouts.policy_version
            if self.weights is not None and self.weights.version is not None:
                known = max(known, self.weights.version)
            self._lift = max(known + 1 - step, 0)
        self._publish(step)

    def end_step(self, step: int) -> None:
        """Ends what the step was the last for, and publishes its version. Blocks for `weights`."""
        self.rollouts.step_done()
        if step % self.publish_every == 0:
            self._publish(step)
        else:
            self.rollouts.publish(step + self._lift, to_environments=False)

    def _publish(self, step: int) -> None:
        """Every process calls it: together they gather the weights of a sharded model, and the hub pushes."""
        version = step + self._lift
        if self._pushes:
            whole = self.accelerator.unwrap_model(self.model)
            model = self.model_wrapped if self.is_fsdp_enabled else whole
            push_from_ranks(self.weights if self.rollouts.is_hub else None, model, version)
        self.rollouts.publish(version)


class _BridgeSteps(TrainerCallback):
    """Tells the trainer when its optimizer steps end."""

    def __init__(self, trainer: ShmGRPOTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer.begin_versions(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer.end_step(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer.accelerator.wait_for_everyone()  # every rank has told the hub what it is done with


def _checkpoint(asked: str | bool | None, folder: str) -> str | None:
    """Returns the checkpoint to go on from: the one asked for, or of True the newest of the folder.

    Raises Unsupported: it was not saved to its end, or none was.
    """
    if asked is None or asked is False:
        return None
    if asked is not True:
        if (Path(asked) / STATE).exists() and not _is_whole(Path(asked)):
            raise Unsupported(f"checkpoint {asked} was not saved to its end -> resume_from_checkpoint=True")
        return asked
    found = {each.name.rpartition("-")[2]: each for each in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*")}
    whole = [int(number) for number, each in found.items() if number.isdigit() and _is_whole(each)]
    if not whole:
        raise Unsupported(f"no checkpoint in {folder} was saved to its end -> train() starts a new run")
    return str(found[str(max(whole))])


def _is_whole(checkpoint: Path) -> bool:
    """Returns whether a save came to its end: the trainer's state is what it writes last."""
    try:
        return bool(json.loads((checkpoint / TRAINER_STATE_NAME).read_bytes()))
    except (OSError, ValueError):
        return False


def _groups_of(args: GRPOConfig, rollouts: Any, options: dict[str, Any]) -> int:
    """Returns the groups in a generation batch of one process; raises Unsupported."""
    if not isinstance(rollouts, ShmRollouts):
        raise Unsupported(f"rollout_func={rollouts!r} -> shm_rollout_func(bridge)")
    if rollouts.closed:
        raise Unsupported(
            "rollout_func= is closed -> make the trainer in the block of `with shm_rollout_func`"
        )
    refuse(REFUSED, args, Unsupported)
    for name in ("tools", "environment_factory", "eval_dataset"):
        if options.get(name) not in (None, []):
            raise Unsupported(f"{name}= is for rollouts of TRL's own -> leave it out")
    rows: int = args.per_device_train_batch_size * args.steps_per_generation
    if rows % args.num_generations:
        raise Unsupported(
            f"per_device_train_batch_size x steps_per_generation = {rows} rows in a process are no whole "
            f"groups of num_generations={args.num_generations} -> make them a multiple"
        )
    return int(rows // args.num_generations)
