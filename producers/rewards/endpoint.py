"""Scores steps by asking an HTTP server for JSON: one's own, around any model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shmbridge.producers.rewards.concurrency import Limit
from shmbridge.producers.rewards.errors import RewardsFailed
from shmbridge.producers.rewards.http_post import post_json
from shmbridge.producers.rewards.step_row import StepRow


class EndpointScorer:
    """A `StepScorer` that posts the rows of a call to an address.

    The request is `{"rows": [{"tokens": [...], "step_starts": [...], "step_ends": [...]}, ...]}`, each row
    with `"prompt": "..."` and `"steps": ["...", ...]` besides if `text`; the answer
    `{"step_rewards": [[0.5, ...], ...]}`.

    Args:
        url: where to post.
        text: send text, too; needs `StepRewards(tokenizer=)`.
        headers: of the request.
        timeout_s: seconds for one answer.
        most_at_once: requests under way at the same time, for each event loop.
    """

    def __init__(
        self,
        url: str,
        *,
        text: bool = False,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        most_at_once: int = 8,
    ) -> None:
        self._url, self._text, self._headers, self._timeout_s = url, text, headers or {}, timeout_s
        self._limit = Limit(most_at_once)

    async def score_steps(self, rows: Sequence[StepRow]) -> Sequence[Sequence[float]]:
        """Returns what the server says. Never blocks the event loop; may be cancelled.

        Raises:
            RewardsFailed: the server cannot be reached, or does not answer as said above.
        """
        (scores,) = await self._limit.all(self._ask, [rows])
        return scores

    async def _ask(self, rows: Sequence[StepRow]) -> Sequence[Sequence[float]]:
        body = {"rows": [self._row(row) for row in rows]}
        answer = await post_json(self._url, body, self._headers, self._timeout_s)
        scores = answer.get("step_rewards") if isinstance(answer, dict) else None
        if not isinstance(scores, list) or not all(isinstance(row, list) for row in scores):
            raise RewardsFailed(
                f'{self._url} answers without "step_rewards", a list per row: {answer!r:.200}'
            )
        return scores

    def _row(self, row: StepRow) -> dict[str, Any]:
        sent = {"tokens": list(row.tokens), "step_starts": list(row.starts), "step_ends": list(row.ends)}
        return {**sent, "prompt": row.prompt_text, "steps": row.step_texts} if self._text else sent
