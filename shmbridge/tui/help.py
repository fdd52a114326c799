"""The screen that explains keys and columns."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

TEXT = """\
shmbridge top: what a bridge does, and what is wrong with it.
It only reads: it takes no record and delays nobody.

 ↑ ↓ PgUp PgDn   select a line
 Enter           a lane: its newest record; an environment: open or shut it
 s   S           sort by the next column; turn the order round
 g               group by environment: on, off
 /               show only lanes whose environment, id, pid or state has a text
 p   space       pause the display; look now
 b               another bridge
 ?   q           this help; quit

 !          a line in trouble                ▸ ▾   an environment, shut or open
 state      of the process; "stopped >9 s": for longer than top has looked
 rec/s      records committed per second, over the last ten looks
 held       records committed and not released
 bytes      fill of the lane's bytes; of its slots. A sum shows its fullest lane
 last put   time since the newest record was committed
 waits      share of the time in which a put waited for room, or for a pause
 lag        versions between the newest policy and the newest record's

 In a record: ← → another row, [ ] another thousand tokens, n the newest again."""


class Help(ModalScreen[None]):
    """Keys and columns; any of its keys closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,q,question_mark,enter", "dismiss", "Close")]
    DEFAULT_CSS = """
    Help { align: center middle; }
    Help VerticalScroll { width: 80; max-width: 100%; height: auto; max-height: 100%; background: $surface; }
    """

    def compose(self) -> ComposeResult:
        """Yields the text."""
        with VerticalScroll():
            yield Static(TEXT, markup=False)
