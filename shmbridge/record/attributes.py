"""The standard columns as attributes of records and batches, for completion and type checkers.

A test holds this list to shmbridge.schema.
"""

from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, overload

import numpy as np

from shmbridge._ext.record import Ragged
from shmbridge.record.columns import RaggedLists

_Array = np.ndarray[Any, Any]
_Maps = list[dict[str, float]]
_Texts = list[str | None]
Value = TypeVar("Value")


class Column(Generic[Value]):
    """A column of a record as an attribute; None where the record lacks it."""

    def __init__(self, meaning: str) -> None:
        self.__doc__ = meaning

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, record: None, owner: type) -> Self: ...
    @overload
    def __get__(self, record: object, owner: type) -> Value: ...
    def __get__(self, record: Any, owner: type) -> Any:
        if record is None:
            return self
        present = self._name in record
        return record[self._name] if present else None


class RecordColumns:
    """`record.tokens`: as `record["tokens"]`, but None for a column that the record lacks."""

    __slots__ = ()

    tokens = Column["Ragged"]("Token ids, prompt and response.")
    prompt_length = Column["_Array | None"]("Tokens before the first trained turn.")
    loss_mask = Column["Ragged | None"]("1 where a token was sampled and is trained.")
    masks = Column["Ragged | None"]("Atropos' masks where they are neither -100 nor the token.")
    score = Column["_Array | None"]("Outcome reward of each trajectory.")
    raw_score = Column["_Array | None"]("The environment's own score, where a reward bridge changed it.")
    advantages = Column["Ragged | None"]("Advantage of each token, from the environment.")
    token_rewards = Column["Ragged | None"]("Reward placed on tokens.")
    step_rewards = Column["Ragged | None"]("Process reward of each step.")
    step_ends = Column["Ragged | None"]("Index after the last token of each step.")
    inference_logprobs = Column["Ragged | None"]("Log-probabilities of the tokens as sampled, in nats.")
    ref_logprobs = Column["Ragged | None"]("Log-probabilities under the reference policy, in nats.")
    token_versions = Column["Ragged | None"]("Policy version that sampled each token, -1 elsewhere.")
    temperature = Column["_Array | None"]("Sampling temperature.")
    reward_components = Column["_Maps | None"]("Named parts of the score.")
    trace_spans = Column["Ragged | None"]("Begin and end token of each reasoning trace, in pairs.")
    distill_token_ids = Column["RaggedLists | None"]("The teacher's top tokens at each position.")
    distill_logprobs = Column["RaggedLists | None"]("Their log-probabilities, in nats.")
    instance_id = Column["_Texts | None"]("Id of the prompt's instance.")
    repetition_id = Column["_Array | None"]("Number of the rollout among those of its prompt.")
    row_index = Column["_Array | None"]("Number of the row among those of its episode.")
    is_last = Column["_Array | None"]("Whether the row ends its episode.")
    finish_reason = Column["_Array | None"]("Why it ended: 0 stop, 1 length, 2 abort, 3 error.")
    turn_ends = Column["Ragged | None"]("Index after the last token of each turn.")
    messages = Column["_Texts | None"]("The conversation, JSON text.")
    overrides = Column["_Texts | None"]("Atropos' overrides of each row, JSON text.")
    group_overrides = Column["_Texts | None"]("Atropos' overrides of the group, JSON text; one value.")
    generation_params = Column["_Texts | None"]("Parameters of generation, JSON text; one value.")
    images = Column["_Texts | None"]("Images of each row, JSON text.")
    extra = Column["_Texts | None"]("Keys without a column of their own, JSON text; one value.")
    routed_experts = Column["list[bytes | None] | None"]("Experts of each token, layer and choice, as bytes.")

    if TYPE_CHECKING:

        @overload
        def __getitem__(
            self,
            name: Literal[
                "tokens",
                "loss_mask",
                "masks",
                "advantages",
                "token_rewards",
                "step_rewards",
                "step_ends",
                "inference_logprobs",
                "ref_logprobs",
                "token_versions",
                "trace_spans",
                "turn_ends",
            ],
        ) -> Ragged: ...
        @overload
        def __getitem__(
            self,
            name: Literal[
                "prompt_length",
                "score",
                "raw_score",
                "temperature",
                "repetition_id",
                "row_index",
                "is_last",
                "finish_reason",
            ],
        ) -> _Array: ...
        @overload
        def __getitem__(self, name: Literal["reward_components"]) -> _Maps: ...
        @overload
        def __getitem__(self, name: Literal["distill_token_ids", "distill_logprobs"]) -> RaggedLists: ...
        @overload
        def __getitem__(
            self,
            name: Literal[
                "instance_id",
                "messages",
                "overrides",
                "group_overrides",
                "generation_params",
                "images",
                "extra",
            ],
        ) -> _Texts: ...
        @overload
        def __getitem__(self, name: Literal["routed_experts"]) -> list[bytes | None]: ...
        @overload
        def __getitem__(self, name: str) -> Any: ...
        def __getitem__(self, name: str) -> Any:
            """A column by name; KeyError if it is absent."""


class BatchColumns:
    """`batch.tokens`, padded or packed; None for a column that no record of the batch has."""

    if TYPE_CHECKING:
        tokens: _Array
        prompt_length: _Array | None
        loss_mask: _Array
        masks: _Array | None
        score: _Array | None
        scores: _Array | None
        raw_score: _Array | None
        advantages: _Array | None
        token_rewards: _Array | None
        step_rewards: Ragged | None
        step_ends: Ragged | None
        inference_logprobs: _Array | None
        ref_logprobs: _Array | None
        token_versions: _Array | None
        temperature: _Array | None
        reward_components: _Maps | None
        trace_spans: Ragged | None
        distill_token_ids: RaggedLists | None
        distill_logprobs: RaggedLists | None
        instance_id: _Texts | None
        repetition_id: _Array | None
        row_index: _Array | None
        is_last: _Array | None
        finish_reason: _Array | None
        turn_ends: Ragged | None
        messages: _Texts | None
        overrides: _Texts | None
        group_overrides: _Texts | None
        generation_params: _Texts | None
        images: _Texts | None
        extra: _Texts | None
        routed_experts: list[bytes | None] | None

        @overload
        def __getitem__(
            self,
            name: Literal[
                "tokens",
                "prompt_length",
                "loss_mask",
                "masks",
                "score",
                "scores",
                "raw_score",
                "advantages",
                "token_rewards",
                "inference_logprobs",
                "ref_logprobs",
                "token_versions",
                "temperature",
                "repetition_id",
                "row_index",
                "is_last",
                "finish_reason",
            ],
        ) -> _Array: ...
        @overload
        def __getitem__(
            self, name: Literal["step_rewards", "step_ends", "trace_spans", "turn_ends"]
        ) -> Ragged: ...
        @overload
        def __getitem__(self, name: Literal["reward_components"]) -> _Maps: ...
        @overload
        def __getitem__(self, name: Literal["distill_token_ids", "distill_logprobs"]) -> RaggedLists: ...
        @overload
        def __getitem__(
            self,
            name: Literal[
                "instance_id",
                "messages",
                "overrides",
                "group_overrides",
                "generation_params",
                "images",
                "extra",
            ],
        ) -> _Texts: ...
        @overload
        def __getitem__(self, name: Literal["routed_experts"]) -> list[bytes | None]: ...
        @overload
        def __getitem__(self, name: str) -> Any: ...
        def __getitem__(self, name: str) -> Any:
            """A column by name; KeyError if it is absent."""
