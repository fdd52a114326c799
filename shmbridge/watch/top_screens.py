"""The screens that the live view opens: bridges to choose from, keys, and a record with its tokens."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, ClassVar

import numpy as np
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Footer, OptionList, Static
from textual.widgets.option_list import Option

from shmbridge.errors import ShmBridgeError
from shmbridge.record import Record
from shmbridge.segments import bridge_names
from shmbridge.watch import snapshot
from shmbridge.watch.diagnosis import Row, in_words
from shmbridge.watch.observer import Observer
from shmbridge.watch.snapshot import BridgeLook, State
from shmbridge.watch.text import cells, group_of, printable, sentences

_TIMED = (State.STOPPED, State.DEAD)
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
PAGE = 1000  # tokens shown at once
_CREDIT = ("advantages", "token_rewards")  # the first that is there gives the colours
_RAISED = ("on #12351c", "on #175227", "on #1c7434", "on #229a43")  # small to large
_LOWERED = ("on #3d1a1a", "on #5f1f1f", "on #882525", "on #b52c2c")
_NAMES_OF = {"advantages": "advantage", "token_rewards": "token reward"}
Pieces = Callable[[Sequence[int]], list[str]]


class LiveSource:
    """The bridges of this machine. One thread at a time."""

    def __init__(self) -> None:
        self._observer: Observer | None = None

    def bridges(self) -> list[str]:
        """Returns the names of all bridges of this user. Never blocks."""
        return bridge_names()

    def look(self, bridge: str) -> BridgeLook | None:
        """Returns one look; None if there is no such bridge. Never blocks."""
        return snapshot.look(bridge)

    def newest(self, bridge: str, lane: str) -> Record | None:
        """Returns a copy of the newest record that a lane holds; None if it holds none. Never blocks."""
        if self._observer is None or self._observer.bridge != bridge:
            self.rest()
            self._observer = Observer(bridge)
        return self._observer.newest(lane)

    def rest(self) -> None:
        """Unmaps the lanes, which reading records maps. Never blocks."""
        if self._observer is not None:
            self._observer.close()
            self._observer = None


class Since:
    """Remembers the state of each lane, and when it was first seen in it."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, float, bool]] = {}  # lane: state, since, whether its begin was seen

    def see(self, now: BridgeLook) -> None:
        """Takes note of a look."""
        known = {}
        for lane in now.lanes:
            earlier = self._known.get(lane.name)
            if earlier is not None and earlier[0] == lane.state:
                known[lane.name] = earlier
            else:
                known[lane.name] = (str(lane.state), now.at_s, earlier is not None)
        self._known = known

    def words(self, row: Row, at_s: float) -> str:
        """Returns a row's state with its time: `stopped 12 s`, `stopped >12 s` if it began before."""
        known = self._known.get(row.lane or "")
        if known is None or row.state not in _TIMED or row.state != known[0]:
            return row.state
        _, since_s, begin_seen = known
        age_s = at_s - since_s
        if not begin_seen and age_s <= 0:
            return row.state
        return f"{row.state} {'' if begin_seen else '>'}{in_words(age_s)}"


def folded(parts: list[str], width: int, between: str = "  ") -> list[str]:
    """Returns lines of at most `width` cells; a longer part has a line of its own."""
    lines: list[str] = []
    for part in parts:
        if lines and cells(lines[-1]) + cells(between) + cells(part) <= width:
            lines[-1] += between + part
        else:
            lines.append(part)
    return lines


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


class Choose(ModalScreen[str | None]):
    """Returns the chosen bridge; None if none was chosen."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,q", "dismiss", "Close")]
    DEFAULT_CSS = """
    Choose { align: center middle; }
    Choose OptionList { width: 100%; height: auto; max-height: 80%; }
    Choose Static { width: 100%; padding: 0 1; background: $surface; }
    """

    def __init__(self, source: LiveSource) -> None:
        super().__init__()
        self._source = source

    def compose(self) -> ComposeResult:
        """Yields the bridges, by name."""
        yield Static("Which bridge? Enter chooses, q closes.")
        options = []
        for name in self._source.bridges():
            if (now := self._source.look(name)) is not None:
                text = Content.assemble((name, "bold"), f"  {sentences(now)[0]}")
                options.append(Option(text, id=name))
        yield OptionList(*options)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Returns the bridge."""
        self.dismiss(event.option_id)


def marked(record: Record, row: int, pieces: Pieces | None = None, first: int = 0) -> Content:
    """Returns the tokens of a row, from the `first` on, at most a page of them.

    Args:
        record: a copy of a record.
        row: its number in the record.
        pieces: the text of each of some token ids; None: ids are shown.
        first: the token that the page begins with.
    """
    tokens = row_of(record, "tokens", row)
    last = min(first + PAGE, len(tokens))
    shown = [int(each) for each in tokens[first:last]]
    texts = [str(each) for each in shown] if pieces is None else [_visible(each) for each in pieces(shown)]
    signs, styles = _styles(record, row, len(tokens))
    rewards = _step_rewards(record, row)
    parts: list[tuple[str, str]] = []
    before = 0
    for number, text in enumerate(texts, first):
        if number > first and pieces is None:
            parts.append((" ", ""))
        if signs[number] and (signs[number] != before or number == first):
            parts.append(("⁺" if signs[number] > 0 else "⁻", "bold"))
        before = signs[number]
        parts.append((text, styles[number]))
        parts += [(f"⟨{_number(reward)}⟩", "bold yellow") for reward in rewards.get(number + 1, ())]
    late = [end for end in rewards if not 1 <= end <= len(tokens)]
    if late and last == len(tokens):
        parts.append(
            (f"\n{len(late)} step ends are outside of the row: {', '.join(map(str, sorted(late)))}", "bold")
        )
    # neighbours of one style are one part: a thousand tokens are shown at once
    return Content.assemble(
        *(("".join(text for text, _ in each), style) for style, each in groupby(parts, _style_of))
    )


def record_facts(record: Record, row: int, newest_version: int | None) -> list[str]:
    """Returns the facts about a record and one of its rows, a part each."""
    meta = record.meta
    parts = [
        printable(meta.producer_id),
        f"record {meta.sequence}",
        f"group {printable(group_of(meta))}",
        f"row {row + 1} of {len(record)}"
        + (f" (group of {meta.group_size})" if meta.group_size != len(record) else ""),
    ]
    if meta.min_policy_version >= 0:
        lag = "" if newest_version is None else f", lag {max(newest_version - meta.min_policy_version, 0)}"
        parts.append(f"policy version {meta.min_policy_version}{lag}")
    parts += [meta.split] * (meta.split != "train") + ["redelivered"] * meta.redelivered
    tokens = row_of(record, "tokens", row)
    mask = row_of(record, "loss_mask", row)
    trained = f", {int(np.count_nonzero(mask))} trained" if len(mask) else ""
    parts.append(f"{len(tokens):,} tokens{trained}")
    if "score" in record.columns and row < len(record["score"]):
        parts.append(f"score {_number(record['score'][row])}")
    name = credit(record)
    if name and len(values := row_of(record, name, row)):
        parts.append(f"{_NAMES_OF[name]} {_number(values.min())} to {_number(values.max())}")
    if len(rewards := row_of(record, "step_rewards", row)):
        parts.append(f"{len(rewards)} step rewards: {' '.join(_number(each) for each in rewards[:8])}")
    return parts


def legend(record: Record) -> str:
    """Returns how to read the marks of a record."""
    name = credit(record)
    if not name:
        return "no advantages in this record; dim: not trained; ⟨0.42⟩: reward of the step that ends here"
    return (
        f"⁺ green: {_NAMES_OF[name]} above 0; ⁻ red, underlined: below; deeper: larger; "
        "dim: not trained; ⟨0.42⟩: reward of the step that ends here"
    )


def credit(record: Record) -> str:
    """Returns the column that gives the colours; "" if the record has none."""
    return next((name for name in _CREDIT if name in record.columns), "")


def row_of(record: Record, name: str, row: int) -> np.ndarray[Any, Any]:
    """Returns one row of a ragged column; empty if the column, or the row, is not there."""
    if name not in record.columns:
        return np.empty(0)
    lengths = record[name].lengths
    if row >= len(lengths):
        return np.empty(0)
    start = int(lengths[:row].sum())
    values: np.ndarray[Any, Any] = record[name].values[start : start + int(lengths[row])]
    return values


def _styles(record: Record, row: int, count: int) -> tuple[list[int], list[str]]:
    """Returns the sign and the style of each token of a row."""
    name = credit(record)
    values = np.zeros(count)
    if name:
        found = row_of(record, name, row)[:count]
        values[: len(found)] = np.nan_to_num(found)
        most = float(np.abs(np.nan_to_num(record[name].values)).max(initial=0.0)) or 1.0
    mask = row_of(record, "loss_mask", row)
    trained = np.ones(count, bool)
    trained[: len(mask)] = mask[:count] != 0
    signs, styles = [], []
    for value, is_trained in zip(values.tolist(), trained.tolist(), strict=True):
        level = min(int(abs(value) / most * len(_RAISED)), len(_RAISED) - 1) if value else 0
        style = "" if value == 0 else _RAISED[level] if value > 0 else f"underline {_LOWERED[level]}"
        signs.append((value > 0) - (value < 0))
        styles.append(style if is_trained else f"dim {style}".strip())
    return signs, styles


def _step_rewards(record: Record, row: int) -> dict[int, list[float]]:
    """Step rewards of a row by the exclusive end of their step."""
    found: dict[int, list[float]] = {}
    for end, reward in zip(
        row_of(record, "step_ends", row), row_of(record, "step_rewards", row), strict=False
    ):
        found.setdefault(int(end), []).append(float(reward))
    return found


def _style_of(part: tuple[str, str]) -> str:
    return part[1]


def _visible(text: str) -> str:
    """Text of a token with line ends shown and kept, other invisible characters escaped."""
    return "↵\n".join(printable(line) for line in text.split("\n"))


def _number(value: float) -> str:
    return f"{float(value):.3g}"


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
        newest: Callable[[], Record | None],
        newest_version: int | None,
        pieces: Pieces | None,
        every_s: float,
    ) -> None:
        super().__init__()
        self._lane, self._newest, self._newest_version = lane, newest, newest_version
        self._pieces, self._every_s = pieces, every_s
        self._record: Record | None = None
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
            parts = record_facts(record, self._row, self._newest_version)
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
