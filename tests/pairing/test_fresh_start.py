"""A fresh drafter's loss is near ln V on every target, and a saved one is loaded as it is."""

import math

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

from hf_pardraft import AutoDrafter, DartDrafter, DFlareDrafter, DFlashDrafter
from hf_pardraft.demo.family import SHIPPED_FAMILY
from hf_pardraft.pairing.fresh_start import MOST_EXCESS, blind_scale
from tiny_models import MASK_TOKEN_ID, VOCAB_SIZE, random_prompt, tiny_target
from training.tiny_training import trainer_for

CLASSES = {"dflash": DFlashDrafter, "dflare": DFlareDrafter, "dart": DartDrafter}
BLIND = math.log(VOCAB_SIZE)


def fresh(kind, target, seed=0, **fields):
    torch.manual_seed(seed)
    if kind != "dart":
        fields = {"num_layers": 2, "block_size": 5, "mask_token_id": MASK_TOKEN_ID, **fields}
    return CLASSES[kind].for_target(target, **fields)


@torch.no_grad()
def first_loss(drafter, kind, target, folder):
    """Cross-entropy with texts that hold every token."""
    rows = [random_prompt(24, seed)[0].tolist() for seed in range(8)]
    text = Dataset.from_list([{"input_ids": ids, "labels": ids} for ids in rows])
    arguments = {"drafter": drafter, "objective": "cross_entropy", "loss_gamma": None, "num_anchors": "all"}
    trainer = trainer_for(kind, target, text, folder, **arguments)
    return trainer.compute_loss(drafter.eval(), trainer.data_collator(list(trainer.train_dataset))).item()


def with_unseen_tokens(target):
    """As training leaves them: the tokens that never came up, the mask among them, have nearly one embedding."""
    with torch.no_grad():
        embedding = target.get_input_embeddings().weight
        direction = torch.randn(embedding.shape[1], generator=torch.Generator().manual_seed(5))
        embedding[VOCAB_SIZE // 2 :] = 4 * direction / direction.norm() + 0.05 * embedding[VOCAB_SIZE // 2 :]
        embedding[: VOCAB_SIZE // 2] -= 2 * direction / direction.norm()
    return target


TARGETS = {
    "untied": lambda: tiny_target("qwen3"),
    "tied": lambda: tiny_target("qwen3", tie_word_embeddings=True),
    "tied, with tokens never seen": lambda: with_unseen_tokens(tiny_target("llama", tie_word_embeddings=True)),
    "large head": lambda: tiny_target("llama", initializer_range=1.0),
    "small head": lambda: tiny_target("llama", initializer_range=0.01),
    "scaled embedding": lambda: tiny_target("gemma3", tie_word_embeddings=True, initializer_range=0.5),
    "experts": lambda: tiny_target("gpt_oss", initializer_range=0.5),
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("kind", CLASSES)
def test_the_first_loss_is_near_that_of_a_blind_guess(kind, name, tmp_path):
    target = TARGETS[name]()
    drafter = fresh(kind, target)
    assert abs(first_loss(drafter, kind, target, tmp_path) - BLIND) < 0.5
    if name in ("tied, with tokens never seen", "large head"):
        # Which it is not by itself.
        torch.nn.init.ones_(drafter.norm.weight)
        assert first_loss(drafter, kind, target, tmp_path) > BLIND + 1.5


@pytest.mark.parametrize(
    "fields", [{"num_layers": 1}, {"num_layers": 6}, {"fusion": "fc"}, {"initializer_range": 0.02}]
)
def test_whatever_the_drafters_shape_is(fields, tmp_path):
    target = TARGETS["tied, with tokens never seen"]()
    drafter = fresh("dflare", target, **fields)
    assert abs(first_loss(drafter, "dflare", target, tmp_path) - BLIND) < 0.8


def test_a_reduced_vocabulary_starts_near_its_own_blind_guess(tmp_path):
    target = tiny_target("llama", initializer_range=1.0)
    drafter = fresh("dart", target, draft_token_ids=range(3, 50))
    assert drafter.norm.weight[0] < 0.5
    assert abs(first_loss(drafter, "dart", target, tmp_path) - math.log(47)) < 0.5


def cost_of_the_unlikeliest(logits, scale):
    kept = [[scale * z for z in row if z != -math.inf] for row in logits.tolist()]
    return max(math.log(sum(math.exp(z) for z in row)) - min(row) - math.log(len(row)) for row in kept)


@pytest.mark.parametrize("width", [0.1, 2.0, 30.0])
def test_the_scale_is_the_largest_with_which_no_token_costs_more(width):
    generator = torch.Generator().manual_seed(0)
    logits = width * torch.randn(3, 40, generator=generator, dtype=torch.float64)
    # One token far above the others, and one that can't be drafted.
    logits[1, 7] = 5 * width
    logits[2, 3] = -torch.inf
    scale = blind_scale(logits)
    if width == 0.1:
        assert scale == 1
        assert cost_of_the_unlikeliest(logits, 1.0) < MOST_EXCESS
    else:
        assert 0 < scale < 1
        assert cost_of_the_unlikeliest(logits, scale) == pytest.approx(MOST_EXCESS, abs=1e-3)


@pytest.mark.parametrize("logits", [torch.zeros(2, 5), torch.full((2, 5), torch.nan), torch.full((2, 5), torch.inf)])
def test_logits_that_say_nothing_change_nothing(logits):
    assert blind_scale(logits) == 1


def test_the_random_state_is_that_of_the_weights_alone():
    target = TARGETS["tied"]()
    first = fresh("dflash", target)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    bare = DFlashDrafter(first.config)
    assert torch.equal(torch.get_rng_state(), state)
    again = fresh("dflash", target).state_dict()
    for name, weight in first.state_dict().items():
        assert torch.equal(again[name], weight)
        assert torch.equal(bare.state_dict()[name], weight) == (name != "norm.weight")


@pytest.mark.parametrize("kind", CLASSES)
def test_a_target_without_weights_leaves_the_norm_as_it_is(kind):
    with torch.device("meta"):
        target = tiny_target("llama")
    assert torch.equal(fresh(kind, target).norm.weight, torch.ones(32))


@pytest.mark.parametrize("kind", CLASSES)
def test_a_checkpoint_is_loaded_as_it_is(kind, tmp_path):
    """One of before, with a norm of ones, and one that is shipped."""
    drafter = fresh(kind, TARGETS["tied"]())
    torch.nn.init.ones_(drafter.norm.weight)
    drafter.save_pretrained(tmp_path, with_code=False)
    for folder in (tmp_path, SHIPPED_FAMILY / kind):
        saved, loaded = load_file(folder / "model.safetensors"), AutoDrafter.from_pretrained(folder).state_dict()
        assert all(torch.equal(loaded[name], weight) for name, weight in saved.items())
