"""The hint of an error about a refused value: one next action in words."""

_MEANT = {
    "tokens": ("input_ids", "token_ids", "ids", "input_tokens", "sequences"),
    "score": ("reward", "outcome_reward", "scalar_reward"),
    "advantages": ("returns", "return", "adv", "advs", "gae"),
    "inference_logprobs": (
        "logprobs",
        "log_probs",
        "logps",
        "old_logprobs",
        "old_log_probs",
        "old_logps",
        "rollout_logprobs",
        "rollout_log_probs",
        "sampling_logprobs",
    ),
    "ref_logprobs": ("ref_log_probs", "ref_logps", "reference_logprobs"),
    "loss_mask": (
        "mask",
        "response_mask",
        "action_mask",
        "completion_mask",
        "assistant_mask",
        "assistant_masks",
    ),
    "prompt_length": ("prompt_len", "prompt_lengths", "prompt_tokens"),
    "step_rewards": ("prm_scores", "process_rewards", "step_scores"),
    "token_versions": ("weight_versions", "policy_versions"),
}
_COLUMN_MEANT = {given: column for column, names in _MEANT.items() for given in names}
_FINISH_REASONS = "0 stop, 1 length, 2 abort, 3 error"


def column_meant(given: str) -> str:
    """Returns the column that has this name in other projects; "" if none does."""
    return _COLUMN_MEANT.get(given.lower(), "")


def for_value(column: str, written: str, type_name: str, value: object, reason: str) -> str:
    """Returns the hint for a value. `written`: the caller's name of `column`; `reason`: the packer's."""
    is_rows = type_name.startswith("list<")
    if "masked" in reason:
        return f"put plain values: {written}.filled(0) where that is meant, or None for a whole row"
    if column == "prompt_length" and ("negative" in reason or "beyond" in reason):
        return (
            "prompt_length counts the row's first tokens that are its prompt, of tokens that are prompt and "
            "response; None: unknown"
        )
    if reason.startswith("is negative"):
        return "pass tokens without padding, and what is not to be trained as 0 in loss_mask"
    if column == "step_ends":
        return (
            "step_ends are exclusive: steps of tokens 0 to 2 and 3 to 6 end at [3, 7], one end for each of "
            "step_rewards"
        )
    if column == "token_versions":
        return "policy_version is the version when generation began, or (oldest, newest)"
    if "not finite" in reason:
        return f"find where the environment computes {written}: a finite number, or leave the group out"
    if reason == "is not a row of numbers":
        return _rows(column, written, value)
    if reason == "is not one value a row":
        return f"one number a row: {written}=[1.0, 0.0]"
    if reason == "is not one-dimensional":
        return f"one flat list or 1-D array a row: {written}=[[1, 2], [3]]" if is_rows else "one flat list"
    if reason.startswith("cannot become"):
        return f"convert it first: {written}.astype({reason.split()[-1]!r})"
    if reason.startswith("does not fit"):
        return _fitting(column, written, value, reason.split()[-1])
    if "JSON" in reason:
        return "pass the value itself, or json.dumps(value)"
    if "Unicode" in reason:
        return "pass text that UTF-8 can carry; bytes belong in a binary column: Producer(schema=)"
    if reason == "is not a name":
        return 'keys are text: {"format": 1.0}'
    if "handed over" in reason:
        return "leave a group alone from the call of put until it returns"
    return f"{written} takes {type_name}"


def _rows(column: str, written: str, value: object) -> str:
    if column == "token_rewards":
        return (
            f"{written} takes one value per token: {written}=[[0.0, 0.0, 1.0]]; one number a row is "
            "score=[1.0]"
        )
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"one list a row, also for a single one: {written}=[[{value}, ...]]"
    return f"each row is a list or a 1-D array of numbers: {written}=[[1, 2], [3]]"


def _fitting(column: str, written: str, value: object, dtype: str) -> str:
    if column == "finish_reason":
        return f"finish_reason is a number: {_FINISH_REASONS}"
    if value is None:
        return "None stands for a whole row, not for one value"
    if isinstance(value, str):
        return (
            f"numbers, not text: {written}=[[{value}, ...]]"
            if value.strip("-").isdigit()
            else "numbers, not text"
        )
    if "int" in dtype and isinstance(value, float):
        return f"whole numbers: {written}.astype({dtype!r}), or [int(value) for value in row]"
    if dtype == "bool":
        return "True or False"
    if "int" in dtype and isinstance(value, int):
        bits = int("".join(filter(str.isdigit, dtype)))
        low, high = (0, 2**bits - 1) if dtype.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        return f"{dtype} holds {low} to {high}"
    return f"numbers that {dtype} can hold"


def for_whole(written: str, type_name: str, value: object) -> str:
    """Returns the hint for a single number, text or dict given in place of a column's rows."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return (
            f"{written}=[[{value}, ...]], one list a row"
            if type_name.startswith("list<")
            else f"one value a row: {written}=[{value}]"
        )
    if isinstance(value, str):
        return f"one value a row: {written}=[{value[:20]!r}]"
    if isinstance(value, dict):
        return f"one value a row: {written}=[{{...}}]"
    return f"a list with one entry a row: {written}=[...]"
