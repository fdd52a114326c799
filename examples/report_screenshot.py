"""The screenshot of docs/how-to/report.md: the page of a run, as Chromium shows it.

    python examples/report_screenshot.py runs/demo-1                 of a run there is, as of shmbridge demo
    python examples/report_screenshot.py runs/demo-1 --width 800 --out build/narrow.png

Needs Chromium (`apt-get install chromium`) and Pillow, which makes the file small.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from shmbridge.cli import main as shmbridge_command

DOCS = Path(__file__).resolve().parents[1] / "docs" / "figures" / "report.png"
NAMES = ("chromium", "chromium-browser", "google-chrome")
COLOURS = 160  # enough for text and curves


def main(argv: list[str] | None = None) -> int:
    """Makes the screenshot; returns the exit status. Blocks for seconds."""
    parser = argparse.ArgumentParser(description="Make a screenshot of the page of a run.")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, default=DOCS, metavar="FILE", help="[docs/figures/report.png]")
    parser.add_argument("--width", type=int, default=1280, help="of the window, in pixels [1280]")
    parser.add_argument("--height", type=int, default=2400, help="[2400]")
    options = parser.parse_args(argv)
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        print("there is no Chromium: apt-get install chromium", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        if shmbridge_command(["report", str(options.run_dir), "--out", folder]):
            return 1
        page = Path(folder) / "report.html"
        shot = Path(folder) / "shot.png"
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        flags += [f"--user-data-dir={folder}/profile", f"--window-size={options.width},{options.height}"]
        command = [browser, *flags, f"--screenshot={shot}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        _shrink(shot, options.out)
    print(f"{options.out}: {options.out.stat().st_size:,} bytes")
    return 0


def _shrink(shot: Path, out: Path) -> None:
    from PIL import Image

    out.parent.mkdir(parents=True, exist_ok=True)
    with Image.open(shot) as image:
        image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(out, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
