"""Records the demo in a terminal while its learner is killed, as the GIF of the README.

    python docs/figures/make_recording.py

Needs tmux. The demo runs in the upper pane; in the lower one the learner is ended with `kill -9`. What the
two panes show is what the processes printed; only the clock is changed: the picture runs `SPEED` times as
fast, and says so.
"""

import io
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DEMO = "shmbridge demo --seed 1"
COLUMNS, DEMO_ROWS, SHELL_ROWS = 100, 27, 3
LOOK_S = 0.5
SPEED = 5
LAST_FRAME_MS = 6_000
KILL_AT = ("reward 0.4", "reward 0.5", "reward 0.6")
GIVE_UP_S = 900.0
FONT_SIZE = 14
BACKGROUND, FOREGROUND, RULE, LABEL = "#14171f", "#d7dae0", "#3a4150", "#8b93a3"


class Terminal:
    """A tmux server of its own with two panes, ended with the `with`."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "tmux"
        self._folder = folder

    def __enter__(self) -> "Terminal":
        rows = DEMO_ROWS + 1 + SHELL_ROWS
        shell = "env PS1='$ ' bash --norc --noprofile"
        self._tmux(
            "-f", "/dev/null", "new-session", "-d", "-x", COLUMNS, "-y", rows, "-c", self._folder, shell
        )
        self._tmux("set", "status", "off")
        self._tmux("split-window", "-l", SHELL_ROWS, "-c", self._folder, shell)
        return self

    def __exit__(self, *_: object) -> None:
        self._tmux("kill-server")

    def type(self, pane: int, text: str) -> None:
        """Types a command, and Enter."""
        self._tmux("send-keys", "-t", f":.{pane}", "-l", text)
        self._tmux("send-keys", "-t", f":.{pane}", "Enter")

    def lines(self, pane: int) -> list[Text]:
        """What a pane shows."""
        said = self._tmux("capture-pane", "-e", "-p", "-t", f":.{pane}")
        return [Text.from_ansi(line) for line in said.splitlines()]

    def _tmux(self, *words: object) -> str:
        command = ["tmux", "-S", str(self._socket), *map(str, words)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Runs the demo to its end, kills the learner once, and writes the GIF."""
    frames: list[tuple[float, list[Text]]] = []
    with tempfile.TemporaryDirectory() as folder:
        bin_folder = Path(folder) / "bin"
        bin_folder.mkdir()
        command = bin_folder / "shmbridge"
        command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m shmbridge.cli "$@"\n')
        command.chmod(0o755)
        os.environ["PATH"] = f"{bin_folder}:{os.environ['PATH']}"
        with Terminal(Path(folder)) as terminal:
            record(terminal, frames)
    save(frames, HERE / "demo.gif")


def record(terminal: Terminal, frames: list[tuple[float, list[Text]]]) -> None:
    """Looks at both panes until the demo has ended."""
    began_s = time.monotonic()
    terminal.type(0, DEMO)
    killed = False
    while time.monotonic() - began_s < GIVE_UP_S:
        upper, lower = terminal.lines(0), terminal.lines(1)
        said = "\n".join(line.plain for line in upper)
        frames.append((time.monotonic() - began_s, [*upper, *lower]))
        if not killed and any(reward in said for reward in KILL_AT):
            terminal.type(1, "pkill -9 -f consumers.grpo   # the learner, in the middle of a step")
            killed = True
        if killed and said.rstrip().endswith("\n$"):
            frames.append((time.monotonic() - began_s, [*upper, *lower]))
            return
        time.sleep(LOOK_S)
    raise TimeoutError(f"the demo has not ended within {GIVE_UP_S:.0f} s")


def save(frames: list[tuple[float, list[Text]]], path: Path) -> None:
    """Draws the frames that differ, each as long as it was there."""
    kept = [frames[0]]
    kept += [b for a, b in pairwise(frames) if plain(a[1]) != plain(b[1])]
    ends = [at for at, _ in kept[1:]]
    spans = [(end - at) * 1000 / SPEED for (at, _), end in zip(kept, ends, strict=False)]
    images = [drawn(lines) for _, lines in kept]
    images[0].save(
        path,
        save_all=True,
        append_images=images[1:],
        duration=[max(20, round(each / 10) * 10) for each in [*spans, LAST_FRAME_MS]],
        loop=0,
        optimize=True,
        disposal=1,
    )
    print(path, f"{len(images)} frames, {path.stat().st_size / 1024:.0f} KiB")


def plain(lines: list[Text]) -> list[str]:
    """The characters alone."""
    return [line.plain for line in lines]


def drawn(lines: list[Text]) -> Image.Image:
    """One frame: the demo, a rule, the shell."""
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    font = ImageFont.truetype(fonts / "DejaVuSansMono.ttf", FONT_SIZE)
    bold = ImageFont.truetype(fonts / "DejaVuSansMono-Bold.ttf", FONT_SIZE)
    wide, high = font.getlength("M"), FONT_SIZE + 5
    rows = DEMO_ROWS + 1 + SHELL_ROWS
    image = Image.new("RGB", (round(COLUMNS * wide) + 24, rows * high + 24), BACKGROUND)
    draw = ImageDraw.Draw(image)
    upper, lower = lines[:DEMO_ROWS], lines[DEMO_ROWS:]
    for row, line in [*enumerate(upper), *enumerate(lower, start=DEMO_ROWS + 1)]:
        at = 12.0
        for segment in line.render(Console(file=io.StringIO(), color_system="truecolor")):
            style = segment.style
            colour = style.color.get_truecolor().hex if style and style.color else FOREGROUND
            draw.text(
                (at, 12 + row * high),
                segment.text.rstrip("\n"),
                colour,
                bold if style and style.bold else font,
            )
            at += len(segment.text) * wide
    middle = 12 + DEMO_ROWS * high + high // 2
    draw.line((12, middle, image.width - 12, middle), RULE)
    label = f" {SPEED} times as fast "
    draw.rectangle(
        (image.width - 20 - font.getlength(label), middle - 8, image.width, middle + 8), BACKGROUND
    )
    draw.text((image.width - 12, middle), label, LABEL, font, anchor="rm")
    return image.quantize(16)


if __name__ == "__main__":
    main()
