"""Run a task of lm-evaluation-harness plainly and with drafters: scores, forwards of the target, seconds.

python examples/lm_eval/compare.py src/hf_pardraft/demo/family/{target,pard,dflash,dflare,dart}
"""

import argparse
import json
import logging
import time
from importlib.metadata import version
from pathlib import Path

import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target")
    parser.add_argument("drafters", nargs="*")
    parser.add_argument("--task", default="complete_functions")
    parser.add_argument("--dtype", default="float32", help="in half precision rounding may change a text, and a score")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--json", type=Path, help="write what came of it")
    options = parser.parse_args()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = HFLM(pretrained=options.target, dtype=options.dtype, batch_size=options.batch_size, device=device)
    forwards = []
    model.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    tasks, rows = TaskManager(include_path=str(Path(__file__).parent)), []
    for drafter in [None, *options.drafters]:
        # What --gen_kwargs gives on the command line.
        named = {"custom_generate": drafter, "assistant_model": drafter, "trust_remote_code": True} if drafter else None
        forwards.clear()
        wall, cpu = time.perf_counter(), time.process_time()
        found = simple_evaluate(model, tasks=[options.task], task_manager=tasks, gen_kwargs=named, limit=options.limit)
        row = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        scores = {name: float(value) for name, value in found["results"][options.task].items() if "," in name}
        rows.append({"drafter": Path(drafter or "").name, "forwards": len(forwards), **row, **scores})
        print(rows[-1], flush=True)
    if options.json:
        facts = {"task": options.task, "dtype": options.dtype, "batch_size": options.batch_size, "rows": rows}
        options.json.write_text(json.dumps({"lm_eval": version("lm_eval"), **facts}, indent=2) + "\n")


if __name__ == "__main__":
    main()
