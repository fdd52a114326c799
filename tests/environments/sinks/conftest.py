"""The frameworks whose hooks are filled: from a checkout that the environment names, or a stand-in."""

import os
import pydoc
import sys
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace

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


class Status(Enum):
    COMPLETED = "completed"
    ABORTED = "aborted"
    FAILED = "failed"
    TRUNCATED = "truncated"


@dataclass
class Sample:
    """As miles' Sample at commit 31f1ca96, as far as a buffer reads it."""

    Status = Status
    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: object = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: object = None
    remove_sample: bool = False
    status: Status = Status.COMPLETED
    metadata: dict = field(default_factory=dict)
    train_metadata: dict | None = None

    def to_dict(self) -> dict:
        return vars(self) | {"status": self.status.value}

    @staticmethod
    def from_dict(fields: dict):
        return Sample(**fields | {"status": Status(fields["status"])})

    def get_reward_value(self, args):
        return self.reward if not args.reward_key else self.reward[args.reward_key]

    def reset_for_retry(self) -> None:
        self.tokens, self.response, self.response_length, self.reward = [], "", 0, None
        self.loss_mask, self.weight_versions, self.rollout_log_probs = None, [], None
        self.rollout_routed_experts, self.status = None, Status.ABORTED


class MetricGatherer:
    def __init__(self) -> None:
        self.drops = Counter()

    def on_dynamic_filter_drop(self, reason) -> None:
        self.drops[reason] += 1

    def collect(self) -> dict:
        return {f"rollout/dynamic_filter/drop_{reason}": n for reason, n in self.drops.items()}


@dataclass
class DynamicFilterOutput:
    keep: bool
    reason: str | None = None


@dataclass(frozen=True)
class DataBufferConstructorInput:
    args: object
    unused_handler_fn: object


@dataclass
class DataBufferInput:
    prompt_group: list
    group: list


@pytest.fixture(params=["hooks", "checkout"])
def miles(request, monkeypatch) -> SimpleNamespace:
    """What a buffer needs of miles: a stand-in written from its hooks, and its own from a checkout."""
    if request.param == "checkout":
        only(monkeypatch, "miles", "SHMBRIDGE_MILES")
    else:
        say = DynamicFilterOutput(keep=True)
        stands = {
            "rollout.filter_hub.base_types": {
                "DynamicFilterOutput": DynamicFilterOutput,
                "MetricGatherer": MetricGatherer,
                "call_dynamic_filter": lambda fn, args, group: fn(args, group) if fn else say,
            },
            "rollout.fully_async_data_buffer": {
                "DataBufferConstructorInput": DataBufferConstructorInput,
                "DataBufferInput": DataBufferInput,
            },
            "utils.misc": {"load_function": lambda path: path and pydoc.locate(path)},
            "utils.types": {"Sample": Sample},
            "utils": {}, "rollout": {}, "rollout.filter_hub": {},
        }  # fmt: skip
        monkeypatch.setitem(sys.modules, "miles", ModuleType("miles"))
        for name, names in stands.items():
            module = ModuleType(f"miles.{name}")
            vars(module).update(names)
            monkeypatch.setitem(sys.modules, f"miles.{name}", module)
    from miles.rollout import fully_async_data_buffer as buffers
    from miles.utils.types import Sample as Kind

    return SimpleNamespace(
        Sample=Kind, Input=buffers.DataBufferInput, Constructor=buffers.DataBufferConstructorInput
    )
