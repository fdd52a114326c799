"""The learner's configuration: frozen sections of options, each with its type, its default and its help.

Names of sections and fields are the keys of a file. `--help` shows the docstrings: what stands for a value in
parentheses, the default in brackets where the value itself does not say enough.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_type_hints

import msgspec

from shmbridge.consumers.engines.engine import Pause
from shmbridge.consumers.learner.config.learning_options import (
    AdapterConfig,
    AdvantageConfig,
    ObjectiveConfig,
    OptimizerConfig,
)
from shmbridge.consumers.learner.config.metric_conditions import Condition, Goal, parse_condition, parse_goal
from shmbridge.consumers.learner.config.option import (
    AboveZero,
    Address,
    BridgeName,
    NotNegative,
    Option,
    Positive,
    Seconds,
    Seed,
    ZeroOrAbove,
    options_of,
)

Scheduler = Literal["fair", "atropos", "oldest"]
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class RunConfig:
    """What is trained, and for how many steps.

    bridge (NAME): the bridge whose hub the learner is
    model (DIR_OR_ID): folder of the model, or its Hugging Face id
    steps: optimizer steps of the whole run
    seed: random seed of the learner
    """

    bridge: BridgeName
    model: str
    steps: Positive
    seed: Seed = 0


@dataclass(frozen=True)
class CheckpointConfig:
    """The run directory, and what is saved there.

    run_dir (DIR): folder for config.yaml, metrics.jsonl and checkpoints/ [runs/<bridge>]
    resume: continue from the newest checkpoint of the run directory. Without one a bridge that has trained
        weights is refused; on any other a new run starts
    from_bridge: begin a run with the weights of the bridge's newest version; the optimizer, the schedule and
        the step count are new. With --resume: where there is no checkpoint
    from_scratch: begin a run from --model, whatever the bridge has. With --resume: where there is no
        checkpoint
    save_every: steps between checkpoints
    keep: how many of the newest checkpoints to keep
    release_at: release groups once their step is trained, or once a checkpoint has it: lanes need room for
        --save-every steps [checkpoint, but early, and said, in full lanes]
    hold_until_saved: --release-at checkpoint
    record (DIR): write every record into Parquet files there before it is trained with
    on_full_disk: of --record: end with an error, or stop recording and train on
    """

    run_dir: str | None = None
    resume: bool = False
    from_bridge: bool = False
    from_scratch: bool = False
    save_every: Positive = 50
    keep: Positive = 2
    release_at: Literal["step", "checkpoint"] | None = None
    hold_until_saved: bool = False
    record: str | None = None
    on_full_disk: Literal["stop", "skip"] = "stop"


@dataclass(frozen=True)
class BatchConfig:
    """The size of batches, and how they are formed.

    groups: trajectory groups of a batch
    group_size: trajectories per group, for the registration
    accumulate: batches of --groups groups per optimizer step: the gradient is that of all their groups, and
        all are held until the step is done
    set_aside_after: failures of a step after which its groups are tried in halves, and the one at fault goes
        into set_aside/ of the run directory; 0 ends the run instead. With several ranks a failure ends the
        run, too, and counts for the next --resume
    lanes: environments to take from at once; more wait for a free lane [as many as descriptors allow, 1024 at
        most]
    allocation_wait (SECONDS): with --policy fair: how long a batch waits for an environment that is promised
        a part of it
    prefetch: batches formed, or copied to the device, ahead of time
    host_copy: how tokens reach the device: as a batch gathered in host memory, or straight from the ring, on
        a stream of their own; auto is batch: both take a few ms of a step
    """

    groups: Positive = 16
    group_size: Positive = 8
    accumulate: Positive = 1
    set_aside_after: NotNegative = 2
    lanes: Positive | None = None
    allocation_wait: ZeroOrAbove = 10.0
    prefetch: Positive = 1
    host_copy: Literal["batch", "direct", "auto"] = "auto"


@dataclass(frozen=True)
class StalenessConfig:
    """How old groups may be, and which come first.

    max_staleness (VERSIONS): discard groups more than this many policy versions old; versions count steps
        [no limit, or --max-off-policy-steps]
    max_off_policy_steps (STEPS): environments that ask for tickets begin no group that would be trained more
        than this many steps later; takes --policy oldest [no limit]
    policy: how batches are formed: fair between environments; as the Atropos server does, where a step has
        --groups x --group-size trajectories; or the oldest policy version first [fair, or oldest with
        --max-off-policy-steps]
    """

    max_staleness: NotNegative | None = None
    max_off_policy_steps: NotNegative | None = None
    policy: Scheduler | None = None

    @property
    def scheduler(self) -> Scheduler:
        """How batches are formed, whether that is given or not."""
        return self.policy or ("fair" if self.max_off_policy_steps is None else "oldest")


@dataclass(frozen=True)
class WaitingConfig:
    """How long to wait for a batch: for ever, if none of these is given.

    batch_timeout (SECONDS): seconds per attempt [30 if another of these is given]
    batch_attempts: attempts before the learner gives up [10 if another of these is given]
    batch_retry_delay (SECONDS): delay after the first attempt; each later delay is 1.5 times as long, up to 3
        s. A batch that comes during a delay is taken [0.5 if another of these is given]
    max_wait_time (SECONDS): longest wait for one batch, over all attempts [no limit]
    """

    batch_timeout: AboveZero | None = None
    batch_attempts: Positive | None = None
    batch_retry_delay: ZeroOrAbove | None = None
    max_wait_time: AboveZero | None = None


@dataclass(frozen=True)
class ComputeConfig:
    """Where and how to compute.

    device: where to compute; auto is cuda if there is any
    threads: CPU threads; 0: torch's choice
    precision: of the forward pass and of the published weights; see --param-dtype
    param_dtype: of the parameters; under bfloat16 the optimizer keeps float32 masters, and adapters stay
        float32
    micro_tokens: tokens of one forward pass, padding included
    batch_layout: rows padded to rectangles, or packed one after the other without padding; auto packs for
        every model that is seen to keep packed rows apart without a mask
    chunk_tokens: trained tokens whose logits exist at a time; 0: all of a forward pass [256 MiB of
        logits, all if they take less than 1 GiB]
    gradient_checkpointing: compute activations again in the backward pass: less memory, a third slower
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: NotNegative = 0
    precision: Dtype = "float32"
    param_dtype: Dtype = "float32"
    micro_tokens: Positive = 8192
    batch_layout: Literal["padded", "packed", "auto"] = "auto"
    chunk_tokens: NotNegative | None = None
    gradient_checkpointing: bool = False


@dataclass(frozen=True)
class RankConfig:
    """Several devices: torchrun starts one process for each.

    parallel: ddp: every rank has the whole model; fsdp2: a shard of each tensor
    process_group_timeout (SECONDS): how long ranks wait for a silent one before they end
    """

    parallel: Literal["ddp", "fsdp2"] = "ddp"
    process_group_timeout: Seconds = 600.0


@dataclass(frozen=True)
class WeightsConfig:
    """Publishing of weights, and engines to bring to each version.

    Those that follow the bridge by themselves need no --engine.

    no_weights: publish versions but no weights
    publish_every: optimizer steps between two versions, for all engines; the last step always makes one
    engine (URL): bring this server to every version while the learner waits for its next batch: vLLM, SGLang,
        or one that follows the bridge; may be repeated
    pause: requests in flight: continue them under the new weights (keep), wait for them, or abort them
    engine_patience (SECONDS): end the learner when every push to an engine has failed for this long
    """

    no_weights: bool = False
    publish_every: Positive = 1
    engine: tuple[Address, ...] = ()
    pause: Pause = "keep"
    engine_patience: Seconds = 600.0


@dataclass(frozen=True)
class RegistrationConfig:
    """Settings announced to environments.

    max_token_len: longest trajectory, in tokens
    wandb_project (NAME): W&B project of environments that log, and of the learner's own run
    wandb_group (NAME): W&B group of environments that log, and of the learner's own run
    """

    max_token_len: Positive = 2048
    wandb_project: str = ""
    wandb_group: str = ""


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation beside training. Groups that environments put for it are scored and never trained.

    eval_hook (MODULE:FUNCTION): call function(step, model, tokenizer); the numbers by name that it returns
        are logged as eval/<name>
    eval_every: steps between two calls
    """

    eval_hook: str | None = None
    eval_every: Positive = 50


@dataclass(frozen=True)
class EarlyStopConfig:
    """When to end before the last step, with exit status 0.

    stop_when (METRIC>=X): end once a metric satisfies this, such as reward_mean>=0.95
    stop_patience: number of consecutive steps that must satisfy it
    stop_no_better (METRIC:max|min): end once this metric has not improved in --stop-stall steps
    stop_stall: number of steps with that metric and without improvement
    """

    stop_when: Annotated[str, parse_condition] | None = None
    stop_patience: Positive = 1
    stop_no_better: Annotated[str, parse_goal] | None = None
    stop_stall: Positive = 100

    @property
    def condition(self) -> Condition | None:
        """The parsed `stop_when`."""
        return None if self.stop_when is None else parse_condition(self.stop_when)

    @property
    def goal(self) -> Goal | None:
        """The parsed `stop_no_better`."""
        return None if self.stop_no_better is None else parse_goal(self.stop_no_better)


@dataclass(frozen=True)
class LoggingConfig:
    """Where each step's metrics go.

    log_every: steps between progress lines
    progress: a bar instead of lines, where standard error is a terminal
    sample_every: steps between samples of trained groups in samples.jsonl, for shmbridge report and W&B; 0:
        no samples
    tensorboard: log every step's metrics for TensorBoard, into tensorboard/ of the run directory
    wandb: log every step's metrics to a W&B run, in the project and group of the registration
    wandb_name (NAME): name of that run [the bridge's]
    """

    log_every: Positive = 1
    progress: bool = False
    sample_every: NotNegative = 10
    tensorboard: bool = False
    wandb: bool = False
    wandb_name: str = ""


@dataclass(frozen=True)
class LearnerConfig:
    """All options of the learner."""

    run: RunConfig
    checkpoints: CheckpointConfig = CheckpointConfig()
    batch: BatchConfig = BatchConfig()
    staleness: StalenessConfig = StalenessConfig()
    waiting: WaitingConfig = WaitingConfig()
    objective: ObjectiveConfig = ObjectiveConfig()  # noqa: RUF009  # frozen
    advantages: AdvantageConfig = AdvantageConfig()  # noqa: RUF009  # frozen
    optimizer: OptimizerConfig = OptimizerConfig()  # noqa: RUF009  # frozen
    adapters: AdapterConfig = AdapterConfig()  # noqa: RUF009  # frozen
    compute: ComputeConfig = ComputeConfig()
    ranks: RankConfig = RankConfig()
    weights: WeightsConfig = WeightsConfig()
    registration: RegistrationConfig = RegistrationConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    early_stop: EarlyStopConfig = EarlyStopConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def run_dir(self) -> Path:
        """The folder of this run."""
        return Path(self.checkpoints.run_dir or Path("runs") / self.run.bridge)

    @property
    def holds_until_saved(self) -> bool:
        """Whether the user asks to hold all groups until a checkpoint contains them."""
        return self.checkpoints.hold_until_saved or self.checkpoints.release_at == "checkpoint"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> LearnerConfig:
        """Returns the configuration with these values of options, by name, and defaults for the rest."""
        given: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        for name, value in values.items():
            given[OPTIONS[name].section][name] = value
        return cls(**{section: kind(**given[section]) for section, kind in SECTIONS.items()})

    def value(self, name: str) -> Any:
        """Returns an option's value by the option's name."""
        return getattr(getattr(self, OPTIONS[name].section), name)

    def document(self) -> dict[str, dict[str, Any]]:
        """Returns all of it as plain mappings, lists, numbers and texts."""
        return cast(dict[str, dict[str, Any]], msgspec.to_builtins(self))


SECTIONS: dict[str, Any] = get_type_hints(LearnerConfig)
OPTIONS = {each.name: each for section, kind in SECTIONS.items() for each in options_of(section, kind)}
OnResume = Literal["free", "reported", "refused"]
# What --resume does with an option that differs from config.yaml: nothing, since it changes nothing that is
# trained; prints and notes both values; or ends, since the checkpoint is of the earlier value alone.
_ON_RESUME: Mapping[OnResume, str] = {
    "free": """
        run_dir resume from_bridge from_scratch save_every keep release_at hold_until_saved set_aside_after
        record on_full_disk lanes allocation_wait prefetch host_copy batch_timeout batch_attempts
        batch_retry_delay max_wait_time mismatch_warn device threads micro_tokens batch_layout chunk_tokens
        gradient_checkpointing parallel process_group_timeout engine engine_patience wandb_project
        wandb_group eval_hook eval_every stop_when stop_patience stop_no_better stop_stall log_every progress
        sample_every tensorboard wandb wandb_name
    """,
    "reported": """
        bridge steps seed groups group_size accumulate max_staleness max_off_policy_steps policy loss
        clip_low clip_high clip_dual mask_ratio mask_ratio_sequence max_answer_tokens tis_cap tis_level
        max_token_staleness truncated kl_coef kl_estimator entropy temperature train_whole_rows ignore_images
        leave_out_unknown_tokens leave_out_long_rows sft_normalization advantages use_advantages
        fallback_to_grpo clip_advantages process_rewards process_over process_discount process_weight
        token_rewards token_discount token_weight overlong_length overlong_buffer lr warmup schedule
        schedule_option weight_decay max_grad_norm precision no_weights publish_every pause max_token_len
    """,
    "refused": "model lora_rank lora_alpha lora_dropout lora_targets param_dtype",
}
ON_RESUME = {name: what for what, names in _ON_RESUME.items() for name in names.split()}
# What other trainers call some of them, for "did you mean".
_ALSO = {
    "learning_rate": "lr",
    "batch_size": "groups",
    "num_generations": "group_size",
    "gradient_accumulation_steps": "accumulate",
    "kl_beta": "kl_coef",
    "entropy_coef": "entropy",
    "epsilon_high": "clip_high",
    "epsilon_low": "clip_low",
    "max_completion_length": "max_answer_tokens",
    "warmup_steps": "warmup",
    "lr_scheduler_type": "schedule",
    "grad_clip": "max_grad_norm",
    "lora_r": "lora_rank",
    "max_steps": "steps",
    "save_steps": "save_every",
    "output_dir": "run_dir",
    "use_advantage_weighting": "loss",  # of verl's recipe: --loss sft is cross-entropy times advantage
    "advantage_normalization": "sft_normalization",
    "advantage_clipping": "clip_advantages",
}


def meant(name: str) -> Option | None:
    """Returns the option that was probably meant by a name that is none; None if it is like no other."""
    known = {each: each for each in OPTIONS} | _ALSO
    close = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    return OPTIONS[known[close[0]]] if close else None
