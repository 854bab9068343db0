"""Which of the papers' claims about training hold on a real language model, after a few minutes of training each?

    python benchmarks/smollm2_claims.py --target SMOLLM2 --text own.jsonl --data DATA --features states

Losses are compared as the end of a training: each run goes on with the DFlash drafter in drafters/, which learned the target's
law. All others start from the target's own layers (smollm2_start.py). Runs that are compared learn the same text for the same
number of steps, are evaluated on held-out dialogues (accuracy by position and expected tau, which claims are about), and draft
for the first turns of the papers' benchmarks, greedily, as a chain and as a tree of 16. What is made stays in `--work`, and is
not made again; what is there is written to benchmarks/results/smollm2_claims.json. With `--features`, hidden states of `pardraft
cache-features` (the taps of all drafters, and the last state) serve all runs but PARD's.

Whether the target's own answers teach more than others' is asked with the same questions answered by both: GSM8K's, by its
authors (`--gsm8k`) and by the target (`--gsm8k-regenerated`, which `pardraft regenerate` makes of the former). Counted is what
is drafted for the benchmarks' prompts, since each run's held-out text is of its own kind.

What a training of minutes gains from choices that no paper decides (learning rate, gamma, blocks, taps, layers, and text that
others wrote before the target's own, `--other-text`) is asked with a DFlash drafter that begins as the target's layers.

A claim holds if it does for every seed, and is undecided if the seeds disagree; one seed alone decides nothing.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from evidence import Claim, judged, verdict_table
from hf_pardraft import AutoDrafter
from hf_pardraft.evaluation.calls import Condition
from hf_pardraft.evaluation.entries import Entry
from result_files import RESULTS, kept, public_command, save, this_machine
from smollm2_cases import BENCHMARKS, Way, load_all, prompts_of, setting_of
from smollm2_measure import counted
from smollm2_start import save_start
from smollm2_training import read_run

RESULT = RESULTS / "smollm2_claims.json"
TRAINED = Path(__file__).parent.parent / "drafters" / "SmolLM2-135M-Instruct-DFlash"
TREE_BUDGET, NEW_TOKENS, BLOCK_STEPS, PARD_STEPS = 16, 64, 300, 150
COMMON = {
    "max_length": 512,
    "packing": "true",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "eval_size": 16,
    "tau_prompts": 0,
    "warmup_steps": 40,
    "lr_scheduler_type": "cosine",
    "learning_rate": 1e-3,
    "max_grad_norm": 1.0,
    "draft_vocab_size": 8192,
    "logging_steps": 50,
    "save_strategy": "no",
    "use_cpu": "true",
    "disable_tqdm": "true",
}
BLOCKS = {"num_anchors": 128, "loss_reduction": "weight_sum"}
FOCAL, CHAIN, GAMMA = "0.3*first_error", "40*chain_reward", 3.0


@dataclass(frozen=True)
class Setting:
    """What one drafter is, and how it is trained.

    Attributes:
        recipe: of `pardraft train`.
        kind: of the drafter.
        arguments: options of `pardraft train` that differ from COMMON.
        fields: of the drafter's configuration that differ from smollm2_start.py's.
        goes_on: whether it goes on with the trained drafter.
        text: the argument that names what it learns from.
        before: the argument that names what it learns from for as many steps before that, if anything.
    """

    recipe: str
    kind: str
    arguments: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    goes_on: bool = False
    text: str = "text"
    before: str = ""


def ending(objective: str, gamma: float | None = None) -> Setting:
    """The end of a DFlash drafter's training, with such a loss."""
    arguments = {**BLOCKS, "objective": objective, "loss_gamma": gamma, "learning_rate": 3e-4, "draft_vocab_size": None}
    return Setting("left_to_right", "dflash", arguments, goes_on=True)


def fused(num_layers: int, **fields: Any) -> Setting:
    """A DFlare drafter with such a fusion."""
    arguments = {**BLOCKS, "objective": "forward_kl", "loss_gamma": GAMMA}
    return Setting("dflare", "dflare", arguments, {"num_layers": num_layers, **fields})


SETTINGS = {
    "DFlash uniform": ending("cross_entropy"),
    "DFlash decay": ending("cross_entropy", GAMMA),
    "DFlash all three": ending(f"cross_entropy+{FOCAL}+{CHAIN}", GAMMA),
    "DFlash focal": ending(f"cross_entropy+{FOCAL}"),
    "DFlash chain": ending(f"cross_entropy+{CHAIN}"),
    "DFlash law": ending("forward_kl", GAMMA),
    **{
        f"DFlare {name}, {layers} layers": fused(layers, **fields)
        for layers in (2, 4)
        for name, fields in {
            "by layer": {},
            "one projection": {"fusion": "fc"},
            "by layer and projection": {"fusion_fc": True},
        }.items()
    },
    "DART shifted": Setting("dart", "dart", {"num_anchors": 128}),
    "DART unshifted": Setting("dart", "dart", {"num_anchors": 128}, {"shifted": False}),
    "PARD COD": Setting("pard", "pard", {"draft_tokens": 6, "learning_rate": 5e-4}),
    "PARD all masks": Setting("pard", "pard", {"draft_tokens": 6, "learning_rate": 5e-4, "cod_retention": 1.0}),
}
# Who answers the questions of GSM8K, and the argument that names the answers.
ANSWERED = {"GSM8K's answers": "gsm8k", "the target's answers": "gsm8k_regenerated"}
SETTINGS |= {
    f"{name}, {answers}": replace(SETTINGS[name], text=text)
    for name in ("PARD COD", "DFlash decay")
    for answers, text in ANSWERED.items()
}


def begun(text: str = "text", before: str = "", fields: dict[str, Any] | None = None, **arguments: Any) -> Setting:
    """The beginning of a DFlash drafter's training, from the target's layers, with what differs from the first one of these.

    All of them propose the tokens that the trained one does, whatever they learn from.
    """
    arguments = {**BLOCKS, "objective": "forward_kl", "loss_gamma": GAMMA, "draft_vocab_size": None, **arguments}
    return Setting("left_to_right", "dflash", arguments, fields or {}, text=text, before=before)


# What a short training gains from each choice. No paper claims anything of these.
SETTINGS |= {
    "DFlash from layers": begun(),
    "DFlash from layers, others' text, then own": begun(before="other_text"),
    "DFlash from layers, own text, then own": begun(before="text"),
    "DFlash from layers, others' text": begun("other_text"),
    "DFlash from layers, learning rate 3e-4": begun(learning_rate=3e-4),
    "DFlash from layers, learning rate 3e-3": begun(learning_rate=3e-3),
    "DFlash from layers, 3 taps": begun(fields={"target_layer_ids": [1, 17, 28]}),
    "DFlash from layers, 8 taps": begun(fields={"target_layer_ids": [1, 5, 9, 13, 17, 21, 25, 28]}),
    "DFlash from layers, blocks of 4": begun(fields={"block_size": 4}),
    "DFlash from layers, blocks of 16": begun(fields={"block_size": 16}),
    "DFlash from layers, cross-entropy": begun(objective="cross_entropy"),
    "DFlash from layers, gamma 1.5": begun(loss_gamma=1.5),
    "DFlash from layers, gamma 6": begun(loss_gamma=6.0),
    "DFlash from layers, 1 layer": begun(fields={"num_layers": 1}),
    "DFlash from layers, 4 layers": begun(fields={"num_layers": 4}),
}
LOSSES, ALONE, FUSION = "arXiv 2606.11552, table 2", "arXiv 2606.11552, table 4", "arXiv 2606.02091, section 4.1"
CLAIMS = (
    Claim("trees", LOSSES, "the three losses help trees, too", "DFlash all three", "DFlash uniform", "tree_tau"),
    Claim("losses", LOSSES, "decay helps", "DFlash decay", "DFlash uniform"),
    Claim("losses", LOSSES, "all three together help", "DFlash all three", "DFlash uniform"),
    Claim("losses", LOSSES, "and more than decay", "DFlash all three", "DFlash decay"),
    Claim("losses", ALONE, "the focal loss alone helps", "DFlash focal", "DFlash uniform"),
    Claim("losses", ALONE, "the chain reward alone helps", "DFlash chain", "DFlash uniform"),
    Claim("losses", "ours", "the target's law beats its text", "DFlash law", "DFlash decay"),
    *(
        Claim(
            "fusion",
            FUSION,
            f"by layer beats one projection, {layers} layers",
            f"DFlare by layer, {layers} layers",
            f"DFlare one projection, {layers} layers",
        )
        for layers in (2, 4)
    ),
    *(
        Claim(
            "fusion",
            "arXiv 2606.02091",
            f"a projection after the sum helps, {layers} layers",
            f"DFlare by layer and projection, {layers} layers",
            f"DFlare by layer, {layers} layers",
        )
        for layers in (2, 4)
    ),
    Claim("shift", "arXiv 2601.19278, table 3", "shifted logits help", "DART shifted", "DART unshifted"),
    Claim("COD", "arXiv 2504.18583, figure 5a", "COD loses nothing", "PARD COD", "PARD all masks"),
    *(
        Claim(
            "text",
            "arXiv 2504.18583, appendix",
            f"the target's own answers teach more, {name.split()[0]}",
            f"{name}, the target's answers",
            f"{name}, GSM8K's answers",
            "chain_tau",
        )
        for name in ("PARD COD", "DFlash decay")
    ),
)


def steps_of(setting: Setting, arguments: argparse.Namespace) -> int:
    """Training steps of a run."""
    return arguments.steps or (PARD_STEPS if setting.kind == "pard" else BLOCK_STEPS)


def train(setting: Setting, seed: int, arguments: argparse.Namespace, output: Path) -> dict[str, Any]:
    """Train a drafter into `output` with `pardraft train`; what its evaluation says, and what it took."""
    start = TRAINED if setting.goes_on else output.with_name(output.name + ", start")
    if setting.before:
        train(replace(setting, text=setting.before, before=""), seed, arguments, start)
    elif not setting.goes_on:
        is_counted = setting.arguments.get("draft_vocab_size", COMMON["draft_vocab_size"])
        vocabulary = None if is_counted else AutoDrafter.from_pretrained(TRAINED).draft_token_ids
        save_start(setting.kind, str(arguments.target), start, vocabulary, **setting.fields)
    options = {
        **COMMON,
        **setting.arguments,
        "target_dtype": arguments.dtype,
        "bf16": str(arguments.dtype == "bfloat16").lower(),
        "recipe": setting.recipe,
        "target": arguments.target,
        "dataset": vars(arguments)[setting.text],
        "output": output,
        "seed": seed,
        "max_steps": steps_of(setting, arguments),
        ("base" if setting.kind == "pard" else "drafter"): start,
    }
    if arguments.features and setting.kind != "pard" and setting.text == "text":
        options["features_folder"] = arguments.features
    words = [
        word
        for name, value in options.items()
        if value is not None or name == "loss_gamma"
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    command = [sys.executable, "-m", "hf_pardraft", "train", *words, "--overwrite-output"]
    with output.with_suffix(".log").open("w", encoding="utf-8") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    if not setting.goes_on:
        shutil.rmtree(start)
    about = read_run(output)
    tau = about["evaluation"].pop("expected_tau")
    facts = {"dtype": arguments.dtype, "steps": about["steps"], "seconds": about["seconds"]}
    return {"tau": tau, **facts, **about["evaluation"]}


def decoded(drafter: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """tau of chains and of trees, over the prompts of all benchmarks."""
    asked = SimpleNamespace(
        drafters=drafter,
        names=None,
        target=arguments.target,
        data=arguments.data,
        limit=arguments.limit,
        max_new_tokens=NEW_TOKENS,
    )
    models = load_all(asked, arguments.dtype)
    prompts = [prompt for benchmark in BENCHMARKS for prompt in prompts_of(benchmark, models, asked)]
    ((name, drafter),) = models.drafters.items()
    ways = [Way(Entry(way, drafter, setting_of(way, TREE_BUDGET)), way, name) for way in ("chain", "tree")]
    condition = Condition(max_new_tokens=NEW_TOKENS, batch_size=len(prompts))
    chain, tree = (rows[0]["tau"] for rows in counted(models, ways, prompts, condition))
    taus = {"chain_tau": round(chain, 3), "tree_tau": round(tree, 3)}
    return {**taus, "tree_gain": round(tree / chain, 3), "prompts": len(prompts)}


def run(name: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run's report; what an earlier command made is read."""
    file = arguments.work / f"{name}, seed {seed}.json"
    settings = {"dtype": arguments.dtype, "steps": steps_of(SETTINGS[name], arguments), "limit": arguments.limit}
    report = kept(file, settings)
    if report is None:
        output, started = arguments.work / f"{name}, seed {seed}", time.monotonic()
        report = train(SETTINGS[name], seed, arguments, output)
        report |= decoded(output, arguments) | settings
        shutil.rmtree(output)
        file.write_text(json.dumps(report) + "\n", encoding="utf-8")
        print(f"{name}, seed {seed}: {time.monotonic() - started:.0f} s, {report}", flush=True)
    return report


def kept_reports(work: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """All reports that this command and earlier ones made, by setting and seed."""
    reports: dict[str, dict[int, dict[str, Any]]] = {}
    for name in SETTINGS:
        files = {int(file.stem.rsplit(" ", 1)[1]): file for file in work.glob(f"{name}, seed *.json")}
        if files:
            reports[name] = {seed: json.loads(files[seed].read_text(encoding="utf-8")) for seed in sorted(files)}
    return reports


def judged_alike(claim: Claim, reports: dict[str, dict[int, dict[str, Any]]]) -> dict[str, Any]:
    """A claim, by the seeds that both of its settings were run with."""
    seeds = sorted({*reports[claim.better]} & {*reports[claim.worse]})
    of_seeds = {name: [reports[name][seed] for seed in seeds] for name in (claim.better, claim.worse)}
    verdict = judged(claim, of_seeds)
    return {**verdict, "verdict": f"{verdict['verdict']} for one seed"} if len(seeds) == 1 else verdict


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", type=Path, required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument(
        "--text", type=Path, required=True, help="the target's own answers, as `pardraft regenerate` writes them"
    )
    parser.add_argument("--gsm8k", type=Path, help="questions of GSM8K with its own answers")
    parser.add_argument("--gsm8k-regenerated", type=Path, help="the same questions with the target's answers")
    parser.add_argument(
        "--other-text", type=Path, help="text of any kind that the target did not write, as rows of text"
    )
    parser.add_argument("--data", type=Path, help="folder of the benchmarks' files; by default they come from the Hub")
    parser.add_argument("--features", type=Path, help="folder of `pardraft cache-features`")
    parser.add_argument(
        "--settings", nargs="+", choices=SETTINGS, metavar="NAME", help="by default all that there is text for"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, help="training steps, instead of those of each kind")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--limit", type=int, default=2, help="prompts of a benchmark")
    parser.add_argument("--work", type=Path, default=Path("smollm2_claims.work"))
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    if arguments.settings is None:
        there = {"", *(name for name, value in vars(arguments).items() if value)}
        arguments.settings = [name for name, each in SETTINGS.items() if {each.text, each.before} <= there]
    asked = {text for name in arguments.settings for text in (SETTINGS[name].text, SETTINGS[name].before) if text}
    missing = {text for text in asked if not vars(arguments)[text]}
    if missing:
        parser.error(f"these settings need --{' and --'.join(sorted(missing)).replace('_', '-')}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    arguments.work.mkdir(parents=True, exist_ok=True)
    # All settings of a seed, then the next seed: whoever stops early has all comparisons for some seeds.
    for seed in arguments.seeds:
        for name in arguments.settings:
            run(name, seed, arguments)
    reports = kept_reports(arguments.work)
    verdicts = [judged_alike(claim, reports) for claim in CLAIMS if {claim.better, claim.worse} <= {*reports}]
    result = {
        "command": public_command(),
        "machine": this_machine(),
        "new_tokens": NEW_TOKENS,
        "arguments": COMMON,
        "claims": verdicts,
        "settings": {
            name: {
                "recipe": SETTINGS[name].recipe,
                "kind": SETTINGS[name].kind,
                "arguments": SETTINGS[name].arguments,
                "fields": SETTINGS[name].fields,
                "text": SETTINGS[name].text,
                "before": SETTINGS[name].before,
                "runs": [{"seed": seed, **report} for seed, report in of_seeds.items()],
            }
            for name, of_seeds in reports.items()
        },
    }
    save(arguments.output, result, indent=1)
    print(verdict_table(verdicts))


if __name__ == "__main__":
    main()
