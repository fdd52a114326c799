"""`make gpu` runs whole without a GPU, on the processor instead, so that it works on the first GPU machine it
meets.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
from bench.gpu import page, preflight

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(400)
def test_make_gpu_runs_whole_on_the_processor(tmp_path):
    command = [
        sys.executable,
        "-m",
        "bench.gpu.run",
        "--device",
        "cpu",
        "--size",
        "smallest",
        "--into",
        str(tmp_path),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "SHMBRIDGE_CHECK_ROWS"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=380
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    (written,) = tmp_path.glob("*.json")
    parts = json.loads(written.read_text())["parts"]
    assert {name: part["state"] for name, part in parts.items()} == dict.fromkeys(
        ("build", "tests", "host to device", "weights", "training", "mismatch"), "done"
    )
    (suite,) = [row for row in parts["tests"]["rows"] if row["what"] == "tests/gpu"]
    assert suite["failed"] == 0
    assert suite["passed"] >= 4
    (same,) = {row["same"] for row in parts["weights"]["rows"] if "same" in row}
    assert same is True
    for steps in parts["training"]["rows"]:
        assert steps["step_s"] > 0
        assert steps["rows_compared"] >= 10 * 4  # every row of ten steps
        assert steps["rows_differ"] == 0
    assert all(row["logprob_diff_mean"] < 0.5 for row in parts["mismatch"]["rows"])
    assert "no figure here is of a GPU" in written.with_suffix(".md").read_text()


def test_each_thing_that_a_machine_lacks_is_named_with_its_consequence():
    found = preflight.look() | {"ofd_locks": False, "shm_huge_pages": "never", "gpu": None, "kernel": "4.4.0"}
    said = "\n".join(preflight.complaints(found, wants_gpu=True))
    assert "kernel 4.4.0 has no OFD locks: no bridge can be opened" in said
    assert "no huge pages" in said
    assert "torch sees no GPU" in said


def test_a_run_that_is_cut_off_leaves_a_whole_page(tmp_path):
    machine = preflight.look()
    results = {
        "device": "cpu",
        "size": "smallest",
        "machine": machine,
        "lacking": [],
        "revision": "abc",
        "taken": "now",
    }
    parts = {
        "weights": {
            "state": "ended after 9 s",
            "seconds": 9.0,
            "rows": [{"what": "1 MiB", "out_s": 0.5}],
            "log": "...",
        }
    }
    page.write(tmp_path / "here", results | {"parts": parts})
    assert "| 1 MiB | 0.5 |" in (tmp_path / "here.md").read_text()
    assert json.loads((tmp_path / "here.json").read_text())["parts"]["weights"]["rows"][0]["out_s"] == 0.5
