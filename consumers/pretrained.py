"""Loads models and tokenizers with transformers, and says in one line why one cannot be had."""

from __future__ import annotations

import difflib
import json
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from huggingface_hub import constants, try_to_load_from_cache
from safetensors import SafetensorError

from shmbridge.errors import BadArgument

_CONFIGS = ("config.json", "adapter_config.json")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_ANSWER_S = 5.0  # the longest wait for the hub


def load(kind: Any, source: Path | str, **options: Any) -> Any:
    """Returns what `kind.from_pretrained` makes of a model's folder or Hugging Face name. Blocks.

    A name is looked for in the local cache alone if the hub does not answer one request.

    Args:
        kind: a class of transformers, such as AutoTokenizer.
        source: the folder, or the name.
        options: further arguments of `from_pretrained`.

    Raises:
        BadArgument: there is no such model, or it cannot be loaded.
    """
    here_alone = _is_here(str(source))
    try:
        return kind.from_pretrained(source, local_files_only=here_alone, **options)
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise BadArgument(
            f"cannot load a model from {source}: {_first_line(error)}",
            hint="download it again, or save it with save_pretrained, model and tokenizer"
            if Path(source).is_dir()
            else f"look at {constants.ENDPOINT}/{source}: a private model needs `hf auth login`",
        ) from error


def _is_here(source: str) -> bool:
    """Returns whether to look on this machine alone. Raises BadArgument if there is no such model."""
    path = Path(source)
    if source and path.is_dir():
        return _folder_is_here(path)
    if source and path.exists():
        raise BadArgument(
            f"model {source} is a file", hint=f"give the folder that it is in: {path.absolute().parent}"
        )
    if not _HUB_NAME.fullmatch(source):
        raise BadArgument(f"there is no folder {source!r} with a model", hint=_nearest(path))
    offline = constants.HF_HUB_OFFLINE or not _hub_answers()
    if offline and not any(isinstance(try_to_load_from_cache(source, name), str) for name in _CONFIGS):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} does not answer"
        raise BadArgument(
            f"model {source} is no folder here, is not in the cache of Hugging Face, and {why}",
            hint=_nearest(path),
        )
    return offline


def _folder_is_here(folder: Path) -> bool:
    """Does the same for a folder: an adapter names a base model, which may be elsewhere."""
    if not (found := [folder / name for name in _CONFIGS if (folder / name).is_file()]):
        raise BadArgument(f"folder {folder} has no config.json", hint=_nearest_inside(folder))
    if found[0].name == "config.json":
        return True
    try:
        base = json.loads(found[0].read_text())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return True  # loading says what is wrong with it
    return _is_here(str(base))


def _hub_answers() -> bool:
    """Asks once, through the proxy that the surroundings name; any answer will do."""
    try:
        urllib.request.urlopen(
            urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=_ANSWER_S
        ).close()
    except urllib.error.HTTPError as answer:
        answer.close()
    except (OSError, ValueError):
        return False
    return True


def _nearest(path: Path) -> str:
    """Returns the hint for a name that is no folder: one beside it that was probably meant."""
    try:
        beside = [each.name for each in path.parent.iterdir() if each.is_dir()]
    except OSError:
        beside = []
    if path.name and (near := difflib.get_close_matches(path.name, beside, n=1, cutoff=0.8)):
        return f"did you mean {path.parent / near[0]}?"
    return "give the folder of a model, such as save_pretrained writes"


def _nearest_inside(folder: Path) -> str:
    """Returns the hint for a folder without a model: the newest one below it, such as a checkpoint's."""
    inside = sorted(folder.glob("*/config.json")) or sorted(folder.glob("checkpoints/*/config.json"))
    if inside:
        return f"did you mean {inside[-1].parent}?"
    return "give the folder of a model, such as save_pretrained writes"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(" :") if lines else type(error).__name__
