"""What an episode of an Atropos environment is worth: `collect`, its `Score`, and whose row is which."""

from __future__ import annotations

import contextvars
import math
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shmbridge.producers.gem.turns import EnvFailed, Spoken, without_thoughts

_MASKED = -100

# How a row fits a sibling, the surest first: it is the conversation, token by token; it begins with it;
# trained are the tokens of all answers, or of the last one; the text of all, or of the last one.
# That an answer stands somewhere in a row says nothing.
Fit = tuple[bool, ...]
_BY_TRAINED = range(2, 6)
Pairs = set[tuple[int, int]]  # of siblings and rows

Group = dict[str, Any]
RewardBridge = Callable[[Group], Awaitable[Mapping[str, Any]]]
RewardOf = Callable[[Sequence[Group]], float]
_OF_THE_GROUP = ("group_overrides", "generation_params")  # not one value per row
# The ScoredDataGroups that the environment has made in this episode, in its order.
_made: contextvars.ContextVar[list[Group]] = contextvars.ContextVar("shmbridge_gem_groups")


def rows_of(
    group: Mapping[str, Any], siblings: Sequence[Spoken], tokenizer: Any, worth: Sequence[Any]
) -> list[int | EnvFailed | None]:
    """Returns each sibling's row of a group in any order; None: it has none; EnvFailed: it cannot be told.

    A row is the sibling's that it fits best. Where several rows fit several siblings, what is left over by
    all others decides. Siblings that said the same in the same conversation have its rows in any order.

    Args:
        group: of the environment.
        siblings: what each was asked last, and said.
        tokenizer: the environment's.
        worth: of each row, such as its scores; rows of equal worth need not be told apart.
    """
    rows = [_row(*each, tokenizer) for each in zip(group["tokens"], group["masks"], strict=True)]
    fits: dict[tuple[int, int], Fit] = {}
    for at, spoken in enumerate(siblings):
        of = _Sibling(spoken, tokenizer)
        fits |= {(at, number): fit for number, row in enumerate(rows) if any(fit := of.fit(row))}
    fits = _in_all_rows(fits, rows)
    found: dict[int, int] = {}
    unsure: Pairs = set()
    for best in sorted(set(fits.values()), reverse=True):
        ats = {*found, *(at for at, _ in unsure)}
        taken = {*found.values(), *(row for _, row in unsure)}
        pairs = {
            (at, row) for (at, row), fit in fits.items() if fit == best and at not in ats and row not in taken
        }
        for part in _parts(pairs):
            sure, rest = _told_apart(part, len(rows) >= len(siblings), siblings, worth)
            found |= sure
            unsure |= rest
    free = len(rows) - len(found)  # while a row is unassigned, no sibling counts as left out
    return [found[at] if at in found else _unsure(free, len(rows)) for at in range(len(siblings))]


def _in_all_rows(fits: Mapping[tuple[int, int], Fit], rows: Sequence[_Row]) -> dict[tuple[int, int], Fit]:
    """Returns the fits without those that may be chance: all rows of a group are trained in the same way."""
    surely = {row for (_, row), fit in fits.items() if any(fit[:2])}
    for by in _BY_TRAINED:
        fit_so = {row for (_, row), fit in fits.items() if fit[by]}
        if any(row.trained_text and at not in surely | fit_so for at, row in enumerate(rows)):
            fits = {pair: (*fit[:by], False, *fit[by + 1 :]) for pair, fit in fits.items()}
    # All answers of one sibling may be the last one of another: neither is surer.
    merged = {pair: (*fit[:2], fit[2] or fit[3], fit[4] or fit[5]) for pair, fit in fits.items()}
    return {pair: fit for pair, fit in merged.items() if any(fit)}


def _unsure(free: int, rows: int) -> EnvFailed | None:
    if free == 0:
        return None
    return EnvFailed(
        f"cannot tell siblings apart: {free} of {rows} rows of the environment's group fit more than one of "
        "them, or none",
        hint="the rows do not have the conversations as they were; group_size=1 plays each alone",
    )


@dataclass(frozen=True)
class _Row:
    """One row, as a sibling is told by it."""

    tokens: list[int]
    trained: list[int]
    trained_text: str


def _row(tokens: Sequence[int], masks: Sequence[int], tokenizer: Any) -> _Row:
    whole = [int(token) for token in tokens]
    trained = [token for token, mask in zip(whole, masks, strict=False) if mask != _MASKED]
    return _Row(whole, trained, _squeezed(tokenizer.decode(trained, skip_special_tokens=True)))


class _Sibling:
    """What a row of a sibling's is, or ends with."""

    def __init__(self, spoken: Spoken, tokenizer: Any) -> None:
        self._whole: list[list[int]] = []
        self._cut: list[list[int]] = []  # the same without an end token
        self._tokens: list[list[int]] = []  # of all answers, of the last one
        self._texts: list[list[str]] = []  # the same, with thoughts and without
        answers, asked = spoken.answers, spoken.request
        if not answers or asked is None:
            return
        last = answers[-1]
        if asked.token_ids is not None and last.token_ids is not None:
            self._whole.append([*asked.token_ids, *last.token_ids])
        if asked.messages is not None:
            chat = [*asked.messages, {"role": "assistant", "content": last.text}]
            with suppress(Exception):  # a template may refuse messages
                self._whole.append([int(each) for each in tokenizer.apply_chat_template(chat)])
        elif asked.prompt is not None:
            self._whole.append(list(tokenizer.encode(asked.prompt + last.text)))
        all_tokens = [token for each in answers for token in each.token_ids or ()]
        self._tokens = [all_tokens, list(last.token_ids or ())]
        for part in (answers, [last]):
            texts = [
                "".join(each.text for each in part),
                "".join(without_thoughts(each.text) for each in part),
            ]
            self._texts.append([_squeezed(text) for text in texts])
        end = tokenizer.eos_token_id
        self._cut = [each[:-1] for each in self._whole if each[-1:] == [end]]

    def fit(self, row: _Row) -> Fit:
        """Returns how a row fits; all False: not at all."""
        return (
            row.tokens in self._whole or row.tokens in self._cut,
            any(row.tokens[: len(each)] == each for each in self._whole),
            *(bool(row.trained) and row.trained == each for each in self._tokens or (None, None)),
            *(bool(row.trained_text) and row.trained_text in each for each in self._texts or ((), ())),
        )


def _told_apart(
    pairs: Pairs, none_left_out: bool, siblings: Sequence[Spoken], worth: Sequence[Any]
) -> tuple[dict[int, int], Pairs]:
    """Returns whose row is certain, of connected pairs that fit equally well, and the pairs that are not."""
    ats, rows = {at for at, _ in pairs}, {row for _, row in pairs}
    found: dict[int, int] = {}
    unsure: Pairs = set()
    rest = pairs
    while True:
        sure: Pairs = set()
        if len(rows) <= len(ats):  # each row has an owner
            sure = _only(rest)
        if not sure and none_left_out and len(ats) <= len(rows):
            sure = {(at, row) for row, at in _only({(row, at) for at, row in rest})}
        if not sure:
            break
        found |= dict(sure)
        rest = {(at, row) for at, row in rest if at not in found and row not in found.values()}
    for part in _parts(rest):
        paired = _paired(part)
        its_ats, its_rows = {at for at, _ in part}, {row for _, row in part}
        all_same = all(siblings[at].conversation == siblings[min(its_ats)].conversation for at in its_ats)
        same_worth = all(worth[row] == worth[min(its_rows)] for row in its_rows)
        if (all_same and len(paired) == len(its_rows)) or (same_worth and len(paired) == len(its_ats)):
            found |= paired
        else:
            unsure |= part
    return found, unsure


def _only(pairs: Pairs) -> Pairs:
    """Returns the pairs whose second occurs once, where the first has one such second."""
    times = Counter(second for _, second in pairs)
    single = [pair for pair in pairs if times[pair[1]] == 1]
    firsts = Counter(first for first, _ in single)
    return {pair for pair in single if firsts[pair[0]] == 1}


def _paired(pairs: Pairs) -> dict[int, int]:
    """Returns a row for as many siblings as can have one at the same time."""
    owner: dict[int, int] = {}

    def placed(at: int, seen: set[int]) -> bool:
        for row in sorted(row for each, row in pairs if each == at):
            if row not in seen:
                seen.add(row)
                if row not in owner or placed(owner[row], seen):
                    owner[row] = at
                    return True
        return False

    for at in sorted({at for at, _ in pairs}):
        placed(at, set())
    return {at: row for row, at in owner.items()}


def _parts(pairs: Pairs) -> list[Pairs]:
    """Returns the pairs that are connected with each other."""
    parts: list[Pairs] = []
    rest = set(pairs)
    while rest:
        part, new = set[tuple[int, int]](), {rest.pop()}
        while new:
            part |= new
            ats, rows = {at for at, _ in new}, {row for _, row in new}
            new = {each for each in rest if each[0] in ats or each[1] in rows}
            rest -= new
        parts.append(part)
    return parts


def _squeezed(text: str) -> str:
    return "".join(text.split())


@dataclass(frozen=True)
class Rules:
    """What an episode is worth beside the environment's own score.

    Attributes:
        reward_of: of its groups; None: they have one row for each sibling.
        bridge: gives groups other scores.
        left_out: of an answer that the environment leaves out of its group; None: it is an error.
    """

    reward_of: RewardOf | None = None
    bridge: RewardBridge | None = None
    left_out: float | None = None


@dataclass(frozen=True)
class Score:
    """What an episode gave.

    Attributes:
        groups: the environment's own, one with the sibling's row as a rule; none of an answer left out.
        reward: what the episode is worth.
        raw: the environment's score, where a reward bridge changed it.
        filtered: the environment dropped its group after it was scored.
        siblings: scores of all rows of the group, in its order, as the environment gave them.
    """

    groups: list[Group]
    reward: float
    raw: float
    filtered: bool = False
    siblings: tuple[float, ...] = ()


async def collect(
    env: Any, item: Any, rules: Rules, said: Callable[[], Sequence[Spoken]]
) -> list[Score | EnvFailed]:
    """Returns the score of each sibling. Awaits the environment's completions.

    The environment's own `postprocess_histories` is applied, and its backlog grows, as with Atropos' workers.
    A group that the environment scores and then drops, as when all scores are equal, is taken as it was.

    Args:
        env: the environment.
        item: what it plays.
        rules: see there.
        said: returns what each sibling has said, once the environment has ended.

    Raises:
        EnvFailed: it gave no trajectory, or none with one finite score.
        Exception: whatever the environment raises.
    """
    made: list[Group] = []
    _made.set(made)
    groups, filtered = await _groups(env, item), False
    siblings = said()
    if not groups:
        groups = [each for each in made if each.get("scores") and len(each["scores"]) == len(each["tokens"])]
        groups, filtered = groups[-1:], True
    if not groups:
        if rules.left_out is None:
            raise EnvFailed(
                "the environment gave no trajectory, and scored none in a ScoredDataGroup",
                hint="it may have rejected it: see its log; left_out=NUMBER is then what an answer is worth",
            )
        return [Score([], rules.left_out, rules.left_out, True) for _ in siblings]
    changed = groups if rules.bridge is None else [{**group, **await rules.bridge(group)} for group in groups]
    if len(siblings) == 1:
        raw = _finite((rules.reward_of or the_score)(groups))
        reward = _finite((rules.reward_of or the_score)(changed))
        return [Score(changed, reward, raw, filtered, (raw,))]
    if len(groups) > 1:
        raise EnvFailed(
            f"the environment gave {len(groups)} groups for {len(siblings)} siblings",
            hint="group_size=1 plays it",
        )
    worth = list(zip(groups[0]["scores"], changed[0]["scores"], strict=True))
    rows = rows_of(groups[0], siblings, env.tokenizer, worth)
    return [_of_a_sibling(groups[0], changed[0], row, filtered, rules.left_out) for row in rows]


def the_score(groups: Sequence[Group]) -> float:
    """Returns the score of an episode that is one group of one row. Raises EnvFailed for any other."""
    rows = [float(score) for group in groups for score in group["scores"]]
    if len(rows) != 1:
        raise EnvFailed(
            f"the environment gave {len(rows)} rows in {len(groups)} groups for one episode",
            hint="reward_of=function of the groups says what the episode is worth",
        )
    return rows[0]


def watch(kind: type[Any]) -> None:
    """Has the ScoredDataGroups that a class makes noted, so that what it scores and then drops is known.

    In the modules of the class and its bases, `ScoredDataGroup` is then a name that makes the same dicts.
    """
    from atroposlib.envs.base import BaseEnv, ScoredDataGroup

    for each in kind.__mro__:
        if each in BaseEnv.__mro__:
            continue
        module = sys.modules[each.__module__]
        for name, value in list(vars(module).items()):
            if value is ScoredDataGroup or ScoredDataGroup in getattr(value, "__orig_bases__", ()):
                setattr(module, name, _Noted)


class _Noted(dict[str, Any]):
    """Makes plain dicts, as a TypedDict does, and notes each."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        group: Group = dict(*args, **kwargs)
        made = _made.get(None)
        if made is not None:
            made.append(group)
        return group


async def _groups(env: Any, item: Any) -> list[Group]:
    if collects_alone(type(env)):
        row, backlog = await env.collect_trajectory(item)
        result: Any = None if row is None else _group_of(row)
    else:
        result, backlog = await env.collect_trajectories(item)
    env.backlog.extend(backlog)
    if result:
        result = await env.postprocess_histories(result)
    return [each for each in (result if isinstance(result, list) else [result]) if each]


def collects_alone(kind: type[Any]) -> bool:
    """Returns whether a class plays each trajectory by itself: siblings then have nothing in common."""
    from atroposlib.envs.base import BaseEnv

    return kind.collect_trajectories is BaseEnv.collect_trajectories


def _group_of(row: Any) -> Group:
    if not isinstance(row, Mapping):
        raise EnvFailed(f"collect_trajectory returned a {type(row).__name__}, not a ScoredDataItem")
    return {name: value if name in _OF_THE_GROUP or value is None else [value] for name, value in row.items()}


def _of_a_sibling(
    group: Group, changed: Group, row: int | EnvFailed | None, filtered: bool, left_out: float | None
) -> Score | EnvFailed:
    siblings = tuple(float(each) for each in group["scores"])
    if isinstance(row, EnvFailed):
        return row
    if row is None:
        if left_out is None:
            return EnvFailed(
                f"the environment left this answer out of its group, which has {len(siblings)} rows",
                hint="left_out=NUMBER is what such an answer is worth",
            )
        return Score([], left_out, left_out, True, siblings)
    try:
        raw, reward = _finite(siblings[row]), _finite(float(changed["scores"][row]))
    except EnvFailed as wrong:
        return wrong
    rows = len(siblings)
    own = {
        name: [value[row]]
        if name not in _OF_THE_GROUP and isinstance(value, (list, tuple)) and len(value) == rows
        else value
        for name, value in changed.items()
    }
    return Score([own], reward, raw, filtered, siblings)


def _finite(score: float) -> float:
    if not math.isfinite(score):
        raise EnvFailed(f"the score is {score}")
    return float(score)
