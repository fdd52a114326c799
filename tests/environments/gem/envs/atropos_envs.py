"""Atropos environments of every way to ask: messages, text, tokens, a managed server; good and bad manners.

Each counts its runs and the completions it asked for, in lists of its own object.
"""

import asyncio
import contextlib
import itertools
import random
import threading
import time
from typing import ClassVar

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup, ScoredDataItem
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from pydantic import Field


class PlainConfig(BaseEnvConfig):
    turns: int = Field(default=3, description="questions of an episode")
    score: float = Field(default=1.0, description="of every episode")
    breaks_in_turn: int = Field(default=-1, description="raise after this many answers")
    setup_fails: bool = Field(default=False, description="setup raises")


class ChatEnv(BaseEnv):
    """Counts upwards with the model, message by message; every rollout by itself."""

    name = "chat"
    env_config_cls = PlainConfig
    setups = 0

    @classmethod
    def config_init(cls):
        server = APIServerConfig(model_name="policy", base_url="http://127.0.0.1:9/v1", api_key="x")
        return PlainConfig(group_size=8, use_wandb=False), [server]

    async def setup(self):
        if self.config.setup_fails:
            raise RuntimeError("no data")
        type(self).setups += 1
        self.items, self.runs, self.said = itertools.count(1), [], []

    async def get_next_item(self):
        return {"start": next(self.items)}

    async def evaluate(self, *args, **kwargs):
        pass

    async def ask(self, chat):
        completion = await self.server.chat_completion(messages=chat, n=1, max_tokens=9, temperature=0.5)
        self.said.append(completion.choices[0].message.content)
        if len(chat) // 2 == self.config.breaks_in_turn:
            raise KeyError("the environment broke")
        return self.said[-1]

    async def collect_trajectory(self, item):
        self.runs.append(item["start"])
        chat = [{"role": "system", "content": "count"}, {"role": "user", "content": str(item["start"])}]
        for turn in range(self.config.turns):
            chat.append({"role": "assistant", "content": await self.ask(chat)})
            if turn + 1 < self.config.turns:
                chat.append({"role": "user", "content": f"and after {chat[-1]['content']}?"})
        row = tokenize_for_trainer(
            self.tokenizer, chat, include_messages=True, train_on_all_assistant_turns=True
        )
        item["start"] = -1  # items may be changed
        return ScoredDataItem(**row, scores=self.config.score), []


class GroupEnv(ChatEnv):
    """Token-exact through the managed server, over several turns, a whole group at a time."""

    name = "group"

    async def collect_trajectories(self, item):
        self.runs.append(item["start"])
        chat = [{"role": "user", "content": str(item["start"])}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            for _ in range(self.config.turns):
                completion = await managed.chat_completion(
                    messages=chat, n=self.config.group_size, max_tokens=9, temperature=0.5
                )
                self.said.append(completion.choices[0].message.content)
                chat += [{"role": "assistant", "content": self.said[-1]}, {"role": "user", "content": "next"}]
            (node,) = managed.get_state()["nodes"]
        self.logprobs_seen = node.logprobs
        group = ScoredDataGroup(
            tokens=[node.tokens],
            masks=[node.masked_tokens],
            inference_logprobs=[node.logprobs],
            scores=[self.config.score],
        )
        return group, []


class TextEnv(ChatEnv):
    """Continues a text."""

    name = "text"

    async def collect_trajectory(self, item):
        self.runs.append(item["start"])
        text = f"{item['start']}:"
        for _ in range(self.config.turns):
            completion = await self.server.completion(prompt=text, n=1, max_tokens=9, stop=["\n"])
            self.said.append(completion.choices[0].text)
            text += self.said[-1] + "\nnext:"
        tokens = self.tokenizer.encode(text)
        return ScoredDataItem(tokens=tokens, masks=tokens, scores=self.config.score), []


class TokensEnv(ChatEnv):
    """Asks for token ids and log-probabilities itself."""

    name = "tokens"

    async def collect_trajectory(self, item):
        prompt, tokens, logprobs, reasons = await self.server.tokens_and_logprobs_completion(
            prompt=f"{item['start']}:", n=1, max_tokens=9
        )
        row = {
            "tokens": prompt + tokens[0],
            "masks": [-100] * len(prompt) + tokens[0],
            "inference_logprobs": [1.0] * len(prompt) + logprobs[0],
            "messages": [{"role": "assistant", "content": reasons[0]}],
        }
        return {**row, "scores": self.config.score}, []


class LogprobsEnv(ChatEnv):
    """Asks for the log-probabilities of a chat completion and of a text completion."""

    name = "logprobs"

    async def collect_trajectory(self, item):
        chat = await self.server.chat_completion(messages=[{"role": "user", "content": "a"}], logprobs=True)
        text = await self.server.completion(prompt="b", logprobs=1)
        seen = [each.logprob for each in chat.choices[0].logprobs.content]
        seen += text.choices[0].logprobs.token_logprobs
        return {
            "tokens": [1] * len(seen),
            "masks": [1] * len(seen),
            "inference_logprobs": seen,
            "scores": 1.0,
        }, []


class FourEnv(ChatEnv):
    """Best of four: asks for them at once, whatever the group size."""

    name = "four"

    async def collect_trajectory(self, item):
        self.runs.append(item["start"])
        completion = await self.server.chat_completion(messages=[{"role": "user", "content": "4"}], n=4)
        self.said = [choice.message.content for choice in completion.choices]
        tokens = self.tokenizer.encode(max(self.said))
        return ScoredDataItem(tokens=tokens, masks=tokens, scores=float(len(set(self.said)))), []


class TogetherEnv(ChatEnv):
    """Two conversations at the same time."""

    name = "together"

    async def collect_trajectory(self, item):
        self.runs.append(item["start"])
        self.said = await asyncio.gather(*(self.ask([{"role": "user", "content": each}]) for each in "ab"))
        return ScoredDataItem(tokens=[1], masks=[1], scores=float(self.said == ["A", "B"])), []


class ThreadEnv(ChatEnv):
    """Asks from a thread, in an event loop of its own, and swallows errors."""

    name = "thread"

    async def collect_trajectory(self, item):
        self.runs.append(item["start"])
        chat = [{"role": "user", "content": "t"}]
        try:
            said = await asyncio.to_thread(lambda: asyncio.run(self.ask(chat)))
        except Exception:
            said = ""
        return ScoredDataItem(tokens=[1], masks=[1], scores=float(said == "T")), []


class WorkerEnv(ChatEnv):
    """One task asks for all episodes."""

    name = "worker"

    async def setup(self):
        await super().setup()
        self.queue = asyncio.Queue()
        self.worker = asyncio.create_task(self.work())

    async def work(self):
        while True:
            chat, answer = await self.queue.get()
            with contextlib.suppress(Exception):  # and the episode waits for ever
                answer.set_result(await self.ask(chat))

    async def collect_trajectory(self, item):
        answer = asyncio.get_running_loop().create_future()
        self.queue.put_nowait(([{"role": "user", "content": "w"}], answer))
        return ScoredDataItem(tokens=[1], masks=[1], scores=float(await answer == "W")), []


class ImpatientEnv(ChatEnv):
    """Bounds the time of a completion, and gives its episode a score of zero."""

    name = "impatient"
    gave_up = threading.Event()

    async def collect_trajectory(self, item):
        try:
            await asyncio.wait_for(self.ask([{"role": "user", "content": "i"}]), 0.05)
        except TimeoutError:
            self.gave_up.set()
        return ScoredDataItem(tokens=[1], masks=[1], scores=0.0), []


class OddEnv(ChatEnv):
    """Answers one question, then does what `ends` says."""

    name = "odd"
    ends = "none"

    async def collect_trajectory(self, item):
        if self.ends == "silent":
            return ScoredDataItem(tokens=[1], masks=[1], scores=1.0), []
        await self.ask([{"role": "user", "content": "o"}])
        if self.ends == "exit":
            raise SystemExit(3)
        if self.ends == "block":
            time.sleep(30)
        if self.ends == "hang":
            await asyncio.Event().wait()
        if self.ends == "teacher":
            await self.server.get_logprobs(prompt="o")
        if self.ends == "postprocessed":
            return ScoredDataItem(tokens=[1], masks=[1], scores=1.0), [{"start": 77}]
        return {"none": None, "nan": {"tokens": [1], "masks": [1], "scores": float("nan")}}[self.ends], []

    async def postprocess_histories(self, group):
        return (
            {**group, "scores": [score + 10 for score in group["scores"]]}
            if self.ends == "postprocessed"
            else group
        )


class StepwiseEnv(ChatEnv):
    """A group for every step."""

    name = "stepwise"

    async def collect_trajectories(self, item):
        groups = []
        for step in range(self.config.turns):
            await self.ask([{"role": "user", "content": str(step)}])
            groups.append(ScoredDataGroup(tokens=[[step]], masks=[[step]], scores=[float(step)]))
        return groups, []


class RewrittenEnv(ChatEnv):
    """Shows the model a summary instead of the conversation."""

    name = "rewritten"

    async def collect_trajectory(self, item):
        said = await self.ask([{"role": "user", "content": "first"}])
        await self.ask([{"role": "user", "content": f"so far: {said}"}])
        return ScoredDataItem(tokens=[1], masks=[1], scores=1.0), []


class FilteredEnv(ChatEnv):
    """As most of upstream's: a group at a time, shuffled, no short answers, none if all scores are equal.

    A right answer is "right", and some more; if all are right, long ones are worth less.
    """

    name = "filtered"
    scored: ClassVar[list[dict[str, float]]] = []

    async def collect_trajectories(self, item):
        self.runs.append(item["start"])
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            completion = await managed.chat_completion(
                messages=[{"role": "user", "content": f"item {item['start']}"}],
                n=self.config.group_size,
                max_tokens=64,
            )
            nodes = managed.get_state()["nodes"]
        answers = [
            {"text": choice.message.content, "cut": choice.finish_reason == "length", "node": node}
            for choice, node in zip(completion.choices, nodes, strict=True)
        ]
        return await self.score(answers), []

    async def score(self, answers):
        random.shuffle(answers)
        group = ScoredDataGroup()
        group["tokens"], group["masks"], group["scores"], group["inference_logprobs"] = [], [], [], []
        for answer in answers:
            node = answer["node"]
            if len([mask for mask in node.masked_tokens if mask != -100]) < 3:
                continue
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            group["scores"].append(1.0 if answer["text"].startswith("right") else -1.0)
        if all(score == 1.0 for score in group["scores"]):
            group["scores"] = [1.0 - len(tokens) / 1024 for tokens in group["tokens"]]
        self.scored.append({a["text"]: s for a, s in zip(answers, group["scores"], strict=False)})
        if all(score == group["scores"][0] for score in group["scores"]):
            return None
        return group


class RoundsEnv(ChatEnv):
    """The first turn of all siblings is one request; later ones are a request for each, at the same time.

    Its rows are whole conversations of which the last turn is trained, or what `form` says.
    """

    name = "rounds"
    question = "begin"
    form = "whole"
    backwards = False  # whom it asks first

    async def collect_trajectories(self, item):
        self.runs.append(item["start"])
        chats = [[{"role": "user", "content": self.question}] for _ in range(self.config.group_size)]
        first = await self.server.chat_completion(messages=chats[0], n=self.config.group_size, max_tokens=9)
        said = [choice.message.content for choice in first.choices]
        for _ in range(self.config.turns - 1):
            for chat, text in zip(chats, said, strict=True):
                chat += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
            step = -1 if self.backwards else 1
            later = await asyncio.gather(
                *(self.server.chat_completion(messages=chat, n=1, max_tokens=9) for chat in chats[::step])
            )
            later = later[::step]
            said = [each.choices[0].message.content for each in later]
        group = ScoredDataGroup(tokens=[], masks=[], scores=[])
        for chat, text in zip(chats, said, strict=True):
            row = tokenize_for_trainer(self.tokenizer, [*chat, {"role": "assistant", "content": text}])
            if self.form != "whole":
                tokens = self.tokenizer.encode(text if self.form == "last" else "something else")
                row = {"tokens": tokens, "masks": tokens}
            group["tokens"].append(row["tokens"])
            group["masks"].append(row["masks"])
            group["scores"].append(self.worth([each["content"] for each in chat[1::2]], text))
        order = list(range(len(chats)))
        random.shuffle(order)
        return {name: [rows[at] for at in order] for name, rows in group.items()}, []

    def worth(self, before, last):
        return float(len(last))


class PatientEnv(ChatEnv):
    """Gives up a request twice, and asks again."""

    name = "patient"

    async def collect_trajectories(self, item):
        chat = [{"role": "user", "content": "begin"}]
        asked = {"messages": chat, "n": self.config.group_size, "max_tokens": 9}
        for _ in range(2):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.server.chat_completion(**asked), 0.5)
            self.said.append("gave up")
        completion = await self.server.chat_completion(**asked)
        tokens = [self.tokenizer.encode(choice.message.content) for choice in completion.choices]
        return ScoredDataGroup(tokens=tokens, masks=tokens, scores=[float(len(each)) for each in tokens]), []


class TasksEnv(ChatEnv):
    """A task for each sibling, all at once, each with turns of its own number."""

    name = "tasks"

    async def collect_trajectories(self, item):
        async def one(number):
            chat = [{"role": "user", "content": "begin"}]
            for _ in range(self.config.turns):
                completion = await self.server.chat_completion(messages=chat, n=1, max_tokens=9)
                text = completion.choices[0].message.content
                chat += [{"role": "assistant", "content": text}]
                if text.startswith("stop"):
                    break
                chat += [{"role": "user", "content": "more"}]
            return tokenize_for_trainer(self.tokenizer, chat, train_on_all_assistant_turns=True), len(chat)

        rows = await asyncio.gather(*(one(number) for number in range(self.config.group_size)))
        return ScoredDataGroup(
            tokens=[row["tokens"] for row, _ in rows],
            masks=[row["masks"] for row, _ in rows],
            scores=[float(length) for _, length in rows],
        ), []


class JudgedEnv(ChatEnv):
    """Asks a judge about the answer: in `score`, or in a method of another name."""

    name = "judged"
    where = "score"

    async def collect_trajectories(self, item):
        chat = [{"role": "user", "content": "joke"}]
        completion = await self.server.chat_completion(messages=chat, n=self.config.group_size, max_tokens=9)
        texts = [choice.message.content for choice in completion.choices]
        return await (self.score if self.where == "score" else self.weigh)(texts), []

    async def score(self, texts):
        return await self.weigh(texts)

    async def weigh(self, texts):
        group = ScoredDataGroup(tokens=[], masks=[], scores=[])
        for text in texts:
            asked = [{"role": "user", "content": f"How good is this, from 0 to 9? {text}"}]
            judged = await self.server.chat_completion(messages=asked, n=1, max_tokens=2)
            tokens = self.tokenizer.encode(text)
            group["tokens"].append(tokens)
            group["masks"].append(tokens)
            group["scores"].append(float(judged.choices[0].message.content))
        return group
