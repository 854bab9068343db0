"""DART gives the outputs of the published implementation, and drafts what it may draft."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import DynamicCache

from hf_pardraft import AutoDrafter, DartConfig, DartDrafter, NgramModel
from hf_pardraft.generation import decoder as decode
from hf_pardraft.generation.pending import joined
from hf_pardraft.models.inputs import DraftInputs
from hf_pardraft.pairing.fresh import default_tapped_hidden_states
from tiny_models import StandIn, make_oracle, random_prompt, tiny_drafter, tiny_target

FIXTURES = Path(__file__).parent.parent / "fixtures"


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


def fixture_files(name: str) -> tuple[dict, dict]:
    folder = FIXTURES / name
    inputs = load_file(folder / "inputs.safetensors")
    # The head of a DART drafter is its own.
    inputs["target.lm_head.weight"] = inputs["target.embed_tokens.weight"]
    return inputs, load_file(folder / "expected.safetensors")


def call_context(inputs: dict, call: str) -> DraftInputs:
    """A call of the fixtures as our contract has it: the features of what was read, and the tokens after each."""
    features, next_ids = inputs[f"{call}.aux_hidden"], inputs[f"{call}.next_ids"]
    start = 0 if call == "full" else int(inputs[f"{call}.cache_len"])
    positions = torch.arange(start, start + features.shape[1])[None]
    return DraftInputs(next_ids, positions + 1, features, positions)


@torch.no_grad()
@pytest.mark.parametrize("norm", ["double", "single"])
@pytest.mark.parametrize("name", ["dart", "dart_vocab"])
def test_dart_equals_the_reference_at_once_and_in_rounds(name, norm):
    drafter = AutoDrafter.from_pretrained(FIXTURES / name)
    assert type(drafter) is DartDrafter
    assert drafter.config.double_norm
    drafter.config.double_norm = norm == "double"
    inputs, expected = fixture_files(name)
    draft_ids = torch.arange(drafter.config.draft_vocab_size) + drafter.d2t
    raw, normed = [], []
    drafter.midlayer.register_forward_hook(lambda _module, _args, output: raw.append(output))
    drafter.norm.register_forward_hook(lambda _module, _args, output: normed.append(output))
    depth, target = drafter.draft_depth, StandIn(inputs)
    assert depth == drafter.config.draft_length + 1
    for call in ("full", "round1", "round2", "round3"):
        if call in ("full", "round1"):
            state = drafter.new_draft_state(target)
        context = call_context(inputs, call)
        before = state.cache.get_seq_length()
        raw.clear()
        normed.clear()
        logits = drafter.draft(context, state, depth)
        assert logits.shape == (1, depth, drafter.config.draft_vocab_size)
        assert_close(raw[0][:, -depth:], expected[f"{call}.raw"])
        # What the reference's own forward returns has had the norm once.
        assert_close(normed[0], expected[f"{call}.hidden"])
        assert_close(logits, expected[f"{call}.logits_{norm}"])
        assert torch.equal(draft_ids[logits.argmax(-1)], expected[f"{call}.target_ids_{norm}"])
        assert state.cache.get_seq_length() == before + context.features.shape[1]


def random_context(lengths: list[int], first: int, target, seed: int = 0) -> DraftInputs:
    """Inputs of batch items padded on the left, whose prefixes are `first` tokens long before; `lengths` are what was read."""
    generator = torch.Generator().manual_seed(seed)
    batch, read = len(lengths), max(lengths)
    ids = torch.randint(0, 60, (batch, read), generator=generator)
    features = torch.randn(batch, read, 3 * target.config.hidden_size, generator=generator)
    positions = torch.tensor([[first + i - (read - n) for i in range(read)] for n in lengths])
    counts = None if min(lengths) == read else lengths
    return DraftInputs(ids, positions + 1, features, positions, counts, counts)


def one_item(context: DraftInputs, item: int, length: int) -> DraftInputs:
    tensors = (context.new_ids, context.new_positions, context.features, context.feature_positions)
    return DraftInputs(*(tensor[item : item + 1, -length:] for tensor in tensors))


def by_hand(drafter, target, features, next_ids, depth: int) -> torch.Tensor:
    """The draft logits `(depth, draft vocab)` after one prefix, position by position, written from the README of the fixtures."""
    config, layer = drafter.config, drafter.midlayer
    size, heads, kv_heads, head_dim = (
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )

    def rms(x, weight):
        return x / (x.pow(2).mean() + config.rms_norm_eps).sqrt() * weight

    def rotate(x, position):
        frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(0, head_dim, 2) / head_dim)
        angle = torch.cat([position * frequencies] * 2)
        halves = torch.cat([-x[head_dim // 2 :], x[: head_dim // 2]])
        return x * angle.cos() + halves * angle.sin()

    inputs, residuals = [], []
    for state, token in zip(features, next_ids, strict=True):
        fused, embedding = drafter.fc.weight @ state, target.get_input_embeddings().weight[token]
        inputs.append(torch.cat([rms(embedding, layer.input_layernorm.weight), rms(fused, layer.hidden_norm.weight)]))
        residuals.append(fused)
    for _ in range(depth - 1 if config.shifted else depth):
        inputs.append(layer.mask_rep)
        residuals.append(layer.mask_rep[:size])
    attention, logits = layer.self_attn, []
    for q in range(len(inputs)):
        query = (attention.q_proj.weight @ inputs[q]).view(heads, head_dim)
        outputs = []
        for head in range(heads):
            group = head * kv_heads // heads
            scores, values = [], []
            for k in range(q + 1):
                key = (attention.k_proj.weight @ inputs[k]).view(kv_heads, head_dim)[group]
                scores.append(rotate(query[head], q) @ rotate(key, k) / math.sqrt(head_dim))
                values.append((attention.v_proj.weight @ inputs[k]).view(kv_heads, head_dim)[group])
            outputs.append(torch.stack(scores).softmax(0) @ torch.stack(values))
        hidden = residuals[q] + attention.o_proj.weight @ torch.cat(outputs)
        normed = rms(hidden, layer.post_attention_layernorm.weight)
        gate, up = layer.mlp.gate_proj.weight @ normed, layer.mlp.up_proj.weight @ normed
        hidden = hidden + layer.mlp.down_proj.weight @ (gate * gate.sigmoid() * up)
        logits.append(drafter.lm_head.weight @ rms(hidden, drafter.norm.weight))
    return torch.stack(logits[-depth:])


@torch.no_grad()
@pytest.mark.parametrize("shifted", [True, False])
def test_every_logit_is_what_the_equations_say(shifted):
    target = tiny_target("qwen3")
    drafter = DartDrafter.for_target(target, draft_length=4, shifted=shifted, initializer_range=0.2)
    assert drafter.max_draft_depth == (5 if shifted else 4)
    context = random_context([6], 0, target)
    logits = drafter.draft(context, drafter.new_draft_state(target), 4)
    expected = by_hand(drafter, target, context.features[0], context.new_ids[0], 4)
    torch.testing.assert_close(logits[0], expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_shallower_draft_is_the_beginning_of_a_deeper_one():
    target = tiny_target("llama")
    for shifted in (True, False):
        drafter = DartDrafter.for_target(target, draft_length=6, shifted=shifted, initializer_range=0.2)
        context = random_context([5], 0, target)
        whole = drafter.draft(context, drafter.new_draft_state(target), drafter.max_draft_depth)
        for depth in range(1, drafter.max_draft_depth):
            part = drafter.draft(context, drafter.new_draft_state(target), depth)
            torch.testing.assert_close(part, whole[:, :depth], rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_rows_of_different_lengths_are_drafted_as_if_alone(attention):
    target = tiny_target("qwen3")
    drafter = tiny_drafter("dart", target)
    drafter.set_attn_implementation(attention)
    rounds = [([5, 2, 4], [0, 0, 0]), ([1, 3, 2], [5, 2, 4]), ([2, 2, 2], [6, 5, 6])]
    together, alone = drafter.new_draft_state(target), [drafter.new_draft_state(target) for _ in range(3)]
    for seed, (lengths, starts) in enumerate(rounds):
        context = random_context(lengths, 0, target, seed)
        shift = torch.tensor(starts)[:, None]
        context.new_positions, context.feature_positions = (
            context.new_positions + shift,
            context.feature_positions + shift,
        )
        logits = drafter.draft(context, together, 4)
        for item, length in enumerate(lengths):
            expected = drafter.draft(one_item(context, item, length), alone[item], 4)
            torch.testing.assert_close(logits[item : item + 1], expected, rtol=1e-4, atol=1e-4)
    assert together.cache.item_lengths == [8, 7, 8]


@torch.no_grad()
def test_rounds_without_a_draft_and_a_prompt_join_to_one_call():
    """The prompt comes as ids first and as features later, so there is one id more than there are features."""
    target = tiny_target("llama")
    drafter = tiny_drafter("dart", target)
    context = random_context([7], 0, target)
    prompt = DraftInputs(torch.cat([torch.tensor([[9]]), context.new_ids[:, :3]], 1), torch.arange(4)[None])
    read = DraftInputs(
        context.new_ids[:, 3:4],
        context.new_positions[:, 3:4],
        context.features[:, :4],
        context.feature_positions[:, :4],
    )
    undrafted = DraftInputs(
        context.new_ids[:, 4:], context.new_positions[:, 4:], context.features[:, 4:], context.feature_positions[:, 4:]
    )
    found = drafter.draft(joined([prompt, read, undrafted]), drafter.new_draft_state(target), 4)
    torch.testing.assert_close(found, drafter.draft(context, drafter.new_draft_state(target), 4), rtol=1e-5, atol=1e-5)


def record_forwards(drafter) -> list[tuple[list[int], dict]]:
    """What the drafter's forward gets, and how many of its prefix positions are real, call by call."""
    told, real_draft, real_forward = [], drafter.draft, drafter.forward

    def draft(context, state, depth):
        batch, num_read = context.features.shape[:2]
        told.append([context.feature_counts or [num_read] * batch])
        return real_draft(context, state, depth)

    def forward(**inputs):
        told[-1].append(inputs)
        return real_forward(**inputs)

    drafter.draft, drafter.forward = draft, forward
    return told


def assert_rows_pair_features_with_next_tokens(told, drafter, target, texts) -> list[set[int]]:
    """Every real prefix position of a call without selected items; returns the places that each item of the batch was told of."""
    states = [target(text, output_hidden_states=True).hidden_states for text in texts]
    places = [set() for _ in texts]
    for counts, inputs in told:
        num_read = inputs["target_hidden_states"].shape[1]
        for item, (count, text) in enumerate(zip(counts, texts, strict=True)):
            positions = inputs["position_ids"][item, num_read - count :]
            assert torch.equal(positions, positions[0] + torch.arange(count + inputs["num_masks"]))
            at = positions[:count]
            features = torch.cat([states[item][tap] for tap in drafter.tapped_hidden_states], dim=-1)[0, at]
            found = inputs["target_hidden_states"][item, num_read - count :]
            torch.testing.assert_close(found, features, rtol=1e-3, atol=1e-4)
            expected = target.get_input_embeddings()(text[0, at + 1])
            torch.testing.assert_close(inputs["next_embeds"][item, num_read - count :], expected)
            assert not places[item] & set(at.tolist()), "a place was told twice"
            places[item] |= set(at.tolist())
    return places


def greedy(target, ids, max_new_tokens=12, **options):
    mask = torch.ones_like(ids)
    return target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens, **options)


@torch.no_grad()
@pytest.mark.parametrize("budget", [0, 8])
def test_each_feature_meets_the_next_token_behind_a_prompt_and_in_a_later_turn(budget):
    target, prompt = tiny_target("qwen3"), random_prompt(6)
    ids = greedy(target, prompt)
    later = torch.cat([ids, random_prompt(5, seed=3)], dim=1)
    whole = greedy(target, later)
    drafter = make_oracle(tiny_drafter("dart", target), whole[0], [0.6] * 4, runner_up=0.6)
    drafter.generation_config.tree_budget = budget
    cache = DynamicCache(config=target.config)
    # The first turn leaves its anchor pending, so the second has six tokens to read.
    for text, expected, first in ((prompt, ids, range(6)), (later, whole, range(17, 23))):
        told = record_forwards(drafter)
        assert torch.equal(greedy(target, text, past_key_values=cache, assistant_model=drafter), expected)
        [places] = assert_rows_pair_features_with_next_tokens(told, drafter, target, [expected])
        assert told[0][1]["position_ids"][0, : len(first)].tolist() == list(first)
        assert places == set(range(first[0], max(places) + 1))


@torch.no_grad()
@pytest.mark.parametrize("budget", [0, 8])
def test_each_feature_meets_the_next_token_in_a_batch(budget):
    target, prompts = tiny_target("qwen3"), [random_prompt(length, seed=length) for length in (7, 3, 5)]
    # An item that is ahead of the others goes on until they are done too.
    texts = [greedy(target, prompt, max_new_tokens=24) for prompt in prompts]
    ids = torch.cat([nn.functional.pad(prompt, (7 - prompt.shape[1], 0)) for prompt in prompts])
    mask = torch.cat([nn.functional.pad(torch.ones_like(p), (7 - p.shape[1], 0)) for p in prompts])
    drafter = make_oracle(tiny_drafter("dart", target), [text[0] for text in texts], [0.6] * 4, runner_up=0.6)
    drafter.generation_config.tree_budget = budget
    told = record_forwards(drafter)
    target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=12, assistant_model=drafter)
    whole_batch = [call for call in told if len(call[0]) == 3]
    assert len(whole_batch) >= 3
    assert any(len(set(counts)) > 1 for counts, _ in whole_batch[1:])
    for places in assert_rows_pair_features_with_next_tokens(whole_batch, drafter, target, texts):
        assert places == set(range(max(places) + 1))


def test_taps_follow_the_published_rule():
    for case in json.loads((FIXTURES / "taps" / "rules.json").read_text())["dart"]:
        assert default_tapped_hidden_states(case["num_target_layers"]) == case["tuple_indices"]
    states = load_file(FIXTURES / "taps" / "inputs.safetensors")
    expected = load_file(FIXTURES / "taps" / "expected.safetensors")["dart"]
    assert torch.equal(torch.cat([states[f"hidden_states.{i}"] for i in default_tapped_hidden_states(8)], -1), expected)


@pytest.mark.parametrize("num_layers", range(2, 12))
def test_default_taps_can_be_tapped(num_layers):
    taps = default_tapped_hidden_states(num_layers)
    assert taps == sorted(set(taps))
    assert all(1 <= tap < num_layers for tap in taps)
    assert len(taps) == min(3, num_layers - 1)


def test_a_published_config_leaves_its_taps_to_the_target():
    drafter = AutoDrafter.from_pretrained(FIXTURES / "dart")
    assert drafter.taps_for(tiny_target("llama", num_hidden_layers=8, vocab_size=120)) == [2, 4, 5]
    assert drafter.taps_for(tiny_target("llama", num_hidden_layers=12, vocab_size=120)) == [2, 6, 9]
    with pytest.raises(ValueError, match="taps_for"):
        _ = drafter.tapped_hidden_states
    with pytest.raises(ValueError, match="reads the target's hidden states, got use_target_features=False"):
        drafter.taps_for(tiny_target("llama", num_hidden_layers=8, vocab_size=120), use_target_features=False)
    # Entries that coincide are read twice, as the published code does.
    for num_layers, taps in ((6, [2, 3, 3]), (5, [2, 2, 2]), (4, [2, 2, 1]), (3, [2, 1, 0])):
        shallow = tiny_target("llama", num_hidden_layers=num_layers, vocab_size=120)
        assert drafter.taps_for(shallow) == taps
        drafter.check_target(shallow)
    with pytest.raises(ValueError, match="so at least 3, of a target, got 2"):
        drafter.check_target(tiny_target("llama", num_hidden_layers=2, vocab_size=120))


def test_a_published_drafter_drafts_for_a_target_of_its_size():
    drafter = AutoDrafter.from_pretrained(FIXTURES / "dart")
    target = tiny_target("llama", num_hidden_layers=8, vocab_size=120)
    prompt = random_prompt(6)
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": 16}
    assert torch.equal(target.generate(prompt, assistant_model=drafter, **options), target.generate(prompt, **options))
    assert drafter.last_stats.drafted_per_round[1] == 5


IDS = [4, 7, 9, 20, 33, 50]


def reduced_drafter(target, **settings):
    torch.manual_seed(1)
    drafter = DartDrafter.for_target(target, draft_token_ids=IDS, draft_length=3, initializer_range=0.2)
    for name, value in settings.items():
        setattr(drafter.generation_config, name, value)
    return drafter


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "top_k": 0, "temperature": 1.3}])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"decode_loop": "stock"},
        {"tree_budget": 20},
        {"tree_budget": 200, "tree_top_k": 40},
        {"tree_budget": 4, "tree_scoring": "dart", "tree_top_k": 64},
        {"verification": "rejection"},
    ],
)
def test_an_unmapped_token_is_never_proposed(settings, sampling, proposed):
    target = tiny_target("llama")
    assert_only_mapped_tokens_are_proposed(target, reduced_drafter(target, **settings), sampling, proposed)


@pytest.mark.parametrize("settings", [{}, {"tree_end_rule": "last"}, {"ngram_first_level": 0, "tree_top_k": 64}])
@pytest.mark.parametrize("budget", [5, 40])
def test_nor_is_one_that_an_ngram_model_is_sure_of(settings, budget, proposed):
    target, prompt = tiny_target("llama"), random_prompt(5)
    text = target.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=16)
    drafter = reduced_drafter(target, tree_budget=budget, ngram_weight=50.0, **settings)
    drafter.ngram = NgramModel.from_token_stream([text[0], torch.arange(64)], vocab_size=64)
    assert_only_mapped_tokens_are_proposed(target, drafter, {"do_sample": False}, proposed)


@pytest.fixture
def proposed(monkeypatch):
    """The tokens that any loop proposes to the target from now on."""
    tokens = []
    real_proposal, real_candidates = (
        decode.SpeculativeDecoding._proposal,
        decode.ParallelCandidateGenerator.get_candidates,
    )

    def proposal(self, draft_logits):
        tree = real_proposal(self, draft_logits)
        tokens.extend([] if tree is None else tree.tokens.flatten().tolist())
        return tree

    def candidates(self, input_ids, *args, **kwargs):
        text, logits = real_candidates(self, input_ids, *args, **kwargs)
        tokens.extend(text[0, input_ids.shape[1] :].tolist())
        return text, logits

    monkeypatch.setattr(decode.SpeculativeDecoding, "_proposal", proposal)
    monkeypatch.setattr(decode.ParallelCandidateGenerator, "get_candidates", candidates)
    return tokens


def assert_only_mapped_tokens_are_proposed(target, drafter, sampling, proposed):
    prompt = random_prompt(5)
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 16, **sampling}
    out = target.generate(prompt, assistant_model=drafter, **options)
    assert set(proposed) <= set(IDS)
    assert len(set(proposed)) > 1
    if not sampling["do_sample"]:
        assert torch.equal(out, target.generate(prompt, **options))


def test_a_reduced_vocabulary_starts_with_the_targets_rows():
    target = tiny_target("llama")
    drafter = reduced_drafter(target)
    assert torch.equal(drafter.lm_head.weight, target.lm_head.weight[IDS])
    assert drafter.draft_token_ids.tolist() == IDS
    assert drafter.t2d.nonzero().flatten().tolist() == IDS
    assert DartDrafter.for_target(target).draft_token_ids is None
    assert DartDrafter.for_target(target).draft_depth == 8


def test_a_reduced_vocabulary_round_trips(tmp_path):
    drafter = reduced_drafter(tiny_target("llama"))
    drafter.save_pretrained(tmp_path)
    loaded = AutoDrafter.from_pretrained(tmp_path)
    assert all(torch.equal(weight, drafter.state_dict()[name]) for name, weight in loaded.state_dict().items())
    assert (loaded.config.draft_vocab_size, loaded.config.double_norm) == (len(IDS), False)


def published_folder(folder: Path, name: str, config: dict | None = None, **weights) -> Path:
    """A copy of a fixture's checkpoint, changed; a weight of `None` is left out."""
    published = json.loads((FIXTURES / name / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**published, **(config or {})}))
    tensors = {**load_file(FIXTURES / name / "model.safetensors"), **weights}
    save_file(
        {key: value for key, value in tensors.items() if value is not None},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def test_the_published_checkpoint_is_written_as_it_was_read(tmp_path):
    AutoDrafter.from_pretrained(FIXTURES / "dart_vocab").save_pretrained(tmp_path)
    published, saved = (
        load_file(FIXTURES / "dart_vocab" / "model.safetensors"),
        load_file(tmp_path / "model.safetensors"),
    )
    assert published.keys() == saved.keys()
    assert all(torch.equal(published[name], saved[name]) for name in saved)
    assert AutoDrafter.from_pretrained(tmp_path).config.double_norm


def test_an_embedding_in_the_checkpoint_is_ignored(tmp_path):
    folder = published_folder(tmp_path, "dart", **{"embed_tokens.weight": torch.ones(120, 32)})
    loaded = AutoDrafter.from_pretrained(folder)
    assert "embed_tokens.weight" not in loaded.state_dict()
    expected = AutoDrafter.from_pretrained(FIXTURES / "dart").state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded.state_dict().items())


def test_a_full_vocabulary_needs_no_maps(tmp_path):
    loaded = AutoDrafter.from_pretrained(published_folder(tmp_path, "dart", d2t=None, t2d=None))
    assert loaded.t2d.all()
    assert not loaded.d2t.any()


def test_damaged_maps_are_refused(tmp_path):
    published = load_file(FIXTURES / "dart_vocab" / "model.safetensors")
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match="missing keys: d2t"):
        AutoDrafter.from_pretrained(published_folder(tmp_path / "a", "dart_vocab", d2t=None))
    for d2t in (published["d2t"] + 1, torch.zeros_like(published["d2t"])):
        with pytest.raises(ValueError, match="d2t maps 48 draft tokens and t2d marks 48"):
            AutoDrafter.from_pretrained(published_folder(tmp_path / "a", "dart_vocab", d2t=d2t))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"draft_length": -1}, "draft_length >= 0, got -1"),
        ({"draft_length": 0, "shifted": False}, "draft_length >= 1, got 0"),
        ({"draft_vocab_size": 65}, r"draft_vocab_size must be in \[1, 64\]"),
        ({"num_hidden_layers": 2}, "one decoder layer, got num_hidden_layers=2"),
        ({"tapped_hidden_states": []}, "needs tapped_hidden_states"),
    ],
)
def test_a_config_that_cannot_draft_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        DartDrafter(DartConfig(**{"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, **fields}))


@pytest.mark.parametrize("ids", [[], [3, 3], [-1], [64]])
def test_draft_tokens_that_are_none_of_the_targets_are_refused(ids):
    with pytest.raises(ValueError, match="draft_token_ids must be one or more distinct tokens"):
        DartDrafter.for_target(tiny_target("llama"), draft_token_ids=ids)


def test_a_reduced_vocabulary_without_its_tokens_is_refused():
    with pytest.raises(ValueError, match="pass the tokens as draft_token_ids"):
        DartDrafter.for_target(tiny_target("llama"), draft_vocab_size=10)


def test_another_width_depth_or_vocabulary_is_refused():
    drafter = tiny_drafter("dart", tiny_target("llama", num_hidden_layers=8))
    with pytest.raises(ValueError, match=r"hidden size 32.*DartDrafter.for_target"):
        drafter.check_target(tiny_target("llama", hidden_size=48))
    with pytest.raises(ValueError, match="made for a deeper target"):
        drafter.check_target(tiny_target("llama", num_hidden_layers=3))
    with pytest.raises(ValueError, match="vocabulary mismatch"):
        drafter.check_target(tiny_target("llama", vocab_size=80, num_hidden_layers=8))
    with pytest.raises(ValueError, match="num_assistant_tokens must be between 1 and 4"):
        drafter.checked_depth(5)


def test_draft_tokens_counts_what_is_drafted_and_not_the_masks():
    target = tiny_target("llama")
    for shifted in (True, False):
        drafter = DartDrafter.for_target(target, draft_tokens=5, shifted=shifted)
        assert (drafter.max_draft_depth, drafter.config.draft_length) == (5, 4 if shifted else 5)
    assert DartDrafter.for_target(target).max_draft_depth == 8
    assert DartDrafter.for_target(target, draft_tokens=5, draft_length=4).max_draft_depth == 5
    with pytest.raises(ValueError, match=r"draft_length counts masks: 8 drafted tokens .* take 7, got draft_length=8"):
        DartDrafter.for_target(target, draft_tokens=8, draft_length=8)
