"""Checks for incompatible options before anything is loaded. `objective.py` has those of the objective."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shmbridge.consumers.learner import Refusal
from shmbridge.consumers.learner.config.options import ON_RESUME, OPTIONS, LearnerConfig

# option -> the flag it needs, with its values, and the values of that flag under which the option has no
# effect
_NEEDS: Mapping[str, tuple[str, tuple[object, ...]]] = {
    "--tis-level": ("--tis-cap", (None,)),
    "--clip-dual": ("--loss grpo, dr_grpo, dapo or gspo", ("cispo", "sft")),
    "--kl-estimator": ("--kl-coef", (0.0,)),
    "--max-answer-tokens": ("--loss dr_grpo", ("grpo", "dapo", "gspo", "cispo", "sft")),
    "--process-over": ("--process-rewards", ("off",)),
    "--process-weight": ("--process-rewards", ("off",)),
    "--process-discount": ("--process-rewards to_go", ("off", "step")),
    "--token-weight": ("--token-rewards", ("off",)),
    "--token-discount": ("--token-rewards", ("off",)),
    "--lora-alpha": ("--lora-rank", (None,)),
    "--lora-dropout": ("--lora-rank", (None,)),
    "--lora-targets": ("--lora-rank", (None,)),
    "--eval-every": ("--eval-hook", (None,)),
    "--stop-patience": ("--stop-when", (None,)),
    "--stop-stall": ("--stop-no-better", (None,)),
    "--wandb-name": ("--wandb", (False,)),
    "--pause": ("--engine", ((),)),
    "--engine-patience": ("--engine", ((),)),
}


# flag -> the flag that makes it ineffective, and why
_BESIDE: Mapping[str, tuple[str, str]] = {
    "--clip-dual": ("--tis-cap", "one update per batch leaves the ratio at 1, which no bound holds"),
    "--no-fallback-to-grpo": (
        "--no-use-advantages",
        "all advantages are made of the scores then, which is the fallback",
    ),
}
_NAMES = {each.flag: each.name for each in OPTIONS.values()}


class IdleOption(Refusal):
    """An option has no effect; the message says which, and why."""


class OtherRun(Refusal):
    """--resume was given options that are not those of its checkpoint; the message says which."""


class BadLimit(Refusal):
    """Incompatible limits; the message says which."""


def refuse_idle(config: LearnerConfig) -> None:
    """Refuses options without effect; those at their default are not checked.

    Raises:
        IdleOption: for the first one found.
    """
    for flag, (needs, without) in _NEEDS.items():
        if _given(flag, config) and config.value(_NAMES[needs.split()[0]]) in without:
            raise IdleOption(f"{flag} does nothing without {needs} -> give that too, or leave {flag} out")
    for flag, (other, why) in _BESIDE.items():
        if _given(flag, config) and _given(other, config):
            raise IdleOption(f"{flag} does nothing beside {other}: {why} -> leave one of them out")
    if config.checkpoints.from_bridge and config.checkpoints.from_scratch:
        raise IdleOption("--from-bridge and --from-scratch begin with other weights -> leave one of them out")
    if config.weights.engine and config.weights.no_weights:
        raise IdleOption("--engine takes weights, and --no-weights writes none -> leave one of them out")


def refuse_unreachable_limits(config: LearnerConfig) -> None:
    """Refuses limits on staleness that no group could meet.

    Raises:
        BadLimit: a limit on off-policy steps needs --policy oldest; or a limit is below the staleness of the
            newest samples just before the next version is published, so no group would ever pass.
    """
    staleness, every = config.staleness, config.weights.publish_every
    steps = staleness.max_off_policy_steps
    if steps is not None and staleness.scheduler != "oldest":
        raise BadLimit(
            f"--max-off-policy-steps {steps} needs the oldest groups first: leave --policy "
            f"{staleness.scheduler} out"
        )
    oldest = every - 1
    for name in ("max_staleness", "max_off_policy_steps", "max_token_staleness"):
        limit = config.value(name)
        if limit is not None and limit < oldest:
            flag = OPTIONS[name].flag
            raise BadLimit(
                f"with --publish-every {every} even the newest samples are {oldest} steps old before the "
                f"next version, and {flag} is {limit}: raise {flag} to {oldest}, or lower --publish-every "
                f"to {limit + 1}"
            )


def changes_on_resume(earlier: Mapping[str, object], config: LearnerConfig) -> list[str]:
    """Returns the options that change what is trained and differ from the run's earlier ones: flag and both
    values.

    Raises:
        OtherRun: an option differs that the checkpoint depends on.
    """
    changed = {
        name: f"--{name.replace('_', '-')} {_shown(earlier[name])} -> {_shown(config.value(name))}"
        for name, kind in ON_RESUME.items()
        if kind != "free" and name in earlier and not _same(name, earlier[name], config.value(name))
    }
    for name, change in changed.items():
        if ON_RESUME[name] == "refused":
            flag, before = OPTIONS[name].flag, _shown(earlier[name])
            again = f"leave {flag} out" if before == "none" else f"give {flag} {before} again"
            moved = f"; was the folder moved? write its new place into {config.run_dir}/config.yaml"
            raise OtherRun(
                f"--resume: the checkpoints in {config.run_dir} hold another model than these options train: "
                f"{change} -> {again}, or another --run-dir for a new run{moved * (name == 'model')}"
            )
    return list(changed.values())


def _same(name: str, earlier: object, now: object) -> bool:
    """Returns whether two values mean one thing; a model's folder may be written in several ways."""
    if name != "model" or earlier == now:
        return earlier == now
    one, other = Path(str(earlier)), Path(str(now))
    return one.exists() and other.exists() and one.resolve() == other.resolve()


def _shown(value: object) -> str:
    if value is None or value in ((), {}):
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _given(flag: str, config: LearnerConfig) -> bool:
    name = _NAMES[flag]
    return bool(config.value(name) != OPTIONS[name].default)
