"""The text of each token: a tokenizer from this machine, decoded so that spaces and word pieces stay."""

from collections.abc import Callable, Sequence
from pathlib import Path

from shmbridge.errors import BadArgument

_CONTEXT = 4  # tokens before one, that decide whether it begins with a space


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
