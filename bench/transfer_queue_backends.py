"""TransferQueue with the backend `shmbridge` beside its SimpleStorage: put in one process, get in another.

    python -m shmbridge.bench.transfer_queue_backends --rounds 15

Both queues live in one Ray cluster and are asked in turn. A round puts 64 rows of 8192 tokens in 3 ragged
fields by new keys, gets them whole in another process, sums every value, and clears them. Printed: medians in
milliseconds, where the time of our side goes, and the ratios. Needs TransferQueue and Ray.
"""

import argparse
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

BACKENDS = ("SimpleStorage", "shmbridge")
FIELDS = ("input_ids", "advantages", "rollout_log_probs")


class Side:
    """A client of each queue, and the times of what it was asked."""

    def __init__(self, configurations: dict[str, Any]) -> None:
        import torch
        from transfer_queue import TransferQueueClient

        from shmbridge.consumers.transfer_queue import register

        register()
        torch.set_num_threads(1)
        self._clients = {}
        for name, conf in configurations.items():
            client = TransferQueueClient(f"bench-{name}-{os.getpid()}", conf.controller.zmq_info)
            client.initialize_storage_manager(manager_type=name, config=conf.backend[name])
            self._clients[name] = client
        self._stages: dict[str, list[float]] = defaultdict(list)
        self._watch(self._clients["shmbridge"].storage_manager)

    def put(self, backend: str, partition: str, rows: int, tokens: int) -> float:
        """Milliseconds of a put by keys: three messages to the controller, and the values."""
        import torch
        from tensordict import TensorDict

        whole = [
            torch.arange(rows * tokens, dtype=dtype) for dtype in (torch.int32, torch.float32, torch.float32)
        ]
        ends = torch.arange(rows + 1) * tokens
        fields = TensorDict(
            {
                name: torch.nested.nested_tensor_from_jagged(each, ends)
                for name, each in zip(FIELDS, whole, strict=True)
            },
            batch_size=rows,
        )
        client, keys = self._clients[backend], keys_of(partition, rows)
        return milliseconds(lambda: client.put(fields, client.kv_retrieve_meta(keys, partition, create=True)))

    def get(self, backend: str, partition: str, rows: int) -> tuple[float, float, float]:
        """Milliseconds of a get, of a sum over every value after it, and that sum."""
        client, keys, found = self._clients[backend], keys_of(partition, rows), []
        took = milliseconds(
            lambda: found.append(client.get_data(client.kv_retrieve_meta(keys, partition, create=False)))
        )
        total: list[float] = []
        read = milliseconds(
            lambda: total.append(sum(float(found[0][name].values().sum()) for name in FIELDS))
        )
        return took, read, total[0]

    def clear(self, backend: str, partition: str, rows: int) -> float:
        """Milliseconds of a clear by keys."""
        client, keys = self._clients[backend], keys_of(partition, rows)
        return milliseconds(
            lambda: client.clear_samples(client.kv_retrieve_meta(keys, partition, create=False))
        )

    def stages(self) -> dict[str, float]:
        """Median milliseconds of our own parts."""
        return {name: statistics.median(times) for name, times in self._stages.items()}

    def _watch(self, manager: Any) -> None:
        store = manager.store
        store.put = self._timed("put: the segment, all bytes copied in", store.put)
        manager._get = self._timed("get: mapped, and made nested tensors", manager._get)
        store.clear = self._timed("clear: rows released", store.clear)

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            found: list[Any] = []
            self._stages[name].append(milliseconds(lambda: found.append(call(*args))))
            return found[0]

        return timed


def milliseconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - began)


def keys_of(partition: str, rows: int) -> list[str]:
    return [f"{partition}_{row}_0" for row in range(rows)]


def start(bridge: str) -> tuple[dict[str, Any], list[Any]]:
    """Starts Ray and a queue of each backend; returns their configurations, and what keeps them alive."""
    import ray
    from omegaconf import OmegaConf
    from transfer_queue.controller import TransferQueueController
    from transfer_queue.sampler.sequential_sampler import SequentialSampler
    from transfer_queue.storage.bootstrap.provider import StorageBootstrapProvider
    from transfer_queue.utils.zmq_utils import process_zmq_server_info

    from shmbridge.consumers.transfer_queue import register

    register()
    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    configurations, kept = {}, []
    for name in BACKENDS:
        conf = OmegaConf.create({}, flags={"allow_objects": True})
        of_backend: dict[str, Any] = (
            {"bridge": bridge} if name == "shmbridge" else {"num_data_storage_units": 2}
        )
        conf.backend = {"storage_backend": name, name: of_backend}
        controller = TransferQueueController.remote(sampler=SequentialSampler(), polling_mode=True)
        conf.controller = {"zmq_info": process_zmq_server_info(controller)}
        kept += [controller, StorageBootstrapProvider.get_provider(name)(conf)]
        configurations[name] = conf
    return configurations, kept


def measure(rounds: int, rows: int, tokens: int) -> dict[str, Any]:
    """Returns medians by backend and call, our own stages, and the ratios SimpleStorage / shmbridge."""
    import ray

    configurations, kept = start(f"tq-bench-{os.getpid()}")
    writer = ray.remote(num_cpus=0)(Side).remote(configurations)
    reader = Side(configurations)
    times: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in BACKENDS}
    for number in range(rounds + 2):
        sums = set()
        for name in BACKENDS:
            partition = f"round{number}"
            put = ray.get(writer.put.remote(name, partition, rows, tokens))
            get, read, total = reader.get(name, partition, rows)
            clear = reader.clear(name, partition, rows)
            sums.add(total)
            if number >= 2:  # the first ones connect sockets and fill caches
                for call, took in (("put", put), ("get", get), ("read", read), ("clear", clear)):
                    times[name][call].append(took)
                times[name]["put + get + read"].append(put + get + read)
        assert len(sums) == 1, sums
    medians = {
        name: {call: statistics.median(each) for call, each in found.items()} for name, found in times.items()
    }
    ours, theirs = medians["shmbridge"], medians["SimpleStorage"]
    stages = {**ray.get(writer.stages.remote()), **reader.stages()}
    del kept
    ray.shutdown()
    return {
        "rows": rows, "tokens": tokens, "rounds": rounds, "megabytes": rows * tokens * 12 / 1e6,
        "milliseconds": medians, "stages": stages,
        "ratio": {call: theirs[call] / ours[call] for call in ours},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.rounds, options.rows, options.tokens)
    if options.json:
        print(json.dumps(found))
        return
    print(f"{found['rows']} rows x {found['tokens']} tokens x 3 fields, {found['megabytes']:.1f} MB, "
          f"medians of {found['rounds']} rounds in turn, ms")  # fmt: skip
    for call, ratio in found["ratio"].items():
        theirs, ours = (found["milliseconds"][name][call] for name in BACKENDS)
        print(f"{call:18} SimpleStorage {theirs:6.1f}   shmbridge {ours:6.1f}   {ratio:.2f}x")
    for stage, took in found["stages"].items():
        print(f"  of which {stage}: {took:.1f}")


if __name__ == "__main__":
    main()
