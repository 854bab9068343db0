"""What `pardraft train` can be told besides the settings of the Trainer: what is trained, for what, and on what."""

from dataclasses import dataclass, field
from typing import Any

from ..checkpoints.published import KIND_NAMES


def option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class RunOptions:
    """What is trained for which target, on what, and where it goes."""

    recipe: str | None = option(None, "Published settings to start from (see below), or a YAML file of your own.")
    target: str | None = option(None, "The model to draft for: a folder or a Hub repository. Required.")
    dataset: str | None = option(
        None,
        "What to train on: a .jsonl, .json, .parquet or .csv file, a folder, or a data set's name on the Hub. Required.",
    )
    output: str | None = option(None, "Folder for checkpoints, the drafter and its evaluation. Required.")
    dataset_config: str | None = option(None, "Of a data set on the Hub that has several.")
    dataset_split: str = option("train", "Of the data set.")
    eval_dataset: str | None = option(None, "What to evaluate on; by default a part of the data set, held out.")
    eval_split: str = option("train", "Of the evaluation set.")
    eval_size: int = option(32, "How many examples are held out, and a tenth of all at most; 0: no evaluation.")
    exclude_overlap: list[str] | None = field(
        default=None,
        metadata={
            "help": "Test sets: files, folders, or data sets on the Hub (their part called test). Examples that share 32 words "
            "in a row with any text of theirs are left out."
        },
    )
    target_dtype: str = option("auto", "Of the target's weights: auto, float32, bfloat16, ...")
    trust_remote_code: bool = option(False, "Run the code that comes with the target. No drafter's code is run.")


@dataclass
class DrafterOptions:
    """Which drafter is made; what is left out is as the drafter's own default has it."""

    drafter: str | None = option(None, "A drafter to go on with, rather than a fresh one.")
    kind: str | None = option(None, f"Of a fresh drafter: {', '.join(KIND_NAMES)}.")
    base: str | None = option(None, "pard, pard2: the causal LM to adapt, with the target's tokenizer.")
    num_layers: int | None = option(None, "dflash, dflare: its depth.")
    block_size: int | None = option(None, "dflash, dflare: tokens a block, the anchor counted.")
    draft_length: int | None = option(
        None, "dart: masks after a prefix, as config.json counts them. Say draft_tokens, the tokens that they draft."
    )
    mask_token_id: list[int] | None = field(
        default=None,
        metadata={
            "help": "pard, pard2, dflash, dflare: an unused token; by default one is found. pard, pard2: several, one for each "
            "of the draft_tokens - 1 masks."
        },
    )
    target_layer_ids: list[int] | None = field(
        default=None, metadata={"help": "dflash, dflare: the target's layers whose output it reads."}
    )
    tapped_hidden_states: list[int] | None = field(
        default=None, metadata={"help": "dart: indices of the target's hidden states that it reads."}
    )
    target_layers: list[int] | None = field(default=None, metadata={"help": "pard2: the same."})
    target_scale: float | None = option(None, "pard2: what the projected states are multiplied with.")
    drafter_config: str | None = option(None, 'dflash, dflare, dart: other fields of its config, as {"fusion": "fc"}.')


# Which of them a fresh drafter of each kind takes.
DRAFTER_OPTIONS = {
    "pard": {"base", "mask_token_id"},
    "pard2": {"base", "mask_token_id", "target_layers", "target_scale"},
    "dflash": {"num_layers", "block_size", "mask_token_id", "target_layer_ids", "drafter_config"},
    "dflare": {"num_layers", "block_size", "mask_token_id", "target_layer_ids", "drafter_config"},
    "dart": {"draft_length", "tapped_hidden_states", "drafter_config"},
}


@dataclass
class AdapterOptions:
    """A LoRA adapter that is trained rather than all weights; without a rank there is none."""

    lora_rank: int | None = field(
        default=None,
        metadata={"help": "Train an adapter of this rank (needs peft); by default all weights."},
    )
    lora_alpha: int | None = field(
        default=None, metadata={"help": "What is learned counts alpha / rank times; twice the rank by default."}
    )
    lora_dropout: float | None = field(
        default=None, metadata={"help": "Share of an adapter's inputs that training drops; none by default."}
    )
    lora_target_modules: list[str] | None = field(
        default=None,
        metadata={
            "help": "Layers that it changes, as q_proj v_proj, or all-linear; by default PEFT's choice (for pard and pard2)."
        },
    )


# All that are no arguments of the Trainer.
OWN_SETTINGS = (RunOptions, DrafterOptions, AdapterOptions)
