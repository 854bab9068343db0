"""Trainers of tiny drafters for the tests, and what they did."""

import torch
from datasets import Dataset
from transformers import PreTrainedModel

from hf_pardraft import DraftTrainer, DraftTrainingArguments
from tiny_models import random_prompt, tiny_drafter

PROMPT_LENGTH = 4


def written_text(target: PreTrainedModel, rows: int = 8, length: int = 28) -> Dataset:
    """What `target` writes, greedily, after random prompts: `length` tokens each."""
    texts = []
    for seed in range(rows):
        prompt = random_prompt(PROMPT_LENGTH, seed)
        ids = target.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=length)[0]
        texts.append({"input_ids": ids.tolist(), "labels": [-100] * PROMPT_LENGTH + ids[PROMPT_LENGTH:].tolist()})
    return Dataset.from_list(texts)


def trainer_for(kind, target, text, folder, *, drafter=None, trainer_options=None, **settings) -> DraftTrainer:
    """One that logs every step; `settings` are training arguments."""
    arguments = DraftTrainingArguments(
        folder,
        **{
            "max_steps": 6,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "draft_tokens": 4,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "loss_gamma": 4.0,
            "tau_prompts": 0,
            **settings,
        },
    )
    return DraftTrainer(
        drafter or tiny_drafter(kind, target),
        target=target,
        args=arguments,
        train_dataset=text,
        **{"eval_dataset": text, **(trainer_options or {})},
    )


def losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
