"""The columns of the table of lanes: what each shows, what it sorts by, and how wide it is."""

from collections.abc import Callable
from dataclasses import dataclass

from shmbridge.watch.cells import cells, cut, padded
from shmbridge.watch.diagnosis import in_words
from shmbridge.watch.rows import Row
from shmbridge.watch.text import printable

_LEAST_LABEL = 10  # characters
_MOST_STATE = 16
_NARROW = 90  # a screen of fewer columns cuts long states short
_NARROW_STATE = 13
_BAR = 6  # characters of a bar of fill, where there is room


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its title, its width, what it shows of a row, and what it sorts by; None sorts last."""

    title: str
    width: int  # 0: what is left, or what its longest cell takes
    cell: Callable[[Row], str]
    key: Callable[[Row], float | str | None]
    largest_first: bool = True


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _trouble(row: Row) -> str:
    """Rows in trouble sort before others, these by their state."""
    return f"{not row.is_trouble:d}{row.state}"


COLUMNS = (
    Column("environment", 0, lambda row: printable(row.title), lambda row: row.label, largest_first=False),
    Column(
        "pid",
        7,
        lambda row: "" if row.pid is None else str(row.pid),
        lambda row: row.pid,
        largest_first=False,
    ),
    Column("state", 0, lambda row: row.state, _trouble, largest_first=False),
    Column("rec/s", 6, lambda row: "" if row.rate is None else f"{row.rate:.1f}", lambda row: row.rate),
    Column("held", 5, lambda row: str(row.held), lambda row: row.held),
    Column("bytes", 5, lambda row: _percent(row.fill_bytes), lambda row: row.fill_bytes),
    Column("slots", 5, lambda row: _percent(row.fill_slots), lambda row: row.fill_slots),
    Column(
        "last put",
        8,
        lambda row: "" if row.newest_age_s is None else in_words(row.newest_age_s),
        lambda row: row.newest_age_s,
    ),
    Column("waits", 5, lambda row: _percent(row.wait), lambda row: row.wait),
    Column("lag", 4, lambda row: "" if row.lag is None else str(row.lag), lambda row: row.lag),
)
LABEL, STATE, BYTES = (
    next(number for number, each in enumerate(COLUMNS) if each.title == title)
    for title in ("environment", "state", "bytes")
)


def widths(rows: list[Row], states: list[str], screen: int) -> list[int]:
    """Returns the width of each column, so that a line with its marks fits a screen of so many columns."""
    found = [column.width for column in COLUMNS]
    most = _NARROW_STATE if screen < _NARROW else _MOST_STATE
    found[STATE] = min(max((len(state) for state in states), default=0), most)
    found[STATE] = max(found[STATE], len("stopped"))
    left = screen - _MARKS - sum(found) - (len(found) - 1)
    longest = max((cells(printable(row.title)) + 5 for row in rows), default=0)
    if left >= longest + 1 + _BAR:
        found[BYTES] += 1 + _BAR
        left -= 1 + _BAR
    found[LABEL] = max(min(left, longest), _LEAST_LABEL)
    return found


_MARKS = 2  # characters before a line: trouble, and whether a sum is open


def title_line(width: list[int], sorted_by: int, largest_first: bool) -> str:
    """Returns the titles; an arrow marks the column that the lines are sorted by."""
    arrow = "▼" if largest_first else "▲"
    names = [
        f"{column.title}{arrow}" if number == sorted_by else column.title
        for number, column in enumerate(COLUMNS)
    ]
    return " " * _MARKS + _joined(names, width)


def line(row: Row, state: str, width: list[int], mark: str) -> str:
    """Returns a row as text.

    Args:
        row: a lane or a sum.
        state: its state, with the time since.
        width: of each column.
        mark: one character: whether a sum is open, shut, or no sum at all.
    """
    cells = [column.cell(row) for column in COLUMNS]
    cells[STATE] = state
    if row.lane is None:
        cells[LABEL] = f"{cells[LABEL]} ({row.lanes})"
    if width[BYTES] > COLUMNS[BYTES].width:
        cells[BYTES] = f"{_bar(row.fill_bytes)} {cells[BYTES]:>{COLUMNS[BYTES].width}}"
    return f"{'!' if row.is_trouble else ' '}{mark}" + _joined(cells, width)


def _joined(cells: list[str], width: list[int]) -> str:
    return " ".join(
        padded(cut(cell, wide), wide, right=number not in (LABEL, STATE))
        for number, (cell, wide) in enumerate(zip(cells, width, strict=True))
    )


def _bar(share: float) -> str:
    eighths = round(min(max(share, 0.0), 1.0) * _BAR * 8)
    full, rest = divmod(eighths, 8)
    return f"{'█' * full}{' ▏▎▍▌▋▊▉'[rest] if rest else ''}".ljust(_BAR)
