"""The chat itself: a line is a message or a command, until the user leaves."""

from collections.abc import Callable
from dataclasses import replace

from rich.console import Console

from ..user_input.models import is_out_of_memory
from .conversation import Conversation
from .pace import summary
from .runs import RunPrinter, can_shade
from .safe_text import harmless
from .sampling import NAMES, Sampling
from .writer import ShownAnswer, Writer

BLOCK = '"""'
CUT_BY = {
    "user": "Stopped.",
    "max_new_tokens": "Cut at max_new_tokens: /set max_new_tokens=... allows more.",
    "context": "Cut where the target's context is full: /clear begins a new conversation.",
}
HELP = {
    "/help": "this list",
    "/quit": "leave; so does Ctrl-D",
    "/clear": "begin a new conversation",
    "/runs": "mark what one draft and one forward of the target added: on or off, and the last answer again",
    "/stats": "the line after each answer: on or off",
    "/system TEXT": "begin a new conversation with this system prompt; without TEXT, with none",
    "/set NAME=VALUE ...": f"{', '.join(NAMES)}; VALUE default takes one back; without any, what they are",
}


class Session:
    """A chat in a terminal, or through pipes.

    Args:
        conversation: what is said.
        writer: who answers.
        console: where it is shown.
        read_line: returns the user's next line, or raises `EOFError`.
        marks: whether accepted runs are marked.
        tells: whether a line after each answer tells how it went.
    """

    def __init__(
        self,
        conversation: Conversation,
        writer: Writer,
        console: Console,
        read_line: Callable[[], str],
        marks: bool = False,
        tells: bool = True,
    ) -> None:
        self.conversation, self.writer, self.console, self.read_line = conversation, writer, console, read_line
        self.marks, self.tells = marks, tells
        self.last: ShownAnswer | None = None
        self.is_over = False
        self.commands: dict[str, Callable[[str], None]] = {
            "/help": self.show_help,
            "/quit": self.leave,
            "/exit": self.leave,
            "/clear": self.clear,
            "/runs": self.switch_runs,
            "/stats": self.switch_stats,
            "/system": self.set_system,
            "/set": self.set_sampling,
        }

    def run(self) -> None:
        """Talk until the user leaves."""
        while not self.is_over:
            try:
                self.turn(read_message(self.read_line))
            except KeyboardInterrupt:
                self.say("\nCtrl-C stops an answer; /quit or Ctrl-D leaves.")
            except EOFError:
                self.leave()
            # What can be mended by another message, or in a new conversation, is no reason to lose this one.
            except (ValueError, RuntimeError, MemoryError) as error:
                if not isinstance(error, ValueError) and not is_out_of_memory(error):
                    raise
                self.say(f"error: {error}")

    def turn(self, message: str) -> None:
        """Answer a message, or do as a command says."""
        if message.startswith("/") and not message.startswith("//"):
            name, _, rest = message.partition(" ")
            if name not in self.commands:
                raise ValueError(
                    f"no command {name}: /help lists them; a message that begins with a slash begins with two"
                )
            self.commands[name](rest.strip())
        elif message.strip():
            self.answer(message.removeprefix("/") if message.startswith("//") else message)

    def answer(self, message: str) -> None:
        """Let the target answer."""
        prompt = self.conversation.prompt(message)
        printer = RunPrinter(self.writer.tokenizer, self.console, self.marks)
        try:
            answer = self.writer.answer(prompt, self.conversation.take_cache(prompt), printer.run)
        finally:
            if printer.num_runs:
                printer.end()
        self.conversation.add(message, prompt, answer.ids, answer.cache)
        self.last = answer
        if answer.cut_by is not None:
            self.say(CUT_BY[answer.cut_by])
        if self.tells:
            self.say(summary(answer.timing, self.writer.pace))

    def say(self, text: str) -> None:
        """Something that is not the target's."""
        self.console.print(harmless(text), style="dim", highlight=False, markup=False, soft_wrap=True)

    def show_help(self, rest: str) -> None:
        """What can be typed."""
        width = max(map(len, HELP))
        for name, told in HELP.items():
            self.say(f"{name:{width}}  {told}")
        self.say(f"A message of several lines stands between {BLOCK} and {BLOCK}. Ctrl-C stops an answer.")

    def leave(self, rest: str = "") -> None:
        """End the chat."""
        self.is_over = True

    def clear(self, rest: str) -> None:
        """Begin anew."""
        self.conversation.begin(self.conversation.system)
        self.last = None
        self.say("A new conversation.")

    def switch_runs(self, rest: str) -> None:
        """Mark accepted runs, or don't."""
        self.marks = not self.marks
        if not self.marks:
            self.say("Runs are not marked.")
            return
        how = "Each coloured stretch" if can_shade(self.console) else "Between two bars"
        self.say(f"{how}: what one draft and one forward of the target added.")
        if self.last is not None:
            printer = RunPrinter(self.writer.tokenizer, self.console)
            for run in self.last.runs:
                printer.run(run)
            printer.end()

    def switch_stats(self, rest: str) -> None:
        """Tell how answers went, or don't."""
        self.tells = not self.tells
        self.say(f"The line after each answer is {'on' if self.tells else 'off'}.")

    def set_system(self, rest: str) -> None:
        """Begin anew, with another system prompt."""
        self.conversation.begin(rest or None)
        self.last = None
        self.say(
            "A new conversation, with this system prompt." if rest else "A new conversation, without a system prompt."
        )

    def set_sampling(self, rest: str) -> None:
        """Change how tokens are chosen."""
        given = dict(read_setting(pair) for pair in rest.split())
        if given.get("max_new_tokens", 1) is None:
            given["max_new_tokens"] = Sampling.max_new_tokens
        self.writer.set_sampling(replace(self.writer.sampling, **given))
        values = {name: vars(self.writer.sampling)[name] for name in NAMES}
        self.say(
            ", ".join(f"{name}={'as the target has it' if value is None else value}" for name, value in values.items())
        )


def read_message(read_line: Callable[[], str]) -> str:
    """The user's next line, or all lines between two that have three quotes; the end of the input ends them, too."""
    line = read_line()
    if not line.lstrip().startswith(BLOCK):
        return line
    lines = [line.lstrip().removeprefix(BLOCK)]
    while not lines[-1].rstrip().endswith(BLOCK):
        try:
            lines.append(read_line())
        except EOFError:
            break
    lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
    return "\n".join(lines).strip("\n")


def read_setting(pair: str) -> tuple[str, int | float | None]:
    """`name=value` of a number; `None` for `name=default`.

    Raises:
        ValueError: if it is none, or there is no such setting.
    """
    name, _, text = pair.partition("=")
    if name not in NAMES:
        raise ValueError(f"no setting {name!r}: expected one of {', '.join(NAMES)}, as in temperature=0.7")
    if text == "default":
        return name, None
    try:
        return name, int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        raise ValueError(f"{name} should be a number or default, got {text!r}") from None
