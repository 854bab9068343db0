"""DART: one causal layer over the target's states and masks, which drafts all positions at once (arXiv 2601.19278, section 3)."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from .cache import GrowingCache, StaticColumns
from .configuration_dart import DartConfig, published_tapped_hidden_states
from .inputs import DraftInputs, DraftState, StaticDraftInputs, are_real, cached_arange, last_columns, scoring
from .masks import causal_masks, padded_masks
from .target_bound import TargetBoundDrafter


class DartAttention(nn.Module):
    """Llama's attention, from inputs of twice the hidden size."""

    def __init__(self, config: DartConfig) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = 0
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        input_size = 2 * config.hidden_size
        query_size = config.num_attention_heads * self.head_dim
        key_size = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(input_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(input_size, key_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(input_size, key_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)

    def forward(
        self,
        inputs: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`(batch, queries, 2H)` to `(batch, queries, H)`."""
        heads = (*inputs.shape[:2], -1, self.head_dim)
        queries = self.q_proj(inputs).view(heads).transpose(1, 2)
        keys = self.k_proj(inputs).view(heads).transpose(1, 2)
        values = self.v_proj(inputs).view(heads).transpose(1, 2)
        queries, keys = apply_rotary_pos_emb(queries, keys, *position_embeddings)
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
            **kwargs,
        )
        return self.o_proj(output.reshape(*inputs.shape[:2], -1))


class DartLayer(GradientCheckpointingLayer):
    """The one decoder layer, and the learned representation of a mask (arXiv 2601.19278, section 3.2).

    A position of the prefix is its token's successor's embedding beside the fused hidden states, each normalised; the
    residual stream is the fused states themselves. A mask is `mask_rep`, not normalised; its residual stream is the first half.
    """

    def __init__(self, config: DartConfig) -> None:
        super().__init__()
        self.self_attn = DartAttention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mask_rep = nn.Parameter(torch.zeros(2 * config.hidden_size))

    def forward(self, next_embeds: torch.Tensor, fused: torch.Tensor, num_masks: int, **kwargs: Any) -> torch.Tensor:
        """Two of `(batch, prefix, H)` to `(batch, prefix + num_masks, H)`."""
        batch, _, hidden_size = fused.shape
        masks = self.mask_rep.expand(batch, num_masks, -1)
        prefix = torch.cat([self.input_layernorm(next_embeds), self.hidden_norm(fused)], dim=-1)
        residual = torch.cat([fused, masks[..., :hidden_size]], dim=1)
        hidden_states = residual + self.self_attn(torch.cat([prefix, masks], dim=1), **kwargs)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class DartDrafter(TargetBoundDrafter, PreTrainedModel):
    """A DART drafter: a prefix of fused hidden states and embeddings, masks after it, and all logits from one causal layer.

    It borrows the target's embedding, which it never saves, and has an lm_head of its own. With a reduced vocabulary that
    head scores `draft_vocab_size` of the target's tokens, and the others are never proposed.
    """

    config: DartConfig
    has_own_head = True
    base_model_prefix = ""
    main_input_name = "next_embeds"
    supports_gradient_checkpointing = True
    training_layout = "shared_prefix"
    training_objective = "annealed_kl"
    _no_split_modules = ["DartLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    ignored_weights: ClassVar[dict[str, str]] = {
        r"rotary_emb\.inv_freq$": "computed from the config",
        r"^embed_tokens\.weight$": "the target's embedding, which is read from the target",
    }
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [*ignored_weights]

    def __init__(self, config: DartConfig) -> None:
        super().__init__(config)
        check_dart_config(config)
        self.fc = nn.Linear(config.num_taps * config.target_hidden_size, config.hidden_size, bias=False)
        self.midlayer = DartLayer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        # The published names: target id = draft id + d2t[draft id], and t2d says which target ids have a draft id.
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        if not self.has_reduced_vocabulary:
            # Nothing is lost where a checkpoint leaves the identity out.
            self._keys_to_ignore_on_load_missing = ["d2t", "t2d"]
        self.generation_config = GenerationConfig()
        self.gradient_checkpointing = False
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DartLayer):
            init.normal_(module.mask_rep, std=self.config.initializer_range)
        elif isinstance(module, DartDrafter):
            init.zeros_(module.d2t)
            init.copy_(module.t2d, torch.arange(self.config.vocab_size) < self.config.draft_vocab_size)

    @classmethod
    def for_target(
        cls,
        target: PreTrainedModel,
        draft_token_ids: Sequence[int] | None = None,
        draft_tokens: int | None = None,
        **overrides: Any,
    ) -> "DartDrafter":
        """A fresh drafter that fits `target`: its width, heads, rope and vocabulary, and taps.

        The lm_head starts as the target's, where that can be read, and the drafter about as sure of every token as of any other.
        The rest is random, the mask included.

        Args:
            target: the model to draft for.
            draft_token_ids: the tokens that the drafter can propose, say the most frequent ones; `None` for all.
            draft_tokens: d, how many tokens it drafts a round; 8 by default, as in the paper. They take d - 1 masks (the config's
                `draft_length`), or d where a position doesn't predict the token after its own place (`shifted=False`).
            **overrides: any field of [`DartConfig`], `tapped_hidden_states` among them.

        Raises:
            ValueError: if the target can't be tapped as asked, `draft_token_ids` are not tokens of it, a field is none or can't
                have its value, or `draft_tokens` is no positive number or not what `draft_length` masks draft.
        """
        return cls.package().fresh(cls, target, draft_token_ids, draft_tokens, **overrides)

    @property
    def tapped_hidden_states(self) -> list[int]:
        if self.config.tapped_hidden_states is None:
            raise ValueError(
                "the config of this DartDrafter leaves its taps to the target, as published ones do: ask taps_for(target), or "
                "set tapped_hidden_states in config.json"
            )
        return self.config.tapped_hidden_states

    def taps_for(self, target: PreTrainedModel | None, use_target_features: bool | None = None) -> list[int]:
        """See [`ParallelDrafter.taps_for`]; where the config names no taps, the target's depth decides."""
        if self.config.tapped_hidden_states is not None:
            return super().taps_for(target, use_target_features)
        self.check_feature_use(use_target_features)
        return published_tapped_hidden_states(self.package().num_layer_outputs(target))

    @property
    def max_draft_depth(self) -> int:
        return self.config.draft_length + (1 if self.config.shifted else 0)

    @property
    def has_reduced_vocabulary(self) -> bool:
        return self.config.draft_vocab_size < self.config.vocab_size

    @property
    def draft_token_ids(self) -> torch.LongTensor | None:
        """`(draft_vocab_size,)`, the target's id of each column of the lm_head; `None` if they are the same."""
        if not self.has_reduced_vocabulary:
            return None
        return self.d2t + cached_arange(0, len(self.d2t), self.d2t.device)

    def check_target(self, target: PreTrainedModel, taps: list[int] | None = None) -> None:
        """See [`TargetBoundDrafter.check_target`]; there must be as many taps as the drafter fuses."""
        taps = self.taps_for(target) if taps is None else taps
        super().check_target(target, taps)
        if len(taps) != self.config.num_taps:
            raise ValueError(
                f"the drafter fuses {self.config.num_taps} hidden states, and a target of this depth has {taps} to tap: use "
                "the target that it was made for, or make a drafter for this one with DartDrafter.for_target"
            )

    def new_draft_state(self, target: PreTrainedModel) -> DraftState:
        return DraftState(GrowingCache(), target.get_input_embeddings())

    def draft(self, inputs: DraftInputs, state: DraftState, depth: int) -> torch.Tensor:
        """Feed the newly read prefix and the masks after it; the last `depth` positions score the draft.

        Shapes as in [`ParallelDrafter.draft`]. Queries see what lies before them only, so masks that are not asked for are not
        run.
        """
        batch, num_read = inputs.features.shape[:2]
        num_masks = depth - 1 if self.config.shifted else depth
        # Beside the features of token i stands the embedding of token i + 1. Both end with the latest: the features of the
        # last token that was read, and the anchor after it.
        next_ids = inputs.new_ids[:, -num_read:].to(state.embed_device)
        ahead = cached_arange(1, num_masks + 1, inputs.feature_positions.device)
        positions = torch.cat([inputs.feature_positions, inputs.feature_positions[:, -1:] + ahead], dim=1)
        start = state.cache.get_seq_length()
        logits = self(
            next_embeds=state.embed_tokens(next_ids).to(self.device, self.dtype),
            target_hidden_states=inputs.features.to(self.device, self.dtype),
            num_masks=num_masks,
            position_ids=positions.to(self.device),
            attention_mask=self._item_masks(inputs, state, num_masks) if batch > 1 else None,
            past_key_values=state.cache,
            logits_to_keep=slice(-depth, None),
        ).logits
        state.cache.keep(start, last_columns(inputs.feature_counts, batch, num_read))
        return logits

    def draft_static(
        self, inputs: StaticDraftInputs, state: DraftState, lengths: torch.LongTensor, depth: int
    ) -> torch.Tensor:
        """See [`ParallelDrafter.draft_static`]."""
        batch, width = inputs.ids.shape
        num_masks, device, cache = (depth - 1 if self.config.shifted else depth), inputs.ids.device, state.cache
        num_queries = width + num_masks
        scored = torch.arange(width, num_queries, device=device).expand(batch, -1)
        if self.config.shifted:
            scored = torch.cat([inputs.anchor_columns, scored], dim=1)
        cache.columns = lengths[:, None] + torch.arange(num_queries, device=device)

        return self(
            next_embeds=state.embed_tokens(inputs.ids).to(self.dtype),
            target_hidden_states=inputs.features.to(self.dtype),
            num_masks=num_masks,
            # Features are those of the token before.
            position_ids=inputs.positions_with(num_masks) - 1,
            attention_mask=causal_masks(
                inputs.real(num_masks), {"full_attention": None}, StaticColumns(lengths, cache.capacity), self.dtype
            ),
            past_key_values=cache,
            read_rows=scoring(scored),
        )

    def _item_masks(self, inputs: DraftInputs, state: DraftState, num_masks: int) -> torch.Tensor:
        """The mask for items of different lengths: each sees its own prefix, and is causal."""
        batch, num_read = inputs.features.shape[:2]
        real = are_real(inputs.feature_counts, batch, num_read, self.device)
        real = nn.functional.pad(real, (0, num_masks), value=True)
        return padded_masks(real, {"full_attention": None}, state.cache, self.dtype)

    def forward(
        self,
        next_embeds: torch.Tensor,
        target_hidden_states: torch.Tensor,
        num_masks: int,
        position_ids: torch.LongTensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        logits_to_keep: slice | torch.BoolTensor = slice(None),
        read_rows: Callable[[nn.Module, torch.Tensor], Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Prefix and masks through the layer, and the chosen positions through the lm_head.

        Args:
            next_embeds: `(batch, prefix, H)`, at place i the target's embedding of token i + 1.
            target_hidden_states: `(batch, prefix, taps * target_hidden)`, at place i those of token i.
            num_masks: masks after the prefix; those of several prefixes in training.
            position_ids: `(batch, prefix + num_masks)`.
            attention_mask: `(batch, queries)`, 0 for padding, or `(batch, 1, queries, columns)` as attention takes it. `None`:
                every query sees all before it.
            past_key_values: entries of the prefix so far. All positions are appended; the caller drops those of the masks.
            logits_to_keep: which positions to score, `(batch, queries)` if not a slice.
            read_rows: called with the lm_head and the hidden states that it would get. What it returns is returned, in place of
                logits: training scores a few positions at a time.

        Returns:
            `logits (batch, kept, draft_vocab_size)`; `(kept, draft_vocab_size)` for a mask.
        """
        fused = self.fc(target_hidden_states)
        # A BlockMask has a shape, but is no tensor.
        if attention_mask is None or len(attention_mask.shape) == 2:
            # Only the shape of the embeddings is looked at.
            shape = fused.new_empty(*position_ids.shape, 1)
            attention_mask = create_causal_mask(
                config=self.config, inputs_embeds=shape, attention_mask=attention_mask, past_key_values=past_key_values
            )
        hidden_states = self.midlayer(
            next_embeds,
            fused,
            num_masks,
            position_embeddings=self.rotary_emb(fused, position_ids),
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
        kept = hidden_states[:, logits_to_keep] if isinstance(logits_to_keep, slice) else hidden_states[logits_to_keep]
        kept = self.norm(kept)
        if self.config.double_norm:
            kept = self.norm(kept)
        if read_rows is not None:
            return read_rows(self.lm_head, kept)
        return CausalLMOutputWithPast(logits=self.lm_head(kept), past_key_values=past_key_values)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args: Any, **kwargs: Any):
        """As in `PreTrainedModel`; every weight must be there, and the two vocabulary maps must agree."""
        loaded = super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        drafter = loaded[0] if isinstance(loaded, tuple) else loaded
        check_vocabulary_maps(drafter.d2t, drafter.t2d)
        return loaded


def check_dart_config(config: DartConfig) -> None:
    """Raise a `ValueError` for a configuration that can't draft."""
    least = 0 if config.shifted else 1
    if config.draft_length < least:
        raise ValueError(
            f"a DART drafter needs draft_length >= {least}, got {config.draft_length}: set it in config.json"
        )
    if not 1 <= config.draft_vocab_size <= config.vocab_size:
        raise ValueError(
            f"draft_vocab_size must be in [1, {config.vocab_size}], the target's vocabulary, got {config.draft_vocab_size}: set "
            "it in config.json"
        )
    if config.num_hidden_layers != 1:
        raise ValueError(
            f"a DART drafter has one decoder layer, got num_hidden_layers={config.num_hidden_layers}: set it in config.json"
        )
    if config.num_taps < 1:
        raise ValueError(
            "a DART drafter needs tapped_hidden_states, the indices of the target's hidden states that it reads, or null for "
            "the published rule: set it in config.json"
        )


def check_vocabulary_maps(d2t: torch.Tensor, t2d: torch.Tensor, place: str = "") -> None:
    """Raise a `ValueError` if the maps of a drafter of any kind don't name the same tokens of the target, each once."""
    if d2t.is_meta:
        return
    ids = (d2t + torch.arange(len(d2t), device=d2t.device)).cpu()
    mapped = t2d.cpu().nonzero().flatten()
    if not torch.equal(ids, mapped):
        raise ValueError(
            f"d2t{place} maps {len(ids)} draft tokens and t2d marks {len(mapped)} target tokens, and these should be the same, "
            "in ascending order: the checkpoint is damaged, or its tokens were mapped by other rules"
        )
