"""The layouts that a drafter can be written in: what each can hold, its config.json, its names of weights, and who serves it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import Qwen3Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..models.base import ParallelDrafter
from ..models.configuration_dart import published_tapped_hidden_states
from ..models.configuration_dflare import ANGELSLIM_ARCHITECTURE
from ..models.configuration_pard import BASE_ARCHITECTURES
from .published import MUSE_GLIMMER, SPECULATORS_TYPE

Fields = dict[str, Any]

# What `save_pretrained` puts into a config.json for classes of ours, and other layouts have their own answers to.
CLASS_FIELDS = ("architectures", "auto_map", "model_type", "_name_or_path")


@dataclass(frozen=True)
class Layout:
    """A layout of somebody else's.

    Attributes:
        kind: the kind of drafter that it holds.
        write_config: its config.json for the fields of our config, which is refused with a `ValueError` if it can't hold it.
        renamed: what it calls weights otherwise, by our names' beginnings.
        served_by: where such a checkpoint is used.
    """

    kind: str
    write_config: Callable[[ParallelDrafter, Fields], Fields]
    served_by: str
    renamed: tuple[tuple[str, str], ...] = ()

    def name_of(self, weight: str) -> str:
        """What a weight of ours is called in this layout."""
        for own, theirs in self.renamed:
            if weight.startswith(own):
                return theirs + weight.removeprefix(own)
        return weight


def flat_rope(fields: Fields) -> Fields:
    """The same fields with `rope_theta` and `rope_scaling`, which other tools read, for transformers 5's `rope_parameters`."""
    rope = dict(fields.get("rope_parameters") or {})
    flat = {name: value for name, value in fields.items() if name != "rope_parameters"}
    theta = rope.pop("rope_theta", None)
    if theta is not None:
        flat["rope_theta"] = theta
    is_scaled = rope.get("rope_type", "default") != "default"
    return {**flat, "rope_scaling": rope if is_scaled else None}


def without(fields: Fields, *names: str) -> Fields:
    return {name: value for name, value in fields.items() if name not in names}


def expect_target(fields: Fields, layout: str) -> None:
    """Raise a `ValueError` unless the target's vocabulary is known, and it is as wide as the drafter."""
    if not fields["vocab_size"]:
        raise ValueError(
            f"the {layout} layout names the target's vocabulary, and this checkpoint does not: set vocab_size in its config.json "
            "to the target's"
        )
    if fields["target_hidden_size"] != fields["hidden_size"]:
        raise ValueError(
            f"the {layout} layout holds drafters as wide as their target, got hidden_size {fields['hidden_size']} and "
            f"target_hidden_size {fields['target_hidden_size']}: use --to native"
        )


def block_drafter_config(fields: Fields, architecture: str) -> Fields:
    """The flat Qwen3 config with a nested `dflash_config` that z-lab and AngelSlim share."""
    own = without(flat_rope(fields), *CLASS_FIELDS, "mask_token_id", "target_layer_ids", "own_head")
    nested = {"mask_token_id": fields["mask_token_id"], "target_layer_ids": fields["target_layer_ids"]}
    return {**own, "architectures": [architecture], "model_type": "qwen3", "dflash_config": nested}


def check_draft_vocabulary(fields: Fields, layout: str, has_place: bool) -> None:
    """Raise a `ValueError` if a DFlash drafter has a draft vocabulary that the layout, or who reads it, does not take.

    Args:
        fields: of its config.
        layout: as it is to be called.
        has_place: whether it holds `d2t`, `t2d` and their rows of the head.
    """
    size = fields.get("draft_vocab_size")
    if size is None or (has_place and fields["own_head"]):
        return
    if has_place:
        raise ValueError(
            f"the {layout} layout holds the head's rows of a draft vocabulary ({size} tokens), which its readers don't take from "
            "the target, and this drafter has none: call drafter.set_draft_vocabulary(drafter.draft_token_ids, target) and save "
            "it before, or use --to native"
        )
    raise ValueError(
        f"the {layout} layout has no place for a draft vocabulary, and this drafter has one of {size} tokens: use --to native, "
        "or call drafter.set_draft_vocabulary(None) and save it before"
    )


def zlab_config(drafter: ParallelDrafter, fields: Fields) -> Fields:
    """The layout of z-lab and SpecForge (docs/formats.md)."""
    expect_target(fields, "z-lab")
    check_draft_vocabulary(fields, "z-lab", has_place=True)
    config = block_drafter_config(fields, "DFlashDraftModel")
    # Left unsaid, vLLM and SGLang take a layer with a window for a causal one.
    return {**config, "is_causal": False} if "sliding_attention" in fields["layer_types"] else config


def angelslim_config(drafter: ParallelDrafter, fields: Fields) -> Fields:
    """AngelSlim's layout, which knows none of the paper's ablations."""
    published = {"fusion": "softmax", "fusion_norm": "shared", "fusion_fc": False, "separate_kv": True}
    other = {name: fields[name] for name, value in published.items() if fields[name] != value}
    if other:
        raise ValueError(
            f"AngelSlim's layout holds DFlare drafters with {published}, and this one has {other}: use --to native"
        )
    expect_target(fields, "AngelSlim")
    check_draft_vocabulary(fields, "AngelSlim", has_place=False)
    return block_drafter_config(fields, ANGELSLIM_ARCHITECTURE)


def speculators_config(drafter: ParallelDrafter, fields: Fields) -> Fields:
    """Speculators' layout: the layers' config nested, taps as indices into `hidden_states`."""
    expect_target(fields, "speculators")
    check_draft_vocabulary(fields, "speculators", has_place=True)
    layer_names = Qwen3Config().to_dict().keys() - {*CLASS_FIELDS, "transformers_version", "dtype"}
    layers = {name: fields[name] for name in sorted(layer_names & fields.keys())}
    own = without(fields, *layers, *CLASS_FIELDS, "target_layer_ids", "target_name_or_path", "own_head")
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(fields.get("target_model_type"))
    architectures = [architecture] if isinstance(architecture, str) else []
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": drafter.draft_depth,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        **own,
        "architectures": ["DFlashSpeculator"],
        SPECULATORS_TYPE: "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": fields.get("target_name_or_path"), "architectures": architectures},
        },
        "transformer_layer_config": {**flat_rope(layers), "model_type": "qwen3"},
        "draft_vocab_size": fields.get("draft_vocab_size", fields["vocab_size"]),
        "aux_hidden_state_layer_ids": drafter.tapped_hidden_states,
        "sliding_window_non_causal": True,
        "sample_from_anchor": False,
    }


def muse_glimmer_config(drafter: ParallelDrafter, fields: Fields) -> Fields:
    """Transformers' own DFlash drafter, which `AutoModel` loads without this package."""
    if fields["attention_bias"]:
        raise ValueError(
            "transformers' own DFlash drafter has no attention_bias, and this drafter does: use --to native"
        )
    check_draft_vocabulary(fields, "muse-glimmer", has_place=False)
    own = without(fields, *CLASS_FIELDS, *(() if fields["vocab_size"] else ("vocab_size",)))
    window = fields["sliding_window"] or fields["max_position_embeddings"]
    return {
        **own,
        "sliding_window": window,
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": MUSE_GLIMMER,
    }


def pard_config(drafter: ParallelDrafter, fields: Fields) -> Fields:
    """AMD's layout: the base architecture's own config, and `pard_token`."""
    if drafter.reads_target or fields.get("pard2_target_layers") is not None:
        raise ValueError(
            "the PARD layout has no place for a PARD-2 drafter's projection, which its publishers keep in a pickle, and pickles "
            "are not written: use --to native. The root of such a folder is a PARD drafter already, to vLLM too"
        )
    if fields.get("pard_tokens") is not None:
        raise ValueError(
            f"the PARD layout has one mask token, pard_token, and this drafter has one for each place (pard_tokens "
            f"{fields['pard_tokens']}), which its readers would not use: use --to native, or train with a shared mask token"
        )
    own = without(flat_rope(fields), *CLASS_FIELDS)
    base = fields["model_type"]
    return {**own, "architectures": [BASE_ARCHITECTURES[base]], "model_type": base}


def dart_config(drafter: ParallelDrafter, fields: Fields) -> Fields:
    """The layout of DART's authors, whose code norms twice, shifts, and chooses the taps by the target's depth."""
    if not (fields["double_norm"] and fields["shifted"]):
        raise ValueError(
            "DART's own layout holds drafters with double_norm and shifted, as its code computes them, and this one has "
            f"double_norm={fields['double_norm']} and shifted={fields['shifted']}: use --to native"
        )
    taps = fields["tapped_hidden_states"]
    # The published rule ends at layer L - 3, which gives L away.
    if taps is not None and (taps[-1] < 0 or taps != published_tapped_hidden_states(taps[-1] + 3)):
        raise ValueError(
            f"DART's own code reads hidden states 2, L//2 and L-3 of a target of L layers, and this drafter reads {taps}: use "
            "--to native"
        )
    return {
        **without(flat_rope(fields), *CLASS_FIELDS),
        "architectures": ["LlamaForCausalLMDart"],
        "model_type": "llama",
    }


ZLAB = Layout("dflash", zlab_config, "vLLM (method dflash), SGLang (DFLASH)")
LAYOUTS = {
    "zlab": ZLAB,
    "specforge": ZLAB,
    "speculators": Layout("dflash", speculators_config, "vLLM"),
    "muse-glimmer": Layout(
        "dflash",
        muse_glimmer_config,
        "transformers (AutoModel, speculation_type dflash), vLLM (method dflash)",
        (("fc.", "encoder.fc."), ("hidden_norm.", "encoder.output_norm_enc.")),
    ),
    "pard": Layout("pard", pard_config, "vLLM (parallel_drafting), transformers"),
    "angelslim": Layout("dflare", angelslim_config, "AngelSlim"),
    "dart": Layout("dart", dart_config, "DART's own code"),
}
NATIVE = "native"


def check_layout(name: str) -> None:
    """Raise a `ValueError` if there is no layout of this name."""
    if name not in (NATIVE, *LAYOUTS):
        raise ValueError(f"unknown layout {name!r}: expected one of {', '.join([NATIVE, *LAYOUTS])}")


def layout_for(name: str, kind: str) -> Layout:
    """The layout called `name`.

    Raises:
        ValueError: if there is none, or it can't hold this kind of drafter; the message says which can.
    """
    check_layout(name)
    if LAYOUTS[name].kind != kind:
        fitting = [NATIVE, *(other for other, layout in LAYOUTS.items() if layout.kind == kind)]
        raise ValueError(
            f"the {name} layout holds {LAYOUTS[name].kind} drafters, and this is a {kind} drafter: use --to "
            f"{' or '.join(fitting)}.{UNSERVED.get(kind, '')}"
        )
    return LAYOUTS[name]


# Serving stacks skip weights that they don't know without a word, so a drafter in another kind's layout would draft nonsense.
UNSERVED = {
    "dflare": " No serving stack runs DFlare: its drafters work with target.generate(assistant_model=...) and with "
    "transformers' own loop (speculation_type='dflash')",
    "dart": " No serving stack runs DART: its drafters work with target.generate(assistant_model=...)",
}
