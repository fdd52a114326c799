"""A vLLM release that lacks a non-public name in use is refused at once; the error says which name."""

from __future__ import annotations

import pytest

from shmbridge.errors import BadConfig


def test_the_installed_release_has_every_name_in_use():
    from shmbridge.consumers.vllm import loading as non_public_names

    non_public_names.require()


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("layerwise", "_layerwise_process"),
        ("layerwise", "get_layerwise_info"),
        ("LayerReloadingInfo", "can_load"),
        ("WeightTransferEngine", "reset_weight_update_target"),
    ],
)
def test_a_name_that_a_release_lacks_is_in_the_error(monkeypatch, where, name):
    from shmbridge.consumers.vllm import loading as non_public_names

    monkeypatch.delattr(getattr(non_public_names, where), name)
    with pytest.raises(BadConfig, match=rf"vllm\S* \d.* has no {where}\.{name}"):
        non_public_names.require()


def test_a_worker_or_a_layer_that_keeps_its_state_under_other_names_is_refused(monkeypatch):
    from shmbridge.consumers.vllm import loading as non_public_names

    monkeypatch.setattr(non_public_names, "Worker", type("Worker", (), {"__init__": lambda self: None}))
    with pytest.raises(BadConfig, match=r"Worker\._weight_update_active"):
        non_public_names.require()
    monkeypatch.setattr(non_public_names, "_OF_A_LAYER", {"load_numel", "numbers"})
    with pytest.raises(BadConfig, match=r"LayerReloadingInfo\.numbers"):
        non_public_names.require()
