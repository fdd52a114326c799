"""Gives groups their rewards before they are put: steps scored by a model, scores as a config says.

`steps` finds where steps end, `scorer` says what scores them, `step_rewards` and `reward_bridge` are the
stages; `rewarded_producer` puts them before a `shmbridge.Producer`. How to: docs/how-to/rewards.md.
"""

from shmbridge.producers.rewards.batched import BatchedScorer
from shmbridge.producers.rewards.config import FormatMarker, LengthBounty, Linear, RewardConfig
from shmbridge.producers.rewards.config_file import read_config
from shmbridge.producers.rewards.endpoint import EndpointScorer
from shmbridge.producers.rewards.errors import RewardsFailed
from shmbridge.producers.rewards.function_scorer import FunctionScorer
from shmbridge.producers.rewards.huggingface import HuggingFacePrm, NextToken, TokenClass
from shmbridge.producers.rewards.known_models import math_shepherd, next_token_prm, qwen_math_prm, trl_prm
from shmbridge.producers.rewards.model_input import InputMaker, ModelInput, OwnText, OwnTokens
from shmbridge.producers.rewards.pooling import PoolingScorer
from shmbridge.producers.rewards.reward_bridge import RewardBridge
from shmbridge.producers.rewards.rewarded_producer import RewardedProducer
from shmbridge.producers.rewards.scorer import StepJudge, StepScorer
from shmbridge.producers.rewards.stages import Stage, Stages
from shmbridge.producers.rewards.step_rewards import StepRewards
from shmbridge.producers.rewards.step_row import StepRow
from shmbridge.producers.rewards.steps import (
    SplitByTag,
    SplitByToken,
    SplitByTurn,
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
