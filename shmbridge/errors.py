"""The errors of shmbridge, except those of the control plane, and their words.

Each has a code, a message with numbers, and a hint with one next action, and inherits the nearest builtin, so
that `except TimeoutError` works as expected. A row per code: docs/errors/README.md. Then: why records were
dropped or discarded; how an error shows a value; which column or argument was meant.
"""

import difflib
import reprlib
import sys
from collections.abc import Collection, Iterable
from enum import IntEnum
from typing import Any


class ShmBridgeError(Exception):
    """Base of all errors of shmbridge. `code` is stable; `hint` is one next action."""

    code = "SB000"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}" + (f" -> {self.hint}" if self.hint else "")


class BadBridgeName(ShmBridgeError, ValueError):
    """A bridge name is not `[A-Za-z0-9_-]{1,48}`."""

    code = "SB100"


class ShmTooSmall(ShmBridgeError, MemoryError):
    """The shm mount or the memory cgroup cannot hold the requested size; nothing was left behind."""

    code = "SB101"


class ShmPermission(ShmBridgeError, PermissionError):
    """A segment belongs to another user."""

    code = "SB102"


class ProcessLimit(ShmBridgeError, OSError):
    """A limit of this process is too low: descriptors, address space, file size or threads."""

    code = "SB103"


class ShmUnavailable(ShmBridgeError, OSError):
    """The shm mount is not there, or this process may not write to it."""

    code = "SB104"


class NotReady(ShmBridgeError, TimeoutError):
    """A living process has been initialising a segment for too long."""

    code = "SB105"


class BadArgument(ShmBridgeError, ValueError, TypeError):
    """An argument has the wrong type or an unusable value; nothing was begun."""

    code = "SB106"


class LayoutMismatch(ShmBridgeError, ValueError):
    """The peer's segment has another layout version."""

    code = "SB201"


class SchemaMismatch(ShmBridgeError, ValueError):
    """A column has two types, a type that no lane can carry, or a name that stands for something else."""

    code = "SB202"


class RecordTooBig(ShmBridgeError, ValueError):
    """A record can never fit the lane; nothing was committed."""

    code = "SB203"


class InvalidRecord(ShmBridgeError, ValueError):
    """A record's values cannot be carried; nothing was committed.

    `column`, `row` and `position` say where.
    """

    code = "SB204"

    def __init__(
        self, message: str, *, hint: str = "", column: str = "", row: int = -1, position: int = -1
    ) -> None:
        super().__init__(message, hint=hint)
        self.column, self.row, self.position = column, row, position


class RecordUnreadable(ShmBridgeError, ValueError):
    """A committed record's column does not hold its type: text that is not UTF-8, or JSON that is none."""

    code = "SB205"


class LaneQuarantined(ShmBridgeError, RuntimeError):
    """The consumer no longer reads this lane, because its words cannot be true."""

    code = "SB206"


class LaneRemoved(ShmBridgeError, RuntimeError):
    """A lane or its control segment was removed by force; nothing was committed, no consumer can find it."""

    code = "SB207"


class NoColumn(ShmBridgeError, KeyError, AttributeError):
    """A column was asked for that a record, a batch or a claim does not have."""

    code = "SB208"


class LaneFull(ShmBridgeError, TimeoutError):
    """The lane had no room within the time allowed; nothing was committed."""

    code = "SB301"


class ConsumerEmpty(ShmBridgeError, TimeoutError):
    """No record came, or no batch could be formed, within the time allowed."""

    code = "SB302"


class LeaseReleased(ShmBridgeError, RuntimeError):
    """A record was read after release()."""

    code = "SB303"


class BatchTooBig(ShmBridgeError, ValueError):
    """A batch can never be filled, as its groups fill the lanes, or has more tokens than int32 can count."""

    code = "SB304"


class NotAdmitted(ShmBridgeError, TimeoutError):
    """A producer asked to begin a group while the most groups allowed were under way."""

    code = "SB305"


class ConsumerTaken(ShmBridgeError, RuntimeError):
    """The bridge has a living consumer."""

    code = "SB401"


class NoConsumer(ShmBridgeError, TimeoutError):
    """No consumer answered on the control plane within the time allowed."""

    code = "SB402"


class BridgeDraining(ShmBridgeError, RuntimeError):
    """The consumer is draining the bridge and takes no new records; nothing was committed."""

    code = "SB403"


class ClaimOpen(ShmBridgeError, RuntimeError):
    """A producer was used while its claim is open, or a claim after it was over."""

    code = "SB404"


class Closed(ShmBridgeError, RuntimeError):
    """The object was closed, or belongs to the process before a fork."""

    code = "SB405"


class RankTaken(ShmBridgeError, RuntimeError):
    """A living process is that rank of the bridge already."""

    code = "SB408"


class ServesRanks(ShmBridgeError, RuntimeError):
    """A consumer that deals batches out to learner ranks was asked for records itself."""

    code = "SB409"


class UnknownEnvironment(ShmBridgeError, ValueError):
    """An environment was named that has not registered."""

    code = "SB410"


class NoWeight(ShmBridgeError, ValueError):
    """An environment asked for its part of the weight, and no connected environment has any."""

    code = "SB411"


class UsedByTwoThreads(ShmBridgeError, RuntimeError):
    """A producer or a consumer was used by two threads at once; only looked for under SHMBRIDGE_DEBUG=1."""

    code = "SB413"


class IterationOver(ShmBridgeError, RuntimeError):
    """Another iteration, or take_groups, has taken over the batches of the same consumer: this one ended."""

    code = "SB414"


class QueueTaken(ShmBridgeError, RuntimeError):
    """The bridge keeps the values of a living TransferQueue."""

    code = "SB415"


class RelayTaken(ShmBridgeError, RuntimeError):
    """A living relay puts records of other nodes into the bridge."""

    code = "SB416"


class LaneRefused(ShmBridgeError, RuntimeError):
    """The consumer will not read this lane; it has said why."""

    code = "SB417"


class WeightsMismatch(ShmBridgeError, ValueError):
    """The tensors do not have the names, types or shapes of the weights segment; or a value is not finite."""

    code = "SB501"


class WeightsBusy(ShmBridgeError, TimeoutError):
    """A reader held the slot to write for too long, or a shard of an earlier filling is being written."""

    code = "SB502"


class FillingOver(ShmBridgeError, RuntimeError):
    """A tensor was written for a filling of the weights that is over, whose writer is dead or was reused."""

    code = "SB503"


class BadConfig(ShmBridgeError, ValueError):
    """A file of `shmbridge launch`, a reward config or a server's setting asks for what cannot be; nothing
    started.
    """

    code = "SB601"


class LaunchFailed(ShmBridgeError, RuntimeError):
    """A launched run cannot start, or cannot go on; the message names the process and its log."""

    code = "SB602"


class ArchiveFull(ShmBridgeError, OSError):
    """The disk of an archive has no room; the records that were to be written stay un-released."""

    code = "SB701"


class ArchiveTaken(ShmBridgeError, RuntimeError):
    """A living recorder writes to the folder."""

    code = "SB702"


class ArchiveUnreadable(ShmBridgeError, ValueError):
    """A folder holds no archive, or a file in it is none of ours."""

    code = "SB703"


class ArchiveUnwritable(ShmBridgeError, OSError):
    """A file or folder of an archive cannot be written, or was removed while it was written."""

    code = "SB704"


class Drop(IntEnum):
    """Reasons counted by the producer in `dropped_total`."""

    FULL = 0
    CANCELLED = 1
    INVALID = 2
    TIMEOUT = 3


class Discard(IntEnum):
    """Reasons counted by the consumer in `discarded_total`."""

    STALE = 0
    PARTIAL = 1
    RESUME = 2
    CORRUPT = 3


class Lost(IntEnum):
    """Reasons counted by the producer in `episodes_lost_total`."""

    FAILED = 0
    LATE = 1
    TOO_OLD = 2


def labelled(counter: str, reasons: type[IntEnum], values: list[int]) -> dict[str, int]:
    """Returns `{"dropped_total{full}": 0, ...}` from the counters of a lane."""
    return {f"{counter}{{{reason.name.lower()}}}": values[reason] for reason in reasons}


class _Short(reprlib.Repr):
    """Python's own short repr, in which all but plain values stand by their kind."""

    def repr_instance(self, x: Any, level: int) -> str:
        """Returns a NumPy number as written; else what the value is."""
        plain = _as_python(x)
        return repr(plain)[:40] if isinstance(plain, _PLAIN) else kind_of(x)

    def repr_int(self, x: int, level: int) -> str:
        """Returns an int, also one with more digits than Python writes."""
        return super().repr_int(x, level) if x.bit_length() < 10_000 else "a number of thousands of digits"

    def repr_Written(self, x: Any, level: int) -> str:
        """Returns a value of a YAML file (`wrong_value.Written`) as it is written there."""
        return repr(x)


_short = _Short()
_short.maxlist = _short.maxtuple = _short.maxarray = 4
_short.maxdict = _short.maxset = _short.maxlevel = 2
_short.maxstring = _short.maxother = 40
_short.maxlong = 24
_PLAIN = (int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, type(None))
_NAMES = {
    "NoneType": "None",
    "ndarray": "array",
    "function": "function",
    "builtin_function_or_method": "function",
}


def counted(number: int, thing: str) -> str:
    """Returns "1 row", "2 rows"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def kind_of(value: object) -> str:
    """Returns what a value is, with its article: "a list", "an int", "None"."""
    if isinstance(value, (str, bytes)):
        return "text" if isinstance(value, str) else "bytes"
    name = type(_as_python(value)).__name__
    name = _NAMES.get(name, name)
    if name == "None":
        return name
    library = type(value).__module__.split(".")[0]
    if library in ("pandas", "polars", "pyarrow", "datasets") and name != "Array":
        name = f"{library} {name}"
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def is_tensor(value: object) -> bool:
    """Returns whether it is a torch tensor; imports nothing."""
    return type(value).__module__.split(".")[0] == "torch" and hasattr(value, "detach")


def shown(value: Any) -> str:
    """Returns a value as an error shows it: a number or text as written, cut if long; else what it is."""
    value = _as_python(value)
    if is_dtype(value):
        return f"an array of {_dtype_name(value)}"
    if is_tensor(value) and value.is_nested:  # has no shape
        return "a nested tensor"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return _array_shown(value)
    if not isinstance(value, _PLAIN):
        return kind_of(value)
    return " ".join(_short.repr(value).split())


def _as_python(value: Any) -> Any:
    """Returns NumPy's numbers as Python's."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and not isinstance(value, numpy.void):
        return value.item()
    return value


def is_dtype(value: object) -> bool:
    """Returns whether it is a NumPy dtype."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.dtype)


def _dtype_name(dtype: Any) -> str:
    return {"O": "Python objects", "U": "texts", "S": "bytes", "M": "dates"}.get(dtype.kind, str(dtype))


def _array_shown(value: Any) -> str:
    kind = "tensor" if is_tensor(value) else "array"
    try:
        shape = tuple(int(size) for size in value.shape)
        if shape == () and str(getattr(value, "device", "cpu")) == "cpu":
            return f"a single number, {shown(value.item())}"
    except (TypeError, ValueError, RuntimeError):
        return kind_of(value)
    return f"{'a' if kind == 'tensor' else 'an'} {kind} of shape {shape}"


_MEANT = {
    "tokens": (
        "input_ids",
        "token_ids",
        "ids",
        "input_tokens",
        "sequences",
        "input_id",
        "token",
        "prompt_ids",
        "completion_ids",
        "response_ids",
    ),
    "score": ("reward", "outcome_reward", "scalar_reward"),
    "advantages": ("returns", "return", "adv", "advs", "gae"),
    "inference_logprobs": (
        "logprobs",
        "logprob",
        "log_probs",
        "logps",
        "old_logprobs",
        "old_log_probs",
        "old_logps",
        "old_per_token_logps",
        "rollout_logprobs",
        "rollout_log_probs",
        "sampling_logprobs",
        "sampling_per_token_logps",
    ),
    "ref_logprobs": (
        "ref_log_probs",
        "ref_log_prob",
        "ref_logps",
        "reference_logprobs",
        "ref_per_token_logps",
    ),
    "loss_mask": (
        "mask",
        "response_mask",
        "action_mask",
        "completion_mask",
        "assistant_mask",
        "assistant_masks",
    ),
    "masks": ("labels",),
    "prompt_length": ("prompt_len", "prompt_lengths", "prompt_tokens", "prompt_lens"),
    "step_rewards": ("prm_scores", "process_rewards", "step_scores"),
    "token_rewards": ("token_level_rewards", "token_level_scores", "rm_scores"),
    "token_versions": ("weight_versions", "policy_versions"),
    "finish_reason": ("finish_reasons", "stop_reason", "stop_reasons"),
}
_COLUMN_MEANT = {given: column for column, names in _MEANT.items() for given in names}
# Of who reads: what other trainers make of these columns.
_READ_AS = {"labels": "loss_mask", "rewards": "score"}


def column_meant(given: str) -> str:
    """Returns the column that has this name in other projects; "" if none does."""
    return _COLUMN_MEANT.get(given.lower(), "")


def nearest(given: object, known: Iterable[str], most: int = 3) -> list[str]:
    """Returns the names of `known` that were meant: by meaning, in another case, or by spelling."""
    word, names = str(given), list(known)
    meant = column_meant(word)
    if meant in names:
        return [meant]
    other_case = [name for name in names if name.lower() == word.lower()]
    return other_case or difflib.get_close_matches(word, names, n=most)


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Returns "did you mean 'score'?"; "" if no name is near."""
    near = nearest(given, known)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""


def _meant(name: str, where: str, known: Collection[str], there: Collection[str]) -> str:
    """Returns which column was meant, and that no producer put it if so; "" if none is near."""
    read_as = _READ_AS.get(name.lower()) or column_meant(name)
    if read_as not in known:
        return did_you_mean(name, there) or did_you_mean(name, known)
    if read_as in there or (read_as, where) == ("loss_mask", "batch"):  # of a batch it is always there
        shown_as = "scores" if (read_as, where) == ("score", "batch") else read_as
        return f"did you mean {shown_as!r}?"
    return f"did you mean {read_as!r}? No producer put it: put({{..., {read_as!r}: ...}})"


def unknown_argument(call: str, name: str, known: Iterable[str]) -> BadArgument:
    """Returns the error for an argument that a call does not take."""
    arguments = [each for each in known if each not in ("self", "unknown")]
    near = difflib.get_close_matches(name, arguments, n=1)
    hint = f"did you mean {near[0]}=?" if near else f"it takes {', '.join(arguments)}"
    return BadArgument(f"{call} takes no argument {name}=", hint=hint)


def no_column(name: object, where: str, known: Collection[str], there: Collection[str]) -> NoColumn:
    """Returns the error for a column that is not in `where`, "record" or "batch".

    Args:
        name: what was asked for.
        where: "record" or "batch".
        known: columns that it could have, of which `name` may be a typo.
        there: columns that it has.
    """
    if not isinstance(name, str):
        hint = f"columns first, then rows: {where}['tokens'][{shown(name)}]"
    elif name in known:
        hint = f"no producer put it: check {name!r} in {where} before"
    elif name == "attention_mask":
        hint = 'rows have lengths: `lengths` with layout="padded", `cu_seqlens` with layout="packed"'
        hint = hint if where == "batch" else "rows are not padded: record['tokens'].lengths"
    else:
        hint = _meant(name, where, known, there) or "columns of your own: Producer(schema=)"
    return NoColumn(f"this {where} has no column {shown(name)}; it has {', '.join(there)}", hint=hint)
