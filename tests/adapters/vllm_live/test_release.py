"""Another release of vLLM is refused at once, by the name of what it lacks."""

from __future__ import annotations

import pytest

from shmbridge.errors import BadConfig


def test_this_release_has_what_is_used_of_it():
    from shmbridge.consumers.vllm import release

    release.require()


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("layerwise", "_layerwise_process"),
        ("layerwise", "get_layerwise_info"),
        ("LayerReloadingInfo", "can_load"),
        ("WeightTransferEngine", "reset_weight_update_target"),
    ],
)
def test_what_a_release_lacks_is_named(monkeypatch, where, name):
    from shmbridge.consumers.vllm import release

    monkeypatch.delattr(getattr(release, where), name)
    with pytest.raises(BadConfig, match=rf"vllm\S* \d.* has no {where}\.{name}"):
        release.require()


def test_a_worker_or_a_layer_that_keeps_its_state_under_other_names_is_refused(monkeypatch):
    from shmbridge.consumers.vllm import release

    monkeypatch.setattr(release, "Worker", type("Worker", (), {"__init__": lambda self: None}))
    with pytest.raises(BadConfig, match=r"Worker\._weight_update_active"):
        release.require()
    monkeypatch.setattr(release, "_OF_A_LAYER", {"load_numel", "numbers"})
    with pytest.raises(BadConfig, match=r"LayerReloadingInfo\.numbers"):
        release.require()
