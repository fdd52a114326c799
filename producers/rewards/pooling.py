"""Scores steps with a process reward model that vLLM serves: `POST /pooling`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shmbridge.producers.rewards.concurrency import Limit, in_thread
from shmbridge.producers.rewards.errors import RewardsFailed
from shmbridge.producers.rewards.http_post import post_json
from shmbridge.producers.rewards.model_input import InputMaker, ModelInput
from shmbridge.producers.rewards.step_row import StepRow


class PoolingScorer:
    """A `StepScorer` that asks vLLM for the outputs of a token classification head.

    All rows of a call are one request; vLLM itself puts requests together. Both of vLLM's ways of answering
    are understood: an output per token, and (pooling type STEP, as for Qwen2.5-Math-PRM) one per separator.

    Args:
        url: of the server, such as "http://127.0.0.1:8002"; "/pooling" is added.
        model: its name there.
        make_input: what the model is given of a row; it is sent as token ids.
        separator: id of the separator that STEP pooling looks for; None: outputs are per token.
        good: index of the output that is the value, where there are several.
        task: vLLM's name of the task; None where an older server does not know any.
        headers: of the request, such as an authorization.
        timeout_s: seconds for one answer.
        most_at_once: requests under way at the same time, for each event loop.
    """

    def __init__(
        self,
        url: str,
        model: str,
        make_input: InputMaker,
        *,
        separator: int | None = None,
        good: int = 1,
        task: str | None = "token_classify",
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        most_at_once: int = 8,
    ) -> None:
        self._url = url.rstrip("/") + "/pooling"
        self._model, self._make_input, self._separator, self._good = model, make_input, separator, good
        self._task, self._headers, self._timeout_s = task, headers or {}, timeout_s
        self._limit = Limit(most_at_once)

    async def score_steps(self, rows: Sequence[StepRow]) -> Sequence[Sequence[float]]:
        """Returns the values of each row's steps. Never blocks the event loop; may be cancelled.

        Raises:
            RewardsFailed: the server cannot be reached, refuses, or answers with other numbers of outputs.
        """
        inputs = await in_thread(lambda rows: [self._make_input(row) for row in rows], rows, "make_input")
        asked = [each for each in inputs if each.reads]
        if not asked:
            return [[] for _ in rows]
        (found,) = await self._limit.all(self._ask, [asked])
        values = iter(found)
        return [next(values) if each.reads else [] for each in inputs]

    async def _ask(self, inputs: Sequence[ModelInput]) -> list[list[float]]:
        body: dict[str, Any] = {
            "model": self._model,
            "input": [each.ids for each in inputs],
            "add_special_tokens": False,
            "encoding_format": "float",
        }
        if self._task is not None:
            body["task"] = self._task
        answer = await post_json(self._url, body, self._headers, self._timeout_s)
        try:
            outputs = {each["index"]: each["data"] for each in answer["data"]}
            return [self._values(each, outputs[at]) for at, each in enumerate(inputs)]
        except (KeyError, TypeError, IndexError, ValueError) as wrong:
            raise RewardsFailed(
                f"{self._url} does not answer as vLLM's pooling API: {wrong!r} in {answer!r:.200}"
            ) from wrong

    def _values(self, asked: ModelInput, outputs: list[Any]) -> list[float]:
        """The outputs at the tokens that are read."""
        separators = [at for at, token in enumerate(asked.ids) if token == self._separator]
        if len(outputs) == len(asked.ids):
            found = [outputs[read] for read in asked.reads]
        elif self._separator is not None and len(outputs) == len(separators):
            by_place = dict(zip(separators, outputs, strict=True))
            found = [by_place[read] for read in asked.reads]
        else:
            raise RewardsFailed(
                f"{self._url} has {len(outputs)} outputs for {len(asked.ids)} tokens with {len(separators)} "
                "separators",
                hint="PoolingScorer(separator=): the id that the server's step_tag_id names",
            )
        return [self._value(each) for each in found]

    def _value(self, output: Any) -> float:
        if isinstance(output, list):
            return float(output[self._good] if len(output) > 1 else output[0])
        return float(output)
