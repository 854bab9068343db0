"""DART's published loop, started with the demo family's weights; see peers.py and peer_loops.py."""

import copy
import importlib
import inspect
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any, TypedDict

import torch
import transformers.utils
from safetensors.torch import load_file
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_pardraft import NgramModel
from hf_pardraft.demo.family import SHIPPED_FAMILY
from hf_pardraft.demo.prompts import BEGINNINGS
from peer_loops import PeerLoop, Task, stand_in

ORDER = 3
# Targets of other architectures, whose files need an older transformers.
OTHER_TARGETS = {
    "modeling_llama_kv": "LlamaForCausalLM",
    "modeling_qwen3_moe_kv": "Qwen3MoeForCausalLM",
    "modeling_mixtral_kv": "MixtralForCausalLM",
}


def plain_frequencies(config: Any, device: torch.device | None = None) -> tuple[torch.Tensor, float]:
    """Rotary frequencies without scaling, `(head_dim / 2,)`, which transformers no longer lists among the others."""
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    return config.rope_parameters["rope_theta"] ** -steps, 1.0


def import_dart(folder: Path) -> ModuleType:
    """DART's modules, with a Qwen3 target as the only one; its C++ is built with the first import.

    Names that transformers has dropped come back for it. Masks are passed on as they are made, as transformers did with what has
    four dimensions.
    """
    for module, name in OTHER_TARGETS.items():
        sys.modules[f"dart.model.{module}"] = stand_in(f"dart.model.{module}", **{name: object})
    transformers.utils.LossKwargs = TypedDict("LossKwargs", {}, total=False)
    ROPE_INIT_FUNCTIONS.setdefault("default", plain_frequencies)
    # It imports more of itself in each round, so the folder stays.
    sys.path.insert(0, str(folder))
    module = importlib.import_module("dart.model.dart_model")
    qwen3 = importlib.import_module("dart.model.modeling_qwen3_kv")
    qwen3.create_causal_mask = lambda attention_mask, **others: attention_mask
    qwen3.Qwen3ForCausalLM._tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    # In transformers it now names all that is said of rotary positions, which are plain here.
    module.DartConfig.rope_scaling = None
    return module


def count_library(module: ModuleType, task: Task) -> Any:
    """DART's n-gram model of Python's library, without the modules that the prompts are from."""
    counts = module.load_cpp_ngram().TrieNgram(order=ORDER)
    left_out = {inspect.getsourcefile(beginning) for beginning in BEGINNINGS}
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if str(path) not in left_out:
            tokens = task.family.tokenizer(path.read_text(errors="replace"))["input_ids"]
            counts.add_conversation([*tokens, task.end_of_text])
    return counts


def read_model(module: ModuleType, task: Task, counts: Any) -> nn.Module:
    """The family's target and DART drafter in DART's own classes, in float32."""
    target = module.KVQwen3ForCausalLM(copy.deepcopy(task.family.target.config)).eval()
    target.load_state_dict(task.family.target.state_dict())
    names = str(SHIPPED_FAMILY / "target"), str(SHIPPED_FAMILY / "dart")
    weights = load_file(SHIPPED_FAMILY / "dart" / "model.safetensors")
    model = module.DartModel(target, target.config, *names, counts, weights).eval()
    if unread := weights.keys() - model.dart_layer.state_dict().keys():
        raise RuntimeError(
            f"DART's code reads other weights than the family's drafter has: {', '.join(sorted(unread))}"
        )
    # The family's drafter was trained with one final norm, where the published ones have two.
    model.dart_layer.compute_logits = model.dart_layer.lm_head
    return model


def dart_loops(folder: Path, task: Task, budget: int) -> tuple[dict[bool, PeerLoop], NgramModel]:
    """DART's loop without and with n-grams, and the same n-grams for ours."""
    module = import_dart(folder)
    counts = count_library(module, task)
    counts.save(str(task.work / "library.trie"))
    vocab_size = task.family.target.config.vocab_size
    ngram = NgramModel.from_dart_trie(task.work / "library.trie", vocab_size=vocab_size)
    model = read_model(module, task, counts)
    search = importlib.import_module("dart.tree_search.tree_search")
    utilities = importlib.import_module("dart.model.dart_utils")
    settings = search.get_config()

    def on_own_threads(*arguments: Any, **options: Any) -> Any:
        # Its C++ asks for 16 threads, of OpenMP and so of torch, whose number stays as it was.
        num_threads = torch.get_num_threads()
        found = search.tree_search(*arguments, **options)
        torch.set_num_threads(num_threads)
        return found

    utilities.tree_search = on_own_threads

    def loop(weight: float) -> PeerLoop:
        def write(prompt: torch.LongTensor) -> torch.LongTensor:
            settings["ngram_weights"] = weight
            return model.dart_generate(prompt, max_new_token_num=task.max_new_tokens, remain_total=budget)

        return PeerLoop(model.base_model.model.layers[0], write)

    return {False: loop(0.0), True: loop(settings["ngram_weights"])}, ngram
