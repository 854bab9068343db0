"""Documents of token ids, and what an n-gram model of them is to hold."""

from collections import Counter

import numpy as np
import torch

from hf_pardraft import NgramModel
from hf_pardraft.ngram.store import FILE_NAME


def random_documents(num_documents=40, longest=60, vocab_size=12, seed=0):
    """Documents of all lengths from 0 on, some tokens much more frequent than others."""
    generator = np.random.default_rng(seed)
    lengths = [0, 1, 2, 3, 4, *generator.integers(0, longest, num_documents)]
    return [(generator.zipf(1.3, length) * 7919 % vocab_size).tolist() for length in lengths]


def counted(documents, order):
    """What an n-gram model is to hold: `{ngram: count}` of all lengths."""
    return Counter(
        tuple(document[start : start + n])
        for document in documents
        for n in range(1, order + 1)
        for start in range(len(document) - n + 1)
    )


def assert_counts(model, expected):
    for n in range(1, model.order + 1):
        ngrams = [ngram for ngram in expected if len(ngram) == n]
        assert model.info.num_ngrams[n - 1] == len(ngrams)
        found = model.count(torch.tensor(ngrams, dtype=torch.long).reshape(-1, n)).tolist()
        assert found == [expected[ngram] for ngram in ngrams]


def store_of(documents, folder, **options):
    """The bytes of the store that is built in `folder`."""
    NgramModel.from_token_stream(documents, save_directory=folder, **options)
    assert [path.name for path in folder.iterdir()] == [FILE_NAME]
    return (folder / FILE_NAME).read_bytes()
