"""How the drafters of SmolLM2-135M-Instruct were trained, and what was tried: settings, time and evaluation of each run.

    python benchmarks/smollm2_training.py RUN_FOLDER ...

Reads what `pardraft train` left in the folders and puts it into benchmarks/results/smollm2_training.json, a run of the same name
instead of an older one. The runs' commands are in docs/smollm2.md.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

from result_files import RESULTS, save, this_machine

RESULT = RESULTS / "smollm2_training.json"
# Folders of a machine, and what changes nothing of what is learned.
LEFT_OUT = (
    *("output", "disable_tqdm", "use_cpu", "logging_steps", "save_strategy", "save_steps", "save_total_limit"),
    *("eval_size", "tau_prompts", "resume_from_checkpoint"),
)
POINTS = 10


def read_run(folder: Path) -> dict[str, Any]:
    """A run's settings, what it took, and how it went."""
    settings = yaml.safe_load((folder / "train_settings.yaml").read_text(encoding="utf-8"))
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    history = [entry for entry in state["log_history"] if "loss" in entry]
    total = next(entry for entry in reversed(state["log_history"]) if "train_runtime" in entry)
    evaluation = json.loads((folder / "eval_results.json").read_text(encoding="utf-8"))
    every = max(1, len(history) // POINTS)
    return {
        "name": folder.resolve().name,
        "settings": {
            name: Path(value).name if isinstance(value, str) and "/" in value else value
            for name, value in settings.items()
            if name not in LEFT_OUT
        },
        "steps": state["global_step"],
        "epochs": round(state["epoch"], 2),
        "seconds": round(total["train_runtime"]),
        "machine": this_machine(),
        "history": [
            {name: entry[name] for name in ("step", "loss", "expected_tau")} for entry in history[every - 1 :: every]
        ],
        "evaluation": {
            name.removeprefix("eval_"): round(value, 4)
            for name, value in evaluation.items()
            if name.startswith(("eval_accuracy", "eval_loss", "eval_expected_tau"))
        },
    }


def line_of(run: dict[str, Any]) -> str:
    """A run, for the terminal."""
    evaluation = run["evaluation"]
    right = " ".join(f"{100 * value:.0f}" for name, value in evaluation.items() if name.startswith("accuracy"))
    return (
        f"{run['name']:16} {run['steps']:6} steps, {run['epochs']:5.2f} epochs, {run['seconds'] / 60:5.1f} minutes: "
        f"loss {evaluation['loss']:.3f}, expected tau {evaluation['expected_tau']:.3f}, right {right} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN_FOLDER")
    parser.add_argument("--result", type=Path, default=RESULT)
    arguments = parser.parse_args()
    known = json.loads(arguments.result.read_text(encoding="utf-8"))["runs"] if arguments.result.exists() else []
    found = [read_run(folder) for folder in arguments.folders]
    names = {run["name"] for run in found}
    runs = [run for run in known if run["name"] not in names] + found
    save(arguments.result, {"runs": runs})
    for run in runs:
        print(line_of(run))


if __name__ == "__main__":
    main()
