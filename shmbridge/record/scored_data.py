"""Converts a record back to Atropos' ScoredDataGroup. Imports nothing of Atropos."""

from typing import Any

from shmbridge._ext.record import Ragged
from shmbridge.record.columns import RaggedLists, ReadableRecord
from shmbridge.schema import ATROPOS_NO_LOGPROB, LOGPROBS, Tag, recorded_logprobs

_LISTS = ("advantages", "ref_logprobs", "inference_logprobs", "distill_token_ids", "distill_logprobs")
_STEPS = ("step_rewards", "step_ends")
_JSON = ("messages", "overrides", "images", "group_overrides", "generation_params")


def scored_data(record: ReadableRecord) -> dict[str, Any]:
    """Returns the group as upstream's HTTP path would deliver it: the same keys, null, [] and {} told apart;
    plus what that path loses: rewards of steps, and the unknown keys in `extra`.
    """
    group: dict[str, Any] = {"tokens": record["tokens"].tolist(), "masks": _masks(record)}
    for name, source in (("scores", "score"), *((name, name) for name in (*_LISTS, *_STEPS))):
        if record.tag(source) is not None:
            group[name] = _value(record, source)
    for name in _JSON:
        if record.tag(name) is not None:
            group[name] = record.json(name) if name in record else _empty(record, name)
    if record.meta.env_id is not None:
        group["env_id"] = record.meta.env_id
    if "extra" in record:
        extra = record.json("extra")
        group.update(extra if isinstance(extra, dict) else {"extra": extra})
    return group


def _empty(record: ReadableRecord, name: str) -> Any:
    """Returns the content of a column without values: null, [] or {}."""
    tag = record.tag(name)
    return [] if tag is Tag.EMPTY_LIST else {} if tag is Tag.EMPTY_MAP else None


def _value(record: ReadableRecord, name: str) -> Any:
    if name not in record:
        return _empty(record, name)
    column = record[name]
    if name in LOGPROBS:
        values = recorded_logprobs(column.values, ATROPOS_NO_LOGPROB)
        column = Ragged(values, column.lengths, column.valid)
    if isinstance(column, (Ragged, RaggedLists)):
        return column.tolist()
    valid = record.valid(name)
    return [value if valid is None or valid[row] else None for row, value in enumerate(column.tolist())]


def _masks(record: ReadableRecord) -> Any:
    """Returns masks as they came, or rebuilt: the token where trained, -100 elsewhere."""
    if record.tag("masks") is not None:
        return _value(record, "masks")
    if "loss_mask" not in record:
        return None
    masks = record["loss_mask"].tolist()
    pairs = zip(record["tokens"], masks, strict=False)
    return [
        None
        if mask is None
        else [token if on else -100 for token, on in zip(row.tolist(), mask, strict=False)]
        for row, mask in pairs
    ]
