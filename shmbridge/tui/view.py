"""Which rows the live view shows, and in which order: grouping, filter, sort. No screen in here."""

from dataclasses import dataclass, field
from itertools import groupby

from shmbridge.tui.columns import COLUMNS, STATE
from shmbridge.watch.rows import FEW, Row, has_few_troubles, summed


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
