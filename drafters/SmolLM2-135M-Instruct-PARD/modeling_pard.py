"""PARD: an ordinary causal LM that drafts K tokens in one forward with mask tokens (arXiv 2504.18583, section 3.1).

PARD-2 is the same with a projection, which adds a target's hidden states to the input embeddings.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)
from transformers.cache_utils import Cache
from transformers.modeling_utils import safe_save_file, slice_logits_to_keep

from .base import ParallelDrafter, find_file, text_fact
from .cache import GrowingCache, StaticColumns
from .configuration_pard import PardConfig, PardLlamaConfig, PardQwen2Config, PardQwen3Config
from .inputs import (
    DraftInputs,
    DraftState,
    StaticDraftInputs,
    are_real,
    cached_arange,
    last_columns,
    mask_ids,
    scoring,
    take_positions,
)
from .masks import attention_windows, causal_masks, padded_masks
from .stock_assistant import draft_as_assistant
from .target_projection import (
    PROJECTION,
    PROJECTION_FILES,
    check_pard2_config,
    feature_inputs,
    feature_rows_of,
    new_projection,
)


class PardDrafter(ParallelDrafter, PreTrainedModel):
    """A PARD drafter. It reads token ids only, so one drafter serves every target that shares its tokenizer.

    A PARD-2 drafter has a projection (`target_proj`) as well, and reads the hidden states of one target too, unless
    `generation_config.use_target_features` is `False`: then it is a PARD drafter.

    `PardDrafter(config)` and `PardDrafter.from_pretrained` give the subclass of the base architecture, which is also that
    architecture's ordinary causal LM (`isinstance(drafter, Qwen3ForCausalLM)`).
    """

    config: PardConfig
    training_layout = "dropped_masks"
    # Eq. 8: a mean of its own for each subtask, which COD would let weigh less.
    training_objective = "subtask_cross_entropy"
    # The projection has a file of its own.
    _keys_to_ignore_on_save = [f"{PROJECTION}.weight", f"{PROJECTION}.bias"]
    _keys_to_ignore_on_load_missing = [rf"^{PROJECTION}\."]
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
        check_distinct_masks(config)
        check_pard2_config(config)
        super().__init__(config, *args, **kwargs)
        self.target_proj = new_projection(config)

    def save_weights(
        self,
        save_directory,
        is_main_process: bool,
        state_dict: dict[str, torch.Tensor] | None,
        **kwargs: Any,
    ) -> None:
        """See [`ParallelDrafter.save_weights`]; what is more than a plain causal LM goes into folders of its own."""
        is_writer = self.should_save_on_this_rank(is_main_process)
        if is_writer and self.config.draft_vocab_size is not None:
            save_tensors({name: self.get_buffer(name) for name in VOCABULARY_MAPS}, save_directory, VOCABULARY_FILE)
        if self.target_proj is None:
            super().save_weights(save_directory, is_main_process, state_dict, **kwargs)
            return
        weights = dict(self.state_dict() if state_dict is None else state_dict)
        projection = {name: weights[name] for name in weights if name.startswith(f"{PROJECTION}.")}
        if is_writer and not projection:
            raise ValueError(
                f"the state dict of a PARD-2 drafter needs its projection ({PROJECTION}.weight), and this one has none: pass "
                "all of the drafter's weights"
            )
        super().save_weights(save_directory, is_main_process, weights, **kwargs)
        if is_writer:
            save_tensors(projection, save_directory, PROJECTION_FILES[0])

    def load_separate_weights(self, folder, **source: Any) -> None:
        """See [`ParallelDrafter.load_separate_weights`]: the draft vocabulary, and the projection."""
        if self.config.draft_vocab_size is not None:
            self.load_vocabulary(folder, find_file(folder, VOCABULARY_FILE, **source))
        if self.target_proj is None:
            return
        file = find_file(folder, PROJECTION_FILES[0], **source)
        if file is None:
            raise ValueError(
                f"{folder} is a PARD-2 drafter without its projection ({PROJECTION_FILES[0]}): get it again, or load it with the "
                "package hf_pardraft, which drafts without it"
            )
        weights = {name.removeprefix(f"{PROJECTION}."): weight for name, weight in load_file(file).items()}
        self.target_proj.load_state_dict(weights)

    def load_vocabulary(self, folder, file: str | None) -> None:
        """Take the maps of the draft vocabulary from a file; a `ValueError` if it is `None`, or not the config's."""
        maps, size = {} if file is None else load_file(file), self.config.draft_vocab_size
        if maps.keys() != {*VOCABULARY_MAPS} or len(maps["d2t"]) != size:
            raise ValueError(
                f"{folder} is a drafter of {size} tokens (draft_vocab_size) without {VOCABULARY_FILE}, which names them, or with "
                "another's: get it again, or take draft_vocab_size out of config.json to propose all tokens"
            )
        for name, values in maps.items():
            self.register_buffer(name, values.to(self.device), persistent=False)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        """As in `PreTrainedModel`. Tokens that are gone are left out of a draft vocabulary."""
        resized, ids = super().resize_token_embeddings(*args, **kwargs), self.draft_token_ids
        if ids is not None:
            self.set_draft_vocabulary(ids[ids < self.config.vocab_size].tolist() or None)
        return resized

    @classmethod
    def from_causal_lm(
        cls,
        model_or_path: PreTrainedModel | str,
        mask_token_id: int | Sequence[int] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        target: PreTrainedModel | None = None,
        target_layers: list[int] | None = None,
        target_scale: float = 0.02,
        **kwargs: Any,
    ) -> "PardDrafter":
        """Adapt an autoregressive Llama, Qwen2 or Qwen3 model. It drafts badly until it is trained.

        Args:
            model_or_path: the model (its weights are copied), or where to load it from. A PARD drafter keeps its mask token.
            mask_token_id: an unused token id, which all masks share; `None` picks one. A list gives each mask an id of its own,
                m_0 to m_{K-2} for K drafted tokens (arXiv 2504.18583, section 4.3, found this a little slower);
                [`~hf_pardraft.pairing.mask_token.unused_token_ids`] finds them. Such a drafter can't draft more than K tokens.
            tokenizer: says which ids are in use; by default the one saved beside the model.
            target: makes a PARD-2 drafter, which reads this model's hidden states. Until it is trained they add nothing.
            target_layers: PARD-2: which of them, as indices into `hidden_states`: -1 is taken after the final norm, -2 is
                the output of the last layer but one. By default four, evenly from the end.
            target_scale: PARD-2: what the projected states are multiplied with.
            **kwargs: for `AutoModelForCausalLM.from_pretrained`, if a path is given.

        Raises:
            ValueError: for another architecture, mask token ids that are in use or not different, or a target that can't be
                tapped as asked.
        """
        options = {"target": target, "target_layers": target_layers, "target_scale": target_scale, **kwargs}
        return cls.package().fresh(cls, model_or_path, mask_token_id, tokenizer, **options)

    @property
    def tapped_hidden_states(self) -> list[int]:
        return self._taps(vars(self.generation_config).get("use_target_features"))

    def taps_for(self, target: PreTrainedModel | None, use_target_features: bool | None = None) -> list[int]:
        """See [`ParallelDrafter.taps_for`]; a PARD-2 drafter can do without its target's hidden states."""
        return self.tapped_hidden_states if use_target_features is None else self._taps(use_target_features)

    def _taps(self, use_target_features: bool | None) -> list[int]:
        if self.target_proj is not None:
            return [] if use_target_features is False else list(self.config.pard2_target_layers)
        if use_target_features:
            raise ValueError(
                "use_target_features=True needs a projection, and this PARD drafter has none: load a PARD-2 drafter with its "
                f"projection ({', '.join(PROJECTION_FILES)}), make one with PardDrafter.from_causal_lm(..., target=target), or "
                "leave the setting out"
            )
        return []

    def check_target(self, target: PreTrainedModel, taps: list[int] | None = None) -> None:
        """See [`ParallelDrafter.check_target`]; the hidden states must have the width that the projection takes."""
        taps = self.tapped_hidden_states if taps is None else taps
        width = text_fact(target, "hidden_size") if taps else 0
        if taps and len(taps) * width != self.config.pard2_target_dim:
            raise ValueError(
                f"the drafter's projection takes {self.config.pard2_target_dim} features (pard2_target_dim), but {len(taps)} "
                f"hidden states of this target have {len(taps)} * {width}: use the target that it was made for, or set "
                "generation_config.use_target_features to False"
            )
        super().check_target(target, taps)

    @property
    def max_draft_depth(self) -> int | None:
        """See [`ParallelDrafter.max_draft_depth`]: no limit where all masks share an id."""
        return None if self.config.pard_tokens is None else len(self.config.pard_tokens) + 1

    def taught_depth(self, draft_tokens: int) -> int:
        """See [`ParallelDrafter.taught_depth`]."""
        limit = self.max_draft_depth
        if limit is not None and draft_tokens > limit:
            raise ValueError(
                f"learning to draft {draft_tokens} tokens takes {draft_tokens - 1} masks, and this drafter has ids for "
                f"{limit - 1} (pard_tokens {self.config.pard_tokens}): set draft_tokens to {limit} or less, or make the drafter "
                "with more ids"
            )
        return draft_tokens

    def generate(self, inputs: torch.LongTensor | None = None, generation_config=None, **kwargs: Any) -> Any:
        """As in `GenerationMixin`; asked as an assistant, which transformers' own loop does, it drafts in one forward.

        This is how a PARD drafter works where this package is not installed; see [`draft_as_assistant`]. That loop may ask for
        more tokens than masks with distinct ids reach, and gets as many as there are.
        """
        if generation_config is None or not generation_config.is_assistant:
            return super().generate(inputs, generation_config, **kwargs)
        end_ids = generation_config.eos_token_id
        asked = kwargs.get("max_new_tokens") or self.draft_depth
        return draft_as_assistant(
            self,
            kwargs["input_ids"] if inputs is None else inputs,
            asked if self.max_draft_depth is None else min(asked, self.max_draft_depth),
            kwargs.get("logits_processor") or (),
            kwargs.get("attention_mask"),
            kwargs.get("past_key_values"),
            bool(generation_config.do_sample),
            () if end_ids is None else end_ids if isinstance(end_ids, list) else (end_ids,),
        )

    def new_draft_state(self, target: PreTrainedModel) -> DraftState:
        head = None if self.draft_token_ids is None else self.services.draft_head(self, self.get_output_embeddings())
        return DraftState(GrowingCache(), lm_head=head)

    def draft(self, inputs: DraftInputs, state: DraftState, depth: int) -> torch.Tensor:
        """Feed the new tokens and `depth - 1` masks (eq. 7); the last `depth` positions give the candidates' logits.

        `depth` may exceed the K of training if all masks share one id. Shapes as in [`ParallelDrafter.draft`]. Features, if
        there are any, are added to the embeddings (PARD-2).
        """
        batch, num_new = inputs.new_ids.shape
        masks = self._mask_ids(batch, depth - 1, inputs.new_ids.device)
        ahead = cached_arange(1, depth, inputs.new_positions.device)
        start = state.cache.get_seq_length()
        outputs = self(
            input_ids=torch.cat([inputs.new_ids, masks], dim=1).to(self.device),
            position_ids=torch.cat([inputs.new_positions, inputs.new_positions[:, -1:] + ahead], dim=1).to(self.device),
            attention_mask=self._item_masks(inputs, state, depth) if batch > 1 else None,
            past_key_values=state.cache,
            use_cache=True,
            logits_to_keep=depth,
            read_rows=state.lm_head and (lambda _, states: state.lm_head(states)),
            **feature_inputs(inputs, depth, self.config),
        )
        state.cache.keep(start, last_columns(inputs.new_counts, batch, num_new))
        return outputs if state.lm_head else outputs.logits

    def draft_static(
        self, inputs: StaticDraftInputs, state: DraftState, lengths: torch.LongTensor, depth: int
    ) -> torch.Tensor:
        """See [`ParallelDrafter.draft_static`]."""
        batch, width = inputs.ids.shape
        num_masks, device = depth - 1, inputs.ids.device
        masks = self._mask_ids(batch, num_masks, device)
        num_queries = width + num_masks
        state.cache.columns = lengths[:, None] + torch.arange(num_queries, device=device)
        of_masks = torch.arange(width, num_queries, device=device).expand(batch, -1)
        scored = torch.cat([inputs.anchor_columns, of_masks], dim=1)

        return self(
            input_ids=torch.cat([inputs.ids, masks], dim=1),
            position_ids=inputs.positions_with(num_masks),
            attention_mask=causal_masks(
                inputs.real(num_masks),
                attention_windows(self.config),
                StaticColumns(lengths, state.cache.capacity),
                self.dtype,
            ),
            past_key_values=state.cache,
            use_cache=True,
            read_rows=lambda head, states: scoring(scored)(state.lm_head or head, states),
            **feature_rows_of(inputs, num_masks),
        )

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        target_features: torch.Tensor | None = None,
        feature_rows: torch.LongTensor | None = None,
        read_rows: Callable[[nn.Module, torch.Tensor], Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """The base architecture's forward, plus:

        Args:
            target_features: for PARD-2, `(batch, tokens, pard2_target_dim)`, what is projected and added to the embeddings of
                `input_ids (batch, queries)`: for each token its predecessor's hidden states. `None` adds nothing.
            feature_rows: `(batch, queries)`, which of them each query gets; by default query i gets number i.
            read_rows: called with the lm_head and the last hidden states of the positions of `logits_to_keep`. What it returns is
                returned, and there are no logits: training scores a few positions at a time, inside this forward, where
                distributed wrappers have the lm_head's weights at hand.
        """
        if target_features is not None:
            added = self.target_proj(target_features.to(self.target_proj.weight))
            if feature_rows is not None:
                added = take_positions(added, feature_rows)
            inputs_embeds = self.get_input_embeddings()(input_ids) + self.config.pard2_scale * added
            input_ids = None
        if read_rows is not None:
            states = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
                **kwargs,
            ).last_hidden_state
            return read_rows(self.get_output_embeddings(), slice_logits_to_keep(states, logits_to_keep))
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )

    def _mask_ids(self, batch: int, count: int, device: torch.device) -> torch.LongTensor:
        if self.config.pard_tokens is None:
            return mask_ids(self.config.pard_token, batch, count, device)
        return distinct_mask_ids(tuple(self.config.pard_tokens), batch, count, device)

    def _item_masks(self, inputs: DraftInputs, state: DraftState, depth: int) -> Any:
        """Masks for items of different lengths: each sees its own committed text, and is causal after it."""
        batch, num_new = inputs.new_ids.shape
        real = torch.nn.functional.pad(
            are_real(inputs.new_counts, batch, num_new, self.device), (0, depth - 1), value=True
        )
        return padded_masks(real, attention_windows(self.config), state.cache, self.dtype)


class PardLlama(PardDrafter, LlamaForCausalLM):
    config: PardLlamaConfig


class PardQwen2(PardDrafter, Qwen2ForCausalLM):
    config: PardQwen2Config


class PardQwen3(PardDrafter, Qwen3ForCausalLM):
    config: PardQwen3Config


# The maps of a draft vocabulary, as published: target id = draft id + d2t[draft id], and t2d says which target ids have one.
VOCABULARY_FILE, VOCABULARY_MAPS = "draft_vocabulary/model.safetensors", ("d2t", "t2d")
PARD_DRAFTERS = {"llama": PardLlama, "qwen2": PardQwen2, "qwen3": PardQwen3}


def save_tensors(tensors: dict[str, torch.Tensor], folder, name: str) -> None:
    file = Path(folder) / name
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    safe_save_file(tensors, str(file), metadata={"format": "pt"})


@lru_cache(maxsize=64)
def distinct_mask_ids(
    mask_token_ids: tuple[int, ...], batch: int, count: int, device: torch.device
) -> torch.LongTensor:
    """[`mask_ids`] where masks have an id each: the first `count` of them.

    Raises:
        ValueError: if there are fewer.
    """
    if count > len(mask_token_ids):
        raise ValueError(
            f"this drafter has {len(mask_token_ids)} mask token ids, one for each place, so it drafts at most "
            f"{len(mask_token_ids) + 1} tokens at a time, got {count + 1}: ask for fewer, or train one with more"
        )
    with torch.inference_mode(False):
        return torch.tensor(mask_token_ids[:count], dtype=torch.long, device=device).repeat(batch, 1)


def check_distinct_masks(config: PardConfig) -> None:
    """Raise a `ValueError` unless masks that have an id each have different ones, the first of them `pard_token`."""
    ids = config.pard_tokens
    if ids is None:
        return
    if (
        not ids
        or len(set(ids)) < len(ids)
        or not all(0 <= i < config.vocab_size for i in ids)
        or ids[0] != config.pard_token
    ):
        raise ValueError(
            f"pard_tokens should be different ids in [0, {config.vocab_size}), of which the first is pard_token "
            f"({config.pard_token}), got {ids}: mend config.json, or make the drafter with PardDrafter.from_causal_lm"
        )


def drafter_class_of(config) -> type[PardDrafter]:
    """The drafter class of a configuration's base architecture."""
    if not isinstance(config, PardConfig):
        raise ValueError(
            f"PardDrafter takes a PardConfig, got {type(config).__name__}: adapt an ordinary model with "
            "PardDrafter.from_causal_lm, or load a drafter with PardDrafter.from_pretrained"
        )
    return PARD_DRAFTERS[config.model_type]
