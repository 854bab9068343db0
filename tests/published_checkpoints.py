"""Checkpoints as others publish them, made from docs/formats.md and the fixtures, and none of our writers."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

FIXTURES = Path(__file__).parent / "fixtures"
ZLAB_ONLY = ("architectures", "auto_map", "block_size", "dflash_config", "num_target_layers", "transformers_version")


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def change_config(folder: Path, **fields) -> None:
    """Set fields of a config.json; `...` takes one away."""
    config = config_of(folder) | fields
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def copy_fixture(name: str, folder: Path) -> Path:
    """A folder as z-lab (dflash), AngelSlim (dflare), AMD (pard) or DART's authors publish it."""
    folder.mkdir(parents=True)
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(FIXTURES / name / file, folder / file)
    return folder


def pard2(folder: Path) -> Path:
    """AMD's PARD-2: the drafter in a subfolder, its projection in a pickle."""
    copy_fixture("pard2", folder / "pard_model")
    torch.save(load_file(FIXTURES / "pard2" / "warp_model.safetensors"), folder / "pard_model" / "warp_model.bin")
    return folder


def nested_dflash(folder: Path) -> Path:
    """Newer z-lab checkpoints nest the block size too."""
    copy_fixture("dflash", folder)
    config = config_of(folder)
    change_config(folder, block_size=..., dflash_config={**config["dflash_config"], "block_size": config["block_size"]})
    return folder


# Which tokens `speculators` proposes.
DRAFT_TOKEN_IDS = list(range(1, 80, 2))


def whole_speculators(folder: Path) -> Path:
    """Speculators' layout with all of the vocabulary, and the head that the target has as well."""
    speculators(folder)
    weights, target = load_file(folder / "model.safetensors"), load_file(FIXTURES / "dflash" / "inputs.safetensors")
    weights |= {
        "lm_head.weight": target["target.lm_head.weight"],
        "embed_tokens.weight": weights["embed_tokens.weight"],
    }
    weights = {name: weight for name, weight in weights.items() if name not in ("d2t", "t2d")}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, draft_vocab_size=96)
    return folder


def speculators(folder: Path) -> Path:
    """The z-lab fixture in speculators' layout with a draft vocabulary, and all that their checkpoints may hold besides."""
    copy_fixture("dflash", folder)
    config, weights = config_of(folder), load_file(folder / "model.safetensors")
    layers = {name: value for name, value in config.items() if name not in ZLAB_ONLY}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    written = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": "someone/target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": layers,
        "draft_vocab_size": len(DRAFT_TOKEN_IDS),
        "block_size": config["block_size"],
        # Indices into hidden_states: one more than the layers' numbers.
        "aux_hidden_state_layer_ids": [i + 1 for i in config["dflash_config"]["target_layer_ids"]],
        "mask_token_id": config["dflash_config"]["mask_token_id"],
        "sliding_window_non_causal": True,
    }
    (folder / "config.json").write_text(json.dumps(written))
    target = load_file(FIXTURES / "dflash" / "inputs.safetensors")
    weights |= {
        "embed_tokens.weight": target["target.embed_tokens.weight"],
        "lm_head.weight": target["target.lm_head.weight"][DRAFT_TOKEN_IDS],
        "t2d": torch.isin(torch.arange(96), torch.tensor(DRAFT_TOKEN_IDS)),
        "d2t": torch.tensor(DRAFT_TOKEN_IDS) - torch.arange(len(DRAFT_TOKEN_IDS)),
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def muse_glimmer_model(layer_types: list[str] | None = None, **fields) -> MuseGlimmerAssistantModel:
    """Transformers' own DFlash drafter, small and random."""
    torch.manual_seed(3)
    config = MuseGlimmerAssistantConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=6,
        layer_types=layer_types,
        max_position_embeddings=256,
        block_size=5,
        mask_token_id=63,
        target_layer_ids=[0, 2],
        initializer_range=0.2,
        **fields,
    )
    return MuseGlimmerAssistantModel(config).eval()


def muse_glimmer(folder: Path, **fields) -> Path:
    muse_glimmer_model(**fields).save_pretrained(folder)
    return folder


def in_shards(folder: Path, num_shards: int = 3, pickled: bool = False) -> Path:
    """Split a folder's weights over several files and an index, as safetensors or pickles."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    stem, suffix = ("pytorch_model", "bin") if pickled else ("model", "safetensors")
    names = [f"{stem}-{i + 1:05}-of-{num_shards:05}.{suffix}" for i in range(num_shards)]
    weight_map = {name: names[i % num_shards] for i, name in enumerate(sorted(weights))}
    for name in names:
        shard = {key: weights[key] for key, place in weight_map.items() if place == name}
        if pickled:
            torch.save(shard, folder / name)
        else:
            save_file(shard, folder / name, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(w.nbytes for w in weights.values())}, "weight_map": weight_map}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    return folder


def in_one_pickle(folder: Path) -> Path:
    """Turn a folder's weights into a pickle."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


# How to make a folder of each published layout.
LAYOUTS = {
    "pard": lambda folder: copy_fixture("pard", folder),
    "pard2": pard2,
    "zlab": lambda folder: copy_fixture("dflash", folder),
    "zlab_nested": nested_dflash,
    "speculators": speculators,
    "whole_speculators": whole_speculators,
    "muse_glimmer": muse_glimmer,
    "angelslim": lambda folder: copy_fixture("dflare", folder),
    "dart": lambda folder: copy_fixture("dart", folder),
    "dart_vocab": lambda folder: copy_fixture("dart_vocab", folder),
}
