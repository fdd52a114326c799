"""The columns' names in other projects, and the nearest name to a typo. No I/O."""

import difflib
from collections.abc import Collection, Iterable

from shmbridge.errors import BadArgument, NoColumn
from shmbridge.shown import shown

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
