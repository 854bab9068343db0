"""N-gram models count what a Counter counts, however they are built, and refuse what they can't stand for."""

import itertools
import json
import re
import sys
import tracemalloc
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import tiny_tokenizer
from hf_pardraft import NgramModel
from hf_pardraft.generation.tree.scoring import WalkByCalls
from hf_pardraft.ngram import build as ngram_build
from hf_pardraft.ngram import model as ngram_module
from hf_pardraft.ngram.smoothing import SMOOTHINGS
from hf_pardraft.ngram.sources import texts_of_dataset, texts_of_files
from hf_pardraft.ngram.store import CHECKSUM_KEY, FILE_NAME, METADATA_KEY

TREES = Path(__file__).parent.parent / "fixtures" / "trees"
TABLES = load_file(TREES / "ngram.safetensors")
PUBLISHED = json.loads((TREES / "ngram_queries.json").read_text())["models"]
LARGE_VOCABULARY = 151_936


def published_documents(name):
    tokens, offsets = TABLES[f"{name}.tokens"], TABLES[f"{name}.doc_offsets"].tolist()
    return [tokens[start:end] for start, end in itertools.pairwise(offsets)]


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


# Counting


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("source", ["documents", "trie"])
def test_counts_and_probabilities_are_darts(name, source):
    if source == "trie":
        model = NgramModel.from_dart_trie(TREES / f"ngram_{name}.trie", vocab_size=256)
    else:
        model = NgramModel.from_token_stream(published_documents(name), vocab_size=256, order=PUBLISHED[name]["order"])
    assert model.order == PUBLISHED[name]["order"]
    assert model.info.num_tokens == PUBLISHED[name]["num_tokens"]
    assert model.info.num_ngrams == PUBLISHED[name]["grams"]
    for n in range(1, model.order + 1):
        assert torch.equal(model.count(TABLES[f"{name}.grams{n}"].long()), TABLES[f"{name}.counts{n}"].long())
    for query in PUBLISHED[name]["queries"]:
        context = torch.tensor([query["context"]], dtype=torch.long)
        probability = model(context, torch.tensor([query["token"]])).item()
        assert abs(probability - query["prob"]) <= 1e-6
    for batch in PUBLISHED[name]["batches"]:
        context = torch.tensor([batch["context"]], dtype=torch.long)
        probabilities = model(context, torch.tensor(batch["tokens"]))[0]
        torch.testing.assert_close(probabilities, torch.tensor(batch["prob"]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("order", [2, 3, 4, 5])
@pytest.mark.parametrize("vocab_size", [1, 12, 3000, LARGE_VOCABULARY])
def test_counts_are_a_counters(order, vocab_size):
    documents = random_documents(vocab_size=vocab_size, seed=order)
    model = NgramModel.from_token_stream(documents, vocab_size=vocab_size, order=order)
    assert_counts(model, counted(documents, order))
    unseen = torch.randint(0, vocab_size + 5, (500, order), generator=torch.Generator().manual_seed(0))
    expected = counted(documents, order)
    assert model.count(unseen).tolist() == [expected[tuple(ngram)] for ngram in unseen.tolist()]


@pytest.mark.parametrize("order", [2, 5])
def test_nothing_to_count_is_an_empty_model(order):
    model = NgramModel.from_token_stream([[], []], vocab_size=9, order=order)
    assert model.info.num_ngrams == [0] * order
    assert model(torch.tensor([[1, 2]]), torch.tensor([3])).item() == 0
    assert_counts(NgramModel.from_token_stream([], vocab_size=9, order=order), Counter())


@pytest.mark.parametrize(("order", "vocab_size"), [(3, 300), (4, LARGE_VOCABULARY)])
def test_many_small_runs_are_merged_to_the_same_file(tmp_path, monkeypatch, order, vocab_size):
    generator = np.random.default_rng(1)
    # Longer and shorter than what is counted at once.
    documents = [generator.zipf(1.4, length) % vocab_size for length in (50_000, *generator.integers(0, 900, 60))]
    once = store_of(documents, tmp_path / "once", vocab_size=vocab_size, order=order)
    runs = []
    count_windows = ngram_build.count_windows
    monkeypatch.setattr(ngram_build, "count_windows", lambda *args: runs.append(1) or count_windows(*args))
    options = {"vocab_size": vocab_size, "order": order, "max_memory": "1MiB"}
    assert store_of(documents, tmp_path / "runs", **options) == once
    assert len(runs) >= 4
    monkeypatch.setattr(ngram_build, "MAX_OPEN_RUNS", 2)
    monkeypatch.setattr(ngram_build, "BYTES_PER_ENTRY", 1 << 14)
    assert store_of(documents, tmp_path / "passes", **options) == once


def test_several_processes_make_the_same_file(tmp_path, monkeypatch):
    documents = [np.random.default_rng(seed).zipf(1.4, 3000) % 500 for seed in range(20)]
    options = {"vocab_size": 500, "order": 3, "max_memory": "4MiB"}
    single = store_of(documents, tmp_path / "single", **options)
    assert store_of(documents, tmp_path / "both", num_proc=2, **options) == single
    monkeypatch.setattr(
        ngram_build.CountJob, "command", lambda job: [sys.executable, "-c", "raise OSError('disk full')"]
    )
    with pytest.raises(RuntimeError, match="disk full"):
        NgramModel.from_token_stream(documents, save_directory=tmp_path / "both", num_proc=2, **options)
    assert (tmp_path / "both" / FILE_NAME).read_bytes() == single


@pytest.mark.parametrize("length", [0, 1, 2, 3, 16_383, 16_384, 16_385, 40_000])
def test_one_document_may_come_in_any_form(tmp_path, length):
    ids = np.random.default_rng(2).integers(0, 40, length)
    options = {"vocab_size": 40, "order": 4, "max_memory": "1MiB"}
    expected = store_of([ids.tolist()], tmp_path / "documents", **options)
    forms = {"array": ids, "tensor": torch.from_numpy(ids), "list": ids.tolist(), "stream": iter(ids.tolist())}
    for name, form in forms.items():
        assert store_of(form, tmp_path / name, **options) == expected


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64, np.uint64])
def test_documents_may_come_in_any_form(tmp_path, dtype):
    rows = np.random.default_rng(2).integers(0, 40, (6, 50)).astype(dtype)
    options = {"vocab_size": 40, "order": 3}
    expected = store_of(rows.tolist(), tmp_path / "lists", **options)
    tensors = torch.from_numpy(rows.astype(np.int64))
    forms = {
        "table": rows,
        "arrays": list(rows),
        "tuples": tuple(map(tuple, rows.tolist())),
        "generator": (row for row in rows),
        "iterators": map(list, rows),
        "tensor": tensors,
        "tensors": list(tensors),
        "ragged": np.array([*rows, rows[0][:0]], dtype=object),
        "column": pytest.importorskip("datasets").Dataset.from_dict({"ids": rows.tolist()})["ids"],
    }
    for name, form in forms.items():
        assert store_of(form, tmp_path / name, **options) == expected, name


def test_progress_is_shown_when_it_is_asked_for(capsys):
    documents = [[1, 2, 3, 1], [2, 3]]
    NgramModel.from_token_stream(documents, vocab_size=4)
    assert capsys.readouterr().err == ""
    NgramModel.from_token_stream(documents, vocab_size=4, progress=True)
    shown = capsys.readouterr().err
    # The tokens, and the different n-grams that begin at each of them.
    assert re.search(r"counting: 6.00 tokens", shown)
    assert re.search(r"merging: 100%.*6.00/6.00", shown)


def test_counting_keeps_to_its_memory():
    memory, num_documents = 8_000_000, 300

    def documents():
        for seed in range(num_documents):
            yield np.random.default_rng(seed).integers(0, 5000, 5000)

    NgramModel.from_token_stream(documents(), vocab_size=5000, max_memory=memory)
    tracemalloc.start()
    NgramModel.from_token_stream(documents(), vocab_size=5000, max_memory=memory)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # 1.5 M different trigrams: their words alone are 12 MB.
    assert peak < memory


@pytest.mark.parametrize("min_count", [2, 3, 1000])
def test_pruning_drops_what_was_seen_less_often(min_count):
    documents = random_documents(num_documents=200)
    model = NgramModel.from_token_stream(documents, vocab_size=12, order=4, min_count=min_count)
    expected = counted(documents, 4)
    kept = {ngram: count for ngram, count in expected.items() if len(ngram) == 1 or count >= min_count}
    assert len(kept) < len(expected)
    assert_counts(model, Counter(kept))
    dropped = [ngram for ngram in expected if ngram not in kept and len(ngram) == 3]
    assert not model.count(torch.tensor(dropped)).any()


@pytest.mark.parametrize("num_counts", [1, 254, 255, 256, 257, 700])
def test_any_number_of_different_counts_is_kept(num_counts):
    vocab_size = 20_000
    documents = [[token, token + 1] * (token + 1) for token in range(num_counts)]
    # Places far from each other, too, so that there are n-grams without a neighbour to share a pair with.
    documents += random_documents(300, vocab_size=vocab_size)
    model = NgramModel.from_token_stream(documents, vocab_size=vocab_size, order=3)
    assert len(model.table.values) >= num_counts
    assert_counts(model, counted(documents, 3))


def test_keys_are_as_narrow_as_they_can_be():
    for vocab_size, dtype in ((12, torch.int32), (50_000, torch.int64)):
        documents = random_documents(vocab_size=vocab_size)
        model = NgramModel.from_token_stream(documents, vocab_size=vocab_size)
        assert model.table.heads.dtype == dtype
        assert model.table.rests.dtype == model.table.values.dtype == model.table.unigrams.dtype == torch.int32
        assert_counts(model, counted(documents, 3))


@pytest.mark.parametrize(("exponent", "vocab_size", "num_tokens"), [(1.01, 32_000, 400_000), (1.3, 151_936, 1_000_000)])
def test_a_trigram_takes_twelve_bytes_at_most(exponent, vocab_size, num_tokens):
    generator = np.random.default_rng(0)
    # Independent tokens: hardly a bigram leads to two trigrams, as in no text, so that bigrams weigh the most.
    ranks = np.arange(1, vocab_size + 1)
    odds = ranks**-exponent / (ranks**-exponent).sum()
    ids = generator.permutation(vocab_size)[generator.choice(vocab_size, num_tokens, p=odds)]
    model = NgramModel.from_token_stream(ids, vocab_size=vocab_size)
    assert model.info.num_ngrams[1] > 0.3 * model.info.num_ngrams[2]
    assert model.path.stat().st_size <= 12 * model.info.num_ngrams[2]


# Look-up


def loop_frequencies(counts, context, token, length, num_tokens):
    """The count of a context's last `length` tokens, and the share of `token` behind them."""
    suffix = tuple(context[len(context) - length :])
    seen = counts[suffix] if length else num_tokens
    return seen, counts[(*suffix, token)] / seen if seen else 0.0


def loop_probability(smoothing, weight, counts, context, token, order, num_tokens):
    found = [
        loop_frequencies(counts, context, token, length, num_tokens)
        for length in range(min(order - 1, len(context)) + 1)
    ]
    if smoothing == "longest_match":
        return next((share for _, share in reversed(found[1:]) if share), 0.0)
    if smoothing == "stupid_backoff":
        return next((share * weight**lost for lost, (_, share) in enumerate(reversed(found)) if share), 0.0)
    probability = found[0][1]
    for seen, share in found[1:]:
        probability = weight * share + (1 - weight) * probability if seen else probability
    return probability


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@pytest.mark.parametrize("order", [2, 3, 5])
def test_a_whole_level_is_looked_up_as_one_by_one(smoothing, order):
    documents = random_documents(num_documents=80)
    counts, num_tokens = counted(documents, order), sum(map(len, documents))
    model = NgramModel.from_token_stream(documents, vocab_size=12, order=order)
    generator = torch.Generator().manual_seed(order)
    for weight, length in ((None, 6), (0.25, 1), (None, 0)):
        level = model.smoothed(smoothing, weight)
        used = SMOOTHINGS[smoothing].default_weight if weight is None else weight
        # Some tokens are beyond the vocabulary, as a target's padding is.
        contexts = torch.randint(0, 14, (2, 7, length), generator=generator)
        candidates = torch.randint(0, 14, (2, 9), generator=generator)
        found = level(contexts, candidates)
        assert found.shape == (2, 7, 9)
        expected = [
            [
                [
                    loop_probability(smoothing, used, counts, context, token, order, num_tokens)
                    for token in candidates[row].tolist()
                ]
                for context in contexts[row].tolist()
            ]
            for row in range(2)
        ]
        torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-6, atol=1e-7)


def test_interpolation_sums_to_one():
    documents = [np.random.default_rng(3).integers(0, 6, 4000)]
    model = NgramModel.from_token_stream(documents, vocab_size=6).smoothed("interpolated")
    contexts = torch.cartesian_prod(torch.arange(6), torch.arange(6))
    total = model(contexts, torch.arange(6)).sum(dim=-1)
    # The document's last two tokens were seen once more than anything behind them.
    torch.testing.assert_close(total, torch.ones(36), rtol=0, atol=0.02)


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@pytest.mark.parametrize("order", [2, 3, 5])
@pytest.mark.parametrize("length", [0, 1, 6])
def test_a_walk_finds_what_whole_prefixes_do(order, smoothing, length):
    documents = random_documents(num_documents=80)
    model = NgramModel.from_token_stream(documents, vocab_size=12, order=order).smoothed(smoothing)
    generator = torch.Generator().manual_seed(order)
    context = torch.randint(0, 12, (3, length), generator=generator)
    # Some tokens are beyond the vocabulary, as a target's padding is.
    candidates = torch.randint(0, 14, (3, 6, 5), generator=generator)
    walk, whole = model.walk(context, candidates), WalkByCalls(model, context, candidates)
    num_prefixes = 1
    for level in range(6):
        # A level need not be asked for.
        if level != 2:
            assert torch.equal(walk.probabilities(), whole.probabilities())
        extensions = torch.randint(0, num_prefixes * 5, (3, 4 + level), generator=generator)
        num_prefixes = 4 + level
        walk.step(extensions)
        whole.step(extensions)


# Storage


@pytest.fixture
def store(tmp_path):
    documents = random_documents(num_documents=300)
    NgramModel.from_token_stream(documents, vocab_size=12, order=3, save_directory=tmp_path / "store")
    return tmp_path / "store" / FILE_NAME


def test_what_is_saved_is_loaded(store, tmp_path):
    model = NgramModel.from_pretrained(store.parent)
    model.save_pretrained(tmp_path / "copy")
    assert (tmp_path / "copy" / FILE_NAME).read_bytes() == store.read_bytes()
    copy = NgramModel.from_pretrained(tmp_path / "copy", verify=True, smoothing="stupid_backoff", smoothing_weight=0.3)
    assert copy.info == model.info
    contexts, candidates = torch.randint(0, 12, (4, 2)), torch.arange(12)
    assert torch.equal(copy(contexts, candidates), model.smoothed("stupid_backoff", 0.3)(contexts, candidates))
    assert load_file(store).keys() == {"unigrams", "heads", "rests", "values"}


def test_a_model_without_a_folder_cleans_up(tmp_path, monkeypatch):
    monkeypatch.setattr(ngram_module.tempfile, "tempdir", str(tmp_path))
    model = NgramModel.from_token_stream([[1, 2, 3]], vocab_size=4)
    assert model.path.is_file()
    model.save_pretrained(tmp_path / "kept")
    del model
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_loaded_model_is_memory_mapped(store):
    model = NgramModel.from_pretrained(store.parent)
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(store) in line]
    ranges = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in mapped]
    for tensor in (model.table.heads, model.table.rests):
        assert any(start <= tensor.data_ptr() < end for start, end in ranges)


def test_a_failed_build_leaves_the_old_store_alone(store):
    before = store.read_bytes()

    def documents():
        yield [1] * 100_000
        raise RuntimeError("the disk with the text is gone")

    with pytest.raises(RuntimeError, match="gone"):
        NgramModel.from_token_stream(documents(), vocab_size=12, max_memory="1MiB", save_directory=store.parent)
    assert store.read_bytes() == before
    assert [path.name for path in store.parent.iterdir()] == [FILE_NAME]


def test_every_truncation_is_found(store):
    whole = store.read_bytes()
    for length in [*range(0, len(whole), 97), len(whole) - 1]:
        store.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"damaged|holds no n-gram model"):
            NgramModel.from_pretrained(store.parent)


def test_every_changed_byte_is_found(store):
    whole = store.read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    places = [*range(header_end), *range(header_end, len(whole), 101), len(whole) - 1]
    for place in places:
        changed = bytearray(whole)
        changed[place] ^= 1 << (place % 7)
        store.write_bytes(changed)
        with pytest.raises(ValueError, match=r"damaged|holds no n-gram model"):
            NgramModel.from_pretrained(store.parent)


def test_another_safetensors_file_is_no_model(tmp_path):
    save_file({"weight": torch.zeros(3)}, tmp_path / FILE_NAME)
    with pytest.raises(ValueError, match="holds no n-gram model"):
        NgramModel.from_pretrained(tmp_path)
    with pytest.raises(OSError, match=FILE_NAME):
        NgramModel.from_pretrained(tmp_path.parent)


def test_a_model_is_uploaded_as_one_file(store, monkeypatch):
    calls = []

    class Api:
        def __init__(self, token=None):
            calls.append(token)

        def create_repo(self, repo_id, **kwargs):
            calls.append((repo_id, kwargs))
            return type("Repo", (), {"repo_id": f"someone/{repo_id}"})

        def upload_file(self, **kwargs):
            calls.append(kwargs)
            return "address"

    monkeypatch.setattr(ngram_module, "HfApi", Api)
    NgramModel.from_pretrained(store.parent).save_pretrained(store.parent / "mine", push_to_hub=True, private=True)
    assert calls[1] == ("mine", {"private": True, "exist_ok": True})
    assert calls[2] == {"path_or_fileobj": store, "path_in_repo": FILE_NAME, "repo_id": "someone/mine"}


def test_a_model_is_loaded_from_a_hub_repository(store, tmp_path):
    # A repository as the Hub's client keeps it, which is all that it looks at offline.
    repository = tmp_path / "hub" / "models--someone--ngrams"
    for revision, commit in (("main", "1" * 40), ("v2", "2" * 40)):
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
        folder = repository / "snapshots" / commit / ("inner" if revision == "v2" else "")
        folder.mkdir(parents=True)
        (folder / FILE_NAME).write_bytes(store.read_bytes())
    model = NgramModel.from_pretrained("someone/ngrams", cache_dir=tmp_path / "hub")
    assert model.info == NgramModel.from_pretrained(store.parent).info
    options = {"cache_dir": tmp_path / "hub", "revision": "v2"}
    assert NgramModel.from_pretrained("someone/ngrams", subfolder="inner", **options).path.parent.name == "inner"
    with pytest.raises(OSError, match="no n-gram model at someone/ngrams"):
        NgramModel.from_pretrained("someone/ngrams", **options)


@pytest.mark.parametrize(
    ("facts", "message"), [({"order": 9}, "order.*2 to 5, got 9"), ({"format": 1}, "another format")]
)
def test_a_store_of_another_kind_is_refused(store, facts, message):
    whole = store.read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:header_end])
    text = json.dumps({**json.loads(header["__metadata__"][METADATA_KEY]), **facts})
    header["__metadata__"] = {METADATA_KEY: text, CHECKSUM_KEY: f"{zlib.crc32(text.encode()):08x}"}
    encoded = json.dumps(header).encode()
    store.write_bytes(len(encoded).to_bytes(8, "little") + encoded + whole[header_end:])
    with pytest.raises(ValueError, match=message):
        NgramModel.from_pretrained(store.parent)


# Refusals


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        ([[1]], {"order": 1}, "order.*2 to 5, got 1"),
        ([[1]], {"order": 6}, "order.*2 to 5, got 6"),
        ([[1]], {"order": "3"}, "order"),
        ([[1]], {"vocab_size": None}, "vocab_size or tokenizer"),
        ([[1]], {"vocab_size": 0}, "vocab_size"),
        ([[1]], {"vocab_size": 1 << 30, "order": 5}, "too long"),
        ([[1]], {"min_count": 0}, "min_count"),
        ([[1]], {"num_proc": 0}, "num_proc"),
        ([[1]], {"max_memory": "1KB"}, "max_memory"),
        ([[1], [3, 10]], {}, "token id 10 is not in a vocabulary of 10"),
        ([[1, -100]], {}, "token id -100"),
        ([[[1, 2]]], {}, "one-dimensional"),
        ([["a", "b"]], {}, "token ids"),
        ([[0.5]], {}, "token ids"),
        (["text"], {}, "token ids"),
        ([{"input_ids": [1]}], {}, r"token ids.*row\['input_ids'\]"),
    ],
)
def test_bad_input_is_refused(documents, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        NgramModel.from_token_stream(documents, save_directory=tmp_path, **{"vocab_size": 10, **options})
    assert list(tmp_path.iterdir()) == []


def test_an_ngram_longer_than_the_order_can_not_be_looked_up(store):
    with pytest.raises(ValueError, match="1 to 3 tokens, got 4"):
        NgramModel.from_pretrained(store.parent).count(torch.zeros(1, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="smoothing"):
        NgramModel.from_pretrained(store.parent, smoothing="kneser_ney")


@pytest.mark.parametrize("damage", ["empty", "truncated", "longer", "order", "child", "text"])
def test_a_damaged_trie_is_refused(damage, tmp_path):
    whole = bytearray((TREES / "ngram_plain2.trie").read_bytes())
    if damage == "order":
        whole[0] = 7
    if damage == "child":
        # The root has one child more, so that nodes are looked for in the wrong places.
        whole[32] += 1
    damaged = {"empty": b"", "truncated": whole[:-40], "longer": whole + bytes(12), "text": b"once upon a time" * 9}
    (tmp_path / "x.trie").write_bytes(damaged.get(damage, whole))
    with pytest.raises(ValueError, match=r"no trie|damaged|order"):
        NgramModel.from_dart_trie(tmp_path / "x.trie", vocab_size=256, save_directory=tmp_path / "out")
    with pytest.raises(ValueError, match="not in a vocabulary of 50"):
        NgramModel.from_dart_trie(TREES / "ngram_plain2.trie", vocab_size=50, save_directory=tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Text


def test_texts_are_counted_with_a_tokenizer_that_is_remembered(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    texts = ["def add(a, b):", "", "class Point:\n    pass\n"]
    model = NgramModel.from_texts(texts, tokenizer, add_end_token=True, save_directory=tmp_path / "model")
    documents = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    assert_counts(model, counted(documents, 3))
    assert model.vocab_size == len(tokenizer)
    loaded = NgramModel.from_pretrained(
        tmp_path / "model", tokenizer=type(tokenizer).from_pretrained(tmp_path / "tokenizer")
    )
    assert loaded.info.tokenizer_hash == model.info.tokenizer_hash
    tokenizer.add_tokens(["<another>"])
    with pytest.raises(ValueError, match=r"another tokenizer.*hash.*build it"):
        NgramModel.from_pretrained(tmp_path / "model", tokenizer=tokenizer)
    nameless = NgramModel.from_token_stream([[1]], vocab_size=10)
    with pytest.raises(ValueError, match="10 tokens and this tokenizer has"):
        nameless.check_tokenizer(tokenizer)


def test_a_targets_vocabulary_may_be_padded_and_nothing_else():
    model = NgramModel.from_token_stream([[1]], vocab_size=1000)
    for vocab_size in (1000, 1001, 1010):
        model.check_vocabulary(vocab_size)
    for vocab_size in (999, 1011, 32_000):
        with pytest.raises(ValueError, match=f"1000 tokens and the target has {vocab_size}"):
            model.check_vocabulary(vocab_size)


def test_files_are_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_pardraft.ngram.sources.PIECE_CHARACTERS", 7)
    path = tmp_path / "text.txt"
    path.write_text("one\ntwo\n\nthree\n\n\n\nfour", encoding="utf-8")
    assert list(texts_of_files([path, path], separator="\n\n")) == ["one\ntwo", "three", "four"] * 2
    whole = list(texts_of_files([path]))
    assert "".join(whole) == path.read_text(encoding="utf-8")
    assert all(piece.endswith("\n") for piece in whole[:-1])


def test_data_sets_are_streamed(tmp_path):
    pytest.importorskip("datasets")
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"body": text}) for text in ("ab", "c")))
    assert list(texts_of_dataset(str(path), None, "train", "body")) == ["ab", "c"]
    with pytest.raises(ValueError, match="no column 'text': it has body"):
        list(texts_of_dataset(str(path), None, "train", "text"))


def test_what_is_no_text_is_refused():
    tokenizer = tiny_tokenizer()
    with pytest.raises(ValueError, match="expected texts, got int"):
        NgramModel.from_texts([5], tokenizer)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="eos_token"):
        NgramModel.from_texts(["a"], tokenizer, add_end_token=True)
