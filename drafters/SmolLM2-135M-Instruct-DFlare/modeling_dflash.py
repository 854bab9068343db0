"""DFlash: a block-diffusion drafter that reads a target's hidden states as keys and values (arXiv 2606.02091, section 3)."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, DFlashCache
from transformers.masking_utils import create_bidirectional_mask, create_bidirectional_sliding_window_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)

from .base import text_fact
from .cache import GrowingLayer, HeldColumns, ItemEntries, StaticColumns
from .configuration_dflash import FIRST_LAYER_OUTPUT, DFlashConfig
from .inputs import DraftInputs, DraftState, StaticDraftInputs, are_real, cached_arange, last_columns, mask_ids
from .masks import additive
from .target_bound import TargetBoundDrafter


class DFlashAttention(nn.Module):
    """The block asks; context and block answer, through the same projections (arXiv 2606.02091, eq. 2)."""

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = False
        is_sliding = config.layer_types[layer_idx] == "sliding_attention"
        self.sliding_window = config.sliding_window if is_sliding else None
        query_size = config.num_attention_heads * self.head_dim
        key_size = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        context: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`hidden_states (batch, block, H)` and `context (batch, new, H)` to `(batch, block, H)`."""
        batch, num_queries = hidden_states.shape[:2]
        keys, values = self.keys_and_values(context, hidden_states)
        queries = self.q_norm(self.q_proj(hidden_states).view(batch, num_queries, -1, self.head_dim)).transpose(1, 2)
        keys = self.k_norm(keys.view(batch, keys.shape[1], -1, self.head_dim)).transpose(1, 2)
        values = values.view(batch, values.shape[1], -1, self.head_dim).transpose(1, 2)
        cos, sin = position_embeddings
        queries = queries * cos[:, :, -num_queries:] + rotate_half(queries) * sin[:, :, -num_queries:]
        keys = keys * cos + rotate_half(keys) * sin
        if past_key_values is not None:
            keys, values = past_key_values.update(keys, values, self.layer_idx)
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, _ = attention(
            self,
            queries,
            keys,
            values,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return self.o_proj(output.reshape(batch, num_queries, -1))

    def keys_and_values(self, context: torch.Tensor, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Projections `(batch, new + block, key heads * head_dim)` of the context and, after it, the block."""
        sources = torch.cat([context, hidden_states], dim=1)
        return self.k_proj(sources), self.v_proj(sources)


class BlockCache(ItemEntries, DFlashCache):
    """A growing cache for attention whose keys come from context and block, and whose queries come from the block."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_class_to_replicate = GrowingLayer


class DFlashLayer(GradientCheckpointingLayer):
    """A pre-norm transformer layer on the block; the context passes by unchanged and is not normalised again."""

    attention_class = DFlashAttention

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = self.attention_class(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class DFlashDrafter(TargetBoundDrafter, PreTrainedModel):
    """A DFlash drafter: anchor and masks attend to each other both ways, and to the target's fused hidden states.

    It borrows the target's embedding and lm_head, and saves neither (but a draft vocabulary's rows of it, if `own_head`).
    Besides [`ParallelDrafter`] it satisfies transformers' own contract for `speculation_type="dflash"`.
    """

    config: DFlashConfig
    layer_class = DFlashLayer
    base_model_prefix = ""
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    training_layout = "anchored_blocks"
    _no_split_modules = ["DFlashLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    ignored_weights: ClassVar[dict[str, str]] = {
        r"(^|\.)rotary_emb\.inv_freq$": "computed from the config",
        r"^(model\.)?embed_tokens\.weight$": "the target's embedding, which is read from the target",
        r"^lm_head\.weight$": "the target's lm_head, which is read from the target",
        r"^verifier_(lm_head|norm)\.weight$": "the target's",
        r"^(d2t|t2d)$": "map all tokens to themselves",
    }
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [*ignored_weights]

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        self.check_config()
        self.add_fusion()
        self.layers = nn.ModuleList(self.layer_class(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        if config.draft_vocab_size is not None:
            # The published names: target id = draft id + d2t[draft id], and t2d says which target ids have a draft id.
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        if config.own_head:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False).requires_grad_(False)
        self.generation_config = GenerationConfig()
        self.gradient_checkpointing = False
        self.post_init()

    def check_config(self) -> None:
        """Raise a `ValueError` for a configuration that can't draft."""
        config, kind = self.config, type(self).__name__
        if config.block_size < 2:
            raise ValueError(f"a {kind} needs block_size >= 2, got {config.block_size}: set it in config.json")
        check_mask_token(config, config.vocab_size, kind)
        if any(layer_id < 0 for layer_id in config.target_layer_ids or ()):
            raise ValueError(
                f"target_layer_ids are the 0-based numbers of target layers, got {config.target_layer_ids}: count from the first "
                "layer"
            )
        depth = config.num_target_layers
        if depth is not None and any(layer_id > depth - 2 for layer_id in config.target_layer_ids or ()):
            raise ValueError(
                f"target_layer_ids are at most {depth - 2} for a target of {depth} layers (num_target_layers), got "
                f"{config.target_layer_ids}: what the last layer puts out is only there after the final norm, and so is another "
                "tensor. Tap other layers, or mend config.json"
            )
        if not config.target_layer_ids:
            raise ValueError(
                f"a {kind} needs target_layer_ids, the target layers that it reads, or num_target_layers to choose them: "
                "set one of them in config.json"
            )

    def check_target(self, target: PreTrainedModel, taps: list[int] | None = None) -> None:
        """See [`TargetBoundDrafter.check_target`]; a drafter that leaves its vocabulary open takes the target's."""
        if self.config.vocab_size == 0:
            vocab_size = text_fact(target, "vocab_size")
            check_mask_token(self.config, vocab_size, type(self).__name__)
            self.config.vocab_size = vocab_size
        super().check_target(target, taps)

    def add_fusion(self) -> None:
        """The modules that make context features of tapped hidden states (arXiv 2606.02091, eq. 1)."""
        config = self.config
        num_features = len(config.target_layer_ids) * config.target_hidden_size
        self.fc = nn.Linear(num_features, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    @classmethod
    def for_target(
        cls,
        target: PreTrainedModel,
        num_layers: int = 5,
        block_size: int = 16,
        tokenizer=None,
        **overrides: Any,
    ) -> "DFlashDrafter":
        """A fresh drafter that fits `target`: its width, heads, rope and vocabulary; taps, and a mask token.

        It starts about as sure of every token as of any other.

        Args:
            target: the model to draft for.
            num_layers: depth of the drafter.
            block_size: tokens a block, the anchor counted.
            tokenizer: says which token ids are in use; by default the one saved beside the target.
            **overrides: any field of the drafter's configuration, `target_layer_ids` and `mask_token_id` among them.

        Raises:
            ValueError: if the target can't be tapped as asked, no token is free to be the mask, or a field is none or can't have
                its value.
        """
        return cls.package().fresh(cls, target, num_layers, block_size, tokenizer, **overrides)

    @property
    def tapped_hidden_states(self) -> list[int]:
        return [layer_id + FIRST_LAYER_OUTPUT for layer_id in self.config.target_layer_ids]

    @property
    def max_draft_depth(self) -> int:
        return self.config.block_size - 1

    def new_draft_state(self, target: PreTrainedModel) -> DraftState:
        head = target.get_output_embeddings()
        if self.draft_token_ids is not None:
            head = self.services.draft_head(self, head)
        return DraftState(BlockCache(), target.get_input_embeddings(), head)

    def draft(self, inputs: DraftInputs, state: DraftState, depth: int) -> torch.Tensor:
        """Denoise one block after the anchor. The whole block is always run, as in training; see [`ParallelDrafter.draft`]."""
        anchor, block_size = inputs.new_ids[:, -1:], self.config.block_size
        batch, num_read = inputs.features.shape[:2]
        device, dtype = self.device, self.dtype
        masks = mask_ids(self.config.mask_token_id, batch, block_size - 1, anchor.device)
        block_positions = inputs.new_positions[:, -1:] + cached_arange(0, block_size, inputs.new_positions.device)
        real = are_real(inputs.feature_counts, batch, num_read, device) if batch > 1 else None
        state.cache.set_previous_accepted_tokens(num_read)
        start = state.cache.get_seq_length()
        block_ids = torch.cat([anchor, masks], dim=1).to(state.embed_device)
        hidden_states = self(
            noise_embeds=state.embed_tokens(block_ids).to(device, dtype),
            context_hidden_states=inputs.features.to(device, dtype),
            position_ids=torch.cat([inputs.feature_positions, block_positions], dim=1).to(device),
            attention_mask=real if real is None else self._block_masks(real, state.cache.held_columns()),
            past_key_values=state.cache,
            **state.constants,
        ).last_hidden_state
        state.cache.keep(start, last_columns(inputs.feature_counts, batch, num_read))
        return state.lm_head(hidden_states[:, 1 : depth + 1].to(state.head_device, state.head_dtype))

    def draft_static(
        self, inputs: StaticDraftInputs, state: DraftState, lengths: torch.LongTensor, depth: int
    ) -> torch.Tensor:
        """See [`ParallelDrafter.draft_static`]."""
        batch, width = inputs.ids.shape
        block_size, device, cache = self.config.block_size, inputs.ids.device, state.cache
        masks = torch.full((batch, block_size - 1), self.config.mask_token_id, device=device)
        block_ids = torch.cat([inputs.last(inputs.ids), masks], dim=1)
        # Features are those of the token before.
        positions = torch.cat(
            [inputs.positions - 1, inputs.last(inputs.positions) + torch.arange(block_size, device=device)], dim=1
        )
        cache.columns = lengths[:, None] + torch.arange(width + block_size, device=device)
        hidden_states = self(
            noise_embeds=state.embed_tokens(block_ids).to(self.dtype),
            context_hidden_states=inputs.features.to(self.dtype),
            position_ids=positions,
            attention_mask=self._block_masks(inputs.real(), StaticColumns(lengths, cache.capacity)),
            past_key_values=cache,
            **state.constants,
        ).last_hidden_state
        return state.lm_head(hidden_states[:, 1 : depth + 1].to(dtype=state.head_dtype))

    def _block_masks(self, real: torch.BoolTensor, columns: HeldColumns | StaticColumns) -> dict[str, torch.Tensor]:
        """Masks for items of different lengths: a block sees all of its own context, and all of itself.

        Args:
            real: `(batch, new)`, which of the new context is no padding.
            columns: where the context so far is.
        """
        block_size = self.config.block_size
        real = torch.nn.functional.pad(real, (0, block_size), value=True)
        visible = columns.visible(real[:, None].expand(-1, block_size, -1))
        masks = {"full_attention": additive(visible, self.dtype)}
        if "sliding_attention" in self.config.layer_types:
            new, places = columns.token_indices(real.cumsum(dim=1) - 1)
            distance = (new[:, -block_size:, None] - places[:, None]).abs()
            masks["sliding_attention"] = additive(visible & (distance <= self.config.sliding_window), self.dtype)
        return masks

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_ids: torch.LongTensor,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Transformers' DFlash contract.

        Args:
            noise_embeds: `(batch, queries, H)`, the target's embeddings of anchor and masks; several blocks in training.
            context_hidden_states: `(batch, new, taps * target_hidden)`, tapped hidden states, in the order of the taps.
            position_ids: `(batch, new + queries)`, positions of context and block.
            attention_mask: `(batch, keys)` of ones and zeros, or `(batch, 1, queries, keys)` as the attention takes it (per
                layer type, if a dict). `None`: every query sees all of the context and of the block.
            past_key_values: context entries of earlier calls. Context *and block* are appended; the caller crops the block.

        Returns:
            `last_hidden_state (batch, queries, H)`, after the final norm, ready for the target's lm_head.
        """
        contexts = self.layer_contexts(context_hidden_states)
        return self.denoise(noise_embeds, contexts, position_ids, attention_mask, past_key_values, **kwargs)

    def layer_contexts(self, context_hidden_states: torch.Tensor) -> list[torch.Tensor]:
        """Context features `(batch, new, H)` for each layer, here the same for all, from `(batch, new, taps * target_hidden)`."""
        return [self.hidden_norm(self.fc(context_hidden_states))] * self.config.num_hidden_layers

    def denoise(
        self,
        noise_embeds: torch.Tensor,
        contexts: list[torch.Tensor],
        position_ids: torch.LongTensor,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None,
        past_key_values: Cache | None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """What follows fusion: all layers, given one context `(batch, new, H)` for each. The rest as for [`forward`]."""
        cos, sin = self.rotary_emb(noise_embeds, position_ids)
        position_embeddings = (cos.unsqueeze(1), sin.unsqueeze(1))
        masks = self._attention_masks(noise_embeds, attention_mask, past_key_values)
        hidden_states = noise_embeds
        for layer, context, layer_type in zip(self.layers, contexts, self.config.layer_types, strict=True):
            hidden_states = layer(
                hidden_states,
                context=context,
                position_embeddings=position_embeddings,
                attention_mask=masks[layer_type],
                past_key_values=past_key_values,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)

    def _attention_masks(
        self, noise_embeds: torch.Tensor, attention_mask: Any, past_key_values: Cache | None
    ) -> dict[str, torch.Tensor | None]:
        """One mask per layer type, as the attention implementation takes it."""
        if isinstance(attention_mask, dict):
            return attention_mask
        arguments = {
            "config": self.config,
            "inputs_embeds": noise_embeds,
            "attention_mask": attention_mask,
            "past_key_values": past_key_values,
        }
        masks = {"full_attention": None if attention_mask is None else create_bidirectional_mask(**arguments)}
        if "sliding_attention" in self.config.layer_types:
            masks["sliding_attention"] = create_bidirectional_sliding_window_mask(**arguments)
        return masks


def check_mask_token(config: DFlashConfig, vocab_size: int, kind: str) -> None:
    """Raise a `ValueError` unless the config names a mask token, and one of the vocabulary (if that is known, not 0)."""
    if config.mask_token_id is None or not 0 <= config.mask_token_id < (vocab_size or config.mask_token_id + 1):
        raise ValueError(
            f"a {kind} needs mask_token_id, an unused token in [0, {vocab_size}), got {config.mask_token_id}: "
            "set it in config.json (published drafters nest it in dflash_config)"
        )
