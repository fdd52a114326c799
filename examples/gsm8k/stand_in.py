"""Stand-ins for the downloads of the GSM8K run: small sums in the data set's form, and a tiny model of the
same kind.

    python examples/gsm8k/stand_in.py runs/gsm8k-stand-in            # or with --engine vllm
    shmbridge launch runs/gsm8k-stand-in/launch.yaml

The folder gets `data/` (train.jsonl, test.jsonl), `model/` (a random Qwen2 with a tokenizer of 28 characters)
and a `launch.yaml`: the real run's file with these two, on the CPU, and small numbers. The embedded policy
server stands in for vLLM, too, unless it is asked for.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import tiny_model  # noqa: E402  (of the folder above)

PROBLEMS = {"train": 400, "test": 40}
HEADS = {"policy_server": 4, "vllm": 2}  # vLLM's attention takes heads of 32 numbers and more on a CPU
VLLM_ON_CPU = {"VLLM_NO_USAGE_STATS": 1, "VLLM_CPU_KVCACHE_SPACE": 1, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
VLLM_ARGS = ["--logprobs-mode", "processed_logprobs", "--enforce-eager", "--dtype", "float32"]


def problem(stream: random.Random) -> dict[str, str]:
    """Returns a sum of two digits below ten: `3+4?`, and its worked answer as GSM8K writes them."""
    total = stream.randrange(10)
    first = stream.randint(0, total)
    return {
        "question": f"{first}+{total - first}?",
        "answer": (
            f"{first} and {total - first} make "
            f"{first}+{total - first}=<<{first}+{total - first}={total}>>{total}.\n#### {total}"
        ),
    }


def write_data(folder: Path, seed: int) -> None:
    """Writes both splits, the same for the same seed."""
    folder.mkdir(parents=True)
    stream = random.Random(seed)
    for split, count in PROBLEMS.items():
        lines = [json.dumps(problem(stream)) for _ in range(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


def launch_file(folder: Path, steps: int, engine: str, engine_python: str) -> dict[str, Any]:
    """Returns the real run's file with the stand-ins of a folder."""
    config: dict[str, Any] = yaml.safe_load((HERE / "launch.yaml").read_text())
    model = str(folder / "model")
    small = {"OMP_NUM_THREADS": 1, "HF_HUB_OFFLINE": 1, "CUDA_VISIBLE_DEVICES": ""}
    config |= {"bridge": f"stand-in-{folder.name}"[:48], "run_dir": str(folder / "run")}
    vllm = config.pop("vllm") | {
        "model": model,
        "port": 0,
        "python": engine_python,
        "env": small | VLLM_ON_CPU,
    }
    if engine == "vllm":
        config["vllm"] = vllm | {
            "args": [*VLLM_ARGS, "--max-model-len", "128", "--served-model-name", "policy"]
        }
    else:
        config["policy_server"] = {"model": model, "port": 0, "options": {"threads": 1}, "env": small}
    learner = config["learner"]
    learner |= {"model": model, "steps": steps, "env": small}
    learner["options"] |= {
        "groups": 8,
        "lr": 2e-3,
        "warmup": 10,
        "entropy": 0.1,
        "max_token_len": 64,
        "threads": 1,
        "device": "cpu",
        "precision": "float32",
        "gradient_checkpointing": False,
        "micro_tokens": 8192,
    }
    (environment,) = config["environments"]
    environment |= {"count": 1, "lane_bytes": "4M", "env": small}
    environment["args"] |= {
        "env.dataset": str(folder / "data"),
        "env.system_prompt": "",
        "env.max_token_length": 4,
        "env.max_num_workers": 8,
        "env.eval_problems": 8,
        "openai.model_name": "policy",
        "env.ensure_scores_are_not_same": False,
        "env.reward_log": str(folder / "rewards.jsonl"),
    }
    return config


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write stand-ins for the GSM8K run's downloads, and a file to launch."
    )
    parser.add_argument("folder", type=Path, help="where to write; must not exist")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of the run [100]")
    parser.add_argument("--seed", type=int, default=1, help="of the data and of the weights [1]")
    parser.add_argument(
        "--engine", choices=HEADS, default="policy_server", help="what samples [policy_server]"
    )
    parser.add_argument(
        "--engine-python",
        default=".venvs/vllm/bin/python",
        help="the interpreter that has vLLM [.venvs/vllm/bin/python]",
    )
    options = parser.parse_args()
    folder = options.folder.resolve()
    write_data(folder / "data", options.seed)
    tiny_model.build(folder / "model", options.seed, HEADS[options.engine])
    file = launch_file(folder, options.steps, options.engine, options.engine_python)
    (folder / "launch.yaml").write_text(yaml.safe_dump(file, sort_keys=False))
    print(f"stand-ins in {options.folder}; now: shmbridge launch {options.folder}/launch.yaml")


if __name__ == "__main__":
    main()
