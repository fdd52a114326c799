"""Changes to Atropos and transformers: attributes replaced for a while, workarounds for bugs of theirs."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

_INHERITED = object()

log = logging.getLogger(__name__)
_HINTS = {
    "teacher_server_configs": (
        "broken as shipped with Atropos 0.4.0: its __init__ has to take teacher_server_configs and pass it on"
    ),
    "OpenaiConfig": (
        "broken as shipped with Atropos 0.4.0, where OpenaiConfig is called APIServerConfig: put that name "
        "into the script"
    ),
    "tokenize_for_trainer_dpo": (
        "broken as shipped with Atropos 0.4.0, which has no tokenize_for_trainer_dpo any more: use Atropos "
        "0.3"
    ),
    "Taxi-v3": "gymnasium 1.3 has Taxi-v4 instead: pip install 'gymnasium<1.3'",
    "BatchEncoding": (
        "apply_chat_template of transformers 5 returns a dict: pass return_dict=False there, or pip install "
        "'transformers<5'"
    ),
}


class Changes:
    """Attributes that were replaced, and their earlier values. Keeps no owner alive."""

    def __init__(self) -> None:
        self._before: list[tuple[ref[Any], str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Sets `owner.name`, whether it is its own or inherited."""
        self._before.append((ref(owner), name, vars(owner).get(name, _INHERITED)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Puts everything back, the last first."""
        while self._before:
            alive, name, value = self._before.pop()
            if (owner := alive()) is None:
                continue
            if value is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


# --- chat templates ---------------------------------------------------------------------------------------


class PlainTokens:
    """A tokenizer's `apply_chat_template` that returns token ids, as in transformers 4, unless the caller
    chooses a form.

    transformers 5 returns a BatchEncoding, whose length is that of its keys: masks made with it are wrong,
    groups cannot be sent.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the method of its class."""
        return _ids(type(self._tokenizer).apply_chat_template(self._tokenizer, *args, **kwargs), kwargs)


def with_plain_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same for `apply_chat_template` of a class."""

    @functools.wraps(original)
    def apply_chat_template(*args: Any, **kwargs: Any) -> Any:
        return _ids(original(*args, **kwargs), kwargs)

    return apply_chat_template


def _ids(result: Any, asked: Mapping[str, Any]) -> Any:
    return result["input_ids"] if "return_dict" not in asked and isinstance(result, Mapping) else result


# --- server configs ---------------------------------------------------------------------------------------


def with_its_own_url(
    original: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
) -> inspect.BoundArguments:
    """The arguments of `BaseEnv.__init__`, where a lone server config with an address becomes a list of one.

    For one that is not in a list, upstream's ServerManager forgets `base_url` and asks localhost:9004 to
    9007. On a cluster (slurm), and for servers of its own tests, that is left as it is.
    """
    bound = inspect.signature(original).bind(*arguments, **named)
    servers = bound.arguments.get("server_configs")
    chosen = (
        bound.arguments.get("slurm") or bound.arguments.get("testing") or "SLURM_JOB_NODELIST" in os.environ
    )
    if (url := getattr(servers, "base_url", None)) and not chosen:
        log.warning(
            "the environment has a lone server config: its %s is used, not localhost:9004 to 9007", url
        )
        bound.arguments["server_configs"] = [servers]
    return bound


# --- scripts that end before they begin -------------------------------------------------------------------


def hint_for(error: BaseException) -> str:
    """Returns advice for an error that an environment's script ended with; "" if there is none."""
    said = f"{type(error).__name__}: {error}"
    known = next((hint for sign, hint in _HINTS.items() if sign in said), "")
    if not known and isinstance(error, ModuleNotFoundError) and error.name:
        return f"the environment needs the package {error.name!r}: install it here"
    return known
