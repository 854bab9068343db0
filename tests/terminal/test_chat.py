"""`pardraft chat`: plain generate's text, nothing read twice; Ctrl-C stops an answer; no text steers the terminal."""

import copy
import io
import os
import pty
import signal
import sys
from contextlib import closing

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

import in_process
from hf_pardraft import AutoDrafter
from hf_pardraft.cli.chat import typed_line
from hf_pardraft.cli.generate import streamer_for
from hf_pardraft.terminal import writer
from hf_pardraft.terminal.conversation import Conversation
from hf_pardraft.terminal.pace import PlainPace, Timing, summary
from hf_pardraft.terminal.runs import RunPrinter
from hf_pardraft.terminal.safe_text import harmless
from hf_pardraft.terminal.sampling import Sampling
from hf_pardraft.terminal.session import Session
from hf_pardraft.terminal.writer import Writer
from hf_pardraft.user_input.models import end_of_text_ids

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
# Leaves out what earlier answers began with, as templates do with thoughts.
CHANGING = TEMPLATE.replace("m.content", "(m.content[3:] if m.role == 'assistant' else m.content)")
NEW = 20


@pytest.fixture(scope="module")
def family(tiny_family):
    tokenizer = AutoTokenizer.from_pretrained(tiny_family / "target")
    tokenizer.chat_template = TEMPLATE
    target = AutoModelForCausalLM.from_pretrained(tiny_family / "target")
    return tokenizer, target, AutoDrafter.from_pretrained(tiny_family / "pard")


def test_a_chat_template_may_come_with_what_templates_take(family):
    tokenizer = copy.deepcopy(family[0])
    tokenizer.chat_template = None
    brought = Conversation(tokenizer, template_kwargs={"chat_template": TEMPLATE})
    assert brought.prompt("Hello") == Conversation(family[0]).prompt("Hello")


def session_of(family, lines, drafted=True, system=None, console=None, **settings):
    """A chat in which the user types these lines."""
    tokenizer, target, drafter = family
    rest = iter(lines)

    def read_line():
        try:
            line = next(rest)
        except StopIteration:
            raise EOFError from None
        return line() if callable(line) else line

    sampling = Sampling(**{"max_new_tokens": NEW, **settings})
    answering = Writer(target, drafter if drafted else None, tokenizer, sampling)
    console = console or Console(file=io.StringIO(), width=200, force_terminal=False)
    return Session(Conversation(tokenizer, end_of_text_ids(target), system), answering, console, read_line)


def printed(session: Session) -> str:
    return session.console.file.getvalue()


def answers(session: Session) -> list[str]:
    return [said["content"] for said in session.conversation.messages if said["role"] == "assistant"]


def check_turn(family, session: Session, message: str, **sampling) -> None:
    """What is said to a message is what plain `generate` says, which reads the whole conversation anew."""
    ids = torch.tensor([session.conversation.prompt(message)])
    torch.manual_seed(0)
    plain = family[1].generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, **sampling)
    torch.manual_seed(0)
    session.turn(message)
    assert session.last.ids == plain[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_chat_says_what_plain_generate_says(family, temperature):
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    session = session_of(family, [], temperature=temperature)
    longest = 0
    for message in ("def add(a, b):", "and then?", "more"):
        check_turn(family, session, message, **sampling)
        longest = max(longest, *map(len, session.last.runs))
    # The first tokens of an answer were plain generate's, to be timed, and others drafted.
    assert longest > 1
    assert session.writer.pace.num_steps < Writer.PLAIN_TOKENS
    assert "steps timed" in printed(session)


def test_each_turn_reads_only_what_is_new(family):
    target, read = family[1], []

    def note(module, args, kwargs):
        read.append(kwargs["input_ids"].shape[1])

    session = session_of(family, [])
    with closing(target.register_forward_pre_hook(note, with_kwargs=True)) as hook:
        hook.close = hook.remove
        session.turn("def add(a, b):")
        before = len(session.conversation.ids)
        read.clear()
        session.turn("and then?")
    new = len(session.conversation.ids) - before
    # Of what was read, drafts that were not accepted are the rest.
    assert new - NEW <= max(read) < before


def test_a_template_that_changes_earlier_answers_is_followed(family):
    tokenizer = family[0]
    tokenizer.chat_template = CHANGING
    try:
        session = session_of(family, [])
        check_turn(family, session, "one", do_sample=False)
        said = answers(session)[0]
        assert tokenizer.decode(session.conversation.prompt("two")) == (
            f"<user>one\n<assistant>{said[3:]}\n<user>two\n<assistant>"
        )
        check_turn(family, session, "two", do_sample=False)
    finally:
        tokenizer.chat_template = TEMPLATE


def test_ids_that_a_tokenizer_would_cut_otherwise_are_kept(family):
    tokenizer = family[0]
    conversation = Conversation(tokenizer)
    prompt = conversation.prompt("x")
    # Two tokens that it would write as one.
    answer = [tokenizer.convert_tokens_to_ids(letter) for letter in "de"]
    assert len(tokenizer("de").input_ids) == 1
    conversation.add("x", prompt, answer, None)
    later = conversation.prompt("y")
    assert later[: len(prompt) + 2] == [*prompt, *answer]
    assert tokenizer.decode(later) == "<user>x\n<assistant>de\n<user>y\n<assistant>"


def test_ctrl_c_stops_an_answer_and_not_the_chat(family, monkeypatch):
    # Whoever started pytest may have told it to ignore interrupts.
    shown, handler = RunPrinter.run, signal.getsignal(signal.SIGINT)
    session = session_of(family, ["def add(a, b):"], max_new_tokens=40)

    def interrupt_after_nine(printer, ids):
        shown(printer, ids)
        if printer.num_runs == 9:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(RunPrinter, "run", interrupt_after_nine)
    session.turn("def add(a, b):")
    monkeypatch.undo()
    assert session.last.cut_by == "user"
    assert "Stopped." in printed(session)
    whole = session_of(family, ["def add(a, b):"], max_new_tokens=40)
    whole.run()
    assert 0 < len(answers(session)[0]) < len(answers(whole)[0])
    assert answers(whole)[0].startswith(answers(session)[0])
    # What was read stays read.
    assert session.conversation.take_cache(session.conversation.prompt("go on")) is not None
    session.turn("go on")
    assert len(answers(session)) == 2
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_twice_does_not_wait_for_the_round(family):
    session = session_of(family, [])

    def interrupt_twice(ids):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    answer = session.writer.answer(session.conversation.prompt("x"), None, interrupt_twice)
    assert (answer.cut_by, len(answer.runs), answer.cache) == ("user", 1, None)


def test_ctrl_c_at_the_prompt_says_how_to_leave(family):
    def ctrl_c():
        raise KeyboardInterrupt

    session = session_of(family, [ctrl_c, "/quit", "never read"])
    session.run()
    assert "/quit or Ctrl-D leaves" in printed(session)
    assert session.read_line() == "never read"


def test_commands(family):
    lines = ["/help", "/stats", "one", "/runs", "/set temperature=0.5 max_new_tokens=3", "two", "/nosuch", "/clear"]
    session = session_of(
        family,
        [*lines, "/set max_new_tokens=much", "/set top_p=3", "//help", "/system Be brief.", "/set temperature=default"],
    )
    session.run()
    text = printed(session)
    assert "/clear" in text
    assert "tokens/s" not in text
    assert "Between two bars" in text
    assert "max_new_tokens=3, temperature=0.5" in text
    assert "max_new_tokens=3, temperature=as the target has it" in text
    for error in (
        "no command /nosuch",
        "max_new_tokens should be a number or default, got 'much'",
        "top_p must be above 0",
    ):
        assert f"error: {error}" in text
    assert session.writer.sampling.max_new_tokens == 3
    assert session.conversation.messages == [{"role": "system", "content": "Be brief."}]
    # After /runs each run of the answer stands between bars, and the last one was shown again.
    assert text.count("|") >= 2 * 2


def test_a_chat_mode_is_not_judged_by_the_answer_that_plain_generate_began(family, tiny_family, recwarn):
    tokenizer, target = copy.deepcopy(family[0]), family[1]
    tokenizer.chat_template = TEMPLATE.replace("<assistant>", "{% if add_generation_prompt %}<assistant>{% endif %}")
    drafter = AutoDrafter.from_pretrained(tiny_family / "pard")
    drafter.note_target(target, tokenizer, {})
    session = session_of((tokenizer, target, drafter), ["one"])
    session.run()
    assert 0 < session.last.timing.num_plain_runs < len(session.last.runs)
    assert not [warning for warning in recwarn if "was not trained" in str(warning.message)]


@pytest.mark.parametrize("end", [['"""'], []], ids=["closed", "by the end of the input"])
def test_a_message_may_have_several_lines(family, end):
    session = session_of(family, ['"""def f():', "    pass", *end])
    session.run()
    assert session.conversation.messages[0]["content"] == "def f():\n    pass"


def test_a_conversation_that_outgrows_the_context_says_so_and_can_begin_anew(family, monkeypatch):
    monkeypatch.setattr(writer, "context_length", lambda config: 40)
    session = session_of(family, ["x y z", "x y z", "/clear", "x"], max_new_tokens=200)
    session.run()
    assert "Cut where the target's context is full" in printed(session)
    assert "the target's context is 40: /clear begins a new one" in printed(session)
    assert len(answers(session)) == 1


def test_text_of_a_model_never_steers_the_terminal(family):
    tokenizer = family[0]
    hostile = "\x1b]0;title\x07a\x1b[2J\x9b31m\rb\x7f\tc\n\x08é"
    ids = tokenizer(hostile).input_ids
    # As the model writes it, token by token, into a terminal with colours and without marks.
    terminal = Console(file=io.StringIO(), force_terminal=True, color_system="standard")
    printer = RunPrinter(tokenizer, terminal, marks=False)
    for token in ids:
        printer.run([token])
    printer.end()
    shown = terminal.file.getvalue()
    assert shown == "␛]0;title␇a␛[2J\\x9b31m␍b␡\tc\n␈é\n"
    assert harmless("\ud800") == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(("is_terminal", "expected"), [(True, "␛[2J\n"), (False, "\x1b[2J\n")])
def test_what_generate_prints_steers_no_terminal_and_is_itself_in_a_pipe(family, monkeypatch, is_terminal, expected):
    out = io.StringIO()
    out.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stdout", out)
    streamer_for(family[0]).on_finalized_text("\x1b[2J", stream_end=True)
    assert out.getvalue() == expected


def test_a_long_text_is_printed_whole_whatever_its_runs(family):
    tokenizer = family[0]
    text = "  a\tb  \n\n café 日本語 😀 �" * 30
    ids, console = tokenizer(text).input_ids, Console(file=io.StringIO(), width=20)
    printer = RunPrinter(tokenizer, console, marks=False)
    for start in range(0, len(ids), 3):
        printer.run(ids[start : start + 3])
    printer.end()
    assert console.file.getvalue() == text + "\n"
    assert len(printer.text.ids) <= printer.text.MOST + 3


def test_what_plain_generate_would_have_taken_is_told_from_timed_steps():
    pace = PlainPace.of_steps([5.0, 5.1, 5.2, 5.3, 9.0], length=100)
    assert (round(pace.seconds, 6), pace.num_steps) == (0.1, 4)
    assert (pace.holds_for(150), pace.holds_for(151), pace.holds_for(66)) == (True, False, False)
    drafted = Timing(sizes=[1, 4, 4], times=[1.0, 1.2, 1.4], tau=3.0)
    assert summary(drafted, pace) == (
        "9 tokens in 1.4 s: 20.0 tokens/s, tau 3.00; plain generate 10.0 tokens/s (4 steps timed earlier): 0.8 s for what "
        "took 0.4 s"
    )
    # The drafter reads the text in the first run that is not plain generate's.
    timed_now = Timing([1, 1, 1, 3, 5], [1.0, 1.1, 1.2, 3.2, 3.3], num_plain_runs=3, tau=4.0)
    assert "11 tokens in 3.3 s: 50.0 tokens/s, tau 4.00" in summary(timed_now, pace)
    assert "timed in this answer" in summary(timed_now, pace)
    # Nothing is said of what was not measured.
    assert summary(drafted, None) == "9 tokens in 1.4 s: 20.0 tokens/s, tau 3.00"
    assert summary(Timing([1], [0.5], tau=1.0), pace) == "1 tokens in 0.5 s"
    assert PlainPace.of_steps([1.0, 2.0, 3.0], 10) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--top-p", "0.9"], "give it a temperature above 0"),
        (["--temperature", "1e9"], "expected temperature 0"),
        (["--system", "Be brief."], "a system prompt needs a chat template"),
        (["--chat-template-kwargs", "["], "--chat-template-kwargs"),
    ],
)
def test_what_can_not_be_honoured_is_an_error_before_the_chat(tiny_family, options, message):
    ended = in_process.pardraft("chat", "--target", tiny_family / "target", *options)
    assert message in ended.error


def test_a_chat_through_pipes_has_no_colours(tiny_family):
    common = ["chat", "--target", tiny_family / "target", "--dtype", "float32", "--max-new-tokens", 12]
    script = "def add(a, b):\n\xff\nmore".encode("latin-1")
    drafted = in_process.pardraft(*common, "--drafter", tiny_family / "dflash", "--runs", "--no-stats", stdin=script)
    assert drafted.code == 0
    assert "\x1b" not in drafted.out
    assert "> def add(a, b):\n|" in drafted.out
    assert "error: standard input" in drafted.out
    plain = in_process.pardraft(*common, "--no-stats", stdin=script)
    heading = "> def add(a, b):"
    assert drafted.out.replace("|", "").partition(heading)[2] == plain.out.replace("|", "").partition(heading)[2] != ""


def test_at_a_terminal_runs_are_coloured_and_lines_are_typed(family, monkeypatch):
    master, slave = pty.openpty()
    with open(slave, "r+b", buffering=0) as device, open(master, "rb+", buffering=0) as user:
        typed = io.TextIOWrapper(io.FileIO(os.dup(slave)), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", typed)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        console = Console(file=io.TextIOWrapper(device, encoding="utf-8", write_through=True))
        session = session_of(family, [], console=console, max_new_tokens=4)
        session.read_line, session.marks = typed_line, True
        user.write(b"def add(a, b):\n/quit\n")
        session.run()
        seen = os.read(master, 1 << 16).decode()
    assert "\x1b[30;42m" in seen
    assert len(answers(session)) == 1
