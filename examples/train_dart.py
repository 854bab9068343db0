"""Train a DART drafter for a target on what that writes itself: for the demo's, which takes a minute on a CPU, or another.

python examples/train_dart.py --target Qwen/Qwen3-4B --prompts prompts.jsonl --max-steps 2000
"""

import argparse

from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_pardraft import DartDrafter, DraftTrainer, DraftTrainingArguments
from hf_pardraft.demo.family import SHIPPED_FAMILY
from hf_pardraft.demo.prompts import built_in_prompts

parser = argparse.ArgumentParser()
parser.add_argument("--target", default=str(SHIPPED_FAMILY / "target"))
parser.add_argument("--prompts", help="a .jsonl file with a column `text`")
parser.add_argument("--max-steps", type=int, default=60)
parser.add_argument("--output", default="dart-drafter")
options = parser.parse_args()

target = AutoModelForCausalLM.from_pretrained(options.target, dtype="auto", device_map="auto").eval()
tokenizer = AutoTokenizer.from_pretrained(options.target)
prompts = load_dataset("json", data_files=options.prompts)["train"]["text"] if options.prompts else built_in_prompts()
rows = []
for prompt in prompts:
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to(target.device)
    text = target.generate(ids, max_new_tokens=64, do_sample=False)[0].tolist()
    # The prompt is read, and not learned.
    rows.append({"input_ids": text, "labels": [-100] * ids.shape[1] + text[ids.shape[1] :]})
data = Dataset.from_list(rows)

drafter = DartDrafter.for_target(target, draft_tokens=8).float()
settings = DraftTrainingArguments(options.output, max_steps=options.max_steps, learning_rate=3e-3, kl_gamma=0.6)
trainer = DraftTrainer(drafter, target, settings, train_dataset=data, eval_dataset=data)
trainer.train()
print(f"tau on what it learned: {trainer.evaluate()['eval_tau']:.2f}")
trainer.save_model()
