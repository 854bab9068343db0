"""What the drafters of SmolLM2-135M-Instruct were trained from: drafters whose layers are the target's own last ones.

    python benchmarks/smollm2_start.py --target SMOLLM2 --kind dflash --output start-dflash

- DFlash and DFlare: two layers, block 8, the attention and feed-forward weights of the target's layers 28 and 29. The query and
  key norms, which SmolLM2 has none of, are the root mean squares that its queries and keys have on a text. Context features
  begin as the input of the target's last layer, the other taps beside it small (DFlash) or at a small weight (DFlare). The final
  norm is the target's (DFlash), or 0.3 of it (DFlare).
- DART: its layer as the target's last one, for the half of its inputs that are hidden states; its residual begins as the input of
  that layer, its head as the target's.
- PARD: the first two layers, embedding and head of the target, the final norm scaled by 0.3, at which these layers' guesses are
  least wrong (8.2 nats a token rather than 18.1).

Training then reads docs/smollm2.md's commands.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from hf_pardraft import DartDrafter, DFlareDrafter, DFlashDrafter
from hf_pardraft.pairing.cut_down import cut_down_copy
from hf_pardraft.user_input.models import load_model, load_tokenizer

KINDS = ("pard", "dflash", "dflare", "dart")
# Outputs of these layers are read; DART reads the hidden states with these indices, so the outputs of layers 1, 17 and 28.
TARGET_LAYER_IDS, TAPPED = [1, 9, 17, 25, 28], [2, 18, 29]
NUM_LAYERS, BLOCK_SIZE, DART_TOKENS, PARD_LAYERS, PARD_NORM = 2, 8, 6, 2, 0.3
# Of the target's final norm.
NORM = {"dflash": 1.0, "dflare": 0.3}
# How strong what is not copied is beside what is.
SMALL, PREFERENCE = 0.1, 2.0
SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "Once upon a time, there was a little girl who liked mathematics and python code.",
)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


def copy_weights(names: tuple[str, ...], source: torch.nn.Module, copy: torch.nn.Module) -> None:
    for name in names:
        getattr(copy, name).weight.copy_(getattr(source, name).weight)


def root_mean_square(values: torch.Tensor, size: int) -> torch.Tensor:
    """Of the vectors of so many values that they are made of, the mean size."""
    return values.unflatten(-1, (-1, size)).pow(2).mean(-1).sqrt().mean()


def block_drafter(
    kind: str,
    target: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    num_layers: int = NUM_LAYERS,
    block_size: int = BLOCK_SIZE,
    target_layer_ids: Sequence[int] = TARGET_LAYER_IDS,
    **fields: Any,
) -> DFlashDrafter:
    """A DFlash or DFlare drafter of the target's last layers; `fields` are others of its configuration."""
    drafter_class = DFlashDrafter if kind == "dflash" else DFlareDrafter
    drafter = drafter_class.for_target(
        target, num_layers, block_size, tokenizer=tokenizer, target_layer_ids=[*target_layer_ids], **fields
    )
    hidden_states = target(
        **tokenizer(" ".join(SENTENCES), return_tensors="pt"), output_hidden_states=True
    ).hidden_states
    first, size = len(target.model.layers) - num_layers, target.config.hidden_size
    for number, layer in enumerate(drafter.layers, start=first):
        source, attention = target.model.layers[number], target.model.layers[number].self_attn
        copy_weights(ATTENTION, attention, layer.self_attn)
        copy_weights(FEED_FORWARD, source.mlp, layer.mlp)
        copy_weights(("input_layernorm", "post_attention_layernorm"), source, layer)
        inputs, head_dim = source.input_layernorm(hidden_states[number]), layer.self_attn.head_dim
        layer.self_attn.q_norm.weight.fill_(root_mean_square(attention.q_proj(inputs), head_dim))
        layer.self_attn.k_norm.weight.fill_(root_mean_square(attention.k_proj(inputs), head_dim))
        if kind == "dflare":
            layer.self_attn.k_proj_target.weight.copy_(attention.k_proj.weight)
            layer.self_attn.v_proj_target.weight.copy_(attention.v_proj.weight)
    if hasattr(drafter, "fc"):
        drafter.fc.weight.mul_(SMALL)
        drafter.fc.weight[:, -size:] += torch.eye(size)
    else:
        drafter.layer_fusion_weights.zero_()
        drafter.layer_fusion_weights[:, -1] = PREFERENCE
    drafter.hidden_norm.weight.copy_(target.model.layers[-1].input_layernorm.weight)
    drafter.norm.weight.copy_(target.model.norm.weight * NORM[kind])
    return drafter


def dart_drafter(target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, **fields: Any) -> DartDrafter:
    """A DART drafter whose layer is the target's last one; `fields` are others of its configuration."""
    drafter = DartDrafter.for_target(target, draft_tokens=DART_TOKENS, tapped_hidden_states=TAPPED, **fields)
    hidden_states = target(
        **tokenizer(" ".join(SENTENCES), return_tensors="pt"), output_hidden_states=True
    ).hidden_states
    layer, source, size = drafter.midlayer, target.model.layers[-1], target.config.hidden_size
    drafter.fc.weight.mul_(SMALL)
    drafter.fc.weight[:, -size:] += torch.eye(size)
    drafter.norm.weight.copy_(target.model.norm.weight)
    copy_weights(FEED_FORWARD, source.mlp, layer.mlp)
    layer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight)
    layer.hidden_norm.weight.copy_(source.input_layernorm.weight)
    # Its inputs are the next token's embedding, which the target's layer knows nothing of, and the hidden states.
    for name in ATTENTION[:3]:
        weight = getattr(layer.self_attn, name).weight
        weight[:, :size].mul_(0.5)
        weight[:, size:] = getattr(source.self_attn, name).weight
    layer.self_attn.o_proj.weight.copy_(source.self_attn.o_proj.weight)
    layer.mask_rep[:size].normal_(0, SMALL * float(hidden_states[TAPPED[-1]].pow(2).mean().sqrt()))
    layer.mask_rep[size:].normal_()
    return drafter


def pard_base(target: LlamaForCausalLM) -> LlamaForCausalLM:
    """The target's first layers."""
    base, _ = cut_down_copy(target, PARD_LAYERS)
    for copy, source in zip(base.model.layers, target.model.layers, strict=False):
        copy.load_state_dict(source.state_dict())
    base.model.norm.weight.mul_(PARD_NORM)
    return base


@torch.no_grad()
def save_start(
    kind: str, target_folder: str, output: Path, draft_vocabulary: torch.LongTensor | None = None, **fields: Any
) -> None:
    """Save what a drafter of this kind starts from; `fields` are those of its configuration that differ."""
    torch.manual_seed(0)
    target, tokenizer = load_model(target_folder, dtype="float32"), load_tokenizer(target_folder)
    if kind == "pard":
        pard_base(target).save_pretrained(output)
        tokenizer.save_pretrained(output)
    elif kind == "dart":
        dart_drafter(target, tokenizer, **fields).save_pretrained(output)
    else:
        drafter = block_drafter(kind, target, tokenizer, **fields)
        drafter.set_draft_vocabulary(draft_vocabulary)
        drafter.save_pretrained(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--kind", required=True, choices=KINDS)
    parser.add_argument("--output", required=True, type=Path)
    arguments = parser.parse_args()
    save_start(arguments.kind, arguments.target, arguments.output)


if __name__ == "__main__":
    main()
