"""DFlare: a DFlash drafter each of whose layers has its own view of the target's hidden states (arXiv 2606.02091, section 4)."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, initialization
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from .configuration_dflare import DFlareConfig
from .inputs import DraftState
from .modeling_dflash import DFlashAttention, DFlashDrafter, DFlashLayer

FUSIONS = ("softmax", "linear", "fc")
FUSION_NORMS = ("shared", "per_layer")
# Before training a layer leans towards the tap at its own relative depth: with 9 taps, it makes up 48 % of the sum.
INITIAL_PREFERENCE = 2.0


def initial_preferences(num_layers: int, num_taps: int) -> torch.Tensor:
    """W of eq. 3 before training, `(layers, taps)`: layer d prefers tap floor(d * taps / layers), the others are alike."""
    preferences = torch.zeros(num_layers, num_taps)
    layers = torch.arange(num_layers)
    preferences[layers, layers * num_taps // num_layers] = INITIAL_PREFERENCE
    return preferences


class DFlareAttention(DFlashAttention):
    """Context and block answer through projections of their own (arXiv 2606.02091, eq. 4); `k_norm` is shared."""

    def __init__(self, config: DFlareConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        if config.separate_kv:
            key_size = config.num_key_value_heads * self.head_dim
            self.k_proj_target = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
            self.v_proj_target = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)

    def keys_and_values(self, context: torch.Tensor, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.config.separate_kv:
            return super().keys_and_values(context, hidden_states)
        keys = torch.cat([self.k_proj_target(context), self.k_proj(hidden_states)], dim=1)
        values = torch.cat([self.v_proj_target(context), self.v_proj(hidden_states)], dim=1)
        return keys, values


class DFlareLayer(DFlashLayer):
    """A DFlash layer with DFlare's attention."""

    attention_class = DFlareAttention


class DFlareDrafter(DFlashDrafter):
    """A DFlare drafter: DFlash, but every layer attends to its own mixture of more of the target's layers.

    All that a [`DFlashDrafter`] does it does too, transformers' own contract for `speculation_type="dflash"` included.
    """

    config: DFlareConfig
    layer_class = DFlareLayer
    _no_split_modules = ["DFlareLayer"]

    def check_config(self) -> None:
        """See [`DFlashDrafter.check_config`]; the switches must be known, and go together."""
        super().check_config()
        config = self.config
        for name, choices in (("fusion", FUSIONS), ("fusion_norm", FUSION_NORMS)):
            if getattr(config, name) not in choices:
                raise ValueError(
                    f"{name} must be one of {choices}, got {getattr(config, name)!r}: set it in config.json"
                )
        if config.fusion == "fc" and config.fusion_fc:
            raise ValueError(
                "fusion_fc puts a linear map after a weighted sum of the taps, and fusion='fc' is a linear map already: set "
                "fusion to 'softmax' or 'linear', or fusion_fc to false"
            )
        if config.fusion != "fc" and config.target_hidden_size != config.hidden_size:
            raise ValueError(
                f"a weighted sum of the target's hidden states is as wide as they are: expected target_hidden_size "
                f"{config.hidden_size}, the drafter's hidden_size, got {config.target_hidden_size}"
            )

    def add_fusion(self) -> None:
        """The weights that make context features of tapped hidden states (eq. 3)."""
        config = self.config
        if config.fusion == "fc":
            super().add_fusion()
        else:
            shape = (config.num_hidden_layers, len(config.target_layer_ids))
            self.layer_fusion_weights = nn.Parameter(torch.empty(shape))
        if config.fusion_fc:
            self.fusion_fc = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        num_norms = 1 if config.fusion_norm == "shared" else config.num_hidden_layers
        norms = nn.ModuleList(Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(num_norms))
        self.hidden_norm = norms[0] if config.fusion_norm == "shared" else norms

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self and self.config.fusion != "fc":
            weights = initial_preferences(*self.layer_fusion_weights.shape)
            # Without the softmax, training starts from the same mixture.
            weights = weights if self.config.fusion == "softmax" else weights.softmax(dim=1)
            initialization.copy_(self.layer_fusion_weights, weights)

    @classmethod
    def for_target(
        cls,
        target: PreTrainedModel,
        num_layers: int = 7,
        block_size: int = 16,
        tokenizer=None,
        **overrides: Any,
    ) -> "DFlareDrafter":
        """A fresh drafter that fits `target`, see [`DFlashDrafter.for_target`]; `overrides` are fields of [`DFlareConfig`]."""
        return super().for_target(target, num_layers, block_size, tokenizer, **overrides)

    def new_draft_state(self, target: PreTrainedModel) -> DraftState:
        state = super().new_draft_state(target)
        if self.config.fusion != "fc":
            state.constants = {"fusion_weights": self.fusion_weights().to(self.dtype)}
        return state

    def fusion_weights(self) -> torch.Tensor:
        """alpha of eq. 3, `(layers, taps)` in float32: how much of each tap goes into each layer's context."""
        weights = self.layer_fusion_weights.float()
        return weights.softmax(dim=1) if self.config.fusion == "softmax" else weights

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_ids: torch.LongTensor,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        past_key_values: Cache | None = None,
        fusion_weights: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Transformers' DFlash contract, see [`DFlashDrafter.forward`].

        Args:
            fusion_weights: what [`fusion_weights`] gives, from a caller that calls often and keeps it.
        """
        contexts = self.layer_contexts(context_hidden_states, fusion_weights)
        return self.denoise(noise_embeds, contexts, position_ids, attention_mask, past_key_values, **kwargs)

    def layer_contexts(
        self, context_hidden_states: torch.Tensor, fusion_weights: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Context features `(batch, new, H)` for each layer (eq. 3), from `(batch, new, taps * H)`."""
        is_shared = self.config.fusion_norm == "shared"
        if self.config.fusion == "fc":
            if is_shared:
                return super().layer_contexts(context_hidden_states)
            fused = self.fc(context_hidden_states)
            return [norm(fused) for norm in self.hidden_norm]
        weights = self.fusion_weights() if fusion_weights is None else fusion_weights
        taps = context_hidden_states.unflatten(-1, (weights.shape[1], -1))
        # (batch, new, layers, H)
        fused = weights.to(taps.dtype) @ taps
        if self.config.fusion_fc:
            fused = self.fusion_fc(fused)
        if is_shared:
            return list(self.hidden_norm(fused).unbind(2))
        return [norm(layer) for norm, layer in zip(self.hidden_norm, fused.unbind(2), strict=True)]
