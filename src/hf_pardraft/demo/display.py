"""What the demo puts on the screen: text with its accepted runs visible, and the table of results."""

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ..evaluation.rows import Comparison

# Two of the eight colours that every terminal tells apart, with a foreground that both dark and light ones can read.
RUN_STYLES = ("black on green", "black on cyan")
RUN_MARKER = "|"
PROMPT_LINES = 12
SAME_TEXT = {True: "yes", False: "NO", None: "sampled"}


def can_shade(console: Console) -> bool:
    """Whether runs can be told apart by colour; where they can't (a pipe, a file, NO_COLOR), markers do it."""
    return console.is_terminal and console.color_system is not None and not console.no_color


class RunStreamer(BaseStreamer):
    """A streamer that prints each accepted run in a shade of its own, or after a marker.

    `generate` hands it the prompt first, and then every round's committed tokens at once.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, console: Console) -> None:
        self.tokenizer = tokenizer
        self.console = console
        self.shaded = can_shade(console)
        self.ids: list[int] = []
        self.num_printed = 0
        self.num_runs: int | None = None

    def put(self, value: torch.LongTensor) -> None:
        """Take token ids of `(tokens,)` or `(1, tokens)`."""
        self.ids += value.flatten().tolist()
        if self.num_runs is None:
            self.num_runs = 0
            prompt = self._decoded()
            self.num_printed = len(prompt)
            self._print(last_lines(prompt, PROMPT_LINES), "dim")
        else:
            self._print_run(self._decoded())
            self.num_runs += 1

    def end(self) -> None:
        """Print what was held back, and finish the line."""
        rest = self._decoded(complete=False)[self.num_printed :]
        self._print(rest + ("" if self.shaded else RUN_MARKER) + "\n")

    def _decoded(self, complete: bool = True) -> str:
        """The text so far; if `complete`, without a last character whose bytes are not all there yet."""
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text.rstrip("\N{REPLACEMENT CHARACTER}") if complete else text

    def _print_run(self, text: str) -> None:
        run = text[self.num_printed :]
        self.num_printed = max(self.num_printed, len(text))
        if self.shaded:
            self._print(run, RUN_STYLES[self.num_runs % len(RUN_STYLES)])
        else:
            self._print(RUN_MARKER + run)

    def _print(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style=style), end="", soft_wrap=True)


def last_lines(text: str, num_lines: int) -> str:
    """The end of a text; a first line of dots says that something was left out."""
    lines = text.split("\n")
    return text if len(lines) <= num_lines else "\n".join(["...", *lines[-num_lines:]])


def results_table(rows: list[Comparison]) -> Table:
    """The comparison, for people."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("")
    for heading in ("tokens/s", "speedup", "tau", "same text"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.tokens_per_second:.0f}",
            f"{row.speedup:.2f}x",
            f"{row.tau:.2f}",
            SAME_TEXT[row.identical],
        )
    return table
