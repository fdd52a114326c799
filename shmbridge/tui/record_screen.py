"""The newest record of a lane, as a copy: its facts, and its tokens coloured by advantage."""

from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Static

from shmbridge.errors import ShmBridgeError
from shmbridge.tui.fold import folded
from shmbridge.tui.source import Readable
from shmbridge.tui.tokens import PAGE, Pieces, legend, marked, row_of, summary
from shmbridge.watch.text import printable


class RecordScreen(ModalScreen[None]):
    """One record, one row at a time. While the lane holds no record, it waits for the next one."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "Close"),
        Binding("left", "row(-1)", "Row", key_display="← →", priority=True),
        Binding("right", "row(1)", "Row", show=False, priority=True),
        Binding("left_square_bracket", "page(-1)", "Tokens", key_display="[ ]"),
        Binding("right_square_bracket", "page(1)", "Tokens", show=False),
        Binding("n", "newest", "Newest"),
        Binding("question_mark", "app.help", "Help"),
    ]
    DEFAULT_CSS = """
    RecordScreen { background: $background; }
    RecordScreen #facts { text-style: bold; }
    RecordScreen #legend { color: $text-muted; }
    RecordScreen VerticalScroll { height: 1fr; border-top: solid $panel; }
    """

    def __init__(
        self,
        lane: str,
        newest: Callable[[], Readable | None],
        newest_version: int | None,
        pieces: Pieces | None,
        every_s: float,
    ) -> None:
        super().__init__()
        self._lane, self._newest, self._newest_version = lane, newest, newest_version
        self._pieces, self._every_s = pieces, every_s
        self._record: Readable | None = None
        self._row = self._first = 0

    def compose(self) -> ComposeResult:
        """Yields facts, legend and tokens."""
        yield Static(id="facts", markup=False)
        yield Static(id="legend", markup=False)
        with VerticalScroll():
            yield Static(id="tokens", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Reads the newest record; if there is none, asks again at each tick."""
        self.action_newest()
        self.set_interval(min(self._every_s, 0.25), self._ask_again)
        self.query_one(VerticalScroll).focus()

    def on_resize(self) -> None:
        """Folds the facts to the new width."""
        self._show()

    def action_newest(self) -> None:
        """Reads the newest record of the lane."""
        found = self._newest()
        if found is not None:
            self._record, self._row, self._first = found, 0, 0
        self._show()

    def action_row(self, step: int) -> None:
        """Shows another row of the record."""
        if self._record is not None:
            self._row = (self._row + step) % max(len(self._record), 1)
            self._first = 0
            self._show()

    def action_page(self, step: int) -> None:
        """Shows another page of the row's tokens."""
        if self._record is not None:
            count = len(row_of(self._record, "tokens", self._row))
            if 0 <= self._first + step * PAGE < count:
                self._first += step * PAGE
                self._show()

    def _ask_again(self) -> None:
        if self._record is None:
            self.action_newest()

    def _show(self) -> None:
        record = self._record
        facts, tokens = self.query_one("#facts", Static), self.query_one("#tokens", Static)
        if record is None:
            facts.update(f"{self._lane} holds no record now: waiting for the next one")
            return
        try:
            parts = summary(record, self._row, self._newest_version)
            count = len(row_of(record, "tokens", self._row))
            text = marked(record, self._row, self._pieces, self._first)
        except ShmBridgeError as wrong:  # a producer may have written anything
            facts.update(printable(str(wrong)))
            return
        if count > PAGE:
            parts.append(f"shown: {self._first:,} to {min(self._first + PAGE, count):,}")
        facts.update("\n".join(folded(parts, self.size.width)))
        self.query_one("#legend", Static).update(legend(record))
        tokens.update(text)
