"""The inference server of the demo: the embedded policy server, or vLLM in an environment of its own.

Both sample with the newest weights of the bridge and answer environments alike. Knows nothing of learners.
Called by `demo.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path

from shmbridge.demo.children import Child

ENGINES = ("policy-server", "vllm")
TINY_HEADS = {"policy-server": 4, "vllm": 2}  # vLLM's attention takes heads of 32 numbers and more on a CPU
VLLM_PYTHON = ".venvs/vllm/bin/python"
NEEDS_S = {"policy-server": 120.0, "vllm": 400.0}  # to start, on a busy machine

_VLLM_SURROUNDINGS = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; on a GPU these three have no effect
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
_TINY = ["--dtype", "float32", "--max-model-len", "128"]
_GIVEN = ["--gpu-memory-utilization", "0.4"]  # the learner is on the same GPU
_ROOT = Path(__file__).parents[2]  # holds the package


def server(options: argparse.Namespace, bridge: str, model: Path | str, port: int, logs: Path) -> Child:
    """Returns the server, not started: it follows `bridge` and answers on `port` of 127.0.0.1."""
    if options.engine == "vllm":
        return _vllm(options, bridge, model, port, logs)
    words = [
        "--bridge",
        bridge,
        "--model",
        str(model),
        "--port",
        str(port),
        *shlex.split(options.engine_flags),
    ]
    return Child("policy_server", [sys.executable, "-m", "shmbridge.consumers.policy_server", *words], logs)


def _vllm(options: argparse.Namespace, bridge: str, model: Path | str, port: int, logs: Path) -> Child:
    words = [
        "--model",
        str(model),
        "--served-model-name",
        "policy",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    words += ["--weight-transfer-config", json.dumps({"backend": "shmbridge"})]
    words += ["--middleware", "shmbridge.consumers.vllm.middleware.ShmBridge"]
    words += ["--additional-config", json.dumps({"shmbridge": {"bridge": bridge, "pause": "keep"}})]
    # The learner recomputes the distribution that a token was drawn from.
    words += ["--logprobs-mode", "processed_logprobs", "--enforce-eager", "--disable-uvicorn-access-log"]
    words += _GIVEN if options.model else _TINY
    words += shlex.split(options.engine_flags)
    python = Path(options.engine_python).absolute()  # not resolved: a link into a venv makes it that venv's
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", *words]
    # Its engine and workers are processes of their own, and outlive a server that is killed.
    surroundings = {name: os.environ.get(name, value) for name, value in _VLLM_SURROUNDINGS.items()}
    if (_ROOT / "pyproject.toml").exists():  # a clone: that environment has no shmbridge of its own
        surroundings["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    return Child("vllm", command, logs, guarded=True, surroundings=surroundings)
