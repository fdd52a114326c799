"""Has verifiers play an environment's tasks, and puts their groups into a lane: `VerifiersRollout`."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, Self, Unpack

from shmbridge.producers.rollout import HttpServer, Late, Runner, RunOptions, Task
from shmbridge.producers.verifiers.door import GENERATE, Door, Heard, NoTokenRoute
from shmbridge.producers.verifiers.rows import EpisodeFailed, Run, group_of

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

_LOOK_S = 0.25  # between two looks at the policy version


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
        if not episode.ok and episode.errors:  # an environment's own hook: nobody knows what rewards lack
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
