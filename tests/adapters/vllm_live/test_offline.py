"""An offline `LLM` takes versions out of a weights segment: greedy tokens are Hugging Face's, and weights
that do not fit change nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import posix_ipc
import pytest
import torch

import shmbridge
from shmbridge.weights import WeightsWriter

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def tied(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def llm(tied: bool, make_llm: Callable[..., Any], tiny_folder: Callable[..., Any]) -> Iterator[Any]:
    """An engine in this process, so that a test can break what it calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield make_llm(tiny_folder(tied=tied))


@pytest.fixture
def push(llm: Any, bridge: str) -> Iterator[Callable[[int, Tensors], None]]:
    """Call it with a version and tensors: they are written, and the engine is told.

    Afterwards the engine has let the bridge go.
    """
    with WeightsWriter(bridge) as writer:

        def send(version: int, tensors: Any) -> None:
            writer.publish(version, dict(tensors).items())
            tell(llm, bridge, version)

        send.writer = writer
        yield send
    llm.init_weight_transfer_engine({"init_info": {}})


def tell(llm: Any, bridge: str, version: int) -> None:
    llm.start_weight_update()
    llm.update_weights({"update_info": {"bridge": bridge, "version": version}})
    llm.finish_weight_update(str(version))
    llm.reset_prefix_cache()


def test_three_versions_are_what_hugging_face_computes(llm, tied, push, make_model, greedy, vllm_greedy):
    said = []
    for version in (1, 2, 3):
        model = make_model(version, tied=tied)
        push(version, model.named_parameters())
        said.append(vllm_greedy(llm))
        assert said[-1] == greedy(model)
        assert llm.get_weight_version() == str(version)
    assert len({tuple(each) for each in said}) == 3, "the versions say the same: nothing was tested"


def test_weights_written_later_do_not_reach_the_engine_by_themselves(
    llm, tied, push, make_model, greedy, vllm_greedy
):
    model = make_model(1, tied=tied)
    push(1, model.named_parameters())
    for version in (2, 3, 4):  # goes over each slot
        push.writer.publish(version, make_model(version, tied=tied).named_parameters())
    assert vllm_greedy(llm) == greedy(model)


def test_old_weights_without_a_push_show_by_version_and_by_tokens(
    llm, tied, bridge, push, make_model, greedy, vllm_greedy
):
    push(1, make_model(1, tied=tied).named_parameters())
    newer = make_model(2, tied=tied)
    with shmbridge.weights.WeightsReader(bridge) as reader:
        assert reader.version == 1
    assert llm.get_weight_version() == "1"
    assert vllm_greedy(llm) != greedy(newer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_another_dtype_are_converted(
    llm, tied, push, make_model, greedy, vllm_greedy, dtype, caplog
):
    model = make_model(4, tied=tied).to(dtype)
    with caplog.at_level(logging.WARNING):
        push(1, model.named_parameters())
    assert vllm_greedy(llm) == greedy(model.float())
    assert "dtype" not in caplog.text  # vLLM has a line for each tensor of each update


def without(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def instead(**shapes: tuple[int, ...]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update(
        {name.replace("__", "."): torch.zeros(shape) for name, shape in shapes.items()}
    )


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (without("model.layers.1.self_attn.q_proj.weight"), "model.layers.1.self_attn.qkv_proj"),
        (without("model.norm.weight"), "model.norm.weight"),
        (instead(model__layers__1__mlp__more__weight=(3,)), "model.layers.1.mlp.more.weight"),
        (instead(model__layers__0__input_layernorm__weight=(32,)), "model.layers.0.input_layernorm.weight"),
        (instead(model__embed_tokens__weight=(32, 64)), "model.embed_tokens.weight"),
        # vLLM's own loader takes the part of these that it has room for:
        (instead(model__layers__1__mlp__down_proj__weight=(64, 256)), "model.layers.1.mlp.down_proj.weight"),
        (instead(model__layers__1__mlp__gate_proj__weight=(256, 64)), "model.layers.1.mlp.gate_proj.weight"),
    ],
)
def test_weights_of_another_model_are_refused_by_name_and_the_old_ones_serve(
    llm, tied, bridge, make_model, greedy, vllm_greedy, push, spoil, named
):
    model = make_model(1, tied=tied)
    push(1, model.named_parameters())
    other = f"{bridge}-2"
    tensors = dict(make_model(2, tied=tied).named_parameters())
    spoil(tensors)
    try:
        with WeightsWriter(other) as writer:
            writer.publish(2, tensors.items())
            with pytest.raises(shmbridge.WeightsMismatch, match=named.replace(".", r"\.")):
                tell(llm, other, 2)
            assert vllm_greedy(llm) == greedy(model)
            assert llm.get_weight_version() == "1"
        push(3, make_model(3, tied=tied).named_parameters())
        assert vllm_greedy(llm) == greedy(make_model(3, tied=tied))
    finally:
        assert not shmbridge.clean(other, dry_run=False).kept


def test_only_whole_layers_that_changed_are_loaded(
    llm, tied, bridge, push, make_model, greedy, vllm_greedy, monkeypatch
):
    from shmbridge.consumers.vllm.loading import ModelWeights

    stage, staged = ModelWeights.stage, []

    def noted(self: Any, weights: Any, *, whole: bool) -> None:
        staged.append([name for name, _ in weights])
        stage(self, weights, whole=whole)

    monkeypatch.setattr(ModelWeights, "stage", noted)
    model = make_model(1, tied=tied)
    push(1, model.named_parameters())
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.add_(0.3)
    push.writer.publish(
        2,
        [("model.layers.1.self_attn.q_proj.weight", model.model.layers[1].self_attn.q_proj.weight)],
        changed_only=True,
    )
    tell(llm, bridge, 2)
    assert vllm_greedy(llm) == greedy(model)
    everything = [name for name, _ in model.named_parameters()]
    assert staged == [everything, [name for name in everything if ".layers.1." in name]]

    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(-1.5)
    push.writer.publish(
        3, [("model.embed_tokens.weight", model.model.embed_tokens.weight)], changed_only=True
    )
    tell(llm, bridge, 3)
    assert vllm_greedy(llm) == greedy(model)
    assert staged[2] == ["model.embed_tokens.weight"]

    llm.init_weight_transfer_engine({"init_info": {"bridge": bridge}})
    push.writer.publish(4, [("model.norm.weight", model.model.norm.weight)], changed_only=True)
    tell(llm, bridge, 4)
    assert staged[3] == everything  # who initialises again says that the model is not what was loaded last
    assert vllm_greedy(llm) == greedy(model)


def test_numbers_of_an_earlier_segment_are_not_taken_for_those_of_the_next(
    llm, tied, bridge, push, make_model, greedy, vllm_greedy
):
    push(5, make_model(1, tied=tied).named_parameters())
    push.writer.close()
    posix_ipc.unlink_shared_memory(shmbridge.segments.segment.weights_name(bridge))  # by a foreign hand
    model = make_model(2, tied=tied)
    with WeightsWriter(bridge) as writer:
        writer.publish(3, model.named_parameters())
        with pytest.raises(shmbridge.NotReady):
            tell(llm, bridge, 9)
        with torch.no_grad():
            model.model.norm.weight.mul_(1.5)
        writer.publish(6, [("model.norm.weight", model.model.norm.weight)], changed_only=True)
        tell(llm, bridge, 6)
    assert vllm_greedy(llm) == greedy(model), "what differs from version 5 of another segment is all of it"


def test_a_version_that_the_segment_does_not_hold_is_refused(
    llm, tied, bridge, push, make_model, greedy, vllm_greedy
):
    model = make_model(1, tied=tied)
    push(1, model.named_parameters())
    with pytest.raises(shmbridge.NotReady, match=r"version 7 .* holds 1"):
        tell(llm, bridge, 7)
    assert vllm_greedy(llm) == greedy(model)


def test_a_load_that_fails_in_the_middle_leaves_the_old_weights(
    llm, tied, bridge, push, make_model, greedy, vllm_greedy, monkeypatch
):
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from shmbridge.consumers.vllm.loading import WeightsNotLoaded

    model, newer = make_model(1, tied=tied), make_model(2, tied=tied)
    push(1, model.named_parameters())
    process = UnquantizedLinearMethod.process_weights_after_loading
    done: list[Any] = []

    def fail_at_the_sixth(self: Any, layer: Any) -> None:
        done.append(layer)
        if len(done) == 6:
            raise MemoryError("no room")
        process(self, layer)

    with monkeypatch.context() as patch:
        patch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", fail_at_the_sixth)
        with pytest.raises(WeightsNotLoaded, match=r"model\.layers\.1\.self_attn\.o_proj.*no room"):
            push(2, newer.named_parameters())
    llm.reset_prefix_cache()
    assert vllm_greedy(llm) == greedy(model)
    push(3, newer.named_parameters())
    assert vllm_greedy(llm) == greedy(newer)


def test_a_load_that_cannot_be_undone_leaves_samples_of_no_version(
    llm, tied, bridge, make_model, greedy, vllm_greedy, monkeypatch
):
    """As on an accelerator, which has no memory for a second model; here the old one is put back but reported
    as lost.
    """
    from shmbridge.consumers.engines.engine import EngineFailed
    from shmbridge.consumers.vllm.loading import ModelWeights, WeightsNotLoaded
    from shmbridge.consumers.weight_sync import WeightSync

    def fails(self: ModelWeights) -> None:
        raise WeightsNotLoaded("no room")

    put_back = ModelWeights.put_back
    with WeightSync(bridge, llm) as sync:
        sync.push(make_model(1, tied=tied), version=1)
        with monkeypatch.context() as patch:
            patch.setattr(ModelWeights, "commit", fails)
            patch.setattr(ModelWeights, "put_back", lambda self: put_back(self) and False)
            with pytest.raises(
                EngineFailed, match=r"no room.* of two versions: samples are of version 'unknown'"
            ):
                sync.push(make_model(2, tied=tied))
        assert llm.get_weight_version() == "unknown"
        assert sync.push(make_model(3, tied=tied)) == 3
        assert (llm.get_weight_version(), vllm_greedy(llm)) == ("3", greedy(make_model(3, tied=tied)))
    llm.init_weight_transfer_engine({"init_info": {}})


def test_a_learner_that_dies_between_the_calls_leaves_a_whole_model(
    llm, tied, bridge, push, make_model, greedy, vllm_greedy
):
    model, newer = make_model(1, tied=tied), make_model(2, tied=tied)
    push(1, model.named_parameters())
    llm.start_weight_update()
    assert vllm_greedy(llm) == greedy(model)
    llm.finish_weight_update()
    push(2, newer.named_parameters())
    assert vllm_greedy(llm) == greedy(newer)


def test_vllms_own_trainer_interface_writes_and_tells(llm, tied, bridge, make_model, greedy, vllm_greedy):
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from shmbridge.consumers.vllm.backend import ShmBridgeTrainerInitInfo

    class OfflineClient:
        """vLLM has clients for HTTP and Ray; an offline engine is called itself."""

        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            llm.init_weight_transfer_engine({"init_info": init_info})

        def start_weight_update(self) -> None:
            llm.start_weight_update()

        def update_weights(self, update_info: Any) -> None:
            llm.update_weights({"update_info": update_info})

        def finish_weight_update(self, weight_version: str | None = None) -> None:
            llm.finish_weight_update(weight_version)

    model = make_model(5, tied=tied)
    trainer = WeightTransferTrainerFactory.trainer_init(
        ShmBridgeTrainerInitInfo(rank=0, bridge=bridge), client=OfflineClient(), source=ModuleSource(model)
    )
    try:
        for version in ("1", "2"):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
            trainer.send_weights()
            llm.reset_prefix_cache()
            assert llm.get_weight_version() == version
            assert vllm_greedy(llm) == greedy(model)
    finally:
        trainer.shutdown()
        llm.init_weight_transfer_engine({"init_info": {}})
