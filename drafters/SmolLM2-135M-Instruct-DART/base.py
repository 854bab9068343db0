"""What every parallel drafter shares: the `draft` contract, the checks on a target, loading and saving.

This file travels with every drafter that is pushed to the Hub, so it imports torch, transformers and siblings only. What only the
package can do comes from it through [`DrafterServices`].
"""

import shutil
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from .cache import GrowingCache
from .inputs import DraftInputs, DraftState, StaticDraftInputs, cached_arange

# Arguments of `from_pretrained` that say where the files are.
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
CUSTOM_GENERATE = "custom_generate/generate.py"


class DrafterServices(Protocol):
    """What the package hf_pardraft does for drafters, and the code that travels with them can't do by itself.

    Importing the package sets `ParallelDrafter.services`. Where that is `None`, a drafter loads what `save_pretrained` wrote,
    refuses what it would draft wrongly from or for, drafts, and is saved with its code.
    """

    def native_fields(self, config_class: type["PairedConfig"], fields: dict[str, Any]) -> dict[str, Any]:
        """The fields of our own config.json that one of any known layout means."""

    def load(self, drafter_class: type["ParallelDrafter"], name_or_path: Any, *model_args: Any, **kwargs: Any) -> Any:
        """`from_pretrained` of any known layout, its files checked before they are loaded."""

    def save(self, drafter: "ParallelDrafter", folder: Any, **kwargs: Any) -> None:
        """`save_pretrained`, in one switch, with checksums, code and card."""

    def write_card(self, drafter: "ParallelDrafter", folder: Path, name: str) -> None:
        """Write a fresh card of a drafter, called `name`, into a folder."""

    def push(self, drafter: "ParallelDrafter", repo_id: str, **kwargs: Any) -> Any:
        """`push_to_hub`, which leaves a repository its card."""

    def fresh(self, drafter_class: type["ParallelDrafter"], base: Any, *args: Any, **kwargs: Any) -> "ParallelDrafter":
        """A drafter that is yet to be trained, made for a target (`for_target`) or of a causal LM (`from_causal_lm`)."""

    def check_target(self, drafter: "ParallelDrafter", target: PreTrainedModel, taps: list[int]) -> None:
        """Raise a `ValueError` if `target` can't give the taps, and warn if it is not the one of training."""

    def note_target(self, drafter: "ParallelDrafter", target: PreTrainedModel, *args: Any) -> None:
        """Remember, in a drafter's config, what it is trained with."""

    def num_layer_outputs(self, target: PreTrainedModel) -> int:
        """How many layers' outputs are among a target's `hidden_states`."""

    def set_draft_vocabulary(self, drafter: "ParallelDrafter", token_ids: Any, target: PreTrainedModel | None) -> None:
        """Let a drafter propose some tokens only."""

    def draft_head(self, drafter: "ParallelDrafter", head: torch.nn.Module) -> torch.nn.Module:
        """What scores the tokens that a drafter proposes, where `head` scores all."""


class PairedConfig(PreTrainedConfig):
    """The fields of a drafter's configuration that say what it was trained with; `None` where that is not known.

    Args:
        target_name_or_path: the target; of a local folder its own name only.
        target_revision: the commit of the target's repository.
        target_model_type: its model type.
        target_fingerprint: a few of its weights.
        tokenizer_hash: of the tokenizer's vocabulary.
        chat_format: of the chats that it learned from.
    """

    target_name_or_path: str | None = None
    target_revision: str | None = None
    target_model_type: str | None = None
    target_fingerprint: list[float] | None = None
    tokenizer_hash: str | None = None
    chat_format: dict[str, Any] | None = None

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """As in `PreTrainedConfig`; the package reads what others publish as ours."""
        fields, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        services = ParallelDrafter.services
        return fields if services is None else services.native_fields(cls, fields), kwargs


class ParallelDrafter:
    """The contract of all drafters, as a mixin of `PreTrainedModel` classes.

    A subclass says what it taps (`tapped_hidden_states`), how deep it can draft (`max_draft_depth`), and implements
    `new_draft_state` and `draft`. Nothing else about it is known to the decode loops. To the trainer it says how its batches
    are laid out, and what it learns from them.

    Attributes:
        training_layout: "dropped_masks", a causal LM's text with masks after each position, some dropped; "anchored_blocks", an
            anchor and masks beside the target's hidden states; "shared_prefix", a text's tokens with masks after many prefixes.
        training_objective: what it learns unless training is told otherwise: "cross_entropy" with the text; PARD's, each of
            whose positions is averaged by itself ("subtask_cross_entropy"); or "annealed_kl" to the target's law.
        last_stats: how the latest `generate` call went.
        services: what the package adds, see [`DrafterServices`]; `None` where only this code is.
        ngram: a continuity model for its token trees, set by the user; never saved.
    """

    DEFAULT_DEPTH = 8
    GREATEST_DEPTH = 4096
    training_layout: str | None = None
    training_objective = "cross_entropy"
    generation_config: Any
    last_stats: Any = None
    ngram: Any = None
    services: ClassVar[DrafterServices | None] = None
    # Weights that checkpoints may hold and a drafter does not read: patterns of their names, and why.
    ignored_weights: ClassVar[dict[str, str]] = {r"rotary_emb\.inv_freq$": "computed from the config"}
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [*ignored_weights]
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
    def draft_token_ids(self) -> torch.LongTensor | None:
        """`(draft vocabulary,)`, ascending, the target's ids of the tokens that it proposes: the columns of what [`draft`]
        returns. `None` for all tokens; without the package it is all that the drafter, or its target, has rows of."""
        d2t = self._buffers.get("d2t")
        return None if d2t is None or self.services is None else d2t + cached_arange(0, len(d2t), d2t.device)

    def set_draft_vocabulary(self, token_ids: Any, target: PreTrainedModel | None = None) -> None:
        """Propose some of the target's tokens only: a draft reads no other rows of the head, and the text stays as it is.

        Args:
            token_ids: a list or tensor of ids; `None` for all, or all that a DART drafter was loaded with. Saved with it.
            target: DFlash, DFlare: whose rows become the drafter's own, as servers want them, and not whatever it drafts for.

        Raises:
            ValueError: if they aren't distinct tokens, or their rows can't be had; nothing has changed then.
        """
        self.package().set_draft_vocabulary(self, token_ids, target)

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
            place = "drafter.generation_config" if requested is None else "the call or target.generation_config"
            raise ValueError(
                f"num_assistant_tokens must be between 1 and {limit} for this {type(self).__name__}, got {depth!r} by {place}"
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

    def draft(self, inputs: DraftInputs, state: DraftState, depth: int) -> torch.Tensor:
        """Marginal logits of the next `depth` tokens, in one forward.

        Afterwards `state.cache` holds the real context and nothing of the masks or the block.

        Returns:
            `(batch, depth, vocab)`; position k scores the token k + 1 places after the anchor. With [`draft_token_ids`] there
            are columns for these alone.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement draft()")

    def draft_static(
        self, inputs: StaticDraftInputs, state: DraftState, lengths: torch.LongTensor, depth: int
    ) -> torch.Tensor:
        """[`draft`] with shapes that are the same in every round, to be compiled.

        Args:
            inputs: at least one token for each item.
            state: its cache has buffers of a fixed capacity: `columns (batch, queries)` says where the forward's entries go, and
                `capacity` how many there are.
            lengths: `(batch,)`, entries of each item; the caller adds `inputs.counts`.
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
        if any(weight.is_meta for part in self.modules() for weight in part._parameters.values() if weight is not None):
            raise ValueError(
                f"weights of this {type(self).__name__} are on the meta device: they were never loaded, or are offloaded, and "
                "a draft reads all of them. Load it whole with from_pretrained, onto one device (device_map='cpu', say)"
            )
        sizes = self.config.vocab_size, text_fact(target, "vocab_size")
        check_vocabulary("the drafter", *sizes, self.vocab_mismatch_advice)
        if self.services is not None:
            self.services.check_target(self, target, self.taps_for(target) if taps is None else taps)

    def note_target(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Remember, in the config, what training is for.

        Args:
            target: the model that the drafter shall draft for.
            tokenizer: the target's.
            chat_template_kwargs: what the training text was rendered with by `tokenizer.apply_chat_template`, such as
                `{"enable_thinking": False}`; `{}` if with nothing but its defaults, `None` if it is no chats, or of several
                modes.

        Raises:
            ValueError: if chats are to be remembered and there is no tokenizer, or one without a chat template.
        """
        self.package().note_target(self, target, tokenizer, chat_template_kwargs)

    def taught_depth(self, draft_tokens: int) -> int:
        """How many tokens ahead training teaches to draft: what is asked for, unless the drafter has a block size of its own.

        Raises:
            ValueError: if the drafter can't draft as many.
        """
        return self.max_draft_depth or draft_tokens

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """What `to`, `half`, `bfloat16` and the like call: rotary frequencies keep their precision where weights change theirs.

        They are computed from the config, in float32. Rounded to bfloat16 they are off by up to 0.4 %, which at position 1,000
        is radians, and a drafter that was converted would not be the one that is loaded from what it saved.
        """
        computed = [
            (module, name, buffer)
            for module in self.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name in module._non_persistent_buffers_set
        ]
        applied = super()._apply(*args, **kwargs)
        for module, name, buffer in computed:
            if module._buffers[name].dtype != buffer.dtype:
                module._buffers[name] = buffer.to(module._buffers[name].device)
        return applied

    @classmethod
    def package(cls) -> DrafterServices:
        """What the package does for drafters.

        Raises:
            ImportError: where it is not.
        """
        if cls.services is None:
            raise ImportError(
                f"the code that comes with a {cls.__name__} loads it, drafts and saves it again. All else is in the package: "
                "pip install hf-pardraft, and import hf_pardraft"
            )
        return cls.services

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        """As in `PreTrainedModel`, but every weight is accounted for, and the package looks at files before it loads them.

        Raises:
            OSError: if the files can't be found or reached.
            ValueError: if config.json or a weight file is damaged or describes something else: a weight that is missing, left
                over, of another shape or no floating-point number is named.
        """
        if cls.services is not None:
            return cls.services.load(cls, pretrained_model_name_or_path, *model_args, **kwargs)
        loaded = cls.load_whole(pretrained_model_name_or_path, *model_args, **kwargs)
        if kwargs.get("state_dict") is None:
            model = loaded[0] if isinstance(loaded, tuple) else loaded
            model.load_separate_weights(pretrained_model_name_or_path, **hub_arguments(kwargs))
        return loaded

    @classmethod
    def load_whole(cls, name_or_path, *model_args, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """transformers' own `from_pretrained`, which leaves what it doesn't find random; here that is a `ValueError`.

        It also passes over the generation config of what can't write text by itself.
        """
        model, info = super().from_pretrained(name_or_path, *model_args, output_loading_info=True, **kwargs)
        wrong = {kind: sorted(map(str, info[kind])) for kind in ("missing_keys", "unexpected_keys") if info[kind]}
        if wrong:
            found = "; ".join(f"{kind.replace('_', ' ')}: {', '.join(names)}" for kind, names in wrong.items())
            raise cls.misfit(name_or_path, found)
        if not cls.can_generate():
            model.generation_config = load_generation_config(name_or_path, **kwargs)
        return (model, info) if output_loading_info else model

    @classmethod
    def misfit(cls, name_or_path, found: str) -> ValueError:
        return ValueError(
            f"the weights in {name_or_path} do not fit a {cls.__name__} ({found}). No weight is left random: check that the "
            "folder holds this kind of drafter and that config.json describes these weights"
        )

    def load_separate_weights(self, folder, **source: Any) -> None:
        """Load the weights that `save_pretrained` keeps outside the main file; none by default.

        Args:
            folder: that it wrote, or a repository on the Hub.
            **source: `revision`, `token`, `subfolder`, ..., as for `from_pretrained`.
        """

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
        when they are loaded. (The package does both.)

        Args:
            with_code: whether to write, too, the code that loads the drafter where this package is not installed
                (`trust_remote_code=True`), `custom_generate/generate.py`, and a model card. A card that is there is left alone.
            **kwargs: as in `PreTrainedModel`, for `push_to_hub` too.
        """
        # What bears this mark is derived anew from config.json when it is loaded, and the drafting settings would be lost.
        self.generation_config._from_model_config = False
        if self.services is not None or push_to_hub:
            options = {"push_to_hub": push_to_hub, "with_code": with_code, **kwargs}
            self.package().save(self, save_directory, is_main_process=is_main_process, state_dict=state_dict, **options)
            return
        self.save_weights(save_directory, is_main_process, state_dict, **kwargs)
        self.generation_config.save_pretrained(save_directory)
        # Transformers has copied the code that this drafter was loaded with, but for this file.
        source = find_file(self.name_or_path or None, CUSTOM_GENERATE, revision=vars(self.config).get("_commit_hash"))
        if source is not None:
            (Path(save_directory) / CUSTOM_GENERATE).parent.mkdir(exist_ok=True)
            shutil.copyfile(source, Path(save_directory) / CUSTOM_GENERATE)

    def save_weights(self, save_directory, is_main_process: bool, state_dict: dict[str, torch.Tensor] | None, **kwargs):
        """Write all weights, and the config."""
        super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """As in `PreTrainedModel`. The repository keeps the model card that it has."""
        if self.services is not None:
            return self.services.push(self, repo_id, **kwargs)
        return super().push_to_hub(repo_id, **kwargs)


def text_fact(target: PreTrainedModel, name: str) -> int:
    """What the configuration of a target's text decoder says, under the name that most families use (`hidden_size`).

    Raises:
        ValueError: if it says no such thing.
    """
    # Any family's configuration may come here, and some do without what all drafters ask for (BLT has no one hidden size).
    value = getattr(target.config.get_text_config(decoder=True), name, None)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(
            f"a drafter has to know {name} of its target, and {type(target).__name__} has none for text: use another target"
        )
    return value


def check_vocabulary(name: str, vocab_size: int, target_vocab_size: int, advice: str) -> None:
    """Raise a `ValueError` with the `advice` unless what is called `name` has as many tokens as the target."""
    if vocab_size != target_vocab_size:
        sizes = f"{name} has {vocab_size} tokens and the target {target_vocab_size}"
        raise ValueError(f"vocabulary mismatch: {sizes}, and they must share a tokenizer. {advice}")


def hub_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Those of `from_pretrained`'s arguments that say where a file comes from."""
    return {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}


def find_file(folder, name: str, **source: Any) -> str | None:
    """The path of a file in a folder or repository; `None` if it is not there, or can't be reached."""
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    return None if folder is None else cached_file(folder, name, **quiet, **source)


def load_generation_config(path, **kwargs) -> GenerationConfig:
    """The generation config saved beside a drafter, or a default one; `path` is `None` where nothing is read from files."""
    try:
        return GenerationConfig() if path is None else GenerationConfig.from_pretrained(path, **hub_arguments(kwargs))
    except OSError:
        return GenerationConfig()
