"""A bridge in lines of text, 80 columns wide, and as a document for programs; a record in lines of text."""

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from shmbridge.config import format_size
from shmbridge.errors import BadArgument, counted
from shmbridge.record import Record, RecordMeta
from shmbridge.segments import BridgeInfo
from shmbridge.watch.diagnosis import (
    Row,
    Severity,
    findings,
    headline,
    in_words,
    lane_rows,
    losses,
    rows,
    summed,
    waited_for,
)
from shmbridge.watch.snapshot import BridgeLook, look

_NO_CELL = ("Mn", "Me", "Cf")  # stand on the character before them, or are not shown
_TITLES = ("environment", "pid", "state", "rec/s", "held", "fill", "last put", "waits", "lag")
_LABEL, _STATE = 24, 16  # characters of a label, and of pid and state; longer ones take a label's room
_OF_ID = 8  # characters of a producer's id that a node's name leaves
Pieces = Callable[[Sequence[int]], list[str]]
_REWARDS_SHOWN = 6  # step rewards shown of one row
_SHORT = 60  # characters of a prompt's end that are shown before a completion
_PROMPT = 100  # tokens of its end that are decoded for them
_CONTEXT = 4  # tokens before one, that decide whether it begins with a space


def cells(text: str) -> int:
    """Returns how many cells a terminal shows the text in. Never blocks."""
    return len(text) if text.isascii() else sum(map(_cells_of, text))


def cut(text: str, width: int) -> str:
    """Returns the text in at most `width` cells, with … at its end if some is left out. Never blocks."""
    if cells(text) <= width:
        return text
    left, kept = width - 1, ""
    for each in text:
        left -= _cells_of(each)
        if left < 0:
            break
        kept += each
    return f"{kept}…" if width > 0 else ""


def padded(text: str, width: int, *, right: bool = False) -> str:
    """Returns the text with blanks behind it, or before it if it stands right, up to `width` cells.

    Never blocks.
    """
    blanks = " " * (width - cells(text))
    return blanks + text if right else text + blanks


def _cells_of(character: str) -> int:
    if unicodedata.category(character) in _NO_CELL:
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def block(info: BridgeInfo, before: BridgeLook | None, every_lane: bool) -> str:
    """Returns a bridge as text. Never blocks.

    Args:
        info: the bridge, just listed.
        before: an earlier look, for rates; None: none are shown.
        every_lane: show every lane, not only sums and troubles.
    """
    now = look(info.name)
    lines = [f"{info.name}  {counted(len(info.lanes), 'lane')}, {format_size(info.size_bytes)}"]
    if now is not None:
        lines += [f"  {sentence}" for sentence in sentences(now, before)]
        lines.append(f"  {'  '.join(consumer_parts(now))}")
        if (shares := waited_for(now, before)) is not None:
            each_side = ", ".join(f"{side} {share:.0%}" for side, share in shares.items())
            lines.append(f"  waited for, of the time: {each_side}")
        if now.lanes:
            lines.append(_line(_TITLES))
            lines += [_line(_cells(row)) for row in rows(now, before, every_lane=every_lane)]
        for each in now.lanes:
            if lost := reasons_in_words(each.episodes_lost):
                lines.append(f"  {printable(each.producer_id)}: episodes lost: {lost}")
    for lane in info.lanes:
        if lane.dropped:
            lines.append(
                f"  {printable(lane.producer_id)}: {counted(lane.dropped, 'lease')} dropped without release"
            )
        if lane.data_writable:
            lines.append(
                f"  {printable(lane.producer_id)}: its data is mapped writable by a reader, whose GPU "
                "registers no read-only memory"
            )
        if lane.unaccounted:
            by_slots = lane.released + lane.unaccounted
            lines.append(
                f"  {printable(lane.producer_id)}: {lane.released} releases counted, {by_slots} by slots: "
                "lost, unless its consumer was killed"
            )
    if info.receipts:
        lines.append(
            f"  {counted(info.receipts, 'receipt')} of lanes that are gone, for a relay or run that goes on"
        )
    if (weights := info.weights) is not None:
        version = "no version yet" if weights.version is None else f"version {weights.version}"
        writer = f"writer pid {weights.writer_pid}" if weights.writer_pid else "no writer"
        lines.append(f"  weights {version}  {writer}  {format_size(weights.size_bytes)}")
    return "\n".join(lines)


def sentences(now: BridgeLook, before: BridgeLook | None = None) -> list[str]:
    """Returns what is wrong, worst first, or what a healthy bridge does; from the second on "also: ...".

    Never blocks.
    """
    first, *more = (printable(str(each)) for each in findings(now, before) or [headline(now, before)])
    return [first, *(f"also: {each}" for each in more)]


def trouble(bridge: str) -> str:
    """Returns in one line what is wrong with a bridge now; "" if nothing is. Never blocks."""
    if (now := look(bridge)) is None:
        return "its segments were removed -> close this end, and open it again"
    return "; ".join(sentences(now)) if headline(now).severity is Severity.TROUBLE else ""


def consumer_parts(now: BridgeLook) -> list[str]:
    """Returns what the consumer does, the policy version, and the room on the mount. Never blocks."""
    consumer = now.consumer
    parts = ["no consumer" if now.is_consumer_known else "consumer not known"]
    if consumer is not None:
        doing = str(consumer.state)
        if doing == "running" and consumer.asking_s is not None:
            doing = f"waiting for {in_words(consumer.asking_s)}"
        doing += ", paused" * consumer.paused + ", draining" * consumer.draining
        parts = [f"consumer pid {consumer.pid} {doing}"]
        if consumer.handed_age_s is not None:
            parts.append(f"last batch {in_words(consumer.handed_age_s)} ago")
    if now.policy_version is not None:
        since = "" if now.published_age_s is None else f", {in_words(now.published_age_s)} ago"
        parts.append(f"policy version {now.policy_version}{since}")
    parts.append(f"mount {format_size(now.mount_free)} free of {format_size(now.mount_bytes)}")
    return parts


def _cells(row: Row) -> tuple[str, ...]:
    return (
        _label(row),
        "" if row.pid is None else str(row.pid),
        row.state,
        "" if row.rate is None else f"{row.rate:.1f}",
        str(row.held),
        f"{row.fill:.0%}",
        "" if row.newest_age_s is None else in_words(row.newest_age_s),
        "" if row.wait is None else f"{row.wait:.0%}",
        "" if row.lag is None else str(row.lag),
    )


def _label(row: Row) -> str:
    """What a row stands for, cut so that the node its records come from is seen."""
    if row.pid is None:
        return cut(f"{printable(row.label)} ({row.lanes})", _LABEL)
    node = cut(printable(f" from {row.origin_node}"), _LABEL - _OF_ID) if row.origin_node else ""
    return cut(printable(row.label), _LABEL - cells(node)) + node


def _line(columns: tuple[str, ...]) -> str:
    label, pid, state, *numbers = columns
    who = f"{pid:>7} {state:<8}" if pid or len(state) <= 8 else f"{state:>{_STATE}}"
    room = _LABEL + _STATE - len(who)
    return f"  {padded(cut(label, room), room)} {who}" + "".join(
        f" {number:>{width}}" for number, width in zip(numbers, (6, 5, 4, 8, 5, 3), strict=True)
    )


def reasons_in_words(counts: Mapping[str, int]) -> str:
    """Returns the reasons that happened, with their counts: "3 failed, 1 too old". Never blocks."""
    return ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in counts.items() if count)


def printable(text: str) -> str:
    """Returns the text with control and invisible characters escaped: any process may have chosen it."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode()
        for each in text
    )


def of_listing(info: BridgeInfo) -> dict[str, object]:
    """Returns a bridge as `list_bridges()` has it, and its findings, for JSON. Never blocks."""
    now = look(info.name)
    return asdict(info) | {"findings": [] if now is None else _findings(now)}


def of_look(now: BridgeLook, before: BridgeLook | None = None) -> dict[str, object]:
    """Returns a look as numbers and text, for JSON: words, consumer, lanes, sums per environment.

    Never blocks.

    Args:
        now, before: two looks; without an earlier one, rates and waits are null.
    """
    lanes = lane_rows(now, before)
    return {
        "bridge": now.name,
        "at_s": now.at_s,
        "headline": str(headline(now, before)),
        "findings": _findings(now, before),
        "consumer": None if now.consumer is None else asdict(now.consumer),
        "policy_version": now.policy_version,
        "published_age_s": now.published_age_s,
        "mount_free": now.mount_free,
        "mount_bytes": now.mount_bytes,
        "losses": losses(now),
        "unreadable": now.unreadable,
        "environments": [
            _row(summed(env_name, list(each))) for env_name, each in groupby(lanes, lambda row: row.env_name)
        ],
        "lanes": [
            _row(row)
            | {"tokens": lane.tokens, "records": lane.records, "bytes": lane.bytes}
            | {"logprobs_unrecorded": lane.logprobs_unrecorded}
            | {"dropped": lane.dropped, "discarded": lane.discarded, "episodes_lost": lane.episodes_lost}
            for row, lane in zip(lanes, now.lanes, strict=True)
        ],
    }


def _findings(now: BridgeLook, before: BridgeLook | None = None) -> list[dict[str, str]]:
    return [
        {"severity": each.severity.name, "text": each.text, "action": each.action}
        for each in findings(now, before)
    ]


def _row(row: Row) -> dict[str, object]:
    return asdict(row) | {"fill": row.fill}


def line_of(record: Record, newest_version: int | None) -> str:
    """Returns the record in one line: who, which group, version, size, scores, advantages, step rewards."""
    meta = record.meta
    of_group = f"{len(record)}/{meta.group_size}" if meta.group_size > 0 else f"{len(record)}"
    parts = [
        f"{printable(meta.producer_id)}#{meta.sequence}",
        f"group {printable(group_of(meta))} ({of_group})",
    ]
    if meta.split != "train":
        parts.append(meta.split)
    if meta.min_policy_version >= 0:
        behind = "" if newest_version is None else f" ({meta.min_policy_version - newest_version:+d})"
        parts.append(f"v{meta.min_policy_version}{behind}")
    parts.append(_token_count(record))
    if scores := _finite(record, "score"):
        parts.append(f"score {np.mean(scores):.3g}" + _span(scores))
    if advantages := _finite(record, "advantages"):
        parts.append(f"adv {min(advantages):.2f}..{max(advantages):.2f}")
    if rewards := _finite(record, "step_rewards"):
        parts.append(f"{len(rewards)} steps {min(rewards):.2f}..{max(rewards):.2f}")
    return "  ".join(parts)


def group_of(meta: RecordMeta) -> str:
    """Returns the id of the record's group; of one that its producer has numbered, the number alone."""
    return meta.group_id.removeprefix(f"{meta.producer_id}:")


def rows_of(record: Record, pieces: Pieces | None = None) -> list[str]:
    """Returns a line per row; with `pieces`, the text of each token of some ids, also its completion.

    Step rewards stand behind the last token of their step: ⟨0.42⟩.
    """
    return [_record_row(record, row, pieces) for row in range(len(record))]


def facts_of(record: Record) -> dict[str, Any]:
    """Returns the record's metadata and sums, for a program."""
    meta = record.meta
    return {
        "producer_id": meta.producer_id,
        "sequence": meta.sequence,
        "env_name": meta.env_name,
        "env_id": meta.env_id,
        "group_id": meta.group_id,
        "group_size": meta.group_size,
        "rows": len(record),
        "split": meta.split,
        "min_policy_version": meta.min_policy_version,
        "max_policy_version": meta.max_policy_version,
        "t_created_ns": meta.t_created_ns,
        "t_publish_ns": meta.t_publish_ns,
        "tokens": record.token_count,
        "columns": record.columns,
        "scores": record["score"].tolist() if "score" in record else None,
    }


def _record_row(record: Record, row: int, pieces: Pieces | None) -> str:
    ids = _of_row(record, "tokens", row)
    parts = [f"  {row + 1}: {len(ids):,} tokens"]
    if "score" in record and row < len(record["score"]):
        parts.append(f"score {record['score'][row]:.3g}")
    advantages = _of_row(record, "advantages", row)
    if len(advantages):
        parts.append(f"adv {advantages.min():.2f}..{advantages.max():.2f}")
    rewards, ends = _of_row(record, "step_rewards", row), _of_row(record, "step_ends", row)
    if len(rewards) and pieces is None:
        shown = " ".join(f"{each:.2f}" for each in rewards[:_REWARDS_SHOWN])
        parts.append(f"steps {shown}" + (" …" if len(rewards) > _REWARDS_SHOWN else ""))
    if pieces is not None:
        parts.append(_row_text(ids.tolist(), _first_trained(record, row), ends, rewards, pieces))
    return "  ".join(parts)


def _row_text(
    ids: list[int], begin: int, ends: np.ndarray[Any, Any], rewards: np.ndarray[Any, Any], pieces: Pieces
) -> str:
    """The end of the prompt, and the completion with its step rewards."""
    first = max(begin - _PROMPT, 0)
    texts = pieces(ids[first:])
    marks: dict[int, str] = {}
    for end, reward in zip(ends.tolist(), rewards.tolist(), strict=False):
        marks[end] = marks.get(end, "") + f"⟨{reward:.2f}⟩"
    completion = enumerate(texts[begin - first :], begin + 1)
    shown = "".join(text + marks.get(number, "") for number, text in completion)
    prompt = "".join(texts[: begin - first])
    cut = f"…{prompt[-_SHORT:]}" if first or len(prompt) > _SHORT else prompt
    return f"{printable(cut)!s} → {printable(shown)!s}"


def _first_trained(record: Record, row: int) -> int:
    """Where the completion begins: prompt_length, else the first token that the mask trains."""
    if "prompt_length" in record and row < len(record["prompt_length"]):
        return int(record["prompt_length"][row])
    trained = np.flatnonzero(_of_row(record, "loss_mask", row))
    return int(trained[0]) if trained.size else 0


def _token_count(record: Record) -> str:
    trained = f", {np.count_nonzero(record['loss_mask'].values):,} trained" if "loss_mask" in record else ""
    return f"{record.token_count:,} tokens{trained}"


def _finite(record: Record, name: str) -> list[float]:
    """All finite values of a column; none if it is absent."""
    if name not in record:
        return []
    column = record[name]
    values = np.asarray(column if isinstance(column, np.ndarray) else column.values, np.float64)
    found: list[float] = values[np.isfinite(values)].tolist()
    return found


def _span(values: list[float]) -> str:
    low, high = min(values), max(values)
    return "" if low == high else f" ({low:.3g} to {high:.3g})"


def _of_row(record: Record, name: str, row: int) -> np.ndarray[Any, Any]:
    """One row of a list column; empty if the column or the row is not there."""
    if name not in record or row >= len(column := record[name]):
        return np.empty(0)
    found: np.ndarray[Any, Any] = column[row]
    return found


def tokenizer_pieces(name: str) -> Callable[[Sequence[int]], list[str]]:
    """Returns a function from token ids to the text of each. Reads files; downloads nothing.

    Args:
        name: a tokenizer.json, a folder that holds one, or a name that transformers finds in its local cache.

    Raises BadArgument if there is no such tokenizer on this machine, or its package is not installed.
    """
    decode = _decoder(name)

    def pieces(ids: Sequence[int]) -> list[str]:
        found = []
        for number, each in enumerate(ids):
            context = list(ids[max(number - _CONTEXT, 0) : number])
            before, after = decode(context), decode([*context, each])
            found.append(after[len(before) :] if after.startswith(before) else decode([each]))
        return found

    return pieces


def _decoder(name: str) -> Callable[[list[int]], str]:
    file = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    try:
        if file.is_file():
            from tokenizers import Tokenizer

            quick = Tokenizer.from_file(str(file))
            return lambda ids: str(quick.decode(ids, skip_special_tokens=False))
        from transformers import AutoTokenizer

        full = AutoTokenizer.from_pretrained(name, local_files_only=True)
        return lambda ids: str(
            full.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )
    except ModuleNotFoundError as missing:
        raise BadArgument(
            f"--decode needs {missing.name}, which is not installed", hint=f"pip install {missing.name}"
        ) from None
    except Exception as wrong:  # each kind of tokenizer raises errors of its own
        why = (str(wrong).strip() or type(wrong).__name__).splitlines()[0]
        raise BadArgument(
            f"--decode {name}: no tokenizer of this name on this machine: {why:.120}",
            hint="name a tokenizer.json, or a folder that holds one",
        ) from None
