"""Versions of a learner in another process, token by token: the weights that sampled, and the version in the
answer.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from live_server import PROMPT, REPORTS_SPANS, logprobs_of, needs_spans, spans, until

from shmbridge.producers.rollout.sampling import completions_in

pytestmark = pytest.mark.timeout(420)


def test_answers_before_the_first_version_claim_none(server, greedy, make_model):
    answer, policy, headers = server.at_first
    assert answer["token_ids"][0] == greedy(make_model(0))
    assert answer["weight_version"] is None
    assert policy["version"] is None
    assert "x-policy-version" not in headers


def test_three_versions_of_a_learner_token_by_token(
    server, learner, new_versions, tiny_folder, make_model, greedy
):
    """Leave the push out, and both the version and the tokens are those of the weights before."""
    process, failed = learner(), server.policy()["failed_total"]
    before = server.generate()["token_ids"][0]
    for version in new_versions(3):
        expected = greedy(make_model(version))
        assert expected != before, "these models can be told apart"
        assert server.generate()["token_ids"][0] == before, "nothing changes by itself"
        assert process.does("publish", version, tiny_folder(version)) == f"published {version}"
        server.has(version)
        answer = server.generate()
        assert answer["token_ids"][0] == expected
        assert spans(answer) == [(version, 0, 16)]
        assert answer["weight_version"] == version
        before = expected
    status, completion, headers = server.ask(
        "/v1/completions", {"model": "policy", "prompt": PROMPT, "max_tokens": 4}
    )
    assert status == 200
    assert {
        completion["weight_version"],
        completion["oldest_weight_version"],
        int(headers["x-policy-version"]),
    } == {version}
    assert server.policy()["failed_total"] == failed


def test_an_answer_that_an_update_fell_into_names_its_oldest_and_newest(
    server, learner, new_versions, tiny_folder
):
    process, versions = learner(), new_versions(10)
    for first, second in zip(versions[::2], versions[1::2], strict=True):  # again, should it have been over
        process.does("publish", first, tiny_folder(first))
        server.has(first)
        with ThreadPoolExecutor(1) as client:
            asked = client.submit(server.generate, PROMPT, 480)
            until(lambda asked=asked: server.requests() > 0 or asked.done())
            process.does("publish", second, tiny_folder(second))
            server.has(second)
            (completion,) = completions_in(asked.result())
        assert first <= completion.oldest <= completion.newest <= second
        one = completion.oldest == completion.newest
        assert bool(completion.spans) == (one or REPORTS_SPANS)
        if not one:
            return
    pytest.fail("no update fell into an answer")


@needs_spans
def test_requests_in_flight_span_updates_and_can_be_scored(
    server, learner, new_versions, tiny_folder, make_model
):
    process, versions = learner(), new_versions(15)
    folders = {version: tiny_folder(version) for version in versions}
    for first in versions[::3]:  # again, should two updates have taken longer than 480 tokens
        process.does("publish", first, folders[first])
        server.has(first)
        with ThreadPoolExecutor(4) as clients:
            asked = [clients.submit(server.generate, [*PROMPT, 6 + place], 480) for place in range(4)]
            # it may be over before the test looks
            until(lambda asked=asked: server.requests() > 0 or all(each.done() for each in asked))
            for version in (first + 1, first + 2):
                process.does("publish", version, folders[version])
                server.has(version)
            answers = [each.result() for each in asked]
        models = {version: make_model(version) for version in (first, first + 1, first + 2)}
        for place, answer in enumerate(answers):
            assert answer["finish_reasons"] == ["length"]
            assert answer["weight_version"] == spans(answer)[-1][0]
            tokens = answer["token_ids"][0]
            sampled = [next(iter(entry[0].values())) for entry in answer["logprobs"][0]]
            for version, start, end in spans(answer):
                scored = logprobs_of(models[version], [*PROMPT, 6 + place], tokens)[start:end]
                assert sampled[start:end] == pytest.approx(scored, abs=1e-4), (
                    "each span under its own version, KV cache included"
                )
        if all([version for version, _, _ in spans(answer)] == list(models) for answer in answers):
            return
    pytest.fail(f"no request spanned two updates: {spans(answers[0])}")


def test_prefix_cache_forgets_the_version_before(
    server, learner, new_versions, tiny_folder, make_model, greedy
):
    prompt = [2, *range(6, 26), *range(6, 26), *range(6, 26), 3]  # several whole blocks
    process = learner()
    for version in new_versions(2):
        process.does("publish", version, tiny_folder(version))
        server.has(version)
        for _ in range(2):
            assert server.generate(prompt)["token_ids"][0] == greedy(make_model(version), prompt)
