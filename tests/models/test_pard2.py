"""PARD-2: the reference's numbers, both modes of one checkpoint, the published layout, and which features a token gets."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    GenerationConfig,
    LlamaForCausalLM,
)

from hf_pardraft import AutoDrafter, PardConfig, PardDrafter
from hf_pardraft.checkpoints.convert import convert
from hf_pardraft.generation.candidate_generator import ParallelCandidateGenerator
from hf_pardraft.models.cache import GrowingCache
from hf_pardraft.models.configuration_pard import PardQwen3Config
from hf_pardraft.models.inputs import DraftInputs, DraftState
from hf_pardraft.models.modeling_pard import PardQwen3
from hf_pardraft.models.target_projection import features_before
from hf_pardraft.pairing.adapted import default_target_layers
from hf_pardraft.training.layouts.dropped_masks import one_place_later
from tiny_models import MASK_TOKEN_ID, make_oracle, random_prompt, tiny_drafter, tiny_target

FIXTURES = Path(__file__).parent.parent / "fixtures" / "pard2"
CASES = json.loads((FIXTURES / "cases.json").read_text())
PROMPT = torch.tensor([CASES["prompt"]])
LONGEST = 20


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


@pytest.fixture(scope="module")
def published():
    """Inputs, expected outputs and the drafter, as published."""
    inputs, expected = (load_file(FIXTURES / f"{name}.safetensors") for name in ("inputs", "expected"))
    return inputs, expected, AutoDrafter.from_pretrained(FIXTURES)


@pytest.fixture(scope="module")
def published_target():
    return AutoModelForCausalLM.from_pretrained(FIXTURES / "target").eval()


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3")


def published_folder(path: Path, warp_model: bool = True) -> Path:
    """A repository as the reference writes it: the drafter in a subfolder, its projection in a pickle."""
    folder = path / "pard_model"
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(FIXTURES / name, folder / name)
    if warp_model:
        torch.save(load_file(FIXTURES / "warp_model.safetensors"), folder / "warp_model.bin")
    return path


def plain(target, prompt, **options):
    options = {"do_sample": False, "max_new_tokens": LONGEST, **options}
    return target.generate(prompt, attention_mask=torch.ones_like(prompt), **options)


# The reference's numbers


@torch.no_grad()
def test_single_calls_equal_the_reference(published):
    inputs, expected, drafter = published
    for case in CASES["cases"]:
        name, n = f"case{case['case']}", case["n"]
        ids, positions = inputs[f"{name}.input_ids"][:, :n], torch.arange(n)[None]
        # The last token is the anchor, which the target has not read when the drafter drafts.
        features = inputs[f"{name}.target_hidden"][:, :-1]
        context = DraftInputs(ids, positions, features, positions[:, :-1])
        state = DraftState(GrowingCache())
        logits = drafter.draft(context, state, case["K"])
        assert_close(logits, expected[f"{name}.logits"])
        assert torch.equal(logits.argmax(-1), expected[f"{name}.draft_ids"])
        assert state.cache.get_seq_length() == n
        assert torch.equal(one_place_later(inputs[f"{name}.target_hidden"]), inputs[f"{name}.target_feat"][:, :n])


@torch.no_grad()
def test_rounds_equal_the_reference(published, published_target):
    """From the tokens and the target alone: the features of each round are those of what was read since the last one."""
    inputs, expected, drafter = published
    text = torch.cat(
        [inputs[f"round{case['round']}.input_ids"][:, : case["new_tokens"]] for case in CASES["rounds"]], 1
    )
    states = published_target(text, output_hidden_states=drafter.tapped_hidden_states).hidden_states
    features = torch.cat([states[tap] for tap in drafter.tapped_hidden_states], dim=-1)
    state, num_read = DraftState(GrowingCache()), 0
    for case in CASES["rounds"]:
        name, new, before = f"round{case['round']}", case["new_tokens"], case["cache_len"]
        assert state.cache.get_seq_length() == before
        positions = torch.arange(before, before + new)[None]
        read = torch.arange(num_read, before + new - 1)
        num_read = before + new - 1
        context = DraftInputs(text[:, before : before + new], positions, features[:, read], read[None])
        assert_close(features_before(context), inputs[f"{name}.target_feat"][:, :new])
        logits = drafter.draft(context, state, case["K"])
        assert_close(logits, expected[f"{name}.logits"])
        assert torch.equal(logits.argmax(-1), expected[f"{name}.draft_ids"])


def test_taps_follow_the_published_rules():
    rules = json.loads((FIXTURES.parent / "taps" / "rules.json").read_text())
    inputs, expected = (load_file(FIXTURES.parent / "taps" / f"{name}.safetensors") for name in ("inputs", "expected"))
    states = tuple(inputs[f"hidden_states.{i}"] for i in range(len(inputs)))
    cases = [case for case in rules["features"] if "target_layers" in case]
    assert len(cases) == 2
    for case in cases:
        target = tiny_target("llama", hidden_size=16, num_hidden_layers=8)
        drafter = PardDrafter.from_causal_lm(
            tiny_target("llama"), MASK_TOKEN_ID, target=target, target_layers=case["target_layers"]
        )
        generator = ParallelCandidateGenerator(drafter, target, GenerationConfig())
        assert torch.equal(generator.tapped(states, slice(None)), expected[case["key"]])


# Two modes of one checkpoint


@pytest.mark.parametrize("loop", ["native", "stock"])
def test_both_modes_write_the_targets_text_and_read_what_they_say(target, loop):
    prompt, drafter = random_prompt(6), tiny_drafter("pard2", target)
    drafter.generation_config.decode_loop = loop
    expected, asked = plain(target, prompt), []
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: asked.append(kwargs.get("output_hidden_states")), with_kwargs=True
    )
    for own, of_the_call, reads in (
        (None, None, True),
        (False, None, False),
        (True, False, False),
        (False, True, True),
    ):
        drafter.generation_config.use_target_features = own
        asked.clear()
        found = plain(
            target,
            prompt,
            assistant_model=drafter,
            generation_config=GenerationConfig(
                use_target_features=of_the_call, max_new_tokens=LONGEST, do_sample=False
            ),
        )
        assert torch.equal(found, expected)
        # Without features it drafts after the bare prompt; with them it waits until the target has read it.
        assert drafter.last_stats.drafted_per_round[0] == (0 if reads else 4)
        assert {bool(taps) for taps in asked} == {reads}
    handle.remove()


@torch.no_grad()
def test_without_features_it_is_the_pard_drafter_of_its_weights(published):
    inputs, _, drafter = published
    fields = {name: value for name, value in drafter.config.to_dict().items() if not name.startswith("pard2")}
    pard = PardDrafter(PardConfig(**{**fields, "spd_type": "pard"})).eval()
    pard.load_state_dict({n: w for n, w in drafter.state_dict().items() if not n.startswith("target_proj")})
    ids = inputs["case1.input_ids"][:, :7]
    context = DraftInputs(ids, torch.arange(7)[None])
    found, expected = (model.draft(context, DraftState(GrowingCache()), 5) for model in (drafter, pard))
    assert torch.equal(found, expected)


def test_the_mode_is_saved_with_the_drafter(target, tmp_path):
    drafter = tiny_drafter("pard2", target)
    drafter.generation_config.use_target_features = False
    drafter.save_pretrained(tmp_path)
    loaded = AutoDrafter.from_pretrained(tmp_path)
    assert loaded.generation_config.use_target_features is False
    assert loaded.tapped_hidden_states == []
    loaded.generation_config.use_target_features = True
    assert loaded.tapped_hidden_states == [-1, -2, -3]


def test_features_are_asked_for_in_vain_where_there_is_no_projection(target):
    for kind, setting in (("pard", True), ("dflash", False), ("dart", False), ("pard2", "yes")):
        drafter = tiny_drafter(kind, target)
        drafter.generation_config.use_target_features = setting
        with pytest.raises(ValueError, match="use_target_features"):
            plain(target, random_prompt(4), assistant_model=drafter)


# Which features a token gets


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("budget", [0, 10])
@pytest.mark.parametrize("lengths", [(5,), (9, 3, 6, 1)])
def test_each_round_drafts_what_a_single_forward_over_the_text_drafts(architecture, budget, lengths):
    """Rows are accepted unevenly and leave the batch; each draft must equal one made from scratch, with shifted features."""
    target = tiny_target(architecture)
    prompts = [random_prompt(length, seed=seed) for seed, length in enumerate(lengths)]
    # Longer than what is asked for: an item may run ahead until all are done.
    texts = [plain(target, prompt, max_new_tokens=2 * LONGEST)[0] for prompt in prompts]
    drafter = tiny_drafter("pard2", target)
    taps, drafts, states = drafter.tapped_hidden_states, [], []
    for text in texts:
        hidden = target(text[None], output_hidden_states=taps).hidden_states
        states.append(torch.cat([hidden[tap] for tap in taps], dim=-1))
    real_draft = drafter.draft

    def noting(context, state, depth):
        logits = real_draft(context, state, depth)
        drafts.append((list(state.oracle_items), context.new_positions[:, -1].tolist(), logits.clone()))
        return logits

    drafter.draft = noting
    drafter.generation_config.tree_budget = budget
    drafter = make_oracle(drafter, texts, [0.7, 0.6, 0.6, 0.5], runner_up=0.7)
    widest = max(lengths)
    pad = torch.nn.functional.pad
    ids = torch.cat([pad(prompt, (widest - prompt.shape[1], 0)) for prompt in prompts])
    mask = torch.cat([pad(torch.ones_like(prompt), (widest - prompt.shape[1], 0)) for prompt in prompts])
    out = target.generate(
        ids, attention_mask=mask, assistant_model=drafter, do_sample=False, max_new_tokens=LONGEST, use_cache=True
    )
    assert all(torch.equal(out[item, widest:], text[lengths[item] :][:LONGEST]) for item, text in enumerate(texts))
    assert len(drafts) > 3
    for items, anchors, logits in drafts:
        for index, (item, anchor) in enumerate(zip(items, anchors, strict=True)):
            context = DraftInputs(
                texts[item][None, : anchor + 1],
                torch.arange(anchor + 1)[None],
                states[item][:, :anchor],
                torch.arange(anchor)[None],
            )
            alone = real_draft(context, DraftState(GrowingCache()), logits.shape[1])
            torch.testing.assert_close(logits[index], alone[0], rtol=1e-3, atol=1e-3)


def test_a_row_with_less_to_tell_gets_zeros_where_nothing_is_known():
    features = torch.arange(1.0, 7).view(2, 3, 1)
    context = DraftInputs(
        torch.zeros(2, 4, dtype=torch.long), torch.arange(4).expand(2, -1), features, feature_counts=[3, 1]
    )
    assert features_before(context)[:, :, 0].tolist() == [[0, 1, 2, 3], [0, 0, 0, 6]]


def test_a_turn_on_an_earlier_calls_cache_drafts_with_what_features_there_are(target):
    """The target does not read the first turn again, so its tokens have no features; the second turn's have."""
    seen, drafter = [], tiny_drafter("pard2", target)
    real_draft = drafter.draft
    drafter.draft = lambda context, state, depth: seen.append(context) or real_draft(context, state, depth)
    first = plain(target, random_prompt(5), return_dict_in_generate=True)
    ids = torch.cat([first.sequences, random_prompt(4, seed=3)], dim=1)
    expected = plain(target, ids)
    found = plain(target, ids, past_key_values=first.past_key_values, assistant_model=drafter)
    assert torch.equal(found, expected)
    # Column 0 is padding, then come 24 tokens of the cache, whose features are unknown; the last token is the bonus token.
    known = features_before(seen[0])[0].abs().sum(-1) > 0
    assert known.tolist() == [False] * 25 + [True] * 5


# The published layout, and ours


def test_the_published_layout_loads_from_the_repository_and_from_its_subfolder(published, tmp_path):
    _, _, expected = published
    repository = published_folder(tmp_path / "repository")
    for load in (AutoDrafter.from_pretrained, PardDrafter.from_pretrained):
        for path, options in (
            (repository, {}),
            (repository / "pard_model", {}),
            (repository, {"subfolder": "pard_model"}),
        ):
            drafter = load(path, **options)
            assert isinstance(drafter, PardDrafter)
            assert drafter.tapped_hidden_states == [-1, -3]
            assert drafter.state_dict().keys() == expected.state_dict().keys()
            assert all(torch.equal(w, expected.state_dict()[name]) for name, w in drafter.state_dict().items())


def test_a_checkpoint_without_its_projection_is_a_pard_drafter(published, published_target, tmp_path):
    _, _, published_drafter = published
    repository = published_folder(tmp_path / "repository", warp_model=False)
    with pytest.warns(UserWarning, match="PARD-2 drafter without its projection"):
        drafter = AutoDrafter.from_pretrained(repository)
    assert drafter.tapped_hidden_states == []
    assert torch.equal(
        plain(published_target, PROMPT, assistant_model=drafter, eos_token_id=None),
        plain(published_target, PROMPT, eos_token_id=None),
    )
    with pytest.warns(UserWarning, match="without its projection"):
        given = PardDrafter.from_pretrained(repository / "pard_model", config=published_drafter.config)
    assert given.target_proj is None
    assert published_drafter.config.spd_type == "pard2"
    drafter.generation_config.use_target_features = True
    with pytest.raises(ValueError, match="use_target_features=True needs a projection"):
        plain(published_target, PROMPT, assistant_model=drafter)
    drafter.generation_config.use_target_features = None
    drafter.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["spd_type"] == "pard"
    assert not [name for name in config if name.startswith("pard2")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AutoDrafter.from_pretrained(tmp_path / "saved")


def test_a_checkpoint_of_the_authors_trainer_is_the_same_drafter(published, tmp_path):
    """One file: the base's weights under `base_model.`, the projection beside them (the fixture's README)."""
    _, _, drafter = published
    folder = published_folder(tmp_path / "trained", warp_model=False) / "pard_model"
    base, projection = (load_file(FIXTURES / name) for name in ("model.safetensors", "warp_model.safetensors"))
    whole = {f"base_model.{name}": weight for name, weight in base.items()} | projection
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = AutoDrafter.from_pretrained(tmp_path / "trained")
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    for name, weight in drafter.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name]), name
    convert(tmp_path / "trained", tmp_path / "native")
    assert load_file(tmp_path / "native" / "model.safetensors").keys() == base.keys()
    again = AutoDrafter.from_pretrained(tmp_path / "native")
    assert torch.equal(again.target_proj.weight, projection["target_proj.weight"])
    save_file({**whole, "target_proj.bias": torch.zeros(48)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"\(pard2_proj_bias\): expected \['target_proj.weight'\], found"):
        AutoDrafter.from_pretrained(tmp_path / "trained")
    # An adapter's names begin alike, and are no drafter's.
    adapted = {f"base_model.model.{name}": weight for name, weight in base.items()} | projection
    save_file(adapted, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"unexpected keys: base_model\.model\."):
        AutoDrafter.from_pretrained(tmp_path / "trained")


def test_a_projection_that_does_not_fit_is_named(tmp_path):
    folder = published_folder(tmp_path / "repository") / "pard_model"
    for wrong in (
        {"target_proj.weight": torch.zeros(48, 32)},
        {"target_proj.weight": torch.zeros(48, 64), "target_proj.bias": torch.zeros(48)},
        {"projection.weight": torch.zeros(48, 64)},
    ):
        torch.save(wrong, folder / "warp_model.bin")
        with pytest.raises(ValueError, match=r"warp_model.bin does not fit config.json: .*\(48, 64\)"):
            PardDrafter.from_pretrained(folder)


def test_a_pickle_that_holds_more_than_tensors_is_not_run(tmp_path):
    folder = published_folder(tmp_path / "repository") / "pard_model"

    class Harmful:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "touched",))

    torch.save({"target_proj.weight": Harmful()}, folder / "warp_model.bin")
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        PardDrafter.from_pretrained(folder)
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_folder_is_a_plain_causal_lm_beside_a_projection(published, tmp_path, dtype):
    _, _, drafter = published
    published_folder(tmp_path / "published")
    drafter = AutoDrafter.from_pretrained(tmp_path / "published", dtype=dtype)
    drafter.save_pretrained(tmp_path / "ours")
    code = {"README.md", "custom_generate"}
    root = {path.name for path in (tmp_path / "ours").iterdir() if path.suffix != ".py"} - code
    assert root == {"config.json", "generation_config.json", "model.safetensors", "target_projection"}
    assert [path.name for path in (tmp_path / "ours" / "target_projection").iterdir()] == ["model.safetensors"]
    # vLLM loads every safetensors file of the root into the causal LM and refuses what it doesn't know.
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["LlamaForCausalLM"], "llama")
    reference, info = LlamaForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert load_file(tmp_path / "ours" / "model.safetensors").keys() == reference.state_dict().keys()
    loaded = AutoDrafter.from_pretrained(tmp_path / "ours")
    assert loaded.dtype == dtype
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    assert all(torch.equal(w, drafter.state_dict()[name]) for name, w in loaded.state_dict().items())
    assert (loaded.config.pard2_scale, loaded.config.pard2_target_layers) == (0.05, [-1, -3])


def test_a_biased_projection_round_trips_and_is_used(target, tmp_path):
    config = tiny_drafter("pard2", target).config
    config.pard2_proj_bias = True
    torch.manual_seed(0)
    drafter = PardDrafter(config).eval()
    torch.nn.init.normal_(drafter.target_proj.bias)
    drafter.save_pretrained(tmp_path)
    loaded = PardDrafter.from_pretrained(tmp_path)
    assert torch.equal(loaded.target_proj.bias, drafter.target_proj.bias)
    ids, features = random_prompt(4), torch.zeros(1, 4, 96)
    embeddings = drafter.get_input_embeddings()(ids) + config.pard2_scale * drafter.target_proj.bias
    assert_close(loaded(ids, target_features=features).logits, drafter(inputs_embeds=embeddings).logits)


def test_pushing_uploads_the_projection_too(target, tmp_path, monkeypatch):
    pushed = {}

    def push_to_hub(self, repo_id, **options):
        self.save_pretrained(tmp_path / "uploaded")
        pushed.update({"repo_id": repo_id, **options})

    monkeypatch.setattr(PardDrafter, "push_to_hub", push_to_hub)
    tiny_drafter("pard2", target).save_pretrained(tmp_path / "mine", push_to_hub=True, private=True)
    card = tmp_path / "mine" / "README.md"
    saved = {"state_dict": None, "with_code": True}
    assert pushed == {"repo_id": "mine", "private": True, "card": card, **saved}
    assert (tmp_path / "uploaded" / "target_projection" / "model.safetensors").exists()


@pytest.mark.usefixtures("own_modules")
def test_the_code_that_travels_with_a_drafter_loads_its_projection(target, tmp_path, monkeypatch):
    monkeypatch.setattr(PardQwen3, "_auto_class", "AutoModel")
    monkeypatch.setattr(PardQwen3Config, "_auto_class", "AutoConfig")
    drafter, prompt = tiny_drafter("pard2", target), random_prompt(5)
    drafter.save_pretrained(tmp_path / "drafter")
    loaded = AutoModel.from_pretrained(tmp_path / "drafter", trust_remote_code=True)
    assert type(loaded).__module__.startswith("transformers_modules")
    assert torch.equal(loaded.target_proj.weight, drafter.target_proj.weight)
    assert torch.equal(plain(target, prompt, assistant_model=loaded), plain(target, prompt))
    assert loaded.last_stats.drafted_per_round[:2] == [0, 4]


# A fresh drafter


@torch.no_grad()
def test_a_fresh_projection_adds_nothing(target):
    base = tiny_target("qwen3", seed=3, num_hidden_layers=2)
    drafter = PardDrafter.from_causal_lm(base, MASK_TOKEN_ID, target=target)
    pard = PardDrafter.from_causal_lm(base, MASK_TOKEN_ID)
    assert (drafter.config.pard2_target_layers, drafter.config.pard2_target_dim) == ([-1, -2, -3], 96)
    ids, positions = random_prompt(6), torch.arange(6)[None]
    features = torch.randn(1, 5, 96, generator=torch.Generator().manual_seed(0))
    found = drafter.draft(DraftInputs(ids, positions, features, positions[:, :-1]), DraftState(GrowingCache()), 4)
    assert torch.equal(found, pard.draft(DraftInputs(ids, positions), DraftState(GrowingCache()), 4))


def test_a_trained_pard_drafter_gains_features_and_keeps_its_mask(target):
    trained = PardDrafter.from_causal_lm(tiny_target("qwen3", num_hidden_layers=2), MASK_TOKEN_ID)
    with torch.no_grad():
        trained.get_input_embeddings().weight[MASK_TOKEN_ID] = 7.0
    drafter = PardDrafter.from_causal_lm(trained, target=target, target_layers=[-2, 1])
    assert drafter.config.pard_token == MASK_TOKEN_ID
    assert drafter.tapped_hidden_states == [-2, 1]
    for name, weight in trained.state_dict().items():
        assert torch.equal(drafter.state_dict()[name], weight)
    assert PardDrafter.from_causal_lm(drafter).target_proj is None


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (1, [-1]),
        (2, [-1, -2]),
        (4, [-1, -2, -3]),
        (8, [-1, -2, -4, -6]),
        (28, [-1, -7, -14, -21]),
        (36, [-1, -8, -16, -24]),
    ],
)
def test_default_taps_are_as_published_where_the_target_is_deep_enough(num_layers, expected):
    assert default_target_layers(num_layers) == expected


# Bad input is refused before any work


@pytest.mark.parametrize(
    ("layers", "match"),
    [([-6], "deeper target"), ([5], "deeper target"), ([4], "after the final norm"), ([], "needs pard2_target_layers")],
)
def test_taps_that_the_target_does_not_have(target, layers, match):
    with pytest.raises(ValueError, match=match):
        PardDrafter.from_causal_lm(tiny_target("qwen3", seed=3), MASK_TOKEN_ID, target=target, target_layers=layers)


def test_target_layers_without_a_target():
    with pytest.raises(ValueError, match="pass target="):
        PardDrafter.from_causal_lm(tiny_target("llama"), MASK_TOKEN_ID, target_layers=[-1])


def test_a_target_of_another_width_is_refused_unless_its_states_are_not_read(target):
    drafter, wider = tiny_drafter("pard2", target), tiny_target("llama", hidden_size=48)
    calls = []
    handle = wider.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match=r"takes 96 features .* 3 \* 48"):
        plain(wider, random_prompt(4), assistant_model=drafter)
    assert not calls
    handle.remove()
    drafter.generation_config.use_target_features = False
    with pytest.warns(UserWarning, match="model type 'qwen3'.*'llama'"):
        found = plain(wider, random_prompt(4), assistant_model=drafter)
    assert torch.equal(found, plain(wider, random_prompt(4)))


def test_a_target_that_gives_no_states_is_refused_unless_the_call_reads_none(target):
    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=4, n_head=4, pad_token_id=0, eos_token_id=None)
    torch.manual_seed(0)
    bloom, prompt = BloomForCausalLM(config).eval(), random_prompt(4)
    drafter = tiny_drafter("pard2", target)
    drafter.config.target_fingerprint = None
    with pytest.raises(ValueError, match=r"can't select hidden states .* use_target_features=False"):
        plain(bloom, prompt, assistant_model=drafter)
    without = GenerationConfig(use_target_features=False, max_new_tokens=LONGEST, do_sample=False)
    found = plain(bloom, prompt, assistant_model=drafter, generation_config=without)
    assert torch.equal(found, plain(bloom, prompt))


def test_features_of_the_wrong_size_are_refused(target):
    context = DraftInputs(random_prompt(2), torch.arange(2)[None], torch.zeros(1, 1, 64))
    with pytest.raises(ValueError, match=r"size 96 .*got 64"):
        tiny_drafter("pard2", target).draft(context, DraftState(GrowingCache()), 3)


def test_a_config_that_does_not_say_what_is_projected(tmp_path):
    folder = published_folder(tmp_path / "repository") / "pard_model"
    fields = json.loads((folder / "config.json").read_text())
    for name in ("pard2_target_layers", "pard2_target_dim", "pard2_scale"):
        changed = {key: value for key, value in fields.items() if key != name}
        (folder / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match="needs pard2_target_layers, pard2_target_dim"):
            PardDrafter.from_pretrained(folder)


def test_another_target_of_the_same_kind_warns_where_its_states_are_read(target):
    drafter, other = tiny_drafter("pard2", target), tiny_target("qwen3", seed=9)
    with pytest.warns(UserWarning, match="its weights differ"):
        plain(other, random_prompt(4), assistant_model=drafter)
    independent = tiny_drafter("pard2", target)
    independent.generation_config.use_target_features = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain(other, random_prompt(4), assistant_model=independent)


def test_a_missing_weight_of_our_projection_is_named(target, tmp_path):
    tiny_drafter("pard2", target).save_pretrained(tmp_path)
    save_file({"target_proj.bias": torch.zeros(32)}, tmp_path / "target_projection" / "model.safetensors")
    with pytest.raises(ValueError, match=r"expected \{'target_proj.weight': \(32, 96\)\}"):
        AutoDrafter.from_pretrained(tmp_path)
