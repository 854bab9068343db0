"""A folder holds the old checkpoint or the new one, whenever its writer is killed; what else is in it stays."""

import json
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_pardraft import AutoDrafter, DFlashDrafter
from hf_pardraft.checkpoints import atomic_folders
from hf_pardraft.checkpoints.atomic_folders import PLAN, replaced_files
from hf_pardraft.checkpoints.convert import convert
from hf_pardraft.checkpoints.locks import LOCK
from hf_pardraft.cli.card import load_folder
from processes import kill_before_change, num_changes
from published_checkpoints import LAYOUTS
from tiny_models import tiny_drafter, tiny_target


def names_in(folder) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_whoever_reads_a_folder_finishes_what_a_kill_has_cut_off(tmp_path):
    out, drafter = tmp_path / "out", tiny_drafter("dflash", tiny_target("qwen3"))
    loads = (
        DFlashDrafter.from_pretrained,
        lambda folder: convert(folder, tmp_path / "copy"),
        load_folder,
    )
    for load in loads:
        drafter.save_pretrained(out)
        places = range(num_changes(lambda: drafter.save_pretrained(out), tmp_path), 0, -1)
        # Of the last changes some come after the renaming, and before config.json is back.
        killed = (kill_before_change(lambda: drafter.save_pretrained(out), tmp_path, place) for place in places)
        assert any(is_killed and not (out / "config.json").exists() for is_killed in killed)
        load(out)
        assert (out / "config.json").exists()


def test_a_plan_that_leads_out_of_its_folder_is_refused(tmp_path):
    tiny_drafter("dflash", tiny_target("qwen3")).save_pretrained(tmp_path / "out")
    (tmp_path / "precious").write_text("keep")
    saved = tmp_path / "out" / ".saved-x"
    (saved / "out").mkdir(parents=True)
    (tmp_path / "out" / "link").symlink_to(tmp_path)
    for name in ("../precious", str(tmp_path / "precious"), "a/../../precious", "link/precious", ".."):
        (saved / PLAN).write_text(json.dumps({"content": "out", "files": [], "stale": [name]}))
        with pytest.raises(ValueError, match="names files outside of its folder"):
            AutoDrafter.from_pretrained(tmp_path / "out")
    for plan in ("[]", "{}", "nothing", "[" * 100_000, '{"content": 3, "files": [], "stale": []}'):
        (saved / PLAN).write_text(plan)
        with pytest.raises(ValueError, match="not what a save writes there"):
            AutoDrafter.from_pretrained(tmp_path / "out")
    assert (tmp_path / "precious").read_text() == "keep"


def test_what_killed_runs_left_is_cleared_away_by_the_next_save(tmp_path):
    for name in (".saving-a", ".ngram-b", ".card-c", ".tuning.d"):
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "inner" / "file").write_text("")
    (tmp_path / LOCK).write_text("")
    tiny_drafter("dflash", tiny_target("qwen3")).save_pretrained(tmp_path)
    assert not any(path.name.startswith((".", LOCK)) for path in tmp_path.iterdir())


def test_what_a_live_writer_is_at_work_on_is_left_alone(tmp_path):
    drafter, seen = tiny_drafter("dflash", tiny_target("qwen3")), []
    drafter.save_pretrained(tmp_path)
    with replaced_files(tmp_path) as workspace:
        other = threading.Thread(target=lambda: seen.append(drafter.save_pretrained(tmp_path)))
        other.start()
        other.join(0.3)
        # It waits.
        assert other.is_alive()
        assert workspace.is_dir()
        save_file({"norm.weight": torch.zeros(3)}, workspace / "model.safetensors")
    other.join()
    assert len(seen) == 1
    assert len(load_file(tmp_path / "model.safetensors")) > 1


def test_a_drafter_saved_over_an_adapter_is_no_adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_text("")
    (tmp_path / "pytorch_model.bin").write_text("")
    tiny_drafter("dflash", tiny_target("qwen3")).save_pretrained(tmp_path)
    AutoDrafter.from_pretrained(tmp_path)
    assert not any((tmp_path / name).exists() for name in ("adapter_model.safetensors", "pytorch_model.bin"))


def test_a_card_that_is_there_stays_and_a_new_one_bears_the_folders_name(tmp_path):
    out = tmp_path / "Some-Drafter"
    convert(LAYOUTS["zlab"](tmp_path / "source"), out)
    assert "Some-Drafter" in (out / "README.md").read_text()
    (out / "README.md").write_text("mine")
    convert(LAYOUTS["zlab"](tmp_path / "other"), out, overwrite=True)
    assert (out / "README.md").read_text() == "mine"


def test_convert_replaces_a_checkpoint_and_nothing_else(tmp_path):
    out = tmp_path / "out"
    convert(LAYOUTS["zlab"](tmp_path / "source"), out)
    assert list(out.glob("*.py"))
    kept = {"notes.md": "a", "data/rows.jsonl": "b", "checkpoint-8/model.safetensors": "c", "analyse.py": "d"}
    for name, content in kept.items():
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(content)
    (out / "merges.txt").write_text("of a tokenizer that the new one does not replace")
    convert(LAYOUTS["zlab"](tmp_path / "again"), out, "zlab", overwrite=True)
    assert {name: (out / name).read_text() for name in kept} == kept
    # Of the native layout's code, which the new config doesn't refer to, nothing stays.
    assert {path.name for path in out.rglob("*.py")} == {"analyse.py"}
    assert not (out / "custom_generate").exists()
    assert json.loads((out / "config.json").read_text())["model_type"] == "qwen3"
    assert (out / "merges.txt").exists()


def linked(place, outside):
    place.symlink_to(outside)


def linked_with_weights(place, outside):
    (outside / "model.safetensors").write_text("somebody's")
    place.symlink_to(outside)


# What is in the way, by a name: whose save meets it there, and how it came there.
OBSTACLES = {
    "link": ("dflash", "custom_generate", linked),
    "link that leads nowhere": ("dflash", "custom_generate", lambda place, _: place.symlink_to("nowhere")),
    "file": ("dflash", "custom_generate", lambda place, _: place.write_text("mine")),
    "folder for weights": ("dart", "model.safetensors", lambda place, _: place.mkdir()),
    "folder for a config": ("pard", "config.json", lambda place, _: place.mkdir()),
    "projection": ("pard2", "target_projection", linked),
    "draft vocabulary": ("pard", "draft_vocabulary", linked),
    # Weights of an earlier save, which would have to go.
    "stale": ("dflash", "target_projection", linked_with_weights),
}


@pytest.mark.parametrize(("kind", "name", "put"), OBSTACLES.values(), ids=OBSTACLES)
def test_what_is_in_the_way_is_found_before_anything_is_moved(kind, name, put, tmp_path):
    out, outside = tmp_path / "out", tmp_path / "outside"
    outside.mkdir()
    drafter = tiny_drafter(kind, tiny_target("qwen3"))
    if kind == "pard":
        drafter.set_draft_vocabulary(range(5, 40))
    drafter.save_pretrained(out)
    place = out / name
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
    put(place, outside)
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    for _ in range(2):
        with pytest.raises(FileExistsError, match=rf"can't write .*{name}.*Take that away.*nothing was changed there"):
            drafter.save_pretrained(out)
        assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before
    if name == "custom_generate":
        # It is no part of what is loaded, and what doesn't write it gets through.
        AutoDrafter.from_pretrained(out)
        convert(LAYOUTS["zlab"](tmp_path / "source"), out, "zlab", overwrite=True)
        drafter.save_pretrained(out, with_code=False)
        AutoDrafter.from_pretrained(out)


def test_a_folder_with_the_name_of_weights_of_an_earlier_save_is_left_alone(tmp_path):
    (tmp_path / "pytorch_model.bin").mkdir()
    tiny_drafter("dflash", tiny_target("qwen3")).save_pretrained(tmp_path)
    AutoDrafter.from_pretrained(tmp_path)
    assert (tmp_path / "pytorch_model.bin").is_dir()


def test_a_folder_below_that_can_not_be_written_is_found_before_anything_is_moved(tmp_path, monkeypatch):
    drafter = tiny_drafter("dflash", tiny_target("qwen3"))
    drafter.save_pretrained(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "custom_generate")
    with pytest.raises(FileExistsError, match=r"no permission to write .*custom_generate.*nothing was changed there"):
        drafter.save_pretrained(tmp_path)
    AutoDrafter.from_pretrained(tmp_path)


def test_a_save_that_can_not_be_finished_says_what_keeps_it_and_goes_on_when_that_is_gone(tmp_path):
    drafter = tiny_drafter("dflash", tiny_target("qwen3"))

    def interrupted(saved, folder):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atomic_folders, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            drafter.save_pretrained(tmp_path)
    (tmp_path / "custom_generate").write_text("in the way")
    for act in (AutoDrafter.from_pretrained, drafter.save_pretrained):
        with pytest.raises(OSError, match=r"not all could be moved to their places .*custom_generate.*mend that"):
            act(tmp_path)
    (tmp_path / "custom_generate").unlink()
    AutoDrafter.from_pretrained(tmp_path)
    assert (tmp_path / "custom_generate" / "generate.py").is_file()
