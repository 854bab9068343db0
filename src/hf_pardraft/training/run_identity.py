"""What makes a run this run and no other, noted with its checkpoints, so that nothing goes on from another one's unnoticed."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel, TrainingArguments

from ..pairing.remembered import are_other_weights, target_fingerprint
from ..user_input.wording import told_differences
from .arguments import DraftTrainingArguments

FILE = "pardraft_run.json"
# Of the Trainer's own settings those that decide what a step does. How long a run is, what it logs, saves and evaluates, and
# on how many devices it runs, may change on the way.
TRAINER_SETTINGS = (
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"),
    *("optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
    *("seed", "data_seed", "bf16", "fp16", "label_smoothing_factor", "neftune_noise_alpha"),
    *("train_sampling_strategy", "dataloader_drop_last"),
)
# Of ours those that don't: where numbers come from or go to, and in which pieces they are computed.
HARMLESS = (
    *("loss_chunk_rows", "training_attention", "dataset_num_proc", "features_folder", "use_cache", "keep_adapter"),
    *("tau_prompts", "tau_new_tokens", "tau_temperature", "remove_unused_columns"),
    *("overwrite_output", "resume_changed"),
)
# Fields of a drafter's config that say where it comes from, and not what it is.
NO_SHAPE = (
    *("_name_or_path", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype", "use_cache"),
    *("target_name_or_path", "target_revision", "target_fingerprint"),
)
COLUMNS = ("input_ids", "labels", "document_ids", "attention_mask", "completion_mask", "assistant_masks")
# Of larger data sets as many examples are looked at, evenly spaced.
LOOKED_AT = 1024


def identity_of(
    drafter: PreTrainedModel, target: PreTrainedModel | None, args: DraftTrainingArguments, data: Any, adapter: Any
) -> dict[str, Any]:
    """What a run's checkpoints depend on, as JSON can hold it.

    Args:
        drafter: as it is before training.
        target: that it is trained for.
        args: of the training.
        data: the prepared examples; of a stream nothing is noted.
        adapter: PEFT's config, if an adapter is trained.
    """
    own = {field.name for field in dataclasses.fields(DraftTrainingArguments)}
    own -= {field.name for field in dataclasses.fields(TrainingArguments)} | set(HARMLESS)
    given = args.to_dict()
    settings = {name: given[name] for name in (*TRAINER_SETTINGS, *sorted(own)) if name in given}
    if not args.auto_find_batch_size:
        step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        settings["examples per step"] = step
    config = drafter.config.to_dict()
    found = {
        "settings": settings,
        "drafter": {name: value for name, value in config.items() if name not in NO_SHAPE},
        "adapter": None if adapter is None else {**adapter.to_dict(), "base_model_name_or_path": None},
        "data": fingerprint_of(data),
        "target_weights": None if target is None else target_fingerprint(target),
    }
    return json.loads(json.dumps(found, sort_keys=True, default=as_json))


def as_json(value: Any) -> Any:
    return sorted(value, key=str) if isinstance(value, (set, frozenset)) else str(value)


def fingerprint_of(data: Any) -> dict[str, Any] | None:
    """How many examples there are, and a hash of them, or of [`LOOKED_AT`] of them; `None` for a stream."""
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        return None
    digest, count = hashlib.blake2b(digest_size=16), len(data)
    for index in sorted({round(place) for place in np.linspace(0, count - 1, min(count, LOOKED_AT))}):
        example = data[index]
        for name in COLUMNS:
            if example.get(name) is not None:
                digest.update(name.encode() + np.asarray(example[name], dtype=np.int64).tobytes())
    return {"examples": count, "hash": digest.hexdigest()}


def differences(found: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """In what two runs differ, for a message; what only one of them knows of is passed over."""
    told = []
    for part in ("settings", "drafter", "adapter"):
        before, after = found.get(part), now.get(part)
        if isinstance(before, dict) and isinstance(after, dict):
            told += told_differences(before, after, sorted(before.keys() & after.keys()))
        elif part == "adapter" and before != after:
            told.append("all weights, and no adapter" if before is None else "an adapter")
    before, after = found.get("data"), now.get("data")
    if before and after and before != after:
        told.append(f"other data ({before['examples']} examples, now {after['examples']})")
    before, after = found.get("target_weights"), now.get("target_weights")
    if before and after and are_other_weights(before, after):
        told.append("another target (its weights differ)")
    return told


def note_identity(checkpoint: Path, identity: dict[str, Any]) -> None:
    """Write down, in a checkpoint that is complete, which run's it is and which files it has."""
    files = {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in checkpoint.rglob("*")}
    sizes = {name: size for name, size in sorted(files.items()) if (checkpoint / name).is_file()}
    (checkpoint / FILE).write_text(json.dumps({**identity, "files": sizes}, indent=1) + "\n", encoding="utf-8")


def read_identity(checkpoint: Path) -> dict[str, Any] | None:
    """What [`note_identity`] wrote; `None` for the checkpoint of a plain `Trainer`, which has no such file.

    Raises:
        ValueError: if it can't be read.
    """
    if not (checkpoint / FILE).is_file():
        return None
    try:
        found = json.loads((checkpoint / FILE).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{checkpoint / FILE} is damaged ({error}): resume from another checkpoint") from error
    if not isinstance(found, dict):
        raise ValueError(f"{checkpoint / FILE} is damaged (no JSON object): resume from another checkpoint")
    return found


def missing_files(checkpoint: Path) -> list[str]:
    """The files of a checkpoint that are not there as they were written; nothing is known of a plain `Trainer`'s."""
    sizes = (read_identity(checkpoint) or {}).get("files", {})
    paths = {name: checkpoint / name for name in sizes}
    return sorted(name for name, path in paths.items() if not path.is_file() or path.stat().st_size != sizes[name])
