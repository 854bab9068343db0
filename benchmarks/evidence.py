"""Which of the four papers' claims about training hold on a target of 260 thousand parameters?

    python benchmarks/evidence.py --target PATH/stories260K --training-text A.txt --prompt-text B.txt

Each setting is trained from three random seeds (first weights, order of the examples, COD's patterns, anchors) on text that the
target sampled, and then drafts for it on the beginnings of 50 other stories, greedily, one after the other: tau is the tokens
written per forward of the target. A claim holds if it does for every seed, compared seed by seed, and is undecided if the seeds
disagree. Seconds are the processor's, of one thread. What an earlier run left in `--work` is not made again, so several processes
can share the settings (`--share 1/2` and `--share 2/2`); the last call, without `--share`, compares and writes
benchmarks/results/evidence.json.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_pardraft import DartDrafter, DraftTrainer, DraftTrainingArguments, PardDrafter
from hf_pardraft.evaluation.calls import Condition
from hf_pardraft.evaluation.calls import run as run_entry
from hf_pardraft.evaluation.entries import Entry
from hf_pardraft.evaluation.measurement import padded_batch
from hf_pardraft.evaluation.report import markdown_table
from hf_pardraft.pairing.mask_token import unused_token_ids
from result_files import RESULTS, kept, save, this_machine
from stories260k import (
    EVALUATION_TOKENS,
    fresh_drafter,
    story_beginnings,
    story_parser,
    target_and_prompts,
    target_text,
)

RESULT = RESULTS / "evidence.json"
SEEDS = (0, 1, 2)
NEW_TOKENS = 100
COMMON = {
    "per_device_train_batch_size": 4,
    "weight_decay": 0.01,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.05,
    "num_anchors": 32,
    "max_length": 128,
    "draft_tokens": 8,
}
# What a run's figures depend on, of the arguments.
RUN_ARGUMENTS = ("steps", "prompts", "rows")
# As much as two cores train in an hour and a half, all together. The rates are the best of a few that were tried.
STEPS = {"PARD": 800, "DFlash": 1000, "DFlare": 1000, "DART": 700}
LEARNING_RATES = {"PARD": 3e-3, "DFlash": 1e-2, "DFlare": 1e-2, "DART": 1e-2}
FOCAL, CHAIN = "0.3*first_error", "40*chain_reward"


@dataclass(frozen=True)
class Setting:
    """What one drafter is, and how it is trained.

    Attributes:
        kind: a name of stories260k.py's drafters.
        arguments: training arguments that differ from COMMON.
        drafter: arguments of the drafter.
        depths: tokens a round at which it is measured.
    """

    kind: str
    arguments: dict[str, Any] = field(default_factory=dict)
    drafter: dict[str, Any] = field(default_factory=dict)
    depths: tuple[int, ...] = (7,)

    @property
    def draft_tokens(self) -> int:
        """Tokens a round at which settings are compared."""
        return 8 if self.kind == "PARD" else 7


def ladder(*terms: str, **arguments: Any) -> Setting:
    """A DFlash drafter with the loss of arXiv 2606.11552, eq. 13, its sums divided as the equations say."""
    objective = "+".join(("cross_entropy", *terms))
    return Setting("DFlash", {"objective": objective, "loss_reduction": "paper", **arguments})


DECAY = {"loss_gamma": 4.0}
ALL_DEPTHS = (2, 4, 6, 8, 12, 16)
SETTINGS = {
    "DFlash uniform": ladder(),
    "DFlash decay": ladder(**DECAY),
    "DFlash decay + focal": ladder(FOCAL, **DECAY),
    "DFlash decay + focal + chain": ladder(FOCAL, CHAIN, **DECAY),
    "DFlash focal": ladder(FOCAL),
    "DFlash chain": ladder(CHAIN),
    "DFlare gamma 4.5": Setting("DFlare", {"loss_gamma": 4.5}),
    "DFlare gamma 4.5 to 9.5": Setting("DFlare", {"loss_gamma": 4.5, "loss_gamma_end": 9.5}),
    "PARD COD": Setting("PARD", depths=ALL_DEPTHS),
    "PARD all masks, K = 4": Setting("PARD", {"draft_tokens": 4, "cod_retention": 1.0}, depths=(4, 8)),
    "PARD distinct masks": Setting("PARD", drafter={"distinct_masks": True}, depths=(2, 4, 6, 8)),
    "PARD COD, K = 4": Setting("PARD", {"draft_tokens": 4}, depths=ALL_DEPTHS),
    **{f"DART gamma {g}": Setting("DART", {"kl_gamma": g}) for g in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)},
    "DART unshifted": Setting("DART", {"kl_gamma": 1.0}, {"shifted": False}),
}


@dataclass(frozen=True)
class Claim:
    """That a figure of one setting is higher than one of another.

    Attributes:
        part: of the list of ablations, by its letter.
        source: where the claim is made.
        text: the claim.
        better, worse: the settings, or a number.
        figure: which figure of theirs: a key of a run's report.
        worse_figure: of the worse setting, if it is another one.
    """

    part: str
    source: str
    text: str
    better: str
    worse: str | float
    figure: str = "tau"
    worse_figure: str | None = None


UNIFORM, DECAYED, FOCUSED, CHAINED = list(SETTINGS)[:4]
LADDER, ALONE, ANNEALED, SHIFTED = (
    "arXiv 2606.11552, table 2",
    "arXiv 2606.11552, table 4",
    "arXiv 2601.19278, table 4",
    "arXiv 2601.19278, table 3",
)
FOUR, EIGHT, LONGER = "PARD COD, K = 4", "PARD COD", "arXiv 2504.18583, figure 5b"
CLAIMS = (
    Claim("a", "arXiv 2504.18583, figure 5a", "COD loses no tau (K = 4)", FOUR, "PARD all masks, K = 4", "tau 4"),
    Claim("b", LADDER, "decay helps", DECAYED, UNIFORM),
    Claim("b", LADDER, "the focal loss helps beside decay", FOCUSED, DECAYED),
    Claim("b", LADDER, "the chain reward helps beside both", CHAINED, FOCUSED),
    Claim("b", LADDER, "all three together help", CHAINED, UNIFORM),
    Claim("b", ALONE, "the focal loss alone helps", "DFlash focal", UNIFORM),
    Claim("b", ALONE, "the chain reward alone helps", "DFlash chain", UNIFORM),
    Claim("b", ALONE, "focal alone beats decay alone", "DFlash focal", DECAYED),
    Claim("b", ALONE, "chain alone beats focal alone", "DFlash chain", "DFlash focal"),
    Claim("c", ANNEALED, "annealing (gamma 0.6) beats none", "DART gamma 0.6", "DART gamma 1.0"),
    *(Claim("c", ANNEALED, f"0.6 beats {g}", "DART gamma 0.6", f"DART gamma {g}") for g in (0.5, 0.7, 0.8, 0.9)),
    Claim("c", ANNEALED, "a low gamma helps token 1", "DART gamma 0.5", "DART gamma 1.0", "accuracy_1"),
    Claim("c", ANNEALED, "a high gamma helps token 6", "DART gamma 1.0", "DART gamma 0.5", "accuracy_6"),
    Claim("c", SHIFTED, "shifted logits help token 1", "DART gamma 1.0", "DART unshifted", "accuracy_1"),
    Claim("c", SHIFTED, "and token 6", "DART gamma 1.0", "DART unshifted", "accuracy_6"),
    Claim("c", SHIFTED, "and tau", "DART gamma 1.0", "DART unshifted"),
    Claim("d", "arXiv 2606.02091, section 4.3", "a growing gamma helps", "DFlare gamma 4.5 to 9.5", "DFlare gamma 4.5"),
    Claim("e", "arXiv 2504.18583, section 1", "one drafter serves a second target", EIGHT, 1.0, "tau on the other"),
    Claim("f", "arXiv 2504.18583, section 4.3", "a shared mask beats distinct ones", EIGHT, "PARD distinct masks"),
    Claim("g", LONGER, "trained on 8: drafting 12 beats 8", EIGHT, EIGHT, "tau 12", "tau 8"),
    Claim("g", LONGER, "trained on 4: drafting 8 beats 4", FOUR, FOUR, "tau 8", "tau 4"),
    Claim("g", LONGER, "drafting 8: trained on 8 beats 4", EIGHT, FOUR, "tau 8"),
    Claim("g", LONGER, "drafting 4: trained on 8 beats 4", EIGHT, FOUR, "tau 4"),
)


def drafter_of(setting: Setting, target: PreTrainedModel, tokenizer):
    """An untrained drafter, with the shape that stories260k.py gives its kind."""
    if not setting.drafter:
        return fresh_drafter(setting.kind, target, tokenizer)
    if setting.kind == "DART":
        # Without the shift the anchor's position drafts nothing, so there is a mask for each token.
        return DartDrafter.for_target(target, draft_length=8, intermediate_size=512, **setting.drafter)
    shared = fresh_drafter(setting.kind, target, tokenizer)
    mask_token_ids = unused_token_ids(shared.config, setting.draft_tokens - 1, tokenizer)
    return PardDrafter.from_causal_lm(shared, mask_token_id=mask_token_ids, tokenizer=tokenizer)


def tau_of(target: PreTrainedModel, drafter, prompts: list[torch.LongTensor], depth: int) -> float:
    """Tokens per forward of the target, the bonus token counted, over all prompts."""
    entry, condition = Entry("", drafter, {"num_assistant_tokens": depth}), Condition(max_new_tokens=NEW_TOKENS)
    runs = [run_entry(target, entry, padded_batch([prompt]), condition) for prompt in prompts]
    rounds = [count for run in runs for count in run.tokens_per_round]
    return sum(rounds) / len(rounds)


def positions_an_example(trainer: DraftTrainer, examples: int = 256) -> float:
    """Positions that a PARD drafter computes for an example of the data set, padding left out."""
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(examples)])
    return float((batch["draft_positions"] > 0).sum()) / examples


def trainer_of(
    drafter, target: PreTrainedModel, text: Dataset, work: Path, steps: int, seed: int, options: dict[str, Any]
) -> DraftTrainer:
    """A trainer that holds 64 texts out, and says and saves nothing; `options` are training arguments besides COMMON."""
    split = text.train_test_split(test_size=64, seed=0)
    arguments = DraftTrainingArguments(
        output_dir=work / "run",
        max_steps=steps,
        seed=seed,
        logging_steps=steps,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        tau_prompts=0,
        **{**COMMON, **options},
    )
    return DraftTrainer(
        model=drafter, target=target, args=arguments, train_dataset=split["train"], eval_dataset=split["test"]
    )


def run(name: str, seed: int, target: PreTrainedModel, tokenizer, text: Dataset, arguments) -> dict[str, Any]:
    """Train one drafter and measure it; the figures by name."""
    setting = SETTINGS[name]
    set_seed(seed)
    drafter = drafter_of(setting, target, tokenizer)
    steps = arguments.steps or STEPS[setting.kind]
    options = {"learning_rate": LEARNING_RATES[setting.kind], **setting.arguments}
    trainer = trainer_of(drafter, target, text, arguments.work, steps, seed, options)
    started = time.process_time()
    trainer.train()
    seconds = time.process_time() - started
    scores = trainer.evaluate()
    report = {
        "seconds": seconds,
        "steps": steps,
        **{key.removeprefix("eval_"): value for key, value in scores.items() if key.startswith("eval_accuracy_")},
        "expected_tau": scores["eval_expected_tau"],
    }
    if setting.kind == "PARD":
        report["rows"] = positions_an_example(trainer) * steps * COMMON["per_device_train_batch_size"]
    drafter.eval()
    prompts = list(story_beginnings(arguments.prompt_text, tokenizer, arguments.prompts, EVALUATION_TOKENS).split(1))
    for depth in {*setting.depths, setting.draft_tokens}:
        report[f"tau {depth}"] = tau_of(target, drafter, prompts, depth)
    report["tau"] = report[f"tau {setting.draft_tokens}"]
    if name == "PARD COD":
        other = other_target(arguments, tokenizer, target)
        report["tau on the other"] = tau_of(other, drafter, prompts, setting.draft_tokens)
    return report


def other_target(arguments, tokenizer, target: PreTrainedModel) -> PreTrainedModel:
    """A target of 120 thousand parameters with the same tokenizer, trained on the same stories by people, and not on any text
    of the first target. Made once."""
    folder = arguments.work / "other-target"
    if not folder.exists():
        set_seed(0)
        shape = {"hidden_size": 48, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 6}
        config = LlamaConfig.from_dict({**target.config.to_dict(), **shape, "num_key_value_heads": 3, "head_dim": 8})
        model = LlamaForCausalLM(config)
        stories = arguments.training_text.read_text(encoding="utf-8").split("\n")
        ids = [tokenizer(story)["input_ids"] for story in stories if story.strip()]
        rows = [row[i : i + 128] for row in ids for i in range(0, len(row), 128)]
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=arguments.work / "other-run",
                max_steps=1500,
                per_device_train_batch_size=16,
                learning_rate=5e-3,
                warmup_steps=0.05,
                lr_scheduler_type="cosine",
                logging_steps=500,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list([{"input_ids": row} for row in rows if len(row) > 1]),
            data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        ).train()
        model.eval().save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def spread(values: list[float]) -> dict[str, Any]:
    """Mean and standard deviation of one figure of all seeds, and the figures."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {
        "mean": round(statistics.mean(values), 4),
        "deviation": round(deviation, 4),
        "seeds": [round(value, 4) for value in values],
    }


def judged(claim: Claim, reports: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """A claim beside what was measured: the difference, seed by seed, and what follows."""
    better = [report[claim.figure] for report in reports[claim.better]]
    worse = [claim.worse] * len(better)
    if isinstance(claim.worse, str):
        worse = [report[claim.worse_figure or claim.figure] for report in reports[claim.worse]]
    differences = [a - b for a, b in zip(better, worse, strict=True)]
    verdict = "undecided"
    if all(difference > 0 for difference in differences):
        verdict = "holds"
    if all(difference < 0 for difference in differences):
        verdict = "does not hold"
    figures = {"better": spread(better), "worse": spread(worse), "difference": spread(differences)}
    return {"part": claim.part, "source": claim.source, "claim": claim.text, "verdict": verdict, **figures}


def verdict_table(verdicts: list[dict[str, Any]]) -> str:
    """A line for each claim."""

    def figure(of: dict[str, Any], sign: str = "") -> str:
        return f"{of['mean']:{sign}.3f} ± {of['deviation']:.3f}"

    lines = []
    for row in verdicts:
        figures = [figure(row["better"]), figure(row["worse"]), figure(row["difference"], "+")]
        lines.append([row["part"], row["source"], row["claim"], *figures, row["verdict"]])
    headings = ["", "source", "claim", "better", "worse", "difference", ""]
    return markdown_table(headings, lines, num_words=len(headings))


def reports_of(
    runs: list[tuple[str, int]], arguments: argparse.Namespace, work: Callable[[str, int], dict[str, float]]
) -> dict[str, list[dict[str, float]]]:
    """The reports of settings, by name, each with several seeds; what was run before is read from `arguments.work`.

    With `arguments.share`, those of some runs only.
    """
    settings = {key: vars(arguments).get(key) for key in RUN_ARGUMENTS}
    first, step = map(int, (arguments.share or "1/1").split("/"))
    reports: dict[str, list[dict[str, float]]] = {}
    for name, seed in runs[first - 1 :: step]:
        log = arguments.work / f"{name}, seed {seed}.json"
        report = kept(log, {"settings": settings})
        if report is None:
            report = work(name, seed)
            log.write_text(json.dumps({**report, "settings": settings}) + "\n")
            print(name, seed, log.read_text().strip(), flush=True)
        report.pop("settings", None)
        reports.setdefault(name, []).append(report)
    return reports


def parse_arguments() -> argparse.Namespace:
    parser = story_parser(__doc__)
    parser.add_argument("--steps", type=int, help="training steps, instead of those of each kind")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME")
    parser.add_argument("--share", help="run every n-th setting only, from the m-th on: m/n")
    parser.add_argument("--work", type=Path, default=Path("evidence.work"))
    parser.add_argument("--output", type=Path, default=RESULT)
    return parser.parse_args()


def begin(arguments: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Dataset]:
    """The target, its tokenizer, and what it wrote for drafters to learn from; one thread, and no bars, from here on."""
    disable_progress_bars()
    torch.set_num_threads(1)
    arguments.work.mkdir(parents=True, exist_ok=True)
    target, tokenizer, evaluated = target_and_prompts(arguments)
    set_seed(0)
    return target, tokenizer, target_text(arguments, target, tokenizer, evaluated)


def main() -> None:
    arguments = parse_arguments()
    target, tokenizer, text = begin(arguments)
    # All settings of a seed, then the next seed: whoever stops early has all comparisons for some seeds.
    runs = [(name, seed) for seed in arguments.seeds for name in arguments.settings]
    reports = {name: [] for name in SETTINGS} | reports_of(
        runs, arguments, lambda name, seed: run(name, seed, target, tokenizer, text, arguments)
    )
    if arguments.share:
        return
    measured = {name: reports[name] for name in SETTINGS if len(reports[name]) == len(arguments.seeds)}
    verdicts = [judged(claim, measured) for claim in CLAIMS if {claim.better, claim.worse} & {*SETTINGS} <= {*measured}]
    result = {
        "command": "python benchmarks/evidence.py --target ... --training-text ... --prompt-text ...",
        "machine": this_machine(),
        "seeds": list(arguments.seeds),
        "prompts": arguments.prompts,
        "new_tokens": NEW_TOKENS,
        "arguments": COMMON,
        "claims": verdicts,
        "settings": {
            name: {
                "arguments": SETTINGS[name].arguments,
                "drafter": {"kind": SETTINGS[name].kind, **SETTINGS[name].drafter},
                **{figure: spread([report[figure] for report in found]) for figure in found[0]},
            }
            for name, found in measured.items()
        },
    }
    save(arguments.output, result, indent=1)
    print(verdict_table(verdicts))


if __name__ == "__main__":
    main()
