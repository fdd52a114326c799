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
    "segments.os_limits",
    "segments.one_process",
    "segments.one_thread",
    "segments.reasons",
    "segments.at_exit",
    "put.hints",
    "segments.in_thread",
    "batching.staleness",
    "atropos.env_status",
    "record.unreleased",
    "segments.closing",
}
# and below
HUB = {
    "_ext",
    "segments.segment",
    "segments.locks",
    "segments.membership",
    "segments.placement",
    "schema",
    "record.record",
    "control.messages",
    "admission.limit",
}
BATCHING = {
    "_ext",
    "batch",
    "record.groups",
    "record.record",
    "batching.scheduler",
    "batching.batch_size",
    "hub.state",
    "hub.lanes",
    "hub.waiting",
    "hub.control_plane",
    "admission.limit",
}
LAYERS = {
    "segments.segment": {"_ext", "segments.locks", "segments.placement"},
    "segments.placement": {"_ext"},
    "segments.engine_folders": {"_ext", "segments.segment"},
    "segments.membership": {"_ext", "segments.engine_folders", "segments.locks", "segments.segment"},
    "put.column_forms": {"_ext", "schema"},
    "put.convert": {"_ext", "schema", "put.column_forms"},
    "put.claim": {"_ext"},
    "put.own_names": {"_ext", "segments.locks", "segments.segment", "put.refusals"},
    "sizing": {"_ext", "schema"},
    "put.refusals": {"_ext", "segments.locks", "control.messages"},
    "admission.tickets": {
        "_ext",
        "segments.locks",
        "put.refusals",
        "control.messages",
        "control.client",
        "put.own_names",
    },
    "admission.limit": set(),
    "hub.lane": {"_ext", "record.record"},
    "hub.lanes": {*HUB, "hub.lane", "segments.death_watch"},
    "hub.asyncio_wait": {"_ext"},
    "hub.state": HUB,
    "hub.control_plane": {"control.server", "control.environments"},
    "hub.waiting": {"_ext", "hub.state", "hub.lanes", "hub.asyncio_wait"},
    "hub.admission": {*HUB, "hub.state", "hub.lanes"},
    "hub.view": {"control.messages", "hub.admission", "hub.state", "hub.lanes"},
    "hub.counters": {"hub.lanes", "segments.placement", "hub.waiting"},
    "control.environments": {"control.messages"},
    "control.server": {
        "_ext",
        "control.client",
        "control.environments",
        "control.messages",
        "segments.segment",
    },
    "batching.in_flight": {"record.groups"},
    "batching.prefetch": {"batch"},
    "batching.request": {"batch", "record.groups", "batching.batch_size"},
    "batching.stuck": {"record.groups", "hub.lanes", "sizing", "batching.batch_size"},
    "batching.former": {
        *BATCHING,
        "batching.atropos",
        "batching.request",
        "control.environments",
        "batching.in_flight",
        "batching.late_returns",
        "batching.prefetch",
        "batching.stuck",
    },
    "batching.queue": {"batching.former", "record.groups", "hub.lanes"},
    "batching.iteration": {
        *BATCHING,
        "batching.request",
        "batching.former",
        "batching.queue",
        "batching.prefetch",
    },
    "ranks.server": {
        "_ext",
        "segments.locks",
        "control.messages",
        "record.groups",
        "batching.request",
        "batching.former",
        "hub.control_plane",
        "hub.state",
        "ranks.shares",
    },
    "batching.oldest": {"record.groups", "batching.batch_size"},
    "put.notices": set(),
    "record.row_checks": {"_ext"},
    "put.planner": {
        "_ext",
        "schema",
        "put.convert",
        "put.column_forms",
        "put.notices",
        "record.row_checks",
        "sizing",
    },
    "segments.locks": {"_ext"},
    "segments.death_watch": {"_ext", "segments.locks"},
    "schema": {"_ext"},
    "record.columns": {"_ext", "schema"},
    "record.arrow": {"_ext", "schema", "record.columns"},
    "record.scored_data": {"_ext", "schema", "record.columns"},
    "record.record": {
        "_ext",
        "segments.segment",
        "segments.locks",
        "schema",
        "record.arrow",
        "record.scored_data",
        "record.columns",
    },
    "producer": {
        "_ext",
        "segments.segment",
        "segments.locks",
        "segments.membership",
        "segments.placement",
        "schema",
        "put.column_forms",
        "put.planner",
        "put.own_names",
        "put.refusals",
        "sizing",
        "put.claim",
        "admission.tickets",
    },
    "record.groups": {"record.record"},
    "batching.batch_size": {"record.groups"},
    "batching.late_returns": {"_ext", "segments.locks", "segments.membership", "record.groups"},
    "batching.deficit_round_robin": {"record.groups"},
    "batching.fair": {"record.groups", "batching.deficit_round_robin", "batching.batch_size"},
    "atropos.size_buffer": set(),
    "atropos.queue": {"atropos.size_buffer"},
    "batching.atropos": {"record.groups", "atropos.queue", "batching.batch_size"},
    "batching.scheduler": {
        "record.groups",
        "batching.atropos",
        "batching.fair",
        "batching.oldest",
        "batching.batch_size",
    },
    "batch": {"_ext", "record.record", "record.groups", "schema", "control.messages"},
    "ranks.shares": {"record.groups"},
    "ranks.rank_share": {"_ext", "batch", "record.groups", "control.messages", "record.record"},
    "rank": {
        "ranks.rank_share",
        "_ext",
        "segments.locks",
        "control.messages",
        "segments.membership",
        "segments.segment",
        "batch",
        "record.groups",
        "record.record",
        "schema",
        "control.client",
    },
    "control.client": {"control.messages", "segments.segment"},
    "weights.table": {"_ext", "segments.segment"},
    "weights.tensors": {"_ext", "weights.table"},
    "weights.version_floor": {"_ext", "segments.segment", "segments.locks"},
    "weights.endpoint": {"_ext", "segments.membership"},
    "weights.writer": {
        "_ext",
        "segments.segment",
        "segments.locks",
        "weights.endpoint",
        "weights.version_floor",
        "weights.table",
        "weights.tensors",
    },
    "weights.shard_writer": {
        "_ext",
        "segments.locks",
        "weights.endpoint",
        "weights.table",
        "weights.tensors",
    },
    "weights.reader": {"_ext", "segments.segment", "segments.locks", "weights.endpoint", "weights.table"},
    "weights": {"weights.table", "weights.writer", "weights.shard_writer", "weights.reader"},
    "metrics": set(),
}
# Third parties that are not everywhere installed, and who may import them.
ALLOWED = {
    "torch": (
        "shmbridge.consumers",
        "shmbridge.producers",
        "shmbridge.cli",
        "shmbridge.weights.tensors",
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
    "zmq": (
        "shmbridge.control.server",
        "shmbridge.control.client",
        "shmbridge.relay",
        "shmbridge.bench.baselines",
    ),
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


def named_in(imported: str, modules: set[str]) -> bool:
    """Whether a dotted name of the package is one of these modules, or in one."""
    return any(within(imported, f"shmbridge.{each}") for each in modules)


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
    for module, imported, where, _ in python_imports:
        part = module.removeprefix("shmbridge.")
        if part in LAYERS and within(imported, "shmbridge") and imported.count("."):
            target = imported.split(".")[1]
            if target not in LAYERS[part] | LEAVES:
                wrong.append(f"{where}: {part} imports {imported}")
    assert not wrong


def test_transport_has_no_circle(python_imports):
    """Type imports included: whoever holds a part does not have it hold him."""
    modules = {
        module for module, *_ in python_imports if module.startswith("shmbridge.") and module.count(".") == 1
    }
    imports: dict[str, set[str]] = {module: set() for module in modules}
    for module, imported, *_ in python_imports:
        target = ".".join(imported.split(".")[:2])
        if module in modules and target in modules and target != module:
            imports[module].add(target)
    while free := [module for module, targets in imports.items() if not targets & imports.keys()]:
        for module in free:
            del imports[module]
    assert not {module: targets & imports.keys() for module, targets in imports.items()}


def test_leaves_know_nothing_of_the_package(python_imports):
    wrong = [
        f"{where}: imports {imported}"
        for module, imported, where, _ in python_imports
        if module.removeprefix("shmbridge.") in LEAVES
        and within(imported, "shmbridge")
        and not named_in(imported, LEAVES)
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
