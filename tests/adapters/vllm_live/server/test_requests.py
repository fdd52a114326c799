"""Failed requests: a refusal of the engine is answered with its reason, and a client that hangs up occupies
no place.
"""

from __future__ import annotations

import json
import socket

import pytest
from live_server import PROMPT, until

pytestmark = pytest.mark.timeout(420)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"prompt": "a", "temperature": -1}, "temperature must be non-negative"),
        ({"prompt": "a", "use_beam_search": True}, "unknown field `use_beam_search`"),
        ({"prompt": {"prompt_token_ids": []}}, "cannot be empty"),
        ({"prompt": {"prompt_token_ids": [99]}}, "out of vocabulary"),
        ({"prompt": {"prompt_token_ids": [5] * 600}}, "maximum context length"),
        ({"prompt": "a", "logprobs": 50}, "greater than max allowed"),
    ],
)
def test_a_request_that_the_engine_refuses_is_answered_with_its_reason(server, body, told):
    status, said, _ = server.ask("/generate", body)
    assert (status, said["error"]["code"]) == (400, 400)
    assert told in said["error"]["message"]


def test_client_that_hangs_up_frees_its_place(server):
    """Its request takes minutes: a shorter one can be over before a test that gets no CPU beside a busy
    engine has looked.
    """
    tokens, answers = 500, 1024
    body = {"prompt": {"prompt_token_ids": PROMPT}, "max_tokens": tokens, "n": answers, "ignore_eos": True}
    raw = json.dumps(body).encode()
    before = server.metric("vllm:generation_tokens_total{")
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(
            b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(raw), raw)
        )
        until(lambda: server.requests() > 0)
    until(lambda: server.requests() == 0)
    assert server.metric("vllm:generation_tokens_total{") - before < tokens * answers / 2
