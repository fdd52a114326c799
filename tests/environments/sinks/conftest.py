"""The frameworks whose hooks are filled: from a checkout that the environment names, or a stand-in."""

import os
import sys
from dataclasses import dataclass, field
from types import ModuleType

import pytest


def only(monkeypatch, package: str, variable: str) -> None:
    """Makes the package importable from the checkout that the variable names, for one test."""
    if not (checkout := os.environ.get(variable)):
        pytest.skip(f"not run: {variable} names no checkout")
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(checkout)


@dataclass(frozen=True)
class TokenCaptureSnapshot:
    rollout_id: str
    entries: tuple
    incomplete: bool
    snapshot_id: str
    version: int


@dataclass
class TokenEntry:
    """As NeMo Gym's record at commit 07d6b0d0; theirs is a pydantic model that checks more."""

    rollout_id: str
    model_call_id: str
    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_log_probs: list[float]
    schema_version: int = 1
    model: str = ""
    routed_experts: object = None
    output_items: list[dict] = field(default_factory=list)
    token_item_index: int | None = None
    created_at: float = 0.0

    def model_dump(self, mode: str) -> dict:
        return dict(vars(self))


@pytest.fixture(params=["hooks", "checkout"])
def nemo_gym(request, monkeypatch) -> type:
    """NeMo Gym's TokenEntry: a stand-in written from its hooks, and its own where there is a checkout."""
    if request.param == "checkout":
        only(monkeypatch, "nemo_gym", "SHMBRIDGE_NEMO_GYM")
        from nemo_gym.token_id_capture.records import TokenEntry as Real

        return Real
    package = "nemo_gym.token_id_capture"
    for name in ("nemo_gym", package, f"{package}.protocols", f"{package}.records"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[f"{package}.protocols"].TokenCaptureSnapshot = TokenCaptureSnapshot
    sys.modules[f"{package}.records"].TokenEntry = TokenEntry
    return TokenEntry
