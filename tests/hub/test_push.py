"""Publishing: exactly the files that were announced, only what loads, and not without measured numbers. Never the network."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.errors import HTTPError

from hf_pardraft.hub import push as push_module
from hub_stand_in import Hub, serve
from in_process import pardraft
from tiny_models import tiny_drafter, tiny_target

EARLIER = ("adapter_config.json", "adapter_model.safetensors", "model-00001-of-00002.safetensors")
RESULTS = {
    "rows": [{"name": "drafter", "tokens_per_second": 50.0, "speedup": 2.5, "tau": 3.25}],
    "machine": "one H200",
    "command": "pardraft eval",
    "date": "2026-11-21",
}


def save_drafter(folder: Path, kind: str = "dflash") -> Path:
    tiny_drafter(kind, tiny_target("qwen3")).save_pretrained(folder)
    return folder


def measure(folder: Path) -> Path:
    results = folder.parent / "results.json"
    results.write_text(json.dumps(RESULTS))
    done = pardraft("card", folder, "--results", results, "--row", "drafter")
    assert done.code == 0, done.err
    return folder


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def announced(output: str) -> dict[str, int]:
    """Files and sizes as the command lists them."""
    lines = [
        line.removeprefix("file ").removesuffix(" bytes") for line in output.splitlines() if line.startswith("file ")
    ]
    return {name: int(size) for name, size in (line.rsplit(": ", 1) for line in lines)}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The stand-in after everything was published to it, what the commands said, and the folder that it came from."""
    work, hub = tmp_path_factory.mktemp("publishing"), Hub()
    save_drafter(work / "drafter")
    card = work / "drafter" / "README.md"
    card.write_text(card.read_text() + "\nOur own words.\n")
    measure(save_drafter(work / "measured"))
    before = {name: files_in(work / name) for name in ("drafter", "measured")}
    for repository in ("someone/earlier", "someone/earlier-too"):
        # What an adapter, and a drafter in shards, have left.
        hub.repositories[repository] = {}
        for name in (*EARLIER, "README.md", "notes.txt"):
            hub.put_file(repository, "main", name, b"---\nlicense: mit\n---\nearlier")
    environment = {
        **os.environ,
        "HF_HOME": str(work / "home"),
        "HF_HUB_OFFLINE": "0",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "NO_PROXY": "127.0.0.1",
    }
    environment.pop("HF_TOKEN", None)
    script = [sys.executable, str(Path(__file__).parent / "publishing.py"), str(work)]
    by_hand = [
        sys.executable,
        "-c",
        "from huggingface_hub.cli.hf import main; main()",
        *("upload", "someone/by-hand", str(work / "drafter"), "--token", hub.token),
    ]
    with serve(hub):
        environment["HF_ENDPOINT"] = hub.url
        for command in (script, by_hand):
            done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
            assert done.returncode == 0, f"{done.stderr[-3000:]}\n{hub.unknown}"
    return hub, json.loads((work / "found.json").read_text()), before


def test_push_uploads_exactly_what_it_says(published):
    hub, found, before = published
    push = found["push"]
    assert push["code"] == 0, push["error"]
    uploaded = {path: content for (*where, path), content in hub.first.items() if where == ["someone/drafter", "main"]}
    assert uploaded == before["drafter"]
    assert announced(push["output"]) == {name: len(content) for name, content in uploaded.items()}
    assert f"uploaded: {hub.url}/someone/drafter/commit/" in push["output"]
    assert hub.repositories["someone/drafter"]["visibility"] == "private"
    assert hub.commits[0] == {"repo": "someone/drafter", "branch": "main", "summary": "The first", "description": ""}


def test_nothing_is_uploaded_before_the_checks(published):
    _, found, _ = published
    assert found["unmeasured"]["code"] == 1
    assert "--allow-unmeasured" in found["unmeasured"]["error"]
    assert found["wrong_token"]["code"] == 1
    assert "401" in found["wrong_token"]["error"]
    assert "hf auth login" in found["wrong_token"]["error"]


def test_a_measured_drafter_goes_to_a_branch(published):
    hub, found, before = published
    assert found["branch"]["code"] == 0, found["branch"]["error"]
    assert "dev" in hub.branches
    assert hub.names("someone/drafter", "dev") == sorted(before["measured"])
    assert "no measured numbers" not in found["branch"]["output"]


def test_what_was_uploaded_loads(published):
    _, found, _ = published
    assert found["same"]
    assert found["by_auto_model"] == "DFlashDrafter"


def test_uploading_the_folder_by_hand_works_as_well(published):
    hub, _, before = published
    assert {name: hub.files["someone/by-hand", "main", name] for name in hub.names("someone/by-hand")} == before[
        "drafter"
    ]


def test_push_to_hub_keeps_the_card_that_a_repository_has(published):
    hub, _, _ = published
    assert [commit["summary"] for commit in hub.commits if commit["repo"] == "someone/drafter"] == [
        "The first",
        "Upload drafter",
        "Upload DFlashDrafter",
    ]
    assert b"Our own words." in hub.files["someone/drafter", "main", "README.md"]


def test_push_to_hub_makes_a_card_and_names_no_other_repositorys_code(published, tmp_path):
    hub, _, before = published
    assert hub.names("someone/second") == sorted(before["drafter"])
    card = tmp_path / "README.md"
    card.write_bytes(hub.files["someone/second", "main", "README.md"])
    assert 'from_pretrained("someone/second"' in card.read_text()
    data = ModelCard.load(card).data
    assert data.model_name == "second"
    assert data.library_name == "transformers"
    assert {"fast", "dflash"} <= set(data.tags)
    auto_map = json.loads(hub.files["someone/second", "main", "config.json"])["auto_map"]
    assert auto_map["AutoModel"] == "modeling_dflash.DFlashDrafter"


def test_saving_and_pushing_at_once_uploads_the_folders_card(published):
    hub, _, before = published
    assert hub.files["someone/third", "main", "README.md"] == before["measured"]["README.md"]


def test_what_is_saved_and_pushed_at_once_is_the_same(published):
    hub, _, before = published
    averaged = {name: hub.files["someone/averaged", "main", name] for name in hub.names("someone/averaged")}
    assert averaged["model.safetensors"] != before["drafter"]["model.safetensors"]
    assert not [name for name in averaged if name.endswith(".py")]


def test_weights_of_an_earlier_drafter_do_not_stay_in_its_repository(published):
    hub, found, before = published
    assert found["over"]["code"] == 0, found["over"]["error"]
    assert hub.names("someone/earlier") == sorted([*before["measured"], "notes.txt"])
    assert hub.names("someone/earlier-too") == sorted([*before["drafter"], "notes.txt"])


def test_a_variant_leaves_the_weights_of_its_repository_alone(published):
    assert {"model.safetensors", "model.fp16.safetensors"} <= {*published[0].names("someone/averaged")}


def test_the_stand_in_knew_every_request(published):
    hub, _, _ = published
    # Loading looks for the repository's discussions and the like, and does without.
    assert [request for request in hub.unknown if not request.startswith(("GET", "HEAD"))] == []


# Without any Hub


def test_a_dry_run_lists_files_gaps_and_what_is_left_out(tmp_path):
    folder = save_drafter(tmp_path / "drafter", "pard2")
    expected = {name: len(content) for name, content in files_in(folder).items()}
    left_out = ["optimizer.pt", "training_args.bin", ".cache/x", "checkpoint-5/model.safetensors", "runs/log"]
    # They name the folders in which it was trained.
    left_out += ["train_settings.yaml", "trainer_state.json"]
    for name in left_out:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    done = pardraft("push", folder, "someone/drafter", "--dry-run")
    assert done.code == 0
    assert announced(done.out) == expected
    assert "target_projection/model.safetensors" in expected
    assert f"total: {len(expected)} files, {sum(expected.values())} bytes" in done.out
    for name in (name.split("/")[0] for name in left_out):
        assert f"left out {name}: " in done.out
    assert "gap 1: no measured numbers" in done.out
    assert "uploaded" not in done.out


def test_a_folder_without_code_says_so(tmp_path):
    tiny_drafter("dart", tiny_target("qwen3")).save_pretrained(tmp_path / "drafter", with_code=False)
    done = pardraft("push", tmp_path / "drafter", "someone/drafter", "--dry-run")
    assert "no model card" in done.out
    assert "no code" in done.out


@pytest.mark.parametrize(("name", "is_gap"), [("someone/3-grams", False), ("3-grams", True), ("/data/3-grams", True)])
def test_an_ngram_model_that_only_this_machine_has_is_a_gap(name, is_gap, tmp_path):
    drafter = tiny_drafter("dflash", tiny_target("qwen3"))
    drafter.generation_config.ngram_model = name
    drafter.save_pretrained(tmp_path / "drafter")
    done = pardraft("push", tmp_path / "drafter", "someone/drafter", "--dry-run")
    assert (f"the n-gram model {name}, without which it drafts nowhere else" in done.out) == is_gap


def truncate(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])


def pickle_weights(folder):
    (folder / "pytorch_model.bin").write_bytes(b"x")


def lose_code(folder):
    (folder / "masks.py").unlink()


def lose_config(folder):
    (folder / "config.json").unlink()


def spoil_card(folder):
    (folder / "README.md").write_text("---\nlicense: [mit\n---\n# Mine\n")


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (truncate, "can't be read"),
        (pickle_weights, "pickled weights"),
        (lose_code, "incomplete: masks.py is missing"),
        (lose_config, "expected a folder with config.json"),
        (spoil_card, "mend its YAML"),
    ],
)
def test_what_does_not_load_is_not_published(tmp_path, monkeypatch, spoil, match):
    folder = measure(save_drafter(tmp_path / "drafter"))
    spoil(folder)
    monkeypatch.setattr(push_module, "HfApi", None)
    done = pardraft("push", folder, "someone/drafter")
    assert done.code == 1
    assert match in done.error


def test_a_name_that_no_repository_can_have_is_refused_before_anything_is_sent(tmp_path):
    assert "some one/../x" in pardraft("push", measure(save_drafter(tmp_path / "drafter")), "some one/../x").error


class Failing:
    """A Hub that fails in one of its steps."""

    endpoint = "http://nowhere"

    def __init__(self, **errors):
        self.errors = errors

    def create_repo(self, repo_id, **options):
        if "create_repo" in self.errors:
            raise self.errors["create_repo"]
        return SimpleNamespace(repo_id=repo_id)

    def list_repo_files(self, repo_id, **options):
        return [".gitattributes"]

    def create_commit(self, *args, **options):
        raise self.errors["create_commit"]


def upload_failure() -> RuntimeError:
    """As huggingface_hub tells of a file that did not get through."""
    error = RuntimeError("Error while uploading 'model.safetensors'")
    error.__cause__ = HTTPError("500 Server Error")
    return error


@pytest.mark.parametrize(
    ("errors", "match"),
    [
        ({"create_repo": HTTPError("no route to host")}, r"no route to host\. Nothing was committed"),
        (
            {"create_commit": upload_failure()},
            r"uploading 'model\.safetensors' \(500 Server Error\)\. Nothing was committed",
        ),
    ],
)
def test_a_hub_that_fails_is_one_error(tmp_path, monkeypatch, errors, match):
    monkeypatch.setattr(push_module, "HfApi", lambda **options: Failing(**errors))
    done = pardraft("push", measure(save_drafter(tmp_path / "drafter")), "someone/drafter")
    assert re.search(f"can't upload to someone/drafter at http://nowhere: .*{match}", done.error)
