"""The weights that each kind of checkpoint holds, by name and shape, as docs/formats.md has them and not read off a model."""

from typing import Any

Shapes = dict[str, tuple[int, ...]]


def head_sizes(fields: dict[str, Any]) -> tuple[int, int, int]:
    """Sizes of a head, of all queries and of all keys."""
    head_dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    groups = fields.get("num_key_value_heads") or fields["num_attention_heads"]
    return head_dim, fields["num_attention_heads"] * head_dim, groups * head_dim


def projections(prefix: str, inputs: int, outputs: dict[str, int], has_bias: bool) -> Shapes:
    """Linear maps from `inputs`, by name, and their biases."""
    shapes: Shapes = {}
    for name, size in outputs.items():
        shapes[f"{prefix}.{name}.weight"] = (size, inputs)
        if has_bias:
            shapes[f"{prefix}.{name}.bias"] = (size,)
    return shapes


def attention(prefix: str, fields: dict[str, Any], inputs: int, in_bias: bool, out_bias: bool) -> Shapes:
    """The four projections of an attention."""
    _, query_size, key_size = head_sizes(fields)
    sizes = {"q_proj": query_size, "k_proj": key_size, "v_proj": key_size}
    return projections(prefix, inputs, sizes, in_bias) | projections(
        prefix, query_size, {"o_proj": fields["hidden_size"]}, out_bias
    )


def mlp(prefix: str, fields: dict[str, Any], has_bias: bool = False) -> Shapes:
    """A gated MLP."""
    hidden, inner = fields["hidden_size"], fields["intermediate_size"]
    return projections(prefix, hidden, {"gate_proj": inner, "up_proj": inner}, has_bias) | projections(
        prefix, inner, {"down_proj": hidden}, has_bias
    )


def norms(prefix: str, size: int, *names: str) -> Shapes:
    return {f"{prefix}{name}.weight": (size,) for name in names}


def dflash_shapes(fields: dict[str, Any]) -> Shapes:
    """A DFlash drafter: no embedding and no lm_head, which are the target's."""
    hidden, bias = fields["hidden_size"], bool(fields.get("attention_bias"))
    num_features = len(fields["target_layer_ids"]) * fields["target_hidden_size"]
    shapes: Shapes = {"fc.weight": (hidden, num_features)} | norms("", hidden, "hidden_norm", "norm")
    for i in range(fields["num_hidden_layers"]):
        layer = f"layers.{i}"
        shapes |= attention(f"{layer}.self_attn", fields, hidden, bias, bias) | mlp(f"{layer}.mlp", fields)
        shapes |= norms(f"{layer}.self_attn.", head_sizes(fields)[0], "q_norm", "k_norm")
        shapes |= norms(f"{layer}.", hidden, "input_layernorm", "post_attention_layernorm")
    return shapes


def dflare_shapes(fields: dict[str, Any]) -> Shapes:
    """A DFlare drafter: fusion weights for `fc`, and key and value projections of the context."""
    shapes = dflash_shapes(fields)
    del shapes["fc.weight"]
    hidden, key_size = fields["hidden_size"], head_sizes(fields)[2]
    shapes["layer_fusion_weights"] = (fields["num_hidden_layers"], len(fields["target_layer_ids"]))
    for i in range(fields["num_hidden_layers"]):
        sizes = {"k_proj_target": key_size, "v_proj_target": key_size}
        shapes |= projections(f"layers.{i}.self_attn", hidden, sizes, bool(fields.get("attention_bias")))
    return shapes


def dart_shapes(fields: dict[str, Any]) -> Shapes:
    """A DART drafter: one layer with inputs of twice the hidden size, and an lm_head of its own."""
    hidden, bias = fields["hidden_size"], bool(fields.get("attention_bias"))
    num_taps = len(fields["tapped_hidden_states"] or range(3))
    return {
        "fc.weight": (hidden, num_taps * fields["target_hidden_size"]),
        "midlayer.mask_rep": (2 * hidden,),
        "lm_head.weight": (fields["draft_vocab_size"], hidden),
        "d2t": (fields["draft_vocab_size"],),
        "t2d": (fields["vocab_size"],),
        **attention("midlayer.self_attn", fields, 2 * hidden, bias, bias),
        **mlp("midlayer.mlp", fields, bool(fields.get("mlp_bias"))),
        **norms("midlayer.", hidden, "hidden_norm", "input_layernorm", "post_attention_layernorm"),
        **norms("", hidden, "norm"),
    }


def causal_lm_shapes(fields: dict[str, Any]) -> Shapes:
    """An ordinary Llama, Qwen2 or Qwen3 causal LM, which a PARD drafter is."""
    hidden, base = fields["hidden_size"], fields["model_type"]
    # Qwen2 has biases of queries, keys and values alone, whatever its config says.
    in_bias = base == "qwen2" or bool(fields.get("attention_bias"))
    out_bias = base != "qwen2" and bool(fields.get("attention_bias"))
    shapes: Shapes = {"model.embed_tokens.weight": (fields["vocab_size"], hidden)} | norms("model.", hidden, "norm")
    if not fields.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (fields["vocab_size"], hidden)
    for i in range(fields["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= attention(f"{layer}.self_attn", fields, hidden, in_bias, out_bias)
        shapes |= mlp(f"{layer}.mlp", fields, base == "llama" and bool(fields.get("mlp_bias")))
        shapes |= norms(f"{layer}.", hidden, "input_layernorm", "post_attention_layernorm")
        if base == "qwen3":
            shapes |= norms(f"{layer}.self_attn.", head_sizes(fields)[0], "q_norm", "k_norm")
    return shapes


WHITELISTS = {"dflash": dflash_shapes, "dflare": dflare_shapes, "dart": dart_shapes, "pard": causal_lm_shapes}


def check_whitelist(kind: str, fields: dict[str, Any], found: Shapes) -> None:
    """Raise a `ValueError` unless a checkpoint holds the weights of its kind, all of them and no other.

    Args:
        kind: of drafter.
        fields: of its config, in our own layout.
        found: shapes of what it holds, by our names.
    """
    allowed = WHITELISTS[kind](fields)
    wrong = {name: (found.get(name), allowed.get(name)) for name in found.keys() | allowed.keys()}
    wrong = {name: pair for name, pair in wrong.items() if pair[0] != pair[1]}
    if wrong:
        told = "; ".join(f"{name}: found {pair[0]}, expected {pair[1]}" for name, pair in sorted(wrong.items())[:8])
        raise ValueError(
            f"these weights are not those of a {kind} checkpoint ({told}), and a serving stack would skip them"
        )
