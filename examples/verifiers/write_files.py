"""A taskset for agents that work in a shell: write a word into a file. verifiers' `bash` harness plays it.

    shmbridge env --verifiers write_files --bridge run1 --server http://127.0.0.1:9004 --tokenizer DIR \\
        --env-config agent.harness.id=bash agent.runtime.type=subprocess agent.max_turns=4 --max-tokens 256

The agent is a program of its own, which verifiers starts with `uv`, in a folder of its own; here on this
host, with `agent.runtime.type=docker` in a container. Imports nothing of shmbridge.
"""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

WORDS = ("bridge", "lane", "ring", "group", "token", "policy")


class FileData(vf.TaskData):
    word: str


class FileTask(vf.Task[FileData]):
    @vf.reward
    async def written(self, task: FileData, runtime: vf.Runtime) -> float:
        """1 if the file holds the word, 0.2 if there is one."""
        found = await runtime.run(["cat", "answer.txt"], {})
        if found.exit_code:
            return 0.0
        return 1.0 if found.stdout.strip() == task.word else 0.2

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class FileTaskset(vf.Taskset[FileTask, vf.TasksetConfig]):
    def load(self) -> Iterator[FileTask]:
        for word in WORDS:
            prompt = f"Write the word {word} into the file answer.txt in the current folder."
            yield FileTask(FileData(name=word, prompt=prompt, word=word), self.config.task)


__all__ = ["FileTaskset"]
