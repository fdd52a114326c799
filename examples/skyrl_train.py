"""Trains a tiny model with SkyRL's own trainer and policy worker, from a bridge, on one CPU core.

    python examples/skyrl_train.py                 # a made-up environment, eight steps
    python examples/skyrl_train.py --bridge run1   # groups of your own producers, at most 28 token ids

Real: RayPPOTrainer.train with all its stages, WorkerDispatch's weight sync, FSDPPolicyWorkerBase's
forward_backward, optim_step and weight extraction, HFModelWrapper, the loss. In place of Ray's actors, FSDP
and CUDA stand the classes of this file: one worker in this process. On GPUs nothing of this file is needed:
docs/how-to/skyrl.md has the command.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import os
import runpy
import socket
import sys
import tempfile
import threading
import types
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import shmbridge

TARGET = 11  # the token that the made-up environment rewards
ROWS = 4
VOCABULARY = 28


def without_cuda() -> None:
    """Lets SkyRL's workers be imported and run without flash-attn and CUDA; both are for GPUs."""
    import transformers.modeling_utils  # noqa: F401  # looks for flash-attn now, and not again

    if "flash_attn" not in sys.modules:
        padding = types.ModuleType("flash_attn.bert_padding")
        padding.pad_input = padding.unpad_input = None  # for rows without padding only
        sys.modules |= {"flash_attn": types.ModuleType("flash_attn"), "flash_attn.bert_padding": padding}
    torch.cuda.current_device = lambda: torch.device("cpu")


def vllm_names() -> dict[str, types.ModuleType]:
    """Returns what SkyRL 0.4 imports of vLLM for its weights, for a machine without vLLM."""
    base = types.ModuleType("vllm.distributed.weight_transfer.base")
    base.WeightSource, base.materialize_full_tensor = object, lambda tensor: tensor  # nothing is sharded here
    base.ParamMeta = namedtuple("ParamMeta", "name dtype shape")
    parents = ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer")
    return {name: types.ModuleType(name) for name in parents} | {base.__name__: base}


def config(model: Path, bridge: str, groups: int, *more: str) -> Any:
    """Returns SkyRL's config for a run without GPUs: `groups` prompts of ROWS rows a step.

    The loss is SkyRL's default: no policy samples the rows of this file, and `rollout_is`, of the page's
    command, leaves out what the policy would not sample.
    """
    from shmbridge.consumers.skyrl.config import ShmTrainConfig

    return ShmTrainConfig.from_cli_overrides(
        [
            f"bridge.name={bridge}",
            "data.train_data=[]",
            "data.dataloader.num_workers=0",
            f"trainer.policy.model.path={model}",
            "trainer.policy.optimizer_config.lr=0.01",
            f"trainer.train_batch_size={groups}",
            f"trainer.policy_mini_batch_size={groups}",
            "trainer.micro_train_batch_size_per_gpu=4",
            "trainer.micro_forward_batch_size_per_gpu=4",
            "trainer.epochs=1",
            "trainer.algorithm.advantage_estimator=shmbridge",
            "trainer.algorithm.use_kl_loss=false",
            "trainer.placement.colocate_all=false",
            "trainer.eval_interval=-1",
            "trainer.ckpt_interval=-1",
            "trainer.hf_save_interval=-1",
            "trainer.resume_mode=none",
            "trainer.logger=console",
            "trainer.flash_attn=false",
            "trainer.remove_microbatch_padding=false",
            "trainer.print_example_interval=-1",
            f"generator.n_samples_per_prompt={ROWS}",
            "generator.inference_engine.model_dtype=float32",
            "generator.inference_engine.enable_ray_prometheus_stats=false",
            *more,
        ]
    )


def cpu_worker_class() -> type:
    """Returns SkyRL's policy worker with a model that is not sharded, which sends weights into a bridge."""
    from skyrl.backends.skyrl_train.distributed.dispatch import MeshRank
    from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase
    from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper

    from shmbridge.consumers.skyrl.weights import with_bridge_weights

    class OneProcess:
        """What SkyRL's FSDPStrategy does to one model in one process."""

        def backward(self, loss: Any, model: Any, optimizer: Any, **_: Any) -> None:
            loss.backward()

        def optimizer_step(self, optimizer: Any, model: Any, scheduler: Any, **_: Any) -> Any:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            return norm

        def all_reduce(self, data: Any, *_: Any, **__: Any) -> Any:
            return data

        def save_checkpoint(self, *, ckpt_dir: str, **parts: Any) -> None:
            Path(ckpt_dir).mkdir(parents=True, exist_ok=True)
            states = {name: parts[name].state_dict() for name in ("model", "optimizer", "scheduler")}
            torch.save(states, Path(ckpt_dir) / "states.pt")

        def load_checkpoint(self, *, ckpt_dir: str, **parts: Any) -> Any:
            states = torch.load(Path(ckpt_dir) / "states.pt")
            for name, state in states.items():
                parts[name].load_state_dict(state)
            return ckpt_dir, states

    class CpuPolicyWorker(FSDPPolicyWorkerBase):
        def init_worker_process_group(self) -> None:
            if not torch.distributed.is_initialized():
                torch.distributed.init_process_group("gloo")
            self.device_mesh = torch.distributed.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "sp"))
            self.mesh_rank = MeshRank(dp=0, sp=0, tp=0, pp=0, world_size=1, dp_size=1, pp_size=1)

        def init_model(self, model_path: str, num_training_steps: int | None = None) -> None:
            without_cuda()
            torch.manual_seed(3)
            self.strategy, self._is_lora, self._is_multimodal_lm_only = OneProcess(), False, False
            self.model = HFModelWrapper(model_path, bf16=False)
            lr = self.cfg.policy.optimizer_config.lr
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
            self.scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1.0)

        def _build_weight_source(self, dtype: torch.dtype, backend: str) -> Any:
            with mock.patch.dict(sys.modules, vllm_names()):  # SkyRL 0.4's source takes three names of vLLM's
                return super()._build_weight_source(dtype, backend)

    return with_bridge_weights(CpuPolicyWorker)


def local_dispatch_class() -> type:
    """Returns SkyRL's dispatch with calls of one worker in this process in place of Ray's."""
    from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch

    class LocalDispatch(WorkerDispatch):
        def __init__(self, cfg: Any, worker: Any, client: Any) -> None:
            super().__init__(cfg, policy_actor_group=None, inference_engine_client=client)
            self.worker = worker

        def get_lcm_dp_size(self) -> int:
            return 1

        def forward(self, model: str, data: Any, **_: Any) -> Any:
            return self.worker.forward(data)

        def forward_from_staged(self, model: str, chunk_refs: Any, **_: Any) -> Any:
            return self.worker.forward(chunk_refs)

        def stage_data(self, model: str, data: Any, mini_batch_boundaries: Any) -> Any:
            return [data[begin:end] for begin, end in mini_batch_boundaries]

        def forward_backward_from_staged(self, model: str, chunk_refs: Any, **_: Any) -> Any:
            return self.worker.forward_backward(chunk_refs)

        def optim_step(self, model: str, **_: Any) -> Any:
            return self.worker.optim_step()

        def save_checkpoint(self, model: str, ckpt_dir: str, tokenizer: Any = None, **_: Any) -> None:
            self.worker.save_checkpoint(ckpt_dir, tokenizer)

        def load_checkpoint(self, model: str, ckpt_dir: str, **options: Any) -> None:
            self.worker.load_checkpoint(ckpt_dir, **options)

        def empty_cache(self, model: str | None = None) -> None:
            pass

        def finalize_pending_saves(self, model: str) -> None:
            pass

        def init_weight_sync_state(self, inference_engine_client: Any) -> None:
            ie_cfg = self.cfg.generator.inference_engine
            client = copy.copy(inference_engine_client)  # what Ray makes of it in a worker
            _run_apart(self.worker.init_weight_sync_state(client, ie_cfg))

        def _broadcast_to_inference_engines(self, inference_engine_client: Any, model_id: Any = None) -> None:
            ie_cfg = self.cfg.generator.inference_engine
            _run_apart(self.worker.broadcast_to_inference_engines(inference_engine_client, ie_cfg))

    return LocalDispatch


def _run_apart(call: Any) -> Any:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, call).result()


@contextmanager
def experiment(cfg: Any, feed: Any = None) -> Any:
    """Yields the trainer of an experiment, with its worker, ready to train."""
    without_cuda()
    from shmbridge.consumers.skyrl.entrypoint import ShmExp

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ShmExp(cfg, feed) as exp:
        client = exp.get_inference_client()
        exp.trainer = trainer = exp.get_trainer(
            cfg,
            tracker=exp.get_tracker(),
            tokenizer=exp.tokenizer,
            train_dataset=exp.train_dataset,
            eval_dataset=None,
            inference_engine_client=client,
            generator=exp.get_generator(cfg, exp.tokenizer, client),
            colocate_pg=None,
        )
        worker = cpu_worker_class()(
            cfg=cfg.trainer, world_size=1, rank=0, local_rank=0, master_addr="127.0.0.1", master_port=port,
            sequence_parallel_size=1,
        )  # fmt: skip
        worker.init_worker_process_group()
        worker.init_model(cfg.trainer.policy.model.path)
        trainer.dispatch = local_dispatch_class()(cfg, worker, client)
        trainer._cleanup_old_checkpoints = lambda: None  # asks Ray for the nodes
        try:
            yield trainer
        finally:
            worker._weight_transfer_sender.teardown() if hasattr(worker, "_weight_transfer_sender") else None
            asyncio.run(client.teardown())
            torch.distributed.destroy_process_group()


def rewarded(random: np.random.Generator) -> dict[str, Any]:
    """Returns a group of random answers: each token's advantage says whether it is the TARGET."""
    lengths = random.integers(4, 9, ROWS)
    tokens = [random.integers(6, VOCABULARY, 3 + length).astype(np.int32) for length in lengths]
    for row in tokens:
        row[3::2] = TARGET
    mask = [np.arange(len(row)) >= 3 for row in tokens]
    advantages = [
        np.where(trained, np.where(row == TARGET, 1.0, -0.1), 0.0).astype(np.float32)
        for row, trained in zip(tokens, mask, strict=True)
    ]
    return {
        "tokens": tokens,
        "prompt_length": [3] * ROWS,
        "loss_mask": [trained.astype(np.uint8) for trained in mask],
        "advantages": advantages,
        "inference_logprobs": [np.full(len(row), -np.log(VOCABULARY), np.float32) for row in tokens],
        "score": [float(each.sum()) for each in advantages],
    }


def _play(bridge: str, over: threading.Event) -> None:
    random = np.random.default_rng(3)
    with shmbridge.Producer(bridge, env_name="target", lane_bytes="4M") as producer:
        while not over.is_set():
            with suppress(shmbridge.LaneFull):
                producer.put(rewarded(random), policy_version=max(0, producer.policy_version), timeout_s=0.2)


def target_logprob(worker: Any) -> float:
    """Returns the log-probability of the TARGET after it was seen once, in nats."""
    with torch.no_grad():
        logits = worker.model.model(torch.tensor([[8, 9, 10, TARGET]])).logits[0, -1]
    return float(logits.float().log_softmax(-1)[TARGET])


def main() -> None:
    """Trains, and prints the log-probability of the rewarded token before and after."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bridge", help="train from this bridge; default: an environment made up here")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--groups", type=int, default=4)
    args = parser.parse_args()
    bridge = args.bridge or f"skyrl-example-{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder:
        runpy.run_path(str(Path(__file__).with_name("tiny_model.py")))["build"](Path(folder), seed=3)
        cfg = config(Path(folder), bridge, args.groups, f"trainer.max_training_steps={args.steps}")
        with experiment(cfg) as trainer:
            over = threading.Event()
            environment = threading.Thread(target=_play, args=(bridge, over))
            if args.bridge is None:
                environment.start()
            before = target_logprob(trainer.dispatch.worker)
            try:
                asyncio.run(trainer.train())
            finally:
                over.set()
            print(
                f"log-probability of the rewarded token: {before:.2f} -> "
                f"{target_logprob(trainer.dispatch.worker):.2f}; policy version "
                f"{trainer.generator.feed.consumer.policy_version}"
            )
        if args.bridge is None:
            environment.join()
            shmbridge.clean(bridge, dry_run=False)


if __name__ == "__main__":
    main()
