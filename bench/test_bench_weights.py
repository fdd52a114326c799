"""Time of one weights update in a live offline vLLM: our backend, vLLM's other ways, a backend that does
nothing, and the copy alone.

Runs in the environment of `make bench-vllm`. All ways change the same engine, in this process, so that they
differ in nothing else; the learner's time to write the segment is measured separately. The table at the end
gives our backend's time beyond the empty backend and the copy, and the part of it that is packing, which
vLLM's CPU build does to linear layers and an accelerator does not.
"""

import os
import statistics

import pytest

# so that other load on the cores does not count; read when torch is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")
pytest.importorskip("vllm", reason="needs an environment with vLLM: make bench-vllm")
os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1"
)
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0")

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from vllm import LLM, SamplingParams
from vllm import _custom_ops as ops
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from shmbridge.consumers.vllm.backend import ShmBridgeInitInfo, ShmBridgeUpdateInfo
from shmbridge.weights import WeightsReader, WeightsWriter

SIZES = {
    "2 MB": {
        "hidden_size": 192,
        "intermediate_size": 384,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
    },
    "500 MB": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
}
ROUNDS = {"2 MB": 30, "500 MB": 5}


class Nothing(WeightTransferEngine):
    """A backend that does nothing: the cost of the calls themselves."""

    init_info_cls, update_info_cls = ShmBridgeInitInfo, ShmBridgeUpdateInfo

    def init_transfer_engine(self, init_info):
        pass

    def start_weight_update(self):
        pass

    def receive_weights(self, update_info):
        pass

    def finish_weight_update(self):
        pass

    def shutdown(self):
        pass


class FromMemory(Nothing):
    """Tensors of this process through vLLM's layerwise reload, as its own backends do: the cost of copying
    and packing them.
    """

    given = None

    def start_weight_update(self):
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info):
        self.model.load_weights(iter(self.given))

    def finish_weight_update(self):
        finalize_layerwise_reload(self.model, self.model_config)


class Ways:
    """One engine, and each way to give it the version that `tensors` are."""

    def __init__(self, size, folder, bridge):
        self.models = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            config = Qwen2Config(
                vocab_size=64,
                max_position_embeddings=128,
                tie_word_embeddings=False,
                bos_token_id=None,
                **SIZES[size],
            )
            self.models.append(Qwen2ForCausalLM(config).eval())
            self.models[-1].save_pretrained(folder / str(seed))
        self.folder = folder
        backend = WeightTransferConfig(backend="shmbridge")
        self.llm = LLM(
            str(folder / "0"),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=1,
            max_num_batched_tokens=64,
            weight_transfer_config=backend,
        )
        self.worker = self.llm.llm_engine.model_executor.driver_worker.worker
        ours = self.worker.weight_transfer_engine
        self.engines = {"shmbridge": ours}
        for name, kind in (("nothing", Nothing), ("from memory", FromMemory)):
            self.engines[name] = kind(ours.config, ours.vllm_config, ours.device, ours.model)
        self.writer, self.reader = WeightsWriter(bridge), WeightsReader(bridge)
        self.version = 0
        self.tensors = [(name, each.detach()) for name, each in self.models[1].named_parameters()]
        self.bytes = sum(each.nbytes for _, each in self.tensors)
        self.into = {name: torch.empty_like(each) for name, each in self.tensors}
        linear = [each for each in ours.model.modules() if isinstance(each, LinearBase)]
        self.as_packed = [
            torch.randn(each.output_size_per_partition, each.input_size_per_partition) for each in linear
        ]
        self.packed = []

    def publish(self):
        self.version += 1
        self.writer.publish(self.version, self.tensors)

    def prepare(self, way):
        FromMemory.given = self.tensors
        self.worker.weight_transfer_engine = self.engines.get(way, self.engines["shmbridge"])
        if way == "shmbridge":
            self.publish()

    def update(self):
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"bridge": self.writer.bridge, "version": self.version}})
        self.llm.finish_weight_update(str(self.version))
        self.llm.reset_prefix_cache()

    def reload_path(self):
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(self.folder / "1")})
        self.llm.reset_prefix_cache()

    def reload_iterator(self):
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(self.tensors)})
        self.llm.reset_prefix_cache()

    def copy(self):
        with self.reader.lease() as lease:
            for name, array in lease.tensors.items():
                self.into[name].copy_(torch.from_numpy(array))

    def pack(self):
        """Packs as vLLM's CPU build does for every linear layer of new weights: into oneDNN's order, the old
        ones freed.
        """
        for at, weight in enumerate(self.as_packed):
            self.packed[at : at + 1] = [ops.create_onednn_mm(weight.t(), 32)]

    def says(self):
        wanted = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
        return (
            self.llm.generate([{"prompt_token_ids": [1, 2, 3]}], wanted, use_tqdm=False)[0]
            .outputs[0]
            .token_ids
        )

    def close(self):
        self.llm.shutdown_weight_transfer_engine()
        self.reader.close()
        self.writer.close()


WAYS = {
    "nothing": Ways.update,
    "copy": Ways.copy,
    "packing": Ways.pack,
    "shmbridge": Ways.update,
    "from memory": Ways.update,
    "iterator": Ways.reload_iterator,
    "path": Ways.reload_path,
    "publish": Ways.publish,
}


@pytest.fixture(scope="module", params=SIZES)
def ways(request, tmp_path_factory):
    size = request.param
    made = Ways(size, tmp_path_factory.mktemp("weights"), f"bench-weights-{os.getpid()}")
    made.medians = {}
    yield size, made
    expected = made.says()
    made.publish()
    made.prepare("shmbridge")
    made.update()
    assert made.says() == expected
    made.close()
    took = {way: statistics.median(times) * 1e3 for way, times in made.medians.items()}
    print(f"\n{size}: {made.bytes / 1e6:.1f} MB in {len(made.tensors)} tensors, medians in ms")
    for way, ms in took.items():
        print(f"  {way:12} {ms:9.2f}")
    beyond = took["shmbridge"] - took["nothing"] - took["copy"]
    print(
        f"  shmbridge beyond nothing and the copy: {beyond:.2f}; and beyond vLLM's packing: "
        f"{beyond - took['packing']:.2f}"
    )
    print(f"  shmbridge beyond vLLM's reload from memory: {took['shmbridge'] - took['from memory']:.2f}")


@pytest.mark.parametrize("way", WAYS)
def test_update(ways, way, benchmark):
    size, made = ways
    benchmark.group = f"weights update, {size}"
    benchmark.extra_info.update(way=way, weights_bytes=made.bytes, tensors=len(made.tensors))
    if not made.version:
        made.publish()
    benchmark.pedantic(
        WAYS[way], args=(made,), setup=lambda: made.prepare(way), rounds=ROUNDS[size], warmup_rounds=1
    )
    made.medians[way] = benchmark.stats.stats.data
