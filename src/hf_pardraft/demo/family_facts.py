"""What a demo family's own records say about its drafters, for their model cards."""

from pathlib import Path
from typing import Any

from ..hub.cards import CardFacts
from ..user_input.files import read_json
from .family import DRAFTER_NAMES

RECORD = "family.json"
ORGANISATION = "hf-pardraft"
USAGE = """```bash
pip install hf-pardraft
pardraft demo   # every drafter of the family beside plain generate
```

The family is shipped with the package:

```python
from hf_pardraft.demo.family import SHIPPED_FAMILY, load_family

family = load_family(SHIPPED_FAMILY)
drafter = family.drafters["{name}"]
inputs = family.tokenizer("def heappush(heap, item):", return_tensors="pt")
output = family.target.generate(**inputs, assistant_model=drafter, max_new_tokens=64)
print(family.tokenizer.decode(output[0]))
print(f"{{drafter.last_stats.tau:.2f}} tokens per forward of the target")
```"""
RECIPE = """Target: a Qwen3 of 3.2 million weights, trained here on the source of Python's standard library ({files} files,
{characters} characters) and then on six modules of it until it knew them by heart.

Drafter: it learned from {rows} rows, {tokens} tokens in all, that the target itself wrote. Training took {seconds} seconds.
Command: `{command}`; machine: {machine}.

On text held out from training: {held_out}."""


def family_facts(folder: Path) -> CardFacts | None:
    """What the record beside a drafter's folder says of it; `None` if it is no drafter of a demo family.

    Raises:
        ValueError: if the record does not tell how the drafter was trained.
    """
    record = folder.resolve().parent / RECORD
    kind = folder.resolve().name
    if kind not in DRAFTER_NAMES or not record.is_file():
        return None
    family = read_json(record)
    if not isinstance(family, dict) or kind not in family:
        raise ValueError(f"{record} has no entry {kind!r}: train the family's drafter with examples/train_demo.py")
    return CardFacts(
        repo_id=f"{ORGANISATION}/demo-{kind}",
        base_model=f"{ORGANISATION}/demo-target",
        target_text="the family's own, shipped with the package (`hf_pardraft/demo/family/target`) and not on the Hub",
        licence="apache-2.0",
        languages=["code"],
        recipe=recipe(family, family[kind]),
        usage=USAGE.format(name=DRAFTER_NAMES[kind]),
        row_names=[DRAFTER_NAMES[kind]],
    )


def recipe(family: dict[str, Any], own: dict[str, Any]) -> str:
    held_out = {"held_out_expected_tau": "expected tau", "held_out_accuracy_1": "accuracy of the first drafted token"}
    return RECIPE.format(
        files=family["tokenizer"]["files"],
        characters=family["tokenizer"]["characters"],
        rows=family["text"]["rows"],
        tokens=family["text"]["tokens"],
        seconds=round(own["seconds"]),
        command=family["command"],
        machine=family["machine"],
        held_out=", ".join(f"{title} {own[key]}" for key, title in held_out.items() if key in own),
    )
