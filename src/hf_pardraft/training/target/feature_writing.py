"""Writing the target's hidden states to disk: what room they take, and one shard after the other, resumable."""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ...checkpoints.atomic_files import free_bytes, told_size, write_whole
from ...checkpoints.atomic_folders import writing_folder
from ...models.inputs import input_device
from ...pairing.remembered import public_name, target_fingerprint
from ...user_input.files import read_json
from ..data.documents import checked, split_documents
from .feature_store import INDEX, FeatureSource, FeatureStore, ShardTable, checksum_of, text_key
from .head import target_head
from .reading import freeze, read_target

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOKENS_PER_SHARD = 1 << 16
# Of the greatest logit: how far a head's output may be from the target's own logits.
HEAD_TOLERANCE = 1e-2


def texts_of(examples: Iterable[dict[str, Any]]) -> list[list[int]]:
    """The token ids of all examples, each text once; every document of a packed one is a text."""
    texts = {}
    for example in examples:
        input_ids, _, documents = checked(example)
        for text in split_documents(input_ids, documents):
            texts.setdefault(text_key(text), text.tolist())
    return list(texts.values())


def feature_bytes(target: PreTrainedModel, taps: list[int], num_tokens: int, dtype: str, with_last: bool) -> int:
    """How much room the states of so many tokens take."""
    width = target.config.get_text_config(decoder=True).hidden_size
    return num_tokens * width * (len(taps) + int(with_last)) * DTYPES[dtype].itemsize


def check_room(needed: int, folder: Path) -> None:
    """Raise an `OSError` if the disk that `folder` will be on has fewer free bytes than `needed`."""
    free = free_bytes(folder)
    if needed > free:
        sizes = [told_size(needed), told_size(free)]
        if sizes[0] == sizes[1]:
            sizes = [f"{needed} bytes", f"{free} bytes"]
        raise OSError(
            f"the states take {sizes[0]}, and {folder} has {sizes[1]} free: make room, choose another folder or a narrower "
            "dtype, cache fewer texts, or train with the target live"
        )


@torch.no_grad()
def check_head(target: PreTrainedModel, input_ids: Sequence[int]) -> None:
    """Raise a `ValueError` if the target's logits can't be made from its last hidden state, which alone is stored."""
    outputs = target(torch.tensor([input_ids], device=input_device(target)), output_hidden_states=[-1], use_cache=False)
    found = target_head(target)(outputs.hidden_states[-1][0]).float()
    expected = outputs.logits[0].float()
    if (found - expected).abs().max() > HEAD_TOLERANCE * expected.abs().max():
        raise ValueError(
            f"the logits of a {type(target).__name__} are not what its head makes of its last hidden state alone, so they can't "
            "be made from stored states: train this drafter with the target live"
        )


def shards_of(texts: list[list[int]], tokens_per_shard: int) -> list[list[list[int]]]:
    """Texts in groups of about so many tokens, in their order: the same groups whenever they are asked for."""
    shards, tokens_left = [], 0
    for text in texts:
        if tokens_left < len(text) or not shards:
            shards.append([])
            tokens_left = max(tokens_per_shard, len(text))
        shards[-1].append(text)
        tokens_left -= len(text)
    return shards


def cache_features(
    target: PreTrainedModel,
    taps: list[int],
    examples: Iterable[dict[str, Any]],
    folder: str | Path,
    dtype: str = "bfloat16",
    with_last: bool = False,
    batch_size: int = 8,
    tokens_per_shard: int = TOKENS_PER_SHARD,
    progress: bool = False,
) -> "FeatureStore":
    """Write the target's hidden states of all examples; a run that was killed goes on where it was.

    Args:
        target: the model to read.
        taps: indices into its `hidden_states` tuple: `drafter.taps_for(target)`.
        examples: with `input_ids`; of texts that are there twice one is kept.
        folder: to write to.
        dtype: "float32", "bfloat16" or "float16".
        with_last: whether to keep the last hidden state as well, for drafters that learn from the target's logits.
        batch_size: texts that the target reads at once.
        tokens_per_shard: about how many tokens go into a file.
        progress: whether to show a bar.

    Raises:
        ValueError: if there is nothing to read, a setting is not one of those above, the folder holds other states, or the
            logits can't be made from the last hidden state.
        OSError: if there is not enough room, before the target has read anything.
    """
    folder, texts = Path(folder), texts_of(examples)
    if dtype not in DTYPES or batch_size < 1 or tokens_per_shard < 1 or not texts or not taps:
        raise ValueError(
            f"expected a dtype of {sorted(DTYPES)}, batch_size and tokens_per_shard of 1 or more, taps and texts, got {dtype!r}, "
            f"{batch_size}, {tokens_per_shard}, {taps} and {len(texts)} texts"
        )
    data = hashlib.blake2b("".join(map(text_key, texts)).encode(), digest_size=16).hexdigest()
    source = FeatureSource(
        public_name(target), target_fingerprint(target), list(taps), with_last, dtype, tokens_per_shard, data
    )
    with writing_folder(folder):
        shards = shards_of(texts, tokens_per_shard)
        tables = _begin(folder, source, shards)
        missing = [index for index in range(len(shards)) if f"{index:05d}" not in tables]
        num_tokens = sum(len(text) for index in missing for text in shards[index])
        check_room(feature_bytes(target, taps, num_tokens, dtype, with_last), folder)
        freeze(target)
        if with_last:
            check_head(target, texts[0])
        for index in tqdm(missing, desc="shards", disable=not progress):
            name = f"{index:05d}"
            tables[name] = _write_shard(folder, name, shards[index], target, source, batch_size)
        _write_index(folder, {**asdict(source), "complete": True, "shards": dict(sorted(tables.items()))})
        return FeatureStore(folder)


def _begin(folder: Path, source: FeatureSource, shards: list[list[list[int]]]) -> dict[str, int]:
    """Note whose states the folder is to hold, and say which shards are there, with their tables' checksums.

    Raises:
        ValueError: if it holds the states of something else.
    """
    index = folder / INDEX
    check_own_folder(folder)
    if index.exists():
        found = read_json(index)
        expected = asdict(source)
        if not isinstance(found, dict):
            raise ValueError(f"{index} is not what pardraft cache-features writes: choose another folder")
        other = [name for name in expected if found.get(name) != expected[name]]
        if other:
            raise ValueError(
                f"{folder} holds the states of another run (they differ in {', '.join(other)}): choose another folder, or "
                "delete this one"
            )
    for left in folder.glob("*.part"):
        left.unlink()
    if not index.exists():
        _write_index(folder, {**asdict(source), "complete": False})
    expected_keys = {f"{number:05d}": [text_key(text) for text in shard] for number, shard in enumerate(shards)}
    tables = {}
    for path in folder.glob("*.safetensors"):
        if path.stem not in expected_keys:
            raise ValueError(f"{path} is none of the {len(shards)} shards of these texts: choose another folder")
        try:
            table = ShardTable.read(path)
        except (SafetensorError, KeyError, TypeError, ValueError):
            # Damaged: it is written again.
            continue
        if table.keys == expected_keys[path.stem]:
            tables[path.stem] = table.crc32
    return tables


def check_own_folder(folder: Path) -> None:
    """Raise an error if a folder is another's: of a model, say, whose weights would be taken for stored states.

    Raises:
        FileExistsError: if there are files and no index.
    """
    if not folder.is_dir() or (folder / INDEX).exists():
        return
    # A note beside them does no harm; what is a model's, or another's data, is or may be taken for a shard or an index.
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))
    if others:
        raise FileExistsError(
            f"{folder} holds {', '.join(others[:5])} and no stored states ({INDEX} is missing): choose a new folder for them"
        )


def _write_index(folder: Path, content: dict[str, Any]) -> None:
    kept = "the shards are intact; make room, and run it again, which goes on there"
    write_whole(folder / INDEX, json.dumps(content, indent=2) + "\n", kept)


def _write_shard(
    folder: Path, name: str, texts: list[list[int]], target: PreTrainedModel, source: FeatureSource, batch_size: int
) -> int:
    """All texts of a shard through the target, into a file that is there whole or not at all; the checksum of its table."""
    taps = [*source.taps, -1] if source.with_last else source.taps
    written, device = [], input_device(target)
    for first in range(0, len(texts), batch_size):
        ids = [torch.tensor(text) for text in texts[first : first + batch_size]]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(device)
        lengths = torch.tensor([len(text) for text in ids], device=device)
        real = (torch.arange(padded.shape[1], device=device) < lengths[:, None]).long()
        states = read_target(target, taps, padded, real).features.to(DTYPES[source.dtype]).cpu()
        if not states.isfinite().all():
            raise ValueError(f"the target has hidden states beyond the range of {source.dtype}: store them as bfloat16")
        written += [own[: len(text)] for own, text in zip(states, ids, strict=True)]
    table = ShardTable([text_key(text) for text in texts], list(map(len, texts)), list(map(checksum_of, written)))
    part = folder / f"{name}.part"
    columns = {"lengths": torch.tensor(table.lengths), "checksums": torch.tensor(table.checksums)}
    # As any file here: safetensors gives its own to nobody else.
    part.touch()
    mode = part.stat().st_mode
    try:
        save_file(
            {"states": torch.cat(written), **columns}, part, metadata={"format": "pt", "keys": json.dumps(table.keys)}
        )
    except (OSError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        raise OSError(
            f"shard {name} could not be written to {folder}: {error}. Nothing of it was kept, and the shards before it are "
            "intact. Make room, and run it again: it goes on there"
        ) from error
    part.chmod(mode)
    os.replace(part, folder / f"{name}.safetensors")
    return table.crc32
