"""File sizes, error codes, and the memory model: tags in pairs, in the functions it names, no shared word
touched past the verbs.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from shmbridge import errors

ROOT = Path(__file__).parents[3]
MOST_LINES = {".py": 600, ".pyx": 600, ".pxi": 600}
# A longer file has a reason. Length alone is no cause to cut a class in two.
LONG = {
    "consumers/feed/feed.py": "taking, failing, releasing and saving share the steps that are out",
    "consumers/learner/config/options.py": "one section after another; a list of what a user can set",
    "consumers/roll/env_manager.py": "settings, rows and leases of the groups that ROLL takes for rollouts",
    "producers/gem/turns.py": "an episode's requests and answers, held or replayed, share their states",
    "producers/rollout/runner.py": "a group from its ticket to its lane, whoever plays its episodes",
    "shmbridge/archive/folder.py": "the parts of a folder are found, finished, read and copied by one order",
    "shmbridge/archive/recorder.py": "a record from its lane into the part under way",
    "shmbridge/consumer.py": "which of its calls releases what is told in one place",
    "shmbridge/hub/former.py": "what forms batches, and what ends what it has formed",
    "shmbridge/hub/lanes.py": "adopting, removing and counting share one table of lanes and its locks",
    "shmbridge/hub/ranks.py": "forming, dealing and answering share one book of shares and its lock",
    "shmbridge/launch/supervisor.py": "starting, watching and stopping share one table of processes",
    "shmbridge/metrics.py": "the table of counters and what is made of them",
    "shmbridge/producer.py": "put, put_async and claim are three doors to one claim-commit sequence",
    "shmbridge/put/convert.py": "what is converted and what is refused are one grammar",
    "shmbridge/hub/rank.py": "one rank's requests, batches and answers share its state",
    "shmbridge/relay/destination.py": "turns, peers, lanes and commits are one side of one protocol",
    "shmbridge/relay/ray/actors.py": "the actors of both sides, which make and find each other",
    "shmbridge/segments/membership.py": "joining, sweeping, listing and cleaning share one order of locks",
    "shmbridge/weights/writer.py": "a filling and what ends it share the slot's states",
}
EXT = ROOT / "shmbridge" / "_ext"
MODEL = (ROOT / "docs" / "memory-model.md").read_text()
VERBS = re.compile(
    r"\b(load_(?:acquire|seq|relaxed)|store_(?:release|seq|relaxed)|lane_is_released|ring_bell|add_seq|fetch_add)\w*\("
)


def written(sources: list[tuple[str, Path]]) -> list[Path]:
    """Those files, and the pieces that extension modules include."""
    return [*(path for _, path in sources), *EXT.glob("*.pxi")]


def test_a_long_file_has_a_reason(sources):
    long = {
        str(path.relative_to(ROOT))
        for path in written(sources)
        if len(path.read_text().splitlines()) > MOST_LINES[path.suffix]
    }
    assert long == set(LONG)


def test_files_say_what_they_are(sources):
    """One idea per file, said on its first line; no file has a name without a subject, such as utils."""
    assert not [
        path for path in written(sources) if path.stem in ("utils", "util", "helpers", "common", "misc")
    ]
    silent = [
        str(path.relative_to(ROOT))
        for path in written(sources)
        if path.read_text().strip() and not path.read_text().startswith('"""')
    ]
    assert not silent


def test_error_codes():
    classes = [
        each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, errors.ShmBridgeError)
    ]
    codes = [each.__dict__.get("code") for each in classes]
    assert None not in codes, "every class has a code of its own"
    assert len(codes) == len(set(codes))
    assert all(re.fullmatch(r"SB\d{3}", code) for code in codes)


@dataclass(frozen=True)
class Sync:
    """One SYNC(tag) comment, and the verbs it stands for: those of its own line, or, alone on a line, of the
    next two.
    """

    tag: str
    file: str
    line: int
    function: str
    verbs: str

    @property
    def place(self) -> str:
        return f"{self.file}:{self.function}"

    @property
    def stores(self) -> bool:
        return re.search(r"store|bell|add", self.verbs) is not None

    @property
    def loads(self) -> bool:
        return re.search(r"load|is_released", self.verbs) is not None


def sources_of_words() -> list[Path]:
    """The files that touch shared words."""
    baseline = (ROOT / "bench" / "baselines").glob("memcpy_baseline.*")
    kinds = (".pyx", ".pxi", ".pxd", ".h")
    files = (*EXT.iterdir(), *(EXT / "c").iterdir(), *baseline)
    return sorted(path for path in files if path.suffix in kinds or path.name == "fork.c")


def defined_on(lines: list[str], number: int) -> str | None:
    """Name of the function whose definition begins on this line; a C head may go on over the next ones."""
    head = re.match(r"[^{;]*.", "\n".join(lines[number : number + 6]))
    c = (
        re.match(r"static inline [\w ]+[ *](\w+)\(", lines[number])
        if head and head[0].endswith("{")
        else None
    )
    cython = re.match(r"\s*(?:cdef|cpdef|def)\b[^(=]*?\b(\w+)\(.*", lines[number])
    found = c or cython
    return found[1] if found else None


def syncs() -> list[Sync]:
    found = []
    for path in sources_of_words():
        lines, function = path.read_text().splitlines(), ""
        for number, line in enumerate(lines):
            function = defined_on(lines, number) or function
            for tag in re.findall(r"SYNC\((?!tag\))([\w-]+)\)", line):
                around = line if VERBS.search(line) else "\n".join(lines[number : number + 3])
                found.append(Sync(tag, path.name, number + 1, function, " ".join(VERBS.findall(around))))
    return found


def table(first_columns: str) -> dict[str, list[str]]:
    """First cell, without backticks -> all cells, of the table of the memory model whose head begins so."""
    body = MODEL[MODEL.index(f"\n| {first_columns} |") :].strip().split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in body]
    assert len({row[0] for row in rows}) == len(rows), "a row twice"
    return {row[0].strip("`"): row for row in rows}


def named_in(cell: str) -> set[str]:
    """file:function, wherever it stands in backticks."""
    return set(re.findall(r"`(\w+\.(?:h|pyx|pxi):\w+)`", cell))


def test_every_sync_tag_has_a_row_and_every_row_a_tag():
    tags = {sync.tag for sync in syncs()}
    for head in ("tag | stored by", "tag | aarch64"):
        rows = table(head)
        assert set(rows) == tags, head
        assert all(all(cells) for cells in rows.values()), f"an empty cell in {head}"


def test_rows_name_the_functions_that_carry_their_tag():
    """Each function named stores, or loads, under that tag, and each function that does so is named."""
    rows = table("tag | stored by")
    wrong = []
    for tag, cells in rows.items():
        for side, cell, carries in (("stored", cells[1], "stores"), ("loaded", cells[2], "loads")):
            there = {sync.place for sync in syncs() if sync.tag == tag and getattr(sync, carries)}
            if not there:
                wrong.append(f"{tag} is {side} nowhere")
            if named_in(cell) != there:
                wrong.append(f"{tag} is {side} by {sorted(there)}, the page says {sorted(named_in(cell))}")
    assert not wrong, "\n".join(wrong)


def test_every_publishing_store_is_tagged():
    """A release or seq_cst store without a tag has no written partner; clearing one's own flag needs none."""
    wrong = []
    for path in (
        path
        for path in sources_of_words()
        if path.suffix in (".pyx", ".pxi", ".h") and path.stem != "atomics"
    ):
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            publishes = re.search(r"\bstore_(release|seq)\w*\(", line) and not re.search(
                r"(space_waiting|hub_sleeping), 0\)", line
            )
            if publishes and "SYNC(" not in line + lines[number - 1]:
                wrong.append(f"{path.name}:{number + 1}: {line.strip()}")
    assert not wrong


def test_every_ordered_load_is_tagged():
    """An acquire or seq_cst load without a tag has no written partner; counters that are only shown need
    none.
    """
    wrong = []
    for path in (
        path
        for path in sources_of_words()
        if path.suffix in (".pyx", ".pxi", ".h") and path.stem != "atomics"
    ):
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            ordered = re.search(r"\bload_(acquire|seq)\w*\(", line)
            shown = re.match(r'\s*"\w+": load_acquire64', line)
            if ordered and not shown and "SYNC(" not in line + lines[number - 1]:
                wrong.append(f"{path.name}:{number + 1}: {line.strip()}")
    assert not wrong


# How a pointer to each struct of layout.h is spelled where its words are used.
OWNERS = {
    "control_header": r"(?:control|hub|words\(\)|_words)",
    "lane_header": r"header",
    "weights_header": r"_header",
    "slot": r"slots\[[^\]]*\]",
}


def shared_words(struct: str) -> list[str]:
    """Names of the atomic fields of a struct of layout.h; those of arrays with brackets."""
    layout = (EXT / "c" / "layout.h").read_text()
    body = next(
        body
        for body in layout.split("typedef struct {")[1:]
        if re.search(rf"^\}} {struct};", body, re.MULTILINE)
    ).split("\n}")[0]
    fields = re.findall(r"^    shm_u(?:64|32) ([^;]+);", body, re.MULTILINE)
    return [re.sub(r"\[.*", "[]", name.strip()) for field in fields for name in field.split(",")]


def past_the_verbs(line: str) -> bool:
    """Whether a line reads or writes a shared word of a header or a slot itself, instead of giving its
    address to a verb.
    """
    for struct, owner in OWNERS.items():
        words = shared_words(struct)
        names = "|".join(word.rstrip("[]") for word in words)
        for address, name, index in re.findall(
            rf"(&?)(?<!\w)(?:\w+(?:->|\.))*{owner}(?:->|\.)({names})\b(\[?)", line
        ):
            if not address and (f"{name}[]" not in words or index):
                return True
    return False


def test_shared_words_are_touched_by_the_verbs_only():
    assert {"tail", "head", "space_waiting", "discarded_total[]"} <= set(shared_words("lane_header"))
    assert shared_words("slot") == ["generation"]
    wrong = []
    for path in (
        path
        for path in sources_of_words()
        if path.suffix in (".pyx", ".pxi", ".h") and path.stem not in ("atomics", "layout")
    ):
        for number, line in enumerate(path.read_text().splitlines()):
            if past_the_verbs(line.split("/*")[0].split("# ")[0]):
                wrong.append(f"{path.name}:{number + 1}: {line.strip()}")
    assert not wrong


def test_planted_errors_have_their_rows():
    """The page has a row for each error that tests/house/sanitize plants, and for no other."""
    listed = (ROOT / "tests/house/sanitize/planted.py").read_text().split("PLANTED = {")[1].split("\n}")[0]
    assert sorted(table("planted error")) == sorted(re.findall(r'^    "([^"]+)": ', listed, re.MULTILINE))


def test_litmus_tests_are_named_and_there():
    there = {path.stem for path in (ROOT / "docs/model/litmus").glob("*.litmus")}
    assert set(re.findall(r"litmus `([\w-]+)`", MODEL)) == there
