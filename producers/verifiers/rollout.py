"""Has verifiers play an environment's tasks, and puts their groups into a lane: `VerifiersRollout`."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, Unpack

import numpy as np

from shmbridge import ShmBridgeError
from shmbridge.producers.rollout import HttpServer, Late, Runner, RunOptions, Task
from shmbridge.producers.verifiers.door import GENERATE, Door, Heard, NoTokenRoute, Tokens, key_of
from shmbridge.schema import FINISH_REASONS

if TYPE_CHECKING:
    import pyarrow as pa

_FINISHED = {"stop": "stop", "length": "length", "abort": "abort", "error": "error", "tool_calls": "stop"}

# What stands for a value that only other rows of the group have.
_ABSENT: dict[str, Callable[[Mapping[str, Any]], Any] | None] = {
    "advantages": None,
    "ref_logprobs": lambda row: np.full(len(row["tokens"]), np.nan, np.float32),
    "reward_components": lambda _: {},
    "routed_experts": lambda _: b"",
    "sampling_mask": lambda _: b"",
}
log = logging.getLogger(__name__)
_LOOK_S = 0.25  # between two looks at the policy version


class EpisodeFailed(ShmBridgeError):
    """verifiers ended an episode, or one of its traces, with an error; `kind` is its own name of it."""

    code = "SB522"

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message, hint="see the error, and verifiers' log")
        self.kind = kind


@dataclass(eq=False)
class Run:
    """One episode of a task that verifiers plays.

    Attributes:
        traces: those that came to a good end and are trainable, once it is over.
        heard: what the server sampled for each trace that was begun, by its id.
    """

    instance_id: str
    repetition_id: int
    temperature: float = 1.0
    traces: list[Any] = field(default_factory=list)
    heard: dict[str, Heard] = field(default_factory=dict)

    @property
    def asked_again(self) -> int:
        """Answers that were aborted before their first token."""
        return sum(each.asked_again for each in self.heard.values())

    def sampled_versions(self) -> list[int]:
        """Returns the policy version of each token sampled so far, -1 where it is not known. Never blocks."""
        return [
            version
            for each in self.heard.values()
            for versions in each.versions.values()
            for version in versions.tolist()
        ]

    def require_finished(self) -> None:
        """Raises EpisodeFailed if no row can be made of it. Never blocks."""
        name = f"episode {self.repetition_id} of task {self.instance_id!r}"
        if not any(_branches(trace) for trace in self.traces):
            raise EpisodeFailed(f"{name} has no trainable branch with sampled tokens", "no_tokens")
        for trace in self.traces:
            for part, value in {"": trace.reward, **_components(trace)}.items():
                if not math.isfinite(value):
                    raise EpisodeFailed(f"{name} has the reward {part!r} {value}", "no_reward")


def group_of(runs: Sequence[Run], left_out: Counter[str] | None = None) -> dict[str, Any]:
    """Returns the columns of a group, a row for each trainable branch of each trace. Never blocks.

    A column of which no row has a value is not there. One of which only some have keeps those; but for
    `advantages`, which have no mark of "none": they are left out.

    Args:
        left_out: counts the rows whose advantages were left out, under "advantages".
    """
    rows = [row for run in runs for row in _rows(run)]
    group: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0] if name not in _ABSENT}
    for name, absent in _ABSENT.items():
        known = [row for row in rows if row[name] is not None]
        if known and absent is not None:
            group[name] = [absent(row) if row[name] is None else row[name] for row in rows]
        elif len(known) == len(rows):
            group[name] = [row[name] for row in rows]
        elif known and left_out is not None:
            left_out[name] += len(known)
    group["extra"] = {"rows": [row.pop("about") for row in rows]}
    del group["about"]
    return group


def _branches(trace: Any) -> list[Any]:
    """The branches that train the policy and have something that it sampled."""
    return [each for each in trace.branches if each.trainable and any(each.sampled_mask)]


def _rows(run: Run) -> list[dict[str, Any]]:
    """The rows of an episode, numbered through."""
    found = [(trace, branch) for trace in run.traces for branch in _branches(trace)]
    rows = [_row(run, trace, branch) for trace, branch in found]
    for number, row in enumerate(rows):
        row["row_index"], row["is_last"] = number, number == len(rows) - 1
    return rows


def _row(run: Run, trace: Any, branch: Any) -> dict[str, Any]:
    tokens = np.asarray(branch.token_ids, np.int32)
    mask = np.asarray(branch.sampled_mask, np.uint8)
    versions, logprobs, ends, reason = _sampled(run.heard.get(trace.id, Heard()), branch, tokens)
    components = _components(trace)
    routes, kept = branch.routed_experts, branch.sampling_mask
    return {
        "tokens": tokens,
        "loss_mask": mask,
        "prompt_length": int(mask.argmax()),
        "score": float(trace.reward),
        "inference_logprobs": logprobs,
        "token_versions": versions,
        "temperature": run.temperature,
        "finish_reason": FINISH_REASONS.index(reason),
        "turn_ends": ends,
        "messages": [each.model_dump(exclude_none=True) for each in branch.messages],
        "instance_id": run.instance_id,
        "repetition_id": run.repetition_id,
        "advantages": branch.advantages,
        "ref_logprobs": branch.reference_logprobs,
        "reward_components": components or None,
        "routed_experts": None if routes is None else np.ascontiguousarray(routes).tobytes(),
        "sampling_mask": None if kept is None else _mask_bytes(kept),
        "about": {
            "trace": trace.id,
            "agent": trace.agent.name,
            "branch": branch.index,
            "stop_condition": trace.stop_condition,
            "metrics": {name: value for name, value in trace.metrics.items() if _is_number(value)},
            **(
                {}
                if routes is None
                else {"routed_experts": {"shape": list(routes.shape), "dtype": str(routes.dtype)}}
            ),
        },
    }


def _components(trace: Any) -> dict[str, float]:
    return {name: each.value for name, each in trace.rewards.items() if each is not None}


def _is_number(value: Any) -> bool:
    return value is not None and math.isfinite(value)


def _sampled(heard: Heard, branch: Any, tokens: Tokens) -> tuple[Tokens, Any, list[int], str]:
    """Version and log-probability of each token, the ends of the turns, and why the last ended.

    Unknown are the version, -1, of what the server was not heard to sample, and the log-probability, NaN, of
    what has none; 0.0 stands where nothing was sampled.
    """
    versions = np.full(len(tokens), -1, np.int32)
    logprobs = np.zeros(len(tokens), np.float32)
    ends: list[int] = []
    reason, begin = "stop", 0
    for node in branch.nodes:
        end = begin + len(node.token_ids)
        at = begin + np.flatnonzero(np.asarray(node.mask, bool))
        if len(at):
            said = node.logprobs if len(node.logprobs) == len(at) else np.nan
            logprobs[at] = said
            ends.append(int(at[-1]) + 1)
            key = key_of(tokens[: ends[-1]], int(at[0]))
            if (found := heard.versions.get(key)) is not None and len(found) == len(at):
                versions[at] = found
            reason = _FINISHED.get(heard.reasons.get(key, "stop"), "stop")
        begin = end
    return versions, logprobs, ends, reason


def _mask_bytes(kept: Any) -> bytes:
    """The counts of kept token ids, one for each token of the row, then the ids themselves, all int32."""
    counts, ids = (np.ascontiguousarray(each, np.int32) for each in (kept.counts, kept.ids))
    return counts.tobytes() + ids.tobytes()


class VerifiersRollout(Runner[Run]):
    """Plays environments of verifiers 0.4 against one inference server and puts the groups into one lane.

    For one event loop; an async context manager, which brings up what the environment shares between episodes
    and ends it. The constructor blocks: it imports verifiers, loads the environment, and reserves the lane's
    memory.

    Args:
        bridge: name of the bridge.
        server: address of the inference server, which has vLLM's route `/inference/v1/generate`.
        tokenizer: the model's: a folder or a name.
        config: verifiers' `EnvConfig`, or a mapping that `vf.resolve_env_config` takes.
        evaluation: the same of the environment that evaluates; None: nothing is evaluated.
        model: its name in requests; None: the first that the server lists.
        renderer: fields of verifiers' `RendererConfig`, such as {"name": "qwen3"}; None: the renderer of the
            model's family, else its chat template, which knows no tools.
        sampling: fields of verifiers' `SamplingConfig`.
        how: group_size, concurrency, limits and all else that a `Runner` takes.

    Attributes:
        left_out: rows whose values of a column were left out, since other rows of the group had none: it can
            only be `advantages`.
    """

    def __init__(
        self,
        bridge: str,
        server: str,
        tokenizer: str,
        config: Any,
        *,
        evaluation: Any = None,
        model: str | None = None,
        renderer: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        **how: Unpack[RunOptions],
    ) -> None:
        import verifiers.v1 as vf

        self.env = vf.load_environment(vf.resolve_env_config(config))
        self.evaluation = (
            None if evaluation is None else vf.load_environment(vf.resolve_env_config(evaluation))
        )
        self._tokenizer, self._renderer = tokenizer, renderer
        self._sampling = vf.SamplingConfig(**{"temperature": 1.0, **(sampling or {})})
        self._http = HttpServer(server, api="vllm", model=model)
        self._door = Door(self._http)
        self._open = AsyncExitStack()
        self.left_out: Counter[str] = Counter()
        self._context: Any = None
        how.setdefault("env_name", self.env.config.env_id[:32])
        super().__init__(bridge, schema=_schema(), **how)

    async def __aenter__(self) -> Self:
        import verifiers.v1 as vf

        self._open.push_async_callback(super().close)
        self._open.push_async_callback(self._http.close)
        try:
            model = await self._http.model_name()
            await self._require_route()
            await self._open.enter_async_context(self._door)
            client = {
                "base_url": self._door.url,
                "headers": self._door.headers,
                "api_key_var": "SHMBRIDGE_NO_KEY",  # none of the user's gets here
                "renderer_model_name": self._tokenizer,
                **({} if self._renderer is None else {"renderer": dict(self._renderer)}),
            }
            self._context = vf.ModelContext(
                model=model, client=vf.TrainClientConfig(**client), sampling=self._sampling
            )
            await self._open.enter_async_context(self.env.serving())
            if self.evaluation is not None:
                await self._open.enter_async_context(self.evaluation.serving())
        except BaseException:
            await self._open.aclose()
            raise
        return self

    async def close(self) -> None:
        """Ends what the environment shares, leaves the bridge, with what is committed in the lane, and closes
        the connections."""
        await self._open.aclose()

    async def _require_route(self) -> None:
        """Raises NoTokenRoute."""
        status, _ = await self._http.answered("POST", GENERATE, {})
        if status in (404, 405):
            raise NoTokenRoute(
                f"{self._http.url} has no {GENERATE}",
                hint="serve with `shmbridge serve`, or with `vllm serve --enable-scale-out`",
            )

    def tasks(self, *, epochs: int | None = None, shuffle: int | None = None) -> Iterator[Task[Any]]:
        """Yields the tasks of the environment's taskset, as `run` takes them.

        Blocks, since a taskset may load its data set, and in the thread of the event loop, since one may
        play with the random numbers of the process.

        Args:
            epochs: ends after so many; None: no end.
            shuffle: seed of another order in each epoch; None: verifiers' own order.
        """
        epoch = 0
        while epochs is None or epoch < epochs:
            taskset = self.env.taskset
            if shuffle is not None:
                taskset = taskset.shuffle(shuffle + epoch)
            yield from map(_task, taskset)
            epoch += 1

    async def evaluate_every(self, versions: int, most: int | None = None) -> None:
        """Evaluates at the version that is published now, and each time so many more are; until cancelled.

        Args:
            versions: between two evaluations; one that lasts longer delays the next.
            most: tasks; None: all of the taskset.
        """
        assert self.evaluation is not None
        taskset = self.evaluation.taskset if most is None else self.evaluation.taskset.take(most)
        due = self.producer.policy_version
        while True:
            if (version := self.producer.policy_version) >= due:
                put = await self.evaluate(map(_task, taskset), self.play_evaluation)
                log.info("evaluated %d tasks at version %d", put, version)
                due = version + versions
            await asyncio.sleep(_LOOK_S)

    def begin(self, task: Task[Any], instance_id: str, repetition_id: int) -> Run:
        """Returns an episode before its first answer. Never blocks."""
        return Run(instance_id, repetition_id, float(self._sampling.temperature or 0.0))

    def columns(self, episodes: Sequence[Run]) -> Mapping[str, Any]:
        """Returns the columns of a group, a row for each trainable branch. Never blocks."""
        return group_of(episodes, self.left_out)

    def stats(self) -> dict[str, float]:
        """Returns counters, flat: those of `Runner`, and values left out, by column. Never blocks."""
        left_out = {f"values_left_out_total{{{name}}}": float(n) for name, n in self.left_out.items()}
        return {**super().stats(), **left_out}

    async def play(self, run: Run, task: Any) -> None:
        """Has verifiers play one episode of one of its tasks. A trace that fails is counted in `losses`.

        Raises Late, EpisodeFailed: no trace is left.
        """
        await self._play(self.env, run, task)

    async def play_evaluation(self, run: Run, task: Any) -> None:
        """The same of the environment that evaluates."""
        await self._play(self.evaluation, run, task)

    async def _play(self, env: Any, run: Run, task: Any) -> None:
        def minted(trace: Any) -> None:
            run.heard[trace.id] = self._door.heard[trace.id] = Heard()

        (slot,) = env.slots(task, 1)
        try:
            episode = await env.run_slot(slot, self._context, on_trace=minted)
        finally:
            for name in run.heard:
                with suppress(KeyError):
                    del self._door.heard[name]
        if (
            not episode.ok and episode.errors
        ):  # an environment's own hook failed: its rewards may be incomplete
            raise _failure(episode, f"episode {run.repetition_id} of task {run.instance_id!r}")
        failed = [trace for trace in episode.traces if not trace.ok]
        run.traces = [trace for trace in episode.traces if trace.ok and trace.agent.trainable]
        run.heard = {trace.id: run.heard[trace.id] for trace in run.traces}
        if failed and not run.traces:
            raise _failure(failed[-1], f"trace {failed[-1].id} of task {run.instance_id!r}")
        for trace in failed:
            self.losses.episode(_failure(trace, f"trace {trace.id} of task {run.instance_id!r}"))


def _task(task: Any) -> Task[Any]:
    return Task((), task, task.key)


def _failure(failed: Any, name: str) -> Exception:
    """What verifiers says of a trace or an episode that failed."""
    error = failed.last_error
    if failed.is_timeout:
        return Late(f"{name}: {error.message if error else failed.stop_condition}")
    kind = error.type if error else "failed"
    return EpisodeFailed(f"{name}: {kind}: {error.message if error else 'without an error'}", kind)


def _schema() -> pa.Schema:
    """The standard columns, and which token ids the sampling kept."""
    import pyarrow as pa

    return pa.schema([("sampling_mask", pa.binary())])
