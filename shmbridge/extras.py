"""Which packages the optional parts of shmbridge need, and the command that installs them."""

import sys
from importlib.util import find_spec
from types import TracebackType

from shmbridge.program import debugging, refuse

_ROLLOUT = ("aiohttp", "transformers")
# Extra of pyproject.toml -> the modules of its packages.
MODULES: dict[str, tuple[str, ...]] = {
    "atropos": ("atroposlib", "transformers"),
    "gateway": ("fastapi", "uvicorn"),
    "gem": ("gem", *_ROLLOUT),
    "launch": ("yaml",),
    "learner": ("torch", "transformers", "safetensors", "starlette", "uvicorn", "matplotlib", "yaml"),
    "ray": ("ray",),
    "skyrl-gym": ("skyrl_gym", *_ROLLOUT),
    "tui": ("textual",),
    "verifiers": ("verifiers", "renderers", "starlette", "uvicorn", *_ROLLOUT),
}


def install(*extras: str) -> str:
    """Returns the command that installs them."""
    return f"pip install 'shmbridge[{','.join(extras)}]'"


def require(*extras: str) -> None:
    """Raises ModuleNotFoundError if a package of one of the extras is not installed; imports none."""
    for module in (module for extra in extras for module in MODULES[extra]):
        if find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def is_of(missing: ModuleNotFoundError, *extras: str) -> bool:
    """Returns whether the module that was not found belongs to one of the extras."""
    package = (missing.name or "").split(".")[0]
    return any(package in MODULES[extra] for extra in extras)


def refuse_missing(program: str, missing: ModuleNotFoundError, *extras: str) -> None:
    """Prints in one line which package is not installed, and the command that installs it."""
    package = (missing.name or "").split(".")[0]
    if debugging():
        refuse(program, missing, install(*extras))
    else:
        refuse(program, f"{package} is not installed", install(*extras))


def explain_missing(program: str, extra: str) -> None:
    """From now on a package of the extra that is missing ends this process with one line, exit code 1; for a
    program whose module imports them, before it does.
    """
    above = sys.excepthook

    def explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, ModuleNotFoundError) and is_of(error, extra):
            refuse_missing(program, error, extra)
        else:
            above(kind, error, trace)

    sys.excepthook = explain
