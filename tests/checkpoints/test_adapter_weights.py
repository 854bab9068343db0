"""The weights of an adapter are accounted for like a drafter's own: what is missing, left over or damaged is named."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, GenerationConfig

from hf_pardraft import AutoDrafter, PardDrafter
from hf_pardraft.auto import find_drafter_config
from published_checkpoints import change_config
from tiny_models import random_prompt, tiny_drafter, tiny_target

peft = pytest.importorskip("peft")
FILE = "adapter_model.safetensors"
FIRST = "base_model.model.layers.0.self_attn.q_proj.lora_A.weight"
METHODS = {
    "lora": lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False),
    "dora": lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, use_dora=True),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": lambda: peft.LoHaConfig(r=2, target_modules=["q_proj"]),
    "adalora": lambda: peft.AdaLoraConfig(init_r=3, target_modules=["q_proj"], total_step=9),
    "vera": lambda: peft.VeraConfig(r=2, target_modules=["q_proj"], save_projection=False),
    "oft": lambda: peft.OFTConfig(oft_block_size=8, target_modules=["q_proj"]),
    "with a whole layer": lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"]),
    "with embeddings": lambda: peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"]),
    "with tokens": lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[3]),
}


def adapter(folder, kind="dflash", method="lora"):
    """A folder with an adapter of a drafter in a folder beside it."""
    drafter = tiny_drafter(kind, tiny_target("qwen3"))
    drafter.save_pretrained(folder / "base")
    adapted = peft.get_peft_model(drafter, METHODS[method]())
    adapted.peft_config["default"].base_model_name_or_path = str(folder / "base")
    adapted.save_pretrained(folder / "adapter")
    return folder / "adapter"


@pytest.fixture
def folder(tmp_path):
    return adapter(tmp_path)


def rewrite(folder, change) -> None:
    save_file({name: weight.contiguous() for name, weight in change(load_file(folder / FILE)).items()}, folder / FILE)


# Of the others, the target has the embeddings.
WHOLE = [(kind, method) for kind in ("pard", "pard2") for method in METHODS]
WHOLE += [(kind, method) for kind in ("dflash", "dflare", "dart") for method in [*METHODS][:-2]]


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`", "ignore:Specified to not")
@pytest.mark.parametrize(("kind", "method"), WHOLE)
def test_what_peft_saves_is_whole(kind, method, tmp_path):
    drafter = AutoDrafter.from_pretrained(adapter(tmp_path, kind, method))
    assert drafter.config.drafter_kind == kind.removesuffix("2")


def test_it_takes_the_arguments_of_a_whole_drafter(tmp_path):
    folder = adapter(tmp_path, "pard")
    drafter, info = AutoDrafter.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    # PEFT saves no settings: they are the base's.
    assert drafter.draft_depth == AutoDrafter.from_pretrained(tmp_path / "base").draft_depth == 4
    given = GenerationConfig(num_assistant_tokens=3)
    assert AutoDrafter.from_pretrained(folder, generation_config=given).draft_depth == 3


@pytest.mark.parametrize("kind", ["pard", "dflash"])
def test_where_transformers_takes_a_name_an_adapters_will_do(kind, tmp_path):
    folder, target = adapter(tmp_path, kind), tiny_target("qwen3")
    expected = AutoDrafter.from_pretrained(folder).state_dict()
    for auto_class in (AutoModel, AutoModelForCausalLM):
        loaded = auto_class.from_pretrained(folder).state_dict()
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(weight, loaded[name]) for name, weight in expected.items())
    options = {"max_new_tokens": 8, "do_sample": False}
    text = target.generate(random_prompt(6), **options)
    assert torch.equal(target.generate(random_prompt(6), **options, assistant_model=str(folder)), text)


@pytest.mark.parametrize("base", [None, "adapter", 3, "ordinary"])
def test_an_adapter_of_no_drafter_is_loaded_as_ever(base, tmp_path):
    folder = adapter(tmp_path, "pard")
    tiny_target("qwen3").save_pretrained(tmp_path / "ordinary")
    name = str(tmp_path / base) if isinstance(base, str) else base
    config = json.loads((folder / "adapter_config.json").read_text()) | {"base_model_name_or_path": name}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert find_drafter_config(folder) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: {}, f"missing keys: {FIRST}, "),
        (lambda weights: {name: w for name, w in weights.items() if name != FIRST}, f"missing keys: {FIRST}"),
        (
            lambda weights: {name.replace("layers.0", "layers.7"): w for name, w in weights.items()},
            rf"missing keys: {FIRST}.*unexpected keys: .*layers\.7",
        ),
        (lambda weights: {**weights, "other": torch.zeros(2)}, "unexpected keys: other"),
        (lambda weights: {**weights, FIRST: torch.zeros(5, 32)}, r"layers\.0\.self_attn.*\[5, 32\]"),
        (lambda weights: {**weights, FIRST: weights[FIRST].int()}, f"{FIRST} has dtype I32, expected floating-point"),
    ],
)
def test_a_weight_that_is_not_the_adapters_is_named(folder, change, message):
    rewrite(folder, change)
    with pytest.raises(ValueError, match=rf"weights of the adapter in .*do not fit.*a DFlashDrafter \(.*{message}"):
        AutoDrafter.from_pretrained(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_adapter_of_no_numbers_is_refused(folder, value):
    rewrite(folder, lambda weights: {**weights, FIRST: torch.full_like(weights[FIRST], value)})
    with pytest.raises(ValueError, match=r"adapter hold infinities or NaN \(layers.0.self_attn.q_proj.weight\)"):
        AutoDrafter.from_pretrained(folder)


def test_a_file_that_is_damaged_or_missing_is_named(folder):
    (folder / FILE).write_bytes(b"xx")
    with pytest.raises(ValueError, match=f"{FILE} is not a whole safetensors file"):
        AutoDrafter.from_pretrained(folder)
    (folder / FILE).unlink()
    (folder / "adapter_model.bin").write_bytes(b"xx")
    with pytest.raises(ValueError, match=r"adapter_model.bin .*is damaged"):
        AutoDrafter.from_pretrained(folder)
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(OSError, match=f"adapter in .*has no weights: expected one of {FILE}, adapter_model.bin"):
        AutoDrafter.from_pretrained(folder)


def test_an_adapter_in_a_pickle_is_read(folder):
    expected = AutoDrafter.from_pretrained(folder).state_dict()
    torch.save(load_file(folder / FILE), folder / "adapter_model.bin")
    (folder / FILE).unlink()
    found = AutoDrafter.from_pretrained(folder).state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("base", ["nobody/has-this", "/nowhere/at/all"])
def test_a_base_that_can_not_be_read_is_named_with_the_adapter(folder, base, is_plain):
    fields = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**fields, "base_model_name_or_path": base}))
    if is_plain:
        PardDrafter.from_causal_lm(tiny_target("qwen3"), 63).config.save_pretrained(folder)
        change_config(folder, pard_token=63)
    with pytest.raises(OSError, match=rf"the adapter in .*adapter belongs to {base}, which can't be loaded"):
        AutoDrafter.from_pretrained(folder)


def test_a_base_with_half_its_files_is_named_with_the_adapter(folder):
    (folder.parent / "base" / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"the adapter in .*adapter belongs to .*base, .*holds no weights"):
        AutoDrafter.from_pretrained(folder)
