"""Reads the trie files of the DART reference into an n-gram store."""

import os
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from .pairs import Counts
from .store import check_order, write_store

# Of the file in 32-bit words, little-endian: order and node count (two words each); then for each node its token (1),
# parent (2), count (1) and number of children (2), and for each child a token (1) and its node (2).
HEADER_WORDS = 4
NODE_WORDS = 6
CHILD_WORDS = 3


def convert_trie(source: Path, target: Path, vocab_size: int, tokenizer_facts: dict[str, Any]) -> None:
    """Write the counts in a trie file as a store.

    Raises:
        ValueError: if the file is no such trie, or damaged, or has tokens beyond the vocabulary.
    """
    words, order, num_nodes = open_trie(source)
    tokens, parents, counts = read_nodes(source, words, num_nodes)
    if num_nodes > 1 and not (tokens[1:].min() >= 0 and tokens[1:].max() < vocab_size):
        raise ValueError(
            f"{source} has token ids from {tokens[1:].min()} to {tokens[1:].max()}, which are not in a vocabulary of "
            f"{vocab_size}: pass the vocab_size (or tokenizer) that it was built with"
        )
    unigrams, levels = trie_levels(source, order, tokens, parents, counts, vocab_size)
    write_store(target, unigrams, levels, {"num_tokens": int(counts[0]), **tokenizer_facts})


def open_trie(path: Path) -> tuple[np.ndarray, int, int]:
    """The words of a trie file, memory-mapped, its order and its number of nodes, the root counted."""
    size = os.path.getsize(path)
    if size < 4 * (HEADER_WORDS + NODE_WORDS) or size % 4:
        raise ValueError(f"{path} is no trie of the DART reference, or truncated: it has {size} bytes")
    words = np.memmap(path, dtype="<i4", mode="r")
    order, num_nodes = words[:HEADER_WORDS].view("<u8").tolist()
    # Every node but the root is somebody's child.
    expected = 4 * (HEADER_WORDS + num_nodes * NODE_WORDS + (num_nodes - 1) * CHILD_WORDS)
    if size != expected:
        raise ValueError(
            f"{path} is no trie of the DART reference, or truncated: with {num_nodes} nodes it would have {expected} bytes, "
            f"and it has {size}"
        )
    check_order(order)
    return words, order, num_nodes


def read_nodes(path: Path, words: np.ndarray, num_nodes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, parents and counts of all nodes. Where a node begins is known only from the ones before it."""
    view, end = memoryview(words), len(words)
    offsets, offset = array("q"), HEADER_WORDS
    for _ in range(num_nodes):
        if offset + NODE_WORDS > end:
            break
        offsets.append(offset)
        num_children = view[offset + 4]
        offset += NODE_WORDS + CHILD_WORDS * num_children
        if num_children < 0:
            break
    if len(offsets) != num_nodes or offset != end:
        raise ValueError(f"{path} is damaged: its nodes do not fill the file. Copy it again")
    starts = np.frombuffer(offsets, dtype=np.int64)
    low, high = words[starts + 1].view("<u4").astype(np.int64), words[starts + 2].astype(np.int64)
    return words[starts], low | (high << 32), words[starts + 3].view("<u4").astype(np.int64)


def trie_levels(
    path: Path, order: int, tokens: np.ndarray, parents: np.ndarray, counts: np.ndarray, vocab_size: int
) -> tuple[np.ndarray, list[Counts]]:
    """The counts of the tokens, and of bigrams, trigrams, ... in the order of a store."""
    if not (parents[1:].min(initial=0) >= 0 and parents[1:].max(initial=0) < len(tokens)):
        raise ValueError(f"{path} is damaged: a node's parent does not exist. Copy it again")
    depth_of = np.full(len(tokens), -1, dtype=np.int8)
    depth_of[0] = 0
    places = np.zeros(len(tokens), dtype=np.int64)
    unigrams, levels, num_placed = np.zeros(vocab_size, dtype=np.int64), [], 1
    for depth in range(1, order + 1):
        nodes = np.flatnonzero((depth_of[parents] == depth - 1) & (depth_of < 0))
        num_placed += len(nodes)
        depth_of[nodes] = depth
        if depth == 1:
            unigrams[tokens[nodes]] = counts[nodes]
            places[nodes] = tokens[nodes]
            continue
        keys = places[parents[nodes]] * (vocab_size + 1) + tokens[nodes]
        ascending = keys.argsort()
        places[nodes[ascending]] = np.arange(len(nodes))
        levels.append(Counts(keys[ascending], counts[nodes[ascending]]))
    if num_placed != len(tokens):
        raise ValueError(
            f"{path} is damaged: {len(tokens) - num_placed} of its nodes lie deeper than its order {order}"
        )
    return unigrams, levels
