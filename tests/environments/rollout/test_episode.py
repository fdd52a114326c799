"""Episode: rows are what was sampled, token for token, over any number of turns."""

import pytest

from shmbridge.errors import BadArgument
from shmbridge.producers.rollout import ChatFormat, ContextFull, Episode, Sampled, Sampling, TokenText
from tests.environments.byte_tokenizer import byte_tokenizer

USER = [{"role": "user", "content": "hello"}]
MORE = [{"role": "user", "content": "and now?"}]


class Says:
    """A server that answers from a list, and remembers prompts and sampling."""

    def __init__(self, *answers: str, ends: bool = True, version: int = 4) -> None:
        self.answers, self.ends, self.version = list(answers), ends, version
        self.tokenizer = byte_tokenizer()
        self.prompts, self.samplings, self.conversations = [], [], []

    async def sample(self, prompt, sampling, messages):
        self.prompts.append(list(prompt))
        self.samplings.append(sampling)
        self.conversations.append(list(messages))
        tokens = self.tokenizer.encode(self.answers.pop(0), add_special_tokens=False)
        tokens += [self.tokenizer.eos_token_id] if self.ends else []
        return Sampled(
            tokens, [-0.5] * len(tokens), [self.version] * len(tokens), "stop" if self.ends else "length"
        )


def episode(server: Says, **options) -> Episode:
    return Episode(server, ChatFormat(server.tokenizer), USER, **options)


async def test_episode_rows_are_prompt_answer_observation_answer():
    server = Says("first", "second")
    row = episode(server)
    assert await row.sample() == "first"
    row.observe(MORE)
    server.version = 5
    assert await row.sample() == "second"
    decode = server.tokenizer.decode
    assert decode(row.tokens) == (
        "<|user|>hello<|end|>\n<|assistant|>first<|end|>\n<|user|>and now?<|end|>\n<|assistant|>second<|end|>"
    )
    said = [decode(row.tokens[begin:end]) for begin, end in row.turns()]
    assert said == ["first<|end|>", "second<|end|>"]
    assert [decode([t]) for t, on in zip(row.tokens, row.mask, strict=True) if on] == [
        *"first",
        "<|end|>",
        *"second",
        "<|end|>",
    ]
    assert row.prompt_length == len(server.prompts[0])
    assert server.prompts[1] == row.tokens[: row.turns()[1][0]]
    assert [v for v in row.versions if v >= 0] == [4] * 6 + [5] * 7
    assert len(row.mask) == len(row.versions) == len(row.logprobs) == len(row.tokens)


@pytest.mark.parametrize("ends", [True, False])
async def test_episode_turns_end_once(ends):
    """An answer cut off by its length gets the end of turn that the template writes, untrained."""
    server = Says("one", "two", ends=ends)
    row = episode(server)
    await row.sample()
    row.observe(MORE)
    await row.sample()
    assert server.tokenizer.decode(row.tokens).count("one<|end|>\n<|user|>") == 1
    assert row.finish_reason == ("stop" if ends else "length")


async def test_episode_never_tokenises_an_answer_again():
    """A template that rewrites earlier answers changes nothing of the row."""
    server = Says("<think>long</think>yes", "no")
    template = server.tokenizer.chat_template.replace(
        "message['content'] +", "(message['content'].split('</think>')[-1]) +"
    )
    row = Episode(server, ChatFormat(server.tokenizer, template=template), USER)
    await row.sample()
    row.observe(MORE)
    await row.sample()
    assert "<think>long</think>yes<|end|>\n<|user|>" in server.tokenizer.decode(row.tokens)


async def test_episode_ends_where_the_context_does():
    server = Says("abc", "def")
    row = episode(server, context=len(ChatFormat(server.tokenizer).prompt(USER)) + 10)
    await row.sample()
    assert server.samplings[0].max_tokens == 10
    row.observe(MORE)
    before = list(row.tokens)
    with pytest.raises(ContextFull, match="leave no room"):
        await row.sample()
    assert row.finish_reason == "length"
    assert row.tokens == before
    assert [each["content"] for each in row.messages] == ["hello", "abc"]


async def test_episode_messages_are_those_whose_tokens_are_in_the_row():
    """An observation is sent to the server, and is one of them once an answer follows it."""
    server = Says("first", "second")
    row = episode(server)
    await row.sample()
    row.observe(MORE)
    assert [each["content"] for each in row.messages] == ["hello", "first"]
    await row.sample()
    assert [each["content"] for each in row.messages] == ["hello", "first", "and now?", "second"]
    assert server.conversations == [USER, [*USER, {"role": "assistant", "content": "first"}, *MORE]]
    row.observe(MORE)
    assert row.messages[-1]["content"] == "second"


async def test_episode_samples_as_told():
    server = Says("a", "b")
    row = episode(server, sampling=Sampling(max_tokens=5, temperature=0.5))
    await row.sample()
    await row.sample(max_tokens=2, stop=("x",))
    assert [(each.max_tokens, each.temperature, each.stop) for each in server.samplings] == [
        (5, 0.5, ()),
        (2, 0.5, ("x",)),
    ]


async def test_episode_step_rewards_end_with_their_answers():
    server = Says("one", "two")
    row = episode(server)
    with pytest.raises(ValueError, match="after an answer"):
        row.step_reward(1)
    await row.sample()
    row.step_reward(0.25)
    row.step_reward(0.5)
    row.observe(MORE)
    await row.sample()
    row.step_reward(-1)
    assert row.step_rewards == [0.75, -1.0]
    assert row.step_ends == row.turn_ends == [e for _, e in row.turns()]


async def test_episode_shortens_to_whole_tokens():
    server = Says("ab\u00e9cd</x> rest")
    row = episode(server)
    await row.sample()
    row.shorten("ab\u00e9")
    begin, end = row.turns()[0]
    assert server.tokenizer.decode(row.tokens[begin:end]) == "ab\u00e9"
    assert row.messages[-1]["content"] == "ab\u00e9"
    assert (
        len(row.mask) == len(row.versions) == len(row.logprobs) == len(row.tokens) == end == row.turn_ends[-1]
    )
    with pytest.raises(ValueError, match="does not begin with"):
        row.shorten("other")


async def test_episode_shortens_only_the_answer_that_is_last():
    row = episode(Says("abc", "def"))
    with pytest.raises(ValueError, match="nothing follows"):
        row.shorten("")
    await row.sample()
    row.observe([{"role": "tool", "content": "4"}])
    before = list(row.tokens), list(row.messages)
    with pytest.raises(ValueError, match="nothing follows"):
        row.shorten("4")  # how the observation begins
    assert (row.tokens, row.messages) == before
    assert await row.sample() == "def"
    row.shorten("d")


@pytest.mark.parametrize(
    "said", ["4", {"role": "tool", "content": "4"}, [{"content": "4"}], ["4"], [{"role": None}]], ids=repr
)
async def test_episode_refuses_what_is_no_list_of_messages(said):
    row = episode(Says("a", "b"))
    await row.sample()
    with pytest.raises(BadArgument, match="is no"):
        row.observe(said)
    assert await row.sample() == "b"
    with pytest.raises(BadArgument, match="is no"):
        Episode(Says(), ChatFormat(byte_tokenizer()), said)


async def test_episode_begin_is_refused_after_an_answer():
    server = Says("a")
    row = episode(server)
    row.begin([{"role": "system", "content": "be brief"}, *USER])
    assert server.tokenizer.decode(row.tokens).startswith("<|system|>be brief")
    await row.sample()
    with pytest.raises(ValueError, match="1 answers follow"):
        row.begin(USER)


def test_text_ends_with_the_last_token_of_a_character():
    tokenizer = byte_tokenizer()
    text = "a\u00e9\U0001f600b"  # one, two, four and one bytes
    tokens = [*tokenizer.encode(text), tokenizer.eos_token_id]
    assert TokenText(tokenizer).ends(tokens, special=False) == [1, 1, 2, 2, 2, 2, 3, 4, 4]
    assert TokenText(tokenizer).ends(tokens)[-1] == len(text + tokenizer.eos_token)
    assert TokenText(tokenizer).ends([]) == []
