"""Model cards: what a drafter is, how to use it, how it was trained and what was measured, from the templates in model_cards/.

A card has parts between markers (`<!-- measured:begin -->` ...), so that a part can be renewed without touching what people wrote
around it.
"""

import functools
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..checkpoints.atomic_files import write_whole
from ..checkpoints.atomic_folders import CARD
from ..checkpoints.published import KIND_NAMES
from ..models.base import ParallelDrafter
from ..user_input.wording import counted
from .results import PLAIN, MeasuredRow, Results, rows_of

TEMPLATES = Path(__file__).parent.parent / "model_cards"
UNKNOWN_TARGET = "TARGET"
# What the Hub's model-index calls the figures that are ours to renew.
OWN_TASK = "speculative decoding"
NO_RECIPE = "Not recorded: say here how and on which text it was trained."
NO_LICENCE = "Not decided: say here under which licence it may be used."
# How the templates name the target and the drafter.
NAMED = {"target": 'from_pretrained("{}"', "repo_id": 'from_pretrained("{}"', "target_text": "| Target | {} |"}
OWN_FOLDER = re.compile(r'AutoDrafter\.from_pretrained\("[^"/]*"')
# Names of a Hub repository; what looks otherwise was a folder.
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class CardFacts:
    """What a card says that the drafter itself does not know; `None` and empty for what nobody said.

    Attributes:
        repo_id: the repository that the drafter is published in.
        base_model: the target's repository.
        target_text: what to call the target, if not by its repository's name, in Markdown.
        licence: an identifier of the Hub's list, such as "apache-2.0".
        datasets: repositories of data sets that it was trained on.
        languages: ISO codes of the text.
        recipe: how it was trained, in Markdown.
        usage: how to use it, in Markdown, if not as the template says.
        results: what was measured.
        row_names: which of the results are this drafter's; by default those that bear its repository's name or its kind's.
    """

    repo_id: str | None = None
    base_model: str | None = None
    target_text: str | None = None
    licence: str | None = None
    datasets: list[str] = field(default_factory=list)
    languages: list[str] = field(default_factory=list)
    recipe: str | None = None
    usage: str | None = None
    results: Results | None = None
    row_names: list[str] = field(default_factory=list)


def make_card(drafter: ParallelDrafter, facts: CardFacts, name: str) -> ModelCard:
    """A whole card from the template of the drafter's kind.

    Args:
        drafter: any of the four kinds.
        facts: what else there is to say.
        name: what to call it if `facts` has no repository: its folder's name.

    Raises:
        ValueError: if none of the results is this drafter's.
    """
    values = template_values(drafter, facts, name)
    body = environment().get_template(f"{drafter.config.drafter_kind}.md.jinja").render(values)
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "parallel-drafting", "hf_pardraft", kind_of(drafter)],
        model_name=short_name(facts, name),
        base_model=base_model_of(drafter, facts),
        license=facts.licence,
        datasets=facts.datasets or None,
        language=facts.languages or None,
        eval_results=eval_results(drafter, facts, name),
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}")


def update_card(card: ModelCard, drafter: ParallelDrafter, facts: CardFacts, name: str) -> ModelCard:
    """The card with what `facts` says put in its place; the rest, people's own words included, stays as it is.

    Raises what [`make_card`] raises.
    """
    values = template_values(drafter, facts, name)
    # Where a fresh card named a folder and a local target.
    before, text = template_values(drafter, CardFacts(), name), card.text
    for part, shape in NAMED.items():
        text = text.replace(shape.format(before[part]), shape.format(values[part]))
    given = {"usage": facts.usage, "recipe": facts.recipe, "licence": facts.licence, "measured": facts.results}
    for part, fact in given.items():
        if fact is not None:
            text = with_part(text, part, values[part])
    fields = {
        "base_model": facts.base_model,
        "license": facts.licence,
        "datasets": facts.datasets or None,
        "language": facts.languages or None,
        "eval_results": renewed_results(card, eval_results(drafter, facts, name)),
    }
    for key, value in fields.items():
        if value is not None:
            setattr(card.data, key, value)
    if card.data.eval_results and not card.data.model_name:
        card.data.model_name = short_name(facts, name)
    return ModelCard(f"---\n{card.data.to_yaml()}\n---\n\n{text.lstrip()}")


def with_part(text: str, part: str, content: str) -> str:
    """`text` with what stands between a part's markers replaced; appended, with a heading, if it has none."""
    begin, end = f"<!-- {part}:begin -->", f"<!-- {part}:end -->"
    marked = f"{begin}\n{content.strip()}\n{end}"
    if begin in text and end in text.split(begin, 1)[1]:
        before, rest = text.split(begin, 1)
        return before + marked + rest.split(end, 1)[1]
    return f"{text.rstrip()}\n\n## {part.capitalize()}\n\n{marked}\n"


def write_card(drafter: ParallelDrafter, folder: Path, name: str) -> None:
    """Write a fresh card into a folder: what the drafter, called `name`, itself knows."""
    save_card(make_card(drafter, CardFacts(), name), folder / CARD)


def save_card(card: ModelCard, path: Path) -> None:
    """Write a card beside `path` and put it there: a whole one or none; a card that was there is as it was after an error."""
    write_whole(path, str(card))


@functools.cache
def environment() -> Environment:
    """The cards' templates, each compiled when it is first used."""
    found = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    found.filters["figure"] = lambda value, digits: "not recorded" if value is None else f"{value:.{digits}f}"
    return found


def template_values(drafter: ParallelDrafter, facts: CardFacts, name: str) -> dict[str, Any]:
    """Everything that the templates ask for."""
    config, target = drafter.config, base_model_of(drafter, facts)
    values = {
        "config": config,
        "title": short_name(facts, name),
        "repo_id": facts.repo_id or name,
        "kind_name": KIND_NAMES[kind_of(drafter)],
        "target": target or config.target_name_or_path or UNKNOWN_TARGET,
        "target_text": facts.target_text or target_text(drafter, target),
        "depth": drafter.generation_config.num_assistant_tokens or drafter.max_draft_depth or drafter.DEFAULT_DEPTH,
        "layers": counted(config.num_hidden_layers, "layer"),
        "parameters": f"{in_thousands(drafter.num_parameters())} parameters",
        "chats": chats_text(config.chat_format),
        "chat_arguments": chat_arguments(config.chat_format),
        "recipe": facts.recipe or NO_RECIPE,
        "licence": facts.licence or NO_LICENCE,
        "results": facts.results,
        "rows": measured_rows(drafter, facts, name),
    }
    templates = environment()
    values["usage"] = (facts.usage or templates.get_template("usage.md.jinja").render(values)).strip()
    values["measured"] = templates.get_template("measured.md.jinja").render(values).strip()
    return values


# What a drafter knows about itself


def kind_of(drafter: ParallelDrafter) -> str:
    """A key of [`KIND_NAMES`]; PARD-2 counts as a kind."""
    kind = drafter.config.drafter_kind
    return "pard2" if kind == "pard" and drafter.config.spd_type == "pard2" else kind


def short_name(facts: CardFacts, name: str) -> str:
    return (facts.repo_id or name).split("/")[-1]


def base_model_of(drafter: ParallelDrafter, facts: CardFacts) -> str | None:
    """The target's repository, unless nobody knows one."""
    remembered = drafter.config.target_name_or_path
    is_repository = remembered is not None and REPOSITORY.fullmatch(remembered)
    return facts.base_model or (remembered if is_repository else None)


def target_text(drafter: ParallelDrafter, base_model: str | None) -> str:
    """The target, linked if it is on the Hub, and its revision."""
    config = drafter.config
    if base_model is None:
        family = f"a {config.target_model_type} model" if config.target_model_type else "not recorded"
        return f"`{config.target_name_or_path}` ({family})" if config.target_name_or_path else family
    revision = config.target_revision if config.target_name_or_path == base_model else None
    at = f", revision `{revision[:12]}`" if revision else ""
    return f"[{base_model}](https://huggingface.co/{base_model}){at}"


def chats_text(chats: dict[str, Any] | None) -> str:
    if chats is None:
        return "text whose chat format is not recorded, or no chats"
    arguments = ", ".join(f"{key}={value!r}" for key, value in chats["template_kwargs"].items())
    return f"chats, by the target's chat template with {arguments or 'its defaults'}"


def chat_arguments(chats: dict[str, Any] | None) -> str | None:
    """The arguments of `apply_chat_template` as source code, to go after others; `None` if it was not trained on chats."""
    return None if chats is None else "".join(f", {key}={value!r}" for key, value in chats["template_kwargs"].items())


def in_thousands(number: int) -> str:
    """A number as people say it: "1.2 million"."""
    for size, word in ((10**9, " billion"), (10**6, " million"), (10**3, " thousand")):
        if number >= size:
            return f"{number / size:.1f}{word}"
    return str(number)


# What was measured


def measured_rows(drafter: ParallelDrafter, facts: CardFacts, name: str) -> list[MeasuredRow]:
    if facts.results is None:
        return []
    own_names = [name, short_name(facts, name), facts.repo_id or name, kind_of(drafter), KIND_NAMES[kind_of(drafter)]]
    return rows_of(facts.results, facts.row_names or own_names)


def eval_results(drafter: ParallelDrafter, facts: CardFacts, name: str) -> list[EvalResult] | None:
    """The figures as the Hub's model-index has them; `None` if nothing was measured."""
    rows = [row for row in measured_rows(drafter, facts, name) if row.name != PLAIN]
    found = [
        EvalResult(
            task_type="text-generation",
            task_name=OWN_TASK,
            dataset_type="custom",
            dataset_name=facts.results.prompts,
            metric_type=metric,
            metric_name=f"{title} ({row.label})",
            metric_value=round(value, 3),
        )
        for row in rows
        for metric, title, value in (
            ("acceptance_length", "tau", row.tau),
            ("speedup", "speedup", row.speedup),
            ("tokens_per_second", "tokens/s", row.tokens_per_second),
        )
        if value is not None
    ]
    return found or None


def renewed_results(card: ModelCard, found: list[EvalResult] | None) -> list[EvalResult] | None:
    """The card's figures of other tasks, which people put there, and those `found` now; `None` if nothing was measured."""
    if found is None:
        return None
    return [result for result in card.data.eval_results or [] if result.task_name != OWN_TASK] + found


def has_measured_numbers(card: ModelCard) -> bool:
    """Whether a card's model-index has a tau or a speedup."""
    return any(
        result.metric_type in ("acceptance_length", "speedup")
        and isinstance(result.metric_value, (int, float))
        and math.isfinite(result.metric_value)
        for result in card.data.eval_results or []
    )


def card_gaps(card: ModelCard) -> list[str]:
    """What a card does not say yet, one sentence each; measured numbers come first."""
    absent = {
        "no measured numbers: measure with pardraft eval, then pardraft card FOLDER --results FILE": not has_measured_numbers(
            card
        ),
        "no target (base_model): pardraft card FOLDER --base-model REPOSITORY": not card.data.base_model,
        "no licence: pardraft card FOLDER --license IDENTIFIER": not card.data.license,
        "no data sets: pardraft card FOLDER --dataset REPOSITORY": not card.data.datasets,
        "no training recipe: pardraft card FOLDER --recipe FILE": NO_RECIPE in card.text,
        "no example to run: pardraft card FOLDER --usage FILE": "```python" not in card.text,
        "the example loads the drafter from a folder: pardraft card FOLDER --repo REPOSITORY": bool(
            OWN_FOLDER.search(card.text)
        ),
        "the example names no target: pardraft card FOLDER --base-model REPOSITORY": (
            f'from_pretrained("{UNKNOWN_TARGET}"' in card.text
        ),
    }
    return [gap for gap, is_absent in absent.items() if is_absent]
