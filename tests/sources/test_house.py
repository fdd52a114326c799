"""File sizes, error codes, and the pairs of the memory model."""

import re
from pathlib import Path

from shmbridge import errors

ROOT = Path(__file__).parents[2]
MOST_LINES = {".py": 400, ".pyx": 600}
# One idea that does not come apart: file -> (lines it may have, why).
EXCEPTIONS = {
    "shmbridge/producer.py": (480, "put, put_async and claim are three doors to one claim-commit sequence"),
}
VERBS = re.compile(r"\b(load_acquire|load_seq|load_relaxed|store_release|store_seq|store_relaxed|ring_bell|add_seq|fetch_add)\w*\(")


def test_no_file_is_long(sources):
    wrong = []
    for _, path in sources:
        name = str(path.relative_to(ROOT))
        lines = len(path.read_text().splitlines())
        most, _ = EXCEPTIONS.get(name, (MOST_LINES[path.suffix], ""))
        if lines > most:
            wrong.append(f"{name}: {lines} lines, allowed are {most}")
    assert not wrong


def test_no_exception_is_out_of_date(sources):
    names = {str(path.relative_to(ROOT)): path for _, path in sources}
    assert all(name in names for name in EXCEPTIONS)
    assert all(len(names[name].read_text().splitlines()) > MOST_LINES[names[name].suffix] for name in EXCEPTIONS)


def test_files_say_what_they_are(sources):
    """One idea per file, said on its first line; nothing named after nothing."""
    assert not [path for _, path in sources if path.stem in ("utils", "util", "helpers", "common", "misc")]
    silent = [str(path.relative_to(ROOT)) for _, path in sources if path.read_text().strip() and not path.read_text().startswith('"""')]
    assert not silent


def test_error_codes():
    classes = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.ShmBridgeError)]
    codes = [each.__dict__.get("code") for each in classes]
    assert None not in codes, "every class has a code of its own"
    assert len(codes) == len(set(codes))
    assert all(re.fullmatch(r"SB\d{3}", code) for code in codes)


def tags_of(path: Path) -> list[tuple[str, int, str]]:
    """(tag, line number, verbs it stands for): a tag belongs to the atomic of its own line, or, alone on a line, of the next two."""
    lines = path.read_text().splitlines()
    found = []
    for number, line in enumerate(lines):
        for tag in re.findall(r"SYNC\((?!tag\))([\w-]+)\)", line):
            around = line if VERBS.search(line) else "\n".join(lines[number : number + 3])
            found.append((tag, number + 1, " ".join(VERBS.findall(around))))
    return found


def all_tags() -> dict[str, list[tuple[str, str]]]:
    tags: dict[str, list[tuple[str, str]]] = {}
    for path in sorted((ROOT / "shmbridge/_ext").iterdir()):
        if path.suffix in (".pyx", ".h", ".pxd") or path.name == "fork.c":
            for tag, number, verbs in tags_of(path):
                tags.setdefault(tag, []).append((f"{path.name}:{number}", verbs))
    return tags


def table_rows() -> dict[str, list[str]]:
    """First cell, in backticks or bold -> all cells, of every table of the memory model."""
    rows = {}
    for line in (ROOT / "docs/memory-model.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        named = re.fullmatch(r"(?:`|\*\*)(?:SYNC\()?([\w-]+)\)?(?:`|\*\*)", cells[0])
        if line.lstrip().startswith("|") and named:
            rows[named[1]] = cells
    return rows


def test_every_sync_tag_has_a_row_and_every_row_a_tag():
    assert set(all_tags()) == set(table_rows())
    for tag, cells in table_rows().items():
        assert all(cells), f"{tag} has an empty cell"


def test_every_sync_tag_has_a_storing_and_a_loading_side():
    """`hand-out` is loaded by the next hub; whoever stores and whoever loads says the same tag."""
    wrong = []
    for tag, places in all_tags().items():
        stores = [place for place, verbs in places if re.search(r"store|bell|add", verbs)]
        loads = [place for place, verbs in places if "load" in verbs]
        if not stores or not loads:
            wrong.append(f"{tag}: stored at {stores}, loaded at {loads}")
    assert not wrong


def test_every_publishing_store_is_tagged():
    """A release or seq_cst store without a tag has no written partner; clearing one's own flag needs none."""
    wrong = []
    for path in sorted(path for path in (ROOT / "shmbridge/_ext").iterdir() if path.suffix in (".pyx", ".h") and path.stem != "atomics"):
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            publishes = re.search(r"\bstore_(release|seq)\w*\(", line) and not re.search(r"(space_waiting|hub_sleeping), 0\)", line)
            if publishes and "SYNC(" not in line + lines[number - 1]:
                wrong.append(f"{path.name}:{number + 1}: {line.strip()}")
    assert not wrong
