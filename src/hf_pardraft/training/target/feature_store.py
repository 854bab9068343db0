"""The target's hidden states on disk: written once, and read back in place of running its layers.

A folder holds shards of safetensors, each with the states of some texts, one after the other, and an `index.json` that says
whose states they are. A text is found by its token ids, so neither the order of examples nor the epoch matters.

Each shard has a table of its texts: their keys, lengths, and checksums of their states. The index has a checksum of each table.
So a text costs no more than its own bytes to check, whenever it is read.
"""

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from ...pairing.remembered import differing_weights
from ...user_input.files import parse_json, read_json
from ..data.documents import PADDING, split_documents
from ..layouts.base import Layout
from .head import target_head
from .reading import STATES

INDEX = "index.json"
# Stores up to this size are read whole, and so checked, before training begins.
CHECKED_BYTES = 1 << 28
# The last hidden state, which comes after the tapped ones.
LAST = -1
DAMAGED = "write it anew with pardraft cache-features, into another folder or after deleting this one"


@dataclass(frozen=True)
class FeatureSource:
    """Whose states a folder holds.

    Attributes:
        target: what the target was loaded from.
        target_fingerprint: a few of its weights; `None` if they can't be read.
        taps: indices into its `hidden_states`.
        with_last: whether the last hidden state is there too, from which the lm_head makes the logits.
        dtype: of what is stored.
        tokens_per_shard: about how many tokens a file holds.
        data: a hash of all texts in their order, which a resumed run has to agree with.
    """

    target: str | None
    target_fingerprint: list[float] | None
    taps: list[int]
    with_last: bool
    dtype: str
    tokens_per_shard: int
    data: str


def text_key(input_ids: Sequence[int] | torch.Tensor) -> str:
    """What a text is found by: a hash of its token ids."""
    ids = torch.as_tensor(input_ids, dtype=torch.int64).cpu().contiguous()
    return hashlib.blake2b(ids.numpy().tobytes(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class ShardTable:
    """The texts of a shard, in their order: keys, numbers of tokens, and CRC-32 of their states."""

    keys: list[str]
    lengths: list[int]
    checksums: list[int]

    @classmethod
    def read(cls, path: Path) -> "ShardTable":
        """The table of a shard.

        Raises:
            ValueError: if it is damaged, or not one of stored states.
        """
        try:
            with safe_open(path, "pt") as file:
                names, metadata = set(file.keys()), file.metadata() or {}
                if names != {"states", "lengths", "checksums"} or "keys" not in metadata:
                    raise ValueError(
                        f"{path} holds no stored states, but {', '.join(sorted(names)[:5]) or 'nothing'}: take it out of the "
                        "folder"
                    )
                keys, lengths = parse_json(metadata["keys"], path), file.get_tensor("lengths").tolist()
                checksums = file.get_tensor("checksums").tolist()
                num_stored = file.get_slice("states").get_shape()[0]
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is damaged ({error}): {DAMAGED}") from error
        if not isinstance(keys, list) or len(keys) != len(lengths) or sum(lengths) != num_stored:
            raise ValueError(f"{path} is damaged (what it says of its texts does not agree): {DAMAGED}")
        return cls(keys, lengths, checksums)

    @property
    def crc32(self) -> int:
        return zlib.crc32(json.dumps([self.keys, self.lengths, self.checksums]).encode())


def checksum_of(states: torch.Tensor) -> int:
    """CRC-32 of the bytes of a text's states."""
    return zlib.crc32(states.contiguous().view(torch.uint8).numpy().data)


def read_index(folder: Path) -> dict[str, Any]:
    """What a folder of stored states says about them.

    Raises:
        ValueError: if there is no index, or it does not say all that it should.
    """
    path = folder / INDEX
    if not path.is_file():
        raise ValueError(
            f"{folder} holds no stored states ({INDEX} is missing): write them with pardraft cache-features"
        )
    found = read_json(path)
    names = {*(field.name for field in fields(FeatureSource)), "complete"}
    if isinstance(found, dict) and found.get("complete"):
        names.add("shards")
    if not isinstance(found, dict) or not names <= found.keys():
        lacking = f"lacks {', '.join(sorted(names - found.keys()))}" if isinstance(found, dict) else "is no JSON object"
        raise ValueError(
            f"{path} is not what pardraft cache-features writes: it {lacking}. Write the states anew, into another folder"
        )
    return found


class FeatureStore:
    """Stored states, looked up by text. The files are memory-mapped.

    Args:
        folder: what `feature_writing.cache_features` wrote.

    Raises:
        ValueError: if it holds no states, or not all of them, or others than were written.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        found = read_index(self.folder)
        if not found["complete"]:
            raise ValueError(
                f"the states in {folder} are not complete: run pardraft cache-features again, which goes on there"
            )
        self.source = FeatureSource(**{field.name: found[field.name] for field in fields(FeatureSource)})
        # Which of the stored hidden states are read, in this order; all of them until `check` says which a drafter needs.
        self._chosen: list[int] | None = None
        self._shards = sorted(self.folder.glob("*.safetensors"))
        self._check_shards(found["shards"])
        # Of each text its shard, the place of its first state there, how many it has, and their checksum.
        self._places: dict[str, tuple[int, int, int, int]] = {}
        self._open: dict[int, Any] = {}
        for shard, path in enumerate(self._shards):
            table, start = ShardTable.read(path), 0
            if table.crc32 != found["shards"][path.stem]:
                raise ValueError(f"{path} is not the shard that {INDEX} speaks of, or is damaged: {DAMAGED}")
            for key, length, checksum in zip(table.keys, table.lengths, table.checksums, strict=True):
                self._places[key] = (shard, start, length, checksum)
                start += length
        if sum(path.stat().st_size for path in self._shards) <= CHECKED_BYTES:
            for key in self._places:
                self._read(key)

    def _check_shards(self, expected: dict[str, int]) -> None:
        """Raise a `ValueError` unless there are those shards that the index names."""
        names, named = {path.name for path in self._shards}, {f"{stem}.safetensors" for stem in expected}
        if names != named:
            missing, others = sorted(named - names), sorted(names - named)
            raise ValueError(
                f"{self.folder} should hold {len(expected)} shards, and holds {len(names)} (missing: "
                f"{', '.join(missing) or 'none'}; of something else: {', '.join(others) or 'none'}): {DAMAGED}"
            )

    def __len__(self) -> int:
        return len(self._places)

    def __getstate__(self) -> dict[str, Any]:
        # A worker of a data loader maps the files anew.
        return {**self.__dict__, "_open": {}}

    def check(self, target: PreTrainedModel, taps: list[int], with_logits: bool) -> None:
        """Raise a `ValueError` unless the states that a drafter's training needs are among these; no others are read then."""
        found = self.source
        if not set(taps) <= set(found.taps):
            raise ValueError(
                f"the states in {self.folder} are hidden states {found.taps}, and the drafter reads {list(taps)}: write them "
                "anew with pardraft cache-features, or give the drafter taps among these"
            )
        if differing_weights(found.target_fingerprint, target):
            raise ValueError(
                f"the states in {self.folder} are another model's ({found.target}): their weights differ from the target's. "
                "Write them anew with pardraft cache-features"
            )
        if with_logits and not found.with_last:
            raise ValueError(
                f"the drafter learns from the target's logits, and {self.folder} has no last hidden state to make them from: "
                "write it anew with pardraft cache-features and this run's --objective"
            )
        stored = [*found.taps, LAST] if found.with_last else found.taps
        wanted = [*taps, LAST] if with_logits else list(taps)
        self._chosen = None if wanted == stored else [stored.index(tap) for tap in wanted]

    def states(self, input_ids: torch.LongTensor) -> torch.Tensor:
        """`(length, width)`, the states of a text that are read; the last hidden state at the end, if it is one of them.

        Raises:
            ValueError: if the text's states were not stored, or are damaged.
        """
        key = text_key(input_ids)
        if key not in self._places:
            raise ValueError(
                f"{self.folder} has no states of a text of {len(input_ids)} tokens: it was written from other data, or with "
                "another tokenizer, template or greatest length. Write it anew with pardraft cache-features, for the "
                "evaluation data, too"
            )
        states = self._read(key)
        if self._chosen is None:
            return states
        num_stored = len(self.source.taps) + int(self.source.with_last)
        return states.unflatten(-1, (num_stored, -1))[:, self._chosen].flatten(1)

    def _read(self, key: str) -> torch.Tensor:
        shard, start, length, checksum = self._places[key]
        if shard not in self._open:
            self._open[shard] = safe_open(self._shards[shard], "pt")
        states = self._open[shard].get_slice("states")[start : start + length]
        if checksum_of(states) != checksum:
            raise ValueError(
                f"{self._shards[shard]} is damaged: the states of a text are not those that were written: {DAMAGED}"
            )
        return states

    def batch(self, input_ids: torch.LongTensor, documents: torch.LongTensor) -> torch.Tensor:
        """`(batch, length, width)`, zeros for padding.

        Args:
            input_ids: `(batch, length)`, padded on the right.
            documents: the same shape, the packed document of each token, -1 for padding.
        """
        items = []
        for ids, document in zip(input_ids, documents, strict=True):
            real = document != PADDING
            items.append(torch.cat([self.states(text) for text in split_documents(ids[real], document[real])]))
        result = items[0].new_zeros(*input_ids.shape, items[0].shape[1])
        for index, states in enumerate(items):
            result[index, : len(states)] = states
        return result


def store_for(
    drafter: PreTrainedModel, target: PreTrainedModel | None, folder: str | Path, with_logits: bool
) -> FeatureStore:
    """The target's states in `folder`, if the drafter can be trained on them; a `ValueError` says why not."""
    taps = [] if target is None else drafter.taps_for(target)
    if not taps:
        raise ValueError(
            f"features_folder is for drafters that read the target's hidden states, and this {type(drafter).__name__} reads "
            "token ids only: leave it out"
        )
    store = FeatureStore(folder)
    store.check(target, taps, with_logits)
    if with_logits:
        target_head(target)
    return store


class StoredStatesCollator:
    """A collator whose batches bring the stored states of their texts, so that workers read them while the device computes.

    Args:
        collator: the drafter's own.
        store: where the states are.
        layout: of its batches.
    """

    def __init__(self, collator: Any, store: FeatureStore, layout: type[Layout]) -> None:
        self.collator, self.store, self.layout = collator, store, layout

    @property
    def epoch(self) -> int:
        return self.collator.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.collator.epoch = epoch

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = self.collator(examples)
        return {**batch, STATES: self.store.batch(*self.layout.text(batch))}
