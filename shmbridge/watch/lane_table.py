"""The table of lanes of the live view: its columns, its order, and the widget."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.events import Click, Resize
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from shmbridge.watch.diagnosis import FEW, Row, has_few_troubles, in_words, summed
from shmbridge.watch.snapshot import State
from shmbridge.watch.text import cells, cut, padded, printable

_LEAST_LABEL = 10  # characters
_MOST_STATE = 16
_NARROW = 90  # a screen of fewer columns cuts long states short
_NARROW_STATE = 13
_BAR = 6  # characters of a bar of fill, where there is room
_MARKS = 2  # characters before a line: trouble, and whether a sum is open
_TITLES = Style(bold=True, reverse=True)
_PLAIN, _SUM, _DEAD = Style(), Style(bold=True), Style(dim=True)
_TROUBLE = Style(bold=True, color="bright_red")
_SELECTED = Style(reverse=True)


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


@dataclass(slots=True)
class View:
    """What the keys have chosen."""

    sorted_by: int = STATE  # a column's number; by state, troubles come first
    reverse: bool = False
    grouped: bool = True
    wanted: str = ""  # lanes whose environment, id, pid or state has this text; "": all
    opened: dict[str, bool] = field(
        default_factory=dict
    )  # environment: its lanes are shown or hidden by hand

    @property
    def largest_first(self) -> bool:
        """The direction of the sort."""
        return COLUMNS[self.sorted_by].largest_first is not self.reverse

    def arranged(self, lanes: list[Row]) -> list[Row]:
        """Returns the rows to show: sums with the lanes under them, or lanes alone.

        Of many lanes, only those in trouble are shown under their sum, if these are few, until it is opened.
        """
        found = [row for row in lanes if self._is_wanted(row)]
        if not self.grouped:
            return self._sorted(found)
        few, few_troubles = len(found) <= FEW, has_few_troubles(found)
        sums: list[Row] = []
        under: dict[str, list[Row]] = {}
        for env_name, of_it in groupby(sorted(found, key=lambda row: row.env_name), lambda row: row.env_name):
            each = list(of_it)
            if len(each) == 1:
                sums.append(each[0])
                continue
            sums.append(summed(env_name, each))
            by_hand = self.opened.get(env_name)
            shown = few if by_hand is None else by_hand
            under[env_name] = self._sorted(
                [row for row in each if shown or (by_hand is None and few_troubles and row.is_trouble)]
            )
        return [
            row
            for top in self._sorted(sums)
            for row in (top, *(under[top.env_name] if top.lane is None else ()))
        ]

    def open_or_shut(self, total: Row, lanes: list[Row]) -> None:
        """Shows all lanes of an environment; if they are all shown, hides them.

        Args:
            total: the sum over its lanes.
            lanes: the rows of all lanes.
        """
        shown = [row for row in self.arranged(lanes) if row.lane and row.env_name == total.env_name]
        self.opened[total.env_name] = len(shown) < total.lanes

    def _is_wanted(self, row: Row) -> bool:
        text = self.wanted.casefold()
        return any(text in each.casefold() for each in (row.env_name, row.label, str(row.pid), row.state))

    def _sorted(self, rows: list[Row]) -> list[Row]:
        """Rows by the chosen column, equal ones by name; those without a value come last."""
        key = COLUMNS[self.sorted_by].key
        by_name = sorted(rows, key=lambda row: (row.env_name, row.label))
        known = [row for row in by_name if key(row) is not None]
        known.sort(key=lambda row: _comparable(key(row)), reverse=self.largest_first)
        return known + [row for row in by_name if key(row) is None]


def _comparable(value: float | str | None) -> tuple[float, str]:
    return (0.0, value) if isinstance(value, str) else (value or 0.0, "")


class LaneList(ScrollView, can_focus=True):
    """Lanes and sums, one line each. What was selected by hand stays so when the order changes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home", "move(-1000000)", "First", show=False),
        Binding("end", "move(1000000)", "Last", show=False),
        Binding("enter", "choose", "Detail"),
    ]

    DEFAULT_CSS = "LaneList { overflow-x: hidden; scrollbar-size-vertical: 1; }"

    class Chosen(Message):
        """Enter was pressed on a row."""

        def __init__(self, row: Row) -> None:
            super().__init__()
            self.row = row

    def __init__(self, view: View) -> None:
        super().__init__()
        self._view = view
        self._rows: list[Row] = []
        self._state: Callable[[Row], str] = lambda row: row.state
        self._lines: list[tuple[str, Style]] = []
        self._titles = ""
        self._background = _PLAIN
        self._selected: tuple[str, str | None] | None = None
        self._at = 0

    def show(self, rows: list[Row], state: Callable[[Row], str]) -> None:
        """Shows other rows, or the same with other values; draws only what changed.

        Args:
            rows: in their order.
            state: returns the state of a row, with the time since.
        """
        self._rows, self._state = rows, state
        keys = [_key(row) for row in rows]
        if self._selected in keys:
            self._at = keys.index(self._selected)
        else:
            self._at = max(min(self._at, len(rows) - 1), 0)
        size = Size(0, len(rows) + 1)
        if size != self.virtual_size:
            self.virtual_size = size
        self._draw()

    def _draw(self) -> None:
        self._background = self.rich_style  # found once: it takes longer than a line
        states = [self._state(row) for row in self._rows]
        width = widths(self._rows, states, self.scrollable_content_region.width or self.size.width)
        titles = title_line(width, self._view.sorted_by, self._view.largest_first)
        shown = {row.env_name for row in self._rows if row.lane is not None}
        lines = []
        for number, (row, state) in enumerate(zip(self._rows, states, strict=True)):
            mark = " " if row.lane is not None else "▾" if row.env_name in shown else "▸"
            style = _TROUBLE if row.is_trouble else _SUM if row.lane is None else _PLAIN
            style = _DEAD if row.state == State.DEAD else style
            lines.append((line(row, state, width, mark), style + _SELECTED if number == self._at else style))
        if titles != self._titles or len(lines) != len(self._lines):
            self._titles, self._lines = titles, lines
            self.refresh()
            return
        before, self._lines = self._lines, lines
        for number, (old, new) in enumerate(zip(before, lines, strict=True)):
            if old != new:
                self.refresh_line(number + 1)

    def render_line(self, y: int) -> Strip:
        """Returns the titles, which stay on top, or a line."""
        width = self.size.width
        number = y + self.scroll_offset.y - 1
        if y == 0:
            text, style = self._titles, _TITLES
        elif 0 <= number < len(self._lines):
            text, style = self._lines[number]
        else:
            text, style = "", _PLAIN
        line = [Segment(text.ljust(width)[:width], self._background + style)]
        return Strip(line, width) if text.isascii() else Strip(line).crop(0, width)

    def on_resize(self, _: Resize) -> None:
        """Fits the columns to the new width."""
        self.show(self._rows, self._state)

    def on_click(self, event: Click) -> None:
        """Selects the line under the pointer."""
        if event.y > 0:
            self._go(event.y + self.scroll_offset.y - 1)

    def action_move(self, lines: int) -> None:
        """Moves the selection."""
        self._go(self._at + lines)

    def action_page(self, pages: int) -> None:
        """Moves the selection by a screen."""
        self._go(self._at + pages * max(self.size.height - 2, 1))

    def action_choose(self) -> None:
        """Tells that the selected row was chosen."""
        if 0 <= self._at < len(self._rows):
            self.post_message(self.Chosen(self._rows[self._at]))

    def _go(self, number: int) -> None:
        self._at = max(min(number, len(self._rows) - 1), 0)
        self._selected = _key(self._rows[self._at]) if self._rows else None
        self._draw()
        top, height = self.scroll_offset.y, max(self.size.height - 1, 1)
        if self._at < top:
            self.scroll_to(y=self._at, animate=False)
        elif self._at >= top + height:
            self.scroll_to(y=self._at - height + 1, animate=False)


def _key(row: Row) -> tuple[str, str | None]:
    return row.env_name, row.lane
