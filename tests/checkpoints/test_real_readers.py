"""Exports read by the projects that they are made for, where these are installed; each is skipped where it is not."""

import pytest
from safetensors.torch import load_file

from hf_pardraft.checkpoints.export import export_drafter
from tiny_models import tiny_drafter, tiny_target

# What speculators takes from the verifier.
VERIFIERS_OWN = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"attention_bias": True, "num_key_value_heads": 1, "num_layers": 3},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "use_sliding_window": True},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}},
    ],
)
def test_speculators_own_classes_read_the_export(overrides, tmp_path):
    pytest.importorskip("speculators", exc_type=ImportError)
    from speculators.config import SpeculatorModelConfig
    from speculators.models.dflash import DFlashDraftModel

    drafter = tiny_drafter("dflash", tiny_target("qwen3"), **overrides)
    drafter.config.target_name_or_path = "someone/target"
    export_drafter(drafter, tmp_path, "speculators")
    config = SpeculatorModelConfig.from_pretrained(str(tmp_path))
    layers, own = config.transformer_layer_config, drafter.config
    assert config.aux_hidden_state_layer_ids == drafter.tapped_hidden_states
    assert (config.block_size, config.mask_token_id) == (own.block_size, own.mask_token_id)
    assert (layers.layer_types, layers.rope_parameters) == (own.layer_types, own.rope_parameters)
    assert config.speculators_config.proposal_methods[0].speculative_tokens == own.block_size - 1
    assert config.speculators_config.verifier.name_or_path == "someone/target"
    layers._attn_implementation = "eager"
    missing, unexpected = DFlashDraftModel(config).load_state_dict(
        load_file(tmp_path / "model.safetensors"), strict=False
    )
    assert not unexpected
    assert set(missing) <= VERIFIERS_OWN
