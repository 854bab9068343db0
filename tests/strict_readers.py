"""Readers of the served layouts as strict as a server ought to be, written from docs/formats.md: no import from the package.

Each takes a folder and refuses what docs/formats.md does not say: another field where one is needed, a weight too many or too
few, a shape or dtype that differs. Where a server computes, `draft_hidden` computes too, in plain tensor arithmetic.
"""

import json
import re
from pathlib import Path

import torch
from safetensors import safe_open


class RefusedError(Exception):
    """What a reader says instead of loading."""


def need(condition: bool, complaint: str) -> None:
    if not condition:
        raise RefusedError(complaint)


def read_config(folder: Path) -> dict:
    config = json.loads((folder / "config.json").read_text())
    need("auto_map" not in config, "names code that is not there")
    return config


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors, from one file or from those that the index lists, and from no other file in the folder."""
    files = sorted(folder.glob("*.safetensors"))
    need(bool(files) and not list(folder.glob("*.bin")), "weights are kept in safetensors")
    index = folder / "model.safetensors.index.json"
    listed = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    need({file.name for file in files} == listed, f"files {files}, listed {listed}")
    weights = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            need(opened.metadata()["format"] == "pt", "not written for PyTorch")
            weights |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return weights


def qwen3_layer(fields: dict, hidden: int) -> dict[str, tuple[int, ...]]:
    dim, heads, groups = fields["head_dim"], fields["num_attention_heads"], fields["num_key_value_heads"]
    inner = fields["intermediate_size"]
    shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (heads * dim, hidden),
        "self_attn.k_proj.weight": (groups * dim, hidden),
        "self_attn.v_proj.weight": (groups * dim, hidden),
        "self_attn.o_proj.weight": (hidden, heads * dim),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if fields["attention_bias"]:
        shapes |= {
            f"self_attn.{name}.bias": (shapes[f"self_attn.{name}.weight"][0],)
            for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        }
    return shapes


def check_weights(weights: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]]) -> None:
    need(weights.keys() == shapes.keys(), f"other weights: {sorted(weights.keys() ^ shapes.keys())}")
    for name, weight in weights.items():
        need(tuple(weight.shape) == shapes[name], f"{name} has shape {tuple(weight.shape)}, not {shapes[name]}")
        need(weight.is_floating_point(), f"{name} is {weight.dtype}")


def check_qwen3(fields: dict) -> None:
    need(fields["model_type"] == "qwen3", f"layers of {fields['model_type']}")
    numbers = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    for name in (*numbers, "head_dim", "vocab_size", "max_position_embeddings"):
        need(type(fields[name]) is int and fields[name] > 0, f"{name} is {fields[name]}")
    need(len(fields["layer_types"]) == fields["num_hidden_layers"], "one layer type per draft layer")
    need(float(fields["rope_theta"]) > 0, "rope_theta stands at the top, where servers read it")
    need("rope_parameters" not in fields, "rope_parameters is read by transformers 5 alone")
    need(fields["rms_norm_eps"] > 0, "an epsilon")


def check_reduced_vocabulary(weights: dict[str, torch.Tensor], size: int, vocab_size: int) -> None:
    """As vLLM reads it: target id = draft id + d2t[draft id]; speculators asks for t2d as well."""
    need(weights.keys() >= {"d2t", "t2d"}, "a reduced vocabulary needs two maps")
    d2t, t2d = weights.pop("d2t"), weights.pop("t2d")
    need((d2t.dtype, d2t.shape) == (torch.int64, (size,)), f"d2t is {d2t.dtype} {tuple(d2t.shape)}")
    need((t2d.dtype, t2d.shape) == (torch.bool, (vocab_size,)), f"t2d is {t2d.dtype} {tuple(t2d.shape)}")
    need((torch.arange(size) + d2t).tolist() == t2d.nonzero().flatten().tolist(), "two maps that agree")


def dflash_weights(
    fields: dict, taps: list[int], folder: Path, draft_vocab_size: int | None = None
) -> dict[str, torch.Tensor]:
    hidden = fields["hidden_size"]
    shapes = {"fc.weight": (hidden, len(taps) * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in range(fields["num_hidden_layers"]):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in qwen3_layer(fields, hidden).items()}
    weights = read_weights(folder)
    if draft_vocab_size not in (None, fields["vocab_size"]):
        check_reduced_vocabulary(weights, draft_vocab_size, fields["vocab_size"])
        shapes["lm_head.weight"] = (draft_vocab_size, hidden)
    check_weights(weights, shapes)
    return weights


def check_block(block_size: int, mask_token_id: int, fields: dict) -> None:
    need(type(block_size) is int and block_size >= 2, f"block_size is {block_size}")
    need(type(mask_token_id) is int and 0 <= mask_token_id < fields["vocab_size"], f"mask token {mask_token_id}")


def read_zlab(folder: Path) -> tuple[dict, list[int], dict[str, torch.Tensor]]:
    """vLLM's and SGLang's view of a DFlash folder: its config, the tapped entries of `hidden_states`, its weights."""
    config = read_config(folder)
    need(config["architectures"] == ["DFlashDraftModel"], f"architectures {config['architectures']}")
    need("speculators_model_type" not in config, "another layout's field")
    check_qwen3(config)
    nested = config["dflash_config"]
    need(set(nested) <= {"mask_token_id", "target_layer_ids", "block_size"}, f"dflash_config {nested}")
    check_block(config.get("block_size", nested.get("block_size")), nested["mask_token_id"], config)
    layers = nested["target_layer_ids"]
    need(bool(layers) and all(type(i) is int and i >= 0 for i in layers), f"target_layer_ids {layers}")
    # Servers take a layer with a window for a causal one, unless they are told.
    is_told = config.get("is_causal") is False
    need(is_told or "sliding_attention" not in config["layer_types"], "a block that is not seen both ways")
    depth = config.get("num_target_layers")
    need(depth is None or max(layers) < depth - 1, "taps the last layer, which only exists after the final norm")
    need("draft_vocab_size" not in config or config["draft_vocab_size"] > 0, "a vocabulary that is not there")
    weights = dflash_weights(config, layers, folder, config.get("draft_vocab_size"))
    return config, [i + 1 for i in layers], weights


def read_speculators(folder: Path) -> tuple[dict, list[int], dict[str, torch.Tensor]]:
    """vLLM's view of a speculators folder, in the same terms as [`read_zlab`]."""
    config = read_config(folder)
    need(config["speculators_model_type"] == "dflash", "another algorithm")
    need(config["architectures"] == ["DFlashSpeculator"], f"architectures {config['architectures']}")
    need("model_type" not in config, "a speculators config has no model_type of its own")
    plan = config["speculators_config"]
    need(set(plan) == {"algorithm", "default_proposal_method", "proposal_methods", "verifier"}, f"{sorted(plan)}")
    need(plan["algorithm"] == "dflash", "another algorithm")
    methods = {method["proposal_type"]: method for method in plan["proposal_methods"]}
    method = methods[plan["default_proposal_method"]]
    need(1 <= method["speculative_tokens"] <= config["block_size"] - 1, f"{method['speculative_tokens']} tokens")
    need(set(plan["verifier"]) == {"name_or_path", "architectures"}, "a verifier")
    layers, taps = config["transformer_layer_config"], config["aux_hidden_state_layer_ids"]
    check_qwen3(layers)
    check_block(config["block_size"], config["mask_token_id"], layers)
    need(config["sliding_window_non_causal"] is True, "blocks are seen both ways")
    need(bool(taps) and all(type(i) is int and i >= 1 for i in taps), f"taps {taps}")
    weights = dflash_weights(layers, taps, folder, config["draft_vocab_size"])
    return {**layers, "block_size": config["block_size"]}, taps, weights


def read_pard(folder: Path) -> dict[str, torch.Tensor]:
    """vLLM's view of a PARD folder: an ordinary causal LM of its base architecture, and `pard_token`."""
    config = read_config(folder)
    bases = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    base = config["model_type"]
    need(config["architectures"] == [bases[base]], f"architectures {config['architectures']}")
    need(config["spd_type"] == "pard" and not [name for name in config if name.startswith("pard2")], "not plain PARD")
    need(0 <= config["pard_token"] < config["vocab_size"], "pard_token")
    need(float(config["rope_theta"]) > 0, "rope_theta stands at the top, where servers read it")
    hidden, size = config["hidden_size"], (config["vocab_size"], config["hidden_size"])
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    layer = qwen3_layer({**config, "head_dim": dim, "attention_bias": config.get("attention_bias", False)}, hidden)
    if base != "qwen3":
        layer = {name: shape for name, shape in layer.items() if not re.search("[qk]_norm", name)}
    if base == "qwen2":
        layer |= {f"self_attn.{name}_proj.bias": (layer[f"self_attn.{name}_proj.weight"][0],) for name in "qkv"}
    shapes = {"model.embed_tokens.weight": size, "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = size
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    weights = read_weights(folder)
    check_weights(weights, shapes)
    return weights


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Half-split rotary embedding of `(heads, length, dim)`."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def draft_hidden(
    config: dict, weights: dict[str, torch.Tensor], features: torch.Tensor, block: torch.Tensor
) -> torch.Tensor:
    """A DFlash block's hidden states `(block, H)` in float64, from features `(context, taps * H)` and embeddings `(block, H)`."""
    weights = {name: weight.double() for name, weight in weights.items()}
    eps, dim, theta = config["rms_norm_eps"], config["head_dim"], float(config["rope_theta"])
    context = rms(features.double() @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    x, length = block.double(), len(features)
    positions = torch.arange(length + len(block), dtype=torch.float64)
    for i in range(config["num_hidden_layers"]):
        w = {
            name.removeprefix(f"layers.{i}."): weight
            for name, weight in weights.items()
            if name.startswith(f"layers.{i}.")
        }
        normed = rms(x, w["input_layernorm.weight"], eps)
        sources = torch.cat([context, normed])
        heads = {
            name: (rows @ w[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, dim)).transpose(0, 1)
            for name, rows in (("q", normed), ("k", sources), ("v", sources))
        }
        query = rotate(rms(heads["q"], w["self_attn.q_norm.weight"], eps), positions[length:], theta)
        key = rotate(rms(heads["k"], w["self_attn.k_norm.weight"], eps), positions, theta)
        repeats = len(query) // len(key)
        key, value = key.repeat_interleave(repeats, 0), heads["v"].repeat_interleave(repeats, 0)
        attended = (query @ key.transpose(1, 2) / dim**0.5).softmax(-1) @ value
        x = x + attended.transpose(0, 1).flatten(1) @ w["self_attn.o_proj.weight"].T
        y = rms(x, w["post_attention_layernorm.weight"], eps)
        gated = torch.nn.functional.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
        x = x + gated @ w["mlp.down_proj.weight"].T
    return rms(x, weights["norm.weight"], eps)
