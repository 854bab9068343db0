"""PARD: an ordinary causal LM that drafts K tokens in one forward with mask tokens (arXiv 2504.18583, section 3.1)."""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from .configuration_pard import PardConfig, PardLlamaConfig, PardQwen2Config, PardQwen3Config, config_class_of
from .drafting import DraftContext, DraftState, ParallelDrafter, are_real, counting, last_columns, mask_ids
from .mask_token import choose_mask_token_id, find_tokenizer
from .row_masks import attention_windows, causal_row_masks


class PardDrafter(ParallelDrafter, PreTrainedModel):
    """A PARD drafter. It reads token ids only, so one drafter serves every target that shares its tokenizer.

    `PardDrafter(config)` and `PardDrafter.from_pretrained` give the subclass of the base architecture, which is also that
    architecture's ordinary causal LM (`isinstance(drafter, Qwen3ForCausalLM)`).
    """

    config: PardConfig
    training_layout = "dropped_masks"
    vocab_mismatch_advice = (
        "If they do share a tokenizer, and only the padding of the embedding differs, call "
        "drafter.resize_token_embeddings with the target's size"
    )

    def __new__(cls, config=None, *args: Any, **kwargs: Any) -> "PardDrafter":
        if cls is PardDrafter:
            cls = drafter_class_of(config)
        return super().__new__(cls)

    def __init__(self, config: PardConfig, *args: Any, **kwargs: Any) -> None:
        if not 0 <= (-1 if config.pard_token is None else config.pard_token) < config.vocab_size:
            raise ValueError(
                f"a PARD drafter needs pard_token, the id of its mask token in [0, {config.vocab_size}), got "
                f"{config.pard_token}: set it in config.json, or make the drafter with PardDrafter.from_causal_lm"
            )
        super().__init__(config, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args: Any, **kwargs: Any):
        """As in `PreTrainedModel`; the base architecture is read from the config, and every weight must be there."""
        if cls is not PardDrafter:
            return super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        config = kwargs.pop("config", None)
        if not isinstance(config, PardConfig):
            names = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
            source = {name: kwargs[name] for name in names if name in kwargs}
            config_dict, _ = PardConfig.get_config_dict(config or pretrained_model_name_or_path, **source)
            model_class = PARD_DRAFTERS[config_class_of(config_dict.get("model_type")).model_type]
        else:
            model_class = drafter_class_of(config)
            kwargs["config"] = config
        return model_class.from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)

    @classmethod
    def from_causal_lm(
        cls,
        model_or_path: PreTrainedModel | str,
        mask_token_id: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **kwargs: Any,
    ) -> "PardDrafter":
        """Adapt an autoregressive Llama, Qwen2 or Qwen3 model. It drafts badly until it is trained.

        Args:
            model_or_path: the model (its weights are copied), or where to load it from.
            mask_token_id: an unused token id; `None` picks one.
            tokenizer: says which ids are in use; by default the one saved beside the model.
            **kwargs: for `AutoModelForCausalLM.from_pretrained`, if a path is given.

        Raises:
            ValueError: for another architecture, or a mask token id that is in use.
        """
        base = model_or_path
        if not isinstance(base, PreTrainedModel):
            base = AutoModelForCausalLM.from_pretrained(model_or_path, **kwargs)
        config_class = config_class_of(base.config.model_type)
        tokenizer = tokenizer or find_tokenizer(base)
        mask_token_id = choose_mask_token_id(base.config, mask_token_id, tokenizer)
        config = config_class.from_dict({**base.config.to_dict(), "pard_token": mask_token_id})
        drafter = PARD_DRAFTERS[config.model_type](config).to(device=base.device, dtype=base.dtype)
        drafter.load_state_dict(base.state_dict())
        # An unused row is whatever initialisation left there. The mean of all rows is a token of no meaning.
        with torch.no_grad():
            embedding = drafter.get_input_embeddings().weight
            embedding[mask_token_id] = embedding.float().mean(0).to(embedding.dtype)
        return drafter.eval()

    def other_target_reason(self, target: PreTrainedModel) -> str | None:
        """PARD serves a family of targets, so only another family counts as another target."""
        trained_for = self.config.target_model_type
        found = target.config.get_text_config(decoder=True).model_type
        if trained_for in (None, found):
            return None
        return f"it was trained for targets of model type {trained_for!r}, and this one is {found!r}"

    def draft(self, context: DraftContext, state: DraftState, depth: int) -> torch.Tensor:
        """Feed the new tokens and `depth - 1` masks (eq. 7); the last `depth` rows are the candidates' logits.

        `depth` may exceed the K of training: all masks share one id. Shapes as in [`ParallelDrafter.draft`].
        """
        batch, num_new = context.new_ids.shape
        masks = mask_ids(self.config.pard_token, batch, depth - 1, context.new_ids.device)
        ahead = counting(1, depth, context.new_positions.device)
        start = state.cache.get_seq_length()
        outputs = self(
            input_ids=torch.cat([context.new_ids, masks], dim=1).to(self.device),
            position_ids=torch.cat([context.new_positions, context.new_positions[:, -1:] + ahead], dim=1).to(
                self.device
            ),
            attention_mask=self._row_masks(context, state, depth) if batch > 1 else None,
            past_key_values=state.cache,
            use_cache=True,
            logits_to_keep=depth,
        )
        state.cache.keep(start, last_columns(context.new_counts, batch, num_new))
        return outputs.logits

    def _row_masks(self, context: DraftContext, state: DraftState, depth: int) -> Any:
        """Masks for rows of different lengths: a row sees its own committed text, and is causal behind it."""
        batch, num_new = context.new_ids.shape
        real = torch.nn.functional.pad(
            are_real(context.new_counts, batch, num_new, self.device), (0, depth - 1), value=True
        )
        if state.cache.get_seq_length() == 0:
            # The model's own masks for a padded prompt cost less memory than these.
            return real.long()
        windows = attention_windows(self.config)
        return causal_row_masks(real, windows, state.cache.row_columns(), self.dtype)


class PardLlama(PardDrafter, LlamaForCausalLM):
    config: PardLlamaConfig


class PardQwen2(PardDrafter, Qwen2ForCausalLM):
    config: PardQwen2Config


class PardQwen3(PardDrafter, Qwen3ForCausalLM):
    config: PardQwen3Config


PARD_DRAFTERS = {"llama": PardLlama, "qwen2": PardQwen2, "qwen3": PardQwen3}


def drafter_class_of(config) -> type[PardDrafter]:
    """The drafter class of a configuration's base architecture."""
    if not isinstance(config, PardConfig):
        raise ValueError(
            f"PardDrafter takes a PardConfig, got {type(config).__name__}: adapt an ordinary model with "
            "PardDrafter.from_causal_lm, or load a drafter with PardDrafter.from_pretrained"
        )
    return PARD_DRAFTERS[config.model_type]
