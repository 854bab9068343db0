"""Which score of a prefix makes the better trees: the drafter's probability, or DART's, which favours depth.

    python benchmarks/tree_scoring.py --stories PATH/stories260K --drafters PATH/stories260k.work --prompt-text STORIES.txt

Tokens a round (tau), which is a count and needs no quiet machine, of all four drafters: for stories260K with the drafters that
benchmarks/stories260k.py leaves in its work folder, on beginnings of stories, and for the shipped family on the demo's prompts;
greedy and at temperature 1, where the seeds are the same for all. Each text is written whole with every score and budget. The
result goes to benchmarks/results/tree_scoring.json: for each case the mean of tau over its texts, and in how many of them either
is ahead.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from hf_pardraft import AutoDrafter
from hf_pardraft.demo.family import SHIPPED_FAMILY, load_family
from hf_pardraft.demo.prompts import built_in_prompts
from result_files import RESULTS, public_command, save, this_machine
from stories260k import KINDS, story_beginnings

RESULT = RESULTS / "tree_scoring.json"
BUDGETS = (4, 8, 16, 32, 60)
SCORINGS = ("probability", "dart")
NEW_TOKENS, PROMPT_TOKENS = 128, 16


def taus(
    target: PreTrainedModel, drafter: Any, prompts: list[torch.Tensor], temperature: float, **settings
) -> list[float]:
    """Tau of each prompt's text."""
    found = []
    config = GenerationConfig(draft_schedule="fixed", **settings)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    for seed, prompt in enumerate(prompts):
        torch.manual_seed(seed)
        mask = torch.ones_like(prompt)
        options = {"attention_mask": mask, "assistant_model": drafter, "generation_config": config, "pad_token_id": 0}
        target.generate(prompt, max_new_tokens=NEW_TOKENS, **options, **sampling)
        stats = drafter.last_stats
        # The bonus token after the prompt is no draft's.
        found.append(sum(stats.tokens_per_round[1:]) / max(stats.rounds - 1, 1))
    return found


def compared(name: str, target: PreTrainedModel, drafter: Any, prompts: list[torch.Tensor]) -> list[dict[str, Any]]:
    """One entry for each temperature and budget."""
    entries = []
    for temperature in (0.0, 1.0):
        for budget in BUDGETS:
            by_scoring = {
                scoring: taus(target, drafter, prompts, temperature, tree_budget=budget, tree_scoring=scoring)
                for scoring in SCORINGS
            }
            plain, dart = by_scoring.values()
            entry = {"drafter": name, "temperature": temperature, "budget": budget}
            entry |= {scoring: round(statistics.mean(values), 3) for scoring, values in by_scoring.items()}
            entry["dart_ahead"] = sum(b > a for a, b in zip(plain, dart, strict=True))
            entry["dart_behind"] = sum(b < a for a, b in zip(plain, dart, strict=True))
            print(entry, flush=True)
            entries.append(entry)
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stories", type=Path, required=True, help="stories260K as a Transformers folder")
    parser.add_argument("--drafters", type=Path, required=True, help="work folder of benchmarks/stories260k.py")
    parser.add_argument("--prompt-text", type=Path, required=True, help="stories to take beginnings from")
    parser.add_argument("--prompts", type=int, default=40, help="of the stories [40]")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    target = AutoModelForCausalLM.from_pretrained(arguments.stories, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(arguments.stories)
    beginnings = story_beginnings(arguments.prompt_text, tokenizer, arguments.prompts, PROMPT_TOKENS)
    prompts = [beginning[None] for beginning in beginnings]
    trained = {kind: AutoDrafter.from_pretrained(arguments.drafters / kind) for kind in KINDS}
    family = load_family(SHIPPED_FAMILY)
    tokens = [family.tokenizer(prompt, return_tensors="pt").input_ids for prompt in built_in_prompts()]
    cases = [(f"stories260K/{kind}", target, drafter, prompts) for kind, drafter in trained.items()]
    cases += [(f"family/{kind}", family.target, drafter, tokens) for kind, drafter in family.drafters.items()]
    facts, entries = {"machine": this_machine(), "command": public_command(), "new_tokens": NEW_TOKENS}, []
    for case in cases:
        entries += compared(*case)
        save(arguments.output, {**facts, "entries": entries})


if __name__ == "__main__":
    main()
