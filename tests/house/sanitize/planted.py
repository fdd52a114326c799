"""Errors of memory order, planted one at a time in a copy of the C core, and the check that shows each.

    python tests/house/sanitize/planted.py                 all of them in the thread harness: three minutes
    python tests/house/sanitize/planted.py --model         all of them under GenMC: half a minute; needs
                                                           genmc, or GENMC=its path
    python tests/house/sanitize/planted.py [--model] NAME  one

Exits 1 if one is not shown as said here. `shown_by` is the outcome that a run of the harness must have;
several words: any of them. "nothing": no run on x86 shows it, for the reason given, and `model` or the
argument in docs/memory-model.md must do. That page has a row for each.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from harness import CORE, HERE, Outcome, build, run

MODEL = HERE.parents[2] / "docs" / "model" / "weak"
# One producer and room for one record: no other process rings for a sleeper.
ALONE = (
    "--producers",
    "1",
    "--slots",
    "1",
    "--data",
    "1024",
    "--releasers",
    "1",
    "--patience-ms",
    "2500",
    "--deaths",
    "0",
)
STORE_BUFFER = "the window is a few nanoseconds wide, and was not met"


@dataclass(frozen=True)
class Planted:
    """One wrong line: `old` becomes `new` in `file`, once.

    `model`: the test of core.c that GenMC must find wrong, 0 for none.
    """

    tag: str
    file: str
    old: str
    new: str
    shown_by: str
    model: int
    why: str = ""


def relaxed(tag: str, file: str, access: str, shown_by: str, model: int, why: str = "") -> Planted:
    """The access, which starts with its verb, without its order."""
    verb, rest = access.split("(", 1)
    weak = verb.replace("acquire", "relaxed").replace("release", "relaxed").replace("seq", "relaxed")
    return Planted(tag, file, access, f"{weak}({rest}", shown_by, model, why)


def flag_by_release(tag: str, file: str, word: str) -> Planted:
    """A sleeper's flag stored with release only."""
    stored = f"atomic_store_explicit(&{word}, 1, memory_order_release)"
    return Planted(
        tag, file, f"store_seq32(&{word}, 1)", stored, "nothing", 2 if tag == "hub-wake" else 3, STORE_BUFFER
    )


COMMIT = "    store_seq64(&header->tail, sequence + 1);"
RELEASE = "    store_seq64(&reader->released[index], generation);"
PLANTED = {
    "lane-ready stored relaxed": relaxed(
        "lane-ready", "threads.c", "store_release64(&header->magic", "tsan", 5
    ),
    "lane-ready loaded relaxed": relaxed(
        "lane-ready", "lane_read.h", "load_acquire64(&reader->header->magic", "tsan", 5
    ),
    "slot-body stored relaxed": relaxed(
        "slot-body", "lane_write.h", "store_release64(&body->generation", "tsan", 4
    ),
    "slot-body loaded relaxed by the scan": relaxed(
        "slot-body", "lane_read.h", "load_acquire64(&reader->slots[i].generation), sequence", "tsan", 4
    ),
    "slot-body loaded relaxed by lane_look": relaxed(
        "slot-body",
        "lane_read.h",
        "load_acquire64(&reader->slots[index].generation",
        "nothing",
        0,
        "the acquire of tail has ordered it already",
    ),
    "commit stored relaxed": relaxed("commit", "lane_write.h", "store_seq64(&header->tail", "tsan", 1),
    "commit loaded relaxed by lane_next": relaxed(
        "commit",
        "lane_read.h",
        "load_acquire64(&reader->header->tail); /* SYNC(commit) */\n    if (tail == next)",
        "tsan",
        1,
    ),
    "commit loaded relaxed by the scan": relaxed(
        "commit",
        "lane_read.h",
        "load_seq64(&reader->header->tail)",
        "nothing",
        4,
        "x86 does not exchange loads",
    ),
    "commit before the ring entry": Planted(
        "commit",
        "lane_write.h",
        "    writer->ring[sequence & mask] = index;\n",
        f"{COMMIT}\n    disturb();\n    writer->ring[sequence & mask] = index;\n",
        "tsan pattern",
        1,
    ),
    "release stored relaxed": relaxed("release", "lane_read.h", "store_seq64(&reader->released", "tsan", 1),
    "release loaded relaxed": relaxed(
        "release", "lane_write.h", "load_seq64(&writer->released[index])", "tsan", 1
    ),
    "hand-out stored relaxed": relaxed(
        "hand-out",
        "lane_read.h",
        "store_release64(&reader->header->head",
        "nothing",
        0,
        "the lock that changes hands orders it",
    ),
    "hand-out one too low": Planted(
        "hand-out",
        "lane_read.h",
        "store_release64(&reader->header->head, sequence + 1)",
        "store_release64(&reader->header->head, sequence)",
        "pattern",
        4,
    ),
    "hub-wake: tail stored with release": Planted(
        "hub-wake",
        "lane_write.h",
        "store_seq64(&header->tail",
        "store_release64(&header->tail",
        "nothing",
        2,
        STORE_BUFFER,
    ),
    "hub-wake: flag stored with release": flag_by_release("hub-wake", "hub_wait.h", "control->hub_sleeping"),
    "hub-wake: flag loaded before tail": Planted(
        "hub-wake",
        "lane_write.h",
        COMMIT,
        f"    uint32_t asleep = load_seq32(&writer->hub->hub_sleeping);\n    disturb();\n{COMMIT}",
        "lost wake",
        2,
    ),
    "hub-wake: not looked again": Planted(
        "hub-wake", "hub_wait.h", "    return hub_has_work(watch, control);", "    return 0;", "lost wake", 2
    ),
    "space-wake: released stored with release": Planted(
        "space-wake",
        "lane_read.h",
        "store_seq64(&reader->released",
        "store_release64(&reader->released",
        "nothing",
        3,
        STORE_BUFFER,
    ),
    "space-wake: flag stored with release": flag_by_release(
        "space-wake", "lane_write.h", "header->space_waiting"
    ),
    "space-wake: flag loaded before released": Planted(
        "space-wake",
        "lane_read.h",
        RELEASE,
        f"    uint32_t asleep = load_seq32(&reader->header->space_waiting);\n    disturb();\n{RELEASE}",
        "lost wake",
        3,
    ),
    "space-wake: not looked again": Planted(
        "space-wake", "lane_write.h", "    if (!lane_anything_released(writer))\n", "", "lost wake", 3
    ),
    "bell loaded after the second look, by the hub": Planted(
        "bell",
        "hub_wait.h",
        "    if (!work)\n        status",
        "    disturb(), seen = load_seq32(&control->doorbell);\n    if (!work)\n        status",
        "lost wake",
        2,
    ),
    "bell loaded after the second look, by the producer": Planted(
        "bell",
        "lane_write.h",
        "status = futex_wait(&header->space_bell",
        "disturb(), seen = load_seq32(&header->space_bell), status = futex_wait(&header->space_bell",
        "lost wake",
        3,
    ),
    "bell added relaxed": Planted(
        "bell",
        "atomics.h",
        "atomic_fetch_add_explicit(word, 1, memory_order_seq_cst)",
        "atomic_fetch_add_explicit(word, 1, memory_order_relaxed)",
        "nothing",
        0,
        "relaxed would do: it comes after the load of the flag",
    ),
    "bell not changed": Planted(
        "bell", "futex.h", "    add_seq32(bell); /* SYNC(bell) */\n", "", "lost wake", 2
    ),
}
# The load moves; its value is used at the old place.
ASLEEP = {
    "hub-wake: flag loaded before tail": "    if (load_seq32(&writer->hub->hub_sleeping)) {",
    "space-wake: flag loaded before released": "    if (load_seq32(&reader->header->space_waiting)) {",
}


def plant(name: str, folder: Path) -> None:
    """Copies core, harness and model into `folder`, with that error."""
    wrong = PLANTED[name]
    for path in (*CORE.glob("*.h"), *HERE.glob("*.[ch]"), *MODEL.glob("*.[ch]")):
        shutil.copy(path, folder)
    changes = [(wrong.old, wrong.new)]
    if name in ASLEEP:
        changes.append((ASLEEP[name], "    if (asleep) {"))
    for old, new in changes:
        assert (folder / wrong.file).read_text().count(old) == 1, (
            f"{name}: {wrong.file} has not, or not once: {old!r}"
        )
        # the last two repeat a few lines of the others
        for path in (folder / wrong.file, folder / "core.c", folder / "stubs.h"):
            path.write_text(path.read_text().replace(old, new))


def show(name: str, seconds: int = 20) -> Outcome:
    """Runs the harness over a core with that error.

    Without ThreadSanitizer where a lost wake is looked for: its own locks empty the store buffer.
    """
    wrong = PLANTED[name]
    waking = wrong.tag.endswith("wake") or wrong.tag == "bell"
    with tempfile.TemporaryDirectory() as folder:
        plant(name, Path(folder))
        program = build("none" if waking else "thread", Path(folder), Path(folder), Path(folder))
        return run(program, "--seconds", str(seconds), *(ALONE if waking else ()), timeout_s=seconds + 120)


def show_in_model(name: str | None, test: int) -> str:
    """GenMC's result for one test of core.c with that error, or none: "nothing", or its first complaint."""
    with tempfile.TemporaryDirectory() as folder:
        if name is None:
            for path in (*CORE.glob("*.h"), *MODEL.glob("*.[ch]")):
                shutil.copy(path, folder)
        else:
            plant(name, Path(folder))
        search = [
            os.environ.get("GENMC", "genmc"),
            "--rc11",
            "--disable-estimation",
            "--disable-mm-detector",
            "--check-liveness",
        ]
        compile_with = ["--", "-w", f"-I{folder}", f"-DTEST={test}", f"-DSLOTS={2 if test == 4 else 1}"]
        done = subprocess.run(
            [*search, *compile_with, f"{folder}/core.c"],
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
    if done.returncode == 0 and "No errors were detected" in done.stdout:
        return "nothing"
    words = [
        line
        for line in (done.stdout + done.stderr).splitlines()
        if line.startswith(("Error", "Assertion", "Non-terminating"))
    ]
    assert words, f"genmc ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"
    return words[-1]


def check(name: str, with_model: bool) -> tuple[bool, str]:
    """Returns whether that error is shown as it should be, and the outcome."""
    wrong = PLANTED[name]
    if not with_model:
        shown = show(name, 5 if wrong.shown_by == "nothing" else 20).shown
        return shown in wrong.shown_by, shown + (f" ({wrong.why})" if shown == "nothing" else "")
    shown = [show_in_model(name, test) for test in ([wrong.model] if wrong.model else [1, 2, 3, 4])]
    quiet = all(each == "nothing" for each in shown)
    return quiet == (wrong.model == 0), "nothing" if quiet else f"test {wrong.model}: {shown[0]}"


def main(arguments: list[str]) -> int:
    """Shows each error that is named, or all; 1 if one is not shown by what it should be."""
    with_model = "--model" in arguments
    missed = 0
    for test in (1, 2, 3, 4, 5) if with_model else ():
        said = show_in_model(None, test)
        missed += said != "nothing"
        print(f"{'ok' if said == 'nothing' else 'WRONG':7} test {test} without an error: {said}", flush=True)
    for name in [each for each in arguments if each != "--model"] or PLANTED:
        right, shown = check(name, with_model)
        missed += not right
        print(f"{'ok' if right else 'MISSED':7} {name:52} {shown}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
