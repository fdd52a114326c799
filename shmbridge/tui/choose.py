"""The screen that offers the bridges of this user, each with its one sentence."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from shmbridge.tui.source import Source
from shmbridge.watch.text import sentences


class Choose(ModalScreen[str | None]):
    """Returns the chosen bridge; None if none was chosen."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,q", "dismiss", "Close")]
    DEFAULT_CSS = """
    Choose { align: center middle; }
    Choose OptionList { width: 100%; height: auto; max-height: 80%; }
    Choose Static { width: 100%; padding: 0 1; background: $surface; }
    """

    def __init__(self, source: Source) -> None:
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
