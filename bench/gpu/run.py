"""`make gpu`: looks at the machine, installs what it lacks from a local folder, builds, and runs each part
within nine minutes in all.

    python3 -m bench.gpu.run [--device cpu --size smallest] [--wheels DIR] [--into bench/results]

Standard library only, since nothing is built when it begins. After each part the results are
written again, so that a run which is cut off keeps what it found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from . import page, preflight

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "gpu"
SITE = WORK / "site"  # packages installed from the local folder
LIMIT_S = 540.0
# name, module, seconds at most, and whether it needs a bridge
PARTS = (
    ("tests", "tests", 90.0, True),
    ("host to device", "host_to_device", 90.0, False),
    ("weights", "weights", 150.0, True),
    ("training", "training", 170.0, True),
    ("mismatch", "mismatch", 150.0, True),
)


def main() -> int:
    """0 if every part that this machine can run ended well, 1 if one did not, 2 if nothing could be built."""
    options = _arguments()
    begun = time.monotonic()
    WORK.mkdir(parents=True, exist_ok=True)
    environment = _environment()
    lacking = preflight.missing(preflight.NEEDED)
    if lacking:
        _install(lacking, options.wheels, environment)
    sys.path.insert(0, str(SITE))
    machine = preflight.look()
    device = options.device or ("cuda" if machine["gpu"] else "cpu")
    size = options.size or ("full" if device == "cuda" else "smallest")
    said = preflight.complaints(machine, wants_gpu=options.device != "cpu")
    for line in said:
        print(f"make gpu: {line}", flush=True)
    results: dict[str, Any] = {
        "device": device,
        "size": size,
        "machine": machine,
        "lacking": said,
        "revision": _revision(),
        "parts": {},
        "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    into = options.into / _slug(machine, device)
    if device == "cpu":
        environment["OMP_NUM_THREADS"] = "1"  # small tensors, and processes that share the cores
    if preflight.missing(preflight.NEEDED) or not _build(machine, environment, results):
        page.write(into, results)
        return 2
    for name, module, most_s, needs_bridge in PARTS:
        left_s = LIMIT_S - (time.monotonic() - begun)
        if needs_bridge and not machine["ofd_locks"]:
            results["parts"][name] = {"state": "not run: no OFD locks", "rows": []}
        elif left_s < 20.0:
            results["parts"][name] = {"state": f"not run: {LIMIT_S:.0f} s were over", "rows": []}
        else:
            results["parts"][name] = _part(
                name, module, device, size, min(most_s, left_s - 10.0), environment
            )
        page.write(into, results)
    results["seconds"] = round(time.monotonic() - begun, 1)
    page.write(into, results)
    print(f"make gpu: {results['seconds']} s; {into}.md", flush=True)
    states = [part["state"] for part in results["parts"].values()]
    return int(any(not state.startswith(("done", "not run")) for state in states))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), help="[cuda if there is one]")
    parser.add_argument("--size", choices=("smallest", "full"), help="[full on a GPU, else smallest]")
    parser.add_argument(
        "--wheels", type=Path, default=ROOT / ".whl", metavar="DIR", help="wheels of what is missing [.whl]"
    )
    parser.add_argument(
        "--into", type=Path, default=ROOT / "bench" / "results", metavar="DIR", help="[bench/results]"
    )
    return parser.parse_args()


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        **os.environ,
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "SHMBRIDGE_CHECK_ROWS": "1",  # producers put a checksum on every row, and the learner compares it
    }


def _install(names: list[str], wheels: Path, environment: dict[str, str]) -> None:
    """Installs missing packages from the folder of wheels alone; the next preflight names those that are not
    there either.
    """
    for name in names:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
        places = ["--target", str(SITE), "--find-links", str(wheels)]
        subprocess.run([*pip, *places, name], env=environment, check=False)


def _build(machine: dict[str, Any], environment: dict[str, str], results: dict[str, Any]) -> bool:
    begun = time.monotonic()
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", "-j", str(machine["cores"])]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    took = time.monotonic() - begun
    results["parts"]["build"] = {
        "state": "done" if done.returncode == 0 else f"failed: {done.stderr[-2000:]}",
        "rows": [],
        "seconds": round(took, 1),
    }
    print(f"make gpu: built in {took:.1f} s" if done.returncode == 0 else done.stderr[-4000:], flush=True)
    return done.returncode == 0


def _part(
    name: str, module: str, device: str, size: str, most_s: float, environment: dict[str, str]
) -> dict[str, Any]:
    """One part in a process group of its own, which ends with it."""
    print(f"make gpu: {name}, at most {most_s:.0f} s", flush=True)
    out = WORK / f"{module}.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"shmbridge.bench.gpu.{module}"]
    command += ["--device", device, "--size", size, "--out", str(out), "--seconds", str(most_s * 0.8)]
    begun = time.monotonic()
    with open(WORK / f"{module}.log", "w+") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, stderr=log)
        try:
            code = process.wait(most_s)
            state = "done" if code == 0 else f"failed with {code}"
        except subprocess.TimeoutExpired:
            state = f"ended after {most_s:.0f} s"
        finally:
            _end_group(process)
        log.seek(0)
        tail = log.read()[-2000:]
    if state != "done":
        print(tail, flush=True)
    rows = json.loads(out.read_text()) if out.exists() else []
    return {
        "state": state,
        "seconds": round(time.monotonic() - begun, 1),
        "rows": rows,
        **({} if state == "done" else {"log": tail}),
    }


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a part's process group, which holds only the part's own children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _revision() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def _slug(machine: dict[str, Any], device: str) -> str:
    name = machine["gpu"]["name"] if device == "cuda" else f"no gpu {machine['cpu']}"
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
