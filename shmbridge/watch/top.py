"""The live view: what is wrong in one sentence, the consumer, and the lanes, looked at again and again."""

from collections import Counter, deque
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Footer, Input, Static

from shmbridge.watch.diagnosis import Row, Severity, headline, lane_rows, losses
from shmbridge.watch.lane_table import COLUMNS, LaneList, View
from shmbridge.watch.snapshot import BridgeLook
from shmbridge.watch.text import consumer_parts, printable, reasons_in_words, sentences
from shmbridge.watch.top_screens import Choose, Help, LiveSource, Pieces, RecordScreen, Since, folded

_LOOKS = 11  # rates are over the time between the first and the last of so many looks
_STYLES = {
    Severity.FINE: "ansi_green",
    Severity.NOTE: "ansi_yellow",
    Severity.TROUBLE: "bold ansi_bright_red",
}


class Top(App[None]):
    """The view of one bridge. It reads at each tick, and draws what changed."""

    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("p", "pause", "Pause"),
        Binding("space", "look", "Look now", show=False),
        Binding("s", "sort", "Sort"),
        Binding("S", "turn", "Turn the order round", show=False),
        Binding("g", "group", "Group"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("escape", "unfilter", "No filter", show=False),
        Binding("b", "bridges", "Bridges"),
        Binding("question_mark", "help", "Help", key_display="?"),
    ]
    CSS = """
    Screen { background: $background; }
    #said { height: auto; }
    #facts { height: auto; color: $text-muted; }
    #summary { height: auto; text-style: bold; }
    LaneList { height: 1fr; }
    Input { display: none; height: 1; border: none; padding: 0; }
    Input.asked { display: block; }
    """

    def __init__(
        self,
        bridge: str | None,
        *,
        interval_s: float = 1.0,
        pieces: Pieces | None = None,
        source: LiveSource | None = None,
    ) -> None:
        """Never blocks.

        Args:
            bridge: None: the user chooses.
            interval_s: seconds between two looks.
            pieces: the text of each token of a record; None: ids are shown.
            source: where looks come from; None: this machine.
        """
        super().__init__()
        self.bridge = bridge
        self._interval_s, self._pieces = interval_s, pieces
        self._source = LiveSource() if source is None else source
        self._view = View()
        self._begin()

    def _begin(self) -> None:
        """Forgets what was seen of an earlier bridge."""
        self._looks: deque[BridgeLook] = deque(maxlen=_LOOKS)
        self._since = Since()
        self._is_gone = self._is_paused = False
        self._view.opened.clear()

    def compose(self) -> ComposeResult:
        """Yields the lines on top, the lanes, the filter and the keys."""
        yield Static(id="said", markup=False)
        yield Static(id="facts", markup=False)
        yield Static(id="summary", markup=False)
        yield LaneList(self._view)
        yield Input(placeholder="environment, id, pid or state; Enter keeps it, Esc shows all", compact=True)
        yield Footer()

    def on_mount(self) -> None:
        """Takes the first look, and the next ones at each tick."""
        self.query_one(LaneList).focus()
        self.set_interval(self._interval_s, self._tick)
        if self.bridge is None:
            self.action_bridges()
        else:
            self.action_look()

    def on_resize(self) -> None:
        """Folds the lines on top to the new width."""
        self._show()

    def _tick(self) -> None:
        if not self._is_paused:
            self.action_look()

    def action_look(self) -> None:
        """Looks now, also while the display is paused."""
        if self.bridge is None:
            return
        now = self._source.look(self.bridge)
        self._is_gone = now is None
        if now is not None:
            self._looks.append(now)
            self._since.see(now)
        self._show()

    def _show(self) -> None:
        """Draws the newest look."""
        if not self._looks:
            if self._is_gone:
                self._update("said", Content.styled(f"no bridge {self.bridge!r}", "yellow"))
            return
        now, before = self._looks[-1], self._looks[0] if len(self._looks) > 1 else None
        width = self.size.width
        lanes = lane_rows(now, before)
        shown = self._view.arranged(lanes)
        if self._is_gone:
            self._update(
                "said", Content.styled(f"the bridge {now.name!r} is gone; this was its end", "yellow")
            )
        else:
            style = _STYLES[headline(now, before).severity]
            first, *more = sentences(now, before)
            self._update("said", Content.assemble((first, style), *(f"\n{each}" for each in more)))
        self._update("facts", Content("\n".join(folded([*consumer_parts(now), *_lost(now)], width))))
        self._update("summary", Content("\n".join(folded(self._summary(now, lanes, shown), width))))
        self.query_one(LaneList).show(shown, lambda row: self._since.words(row, now.at_s))

    def _summary(self, now: BridgeLook, lanes: list[Row], shown: list[Row]) -> list[str]:
        """The sum over all lanes, and what the keys have chosen."""
        states = Counter(row.state for row in lanes)
        counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        parts = [
            f"{now.name}: {len(lanes)} {'lane' if len(lanes) == 1 else 'lanes'}"
            + (f", {counts}" if counts else "")
        ]
        rates = [row.rate for row in lanes if row.rate is not None]
        parts += [f"{sum(rates):.1f} rec/s"] * bool(rates) + [f"{now.held} held"]
        if self._view.wanted:
            parts.append(
                f"filter {printable(self._view.wanted)!r}: {sum(row.lanes for row in shown if row.lane)}"
            )
        return parts + ["PAUSED"] * self._is_paused

    def _update(self, name: str, content: Content) -> None:
        """Draws a line on top if it has changed."""
        line = self.query_one(f"#{name}", Static)
        if line.content != content:
            line.update(content, layout=self._height(line.content) != self._height(content))

    def _height(self, content: object) -> int:
        """How many lines a content takes on this screen."""
        return sum(len(folded(each.split(" "), self.size.width, " ")) for each in str(content).split("\n"))

    def action_pause(self) -> None:
        """Stops or resumes the display; the bridge itself runs on."""
        self._is_paused = not self._is_paused
        self._show()

    def action_sort(self) -> None:
        """Sorts by the next column."""
        self._view.sorted_by, self._view.reverse = (self._view.sorted_by + 1) % len(COLUMNS), False
        self._show()

    def action_turn(self) -> None:
        """Turns the order round."""
        self._view.reverse = not self._view.reverse
        self._show()

    def action_group(self) -> None:
        """Groups lanes by environment, or not."""
        self._view.grouped = not self._view.grouped
        self._show()

    def action_filter(self) -> None:
        """Asks for a text that lanes must have."""
        asked = self.query_one(Input)
        asked.add_class("asked")
        asked.focus()

    def action_unfilter(self) -> None:
        """Shows all lanes again."""
        self.query_one(Input).value = ""
        self._filtered()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filters while the text is written."""
        self._view.wanted = event.value
        self._show()

    def on_input_submitted(self) -> None:
        """Keeps the filter."""
        self._filtered()

    def _filtered(self) -> None:
        self.query_one(Input).remove_class("asked")
        self.query_one(LaneList).focus()

    def action_help(self) -> None:
        """Explains keys and columns."""
        self.push_screen(Help())

    def action_bridges(self) -> None:
        """Offers the bridges of this user."""
        self.push_screen(Choose(self._source), self._choose)

    def _choose(self, bridge: str | None) -> None:
        if bridge is None and self.bridge is None:
            self.exit()
        elif bridge is not None:
            self.bridge = bridge
            self._begin()
            self.action_look()

    def on_lane_list_chosen(self, event: LaneList.Chosen) -> None:
        """Opens or shuts an environment, or shows the newest record of a lane."""
        row, view, bridge = event.row, self._view, self.bridge
        if row.lane is None:
            view.open_or_shut(row, lane_rows(self._looks[-1]))
            self._show()
        elif bridge is not None:
            lane = row.lane
            self.push_screen(
                RecordScreen(
                    printable(row.label),
                    lambda: self._source.newest(bridge, lane),
                    self._looks[-1].policy_version,
                    self._pieces,
                    self._interval_s,
                ),
                lambda _: self._source.rest(),
            )


def _lost(now: BridgeLook) -> list[str]:
    """Records dropped and discarded, and episodes lost, by reason."""
    return [
        f"{counter.replace('_', ' ')}: {reasons_in_words(by_reason)}"
        for counter, by_reason in losses(now).items()
        if by_reason
    ]
