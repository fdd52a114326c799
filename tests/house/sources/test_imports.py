"""Imports point one way; heavy packages are imported where they are needed and nowhere else."""

import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

from import_graph import imports

import shmbridge

ROOT = Path(__file__).parents[3]

# Third-party packages that are not installed everywhere, and the modules that may import them.
ALLOWED = {
    "torch": (
        "shmbridge.consumers",
        "shmbridge.producers",
        "shmbridge.launch.tiny_model",
        "shmbridge.batch",
        "shmbridge.weights.table",
        "shmbridge.bench",
    ),
    "polars": ("shmbridge.record.columns", "shmbridge.bench"),
    "transformers": (
        "shmbridge.watch.text",
        "shmbridge.consumers",
        "shmbridge.producers",
        "shmbridge.launch.tiny_model",
        "shmbridge.bench.test_bench_weights",
        "shmbridge.bench.gpu",
    ),
    "vllm": ("shmbridge.consumers", "shmbridge.bench.test_bench_weights"),
    "ray": ("shmbridge.relay", "shmbridge.consumers", "shmbridge.bench"),
    "atroposlib": ("shmbridge.producers", "shmbridge.launch.environments", "shmbridge.bench"),
    "skyrl_gym": ("shmbridge.producers",),
    "omegaconf": ("shmbridge.producers", "shmbridge.consumers", "shmbridge.bench"),
    "datasets": ("shmbridge.producers", "shmbridge.consumers.trl"),
    "trl": ("shmbridge.consumers.trl",),
    "verl": ("shmbridge.consumers.verl",),
    "gem": ("shmbridge.producers.gem",),
    "openai": ("shmbridge.producers",),
    "textual": ("shmbridge.watch.top", "shmbridge.watch.top_screens", "shmbridge.watch.lane_table"),
    **dict.fromkeys(("wandb", "peft", "tensorboard", "tqdm"), ("shmbridge.consumers",)),
    "zmq": (
        "shmbridge.control.server",
        "shmbridge.control.server",
        "shmbridge.relay",
        "shmbridge.bench.baselines",
    ),
    "pyarrow": ("shmbridge",),
    "matplotlib": ("shmbridge.consumers", "shmbridge.launch.demo", "shmbridge.bench"),
    "yaml": ("shmbridge.config",),
    **dict.fromkeys(("uvicorn", "starlette", "h11"), ("shmbridge.consumers", "shmbridge.httpd")),
    "fastapi": ("shmbridge.consumers",),
    "pydantic": ("shmbridge.consumers", "shmbridge.launch.environments", "shmbridge.producers.skyrl_gym"),
    **dict.fromkeys(("faster_fifo", "iceoryx2"), ("shmbridge.bench.baselines",)),
    **dict.fromkeys(("transfer_queue", "tensordict"), ("shmbridge.consumers", "shmbridge.bench")),
}

# What every program uses of the command line.
SHARED_BY_PROGRAMS = ("shmbridge.cli.base", "shmbridge.cli.log", "shmbridge.cli.commands.parser_of")


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def test_extensions_import_nothing_of_the_package(sources):
    wrong = [
        f"{path.name}:{line}: {name} imports {imported}"
        for name, path in sources
        if path.suffix == ".pyx"
        for imported, line, _ in imports(name, path)
        if not within(imported, "shmbridge._ext")
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
    """cli is imported for what all programs share alone, launch, demo and relay by their commands and
    benchmarks alone, the adapters, testing and bench not by the transport.
    """
    wrong = []
    for module, imported, where, _ in python_imports:
        for top in ("cli", "demo", "launch", "relay", "testing", "producers", "consumers", "bench"):
            if within(imported, f"shmbridge.{top}") and not within(module, f"shmbridge.{top}"):
                on_top = any(
                    within(module, f"shmbridge.{each}") for each in ("cli", "launch", "relay", "bench")
                )
                if module == "shmbridge.__main__":
                    continue
                its_command = (module, top) in (
                    ("shmbridge.cli.remote", "relay"),
                    ("shmbridge.cli.watching", "relay"),
                ) or (top == "relay" and within(module, "shmbridge.bench"))
                if imported.startswith(SHARED_BY_PROGRAMS):
                    continue
                if not its_command and not (on_top and top in ("producers", "consumers", "testing", "bench")):
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
    """In all of our modules; the transports that the baselines of bench/ measure may use either."""
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
    """Neither the package nor its two ends import what only some users need."""
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


def test_short_paths_of_consumers_are_lazy():
    """`from shmbridge.consumers import WeightSync` works, and the package alone imports no torch."""
    loaded = child("import sys, shmbridge.consumers as it; print('torch' in sys.modules, dir(it))")
    assert loaded.startswith("False")
    assert "WeightSync" in loaded
    same = child(
        "import shmbridge.consumers as it, shmbridge.consumers.dataset as d, shmbridge.consumers.weight_sync "
        "as w; print(d.BridgeDataset is it.BridgeDataset, w.WeightSync is it.WeightSync)"
    )
    assert same.split() == ["True", "True"]
