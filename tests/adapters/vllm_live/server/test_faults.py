"""A learner that dies, or publishes weights of another model: the server keeps the last good version."""

from __future__ import annotations

import threading
import time

import pytest
from live_server import spans, until

pytestmark = pytest.mark.timeout(420)


def test_learner_killed_while_it_publishes(server, learner, new_versions, tiny_folder, make_model, greedy):
    process, (whole, half, after) = learner(), new_versions(3)
    process.does("publish", whole, tiny_folder(whole))
    server.has(whole)
    stop, wrong = threading.Event(), []

    def keep_asking() -> None:
        while not stop.is_set():
            answer = server.generate()
            if (answer["weight_version"], answer["token_ids"][0]) != (whole, expected):
                wrong.append(answer)

    expected = greedy(make_model(whole))
    asking = threading.Thread(target=keep_asking)
    asking.start()
    assert process.does("half", half, tiny_folder(half)) == "half"
    process.kill()
    time.sleep(1.5)
    stop.set()
    asking.join()
    assert not wrong, "the last complete version serves on"
    assert server.policy()["last_error"] is None

    assert learner().does("publish", after, tiny_folder(after)) == f"published {after}"
    server.has(after)
    assert server.generate()["token_ids"][0] == greedy(make_model(after))


def test_weights_of_another_model_change_nothing(
    server, learner, new_versions, tiny_folder, make_model, greedy, tmp_path
):
    from safetensors.numpy import load_file, save_file

    process, (first, misfit, last) = learner(), new_versions(3)
    process.does("publish", first, tiny_folder(first))
    server.has(first)
    process.kill()
    tensors = load_file(tiny_folder(misfit) / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].copy()
    save_file(tensors, tmp_path / "model.safetensors")
    other = learner()
    assert other.does("publish", misfit, tmp_path) == f"published {misfit}"
    said = until(lambda: server.policy()["last_error"])
    assert f"policy version {misfit} was not loaded" in said
    assert "model.norm.weight" in said
    assert server.policy()["version"] == first
    answer = server.generate()
    assert answer["token_ids"][0] == greedy(make_model(first))
    assert spans(answer) == [(first, 0, 16)]
    other.kill()
    learner().does("publish", last, tiny_folder(last))
    server.has(last)
    assert server.policy()["last_error"] is None
