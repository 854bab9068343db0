"""What two defaults of training are worth on a target of 260 thousand parameters: how a fresh drafter starts, and what the
left_to_right recipe divides its loss by.

    python benchmarks/training_defaults.py --target PATH/stories260K --training-text A.txt --prompt-text B.txt

Drafters of one layer learn from text that the target sampled, with the settings of evidence.py, each from a few random seeds. A
fresh drafter, and one with the first weights that fresh drafters had before (a last norm of ones, the target's
`initializer_range`), are measured at the start and after some steps. The two divisors are measured with the recipe's own block
size, weights and coefficients. Measured is the loss of 64 held-out texts, and tau: the tokens that a text gets per forward of the
target, on the beginnings of 50 other stories, greedily, always to the full depth. What an earlier run left in `--work` is not
made again, so several processes can share the runs (`--share 1/2` and `--share 2/2`); the last call, without `--share`, writes
benchmarks/results/training_defaults.json.
"""

import argparse
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, TrainerCallback, set_seed

from evidence import COMMON, begin, reports_of, spread, trainer_of
from hf_pardraft import DFlareDrafter, DFlashDrafter, DraftTrainer
from hf_pardraft.evaluation.calls import Condition
from hf_pardraft.evaluation.calls import run as run_entry
from hf_pardraft.evaluation.entries import Entry
from hf_pardraft.training.progress import Tables
from result_files import RESULTS, save, this_machine
from stories260k import EVALUATION_TOKENS, story_beginnings, story_parser

RESULT = RESULTS / "training_defaults.json"
NEW_TOKENS = 100
LEARNING_RATE = 1e-2
KINDS = {"DFlash": DFlashDrafter, "DFlare": DFlareDrafter}


@dataclass(frozen=True)
class Setting:
    """What one drafter is, and how it is trained.

    Attributes:
        kind: of drafter.
        seeds: each a run.
        marks: steps after which it is measured; training ends with the last.
        block_size: tokens a block, the anchor counted.
        as_before: whether it starts with the weights that fresh drafters had before.
        arguments: training arguments that differ from evidence.py's.
    """

    kind: str
    seeds: tuple[int, ...]
    marks: tuple[int, ...] = (100, 300, 1000)
    block_size: int = 8
    as_before: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


def recipe(reduction: str) -> Setting:
    """The recipe's block size, objective and decay; fewer anchors, for there are twice as many positions in a block."""
    objective = "cross_entropy+0.3*first_error+40*chain_reward"
    arguments = {"objective": objective, "loss_gamma": 10.0, "loss_reduction": reduction, "num_anchors": 16}
    return Setting("DFlash", (0, 1, 2), (700,), 16, arguments=arguments)


# With decay, whose seeds differ least (evidence.json).
DECAY = {"loss_gamma": 4.0, "num_anchors": 16}
STARTS = {
    f"{kind}{suffix}": Setting(kind, (0, 1), as_before=bool(suffix), arguments=DECAY)
    for suffix in (", before", "")
    for kind in KINDS
}
DIVISORS = {f"divided by {divisor}": recipe(divisor) for divisor in ("weight_sum", "paper")}
SETTINGS = {**STARTS, **DIVISORS}


def drafter_of(setting: Setting, target: PreTrainedModel, tokenizer):
    """An untrained drafter of one layer."""
    overrides = {"initializer_range": target.config.initializer_range} if setting.as_before else {}
    drafter = KINDS[setting.kind].for_target(
        target,
        num_layers=1,
        block_size=setting.block_size,
        tokenizer=tokenizer,
        target_layer_ids=[0, 1, 2, 3],
        intermediate_size=512,
        **overrides,
    )
    if setting.as_before:
        torch.nn.init.ones_(drafter.norm.weight)
    return drafter


def tau_of(target: PreTrainedModel, drafter, prompts: torch.LongTensor) -> float:
    """Tokens that a text gets per forward of the target, the bonus token counted; all prompts as one batch."""
    settings = {"num_assistant_tokens": drafter.max_draft_depth, "draft_schedule": "fixed"}
    batch = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}
    entry, condition = Entry("", drafter, settings), Condition(len(prompts), max_new_tokens=NEW_TOKENS)
    counts = run_entry(target, entry, batch, condition).tokens_per_round
    return sum(counts) / len(counts)


class MeasuredAt(TrainerCallback):
    """Measures after some of the steps."""

    def __init__(self, trainer: DraftTrainer, marks: tuple[int, ...], prompts: torch.LongTensor) -> None:
        self.trainer, self.marks, self.prompts = trainer, marks, prompts
        self.figures: dict[str, float] = {}

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step in self.marks:
            self.measure(state.global_step)

    def measure(self, step: int) -> None:
        """Loss and tau of the drafter as it stands."""
        drafter = self.trainer.drafter.eval()
        self.figures[f"loss {step}"] = self.trainer.evaluate()["eval_loss"]
        self.figures[f"tau {step}"] = tau_of(self.trainer.target, drafter, self.prompts)
        drafter.train()


def run(setting: Setting, seed: int, target: PreTrainedModel, tokenizer, text: Dataset, arguments) -> dict[str, float]:
    """Train one drafter and measure it; the figures by name."""
    set_seed(seed)
    drafter = drafter_of(setting, target, tokenizer)
    options = {"learning_rate": LEARNING_RATE, **setting.arguments}
    trainer = trainer_of(drafter, target, text, arguments.work, setting.marks[-1], seed, options)
    trainer.remove_callback(Tables)
    prompts = story_beginnings(arguments.prompt_text, tokenizer, arguments.prompts, EVALUATION_TOKENS)
    measured = MeasuredAt(trainer, setting.marks, prompts)
    measured.figures["loss 0"] = trainer.evaluate()["eval_loss"]
    trainer.add_callback(measured)
    started = time.process_time()
    trainer.train()
    return {**measured.figures, "seconds": time.process_time() - started}


def table(results: dict[str, dict[str, Any]]) -> str:
    """A line for each setting."""
    lines = []
    for name, figures in results.items():
        cells = [f"{figure} {of['mean']:.3f} ± {of['deviation']:.3f}" for figure, of in figures.items()]
        lines.append(f"{name}: {', '.join(cells)}")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = story_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME")
    parser.add_argument("--share", help="run every n-th run only, from the m-th on: m/n")
    parser.add_argument("--work", type=Path, default=Path("training_defaults.work"))
    parser.add_argument("--output", type=Path, default=RESULT)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    target, tokenizer, text = begin(arguments)
    runs = [(name, seed) for seed in arguments.seeds for name in arguments.settings if seed in SETTINGS[name].seeds]
    reports = reports_of(
        runs, arguments, lambda name, seed: run(SETTINGS[name], seed, target, tokenizer, text, arguments)
    )
    if arguments.share:
        return
    measured = {
        name: {figure: spread([report[figure] for report in found]) for figure in found[0]}
        for name, found in reports.items()
    }
    result = {
        "command": "python benchmarks/training_defaults.py --target ... --training-text ... --prompt-text ...",
        "machine": this_machine(),
        "ln_vocabulary": round(math.log(target.config.vocab_size), 4),
        "prompts": arguments.prompts,
        "new_tokens": NEW_TOKENS,
        "arguments": {**COMMON, "learning_rate": LEARNING_RATE},
        "settings": {
            name: {
                "seeds": [seed for seed in SETTINGS[name].seeds if seed in arguments.seeds],
                "block_size": SETTINGS[name].block_size,
                "steps": SETTINGS[name].marks[-1],
                "arguments": SETTINGS[name].arguments,
                **figures,
            }
            for name, figures in measured.items()
        },
    }
    save(arguments.output, result, indent=1)
    print(table(measured))


if __name__ == "__main__":
    main()
