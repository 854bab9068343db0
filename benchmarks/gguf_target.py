"""A target loaded from a GGUF file on a CPU, plain and with a drafter: the same text, and what it costs.

    python benchmarks/gguf_target.py --gguf FOLDER/SmolLM2-135M-Instruct.Q4_1.gguf

By default the drafter is drafters/SmolLM2-135M-Instruct-DART, which was trained with the target in bfloat16. Tokens for each
second of this process's processor time, and tokens a round, go to benchmarks/results/gguf_target.json; the first call of each way
does not count. It needs the package gguf.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from hf_pardraft import AutoDrafter
from result_files import RESULTS, public_command, save, this_machine

RESULT = RESULTS / "gguf_target.json"
QUESTIONS = ("What is the capital of France?", "Write a haiku about autumn.", "Explain how a hash table works.")
WAYS = {"plain": None, "chain": {"draft_schedule": "fixed", "tree_budget": 0}, "auto": {}}
DRAFTER = Path(__file__).parent.parent / "drafters" / "SmolLM2-135M-Instruct-DART"


def written(
    target: PreTrainedModel,
    prompts: list[dict[str, torch.Tensor]],
    drafter: Any,
    settings: dict[str, Any],
    **options: Any,
) -> tuple[list[list[int]], dict[str, float]]:
    """The texts of all prompts, and tokens per second and round."""
    texts, num_rounds = [], 0
    started = time.process_time()
    for prompt in prompts:
        torch.manual_seed(0)
        drafting = {"assistant_model": drafter, "generation_config": GenerationConfig(**settings)} if drafter else {}
        output = target.generate(**prompt, **options, **drafting)
        texts.append(output[0, prompt["input_ids"].shape[1] :].tolist())
        num_rounds += drafter.last_stats.rounds if drafter else len(texts[-1])
    seconds, num_tokens = time.process_time() - started, sum(map(len, texts))
    return texts, {"tokens_per_second": round(num_tokens / seconds, 2), "tau": round(num_tokens / num_rounds, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gguf", type=Path, required=True, help="a chat model's GGUF file")
    parser.add_argument("--drafter", type=Path, default=DRAFTER, help="folder of a drafter for it")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    place = {"pretrained_model_name_or_path": arguments.gguf.parent, "gguf_file": arguments.gguf.name}
    target = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(**place)
    drafter = AutoDrafter.from_pretrained(arguments.drafter, dtype=torch.float32).eval()
    chats = ([{"role": "user", "content": question}] for question in QUESTIONS)
    chat = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    prompts = [dict(tokenizer.apply_chat_template(messages, **chat)) for messages in chats]
    rows, plain = [], {}
    for do_sample in (False, True):
        for way, settings in WAYS.items():
            used = None if settings is None else drafter
            options = {"do_sample": do_sample, "max_new_tokens": arguments.max_new_tokens}
            written(target, prompts[:1], used, settings or {}, **options)
            texts, figures = written(target, prompts, used, settings or {}, **options)
            plain.setdefault(do_sample, texts)
            rows.append({"way": way, "do_sample": do_sample, **figures, "same_text": texts == plain[do_sample]})
            print(rows[-1])
    save(
        arguments.output,
        {
            "machine": this_machine(),
            "command": public_command(),
            "file": arguments.gguf.name,
            "drafter": arguments.drafter.name,
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
