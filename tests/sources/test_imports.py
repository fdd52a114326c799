"""Imports point one way; heavy packages are imported where they are needed and nowhere else."""

import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import shmbridge

ROOT = Path(__file__).parents[2]

# module of the transport -> what of the transport it may import, besides these that know nothing of it:
LEAVES = {
    "errors",
    "config",
    "limits",
    "one_process",
    "one_thread",
    "reasons",
    "exits",
    "hints",
    "in_thread",
    "staleness",
    "steering",
    "unreleased",
    "closing",
}
LAYERS = {
    "segment": {"_ext", "liveness", "placement"},
    "placement": {"_ext"},
    "engine_folders": {"_ext", "segment"},
    "participation": {"_ext", "engine_folders", "liveness", "segment"},
    "measure": {"_ext", "schema"},
    "intake": {"_ext", "schema", "measure"},
    "slot": {"_ext"},
    "own_names": {"_ext", "liveness", "segment", "refusals"},
    "sizing": {"_ext", "schema"},
    "refusals": {"_ext", "liveness", "messages"},
    "tickets": {"_ext", "liveness", "refusals", "messages", "control_client"},
    "capacity": {"groups"},
    "oldest_policy": {"groups", "want"},
    "put_notices": set(),
    "row_checks": {"_ext"},
    "outgoing": {"_ext", "schema", "intake", "measure", "put_notices", "row_checks", "sizing"},
    "liveness": {"_ext"},
    "deathwatch": {"_ext", "liveness"},
    "schema": {"_ext"},
    "record": {"_ext", "segment", "liveness", "schema", "arrow", "scored_data"},
    "producer": {
        "_ext",
        "segment",
        "liveness",
        "participation",
        "placement",
        "schema",
        "measure",
        "outgoing",
        "own_names",
        "refusals",
        "sizing",
        "slot",
        "tickets",
    },
    "groups": {"record"},
    "want": {"groups"},
    "late_returns": {"_ext", "liveness", "participation", "groups"},
    "round_robin": {"groups"},
    "fair_policy": {"groups", "round_robin", "want"},
    "atropos_buffer": set(),
    "atropos_policy": {"atropos_buffer"},
    "atropos_scheduler": {"groups", "atropos_policy", "want"},
    "scheduler": {"groups", "atropos_scheduler", "fair_policy", "oldest_policy", "want"},
    "batch": {"_ext", "record", "groups", "schema"},
    "shares": {"groups"},
    "rank_share": {"_ext", "batch", "groups", "messages", "record"},
    "rank": {
        "rank_share",
        "_ext",
        "liveness",
        "messages",
        "participation",
        "segment",
        "batch",
        "groups",
        "record",
        "schema",
        "control_client",
    },
    "control_client": {"messages", "segment"},
    "weights_table": {"_ext", "segment"},
    "weights_tensors": {"_ext", "weights_table"},
    "weights_floor": {"_ext", "segment", "liveness"},
    "weights_end": {"_ext", "participation"},
    "weights_writer": {
        "_ext",
        "segment",
        "liveness",
        "weights_end",
        "weights_floor",
        "weights_table",
        "weights_tensors",
    },
    "weights_part": {"_ext", "liveness", "weights_end", "weights_table", "weights_tensors"},
    "weights_reader": {"_ext", "segment", "liveness", "weights_end", "weights_table"},
    "weights": {"weights_table", "weights_writer", "weights_part", "weights_reader"},
    "metrics": set(),
}
# Third parties that are not everywhere installed, and who may import them.
ALLOWED = {
    "torch": (
        "shmbridge.consumers",
        "shmbridge.producers",
        "shmbridge.cli",
        "shmbridge.weights_tensors",
        "shmbridge.bench",
    ),
    "transformers": (
        "shmbridge.consumers",
        "shmbridge.producers",
        "shmbridge.bench.test_bench_weights",
        "shmbridge.bench.gpu",
    ),
    "vllm": ("shmbridge.consumers", "shmbridge.bench.test_bench_weights"),
    "ray": ("shmbridge.relay", "shmbridge.consumers", "shmbridge.bench.baselines"),
    "atroposlib": ("shmbridge.producers", "shmbridge.bench"),
    "textual": ("shmbridge.tui",),
    **dict.fromkeys(("wandb", "peft", "tensorboard", "tqdm"), ("shmbridge.consumers",)),
    "zmq": ("shmbridge.control", "shmbridge.control_client", "shmbridge.relay", "shmbridge.bench.baselines"),
    "pyarrow": ("shmbridge",),
    "matplotlib": ("shmbridge.consumers", "shmbridge.bench"),
    "yaml": ("shmbridge.launch",),
    **dict.fromkeys(("fastapi", "uvicorn", "starlette", "pydantic", "h11"), ("shmbridge.consumers",)),
    **dict.fromkeys(
        ("faster_fifo", "iceoryx2", "transfer_queue", "tensordict"), ("shmbridge.bench.baselines",)
    ),
}


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def test_extensions_import_nothing_of_the_package(sources):
    wrong = []
    for name, path in sources:
        if path.suffix != ".pyx":
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = re.match(r"\s*(?:from|import|cimport)\s+(shmbridge[\w.]*)", line)
            if found and not within(found[1], "shmbridge._ext"):
                wrong.append(f"{path.name}:{number}: {name} imports {found[1]}")
    assert not wrong


def test_transport_layers(python_imports):
    wrong = []
    for module, imported, where, for_types in python_imports:
        part = module.removeprefix("shmbridge.")
        if part in LAYERS and within(imported, "shmbridge") and imported.count(".") and not for_types:
            target = imported.split(".")[1]
            if target not in LAYERS[part] | LEAVES:
                wrong.append(f"{where}: {part} imports {imported}")
    assert not wrong


def test_leaves_know_nothing_of_the_package(python_imports):
    wrong = [
        f"{where}: imports {imported}"
        for module, imported, where, _ in python_imports
        if module.removeprefix("shmbridge.") in LEAVES
        and within(imported, "shmbridge")
        and imported.split(".")[1] not in LEAVES
    ]
    assert not wrong


def test_adapters_use_public_modules_and_not_each_other(python_imports):
    wrong = []
    for module, imported, where, for_types in python_imports:
        mine = next(
            (own for own in ("shmbridge.producers", "shmbridge.consumers") if within(module, own)), None
        )
        if mine is None or not within(imported, "shmbridge") or for_types:
            continue
        other = {"shmbridge.producers": "shmbridge.consumers", "shmbridge.consumers": "shmbridge.producers"}[
            mine
        ]
        private = [
            part
            for part in imported.split(".")[1:]
            if part.startswith("_") and part not in ("__init__", "__version__")
        ]
        if within(imported, other) or private:
            wrong.append(f"{where}: {module} imports {imported}")
    assert not wrong


def test_nothing_imports_what_stands_on_top(python_imports):
    """cli, tui and relay are imported by nobody, launch by its command, the adapters, testing and bench not
    by the transport.
    """
    wrong = []
    for module, imported, where, _ in python_imports:
        for top in ("cli", "launch", "tui", "relay", "testing", "producers", "consumers", "bench"):
            if within(imported, f"shmbridge.{top}") and not within(module, f"shmbridge.{top}"):
                on_top = any(
                    within(module, f"shmbridge.{each}") for each in ("cli", "launch", "relay", "tui", "bench")
                )
                its_command = (top, module) == ("launch", "shmbridge.cli.launch")
                if not its_command and not (
                    on_top and top in ("producers", "consumers", "tui", "testing", "bench")
                ):
                    wrong.append(f"{where}: {module} imports {imported}")
    assert not wrong


def test_heavy_packages_only_where_allowed(python_imports):
    wrong = [
        f"{where}: {module} imports {imported}"
        for module, imported, where, for_types in python_imports
        for package, places in ALLOWED.items()
        if within(imported, package) and not for_types and not any(within(module, place) for place in places)
    ]
    assert not wrong


def test_no_pickle_and_no_standard_shared_memory(sources):
    """In anything of ours; what the baselines of bench/ measure does as it does."""
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for name, path in sources
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if not within(name, "shmbridge.bench.baselines")
        and re.search(
            r"\b(?:import|from)\s+(?:c?pickle|cloudpickle|dill|marshal|shelve)\b|\bpickle\.\w|allow_pickle\s*=\s*True"
            r"|multiprocessing\W+(?:import\s+)?shared_memory|weights_only\s*=\s*False",
            line,
        )
    ]
    assert not wrong


def child(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(Path(shmbridge.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_import_shmbridge_is_light():
    """Neither the package nor its two ends pull in what only some need."""
    loaded = json.loads(
        child("import sys, json, shmbridge; shmbridge.Run; print(json.dumps(sorted(sys.modules)))")
    )
    heavy = {"torch", "pyarrow", "zmq", "asyncio", "pandas", "transformers"} & set(loaded)
    assert not heavy
    loaded = json.loads(
        child("import sys, json, shmbridge; shmbridge.Producer; print(json.dumps(sorted(sys.modules)))")
    )
    assert not {"torch", "pyarrow", "zmq", "pandas", "transformers"} & set(loaded)


def test_import_shmbridge_is_fast():
    """60 ms beyond numpy, three times that on a machine others use too."""
    code = "import time, numpy; t = time.perf_counter(); import shmbridge; print(time.perf_counter() - t)"
    assert statistics.median(float(child(code)) for _ in range(5)) < 3 * 0.060
