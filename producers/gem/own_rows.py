"""Finds whose row is which in a group that the environment may have shuffled: `rows_of`. It never guesses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shmbridge.producers.gem.action import Spoken
from shmbridge.producers.gem.errors import EnvFailed
from shmbridge.producers.gem.request import without_thoughts

_MASKED = -100

# How a row fits a sibling, the surest first: it is the conversation, token by token; it begins with it;
# trained are the tokens of all answers, or of the last one; the text of all, or of the last one.
# That an answer stands somewhere in a row says nothing.
Fit = tuple[bool, ...]
_BY_TRAINED = range(2, 6)
Pairs = set[tuple[int, int]]  # of siblings and rows


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
    free = len(rows) - len(found)  # as long as a row may be anybody's, nobody is left out
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
        if len(rows) <= len(ats):  # a row is somebody's
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
    """Returns the pairs whose second is no other's, where the first has no other such second."""
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
