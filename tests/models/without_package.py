"""Run in a process of its own by test_standalone.py: load and use saved drafters where hf_pardraft can't be imported.

python without_package.py WORK    # folders `target`, `KIND` for each kind, and inputs.safetensors; writes what it found
"""

import importlib
import importlib.abc
import json
import shutil
import sys
import warnings
from pathlib import Path


class Blocked(importlib.abc.MetaPathFinder):
    """Lets nothing of the package be found, however it is installed."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_pardraft":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Blocked())

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationConfig  # noqa: E402

GREEDY = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
DEPTH = 4


def sibling(model, name: str):
    """A module of the code that came with `model`."""
    return importlib.import_module(f"{type(model).__module__.rpartition('.')[0]}.{name}")


def draft_inputs_class(model) -> type:
    """What its `draft` takes; drafters that were pushed with earlier code call it otherwise."""
    try:
        return sibling(model, "inputs").DraftInputs
    except ModuleNotFoundError:
        return sibling(model, "drafting").DraftContext


@torch.no_grad()
def draft(model, target, inputs) -> torch.Tensor:
    """One round's marginal logits, from the context in `inputs`."""
    positions = torch.arange(inputs["ids"].shape[1])[None]
    features = None
    if model.tapped_hidden_states:
        features = torch.cat([inputs["states"][i] for i in model.tapped_hidden_states], dim=-1)
    context = draft_inputs_class(model)(inputs["ids"], positions, features, positions[:, :-1])
    return model.draft(context, model.new_draft_state(target), DEPTH)


def count_calls(module) -> list[tuple]:
    """Shapes of what each forward of `module` gives, filled as they happen."""
    calls = []
    module.register_forward_hook(lambda module, args, output: calls.append(tuple(output[0].shape)))
    return calls


def stock_run(target, model, ids, **kwargs) -> dict:
    """Text and calls of transformers' own loop, which must be the text of the target alone."""
    plain = target.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
    target_calls, calls = count_calls(target), count_calls(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        text = target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=model, **GREEDY, **kwargs)
    target._forward_hooks.clear()
    model._forward_hooks.clear()
    return {
        "same": torch.equal(text, plain),
        "target_forwards": len(target_calls),
        "drafter_rows": [shape[1] for shape in calls],
        "warnings": [str(w.message) for w in caught if "hf_pardraft" in str(w.message)],
    }


def right_run(target, model, ids) -> dict:
    """Transformers' DFlash loop with a drafter that is wrong at every fifth position only.

    Besides the text it looks at what the drafter really computes from its cache in every round, beside a forward over all of the
    context without one: only if parts of blocks are accepted do the two have a chance to differ.
    """
    text = target.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)[0]
    head, real = target.get_output_embeddings().weight, model.forward
    contexts, differences = [], []

    def forward(noise_embeds, context_hidden_states, position_ids, **kwargs):
        output = real(noise_embeds, context_hidden_states, position_ids, **kwargs)
        contexts.append(context_hidden_states)
        context = torch.cat(contexts, dim=1)
        block = position_ids[0, -noise_embeds.shape[1] :]
        positions = torch.cat([torch.arange(context.shape[1]), block])[None]
        whole = real(noise_embeds, context, positions).last_hidden_state
        differences.append(float((whole - output.last_hidden_state).abs().max()))
        tokens = text[block.clamp(max=len(text) - 1)]
        tokens = torch.where(block % 5 == 0, (tokens + 1) % len(head), tokens)
        output.last_hidden_state = 10 * head[tokens][None]
        return output

    model.forward = forward
    facts = stock_run(target, model, ids, speculation_type="dflash")
    del model.forward
    return {**facts, "worst": max(differences)}


def told(call) -> str:
    """What a call refuses, and with which words."""
    try:
        call()
    except (ValueError, ImportError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refusals(folder: Path, model, target, ids) -> dict[str, str]:
    """What is said of another target, of weights that are not there, and of what only the package can do."""
    broken = shutil.copytree(folder, folder.parent / "broken")
    weights = load_file(broken / "model.safetensors")
    lost = next(name for name in weights if name.endswith("self_attn.o_proj.weight"))
    del weights[lost]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    facts = {"lost": lost, "missing": told(lambda: AutoModel.from_pretrained(broken, trust_remote_code=True))}
    shutil.rmtree(broken)
    if (folder / "target_projection").exists():
        bare = shutil.copytree(folder, folder.parent / "broken", ignore=lambda *_: ["target_projection"])
        facts["no_projection"] = told(lambda: AutoModel.from_pretrained(bare, trust_remote_code=True))
        shutil.rmtree(bare)
    config = type(target.config).from_dict({**target.config.to_dict(), "vocab_size": target.config.vocab_size + 1})
    other = AutoModelForCausalLM.from_config(config)
    by_file = {"custom_generate": str(folder), "trust_remote_code": True, "assistant_model": model}
    facts["other_target"] = told(lambda: other.generate(ids, **GREEDY, **by_file))
    facts["check_target"] = told(lambda: model.check_target(other))
    make = type(model).from_causal_lm if model.config.drafter_kind == "pard" else type(model).for_target
    facts["fresh"] = told(lambda: make(target))
    return facts


def examine(folder: Path, target, inputs, found: dict, drafts: dict) -> None:
    """Everything about one drafter."""
    model = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    drafts[folder.name] = draft(model, target, inputs)
    facts = found[folder.name] = {
        "class": type(model).__name__,
        "remote": type(model).__module__.startswith("transformers_modules"),
        "settings": model.generation_config.to_dict().get("tree_budget"),
        "config": type(AutoConfig.from_pretrained(folder, trust_remote_code=True)).__name__,
    }
    again = folder.parent / f"{folder.name}-again"
    model.save_pretrained(again)
    facts["files"] = sorted(str(path.relative_to(again)) for path in again.rglob("*") if path.is_file())
    copy = AutoModel.from_pretrained(again, trust_remote_code=True)
    facts["same_again"] = torch.equal(draft(copy.eval(), target, inputs), drafts[folder.name])
    ids = inputs["ids"]
    # Drafters that were pushed with earlier code carry all of it, and don't say these things.
    if not (folder / "drafting.py").exists():
        facts["refusals"] = refusals(folder, model, target, ids)
    by_file = {"custom_generate": str(folder), "trust_remote_code": True}
    if model.config.drafter_kind == "dart":
        try:
            stock_run(target, model, ids, **by_file)
        except ImportError as error:
            facts["refusal"] = str(error)
        return
    stock = {} if model.config.drafter_kind == "pard" else {"speculation_type": "dflash"}
    facts["stock"] = stock_run(target, model, ids, **stock)
    if stock:
        facts["right"] = right_run(target, model, ids)
    facts["by_file"] = stock_run(target, model, ids, **by_file)
    if model.config.drafter_kind == "pard":
        causal_lm = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        facts["causal_lm"] = type(causal_lm).__name__
        facts["plain"] = type(AutoModelForCausalLM.from_pretrained(folder)).__name__
        sampling = GenerationConfig(do_sample=True, temperature=0.8, top_k=20, max_new_tokens=8, pad_token_id=0)
        text = target.generate(ids, assistant_model=model, generation_config=sampling)
        facts["sampled"] = text.shape[1]
        # The base class's own generate, which writes token by token, is still there.
        facts["alone"] = torch.equal(model.generate(ids, **GREEDY), causal_lm.generate(ids, **GREEDY))


def main(work: Path) -> None:
    try:
        importlib.import_module("hf_pardraft")
        importable = True
    except ImportError:
        importable = False
    tensors = load_file(work / "inputs.safetensors")
    inputs = {"ids": tensors["ids"], "states": tensors["states"]}
    target = AutoModelForCausalLM.from_pretrained(work / "target").eval()
    found, drafts = {"importable": importable}, {}
    for folder in sorted(path for path in work.iterdir() if path.is_dir() and path.name not in ("target", "modules")):
        examine(folder, target, inputs, found, drafts)
    found["loaded"] = [name for name in sys.modules if name.split(".")[0] == "hf_pardraft"]
    save_file({name: logits.contiguous() for name, logits in drafts.items()}, work / "drafts.safetensors")
    (work / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
