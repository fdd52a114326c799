"""The table of lanes as a widget: titles, lines, a selected line.

Only lines that changed are drawn. Textual's DataTable, which draws cells, takes five times as long for
sixteen lanes.
"""

from collections.abc import Callable
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.events import Click, Resize
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from shmbridge.tui.columns import line, title_line, widths
from shmbridge.tui.view import View
from shmbridge.watch.processes import State
from shmbridge.watch.rows import Row

_TITLES = Style(bold=True, reverse=True)
_PLAIN, _SUM, _DEAD = Style(), Style(bold=True), Style(dim=True)
_TROUBLE = Style(bold=True, color="bright_red")
_SELECTED = Style(reverse=True)


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
