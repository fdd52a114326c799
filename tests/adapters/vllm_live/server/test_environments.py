"""Atropos environments, attached and unedited, ask the server while versions come: each token was sampled by
the version that its record names.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import HERE, PATIENCE_S, PYTHONPATH, REPORTS_SPANS, ROOT, Server, logprobs_of, needs_spans

import shmbridge

pytestmark = pytest.mark.timeout(420)


def test_environment_generates_meanwhile(
    server, learner, learner_python, new_versions, bridge, tiny_folder, make_model, tmp_path
):
    # transformers 4, which the environment may have, cannot load a tokenizer that transformers 5 has saved.
    subprocess.run(
        [learner_python, str(ROOT / "examples/tiny_model.py"), str(tmp_path / "tiny")],
        check=True,
        capture_output=True,
    )
    process, versions = learner(), new_versions(3)
    process.does("publish", versions[0], tiny_folder(versions[0]))
    server.has(versions[0])
    command = environment_command(
        learner_python, bridge, ROOT / "examples/larger_digit_env.py", server, tmp_path
    )
    models = {version: make_model(version) for version in versions}
    seen: set[int] = set()
    with shmbridge.Consumer(
        bridge, run=shmbridge.Run(batch_size=16, max_token_len=512, num_steps=10**6)
    ) as consumer:
        log = tmp_path / "env.log"
        with log.open("wb") as output:
            env = subprocess.Popen(
                command, env=os.environ | {"PYTHONPATH": PYTHONPATH}, stdout=output, stderr=output
            )
        try:
            for version in versions:
                if version > versions[0]:
                    process.does("publish", version, tiny_folder(version))
                deadline = time.monotonic() + PATIENCE_S
                while version not in seen and time.monotonic() < deadline:
                    assert env.poll() is None, log.read_text()[-3000:]
                    for record in consumer.poll():
                        with record:
                            seen |= {explained_by(models, record, row) for row in range(len(record))}
                            stamped_with_what_sampled_it(models, record)
                    time.sleep(0.05)
        finally:
            env.kill()
            env.wait()
    assert seen >= set(versions), "rollouts of every version came into the bridge"


def explained_by(models: dict[int, Any], record: Any, row: int) -> int:
    """The version whose weights give the sampler's log-probabilities of the last tokens; -1 if none does."""
    tokens, mask, told = (record[column][row] for column in ("tokens", "loss_mask", "inference_logprobs"))
    first = int(mask.argmax())
    for version, model in models.items():
        scored = logprobs_of(model, tokens[:first].tolist(), tokens[first:].tolist())
        if abs(scored[-1] - told[-1]) < 1e-3:
            return version
    return -1


def stamped_with_what_sampled_it(models: dict[int, Any], record: Any) -> None:
    columns = (record[column] for column in ("tokens", "token_versions", "loss_mask", "inference_logprobs"))
    for tokens, versions, mask, told in zip(*columns, strict=True):
        first = int(mask.argmax())
        by = set(versions[first:].tolist())
        if by == {-1} and not REPORTS_SPANS:
            continue  # an update fell into the answer
        assert by <= models.keys(), by
        if len(by) == 1:
            scored = logprobs_of(models[by.pop()], tokens[:first].tolist(), tokens[first:].tolist())
            assert (
                max(abs(mine - its) for mine, its in zip(scored, told[first:].tolist(), strict=True)) < 1e-3
            ), (versions, scored, told)


@needs_spans
def test_tokens_of_answers_that_span_an_update_have_the_version_that_sampled_them(
    server, learner, learner_python, new_versions, bridge, tiny_folder, make_model, tmp_path
):
    """The first span's log-probabilities are those of its version's weights, to the last token; those after
    it are not.
    """
    subprocess.run(
        [learner_python, str(ROOT / "examples/tiny_model.py"), str(tmp_path / "tiny")],
        check=True,
        capture_output=True,
    )
    process, (first_version,) = learner(), new_versions(1)
    version = first_version
    process.does("publish", version, tiny_folder(version))
    server.has(version)
    command = environment_command(learner_python, bridge, HERE / "long_answers_env.py", server, tmp_path)
    spanning: list[tuple[Any, ...]] = []
    with shmbridge.Consumer(
        bridge, run=shmbridge.Run(batch_size=16, max_token_len=512, num_steps=10**6)
    ) as consumer:
        log = tmp_path / "env.log"
        with log.open("wb") as output:
            env = subprocess.Popen(
                command, env=os.environ | {"PYTHONPATH": PYTHONPATH}, stdout=output, stderr=output
            )
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not spanning:
                assert env.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                if server.requests() > 0:
                    (version,) = new_versions(1)
                    process.does("publish", version, tiny_folder(version))
                    server.has(version)
                for record in consumer.poll():
                    with record:
                        spanning += spanning_rows(record, first_version)
        finally:
            env.kill()
            env.wait()
    for tokens, first, end, by, told in spanning:
        scored = logprobs_of(make_model(by), tokens[:first], tokens[first:])
        errors = [abs(mine - its) for mine, its in zip(scored, told, strict=True)]
        assert max(errors[: end - first]) < 1e-3
        assert max(errors[end - first : end - first + 5]) > 1e-2


def spanning_rows(record: Any, first_version: int) -> Iterator[tuple[Any, ...]]:
    """Rows of more than one version: tokens, where the answer and its second span begin, the first span's
    version, log-probabilities.
    """
    columns = (record[column] for column in ("tokens", "token_versions", "loss_mask", "inference_logprobs"))
    for tokens, versions, mask, told in zip(*columns, strict=True):
        first = int(mask.argmax())
        sampled = versions[first:].tolist()
        if sampled[0] < first_version:
            continue  # of the version before, where its group began
        assert sampled == sorted(sampled)
        assert record.meta.min_policy_version <= sampled[0] <= sampled[-1] <= record.meta.max_policy_version
        if sampled[0] < sampled[-1]:
            yield tokens.tolist(), first, first + sampled.count(sampled[0]), sampled[0], told[first:].tolist()


def environment_command(python: str, bridge: str, script: Path, server: Server, folder: Path) -> list[str]:
    words = [
        "--env.group_size=4",
        "--env.total_steps=1000000",
        "--env.use_wandb=false",
        "--env.steps_per_eval=0",
    ]
    words += [
        f"--env.tokenizer_name={folder}/tiny",
        f"--openai.tokenizer_name={folder}/tiny",
        "--openai.server_type=vllm",
    ]
    words += [f"--openai.base_url={server.url}/v1", "--openai.model_name=policy", "--openai.api_key=x"]
    return [python, "-m", "shmbridge.producers.atropos", "--bridge", bridge, str(script), "serve", *words]
