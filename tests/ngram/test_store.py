"""A store is memory-mapped, replaced in one piece, and refused where a byte is not as it was written."""

import json
import sys
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_pardraft import NgramModel
from hf_pardraft.ngram import model as ngram_module
from hf_pardraft.ngram.store import CHECKSUM_KEY, FILE_NAME, METADATA_KEY
from ngram_cases import random_documents


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


def test_an_ngram_longer_than_the_order_can_not_be_looked_up(store):
    with pytest.raises(ValueError, match="1 to 3 tokens, got 4"):
        NgramModel.from_pretrained(store.parent).count(torch.zeros(1, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="smoothing"):
        NgramModel.from_pretrained(store.parent, smoothing="kneser_ney")
