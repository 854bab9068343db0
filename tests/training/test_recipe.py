"""Recipes say what the papers say, everything in them can be overridden, and what is no setting is an error with advice."""

import importlib.util
import math
from itertools import pairwise

import pytest
import torch
import yaml

from hf_pardraft.training.adapters import lora_config
from hf_pardraft.training.layouts import SharedPrefixes
from hf_pardraft.training.losses.objectives import (
    OBJECTIVES,
    BlockScores,
    ObjectiveSettings,
    objective_sums,
    parse_objective,
)
from hf_pardraft.training.losses.sums import mean_of
from hf_pardraft.training.recipe import RECIPES, read_recipe, recipe_names, training_run
from hf_pardraft.training.recipe_help import help_text
from hf_pardraft.training.run import new_drafter, tell_of_another_kind
from tiny_models import random_prompt, tiny_drafter, tiny_target

NEEDED = ["--target", "t", "--dataset", "d", "--output", "o"]
# From arXiv 2504.18583 (table 4), arXiv 2606.11552 (section 5), arXiv 2606.02091 (A.1) and arXiv 2601.19278 (B.2).
PUBLISHED = {
    "pard": {
        "draft_tokens": 8,
        "cod_retention": 0.7,
        "cod_min_retention": 0.2,
        "objective": "subtask_cross_entropy",
        "learning_rate": 8e-5,
        "num_train_epochs": 4,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
    },
    "left_to_right": {
        "num_anchors": 512,
        "loss_reduction": "weight_sum",
        "loss_gamma": 10,
        "learning_rate": 1e-3,
        "num_train_epochs": 3,
        "warmup_steps": 0.015,
        "lr_scheduler_type": "cosine",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4,
        "bf16": True,
    },
    "dflare": {
        "num_anchors": 512,
        "loss_gamma": 4.5,
        "loss_gamma_epoch_step": 1,
        "learning_rate": 6e-4,
        "max_grad_norm": 1,
        "num_train_epochs": 6,
        "warmup_steps": 0.04,
        "lr_scheduler_type": "cosine",
    },
    "dart": {
        "draft_tokens": 8,
        "num_anchors": "all",
        "kl_gamma": 0.6,
        "learning_rate": 2e-5,
        "max_grad_norm": 0.5,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "num_train_epochs": 3,
        "lr_scheduler_type": "cosine",
    },
}
DRAFTERS = {
    "pard": {"kind": "pard"},
    "left_to_right": {"kind": "dflash", "num_layers": 4, "block_size": 16},
    "dflare": {"kind": "dflare", "num_layers": 7, "block_size": 16},
    # The published configs count masks: "d = 8", and "mask block length of 7 in the actual DART training" (figure 4).
    "dart": {"kind": "dart", "draft_length": 7},
}
LENGTHS = {"pard": 512, "left_to_right": 4096, "dflare": 3072, "dart": 6400}


def run_of(recipe, *words):
    base = ["--base", "b"] if recipe == "pard" else []
    return training_run(["--recipe", recipe, *NEEDED, *base, *words])


def test_there_is_one_recipe_per_paper():
    assert recipe_names() == sorted(PUBLISHED)


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_a_recipe_has_the_published_values(recipe):
    run = run_of(recipe, "--use-cpu")
    arguments = run.training_arguments()
    for name, value in PUBLISHED[recipe].items():
        assert getattr(arguments, name) == value, name
    for name, value in DRAFTERS[recipe].items():
        assert getattr(run.drafter, name) == value, name
    assert run.training_arguments().max_length == LENGTHS[recipe]
    assert arguments.optim.value == "adamw_torch"


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_every_value_of_a_recipe_says_where_it_is_from(recipe):
    lines = (RECIPES / f"{recipe}.yaml").read_text().split("\n")
    assert all("#" in line for line in lines if line.strip() and not line.startswith("kind"))


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_every_value_of_a_recipe_can_be_overridden(recipe):
    for name, value in read_recipe(recipe).items():
        if isinstance(value, bool) or name in ("kind", "optim", "lr_scheduler_type", "objective", "loss_reduction"):
            continue
        other = 3 if value == "all" else value / 2 if isinstance(value, float) else value + 1
        for words in ([f"--{name}", str(other)], [f"--{name.replace('_', '-')}={other}"]):
            assert run_of(recipe, *words).given[name] == pytest.approx(other), name


def dart_of(*words):
    """The drafter that a run with DART's recipe makes for a tiny target, and the run."""
    run = run_of("dart", *words)
    target = tiny_target("llama", num_hidden_layers=8)
    return new_drafter(run.drafter, target, None), run


def test_darts_recipe_drafts_the_papers_8_tokens_after_every_prefix():
    """Section 3.2: d - 1 masks after z_1 to z_n, whose last query drafts too; section 3.3: for each prefix position n."""
    drafter, run = dart_of("--use-cpu")
    assert (drafter.max_draft_depth, drafter.config.draft_length) == (8, 7)
    # Longer than any limit that one would set.
    ids = random_prompt(700)[0].tolist()
    arguments = run.training_arguments()
    batch = SharedPrefixes.for_drafter(drafter, arguments)([{"input_ids": ids, "labels": ids}])
    supervised = SharedPrefixes.supervised(batch, drafter)
    anchors = supervised.places - supervised.draft_positions + 1
    columns = (anchors, supervised.draft_positions, supervised.labels)
    found = sorted(zip(*(column.tolist() for column in columns), strict=True))
    expected = []
    # z_n holds the embedding of token n + 1, so that a prefix has two tokens at least, counted from 0 and 1.
    for last in range(1, len(ids) - 1):
        expected += [(last, t, ids[last + t]) for t in range(1, 9) if last + t < len(ids)]
    assert found == expected
    fewer = run_of("dart", "--use-cpu", "--num-anchors", "20").training_arguments()
    batch = SharedPrefixes.for_drafter(drafter, fewer)([{"input_ids": ids, "labels": ids}])
    assert int((batch["draft_positions"] == 2).sum()) == 20


def test_left_to_rights_divisor_weakens_the_cross_entropy_alone_as_its_recipe_says():
    """Eq. 13 adds up the K - 1 weighted positions of eq. 9; the sum of their weights is 8.16 at the recipe's K and gamma."""
    run = run_of("left_to_right", "--use-cpu")
    arguments, num_drafted = run.training_arguments(), run.drafter.block_size - 1
    factor = sum(math.exp(-k / arguments.loss_gamma) for k in range(num_drafted))
    assert factor == pytest.approx(8.16, abs=0.005)
    assert "8.16" in (RECIPES / "left_to_right.yaml").read_text()
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(6, num_drafted, generator=generator, dtype=torch.float64).log_softmax(dim=-1)
    everywhere = torch.ones(6, num_drafted, dtype=torch.bool)
    scores = BlockScores(everywhere, everywhere, everywhere, log_probs > -2.5, log_probs)
    coefficients = parse_objective(arguments.objective)
    values = {}
    for reduction in (arguments.loss_reduction, "paper"):
        settings = ObjectiveSettings(gamma=arguments.loss_gamma, reduction=reduction)
        sums = objective_sums(coefficients, scores, settings)
        values[reduction] = {name: mean_of(*part, OBJECTIVES[name].epsilon).item() for name, part in sums.items()}
    ours, papers = values.values()
    assert papers["cross_entropy"] == pytest.approx(factor * ours["cross_entropy"])
    assert papers["cross_entropy"] == pytest.approx(
        -sum(math.exp(-k / arguments.loss_gamma) * log_probs[:, k].mean().item() for k in range(num_drafted))
    )
    for name in ("first_error", "chain_reward"):
        assert papers[name] == pytest.approx(ours[name]) != 0


@pytest.mark.parametrize(
    ("words", "depth", "masks"),
    [
        (["--draft-tokens", "5"], 5, 4),
        (["--draft-length", "5"], 6, 5),
        (["--draft-length", "4", "--draft-tokens", "5"], 5, 4),
        (["--drafter-config", '{"shifted": false}'], 8, 8),
        (["--drafter-config", '{"draft_length": 7, "intermediate_size": 16}'], 8, 7),
        (["--draft-tokens", "1"], 1, 0),
    ],
)
def test_a_dart_drafters_tokens_and_masks_are_told_apart(words, depth, masks):
    drafter, _ = dart_of(*words)
    assert (drafter.max_draft_depth, drafter.config.draft_length) == (depth, masks)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--draft-length", "8", "--draft-tokens", "8"],
            "8 drafted tokens .draft_tokens. take 7, got draft_length=8: leave",
        ),
        (["--drafter-config", '{"draft_length": 8}'], "take 7, got draft_length=8"),
        (["--draft-tokens", "0"], "drafts 1 token or more, got draft_tokens=0"),
        (["--drafter-config", "[]"], "must be a JSON object"),
        (["--num-anchors", "al"], "num.anchors: invalid int value: 'al'"),
    ],
)
def test_tokens_and_masks_that_contradict_each_other_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        dart_of(*words)


def test_a_field_given_twice_is_named():
    run = run_of("dflare", "--num-layers", "2", "--drafter-config", '{"num_layers": 3}')
    with pytest.raises(ValueError, match="num_layers: given as a setting, and otherwise in drafter_config"):
        new_drafter(run.drafter, tiny_target("llama"), None)


def test_values_have_the_types_of_their_settings():
    given = run_of(
        "dflare",
        *("--learning-rate", "1e-4", "--bf16", "--no-dataloader-pin-memory", "--target-layer-ids", "1", "2", "3"),
        *("--loss-gamma-epoch-step", "none", "--report-to", "none", "--max-length", "None", "--seed=7"),
    ).given
    assert (given["learning_rate"], given["bf16"], given["dataloader_pin_memory"]) == (1e-4, True, False)
    assert (given["target_layer_ids"], given["loss_gamma_epoch_step"], given["max_length"]) == ([1, 2, 3], None, None)
    # Where a text is meant, "none" is one.
    assert (given["report_to"], given["seed"]) == ("none", 7)
    assert run_of("dart", "--report-to", "wandb", "trackio", "--seed", "7").given["report_to"] == ["wandb", "trackio"]


def test_a_recipe_of_ones_own_is_read_and_so_is_the_one_that_a_run_leaves(tmp_path):
    own = tmp_path / "own.yaml"
    # Numbers as people write them, some of which YAML takes for text.
    own.write_text(
        "kind: dart\nlearning-rate: 5e-4\nloss_gamma: null\ntapped_hidden_states: [1, 2]\ndrafter_config: '{}'\n"
    )
    run = run_of(str(own), "--max-steps", "3")
    assert (run.drafter.kind, run.drafter.tapped_hidden_states) == ("dart", [1, 2])
    assert run.arguments == {"learning_rate": 5e-4, "loss_gamma": None, "max_steps": 3}
    own.write_text("kind: dflash\nobjective:\n  cross_entropy: 1\n  first_error: 0.3\n")
    assert run_of(str(own), "--use-cpu").training_arguments().objective == {"cross_entropy": 1, "first_error": 0.3}
    own.write_text("kind: dart\nreport_to: []\n")
    assert run_of(str(own), "--use-cpu").training_arguments().report_to == []
    left = tmp_path / "left.yaml"
    left.write_text(yaml.safe_dump({name: value for name, value in run.given.items() if name != "recipe"}))
    again = training_run(["--recipe", str(left)])
    assert (again.options.target, again.drafter, again.arguments) == (run.options.target, run.drafter, run.arguments)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--recipe", "dflair"], r"did you mean 'dflare'"),
        (["--lerning-rate", "3"], r"unknown setting in the command line: lerning_rate \(did you mean 'learning_rate'"),
        (["--output-dir", "o"], r"did you mean 'output'"),
        (["--learning-rate", "fast"], r"learning.rate: invalid float value: 'fast'"),
        (["--learn", "3"], "unknown setting"),
        (["what"], r"as --name value.*what"),
        (["--kind", "eagle", *NEEDED], r"expected a kind of drafter \(pard, pard2"),
        (["--kind", "dflash"], "expected --target, --dataset, --output"),
        (["--kind", "dflash", *NEEDED, "--draft-length", "3"], "a dflash drafter takes .*got draft_length"),
        (["--kind", "pard", *NEEDED], "pass it as --base"),
        (["--drafter", "x", "--block-size", "4", *NEEDED], "block_size: settings of a fresh drafter"),
        (["--kind", "dart", *NEEDED, "--eval-size", "-1"], "eval_size must be 0 or more"),
    ],
)
def test_what_is_no_setting_is_an_error_with_advice(words, message):
    with pytest.raises(ValueError, match=message):
        training_run(words)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("kind: dart\nkl_gama: 0.5\n", r"unknown setting in recipe .*kl_gama \(did you mean 'kl_gamma'"),
        ("- kind\n", "must hold settings"),
        ("kind: [", "is no YAML"),
        ("kind: dart\nnum_train_epochs: many\n", "invalid float value"),
        ("recipe: dflare\nkind: dflash\n", "names another recipe, dflare"),
    ],
)
def test_a_recipe_that_is_wrong_says_where(content, message, tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        run_of(str(path))


def test_settings_out_of_range_are_refused_as_the_trainers_are():
    with pytest.raises(ValueError, match="kl_gamma must be in"):
        run_of("dart", "--kl-gamma", "2", "--use-cpu").training_arguments()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lora-alpha", "4"], "--lora-alpha: settings of an adapter, and none is trained: set --lora-rank"),
        (["--lora-target-modules", "q_proj"], "--lora-target-modules: settings of an adapter"),
        (["--keep-adapter"], "--keep-adapter: settings of an adapter"),
        (["--lora-rank", "0"], "lora_rank must be at least 1, got 0"),
        (["--lora-rank", "4", "--lora-alpha", "0"], "lora_alpha must be at least 1, got 0"),
        (["--lora-rank", "4", "--lora-dropout", "1"], r"lora_dropout must be in \[0, 1\), got 1.0"),
        (["--lora-r", "4"], r"lora_r \(did you mean 'lora_rank'\?\)"),
        (["--lora-rank", "many"], "invalid int value"),
        (["--lora-rank", "4"], "an adapter of a dflare drafter needs the names of the layers.*--lora-target-modules"),
    ],
)
def test_an_adapter_that_can_not_be_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        run_of("dflare", *words)


def test_an_adapters_settings_become_pefts_and_a_recipe_may_hold_them(tmp_path):
    pytest.importorskip("peft")
    assert lora_config(run_of("dflare").adapter) is None
    run = run_of("dflare", "--lora-rank", "4", "--lora-target-modules", "all-linear")
    config = lora_config(run.adapter)
    assert (config.r, config.lora_alpha, config.lora_dropout, config.target_modules) == (4, 8, 0.0, "all-linear")
    path = tmp_path / "own.yaml"
    path.write_text("kind: dart\nlora_rank: 2\nlora_alpha: 3\nlora_target_modules: [q_proj, fc]\nkeep_adapter: true\n")
    run = run_of(str(path))
    config = lora_config(run.adapter)
    assert (config.r, config.lora_alpha, config.target_modules) == (2, 3, {"q_proj", "fc"})
    assert run.arguments["keep_adapter"] is True


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
def test_a_setting_whose_package_is_missing_says_which():
    with pytest.raises(ImportError, match=r"'deepspeed>=.*Install it, or leave out the setting"):
        run_of("dart", "--deepspeed", '{"zero_optimization": {"stage": 2}}').training_arguments()


def test_a_recipes_drafter_gives_way_to_one_to_go_on_with():
    run = run_of("dflare", "--drafter", "mine")
    assert (run.drafter.drafter, run.drafter.num_layers, run.arguments["learning_rate"]) == ("mine", None, 6e-4)


@pytest.mark.parametrize("kind", ["pard", "dflash", "dflare", "dart"])
def test_a_drafter_to_go_on_with_that_is_none_of_the_recipes_kind_is_told(kind, recwarn):
    target = tiny_target()
    drafter = tiny_drafter(kind, target)
    for recipe in recipe_names():
        recwarn.clear()
        tell_of_another_kind(drafter, read_recipe(recipe)["kind"], recipe)
        told = [str(warning.message) for warning in recwarn]
        if read_recipe(recipe)["kind"] == kind:
            assert not told
        else:
            assert len(told) == 1
            assert f"--recipe {recipe} is for" in told[0]
            assert f"--drafter is a {kind} one" in told[0]


@pytest.mark.parametrize("width", [70, 80, 100])
def test_the_help_keeps_to_the_terminals_width(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    for everything in (False, True):
        too_long = [line for line in help_text(everything).split("\n") if len(line) > width]
        # A word that is longer than its column stays whole.
        assert all(" " not in line.strip() for line in too_long), too_long
    assert "last for the latest in --output" in " ".join(help_text().split())


def test_the_help_fits_on_a_few_screens_and_explains_every_setting_of_drafters(monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    short, long = help_text(), help_text(everything=True)
    assert short.count("\n") < 160
    assert max(map(len, short.split("\n"))) <= 120
    for name in (
        "recipe",
        "target",
        "dataset",
        "output",
        "block-size",
        "cod-retention",
        "tau-prompts",
        "learning-rate",
    ):
        assert f"  --{name} " in short
    assert all(name in short for name in recipe_names())
    assert "[0.7]" in short
    assert "--adam-beta2" not in short
    assert "--adam-beta2" in long
    assert "%%" not in long
    # Of what transformers says, the first sentence and the options.
    short, long = (" ".join(text.split()) for text in (short, long))
    assert "Can be an integer (exact steps)" in long
    assert "Can be an integer (exact steps)" not in short
    assert "Options: 'no', 'steps', 'epoch'." in short


def test_aliases_in_a_recipe_are_refused_before_they_grow(tmp_path):
    """Ten lines of them stand for ten thousand million settings."""
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]" for before, name in pairwise("abcdefghi")]
    (tmp_path / "bomb.yaml").write_text("\n".join([*lines, "learning_rate: *i"]))
    with pytest.raises(ValueError, match=r"bomb.yaml is no YAML of a recipe: a recipe has no aliases, got \*a: write"):
        read_recipe(str(tmp_path / "bomb.yaml"))
    (tmp_path / "deep.yaml").write_text("learning_rate: " + "[" * 100_000)
    with pytest.raises(ValueError, match=r"deep.yaml is no YAML of a recipe"):
        read_recipe(str(tmp_path / "deep.yaml"))
