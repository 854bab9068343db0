"""A target that nobody has tried drafting with is tried once: several tokens in one forward must be as good as one by one.

The architectures of transformers have been tried with all that they offer (`benchmarks/architectures.py`). Code that came with a
checkpoint, a class or an attention function of a user's own, or what somebody has put in the place of a layer's forward, has not.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..tree.token_tree import TokenTree, ancestors_of, chain_tree
from .prompt import PendingTokens
from .reader import TargetReader
from .step_inputs import PROBE_ERRORS
from .structure import hooks_of, modules_of

# Packages whose modules are known to treat each token of a forward alike.
KNOWN_PACKAGES = {"accelerate", "bitsandbytes", "peft", "torch", "torchao", "transformers"}
# Puts functions of its own in the place of theirs while a call runs.
OURS = {"hf_pardraft"}
# Relative error of logits; forwards of other shapes round otherwise, and where experts are chosen, much may follow from it.
TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}
COARSE_TOLERANCE = 0.3
# What code may raise that was not written for such a forward.
FORWARD_ERRORS = (AssertionError, *PROBE_ERRORS)
NUM_READ, NUM_TOKENS = 2, 6

# Of each target, whether it was tried with chains, and with trees, and with which functions of others, by their ids.
_tried: "weakref.WeakKeyDictionary[PreTrainedModel, set[tuple[bool, frozenset[int]]]]" = weakref.WeakKeyDictionary()


def check_reads_alike(
    target: PreTrainedModel, input_ids: torch.LongTensor, model_kwargs: dict[str, Any], takes_masks: bool
) -> None:
    """Raise a `ValueError` if a target of foreign code reads a draft otherwise than its tokens one by one.

    Args:
        target: the model; it is tried once, and again when it attends in another way, or other forwards were put in the place
            of its layers' own.
        input_ids: `(batch, length)`; a few of its tokens are read.
        model_kwargs: as `generate` prepared them.
        takes_masks: whether it will be given masks and positions (trees, batches).
    """
    modules, tried = modules_of(target), _tried.setdefault(target, set())
    forwards = forwards_of_others(modules) + attention_of_others(modules)
    case = takes_masks, frozenset(map(id, forwards))
    if case in tried or not (forwards or packages_of(modules) - KNOWN_PACKAGES):
        return
    token = input_ids[:1, -1:]
    ids = torch.cat([input_ids[:1, -NUM_TOKENS:], token.expand(-1, NUM_TOKENS)], dim=1)[:, :NUM_TOKENS]
    try:
        expected = _one_by_one(target, ids, model_kwargs)
        errors = relative_errors(expected, _in_one_forward(target, ids, model_kwargs, takes_masks))
    except FORWARD_ERRORS as error:
        raise ValueError(
            _refusal(target, f"tried with a few tokens, it raised {type(error).__name__}: {error}")
        ) from error
    if max(errors) > TOLERANCES.get(target.dtype, COARSE_TOLERANCE):
        raise ValueError(_refusal(target, f"tried with a few tokens, its logits differed by {max(errors):.1%}"))
    tried.add(case)


def _refusal(target: PreTrainedModel, reason: str) -> str:
    return (
        f"drafting reads several tokens in one forward, and {type(target).__name__} does not read them as it reads one by one "
        f"({reason}): call generate without assistant_model"
    )


def package_of(origin: type | Callable) -> str:
    """The package that a class or function is from; none of what doesn't say."""
    return (getattr(origin, "__module__", None) or "").partition(".")[0]


def packages_of_function(function: Callable) -> set[str]:
    """The packages that a function says it is from, and that its code is from: `functools.wraps` makes it say another's."""
    found = {package_of(function)}
    while isinstance(function, (partial, MethodType)):
        function = function.func if isinstance(function, partial) else function.__func__
    if isinstance(function, FunctionType):
        found.add(function.__globals__.get("__name__", "").partition(".")[0])
    return found


def _is_anothers(function: Callable) -> bool:
    """Whether a function is neither a known package's nor ours."""
    return bool(packages_of_function(function) - KNOWN_PACKAGES - OURS)


def packages_of(modules: Sequence[nn.Module]) -> set[str]:
    """The packages that the classes of some modules are from, and their forwards, which may have been replaced."""
    classes = set(map(type, modules))
    # What is compiled has none that a class could be asked for.
    forwards = [each.forward for each in classes if hasattr(each, "forward")]
    return set(map(package_of, classes)).union(*map(packages_of_function, forwards))


def forwards_of_others(modules: Sequence[nn.Module]) -> list[Callable]:
    """What a caller has put in the place of single modules' forwards: neither a known package's nor ours."""
    forwards = [vars(module)["forward"] for module in modules if "forward" in vars(module)]
    return list(filter(_is_anothers, forwards))


def attention_of_others(modules: Sequence[nn.Module]) -> list[Callable]:
    """The functions by which models attend that are none of a known package's."""
    names = {module.config._attn_implementation for module in modules if isinstance(module, PreTrainedModel)}
    # What is no function of all models is one of the model's own package.
    functions = [function for name in names if (function := ALL_ATTENTION_FUNCTIONS.get(name)) is not None]
    return list(filter(_is_anothers, functions))


def hooks_of_others(model: nn.Module) -> list[Callable]:
    """The hooks of a model's forwards, or of all modules that there are, that are a caller's own."""
    of_all = [*torch_module._global_forward_pre_hooks.values(), *torch_module._global_forward_hooks.values()]
    return [hook for hook in [*hooks_of(model), *of_all] if _package_of_hook(hook) not in KNOWN_PACKAGES]


def _package_of_hook(hook: Callable) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    return package_of(hook if isinstance(hook, (FunctionType, MethodType)) else type(hook))


def _one_by_one(target: PreTrainedModel, ids: torch.LongTensor, model_kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Logits `(vocab,)` after each token of `ids (1, tokens)` but the first ones, read as plain `generate` does."""
    reader = _reader(target, ids, model_kwargs)
    return [_step(reader, ids, place) for place in range(NUM_READ, NUM_TOKENS)]


def _in_one_forward(
    target: PreTrainedModel, ids: torch.LongTensor, model_kwargs: dict[str, Any], takes_masks: bool
) -> list[torch.Tensor]:
    """The same, of which all but the last are read in one forward beside tokens that are then forgotten."""
    reader, start = _reader(target, ids, model_kwargs), NUM_READ
    drafted = ids[:, NUM_READ + 1 : -1]
    depth = drafted.shape[1]
    if takes_masks:
        # At each level a wrong token, then the right one, from which it goes on.
        tokens = torch.stack([drafted.flip(1), drafted], dim=2).flatten(1)
        parents = torch.tensor([[2 * (node // 2) for node in range(2 * depth)]], device=ids.device)
        depths = torch.tensor([[node // 2 + 1 for node in range(2 * depth)]], device=ids.device)
        tree = TokenTree(tokens, parents, depths, ancestors_of(parents, depth))
        path = [2 * level + 1 for level in range(depth)]
    else:
        # Its last token is wrong.
        tree, path = chain_tree(torch.cat([drafted, ids[:, :1]], dim=1)), list(range(depth))
    anchor = PendingTokens(ids[:, start : start + 1], torch.full_like(ids[:, :1], start))
    logits = reader.read(anchor, tree).logits[0].float()
    found = [logits[slot] for slot in (0, *(node + 1 for node in path))]
    if reader.is_hybrid:
        return found
    reader.keep(start, anchor, [path])
    return [*found, _step(reader, ids, NUM_TOKENS - 1)]


def _reader(target: PreTrainedModel, ids: torch.LongTensor, model_kwargs: dict[str, Any]) -> TargetReader:
    """A reader that has read the first tokens."""
    reader = TargetReader(target, model_kwargs, {})
    first = PendingTokens(ids[:, :NUM_READ], torch.arange(NUM_READ, device=ids.device)[None])
    reader.read(first, None)
    reader.keep(0, first, [[]])
    return reader


def _step(reader: TargetReader, ids: torch.LongTensor, place: int) -> torch.Tensor:
    """Logits `(vocab,)` after the token at a place, which is read alone."""
    one = PendingTokens(ids[:, place : place + 1], torch.full_like(ids[:, :1], place))
    logits = reader.read(one, None).logits[0, -1].float()
    reader.keep(place, one, [[]])
    return logits


def relative_errors(expected: list[torch.Tensor], found: list[torch.Tensor]) -> list[float]:
    """How far tensors are from what is expected, in parts of that."""
    pairs = zip(expected, found, strict=False)
    return [float((own - truth).norm() / truth.norm().clamp(min=1e-12)) for truth, own in pairs]
