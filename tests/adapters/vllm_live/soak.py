"""Hundreds of versions go into a live vLLM server while clients ask: memory, descriptors and threads stay,
answers are right.

    python tests/adapters/vllm_live/soak.py --updates 1000  # make soak-vllm UPDATES=1000

The server is vLLM's own with the middleware; this process is the learner and the clients. Every token of
every answer must be the likeliest under the version that it is said to come from, by Hugging Face. Prints one
JSON object; exit status 1 if anything was wrong or grew.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import shmbridge
from shmbridge.producers.rollout.sampling import completions_in
from shmbridge.weights import WeightsWriter

ROOT = Path(__file__).parents[3]
MODELS = 5  # versions take turns among these
CLIENTS = 3
# Bytes of one process, between the second quarter of the run and the last: four times the model. The worker's
# heap goes on filling up for some 400 updates (21 MB in the 800 after those); what is kept of each version,
# be it a tenth, is more.
MOST_GROWTH = 64 << 20
# descriptors and threads of clients that come and go; one kept of each version would be more, in thirty of
# them
FEW = 8
CLOSE = 1e-3  # nats; two tokens that are likelier than others by less than this are as good

Measures = dict[str, float]


def descendants(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += descendants(int(child))
    return found


def descriptors(pid: int, *, but_sockets: bool) -> int:
    """How many a process has; sockets of clients, which come and go, left out."""
    count = 0
    for each in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += not (but_sockets and os.readlink(f"/proc/{pid}/fd/{each}").startswith("socket:"))
    return count


def measured(pids: dict[str, int], bridge: str) -> Measures:
    """Returns the memory and descriptors of each process now, and the bridge's bytes on the mount."""
    found: Measures = {}
    for who, pid in pids.items():
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        found[f"{who} bytes"] = 1024 * int(lines["RssAnon"].split()[0])
        found[f"{who} threads"] = int(lines["Threads"])
        found[f"{who} descriptors"] = descriptors(pid, but_sockets=pid == os.getpid())
    found["shared bytes"] = sum(
        each.stat().st_blocks * 512 for each in Path("/dev/shm").iterdir() if bridge in each.name
    )
    found["shared segments"] = sum(bridge in each.name for each in Path("/dev/shm").iterdir())
    return found


def growth(rows: Sequence[Measures]) -> dict[str, tuple[float, float]]:
    """Returns the figures that grew, with their medians in the second quarter of the rows and in the last."""
    quarter = max(len(rows) // 4, 1)
    grown = {}
    for name in rows[0] if rows else ():
        before, after = (
            statistics.median(row[name] for row in part)
            for part in (rows[quarter : 2 * quarter], rows[-quarter:])
        )
        if after - before > (
            MOST_GROWTH
            if name.endswith(" bytes")
            else FEW
            if name.endswith((" descriptors", " threads"))
            else 0.5
        ):
            grown[name] = (before, after)
    return grown


def wrong_tokens(models: Sequence[Any], answer: dict[str, Any]) -> str | None:
    """Returns the tokens of a greedy answer that its versions would not choose; None if there is none."""
    import torch

    prompt, tokens = answer["prompt_token_ids"], answer["token_ids"][0]
    (read,) = completions_in(answer)
    if answer["weight_versions"] == [None] and read.oldest != read.newest:
        return None  # an update fell into it, and vLLM before 0.32 does not report where
    covered = 0
    for span in read.spans:
        version, start, end = span
        if start != covered:
            return f"spans {answer['weight_versions'][0]} of {len(tokens)} tokens"
        covered = end
        with torch.no_grad():
            rows = torch.log_softmax(
                models[version % MODELS](torch.tensor([prompt + tokens])).logits[0].float(), -1
            )
        for place in range(start, end):
            row = rows[len(prompt) + place - 1]
            if float(row.max() - row[tokens[place]]) > CLOSE:
                return (
                    f"token {place} of {tokens} is {float(row.max() - row[tokens[place]]):.4f} nats off "
                    f"under {span}"
                )
    return None if covered == len(tokens) else f"spans end at {covered} of {len(tokens)} tokens"


def soak(
    url: str,
    publish: Callable[[int], object],
    models: Sequence[Any],
    versions: Sequence[int],
    measure: Callable[[], Measures],
) -> dict[str, Any]:
    """Publish versions, each once the one before is served, while clients ask.

    Blocks; returns what was seen.
    """
    stop, trouble, counts = threading.Event(), [], {"answers": 0, "of several versions": 0}

    def ask(client: int) -> None:
        for number in itertools.count():
            if stop.is_set():
                return
            prompt = [2, 6 + client, 6 + number % 20, 3]
            body = {
                "prompt": {"prompt_token_ids": prompt},
                "max_tokens": 8 + 24 * (number % 3),
                "temperature": 0,
                "ignore_eos": True,
            }
            try:
                answer = said(url, "/generate", body)
                wrong = wrong_tokens(models, answer)
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
            if wrong:
                trouble.append(wrong)
                return
            counts["answers"] += 1
            (read,) = completions_in(answer)
            counts["of several versions"] += read.oldest != read.newest

    rows: list[Measures] = []
    failed_before = said(url, "/policy_version")["failed_total"]
    every = max(len(versions) // 40, 1)
    clients = [threading.Thread(target=ask, args=(client,)) for client in range(CLIENTS)]
    began = time.monotonic()
    try:
        for place, version in enumerate(versions):
            publish(version)
            deadline = time.monotonic() + 60.0
            while (policy := said(url, "/policy_version"))["version"] != version and not trouble:
                if time.monotonic() > deadline or policy["failed_total"] > failed_before:
                    trouble.append(f"version {version} is not there: {policy}")
                time.sleep(0.01)
            if not place:
                for each in clients:
                    each.start()
            if trouble:
                break
            if place % every == 0:
                rows.append(measure())
    finally:
        stop.set()
        for each in clients:
            if each.ident:
                each.join()
    seconds = time.monotonic() - began
    return {
        "updates": len(versions),
        "seconds": round(seconds, 1),
        **counts,
        "trouble": trouble,
        "grown": growth(rows),
        "rows": rows,
    }


def said(url: str, path: str, body: Any = None) -> Any:
    raw = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, raw, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60.0) as answer:
        return json.loads(answer.read() or b"null")


def tiny(seed: int) -> Any:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    shape = {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    ids = {"vocab_size": 28, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return Qwen2ForCausalLM(
        Qwen2Config(**shape, **ids, max_position_embeddings=512, initializer_range=0.1)
    ).eval()


@contextlib.contextmanager
def server(folder: Path, bridge: str, log: Path, words: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield the address and the process id of a server that is up, and end it and all that it started."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "512", "--max-num-seqs", "8", "--skip-tokenizer-init", *words]
    # a cache whose every page is touched before the second quarter
    command += ["--num-gpu-blocks-override", "32"]
    command += ["--weight-transfer-config", json.dumps({"backend": "shmbridge"})]
    command += ["--middleware", "shmbridge.consumers.vllm.middleware.ShmBridge"]
    command += ["--additional-config", json.dumps({"shmbridge": {"bridge": bridge, "pause": "keep"}})]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    } | os.environ
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 300.0
        while True:
            with contextlib.suppress(OSError):
                said(f"http://127.0.0.1:{port}", "/health")
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not come up: {log.read_text()[-3000:]}")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--compile", action="store_true", help="do not give the server --enforce-eager")
    parser.add_argument("--rows", action="store_true", help="print all that was measured, too")
    given = parser.parse_args()
    models = [tiny(seed) for seed in range(MODELS)]
    bridge = f"vllm-soak-{os.getpid()}"
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made, "model")
        models[0].save_pretrained(folder)
        with server(folder, bridge, Path(made, "log"), [] if given.compile else ["--enforce-eager"]) as (
            url,
            pid,
        ):
            names = (
                f"{place} {Path(f'/proc/{each}/comm').read_text().strip()}"
                for place, each in enumerate(descendants(pid))
            )
            pids = {"learner": os.getpid()} | dict(zip(names, descendants(pid), strict=False))
            with WeightsWriter(bridge) as writer:
                seen = soak(
                    url,
                    lambda version: writer.publish(version, models[version % MODELS].named_parameters()),
                    models,
                    range(1, given.updates + 1),
                    lambda: measured(pids, bridge),
                )
    kept = shmbridge.clean(bridge, dry_run=False).kept
    rows = seen.pop("rows")
    ends = {"first": rows[len(rows) // 4], "last": rows[-1]} if rows else {}
    print(json.dumps(seen | ends | {"kept": kept} | ({"rows": rows} if given.rows else {})))
    return int(bool(seen["trouble"] or seen["grown"] or kept))


if __name__ == "__main__":
    sys.exit(main())
