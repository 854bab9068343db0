"""The same sampled call with a drafter and without: the text, and where torch's generator stands afterwards."""

from typing import Any

import torch

from tiny_models import make_lasting_oracle, tiny_drafter, tiny_target

KINDS = ("pard", "dflash", "dflare", "dart")
BUDGETS = (0, 10)
EXPERTS = ("gpt_oss", "qwen3_moe")
NEW = 20
RATES = [0.9, 0.8, 0.8, 0.7]
SEED = 7


def double_target(architecture: str = "llama", **overrides):
    """A target in float64, in which no draw is so near a boundary that the shape of a forward decides it."""
    target = tiny_target(architecture, **overrides).double()
    if architecture in EXPERTS:
        # Fused ones know no float64.
        target.set_experts_implementation("eager")
    return target


def call(target, batch, **options) -> Any:
    """What `generate` writes from where torch's generator stands."""
    return target.generate(**batch, **{"do_sample": True, "top_k": 0, "max_new_tokens": NEW, **options})


def seeded(target, batch, seed: int = SEED, **options) -> tuple[Any, torch.Tensor]:
    """What `generate` writes after `torch.manual_seed(seed)`, and the state of the generator after it."""
    torch.manual_seed(seed)
    return call(target, batch, **options), torch.get_rng_state()


def unpadded(sequences: torch.LongTensor, mask: torch.LongTensor) -> list[torch.LongTensor]:
    """Each text without the padding of its prompt. `mask` may be of fewer items, each of which was continued several times."""
    several = len(sequences) // len(mask)
    padding = (mask == 0).sum(dim=1).repeat_interleave(several).tolist()
    return [text[count:] for text, count in zip(sequences, padding, strict=True)]


def another(text: torch.LongTensor) -> torch.LongTensor:
    """A text that is wrong everywhere."""
    return (text + 1) % 64


def knowing(kind: str, target, texts: list[torch.LongTensor], budget: int = 0, rates=RATES, runner_up=0.6, **settings):
    """A drafter that knows most of `texts`, one for each item."""
    drafter = tiny_drafter(kind, target, depth=len(rates))
    for name, value in {"tree_budget": budget, **settings}.items():
        setattr(drafter.generation_config, name, value)
    return make_lasting_oracle(drafter, texts, rates, runner_up)


def untrained(kind: str, target, budget: int = 0):
    drafter = tiny_drafter(kind, target)
    drafter.generation_config.tree_budget = budget
    return drafter


def assert_plain_text(target, batch, drafter, plain: tuple[Any, torch.Tensor], seed: int = SEED, **options) -> None:
    """Assert that a drafted call writes what `plain`, a result of [`seeded`], says, and leaves the generator there."""
    found, state = seeded(target, batch, seed, assistant_model=drafter, **options)
    expected, expected_state = plain
    assert torch.equal(found, expected)
    assert torch.equal(state, expected_state)


def assert_every_drafter_writes_it(target, batch, kind: str, budget: int, seed: int = SEED, **options) -> None:
    """Assert it of a drafter that knows most of the text, of one that is always wrong, and of one that knows nothing."""
    plain = seeded(target, batch, seed, **options)
    texts = unpadded(plain[0], batch["attention_mask"])
    oracle = knowing(kind, target, texts, budget)
    assert_plain_text(target, batch, oracle, plain, seed, **options)
    assert oracle.last_stats.tau > 1.5
    wrong = knowing(kind, target, list(map(another, texts)), rates=[1.0] * 4)
    assert_plain_text(target, batch, wrong, plain, seed, **options)
    assert wrong.last_stats.tau < 1.2
    assert_plain_text(target, batch, untrained(kind, target, budget), plain, seed, **options)
