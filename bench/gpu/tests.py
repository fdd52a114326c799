"""The suite of tests/gpu, as a part of `make gpu`: how many passed, failed and were skipped, and why."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from shmbridge.bench.gpu.part import Figures, arguments

_ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """0 if no test failed."""
    options = arguments(__doc__ or "")
    report = options.out.with_suffix(".xml")
    environment = {**os.environ, "SHMBRIDGE_TEST_DEVICE": options.device}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(_ROOT / "tests" / "gpu")]
    command += ["-o", "junit_family=xunit2", f"--junitxml={report}"]
    done = subprocess.run(command, cwd=_ROOT, env=environment, stdout=sys.stderr, check=False)
    figures = Figures(options.out, options.seconds)
    cases = list(ElementTree.parse(report).iter("testcase"))
    outcomes = [_outcome(case) for case in cases]
    figures.add(
        "tests/gpu",
        passed=outcomes.count("passed"),
        failed=outcomes.count("failed"),
        skipped=outcomes.count("skipped"),
    )
    for case, outcome in zip(cases, outcomes, strict=True):
        if outcome != "passed":
            figures.add(
                f"{outcome}: {case.get('name')}", why=" ".join(each.get("message", "")[:200] for each in case)
            )
    return done.returncode


def _outcome(case: ElementTree.Element) -> str:
    if case.find("skipped") is not None:
        return "skipped"
    return "passed" if case.find("failure") is None and case.find("error") is None else "failed"


if __name__ == "__main__":
    sys.exit(main())
