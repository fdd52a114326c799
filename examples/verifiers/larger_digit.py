"""A taskset written against verifiers' public API alone: answer a digit with a larger one.

    PYTHONPATH=examples/verifiers shmbridge env --verifiers larger_digit --bridge run1 \\
        --server http://127.0.0.1:9004 --tokenizer runs/tiny --env-config agent.runtime.type=subprocess \\
        --max-tokens 3 --tickets

The harness asks in the process of the run, once a turn, as verifiers allows: no program is started. Imports
nothing of shmbridge.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import verifiers.v1 as vf


class LargerData(vf.TaskData):
    digit: int


class LargerTask(vf.Task[LargerData]):
    @vf.reward
    async def larger(self, task: LargerData, trace: vf.Trace) -> float:
        """1 for an answer that begins with a larger digit."""
        said = trace.last_reply[:1]
        return float(said.isdigit() and int(said) > task.digit)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        """1 for an answer of one character."""
        return float(len(trace.last_reply) == 1)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class LargerConfig(vf.TasksetConfig):
    tasks: int = 8
    first: int = 0


class LargerTaskset(vf.Taskset[LargerTask, LargerConfig]):
    def load(self) -> Iterator[LargerTask]:
        for number in range(self.config.first, self.config.first + self.config.tasks):
            data = LargerData(name=f"larger#{number}", prompt=f">{number % 9}:", digit=number % 9)
            yield LargerTask(data, self.config.task)


class AskingHarness(vf.Harness[vf.HarnessConfig]):
    """Asks the model once for each turn, in this process."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [
            {"role": each.role, "content": each.content or ""} for each in prompt or []
        ]  # fmt: skip
        if system:
            messages = [{"role": "system", "content": system}, *messages]
        # verify: certificates are read for each client, and none is used on a port of this host
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(timeout=None, headers=headers, verify=False) as client:
            said = await client.post(
                f"{endpoint}/chat/completions", json={"model": ctx.model, "messages": messages}
            )
        return vf.ProgramResult(0 if said.status_code == 200 else 1, "", said.text[:500])


__all__ = ["AskingHarness", "LargerTaskset"]
