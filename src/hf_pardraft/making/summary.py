"""What came of a run, for its user and for the drafter's card, and what to do for more."""

import json
from dataclasses import replace
from typing import Any

from ..pairing.remembered import own_name
from ..user_input.wording import counted
from .commands import Commands
from .plan import TEXT_SHARE, EvaluationPlan, TrainingPlan
from .runner import as_typed
from .settings import MakeSettings
from .state import MakeState
from .text import Text

# How many times the hours are proposed to somebody who wants a better drafter.
MORE = 4
STAGES = {
    "text": "writing text",
    "probe": "trying steps",
    "states": "storing hidden states",
    "training": "training",
    "evaluation": "measuring",
}


def introduction(commands: Commands, state: MakeState) -> str:
    """What is about to be done, or to go on."""
    settings = commands.settings
    size = "settings for small targets and CPUs" if commands.is_small else "published settings"
    text = (
        f"A {settings.kind_name} drafter for {settings.target_name} in about {told(settings.seconds)}, {state.dtype}, {size}: "
        f"{told(TEXT_SHARE * settings.seconds)} for text, then training, then measuring."
    )
    return f"{text} {told(state.spent)} were spent before; going on." if state.spent else text


def summary(commands: Commands, state: MakeState, results: dict[str, Any]) -> list[str]:
    """What was reached, what it took, and what to do for more."""
    folder, settings = commands.folder, commands.settings
    kind = settings.kind_name
    plain = next(row for row in results["rows"] if row["name"] == "plain")
    drafted = next(row for row in results["rows"] if row["name"] == kind)
    text, training = state.decided["text"], state.decided["training"]
    drafter = str(folder.drafter)
    lines = [
        f"{folder.drafter}: a {kind} drafter for {settings.target_name}",
        f"  tau {drafted['tau']:.2f}, {drafted['speedup']:.2f}x plain generate ({drafted['tokens_per_second']:.1f} rather than "
        f"{plain['tokens_per_second']:.1f} tokens/s), on {counted(results['prompts']['count'], 'held-out prompt')}",
    ]
    accepted = drafted.get("acceptance_by_position")
    if accepted:
        lines.append(f"  accepted by position: {' '.join(f'{100 * share:.0f}' for share in accepted)} %")
    lines += [
        f"  learned from {text['train']} dialogues ({text['tokens']} tokens with {text['held_out']} held out), "
        f"{counted(training['steps'], 'step')}, {training['epochs']:.1f} epochs",
        f"  took {told_times(state)}",
        "Use it:",
        f"  {as_typed(try_it(settings, drafter, results['prompts']['chat_template']))}",
        f"  {as_typed(['push', drafter, f'YOU/{folder.drafter.name}'])}",
        "For more:",
    ]
    return [*lines, *what_to_do_for_more(commands, state)]


def try_it(settings: MakeSettings, drafter: str, is_of_chats: bool) -> list[str]:
    """A command that writes with the drafter, in the form of text that it learned."""
    words = ["chat" if is_of_chats else "generate", "--target", settings.target, "--drafter", drafter]
    if not is_of_chats:
        words += ["--stats", "Tell me a story."]
    elif settings.chat_template_kwargs:
        words += ["--chat-template-kwargs", json.dumps(settings.chat_template_kwargs)]
    return [*words, *(["--trust-remote-code"] if settings.trust_remote_code else [])]


def what_to_do_for_more(commands: Commands, state: MakeState) -> list[str]:
    """A command for a better drafter, and what it gives: more text, more steps, or both."""
    settings, is_capped = commands.settings, state.decided["training"]["is_capped"]
    again = replace(settings, hours=float(f"{MORE * settings.hours:.3g}"))
    if not is_capped:
        reason = "more text and more steps"
    elif state.decided["text"].get("is_all"):
        again = replace(settings, dataset="MORE_PROMPTS")
        reason = f"all prompts of {settings.dataset} are answered, and their text was too little for all of the time"
    else:
        reason = "the text was too little for all of the time: let the target write more of it"
    return [f"  {as_typed(make_command(again, f'{commands.folder.path}-longer'))}", f"  ({reason})"]


def make_command(settings: MakeSettings, output: str) -> list[str]:
    """The words of the `pardraft make` that asks for this, what it does by default left out."""
    words = ["make", "--target", settings.target, "--kind", settings.kind, "--hours", f"{settings.hours:g}"]
    for name, value in settings.as_json().items():
        if name in ("target", "kind", "hours") or value == getattr(MakeSettings("any"), name):
            continue
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(option if value else option.replace("--", "--no-"))
        else:
            words += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    return [*words, "--output", output]


def told_times(state: MakeState) -> str:
    """Hours or minutes by stage, and together."""
    parts = [f"{told(state.seconds[name])} {what}" for name, what in STAGES.items() if name in state.seconds]
    return f"{told(state.spent)}: {', '.join(parts)}"


def told(seconds: float) -> str:
    """A time in the unit that suits it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def recipe_text(commands: Commands, state: MakeState) -> str:
    """How the drafter came about, in Markdown, without the names of local folders."""
    decided = state.decided
    text, training = decided["text"], decided["training"]
    step = counted(commands.examples_per_step, "dialogue")
    if commands.recipe.get("packing"):
        step = f"{counted(commands.examples_per_step, 'example')} of {commands.recipe['max_length']} tokens"
    source = "Prompts and answers were" if commands.settings.dataset is None else "Answers to given prompts were"
    stored = decided.get("stored_states", False)
    written = Text(commands, state)
    run = [
        *written.all_commands(),
        *([commands.cache_features(commands.folder.states)] if stored else []),
        commands.train(TrainingPlan(**training), resume=False, stored_states=stored),
        commands.eval(EvaluationPlan(**decided["evaluation"]), written.has_plain_prompts()),
    ]
    typed = "\n".join([*files_without_command(commands, state), *(public_command(commands, words) for words in run)])
    return (
        f"Made by `pardraft make` in {told_times(state)}. {source} written by the target: {text['train']} dialogues to learn "
        f"from, {text['held_out']} held out, {text['tokens']} tokens. Trained for {counted(training['steps'], 'step')} of "
        f"{step}, {training['epochs']:.1f} epochs. The commands, one after another:\n\n"
        f"```bash\n{typed}\n```\n"
    )


def files_without_command(commands: Commands, state: MakeState) -> list[str]:
    """What the commands read and none of them writes, as comments."""
    text, settings = state.decided["text"], commands.settings
    files = []
    if settings.dataset is not None:
        files.append("text/prompts-*.jsonl: the given prompts, drawn without replacement")
    held_out = counted(text["held_out"], "dialogue")
    files.append(f"text/held-out.jsonl: {held_out} of what is written; text/train.jsonl: those with other prompts")
    if settings.kind == "pard" and settings.base is None:
        files.append("base: the target with fewer layers, as hf_pardraft.pairing.cut_down.cut_down_copy makes it")
    return [f"# {line}" for line in files]


def public_command(commands: Commands, words: list[str]) -> str:
    """A command as others may read it: models by their own names, files from the run's folder on."""
    settings, folder = commands.settings, f"{commands.folder.path}/"
    names = {settings.target: settings.target_name}
    if settings.base is not None:
        names.setdefault(settings.base, own_name(settings.base))
    return as_typed([names.get(word) or inside(folder, word) for word in words])


def inside(folder: str, word: str) -> str:
    """A word of a command, `name=path` perhaps, with the path from a folder on."""
    name, has_name, path = word.rpartition("=")
    return f"{name}{has_name}{path.removeprefix(folder)}"
