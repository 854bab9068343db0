"""Tiny random targets of many architectures, and drafters that are right as often as a test wants."""

import copy
import functools

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from hf_pardraft import DartDrafter, DFlareDrafter, DFlashDrafter, PardDrafter
from hf_pardraft.generation.tree.token_tree import TokenTree, ancestors_of

VOCAB_SIZE = 64
MASK_TOKEN_ID = 63
# No special token: a random model that writes it by chance would end its text.
ARCHITECTURES = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 8}),
    "mistral": (MistralConfig, {"sliding_window": 6}),
    "gemma3": (
        Gemma3TextConfig,
        {"head_dim": 8, "sliding_window": 6, "sliding_window_pattern": 2},
    ),
    "gpt_oss": (GptOssConfig, {"head_dim": 8, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "phi3": (Phi3Config, {}),
}


# What these do with a target, PARD or DFlash does too: with a few targets it has been seen.
FEWER_ARCHITECTURES = {
    "dflare": ("qwen3", "gemma3"),
    "dart": ("llama", "gemma3", "gpt_oss"),
    "pard2": ("llama", "gemma3", "qwen2"),
}


def every_architecture(kinds) -> list[tuple[str, str]]:
    """Architectures and kinds of drafters to try together."""
    return [
        (architecture, kind)
        for architecture in ARCHITECTURES
        for kind in kinds
        if architecture in FEWER_ARCHITECTURES.get(kind, ARCHITECTURES)
    ]


def every_pair_with_a_budget(pairs, budgets) -> list[tuple[str, str, int]]:
    """Architectures and kinds, each with one size of tree: every two of the three meet, and Gemma meets all.

    A tree is the business of two parties: it grows from what a kind of drafter proposes, and is read as an architecture masks.
    """
    cases = []
    for architecture, kind in pairs:
        known = [(other, budget) for other, kind_of_other, budget in cases if kind_of_other == kind]
        of_architecture = [budget for other, _, budget in cases if other == architecture]
        fewest = min(budgets, key=lambda b: (of_architecture.count(b), [budget for _, budget in known].count(b)))
        cases += [(architecture, kind, b) for b in (budgets if architecture == "gemma3" else [fewest])]
    return cases


def tiny_target(architecture: str = "qwen3", seed: int = 0, **overrides) -> PreTrainedModel:
    """A random model with weights large enough that its argmax is no near tie."""
    config_class, fields = ARCHITECTURES[architecture]
    torch.manual_seed(seed)
    config = config_class(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "initializer_range": 0.2,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": None,
            **fields,
            **overrides,
        }
    )
    return AutoModelForCausalLM.from_config(config).eval()


def tiny_drafter(kind: str, target: PreTrainedModel, depth: int = 4, seed: int = 1, **overrides):
    """An untrained drafter for `target` that drafts `depth` tokens a round; `overrides` are fields of its config."""
    vocab_size = target.config.get_text_config().vocab_size
    if kind == "pard":
        return tiny_pard_drafter(vocab_size, depth, seed, overrides)
    if kind == "pard2":
        base = tiny_target("qwen3", seed=seed, **{"vocab_size": vocab_size, "num_hidden_layers": 2, **overrides})
        drafter = PardDrafter.from_causal_lm(base, vocab_size - 1, target=target, target_scale=1.0)
        # As if trained: a fresh projection adds nothing.
        torch.nn.init.normal_(drafter.target_proj.weight, std=0.3, generator=torch.Generator().manual_seed(seed))
        drafter.generation_config.num_assistant_tokens = depth
        return drafter
    torch.manual_seed(seed)
    if kind == "dart":
        return DartDrafter.for_target(target, **{"draft_length": depth - 1, "initializer_range": 0.2, **overrides})
    fields = {"num_layers": 2, "block_size": depth + 1, "mask_token_id": vocab_size - 1}
    if kind == "dflare":
        # So shallow a target has one tap by default, and then there is nothing to mix.
        fields["target_layer_ids"] = list(range(target.config.get_text_config().num_hidden_layers - 1))
    drafter_class = DFlareDrafter if kind == "dflare" else DFlashDrafter
    return drafter_class.for_target(target, **{**fields, **overrides})


_made: dict[str, tuple[PardDrafter, torch.Tensor]] = {}


def tiny_pard_drafter(vocab_size: int, depth: int, seed: int, overrides: dict) -> PardDrafter:
    """See [`tiny_drafter`]. What depends on no target is made once for all who ask, and copied in a quarter of the time."""
    around = torch.get_default_dtype(), torch.get_default_device(), torch.is_inference_mode_enabled()
    key = repr((vocab_size, depth, seed, overrides, around))
    if key not in _made:
        base = tiny_target("qwen3", seed=seed, **{"vocab_size": vocab_size, "num_hidden_layers": 2, **overrides})
        drafter = PardDrafter.from_causal_lm(base, mask_token_id=vocab_size - 1)
        drafter.generation_config.num_assistant_tokens = depth
        _made[key] = drafter, torch.get_rng_state()
    drafter, random_numbers = _made[key]
    # They go on as after making it.
    torch.set_rng_state(random_numbers)
    return copy.deepcopy(drafter)


class StandIn(nn.Module):
    """A target's embedding and head, which is all that a draft state takes from it."""

    def __init__(self, inputs):
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(inputs["target.embed_tokens.weight"])
        head = inputs["target.lm_head.weight"]
        self.head = nn.Linear(head.shape[1], head.shape[0], bias=False)
        self.head.weight = nn.Parameter(head)

    def get_input_embeddings(self):
        return self.embedding

    def get_output_embeddings(self):
        return self.head


def make_oracle(drafter, continuation, rates: list[float], seed: int = 0, runner_up: float = 0.0):
    """Let `drafter` run as ever, but replace its logits: position k is right with probability `rates[k]`.

    Args:
        drafter: the drafter to change in place.
        continuation: the whole text that the target will write, prompt included and padding not: `(length,)`, or a list of
            one such tensor per item of the batch.
        rates: one probability per draft position.
        runner_up: the share of wrong positions whose second choice is right, which a tree can make use of.
    """
    generator = torch.Generator().manual_seed(seed)
    texts = [text.tolist() for text in (continuation if isinstance(continuation, (list, tuple)) else [continuation])]
    real_draft, real_new_state = drafter.draft, drafter.new_draft_state

    def new_draft_state(target):
        state = real_new_state(target)
        follow_rows(state, len(texts))
        return state

    def draft(context, state, depth):
        logits = real_draft(context, state, depth)
        assert logits.shape[0] == len(state.oracle_items)
        vocab_size, columns = drafter.config.vocab_size, drafter.draft_token_ids
        scores = torch.zeros(*logits.shape[:2], vocab_size, dtype=logits.dtype)
        anchors = context.new_positions[:, -1].tolist()
        for index, (item, anchor) in enumerate(zip(state.oracle_items, anchors, strict=True)):
            known = (texts[item][anchor + 1 : anchor + 1 + depth] + [0] * depth)[:depth]
            chances = torch.rand(depth, 2, generator=generator).tolist()
            for k, (truth, (chance, second_chance)) in enumerate(zip(known, chances, strict=True)):
                is_right = chance < rates[k]
                scores[index, k, truth] = 10.0 if is_right else 9.5 * (second_chance < runner_up)
                scores[index, k, (truth + 1) % vocab_size] = 0.0 if is_right else 10.0
        return logits.copy_(scores if columns is None else scores[..., columns])

    drafter.draft, drafter.new_draft_state = draft, new_draft_state
    return drafter


def make_lasting_oracle(
    drafter, texts: list[torch.LongTensor], rates: list[float], runner_up: float = 0.0, seed: int = 0
):
    """Let `drafter` know, at some places of a text, what comes there; elsewhere it proposes what it thinks itself.

    What it knows depends on the place alone, and not, as with [`make_oracle`], on how often it was asked: two loops that call it
    differently get the same drafts. And since the others are its own, they tell whether it has read what it should have.

    Args:
        drafter: the drafter to change in place.
        texts: one per item, see [`make_oracle`].
        rates: one probability per draft position.
        runner_up: the share of the other positions where it has an inkling, which a tree can make use of.
    """
    generator = torch.Generator().manual_seed(seed)
    depth, longest = len(rates), max(map(len, texts))
    padded = torch.stack([torch.nn.functional.pad(text, (0, longest + depth + 1 - len(text))) for text in texts])
    truth = torch.stack([padded[:, 1 + k : 1 + k + longest] for k in range(depth)], dim=2)
    chances = torch.rand(2, *truth.shape, generator=generator)
    lift = torch.where(chances[0] < torch.tensor(rates), 40.0, torch.where(chances[1] < runner_up, 3.0, 0.0))
    real_draft, real_draft_static, real_new_state = drafter.draft, drafter.draft_static, drafter.new_draft_state

    def new_draft_state(target):
        state = real_new_state(target)
        follow_rows(state, len(texts))
        return state

    def lifted(logits, state, anchors):
        items, anchors = torch.tensor(state.oracle_items), anchors.clamp(max=longest - 1)
        known = slice(0, logits.shape[1])
        added = torch.zeros(*logits.shape[:2], drafter.config.vocab_size, dtype=logits.dtype)
        added.scatter_(2, truth[items, anchors, known, None], lift[items, anchors, known, None].to(logits.dtype))
        return logits + (added if drafter.draft_token_ids is None else added[..., drafter.draft_token_ids])

    drafter.new_draft_state = new_draft_state
    drafter.draft = lambda context, state, depth: lifted(
        real_draft(context, state, depth), state, context.new_positions[:, -1]
    )
    drafter.draft_static = lambda inputs, state, lengths, depth: lifted(
        real_draft_static(inputs, state, lengths, depth), state, inputs.last(inputs.positions)[:, 0]
    )
    return drafter


def follow_rows(state, batch: int) -> None:
    """Let a draft state remember which items of the batch it still holds."""
    state.oracle_items = list(range(batch))
    select_items = state.cache.select_items

    def select_and_note(items):
        state.oracle_items = [state.oracle_items[item] for item in items]
        select_items(items)

    state.cache.select_items = select_and_note


def batch_oracle(kind: str, target: PreTrainedModel, texts: torch.LongTensor, mask: torch.LongTensor, budget: int = 0):
    """A drafter that is mostly right about `texts (batch, length)`, which continue prompts padded on the left as `mask` says."""
    unpadded = [text[len(item) - int(item.sum()) :] for text, item in zip(texts, mask, strict=True)]
    drafter = make_oracle(tiny_drafter(kind, target), unpadded, [0.9, 0.8, 0.8, 0.8], runner_up=0.6)
    drafter.generation_config.tree_budget = budget
    return drafter


def ragged_prompts(lengths: tuple[int, ...]) -> tuple[torch.LongTensor, torch.LongTensor]:
    """Random prompts of these lengths, padded on the left, and their mask."""
    longest = max(lengths)
    prompts = [random_prompt(length, seed=seed)[0] for seed, length in enumerate(lengths)]
    ids = torch.stack([torch.nn.functional.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
    return ids, torch.stack([torch.arange(longest) >= longest - length for length in lengths]).long()


def batch_of(*lengths: int) -> dict[str, torch.Tensor]:
    """What `generate` takes of [`ragged_prompts`]."""
    ids, mask = ragged_prompts(lengths)
    return {"input_ids": ids, "attention_mask": mask}


def random_prompt(length: int, seed: int = 0) -> torch.LongTensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE - 1, (1, length), generator=generator)


@functools.cache
def greedy_text(architecture: str, length: int, new_tokens: int, seed: int = 0, attention: str | None = None):
    """What a [`tiny_target`] writes after a [`random_prompt`], `(1, length + new_tokens)`; found once for all who ask."""
    target, prompt = tiny_target(architecture), random_prompt(length, seed)
    if attention is not None:
        target.set_attn_implementation(attention)
    return target.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=new_tokens)


def published_tree(parents: list[int], tokens: list[int]) -> tuple[TokenTree, list[int]]:
    """A tree of the fixtures, its nodes sorted by depth, and where each of our slots stands in the fixture."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    order = sorted(range(1, len(parents)), key=lambda node: depths[node])
    slot = {0: 0} | {node: index for index, node in enumerate(order, start=1)}
    slot_parents = torch.tensor([[slot[parents[node]] for node in order]], dtype=torch.long)
    tree = TokenTree(
        torch.tensor([[tokens[node - 1] for node in order]], dtype=torch.long),
        slot_parents,
        torch.tensor([[depths[node] for node in order]], dtype=torch.long),
        ancestors_of(slot_parents, max(depths)),
    )
    return tree, [0, *order]
