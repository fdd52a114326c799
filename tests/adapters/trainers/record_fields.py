"""Writes fields.json, what the record factories must make, from checkouts of the trainers.

record_fields.py torchtitan=../torchtitan prime_rl=../prime-rl slime=../slime
"""

import ast
import json
import subprocess
import sys
from pathlib import Path

WHERE = {
    "torchtitan": ("torchtitan/experiments/rl/types.py", ("TrainingSample", "RolloutTurnID")),
    "prime_rl": ("src/prime_rl/transports/rollouts/types.py", ("TrainingSample", "MicroBatch")),
    "slime": ("slime/utils/types.py", ("Sample",)),
}


def fields(source: str, name: str) -> dict[str, list]:
    """Returns field -> [type, whether it must be given] of a class."""
    classes = (each for each in ast.parse(source).body if isinstance(each, ast.ClassDef))
    (found,) = (each for each in classes if each.name == name)
    return {
        each.target.id: [ast.unparse(each.annotation), each.value is None]
        for each in found.body
        if isinstance(each, ast.AnnAssign)
    }


def main(given: list[str]) -> None:
    """Writes the file."""
    made = {}
    for trainer, checkout in (each.split("=") for each in given):
        path, names = WHERE[trainer]
        git = ["git", "-C", checkout]
        commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
        source = subprocess.check_output([*git, "show", f"HEAD:{path}"], text=True)
        made[trainer] = {"commit": commit, "path": path} | {name: fields(source, name) for name in names}
    (Path(__file__).parent / "fields.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
