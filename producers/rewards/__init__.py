"""Gives groups their rewards before they are put: steps scored by a model, scores as a config says.

`steps` finds where steps end, `scorers` and `models` score them, `config` says what scores become; `stages`
has the stages, and the producer that runs them. How to: docs/how-to/rewards.md.
"""

from shmbridge.producers.rewards.config import FormatMarker, LengthBounty, Linear, RewardConfig, read_config
from shmbridge.producers.rewards.models import (
    HuggingFacePrm,
    InputMaker,
    ModelInput,
    NextToken,
    OwnText,
    OwnTokens,
    TokenClass,
    math_shepherd,
    next_token_prm,
    qwen_math_prm,
    trl_prm,
)
from shmbridge.producers.rewards.scorers import (
    BatchedScorer,
    EndpointScorer,
    FunctionScorer,
    PoolingScorer,
    StepJudge,
    StepScorer,
)
from shmbridge.producers.rewards.stages import RewardBridge, RewardedProducer, Stage, Stages, StepRewards
from shmbridge.producers.rewards.steps import (
    RewardsFailed,
    SplitByTag,
    SplitByToken,
    SplitByTurn,
    StepRow,
    StepSplitter,
    split_by_blank_line,
)

__all__ = [
    "BatchedScorer",
    "EndpointScorer",
    "FormatMarker",
    "FunctionScorer",
    "HuggingFacePrm",
    "InputMaker",
    "LengthBounty",
    "Linear",
    "ModelInput",
    "NextToken",
    "OwnText",
    "OwnTokens",
    "PoolingScorer",
    "RewardBridge",
    "RewardConfig",
    "RewardedProducer",
    "RewardsFailed",
    "SplitByTag",
    "SplitByToken",
    "SplitByTurn",
    "Stage",
    "Stages",
    "StepJudge",
    "StepRewards",
    "StepRow",
    "StepScorer",
    "StepSplitter",
    "TokenClass",
    "math_shepherd",
    "next_token_prm",
    "qwen_math_prm",
    "read_config",
    "split_by_blank_line",
    "trl_prm",
]
