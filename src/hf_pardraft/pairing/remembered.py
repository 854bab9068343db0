"""Which target, tokenizer and chats a drafter was trained with, kept in its config, and how the pair at hand differs from that.

What can be compared when: the target's weights (or its name and revision, where they can't be read) at every `generate` call;
how a prompt ends, too, since that tells one chat mode from another; the tokenizer, and with it the chat template, where a call
passes `tokenizer=`. A config without these fields, as published ones are, says nothing and is silent.
"""

import hashlib
import os
import warnings
import weakref
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from ..models.base import ParallelDrafter
from .chat_format import describe_chats, ends_otherwise, has_chat_template, template_hash
from .target_checks import has_plain_weights

# What to remember


def target_fingerprint(target: PreTrainedModel) -> list[float] | None:
    """A few of the target's weights, enough to tell it from another; `None` if they can't be read (quantised, offloaded).

    Rounding to another dtype leaves them within the tolerance of [`warn_if_other_target`].
    """
    # Whatever stands for quantised weights, be it a float, is not what they are.
    if "quantization_config" in target.config.to_dict() or not has_plain_weights(target):
        return None
    matrices = [parameter for parameter in target.parameters() if parameter.ndim == 2]
    chosen = [matrices[i * (len(matrices) - 1) // 7] for i in range(8)] if matrices else []
    if not chosen or any(matrix.is_meta for matrix in chosen):
        return None
    samples = torch.stack([matrix.detach()[0, :2].float().cpu() for matrix in chosen if matrix.shape[1] > 1])
    return [round(value, 6) for value in samples.flatten().tolist()]


def public_name(model: PreTrainedModel) -> str | None:
    """What `model` was loaded from, as [`public_place`] has it; `None` if it was made of a config."""
    return public_place(model.name_or_path) or None


def public_place(place: str) -> str:
    """Where something was loaded from; of a local folder only its own name, since configs and results are published."""
    return os.path.basename(os.path.abspath(place)) if os.path.isdir(place) else place


def own_name(place: str) -> str:
    """What a model is called by itself: of a folder or a repository the last part."""
    return public_place(place).rstrip("/").split("/")[-1]


def commit_of(model: PreTrainedModel) -> str | None:
    """The commit of the Hub repository that `model` was loaded from; `None` for a folder."""
    return vars(model.config).get("_commit_hash")


def tokenizer_of(processing_class: Any) -> Any:
    """A tokenizer, or the one inside a processor."""
    return processing_class.tokenizer if isinstance(processing_class, ProcessorMixin) else processing_class


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of the vocabulary: the same for all tokenizers that give the same ids to the same tokens."""
    entries = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())
    return hashlib.sha256("\0".join(f"{token_id}\0{token}" for token_id, token in entries).encode()).hexdigest()


def describe_target(target: PreTrainedModel) -> dict[str, Any]:
    """What a drafter's config remembers about the target that it was made for."""
    return {
        "target_name_or_path": public_name(target),
        "target_revision": commit_of(target),
        "target_model_type": target.config.get_text_config(decoder=True).model_type,
        "target_fingerprint": target_fingerprint(target),
    }


def note_pairing(
    drafter: PreTrainedModel,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> None:
    """Remember, in a drafter's config, what it is trained with.

    Args:
        drafter: the drafter in training.
        target: the model that it shall draft for.
        tokenizer: the target's.
        chat_template_kwargs: what the training text was rendered with by `tokenizer.apply_chat_template`, such as
            `{"enable_thinking": False}`; `{}` if with nothing but its defaults, `None` if it is no chats, or of several modes.

    Raises:
        ValueError: if chats are to be remembered and there is no tokenizer, or one without a chat template.
    """
    facts = describe_target(target)
    if chat_template_kwargs is not None and (
        tokenizer is None or not has_chat_template(tokenizer, chat_template_kwargs)
    ):
        raise ValueError(
            f"chat_template_kwargs={chat_template_kwargs!r} say how chats are rendered, and "
            f"{'no tokenizer was passed' if tokenizer is None else 'this tokenizer has no chat template'}: pass the target's "
            "tokenizer with its chat template, or leave chat_template_kwargs out"
        )
    if tokenizer is not None:
        facts["tokenizer_hash"] = tokenizer_hash(tokenizer)
        facts["chat_format"] = None if chat_template_kwargs is None else describe_chats(tokenizer, chat_template_kwargs)
    for name in facts.keys() & drafter.config.to_dict().keys():
        setattr(drafter.config, name, facts[name])


# What to compare


# Pairs that were compared already, so that a loop of generate calls pays (and warns) once.
_compared: "weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet]" = weakref.WeakKeyDictionary()


def warn_if_other_target(drafter: PreTrainedModel, target: PreTrainedModel) -> None:
    """Warn, once per pair, if the drafter's config remembers another target than this one."""
    seen = _compared.setdefault(drafter, weakref.WeakSet())
    if target in seen:
        return
    seen.add(target)
    reason = other_target_reason(drafter, target)
    if reason:
        warnings.warn(
            f"this {type(drafter).__name__} was not trained for this target: {reason}. The text stays right, but few drafts "
            "will be accepted. Use the drafter's own target, or train it for this one",
            UserWarning,
            stacklevel=2,
        )


def differing_weights(remembered: list[float] | None, target: PreTrainedModel) -> bool:
    """Whether the fingerprint in a config and this target's differ by more than a change of dtype explains."""
    found = target_fingerprint(target) if remembered else None
    return found is not None and are_other_weights(remembered, found)


def are_other_weights(remembered: list[float], found: list[float]) -> bool:
    """Whether two fingerprints differ by more than a change of dtype explains."""
    if len(found) != len(remembered):
        return True
    close = torch.isclose(torch.tensor(found), torch.tensor(remembered), rtol=0.02, atol=1e-5)
    return not bool(close.all())


def other_target_reason(drafter: ParallelDrafter, target: PreTrainedModel) -> str | None:
    """Why `target` is not the one that a drafter was trained for; `None` if nothing says so.

    One that reads a target's hidden states was trained for one model, and any other weights count as another target. PARD
    serves a family of targets, so only another family does.
    """
    if drafter.reads_target:
        return other_weights_reason(drafter.config, target)
    trained_for = drafter.config.target_model_type
    found = target.config.get_text_config(decoder=True).model_type
    if trained_for in (None, found):
        return None
    return f"it was trained for targets of model type {trained_for!r}, and this one is {found!r}"


def other_weights_reason(config: PreTrainedConfig, target: PreTrainedModel) -> str | None:
    """Why `target` is not the model whose hidden states a drafter of this configuration was trained on, if something says so."""
    trained_for, name = config.target_name_or_path, public_name(target)
    if differing_weights(config.target_fingerprint, target):
        return f"its weights differ from those of {trained_for or 'the target it was made for'}"
    if config.target_fingerprint is None and trained_for and name and trained_for != name:
        return f"it was trained for {trained_for}, and this one is {name}"
    revision, found = config.target_revision, commit_of(target)
    if config.target_fingerprint is None and revision and found and revision != found and trained_for == name:
        return f"it was trained for revision {revision[:12]} of {trained_for}, and this one is revision {found[:12]}"
    return None


# Of each drafter, the kinds of differences in its text that were warned about already.
_warned: "weakref.WeakKeyDictionary[nn.Module, set[str]]" = weakref.WeakKeyDictionary()


def warn_if_other_text(
    drafter: PreTrainedModel, input_ids: torch.LongTensor, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Warn, once per kind of difference, if a call's tokenizer or chats are not those that a drafter was trained with.

    Args:
        drafter: the drafter; its config remembers what [`note_pairing`] was told.
        input_ids: `(batch, length)`, the prompts, padded on the left. Their ends tell chat modes apart.
        tokenizer: the target's, if the call knows it.
    """
    # Code that came with a checkpoint may be older than these fields.
    remembered = vars(drafter.config)
    differences = text_differences(
        remembered.get("tokenizer_hash"), remembered.get("chat_format"), input_ids, tokenizer
    )
    warned = _warned.setdefault(drafter, set())
    for kind, difference in differences.items():
        if kind not in warned:
            warned.add(kind)
            warnings.warn(
                f"this {type(drafter).__name__} was not trained for this text: {difference}. What is written stays right, but "
                "few drafts will be accepted. Prompt the target as in training, or train the drafter on such text",
                UserWarning,
                stacklevel=2,
            )


def warn_by_this_prompt(
    drafter: PreTrainedModel, input_ids: torch.LongTensor, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """[`warn_if_other_text`] of a prompt; not of how later ones end, which go on from an answer that was begun without drafts."""
    warn_if_other_text(drafter, input_ids, tokenizer)
    _warned[drafter].add("prompt")


def text_differences(
    trained_hash: str | None,
    chats: dict[str, Any] | None,
    input_ids: torch.LongTensor,
    tokenizer: PreTrainedTokenizerBase | None,
) -> dict[str, str]:
    """In what a call's tokenizer, chat template and prompts differ from training, by kind; see [`warn_if_other_text`]."""
    differences = {}
    if tokenizer is not None and trained_hash is not None and tokenizer_hash(tokenizer) != trained_hash:
        differences["tokenizer"] = (
            f"its tokenizer had another vocabulary (hash {trained_hash[:12]}, here {tokenizer_hash(tokenizer)[:12]})"
        )
    if chats is None:
        return differences
    found = None if tokenizer is None else template_hash(tokenizer)
    if found is not None and chats["template_hash"] not in (None, found):
        differences["template"] = (
            f"its chats had another template (hash {chats['template_hash'][:12]}, here {found[:12]})"
        )
    if ends_otherwise(input_ids, chats):
        differences["prompt"] = (
            f"its prompts were chats that end in {chats['prompt_end']!r} (chat template arguments: "
            f"{chats['template_kwargs'] or 'none'}), and this one ends otherwise, as with another chat mode or no chat "
            "template"
        )
    return differences
