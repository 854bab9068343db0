"""N-gram models count what a Counter counts, however they are built, and refuse what they can't stand for."""

import itertools
import json
import re
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hf_pardraft import NgramModel
from hf_pardraft.ngram import build as ngram_build
from hf_pardraft.ngram import merging
from hf_pardraft.ngram.sources import texts_of_dataset, texts_of_files
from hf_pardraft.ngram.store import FILE_NAME
from ngram_cases import assert_counts, counted, random_documents, store_of
from tiny_tokenizers import tiny_tokenizer

TREES = Path(__file__).parent.parent / "fixtures" / "trees"
TABLES = load_file(TREES / "ngram.safetensors")
PUBLISHED = json.loads((TREES / "ngram_queries.json").read_text())["models"]
LARGE_VOCABULARY = 151_936


def published_documents(name):
    tokens, offsets = TABLES[f"{name}.tokens"], TABLES[f"{name}.doc_offsets"].tolist()
    return [tokens[start:end] for start, end in itertools.pairwise(offsets)]


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
    monkeypatch.setattr(merging, "MAX_OPEN_RUNS", 2)
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
        ([[1]], {"max_memory": "lots"}, "max_memory must be a size such as 1GB"),
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
    with pytest.raises(ValueError, match="no column 'text' or 'messages' or 'completion': it has body"):
        list(texts_of_dataset(str(path), None, "train"))


def test_of_conversations_the_answers_are_counted(tmp_path):
    pytest.importorskip("datasets")
    roles = ("system", "user", "assistant", "user", "assistant")
    for name, more in (("messages", {}), ("dialogue", {"messages": "no"}), ("text", {"messages": []})):
        path = tmp_path / f"{name}.jsonl"
        dialogues = [[{"role": role, "content": f"{role} {turn}{n}"} for turn, role in enumerate(roles)] for n in "ab"]
        path.write_text("\n".join(json.dumps({name: dialogue, **more}) for dialogue in dialogues))
        answers = [f"assistant {turn}{n}" for n in "ab" for turn in (2, 4)]
        column = "dialogue" if name == "dialogue" else None
        assert list(texts_of_dataset(str(path), None, "train", column)) == answers


def test_what_regenerate_writes_of_prompts_is_counted_without_naming_a_column(tmp_path):
    pytest.importorskip("datasets")
    answered = {"prompt": "ab", "index": 0, "truncated": False, "completion": "cd"}
    asked = {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "cd"}]}
    for row in (answered, asked):
        path = tmp_path / "answers.jsonl"
        path.write_text(json.dumps(row))
        assert list(texts_of_dataset(str(path), None, "train")) == ["cd"]


def test_the_mark_that_an_editor_begins_a_file_with_is_no_text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbfone\n")
    assert list(texts_of_files([path])) == ["one\n"]


def test_what_is_no_text_is_refused():
    tokenizer = tiny_tokenizer()
    with pytest.raises(ValueError, match="expected texts, got int"):
        NgramModel.from_texts([5], tokenizer)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="eos_token"):
        NgramModel.from_texts(["a"], tokenizer, add_end_token=True)
