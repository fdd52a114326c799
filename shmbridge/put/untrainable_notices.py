"""Warnings in a producer's log, once each, about groups that a learner cannot train with as they are."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

log = logging.getLogger("shmbridge.producer")

_GREEDY = 1e-5  # below this, samplers take the likeliest token
_NO_MASK = (
    "has neither a mask nor prompt_length: learners train nothing of it -> write loss_mask, Atropos masks, "
    "or prompt_length"
)
_GREEDILY = (
    "was sampled at a temperature below 1e-5: its log-probabilities say nothing -> sample at the "
    "temperature that is trained"
)
_CUT = (
    "was sampled with top_p, top_k or min_p: learners' ratios to its log-probabilities are biased -> sample "
    "with top_p=1 alone"
)
_IMAGES = "has images, which the learner of shmbridge refuses -> see its option --ignore-images"


class PutNotices:
    """Checks each group that a producer puts. Never blocks, never raises; for the producer's thread."""

    def __init__(self, env_name: str) -> None:
        self._env_name = env_name
        self._said: set[str] = set()

    def look(self, group: Any, *, nulls: bool = True) -> None:
        """Logs notices about a group that `put` takes; `nulls=False`: no row of it is None."""
        if type(group) is not dict and not isinstance(group, Mapping):
            # Arrow: check only which columns there are, not their values.
            group = dict.fromkeys(group.schema.names, True)
        if (
            _lacks(group.get("loss_mask"), nulls)
            and _lacks(group.get("masks"), nulls)
            and _lacks(group.get("prompt_length"), nulls)
        ):
            self._say(_NO_MASK)
        if (
            "temperature" in group
            or "generation_params" in group
            or "overrides" in group
            or "group_overrides" in group
        ):
            self._look_at_sampling(group)
        if (
            "images" in group
            and _IMAGES not in self._said
            and any(_is_filled(row) for row in _rows(group["images"]))
        ):
            self._say(_IMAGES)

    def uneven(self, why: Mapping[str, str]) -> None:
        """Logs each column (with its rows and numbers) that does not fit the tokens."""
        for name, numbers in why.items():
            self._say(
                f"has a column {name!r} that learners leave out where it does not fit its tokens",
                f"; first here: {numbers}",
            )

    def _look_at_sampling(self, group: Mapping[str, Any]) -> None:
        if _GREEDILY not in self._said and any(
            _below(value, _GREEDY) for value in _settings(group, "temperature")
        ):
            self._say(_GREEDILY)
        if _CUT not in self._said and (
            any(_below(value, 1.0) for value in _settings(group, "top_p"))
            or any(_above(value, 0) for key in ("top_k", "min_p") for value in _settings(group, key))
        ):
            self._say(_CUT)

    def _say(self, what: str, details: str = "") -> None:
        if what not in self._said:
            self._said.add(what)
            log.warning("environment %s: a group %s%s; said once", self._env_name or "unnamed", what, details)


def _lacks(value: Any, nulls: bool) -> bool:
    """Returns whether some row has no value in a column."""
    if type(value) is list:
        return not value or (nulls and any(row is None for row in value))
    return value is None


def _rows(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else ()


def _is_filled(value: Any) -> bool:
    return value is not None and not (isinstance(value, (str, list, tuple, dict)) and len(value) == 0)


def _settings(group: Mapping[str, Any], key: str) -> Iterator[Any]:
    """Yields a group's values of a sampling setting, of its column and of all of Atropos' settings."""
    if key == "temperature" and (column := group.get(key)) is not None:
        yield from column.tolist() if hasattr(column, "tolist") else _rows(column)
    for settings in (
        group.get("generation_params"),
        group.get("group_overrides"),
        *_rows(group.get("overrides")),
    ):
        if isinstance(settings, Mapping):
            yield settings.get(key)


def _below(value: Any, bound: float) -> bool:
    return isinstance(value, (int, float)) and value < bound


def _above(value: Any, bound: float) -> bool:
    return isinstance(value, (int, float)) and value > bound
