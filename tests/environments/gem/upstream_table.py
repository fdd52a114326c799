"""Prints a table: what `--check` says of each of upstream's scripts, and what happens when gem steps it.

    python tests/environments/gem/upstream_table.py CHECKOUT [--only PART_OF_A_PATH] [--jobs 2]

By hand: some hundred scripts are imported and played, each in a process of its own, without network. Data
sets are those that `upstream.py` writes; a script that wants another is "not tried: its data", which says
nothing of the verdict.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[3]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from shmbridge.producers.atropos.check import checked  # noqa: E402
from tests.environments.byte_tokenizer import byte_tokenizer  # noqa: E402
from tests.environments.gem.upstream import SCRIPTS, write_data  # noqa: E402

SAID = "<think>It is hard</think> I do not know any answer at all."
PLAY_S = 240
# What happened, by the words of an error that is the data's, or this machine's.
DATA = re.compile(
    r"offline|hub|download|DatasetNotFound|Couldn't find|FileNotFound|No such file|LookupError"
    r"|no more items|Connection|API key|api_key|environment variable|credentials|Cannot send a request",
    re.IGNORECASE,
)


def main() -> None:
    """Plays them, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--only", default="", help="scripts whose path has this in it")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    folder = options.checkout.resolve() / "environments"
    scripts = [each for each in _scripts(folder) if options.only in str(each)]
    scripts.sort(key=lambda each: len(each.parts))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(folder.parent)])
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as data, ThreadPoolExecutor(options.jobs) as threads:
        write_data(Path(data))
        byte_tokenizer().save_pretrained(Path(data) / "tokenizer")
        (Path(data) / "environments").symlink_to(folder)  # some read files of theirs from there
        rows = list(threads.map(lambda each: _row(folder, each, Path(data)), scripts))
    print("| script | attached | stepped | evaluated | what happened | agrees |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print("| " + " | ".join(each.replace("|", "/") for each in row) + " |")
    print()
    print(dict(Counter(row[5] for row in rows)), dict(Counter(row[4].partition(":")[0] for row in rows)))


def _scripts(folder: Path) -> list[Path]:
    """Every script with an environment of its own that has a training item."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(errors="replace")
        own = re.search(
            r"^class \w+\((?:\w+\.)?(?:BaseEnv|TeacherDistillationEnv|GSM8kEnv)\b", text, re.MULTILINE
        )
        if own and "eval_environments" not in path.parts:
            found.append(path)
    return found


def _row(folder: Path, script: Path, data: Path) -> tuple[str, str, str, str, str, str]:
    name = str(script.relative_to(folder))
    said = checked(script)
    short = [str(each) for each in (said.attached, said.stepped, said.evaluated)]
    if not said.environment:
        row = (name, "no", "no", "no", f"not tried: {said.attached.why[0]}", "-")
    else:
        how = {"replay": any(each.startswith("it asks for n=") for each in said.stepped.why)}
        played = _run([__file__, "--play", f"{script}:{said.environment}", json.dumps(how)], data, folder)
        happened = (played.strip().splitlines() or ["ended without a word"])[-1][:200]
        did = happened.startswith(("played", "refused: a judge"))
        agrees = "-" if happened.startswith("not tried") else "yes" if said.stepped.can == did else "NO"
        row = (name, *short, happened, agrees)
    print(*row, sep=" | ", file=sys.stderr, flush=True)
    return row


def _run(arguments: list[str], data: Path, folder: Path) -> str:
    environ = {
        **os.environ, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "NLTK_DATA": str(data / "nltk_data"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder.parent)]),
        "HF_DATASETS_CACHE": str(data / "cache"), "TOKENIZER": str(data / "tokenizer"),
    }  # fmt: skip
    try:
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, errors="replace", cwd=data,
            env=environ, timeout=PLAY_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"not tried: nothing in {PLAY_S} s"
    return done.stdout if done.stdout.strip() else f"ended: {done.stderr.strip()[-150:]}"


def play(environment: str, how: dict[str, bool]) -> str:
    """Plays one episode, alone; returns what happened in a line."""
    from shmbridge.producers.gem import Action, AtroposGemEnv

    tokenizer = byte_tokenizer()
    tokens = [*tokenizer.encode(SAID, add_special_tokens=False), tokenizer.eos_token_id]
    configs = {script.path.rpartition("/")[2]: script.config for script in SCRIPTS.values()}
    config = configs.get(environment.rpartition("/")[2], {})
    began = ""
    try:
        env = AtroposGemEnv(
            environment,
            tokenizer=os.environ["TOKENIZER"],
            config={"use_wandb": False, **config},
            timeout_s=60.0,
            **how,
        )
        env.reset(seed=0)
        began = "began"
        for _ in range(60):
            _, reward, terminated, _, info = env.step(Action(SAID, tokens, [-0.5] * len(tokens)))
            if terminated:
                dropped = ", its group dropped" if info["filtered"] else ""
                return f"played: reward {reward:g}{dropped}"
        return "played: 60 turns, and no end"
    except BaseException as error:
        said = f"{type(error).__name__}: {getattr(error, 'message', error)}".replace("\n", " ")
        if "asks a judge" in said:
            return f"refused: a judge: {said}"
        if not began and DATA.search(said):
            return f"not tried: its data: {said[:120]}"
        return f"{'failed' if began else 'not begun'}: {said}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--play"]:
        print("\n" + play(sys.argv[2], json.loads(sys.argv[3])), flush=True)
        os._exit(0)
    main()
