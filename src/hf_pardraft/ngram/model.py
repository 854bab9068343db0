"""The continuity model: how often tokens follow each other, counted once, stored, and looked up for a whole level of a tree."""

import copy
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from transformers import PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from ..pairing.remembered import public_place, tokenizer_hash
from .build import BuildOptions, build_store, checked_count
from .dart_trie import convert_trie
from .lookup import SMOOTHINGS, Lookup, NgramWalk, checked_smoothing
from .pairs import NgramTable
from .sources import token_documents
from .store import FILE_NAME, NgramInfo, place_store, read_store

# How much larger a target's vocabulary may be than its tokenizer's: rows of the embeddings that only pad them.
PADDING_SHARE = 0.01


class NgramModel:
    """Counts of n-grams of token ids, as data: sorted keys in a memory-mapped safetensors file ([`NgramTable`]).

    Calling it with contexts and candidates gives the probabilities that `build_tree(..., ngram=model)` asks for.

    Args:
        info: what the store says about itself.
        table: the counts; see [`NgramTable`].
        smoothing: a name of [`SMOOTHINGS`].
        smoothing_weight: its parameter; by default that of the paper it is from.
    """

    def __init__(
        self,
        info: NgramInfo,
        table: NgramTable,
        smoothing: str = "longest_match",
        smoothing_weight: float | None = None,
    ) -> None:
        self.info, self.table = info, table
        self.lookup = Lookup(table, info)
        self._smooth_by(smoothing, smoothing_weight)
        self.path: Path | None = None
        self._folder: tempfile.TemporaryDirectory | None = None

    @property
    def order(self) -> int:
        """Length of the longest n-grams: a context of up to `order - 1` tokens is looked at."""
        return self.info.order

    @property
    def vocab_size(self) -> int:
        return self.info.vocab_size

    @property
    def device(self) -> torch.device:
        return self.table.heads.device

    def to(self, device: torch.device | str) -> "NgramModel":
        """This model with its tensors on `device`, where trees are then looked up without waiting for it."""
        if torch.device(device) == self.device:
            return self
        moved = copy.copy(self)
        moved.table = self.table.to(device)
        moved.lookup = Lookup(moved.table, self.info)
        return moved

    def smoothed(self, smoothing: str, smoothing_weight: float | None = None) -> "NgramModel":
        """The same counts under another smoothing; see [`SMOOTHINGS`]."""
        other = copy.copy(self)
        other._smooth_by(smoothing, smoothing_weight)
        return other

    def _smooth_by(self, smoothing: str, weight: float | None) -> None:
        self.smoothing = checked_smoothing(smoothing)
        self.smoothing_weight = SMOOTHINGS[smoothing].default_weight if weight is None else weight

    # Look-up

    def __call__(self, contexts: torch.LongTensor, candidates: torch.LongTensor) -> torch.Tensor:
        """How probable each candidate is after each context, by this model's smoothing.

        Args:
            contexts: `(..., contexts, length)`; the last `order - 1` tokens count, and fewer will do.
            candidates: `(..., candidates)`, the same for all contexts of a batch item.

        Returns:
            `(..., contexts, candidates)` float32, on the device of `contexts`.
        """
        lookup, smoothing = self.lookup, SMOOTHINGS[self.smoothing]
        tokens = candidates.to(self.device).clamp(max=self.vocab_size)[..., None, :]
        known = lookup.contexts_of(contexts.to(self.device))
        found = lookup.find(known.bases + lookup.keys_of(tokens), lookup.float_values)
        unigrams = lookup.shares_of(tokens, smoothing)
        return lookup.probabilities(known, found, unigrams, smoothing, self.smoothing_weight).to(contexts.device)

    def walk(self, context: torch.LongTensor, candidates: torch.LongTensor) -> NgramWalk:
        """The look-ups of one tree, each going on from what the one before found; see [`WalkingModel`].

        Args:
            context: `(batch, context)`, the end of the committed text, the anchor last.
            candidates: `(batch, depth, k)`, the tokens of all levels.
        """
        return NgramWalk(self.lookup, SMOOTHINGS[self.smoothing], self.smoothing_weight, context, candidates)

    def count(self, ngrams: torch.LongTensor) -> torch.LongTensor:
        """How often n-grams `(..., n)` of up to `order` tokens were seen: `(...)`."""
        if not 1 <= ngrams.shape[-1] <= self.order:
            raise ValueError(f"this model counts n-grams of 1 to {self.order} tokens, got {ngrams.shape[-1]}")
        return self.lookup.count(ngrams.to(self.device))

    # Building

    @classmethod
    def from_token_stream(
        cls,
        documents: Iterable[Any],
        *,
        vocab_size: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        order: int = 3,
        min_count: int = 1,
        max_memory: int | str = "1GB",
        num_proc: int = 1,
        progress: bool = False,
        save_directory: str | Path | None = None,
    ) -> "NgramModel":
        """Count the n-grams of token ids, in bounded memory. No n-gram spans two documents.

        Args:
            documents: an iterable of documents, each a list, array or tensor of token ids; or one document, as a
                one-dimensional array or tensor, or as an iterable of ids.
            vocab_size: ids are below it; by default the tokenizer's, its added tokens included.
            tokenizer: whose ids these are; its fingerprint is stored. Without one nothing can be checked later but
                `vocab_size`.
            order: length of the longest n-grams, 2 to 5.
            min_count: n-grams of two and more tokens that were seen less often are dropped.
            max_memory: bytes, or a size such as "2GB", to be used for counting. What does not fit is sorted in runs on
                disk and merged. A document itself comes on top.
            num_proc: processes to count with.
            progress: whether to show progress bars.
            save_directory: folder for the store; by default a temporary one, which goes when the model does.

        Raises:
            ValueError: for an order, size or count that can't be honoured, or a token id beyond the vocabulary.
        """
        if vocab_size is None and tokenizer is None:
            raise ValueError("expected vocab_size or tokenizer, got neither: pass the one whose ids are counted")
        options = BuildOptions(
            order=order,
            vocab_size=len(tokenizer) if vocab_size is None else vocab_size,
            min_count=min_count,
            max_memory=max_memory,
            num_proc=num_proc,
            progress=progress,
        )
        return cls._made(save_directory, lambda path: build_store(documents, path, options, fingerprint(tokenizer)))

    @classmethod
    def from_texts(
        cls, texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, *, add_end_token: bool = False, **kwargs: Any
    ) -> "NgramModel":
        """Tokenise texts and count them, each a document of its own; streamed.

        Args:
            texts: an iterable of strings; [`texts_of_files`] and [`texts_of_dataset`] make some.
            tokenizer: the target's.
            add_end_token: whether each text is followed by `tokenizer.eos_token`, as DART's builder has it. Right for
                whole documents, wrong for paragraphs.
            **kwargs: as for [`from_token_stream`].

        Raises:
            ValueError: if there is no text at all, and as [`from_token_stream`].
        """
        documents = token_documents(texts, tokenizer, add_end_token)
        return cls.from_token_stream(documents, tokenizer=tokenizer, **kwargs)

    @classmethod
    def from_dart_trie(
        cls,
        path: str | Path,
        *,
        vocab_size: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        save_directory: str | Path | None = None,
    ) -> "NgramModel":
        """Convert a trie file of the DART reference, in memory of about 50 bytes a node.

        Args:
            path: of the file.
            vocab_size, tokenizer, save_directory: as for [`from_token_stream`].

        Raises:
            ValueError: if the file is no such trie, or damaged, or holds tokens beyond the vocabulary.
        """
        if vocab_size is None and tokenizer is None:
            raise ValueError("expected vocab_size or tokenizer, got neither: pass the one the trie was built with")
        size = checked_count("vocab_size", len(tokenizer) if vocab_size is None else vocab_size)
        return cls._made(save_directory, lambda target: convert_trie(Path(path), target, size, fingerprint(tokenizer)))

    @classmethod
    def _made(cls, save_directory: str | Path | None, make: Callable[[Path], None]) -> "NgramModel":
        """Let `make` write a store, and load it."""
        own_folder = tempfile.TemporaryDirectory(prefix="ngram-") if save_directory is None else None
        folder = Path(own_folder.name if own_folder else save_directory)
        place_store(folder, make)
        model = cls.from_pretrained(folder, verify=False)
        model._folder = own_folder
        return model

    # Storage

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        smoothing: str = "longest_match",
        smoothing_weight: float | None = None,
        verify: bool | None = None,
        **kwargs: Any,
    ) -> "NgramModel":
        """Load a store, memory-mapped: what is never looked up is never read.

        Args:
            name_or_path: a folder, or a repository on the Hub.
            tokenizer: if given, must be the one that the store was built with.
            smoothing, smoothing_weight: see [`SMOOTHINGS`].
            verify: whether to compare all bytes with their checksums; by default in files of up to 64 MB.
            **kwargs: where and how to look on the Hub (`revision`, `token`, `cache_dir`, `subfolder`, ...).

        Raises:
            OSError: if there is no store.
            ValueError: if it is damaged, or was built with another tokenizer.
        """
        try:
            path = Path(cached_file(str(name_or_path), FILE_NAME, **kwargs))
        except OSError as error:
            raise OSError(
                f"no n-gram model at {name_or_path}: expected a folder or a Hub repository with {FILE_NAME} ({error})"
            ) from error
        info, table = read_store(path, verify)
        model = cls(info, table, smoothing, smoothing_weight)
        model.path = path
        if tokenizer is not None:
            model.check_tokenizer(tokenizer)
        return model

    def save_pretrained(self, save_directory: str | Path, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Copy the store to a folder, where it is whole or not at all.

        Args:
            save_directory: made if need be.
            push_to_hub: whether to upload it as well.
            **kwargs: of [`push_to_hub`]; `repo_id` is by default the folder's name.
        """
        place_store(Path(save_directory), lambda path: shutil.copyfile(self.path, path))
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)

    def push_to_hub(self, repo_id: str, private: bool | None = None, token: str | None = None, **kwargs: Any) -> str:
        """Upload the store to a repository on the Hub, made if need be; returns the commit's address.

        `kwargs` go to `HfApi.upload_file` (`commit_message`, `revision`, `create_pr`, ...).
        """
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        return str(api.upload_file(path_or_fileobj=self.path, path_in_repo=FILE_NAME, repo_id=repo_id, **kwargs))

    # Checks

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise a `ValueError` unless `tokenizer` is the one that this model was built with, so far as it remembers."""
        remembered, found = self.info.tokenizer_hash, fingerprint(tokenizer)
        if remembered is None and len(tokenizer) > self.vocab_size:
            raise ValueError(
                f"the n-gram model was built for {self.vocab_size} tokens and this tokenizer has {len(tokenizer)}: build it "
                "with this tokenizer (pardraft ngram build)"
            )
        if remembered is not None and found["tokenizer_hash"] != remembered:
            raise ValueError(
                f"the n-gram model was built with another tokenizer: {self.info.tokenizer_name} (hash {remembered[:12]}), "
                f"got {found['tokenizer_name']} (hash {found['tokenizer_hash'][:12]}): build it with this one (pardraft "
                "ngram build)"
            )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise a `ValueError` unless a target whose logits have `vocab_size` entries can share this model's token ids.

        A target may have some more of them than its tokenizer has tokens, to pad its embeddings.
        """
        if not self.vocab_size <= vocab_size <= self.vocab_size * (1 + PADDING_SHARE):
            raise ValueError(
                f"the n-gram model was built for {self.vocab_size} tokens and the target has {vocab_size}: build it with the "
                f"target's tokenizer (pardraft ngram build), or with vocab_size={vocab_size} if only padding differs"
            )

    def describe(self) -> dict[str, Any]:
        """What a person may want to know about this model."""
        num_bytes = self.path.stat().st_size
        return {
            "order": self.order,
            "vocab_size": self.vocab_size,
            "tokens counted": self.info.num_tokens,
            **{f"{n}-grams": count for n, count in enumerate(self.info.num_ngrams, start=1)},
            "min_count": self.info.min_count,
            "bytes": num_bytes,
            f"bytes per {self.order}-gram": round(num_bytes / max(1, self.info.num_ngrams[-1]), 2),
            "bits per pair of n-grams": 8 * (self.table.heads.element_size() + self.table.rests.element_size()),
            "different counts": int((self.table.values > 0).sum()),
            "tokenizer": self.info.tokenizer_name,
            "tokenizer hash": self.info.tokenizer_hash,
        }


def fingerprint(tokenizer: PreTrainedTokenizerBase | None) -> dict[str, str | None]:
    """What a store remembers of a tokenizer: its name, fit to be published, and a hash of its vocabulary."""
    if tokenizer is None:
        return {"tokenizer_name": None, "tokenizer_hash": None}
    return {"tokenizer_name": public_place(tokenizer.name_or_path) or None, "tokenizer_hash": tokenizer_hash(tokenizer)}
