"""Text as it is written, run by run: what one draft and one forward of the target added can be told apart."""

import torch
from rich.console import Console
from rich.segment import Segment, Segments
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from .safe_text import harmless

# Two of the eight colours that every terminal tells apart, with a foreground that both dark and light ones can read.
RUN_STYLES = ("black on green", "black on cyan")
RUN_MARKER = "|"


def can_shade(console: Console) -> bool:
    """Whether runs can be told apart by colour; where they can't (a pipe, a file, NO_COLOR), markers do it."""
    return console.is_terminal and console.color_system is not None and not console.no_color


class GrowingText:
    """The text of tokens that arrive a few at a time: each character once all of its bytes are there.

    Only the last tokens are decoded, those before them serving as what a tokenizer looks back at, so that a long text costs no
    more than a short one.

    Args:
        tokenizer: of the tokens. Special ones have no text.
    """

    # Tokens that are decoded at once before the first of them are left out, and those that are left.
    MOST, LEFT = 64, 16

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        # Characters of these tokens that were handed out.
        self.num_told = 0

    def add(self, ids: list[int]) -> str:
        """What is new and whole."""
        self.ids += ids
        text = self._decoded()
        whole = text.rstrip("\N{REPLACEMENT CHARACTER}")
        new = whole[self.num_told :]
        self.num_told = max(self.num_told, len(whole))
        if len(self.ids) > self.MOST and whole == text:
            self.ids = self.ids[-self.LEFT :]
            self.num_told = len(self._decoded())
        return new

    def rest(self) -> str:
        """What was held back, of which no more will come."""
        rest = self._decoded()[self.num_told :]
        self.num_told += len(rest)
        return rest

    def _decoded(self) -> str:
        return self.tokenizer.decode(self.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class RunPrinter:
    """Prints runs of tokens, each in a shade of its own, or after a marker; or without either.

    Args:
        tokenizer: of the tokens.
        console: where they go.
        marks: whether runs are to be told apart.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, console: Console, marks: bool = True) -> None:
        self.console = console
        self.text = GrowingText(tokenizer)
        self.shades, self.marker = marks and can_shade(console), ""
        if marks and not self.shades:
            self.marker = RUN_MARKER
        self.num_runs = 0

    def run(self, ids: list[int]) -> None:
        """Print the next run."""
        style = RUN_STYLES[self.num_runs % len(RUN_STYLES)] if self.shades else ""
        self.show(self.marker + self.text.add(ids), style)
        self.num_runs += 1

    def end(self) -> None:
        """Print what was held back, and finish the line."""
        self.show(f"{self.text.rest()}{self.marker}\n")

    def show(self, text: str, style: str = "") -> None:
        """Print a piece of text as it stands, tabs and spaces too; a shade ends with its line."""
        look = self.console.get_style(style)
        pieces = [piece for line in harmless(text).split("\n") for piece in (Segment(line, look), Segment.line())]
        self.console.print(Segments(pieces[:-1]), end="", crop=False)


class RunStreamer(BaseStreamer):
    """A streamer that prints the end of the prompt, and then each accepted run.

    `generate` hands it the prompt first, and then every round's committed tokens at once.
    """

    PROMPT_LINES = 12

    def __init__(self, tokenizer: PreTrainedTokenizerBase, console: Console) -> None:
        self.printer = RunPrinter(tokenizer, console)
        self.has_prompt = False

    def put(self, value: torch.LongTensor) -> None:
        """Take token ids of `(tokens,)` or `(1, tokens)`."""
        ids = value.flatten().tolist()
        if self.has_prompt:
            self.printer.run(ids)
        else:
            self.has_prompt = True
            self.printer.show(last_lines(self.printer.text.add(ids), self.PROMPT_LINES), "dim")

    def end(self) -> None:
        """Print what was held back, and finish the line."""
        self.printer.end()


def last_lines(text: str, num_lines: int) -> str:
    """The end of a text; a first line of dots says that something was left out."""
    lines = text.split("\n")
    return text if len(lines) <= num_lines else "\n".join(["...", *lines[-num_lines:]])
