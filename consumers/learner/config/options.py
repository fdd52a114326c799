"""The options of the learner: kinds of values, its sections and the whole."""

from __future__ import annotations

import difflib
import math
import operator
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from shmbridge.config import check_bridge_name, plain, shown_value
from shmbridge.consumers.engines.engine import Pause

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_CONDITION = re.compile(r"\s*([^\s<>=]+)\s*(>=|<=|>|<)\s*(\S+)\s*")
_GOAL = re.compile(r"\s*([^\s:]+)\s*:\s*(max|min)\s*")
_LARGEST = sys.float_info.max
# Kinds of numbers. Errors say that a value is not <description>.
Positive = Annotated[int, Meta(ge=1, description="a whole number above 0")]
NotNegative = Annotated[int, Meta(ge=0, description="a whole number, 0 or above")]
Seed = Annotated[int, Meta(ge=0, lt=2**62, description="a whole number from 0 to 2**62 - 1")]
AboveZero = Annotated[float, Meta(gt=0.0, description="a number above 0")]
ZeroOrAbove = Annotated[float, Meta(ge=0.0, description="a number, 0 or above")]
Seconds = Annotated[float, Meta(gt=0.0, lt=1e6, description="a number of seconds above 0 and below 1000000")]
Rate = Annotated[float, Meta(ge=0.0, le=_LARGEST, description="a finite number, 0 or above")]
Finite = Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST, description="a finite number")]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0, description="a number from 0 to 1")]


def _address(text: str) -> None:
    if not text.startswith(("http://", "https://")):
        raise ValueError(f"{text!r} is not an address such as http://127.0.0.1:8000")


BridgeName = Annotated[str, check_bridge_name]
Address = Annotated[str, _address]  # a function checks the value, and raises ValueError
_PLAIN = {bool: "true or false", str: "a text", float: "a number"}
_ENTRY = re.compile(r"^    (\w+)(?: \(([^)]+)\))?: (.*(?:\n {8}.*)*)", re.MULTILINE)
Bounds = tuple[ZeroOrAbove, ZeroOrAbove]
# Schedules of the learning rate: those of transformers.SchedulerType that are functions of the step.
_Constant = Literal["constant", "constant_with_warmup"]
_Cosine = Literal["cosine", "cosine_with_restarts", "cosine_with_min_lr", "cosine_warmup_with_min_lr"]
Schedule = Literal["linear", _Constant, _Cosine, "polynomial", "inverse_sqrt", "warmup_stable_decay"]
Scheduler = Literal["fair", "atropos", "oldest"]
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Condition:
    """A metric compared with a number."""

    metric: str
    comparison: str
    bound: float

    def holds(self, value: float) -> bool:
        """Returns whether a value of the metric meets the condition."""
        return _COMPARISONS[self.comparison](value, self.bound)

    def __str__(self) -> str:
        return f"{self.metric}{self.comparison}{self.bound:g}"


@dataclass(frozen=True)
class Goal:
    """A metric to maximise or minimise."""

    metric: str
    largest: bool


def parse_condition(text: str) -> Condition:
    """Parses a condition such as reward_mean>=0.95. Raises ValueError."""
    if (found := _CONDITION.fullmatch(text)) is None:
        raise ValueError(f"{text!r} is not such as reward_mean>=0.95")
    try:
        bound = float(found[3])
    except ValueError:
        bound = math.nan
    if not math.isfinite(bound):
        raise ValueError(f"{text!r}: {found[3]} is not a finite number")
    return Condition(found[1], found[2], bound)


def parse_goal(text: str) -> Goal:
    """Parses a goal such as reward_mean:max. Raises ValueError."""
    if (found := _GOAL.fullmatch(text)) is None:
        raise ValueError(f"{text!r} is not such as reward_mean:max or loss:min")
    return Goal(found[1], found[2] == "max")


class Option:
    """A section's field as flags and files need it.

    Attributes:
        flag: of the command line; for a switch that is on by default, the flag turns it off.
        shape: "switch", "choice", "list", "pair" or "mapping"; any other value is a "value".
        item: the type of the value, or of each of several.
        default: MISSING for a required option.
    """

    def __init__(self, section: str, declared: Field[Any], hint: Any, metavar: str | None, text: str) -> None:
        self.section, self.name, self._hint = section, declared.name, hint
        default: Any = declared.default if declared.default_factory is MISSING else declared.default_factory()
        self.flag = f"--{'no-' if default is True else ''}{self.name.replace('_', '-')}"
        optional = get_origin(hint) in (Union, types.UnionType)  # the other type is None's
        kind = get_args(hint)[0] if optional else hint
        parts = get_args(kind)
        if kind is bool:
            self.shape, self.item = "switch", bool
        elif get_origin(kind) is Literal:
            self.shape, self.item = "choice", kind
        elif get_origin(kind) is tuple:
            self.shape, self.item = "list" if parts[1] is ... else "pair", parts[0]
        elif get_origin(kind) is Mapping:
            self.shape, self.item = "mapping", parts[1]
        else:
            self.shape, self.item = "value", kind
        self.default, self.metavar = default, metavar or ("N" if get_args(self.item)[:1] == (int,) else "X")
        self.help = text
        if (
            self.shape in ("choice", "value")
            and default not in (MISSING, None, "")
            and not text.endswith("]")
        ):
            self.help += f" [{default:g}]" if isinstance(default, float) else f" [{default}]"

    def one(self, value: object) -> Any:
        """Converts one value to its type. Raises ValueError that names the expected form."""
        return self._checked(value, self.item)

    def whole(self, value: object) -> Any:
        """Converts the option's whole value to its type. Raises ValueError that names the expected form."""
        return self._checked(value, self._hint)

    def _checked(self, value: object, hint: Any) -> Any:
        try:
            found = msgspec.convert(plain(value), hint)
        except msgspec.ValidationError:
            raise ValueError(f"{shown_value(value)} is not {self._wanted(hint)}") from None
        for check in (each for each in get_args(self.item) if isinstance(each, types.FunctionType)):
            for text in found if isinstance(found, tuple) else [] if found is None else [found]:
                check(text)
        return found

    def _wanted(self, hint: Any) -> str:
        if self.shape == "choice":
            return f"one of {', '.join(get_args(self.item))}"
        one = described(self.item)
        if hint is self.item:
            return one
        shapes = {
            "list": f"a list, each {one}",
            "pair": f"a list of two, each {one}",
            "mapping": f"a mapping from names, each to {one}",
        }
        return shapes.get(self.shape, one)


def described(kind: Any) -> str:
    """Returns a description of a type's values."""
    return next(
        (str(each.description) for each in get_args(kind) if isinstance(each, Meta)),
        _PLAIN.get((get_args(kind) or (kind,))[0], str(kind)),
    )


def options_of(section: str, kind: Any) -> Iterator[Option]:
    """Yields a section's options; its docstring has their help: `name (METAVAR): text [default in words]`."""
    hints, entries = get_type_hints(kind, include_extras=True), _ENTRY.findall(kind.__doc__ or "")
    texts = {name: (metavar, " ".join(text.split())) for name, metavar, text in entries}
    for each in fields(kind):
        yield Option(section, each, hints[each.name], *texts.get(each.name, ("", "")))


@dataclass(frozen=True)
class ObjectiveConfig:
    """The loss, its corrections, and what is not trained.

    loss: the loss of a token, and how losses are averaged over tokens: docs/reference/losses.md
    clip_low: clip the ratio below 1 - X [the loss's own; dapo: 0.2]
    clip_high: clip the ratio above 1 + X [the loss's own; dapo: 0.28]
    clip_dual: dual clip, of the clipped losses: a negative advantage gives no gradient where the ratio is
        above X; 0: no dual clip
    mask_ratio (LOW HIGH): do not train tokens whose ratio policy / sampler is outside [all are trained]
    mask_ratio_sequence (LOW HIGH): do not train completions whose ratio is outside, the geometric mean over
        their trained tokens [all are trained]
    mismatch_warn (NATS): warn when log-probabilities of sampler and policy differ by more than this, in the
        mean over tokens whose token_versions is the version being trained; 0: never
    max_answer_tokens: longest completion, by which dr_grpo divides [--max-token-len]
    tis_cap: truncated importance sampling: weight by min(policy / sampler, X) instead of a clipped ratio
        [off]
    tis_level: one weight of truncated importance sampling per token, or per sequence
    max_token_staleness (VERSIONS): do not train tokens that were sampled more policy versions ago than this
        [the ratio corrects for any]
    truncated: completions whose finish_reason is not stop: train them (keep); do not (mask); or also leave
        their scores out of their groups (drop)
    kl_coef: weight of the KL divergence from the reference
    kl_estimator: estimator of that divergence; the reference is ref_logprobs of the record, or else the model
        as it began
    entropy: weight of the entropy bonus, constant
    temperature: sampling temperature where the record does not say; recorded log-probabilities are taken to
        be those of the tempered distribution
    train_whole_rows: train all tokens, the prompt too, of trajectories with neither a mask nor prompt_length
        [they train nothing]
    ignore_images: train trajectories with images as text alone, instead of ending with an error
    leave_out_unknown_tokens: train nothing of trajectories with a token id that the model does not have,
        instead of ending with an error
    leave_out_long_rows: train nothing of trajectories that are longer than the model's positions or
        --max-token-len, instead of ending with an error
    sft_normalization: with --loss sft: normalise advantages over the trained tokens of this rank's batch, or
        of all ranks [batch]
    """

    loss: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "sft"] = "dapo"
    clip_low: ZeroOrAbove | None = None
    clip_high: ZeroOrAbove | None = None
    clip_dual: ZeroOrAbove = 3.0
    mask_ratio: Bounds | None = None
    mask_ratio_sequence: Bounds | None = None
    mismatch_warn: ZeroOrAbove = 0.05
    max_answer_tokens: Positive | None = None
    tis_cap: AboveZero | None = None
    tis_level: Literal["token", "sequence"] = "token"
    max_token_staleness: NotNegative | None = None
    truncated: Literal["keep", "mask", "drop"] = "keep"
    kl_coef: Rate = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy: Finite = 0.0
    temperature: AboveZero = 1.0
    train_whole_rows: bool = False
    ignore_images: bool = False
    leave_out_unknown_tokens: bool = False
    leave_out_long_rows: bool = False
    sft_normalization: Literal["none", "batch", "global"] | None = None


@dataclass(frozen=True)
class AdvantageConfig:
    """Where advantages come from.

    advantages: from the scores: less the group's mean and divided by its deviation (grpo); not divided
        (dr_grpo); less the mean of the group's others (rloo); or less the group's mean, then normalised over
        all trained tokens of all ranks (batch)
    use_advantages: on, advantages of environments are used; this flag takes all from the scores instead
    fallback_to_grpo: on, a group without advantages of its own gets them from its scores; this flag ends with
        an error instead
    clip_advantages (LOW HIGH): smallest and largest advantage [no bounds]
    process_rewards: step_rewards: a token gets those of its own step and all later ones, or of its own step
        alone
    process_over: normalise all step rewards of a group together, or the first of each row, the second of each
        row, ...
    process_discount: discount per step, for to_go
    process_weight: weight of step rewards; 1 - X goes to the outcome
    token_rewards: token_rewards: summed to-go, then normalised over the group's tokens, or over those of all
        ranks
    token_discount: discount per trained token
    token_weight: weight of token rewards; 1 - X goes to the advantages without them
    overlong_length: completions of this many tokens lose 1 of their score; takes --overlong-buffer [no limit]
    overlong_buffer: number of tokens before that length over which the loss of score grows from 0 to 1
    """

    advantages: Literal["grpo", "dr_grpo", "rloo", "batch"] = "grpo"
    use_advantages: bool = True
    fallback_to_grpo: bool = True
    clip_advantages: tuple[float, float] | None = None
    process_rewards: Literal["off", "to_go", "step"] = "off"
    process_over: Literal["group", "place"] = "group"
    process_discount: Fraction = 1.0
    process_weight: Fraction = 0.5
    token_rewards: Literal["off", "group", "batch"] = "off"
    token_discount: Fraction = 1.0
    token_weight: Fraction = 0.5
    overlong_length: Positive | None = None
    overlong_buffer: NotNegative = 0


@dataclass(frozen=True)
class OptimizerConfig:
    """The learning rate, its schedule, and AdamW.

    lr: peak learning rate of AdamW [1e-6]
    warmup: warm-up steps
    schedule: learning rate after the warm-up: linear to 0, or a schedule of transformers
    schedule_option (NAME=X): keyword of that schedule in transformers, such as min_lr_rate=0.1 for
        cosine_with_min_lr; may be repeated
    weight_decay: decoupled weight decay
    max_grad_norm: gradients are clipped to this norm
    """

    lr: Rate = 1e-6
    warmup: NotNegative = 10
    schedule: Schedule = "linear"
    schedule_option: Mapping[str, Finite] = field(default_factory=dict)
    weight_decay: Rate = 0.0
    max_grad_norm: AboveZero = 1.0


@dataclass(frozen=True)
class AdapterConfig:
    """Low-rank adapters (LoRA, by peft).

    lora_rank: train adapters of this rank only; weights are published merged [no adapters]
    lora_alpha: adapters are scaled by X / rank [twice the rank]
    lora_dropout: dropout in front of the adapters
    lora_targets (NAME,...): modules that get an adapter, by the ends of their names, such as q_proj,v_proj
        [every linear layer but the head]
    """

    lora_rank: Positive | None = None
    lora_alpha: AboveZero | None = None
    lora_dropout: Fraction = 0.0
    lora_targets: tuple[str, ...] = ("all-linear",)


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
    objective: ObjectiveConfig = ObjectiveConfig()  # frozen
    advantages: AdvantageConfig = AdvantageConfig()  # frozen
    optimizer: OptimizerConfig = OptimizerConfig()  # frozen
    adapters: AdapterConfig = AdapterConfig()  # frozen
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
