"""Run a task of lm-evaluation-harness plainly and with drafters: scores, forwards of the target, seconds.

python examples/lm_eval/compare.py src/hf_pardraft/demo/family/{target,pard,dflash,dflare,dart}
"""

import argparse
import logging
import time
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
    options = parser.parse_args()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = HFLM(pretrained=options.target, dtype=options.dtype, batch_size=options.batch_size, device=device)
    forwards = [0]
    model.model.register_forward_pre_hook(lambda *_: forwards.append(forwards.pop() + 1))
    tasks = TaskManager(include_path=str(Path(__file__).parent))
    for drafter in [None, *options.drafters]:
        # What --gen_kwargs gives on the command line.
        named = {"custom_generate": drafter, "assistant_model": drafter, "trust_remote_code": True} if drafter else None
        forwards[0], start = 0, time.perf_counter()
        found = simple_evaluate(model, tasks=[options.task], task_manager=tasks, gen_kwargs=named, limit=options.limit)
        seconds, scores = time.perf_counter() - start, found["results"][options.task]
        print(
            drafter or "plain",
            {k: v for k, v in scores.items() if isinstance(v, float)},
            forwards[0],
            f"{seconds:.1f} s",
        )


if __name__ == "__main__":
    main()
