"""The published rule may tap a layer more than once, and all that reads, trains, stores or writes taps keeps each of them."""

from fractions import Fraction

import pytest
import torch

from hf_pardraft import AutoDrafter
from hf_pardraft.checkpoints.convert import convert
from hf_pardraft.checkpoints.export import export_drafter
from hf_pardraft.models.configuration_dflash import default_target_layer_ids
from hf_pardraft.models.inputs import DraftInputs
from hf_pardraft.training.target.feature_writing import cache_features
from published_checkpoints import change_config, config_of
from tiny_models import random_prompt, tiny_drafter, tiny_target
from training.tiny_training import losses, trainer_for, written_text

NUM_LAYERS = 8
# Six taps between layers 1 and 5: 1, 1.8, 2.6, 3.4, 4.2 and 5.
REPEATED = [1, 2, 3, 3, 4, 5]
# What each kind's publishers call their layout.
PUBLISHED = {"dflash": "zlab", "dflare": "angelslim"}


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3", num_hidden_layers=NUM_LAYERS)


def published(kind, target, folder):
    """A checkpoint in its publishers' layout that names no layers, and the drafter that it was written from."""
    written = tiny_drafter(kind, target, num_layers=len(REPEATED), target_layer_ids=REPEATED)
    # The mixtures of a fresh drafter are too much alike to tell taps apart.
    for name, parameter in written.named_parameters():
        if name == "layer_fusion_weights":
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    folder.mkdir()
    export_drafter(written, folder, PUBLISHED[kind])
    nested = config_of(folder)["dflash_config"]
    change_config(folder, dflash_config={name: nested[name] for name in nested if name != "target_layer_ids"})
    assert "target_layer_ids" not in (folder / "config.json").read_text()
    return written


def test_the_rule_is_the_published_one_for_every_depth_and_number_of_taps():
    """In whole numbers, halves to the even neighbour, as (layers, taps) = (16, 16) has them twice."""
    assert default_target_layer_ids(16, 16) == [1, 2, 3, 3, 4, 5, 6, 7, 7, 8, 9, 10, 11, 11, 12, 13]
    for num_layers in range(3, 82):
        assert default_target_layer_ids(num_layers, 1) == [num_layers // 2]
        for num_taps in range(2, 42):
            places = [1 + Fraction(i * (num_layers - 3 - 1), num_taps - 1) for i in range(num_taps)]
            assert default_target_layer_ids(num_layers, num_taps) == [round(place) for place in places]


@torch.no_grad()
@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_checkpoint_without_layer_numbers_drafts_as_the_one_it_is_without(kind, target, tmp_path):
    written = published(kind, target, tmp_path / "published")
    drafter = AutoDrafter.from_pretrained(tmp_path / "published")
    assert drafter.config.target_layer_ids == REPEATED
    assert drafter.tapped_hidden_states == [layer + 1 for layer in REPEATED]
    prompt = random_prompt(9)
    hidden = target(prompt, output_hidden_states=True).hidden_states
    features = torch.cat([hidden[layer + 1] for layer in REPEATED], dim=-1)[:, :-1]
    positions = torch.arange(9)[None]
    context = DraftInputs(prompt, positions, features, positions[:, :-1])
    found, expected = (each.draft(context, each.new_draft_state(target), 4) for each in (drafter, written))
    assert torch.equal(found, expected)
    # In generate the same states arrive, whichever loop asks for them.
    options = {"do_sample": False, "max_new_tokens": 16, "attention_mask": torch.ones_like(prompt)}
    plain = target.generate(prompt, **options)
    drafts = []
    draft = drafter.draft
    drafter.draft = lambda context, *rest: drafts.append(context.features) or draft(context, *rest)
    for loop in ("native", "stock"):
        drafter.generation_config.decode_loop = loop
        drafts.clear()
        assert torch.equal(target.generate(prompt, assistant_model=drafter, **options), plain)
        torch.testing.assert_close(drafts[0][:, :8], features)


@pytest.mark.parametrize("kind", PUBLISHED)
def test_it_trains_alike_on_live_and_on_stored_states(kind, target, tmp_path):
    published(kind, target, tmp_path / "published")
    text = written_text(target, rows=4, length=12)

    def trained(name, **settings):
        drafter = AutoDrafter.from_pretrained(tmp_path / "published")
        trainer = trainer_for(kind, target, text, tmp_path / name, drafter=drafter, max_steps=3, **settings)
        trainer.train()
        return losses(trainer)

    live = trained("live")
    taps = AutoDrafter.from_pretrained(tmp_path / "published").taps_for(target)
    cache_features(target, taps, text, tmp_path / "states", dtype="float32")
    assert trained("stored", features_folder=str(tmp_path / "states")) == pytest.approx(live, abs=1e-5)
    assert live[-1] < live[0]


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("dflash", "zlab"), ("dflash", "speculators"), ("dflash", "muse-glimmer"), ("dflare", "angelslim")],
)
def test_every_layout_keeps_repeated_taps(kind, layout, target, tmp_path):
    published(kind, target, tmp_path / "published")
    convert(tmp_path / "published", tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "there", layout)
    convert(tmp_path / "there", tmp_path / "back")
    first, last = (AutoDrafter.from_pretrained(tmp_path / name) for name in ("published", "back"))
    assert last.config.target_layer_ids == REPEATED
    weights = last.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in first.state_dict().items())


def test_a_fresh_drafter_follows_the_rule_too(target):
    drafter = tiny_drafter("dflash", target, num_layers=len(REPEATED))
    assert drafter.config.target_layer_ids == REPEATED
    assert drafter.fc.in_features == len(REPEATED) * target.config.hidden_size
