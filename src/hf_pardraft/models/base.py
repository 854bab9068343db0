"""What every parallel drafter shares: the `draft` contract, its inputs, and the checks on a target.

This file travels with every drafter that is pushed to the Hub, so it imports torch, transformers and siblings only.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from .cache import GrowingCache
from .checked_loading import hub_arguments, load_checked
from .checksums import add_checksums
from .exact_frequencies import exact_frequencies
from .pairing import note_pairing, warn_if_other_target
from .saving import CARD, PUSH_ARGUMENTS, push_drafter, set_auto_map, staged, write_code
from .tap_checks import check_taps, text_fact


@dataclass
class DraftInputs:
    """What has happened since the drafter's last call: the newly committed text, and what the target thought of it.

    The last of `new_ids` is the *anchor*: committed, but not yet read by the target. On the first call `new_ids` holds
    the whole text so far. Rows of a batch that have less to tell are padded on the left.

    Attributes:
        new_ids: `(batch, new)`, the tokens committed since the last call, oldest first.
        new_positions: `(batch, new)`, their positions (what RoPE sees).
        features: `(batch, read, taps * target_hidden)` or `None`, the tapped hidden states of the tokens that the target
            has read since the last call. They end just before the anchor.
        feature_positions: `(batch, read)` or `None`, the positions of those tokens.
        new_counts: how many of `new_ids` are real in each row, at least one; `None` if all are.
        feature_counts: how many of `features` are real in each row; `None` if all are.
    """

    new_ids: torch.LongTensor
    new_positions: torch.LongTensor
    features: torch.Tensor | None = None
    feature_positions: torch.LongTensor | None = None
    new_counts: list[int] | None = None
    feature_counts: list[int] | None = None


@dataclass
class StaticDraftInputs:
    """What a round of fixed shapes tells the drafter: a [`DraftInputs`] whose rows are padded on the right to one width.

    Attributes:
        ids, positions: `(batch, width)`, the tokens committed since the last draft, and their positions.
        counts: `(batch,)`, how many of them are real.
        features: `(batch, width, taps * target_hidden)` or `None`; beside each token the states of the token before it.
    """

    ids: torch.LongTensor
    positions: torch.LongTensor
    counts: torch.LongTensor
    features: torch.Tensor | None = None

    @property
    def anchors(self) -> torch.LongTensor:
        """`(batch, 1)`, the column of each row's newest token, the anchor; the first of a row that has no news."""
        return (self.counts[:, None] - 1).clamp(min=0)

    def last(self, values: torch.LongTensor) -> torch.LongTensor:
        """`(batch, 1)`, of `ids` or `positions` those of the anchor."""
        return values.gather(1, self.anchors)

    def real(self, behind: int = 0) -> torch.BoolTensor:
        """`(batch, width + behind)`, which columns are real, where as many real ones stand behind all."""
        columns = torch.arange(self.ids.shape[1], device=self.ids.device)
        return nn.functional.pad(columns < self.counts[:, None], (0, behind), value=True)

    def positions_with(self, num_masks: int, first: int = 1) -> torch.LongTensor:
        """`(batch, width + num_masks)`, `positions` and those of masks, which count on from the anchor."""
        ahead = torch.arange(first, first + num_masks, device=self.positions.device)
        return torch.cat([self.positions, self.last(self.positions) + ahead], dim=1)

    def indices_with(self, num_masks: int) -> torch.LongTensor:
        """`(batch, width + num_masks)`, indices of the same rows, counted from the end of what was drafted from before."""
        device = self.ids.device
        new = torch.arange(self.ids.shape[1], device=device).expand(len(self.ids), -1)
        return torch.cat([new, self.counts[:, None] + torch.arange(num_masks, device=device)], dim=1)


@lru_cache(maxsize=256)
def cached_arange(first: int, end: int, device: torch.device) -> torch.LongTensor:
    """The numbers from `first` to before `end`, `(numbers,)`, made once and never to be written to."""
    # A call under inference_mode would otherwise make tensors that no later autograd user may touch.
    with torch.inference_mode(False):
        return torch.arange(first, end, device=device)


@lru_cache(maxsize=64)
def mask_ids(mask_token_id: int, batch: int, count: int, device: torch.device) -> torch.LongTensor:
    """`(batch, count)` mask token ids, made once and never to be written to."""
    with torch.inference_mode(False):
        return torch.full((batch, count), mask_token_id, device=device)


@lru_cache(maxsize=64)
def distinct_mask_ids(
    mask_token_ids: tuple[int, ...], batch: int, count: int, device: torch.device
) -> torch.LongTensor:
    """The same for masks that have an id each: the first `count` of them.

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


def last_columns(counts: list[int] | None, batch: int, width: int) -> list[list[int]]:
    """The columns of the real entries of rows that are padded on the left to `width`."""
    return [list(range(width - count, width)) for count in counts or [width] * batch]


def are_real(counts: list[int] | None, batch: int, width: int, device: torch.device) -> torch.BoolTensor:
    """Which entries of such rows are real: `(batch, width)`."""
    if counts is None:
        return torch.ones(batch, width, dtype=torch.bool, device=device)
    return torch.arange(width, device=device) >= width - torch.tensor(counts, device=device)[:, None]


def take_rows(values: torch.Tensor, rows: torch.LongTensor) -> torch.Tensor:
    """Of `values (batch, all, width)` the rows `(batch, kept)`: `(batch, kept, width)`."""
    return values.gather(1, rows.to(values.device)[:, :, None].expand(-1, -1, values.shape[2]))


def scoring(rows: torch.LongTensor) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """What a drafter's forward takes as `read_rows` to score the rows `(batch, kept)` only."""
    return lambda head, states: head(take_rows(states, rows))


def input_device(module: nn.Module) -> torch.device:
    """Where a target, or a part of it, takes its input.

    Weights that accelerate has offloaded are on the meta device; such a module takes its input from anywhere.
    """
    return next((weight.device for weight in module.parameters() if not weight.is_meta), torch.device("cpu"))


@dataclass
class DraftState:
    """One generate call's memory of a drafter: its cache, what it borrows from the target, and what no round changes.

    Attributes:
        cache: keys and values of the context.
        embed_tokens, lm_head: the target's, if the drafter has none of its own.
        constants: arguments of the drafter's forward that are the same in every round, computed once.
        embed_device, head_device, head_dtype: where what is borrowed takes its input, and in what precision.
    """

    cache: GrowingCache
    embed_tokens: nn.Module | None = None
    lm_head: nn.Module | None = None
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    embed_device: torch.device | None = field(init=False, default=None)
    head_device: torch.device | None = field(init=False, default=None)
    head_dtype: torch.dtype | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.embed_tokens is not None:
            self.embed_device = input_device(self.embed_tokens)
        if self.lm_head is not None:
            self.head_device, self.head_dtype = input_device(self.lm_head), self.lm_head.weight.dtype


class ParallelDrafter:
    """The contract of all drafters, as a mixin of `PreTrainedModel` classes.

    A subclass says what it taps (`tapped_hidden_states`), how deep it can draft (`max_draft_depth`), and implements
    `new_draft_state` and `draft`. Nothing else about it is known to the decode loops. To the trainer it says how its batches
    are laid out, and what it learns from them.

    Attributes:
        training_layout: "dropped_masks" for a causal LM's rows with masks behind them, some of them dropped;
            "anchored_blocks" for blocks of an anchor and masks beside the target's hidden states; "shared_prefix" for a text's
            rows with masks behind many of its prefixes.
        training_objective: what it learns unless training is told otherwise: "cross_entropy" with the text; PARD's, each of
            whose positions is averaged by itself ("subtask_cross_entropy"); or "annealed_kl" to the target's law.
        last_stats: how the latest `generate` call went.
        card_writer: writes a drafter's card, under a name, into a folder; set by the package, `None` where only this code is.
        folder_writer: gives a folder to write to, whose files replace those of another one; the package sets one that no kill
            hurts.
        save_finisher: finishes such a save where a kill has cut it off, before a folder is loaded; set by the package.
        ngram: a continuity model for its token trees, set by the user; never saved.
    """

    DEFAULT_DEPTH = 8
    GREATEST_DEPTH = 4096
    training_layout: str | None = None
    training_objective = "cross_entropy"
    last_stats = None
    ngram = None
    # Weights that published checkpoints call otherwise, and those that they hold and a drafter does not read: patterns of
    # their names, and what takes their place, or why.
    renamed_weights: ClassVar[dict[str, str]] = {}
    ignored_weights: ClassVar[dict[str, str]] = {r"rotary_emb\.inv_freq$": "computed from the config"}
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [*ignored_weights]
    card_writer: ClassVar[Callable[["ParallelDrafter", Path, str], None] | None] = None
    folder_writer: ClassVar[Callable[[Path], AbstractContextManager[Path]]] = staticmethod(staged)
    save_finisher: ClassVar[Callable[[Any], None] | None] = None
    vocab_mismatch_advice = "Use the target that the drafter was made for, or make a drafter for this one"

    @property
    def tapped_hidden_states(self) -> list[int]:
        """Indices into the target's `hidden_states` tuple that the drafter reads; empty if it reads token ids only."""
        return []

    @property
    def reads_target(self) -> bool:
        """Whether it reads any hidden states of the target."""
        return bool(self.tapped_hidden_states)

    @property
    def num_draftable_tokens(self) -> int:
        """How many of the target's tokens it can propose; the logits of the others are -inf."""
        return self.config.vocab_size

    @property
    def max_draft_depth(self) -> int | None:
        """The most tokens one forward can draft, or `None` if there is no limit."""
        return None

    @property
    def draft_depth(self) -> int:
        """How many tokens a round drafts: `generation_config.num_assistant_tokens`, or the drafter's own default.

        Raises:
            ValueError: if the setting is below 1 or beyond what the drafter can do.
        """
        return self.checked_depth()

    def checked_depth(self, requested: int | None = None) -> int:
        """The depth that a call asks for, or else [`draft_depth`]; raises what that raises."""
        limit = self.max_draft_depth
        depth = self.generation_config.num_assistant_tokens if requested is None else requested
        if depth is None:
            return self.DEFAULT_DEPTH if limit is None else limit
        # Of a drafter without a limit of its own the greatest one is as of the others: far above any use, and no slip of a digit.
        limit = self.GREATEST_DEPTH if limit is None else limit
        if isinstance(depth, bool) or not isinstance(depth, int) or not 1 <= depth <= limit:
            raise ValueError(
                f"num_assistant_tokens must be between 1 and {limit} for this {type(self).__name__}, got "
                f"{depth!r}: set drafter.generation_config.num_assistant_tokens"
            )
        return depth

    def taps_for(self, target: PreTrainedModel | None, use_target_features: bool | None = None) -> list[int]:
        """The hidden states that a call reads: [`tapped_hidden_states`], unless there is more to know than the drafter.

        A drafter may leave its taps to the target's depth, and one that can do without the target's hidden states may be told
        to.

        Args:
            target: the model to draft for; `None` only if the drafter does not ask for it.
            use_target_features: what the call asks for; `None` leaves it to the drafter.

        Raises:
            ValueError: if the drafter can't do what is asked for.
        """
        self.check_feature_use(use_target_features)
        return self.tapped_hidden_states

    def check_feature_use(self, use_target_features: bool | None) -> None:
        """Raise a `ValueError` if a drafter that has no choice is asked to read the target, or not to."""
        if use_target_features is None or use_target_features == self.reads_target:
            return
        does, other = ("reads", "False") if self.reads_target else ("does not read", "True")
        raise ValueError(
            f"this {type(self).__name__} {does} the target's hidden states, got use_target_features={other}: leave the setting "
            "out, or use a PARD-2 drafter with its projection, which drafts with and without them"
        )

    def new_draft_state(self, target: PreTrainedModel) -> DraftState:
        """An empty cache, and references to what the drafter borrows from `target`."""
        return DraftState(cache=GrowingCache())

    def draft(self, context: DraftInputs, state: DraftState, depth: int) -> torch.Tensor:
        """Marginal logits of the next `depth` tokens, in one forward.

        Afterwards `state.cache` holds the real context and nothing of the mask or block rows.

        Returns:
            `(batch, depth, vocab)`; row k scores the token k + 1 places after the anchor.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement draft()")

    def draft_static(
        self, news: StaticDraftInputs, state: DraftState, lengths: torch.LongTensor, depth: int
    ) -> torch.Tensor:
        """[`draft`] with shapes that are the same in every round, to be compiled.

        Args:
            news: at least one token in each row.
            state: its cache has buffers of a fixed capacity: `columns (batch, rows)` says where the forward's entries go, and
                `capacity` how many there are.
            lengths: `(batch,)`, entries of each row; the caller adds `news.counts`.
            depth: as for [`draft`].

        Returns:
            As [`draft`].
        """
        raise NotImplementedError(f"{type(self).__name__} must implement draft_static()")

    def check_target(self, target: PreTrainedModel, taps: list[int] | None = None) -> None:
        """Raise a `ValueError` if this drafter can't draft for `target`, and warn if it was trained for another one.

        Args:
            target: the model to draft for.
            taps: the hidden states that are to be read; `None` for what [`taps_for`] this target says.
        """
        if any(parameter.is_meta for parameter in self.parameters()):
            raise ValueError(
                f"this {type(self).__name__} is on the meta device and has no weights: load it with from_pretrained, or "
                "call to_empty() and load a state dict"
            )
        vocab_size = text_fact(target, "vocab_size")
        if self.config.vocab_size != vocab_size:
            raise ValueError(
                f"vocabulary mismatch: the drafter has {self.config.vocab_size} tokens and the target {vocab_size}, and they "
                f"must share a tokenizer. {self.vocab_mismatch_advice}"
            )
        check_taps(type(self).__name__, target, self.taps_for(target) if taps is None else taps)
        warn_if_other_target(self, target)

    def other_target_reason(self, target: PreTrainedModel) -> str | None:
        """Why `target` is not the one that this drafter was trained for; `None` if nothing says so."""
        return None

    def note_target(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Remember, in the config, what training is for; see [`note_pairing`]."""
        note_pairing(self, target, tokenizer, chat_template_kwargs)

    def taught_depth(self, draft_tokens: int) -> int:
        """How many tokens ahead training teaches to draft: what is asked for, unless the drafter has a block size of its own.

        Raises:
            ValueError: if the drafter can't draft as many.
        """
        return self.max_draft_depth or draft_tokens

    def adopt_training(self, draft_tokens: int) -> None:
        """Draft as many tokens as training teaches, unless the drafter has a block size of its own."""
        if self.max_draft_depth is None:
            self.generation_config.num_assistant_tokens = draft_tokens

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """What `to`, `half`, `bfloat16` and the like call; see [`exact_frequencies`]."""
        with exact_frequencies(self):
            return super()._apply(*args, **kwargs)

    def save_pretrained(
        self,
        save_directory,
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        push_to_hub: bool = False,
        with_code: bool = True,
        **kwargs: Any,
    ) -> None:
        """As in `PreTrainedModel`, generation config included, and all that makes a folder to publish.

        If anything fails (a full disk, say), the folder is left as it was. Weights are saved with checksums, which are compared
        when they are loaded.

        Args:
            with_code: whether to write, too, the code that loads the drafter where this package is not installed
                (`trust_remote_code=True`), `custom_generate/generate.py`, and a model card. A card that is there is left alone.
            **kwargs: as in `PreTrainedModel`, for `push_to_hub` too.
        """
        pushed = {name: kwargs.pop(name) for name in PUSH_ARGUMENTS if name in kwargs}
        # What bears this mark is derived anew from config.json when it is loaded, and the drafting settings would be lost.
        self.generation_config._from_model_config = False
        set_auto_map(self, with_code)
        if not self.should_save_on_this_rank(is_main_process):
            # It takes part in gathering the weights of a sharded drafter, and writes nothing.
            self.save_weights(save_directory, is_main_process, state_dict, **kwargs)
            return
        folder = Path(save_directory)
        with ParallelDrafter.folder_writer(folder) as workspace:
            # A distributed checkpoint is written by all processes, each to the folder itself.
            weights_folder = folder if kwargs.get("distributed_checkpoint") else workspace
            self.save_weights(weights_folder, is_main_process, state_dict, **kwargs)
            for path in weights_folder.glob("model*.safetensors"):
                add_checksums(path)
            self.generation_config.save_pretrained(workspace)
            if with_code:
                write_code(self, workspace)
                if ParallelDrafter.card_writer is not None and not (folder / CARD).exists():
                    ParallelDrafter.card_writer(self, workspace, pushed.get("repo_id") or folder.resolve().name)
        if push_to_hub:
            self.push_to_hub(
                pushed.pop("repo_id", folder.name), card=folder / CARD, token=kwargs.get("token"), **pushed
            )

    def save_weights(self, save_directory, is_main_process: bool, state_dict: dict[str, torch.Tensor] | None, **kwargs):
        """Write all weights, and the config."""
        super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """As in `PreTrainedModel`; see [`push_drafter`]. The repository keeps the model card that it has."""
        return push_drafter(self, repo_id, **kwargs)

    def load_separate_weights(self, folder: str) -> None:
        """Load, from a folder that `save_pretrained` wrote, the weights that it keeps outside the main file; none by default."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        """As in `PreTrainedModel`, but files are looked at before they are loaded, and every weight is accounted for.

        Raises:
            OSError: if the files can't be found or reached.
            ValueError: if config.json or a weight file is damaged or describes something else: a weight that is missing, left
                over, of another shape or no floating-point number is named.
        """
        if ParallelDrafter.save_finisher is not None and pretrained_model_name_or_path is not None:
            ParallelDrafter.save_finisher(pretrained_model_name_or_path)
        return load_checked(cls, super().from_pretrained, pretrained_model_name_or_path, *model_args, **kwargs)


def load_generation_config(path, **kwargs) -> GenerationConfig:
    """The generation config saved beside a drafter, or a default one; `path` is `None` where nothing is read from files."""
    if path is None:
        return GenerationConfig()
    try:
        return GenerationConfig.from_pretrained(path, **hub_arguments(kwargs))
    except OSError:
        return GenerationConfig()
