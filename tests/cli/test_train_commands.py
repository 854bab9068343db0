"""`pardraft train` makes a drafter of every kind in one command, and `pardraft cache-features` what it can read."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_pardraft import AutoDrafter, DartDrafter, DFlareDrafter, DFlashDrafter, DraftTrainer
from hf_pardraft.checkpoints.atomic_folders import writing_folder
from hf_pardraft.training import run as training_run
from hf_pardraft.training.run import cache_target_features, train_drafter
from in_process import pardraft
from processes import in_a_process
from tiny_tokenizers import SAMPLE_TEXT

QUICK = (
    *("--max-steps", "2", "--use-cpu", "--bf16", "false", "--max-length", "48", "--per-device-train-batch-size", "2"),
    *("--tau-prompts", "1", "--tau-new-tokens", "4", "--eval-size", "2", "--report-to", "none", "--disable-tqdm"),
)
# What makes a recipe's drafter as small as its target.
SMALL = {
    "pard": lambda family: ["--base", str(family / "target"), "--draft-tokens", "3"],
    "left_to_right": lambda family: ["--num-layers", "1", "--block-size", "4", "--target-layer-ids", "0", "2"],
    "dflare": lambda family: ["--num-layers", "1", "--block-size", "4", "--target-layer-ids", "1", "2"],
    "dart": lambda family: ["--draft-length", "3", "--tapped-hidden-states", "1", "2", "3"],
}


@pytest.fixture
def text(tmp_path):
    """A file of texts, from the same few lines of code."""
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(json.dumps({"text": SAMPLE_TEXT[start:]}) for start in range(0, 60, 3)))
    return path


def words(recipe, family, text, output, *more):
    return [
        *("--recipe", recipe, "--target", str(family / "target"), "--dataset", str(text), "--output", str(output)),
        *(*SMALL[recipe](family), *QUICK, *more),
    ]


@pytest.mark.parametrize("recipe", SMALL)
def test_one_command_makes_a_drafter_and_measures_it(recipe, tiny_family, text, tmp_path):
    facts = train_drafter(words(recipe, tiny_family, text, tmp_path / "out"))
    measured = json.loads((tmp_path / "out" / "eval_results.json").read_text())
    assert measured["eval_tau"] == facts["eval_tau"] >= 1
    assert measured["eval_loss"] > 0
    target = AutoModelForCausalLM.from_pretrained(tiny_family / "target")
    drafter = AutoDrafter.from_pretrained(tmp_path / "out")
    ids = AutoTokenizer.from_pretrained(tiny_family / "target")("def add", return_tensors="pt")
    options = {"do_sample": False, "max_new_tokens": 8}
    assert torch.equal(target.generate(**ids, **options), target.generate(**ids, assistant_model=drafter, **options))
    # What the run leaves repeats it.
    torch.rand(3)
    again = train_drafter(
        ["--recipe", str(tmp_path / "out" / "train_settings.yaml"), "--output", str(tmp_path / "again")]
    )
    assert again["eval_loss"] == pytest.approx(facts["eval_loss"], abs=1e-6)


@pytest.mark.parametrize(
    ("more", "steps"),
    [
        ([], [2]),
        (["--eval-strategy", "steps", "--eval-steps", "1"], [1, 2]),
        (["--eval-strategy", "epoch"], [2]),
        (
            ["--eval-strategy", "steps", "--eval-steps", "1", "--save-steps", "1", "--load-best-model-at-end"],
            [1, 2],
        ),
    ],
    ids=["no", "steps", "epoch", "best"],
)
def test_a_run_is_reported_as_one_and_each_step_is_evaluated_once(
    tiny_family, text, tmp_path, monkeypatch, more, steps
):
    evaluated, evaluate = [], DraftTrainer.evaluate

    def noted(trainer, *args, **kwargs):
        assert trainer.is_in_train
        metrics = evaluate(trainer, *args, **kwargs)
        evaluated.append((trainer.state.global_step, metrics))
        return metrics

    monkeypatch.setattr(DraftTrainer, "evaluate", noted)
    facts = train_drafter(words("dflare", tiny_family, text, tmp_path / "out", *more))
    assert [step for step, _ in evaluated] == steps
    # What is said at the end is of the drafter that is saved.
    metrics = [metrics for _, metrics in evaluated if metrics["eval_loss"] == facts["eval_loss"]]
    assert metrics
    assert facts.items() >= metrics[0].items()
    if "--load-best-model-at-end" in more:
        assert facts["eval_loss"] == min(metrics["eval_loss"] for _, metrics in evaluated)


def test_an_evaluation_that_fails_at_the_end_loses_no_drafter(tiny_family, text, tmp_path, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("no memory")

    monkeypatch.setattr(DraftTrainer, "evaluate", fails)
    with pytest.raises(RuntimeError, match="no memory"):
        train_drafter(words("dflare", tiny_family, text, tmp_path / "out"))
    AutoDrafter.from_pretrained(tmp_path / "out")


def test_one_command_trains_masks_that_have_an_id_each(tiny_family, text, tmp_path):
    masks = ["--mask-token-id", "295", "297"]
    train_drafter(words("pard", tiny_family, text, tmp_path / "out", *masks))
    config = AutoDrafter.from_pretrained(tmp_path / "out").config
    assert (config.pard_token, config.pard_tokens) == (295, [295, 297])


@pytest.mark.parametrize("keep", [False, True])
def test_one_command_trains_an_adapter(keep, tiny_family, text, tmp_path):
    pytest.importorskip("peft")
    adapter = ["--lora-rank", "2", "--lora-dropout", "0.1", "--lora-target-modules", "q_proj", "down_proj"]
    more = ["--keep-adapter"] if keep else []
    train_drafter(words("pard", tiny_family, text, tmp_path / "out", *adapter, "--learning-rate", "1e-2", *more))
    assert (tmp_path / "out" / "model.safetensors").exists() != keep
    if keep:
        saved = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
        assert (saved["r"], saved["lora_alpha"], saved["lora_dropout"]) == (2, 4, 0.1)
        assert set(saved["target_modules"]) == {"q_proj", "down_proj"}
    base = AutoModelForCausalLM.from_pretrained(tiny_family / "target").state_dict()
    drafter = AutoDrafter.from_pretrained(tmp_path / "out")
    mask = drafter.config.pard_token
    changed = {name for name, weight in drafter.state_dict().items() if not torch.equal(weight, base[name])}
    layers = {name for name in base if name.endswith(("q_proj.weight", "down_proj.weight"))}
    assert layers <= changed <= {*layers, "model.embed_tokens.weight", "lm_head.weight"}
    before, after = base["model.embed_tokens.weight"], drafter.get_input_embeddings().weight
    assert torch.equal(before[:mask], after[:mask])


def test_a_drafter_is_trained_further_from_its_last_checkpoint_or_from_where_it_is(tiny_family, text, tmp_path):
    first = words("dflare", tiny_family, text, tmp_path / "out", "--save-steps", "1")
    train_drafter(first)
    further = [word if word != "2" or first[index - 1] != "--max-steps" else "4" for index, word in enumerate(first)]
    train_drafter([*further, "--resume-from-checkpoint", "last"])
    assert json.loads((tmp_path / "out" / "trainer_state.json").read_text())["global_step"] == 4
    onward = [
        "--drafter",
        str(tmp_path / "out"),
        "--target",
        str(tiny_family / "target"),
        "--dataset",
        str(text),
        *QUICK,
    ]
    train_drafter([*onward, "--output", str(tmp_path / "onward")])
    assert AutoDrafter.from_pretrained(tmp_path / "onward").config.block_size == 4


def test_examples_of_a_test_set_are_not_learned(tiny_family, text, tmp_path, monkeypatch):
    told, rest = " ".join(f"x{number} = {number}" for number in range(40)), text.read_text().splitlines()
    text.write_text("\n".join([*rest, *(json.dumps({"text": f"# {number}\n{told}"}) for number in range(3))]))
    (tmp_path / "test.jsonl").write_text(json.dumps({"prompt": told}))
    seen = []
    monkeypatch.setattr(
        training_run, "split_off", lambda data, *args, **kwargs: seen.append(len(data)) or (data, data.select([0]))
    )
    train_drafter(
        words("dflare", tiny_family, text, tmp_path / "out", "--exclude-overlap", str(tmp_path / "test.jsonl"))
    )
    assert seen == [len(rest)]


@pytest.mark.parametrize("recipe", ["dflare", "dart"])
def test_states_are_stored_for_the_same_settings(recipe, tiny_family, text, tmp_path, capsys):
    live = train_drafter(words(recipe, tiny_family, text, tmp_path / "live"))
    settings = words(recipe, tiny_family, text, "unused")
    del settings[settings.index("--output") : settings.index("--output") + 2]
    facts = cache_target_features(settings, str(tmp_path / "states"), "float32", 4)
    assert "MB as float32" in capsys.readouterr().err
    assert facts["texts"] > 0
    read = train_drafter(
        words(recipe, tiny_family, text, tmp_path / "read", "--features-folder", str(tmp_path / "states"))
    )
    assert read["eval_loss"] == pytest.approx(live["eval_loss"], abs=1e-5)


def test_a_drafter_that_reads_no_states_has_none_to_store(tiny_family, text, tmp_path):
    settings = words("pard", tiny_family, text, "unused")
    del settings[settings.index("--output") : settings.index("--output") + 2]
    with pytest.raises(ValueError, match="reads token ids only"):
        cache_target_features(settings, str(tmp_path / "states"))


def test_what_can_not_be_is_said_before_anything_is_loaded(tmp_path):
    nowhere = ["--recipe", "dflare", "--target", "nowhere", "--dataset", "nowhere", "--output", str(tmp_path), *QUICK]
    with pytest.raises(ValueError, match="expected a checkpoint to resume from"):
        train_drafter([*nowhere, "--resume-from-checkpoint", "last"])
    if importlib.util.find_spec("tensorboard") is None and importlib.util.find_spec("tensorboardX") is None:
        with pytest.raises(ImportError, match=r"can't report to tensorboard: .* requires tensorboard"):
            train_drafter([*nowhere, "--report-to", "tensorboard"])


def test_a_column_that_can_not_be_learned_from_is_named(tiny_family, tmp_path):
    path = tmp_path / "other.jsonl"
    path.write_text('{"code": "x = 1"}\n' * 20)
    with pytest.raises(ValueError, match=r"expected examples with .* got columns code"):
        train_drafter(words("dflare", tiny_family, path, tmp_path / "out"))
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
        train_drafter(words("dflare", tiny_family, tmp_path / "nowhere.jsonl", tmp_path / "out"))


def test_the_command_line_trains_stores_and_explains(tiny_family, text, tmp_path):
    settings = words("dflare", tiny_family, text, tmp_path / "states")
    stored = pardraft("cache-features", *settings, "--dtype", "float16")
    assert stored.code == 0, stored.err
    assert "megabytes: " in stored.out
    settings = words("dflare", tiny_family, text, tmp_path / "out", "--features-folder", str(tmp_path / "states"))
    trained = pardraft("train", *settings)
    assert trained.code == 0, trained.err
    assert "eval_tau: " in trained.out
    for asked in (["--help"], []):
        assert "Batches, objective and evaluation:" in pardraft("train", *asked).out
    assert "--adam-beta2" in pardraft("train", "--help-all").out
    assert "did you mean 'dflare'" in pardraft("train", "--recipe", "dflair").error


def test_accelerate_launches_the_command_on_two_processes(tiny_family, text, tmp_path):
    launch = [
        "launch",
        "--cpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
    ]
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", *launch, "--main_process_port", "0"]
    settings = words("dflare", tiny_family, text, tmp_path / "out")
    done = subprocess.run(
        [*command, "-m", "hf_pardraft", "train", *settings], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    AutoDrafter.from_pretrained(tmp_path / "out")
    # One of them speaks.
    assert done.stdout.count("eval_tau: ") == 1


def test_a_run_takes_no_other_runs_place_unless_told_to(tiny_family, text, tmp_path, monkeypatch):
    command = words("dflare", tiny_family, text, tmp_path / "out", "--save-steps", "1")
    train_drafter(command)
    before = AutoDrafter.from_pretrained(tmp_path / "out").state_dict()
    with monkeypatch.context() as patch:
        patch.setattr(training_run, "load_run", lambda run: pytest.fail("something was loaded"))
        with pytest.raises(
            ValueError, match=r"holds an earlier run \(.*\): go on with it \(--resume-from-checkpoint last\)"
        ):
            train_drafter([*command, "--seed", "5"])
        # A drafter without checkpoints is in the way, too, and so is who writes there now.
        for checkpoint in (tmp_path / "out").glob("checkpoint-*"):
            checkpoint.rename(tmp_path / checkpoint.name)
        with pytest.raises(ValueError, match=r"holds an earlier run \(config.json, train_settings.yaml\)"):
            train_drafter([*command, "--seed", "5"])
        for checkpoint in tmp_path.glob("checkpoint-*"):
            checkpoint.rename(tmp_path / "out" / checkpoint.name)

        def work():
            with pytest.raises(OSError, match=rf"out is being written by process {os.getppid()}"):
                train_drafter(command)

        with writing_folder(tmp_path / "out"):
            assert in_a_process(work) == 0
    with pytest.raises(ValueError, match=r"checkpoint-2 was trained with seed 42 \(now 5\)"):
        train_drafter([*command, "--seed", "5", "--resume-from-checkpoint", "last"])
    after = AutoDrafter.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    train_drafter([*command, "--seed", "5", "--overwrite-output"])
    after = AutoDrafter.from_pretrained(tmp_path / "out").state_dict()
    assert not all(torch.equal(after[name], weight) for name, weight in before.items())
    # A recipe that repeats the run has nothing of what only this call was told.
    assert "overwrite" not in (tmp_path / "out" / "train_settings.yaml").read_text()


def test_a_finished_run_that_is_resumed_is_evaluated_and_saved_again(tiny_family, text, tmp_path):
    command = words("dflare", tiny_family, text, tmp_path / "out", "--save-steps", "1")
    first = train_drafter(command)
    before = AutoDrafter.from_pretrained(tmp_path / "out").state_dict()
    (tmp_path / "out" / "eval_results.json").unlink()
    again = train_drafter([*command, "--resume-from-checkpoint", "last"])
    assert again["eval_loss"] == first["eval_loss"]
    assert (tmp_path / "out" / "eval_results.json").exists()
    after = AutoDrafter.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]


ABSURD = [
    ("--num-layers", "1000000000", "num_layers of a fresh drafter must be a whole number from 1 to 1024"),
    ("--block-size", "1000000000", "block_size of a fresh drafter must be a whole number from 1 to 4096"),
    ("--draft-tokens", "1000000000", "draft_tokens must be from 1 to 4096"),
]


@pytest.mark.parametrize(("name", "value", "told"), ABSURD)
def test_an_absurd_size_is_refused_before_anything_is_loaded(name, value, told, tmp_path):
    with pytest.raises(ValueError, match=told):
        train_drafter(
            ["--recipe", "dflare", "--target", "t", "--dataset", "d", "--output", str(tmp_path / "out"), name, value]
        )
    assert not (tmp_path / "out").exists()


def test_absurd_sizes_are_refused_where_a_drafter_is_made(tiny_family):
    target = AutoModelForCausalLM.from_pretrained(tiny_family / "target")
    with pytest.raises(ValueError, match="num_hidden_layers in a new DFlareConfig"):
        DFlareDrafter.for_target(target, num_layers=10**9)
    with pytest.raises(ValueError, match="num_hidden_layers in a new DFlashConfig"):
        DFlashDrafter.for_target(target, num_layers=1, num_hidden_layers=10**9)
    with pytest.raises(ValueError, match="draft_length in a new DartConfig"):
        DartDrafter.for_target(target, draft_length=10**9)


def test_bfloat16_on_a_machine_without_an_accelerator_needs_no_other_setting(tiny_family, text, tmp_path):
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    settings = words("dflare", tiny_family, text, tmp_path / "out")
    settings.remove("--use-cpu")
    settings[settings.index("--bf16") + 1] = "true"
    assert train_drafter(settings)["eval_tau"] >= 1
