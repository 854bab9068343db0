"""Compiling the steps of a round, once for each shape, and doing without where that fails."""

import threading
import types
import warnings
import weakref
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException
from torch.nn.modules import module
from transformers import CompileConfig, PreTrainedModel
from transformers.utils import logging

from ..one_off import made_once
from ..packing.inductor_pass import PackLinearLayers
from ..tree.token_tree import TokenTree
from .steps import DrafterSide, changing

logger = logging.get_logger(__name__)

# Hooks that come or go between two calls are otherwise not noticed.
HOOKS_ARE_SEEN = {"skip_nnmodule_hook_guards": False}
# Inductor (torch 2.13) computes what is concatenated in its place in the result. Where that is also the new value of an
# argument that is changed in place, it then uses the memory again before the value has been copied to the argument.
CATS_ARE_COPIES = {"force_pointwise_cat": True}
# What may change is otherwise taken for what happened to be as large, such as a batch's items for a model's heads.
SIZES_ARE_APART = {"use_duck_shape": False}
# Backends other than inductor don't look at it.
WEIGHTS_ARE_PACKED = {"post_grad_custom_pre_pass": PackLinearLayers()}
# What is caught is caught for all threads: of two that catch at once, one would put the other's state back for good.
_warnings_lock = threading.RLock()
# Backends' own errors are among them.
COMPILE_ERRORS = (TorchDynamoException, FailOnRecompileLimitHit)


@dataclass(frozen=True)
class CompiledStep:
    """What was compiled.

    Attributes:
        source: the function that torch.compile was given.
        function: what it returned, which checks guards and compiles anew if they fail; `source` itself where that failed.
    """

    source: Callable
    function: Callable


# For each target what was compiled for it: by options and global hooks, then by step and shape.
_compiled: "weakref.WeakKeyDictionary[PreTrainedModel, dict[Hashable, dict[Hashable, CompiledStep]]]"
_compiled = weakref.WeakKeyDictionary()


class Compiler:
    """Compiles functions for one target, and remembers them for later calls of `generate`.

    Args:
        target: the model whose text is written.
        config: how to compile, with the meaning that transformers gives it; `None` for transformers' own choice.
        packs: whether weights are packed.
    """

    def __init__(self, target: PreTrainedModel, config: CompileConfig | None, packs: bool = False) -> None:
        config = config or CompileConfig()
        # `to_dict` copies the backend, and a copy would be compiled for anew in every call.
        options = {**config.to_dict(), "backend": config.backend}
        # What differs from call to call is a tensor's value, or a dimension that is marked as dynamic.
        options["dynamic"] = bool(options["dynamic"])
        known = _compiled.setdefault(target, {})
        # A pass of the caller's own stands where ours would.
        packs = packs and torch._inductor.config.post_grad_custom_pre_pass is None
        # No guard looks at the hooks of all modules.
        key = (repr(options), packs, *module._global_forward_pre_hooks, *module._global_forward_hooks)
        if key not in known:
            # Whatever is wrong with the options is said now, before the prompt is read.
            torch.compile(_nothing, **options)
        self.options = options
        self.inductor = {**CATS_ARE_COPIES, **(WEIGHTS_ARE_PACKED if packs else {})}
        self.known = known.setdefault(key, {})
        # Steps of other shapes that were met for the first time.
        self.num_compiled = 0
        self.checked: dict[Hashable, Callable] = {}

    def __call__(self, step: Callable, shape: Hashable, *arguments: Any) -> Any:
        """`step(*arguments)`, compiled.

        Args:
            step: a function that depends on its arguments only.
            shape: all that its compiled code depends on, besides the target.
        """
        own_key = (step, shape, layout_of_arguments(arguments))
        checked = self.checked.get(own_key)
        if checked is not None:
            return checked(*arguments)
        compiled = self.known.get((step, shape))
        if compiled and compiled.function is step:
            return step(*arguments)
        code = code_for(compiled.source, arguments) if compiled else None
        if code is not None:
            self.checked[own_key] = code
            return code(*arguments)
        if compiled is None:
            self.num_compiled += 1
            # Compiled code belongs to a code object, of which only so many versions are kept: each shape gets one of its own.
            copy = types.FunctionType(step.__code__.replace(), step.__globals__, step.__name__)
            compiled = CompiledStep(copy, torch.compile(copy, **self.options))
            for drafter in (value.model for value in arguments if isinstance(value, DrafterSide)):
                # Its code is of no use without it, and it may be one of many that a target meets.
                weakref.finalize(drafter, self.known.pop, (step, shape), None)
            with made_once():
                return self._run(step, shape, compiled, arguments)
        return self._run(step, shape, compiled, arguments)

    def has_compiled(self, step: Callable, shape: Hashable) -> bool:
        """Whether a step was compiled, and that didn't fail."""
        compiled = self.known.get((step, shape))
        return compiled is not None and compiled.function is not step

    def check_again(self) -> None:
        """Look at everything anew in the next calls: arguments have become others."""
        self.checked.clear()

    def _run(self, step: Callable, shape: Hashable, compiled: CompiledStep, arguments: tuple[Any, ...]) -> Any:
        """A call that may compile: the first one with a shape, and any that finds other things than those before."""
        before = [(tensor, tensor.clone()) for tensor in changing(arguments)]
        try:
            # Older torch can't enter one patch twice, as calls in two threads would.
            hooks, cats = torch._dynamo.config.patch(HOOKS_ARE_SEEN), torch._inductor.config.patch(self.inductor)
            apart = torch.fx.experimental._config.patch(SIZES_ARE_APART) if self.options["dynamic"] else nullcontext()
            with hooks, cats, apart, _warnings_lock, warnings.catch_warnings():
                # That caches of constants are looked through, and the like.
                warnings.simplefilter("ignore")
                result = compiled.function(*arguments)
        except COMPILE_ERRORS as error:
            # A backend's own error is wrapped.
            cause = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
            if isinstance(cause, (torch.OutOfMemoryError, MemoryError)):
                raise cause from error
            first_line = str(cause).strip().split("\n")[0]
            logger.warning_once(
                f"Compiling the rounds failed, so they run uncompiled: {type(cause).__name__}: {first_line}"
            )
            torch._dynamo.reset_code(compiled.source.__code__)
            self.known[step, shape] = CompiledStep(step, step)
            # What stands before a graph break has run when what follows it fails to compile.
            for tensor, values in before:
                tensor.copy_(values)
            return step(*arguments)
        self.known[step, shape] = compiled
        return result


def code_for(function: Callable, arguments: tuple[Any, ...]) -> Callable | None:
    """The compiled code of a function that these arguments may run, as a function that checks nothing.

    Args:
        function: what was given to `torch.compile`.
        arguments: of the call, by position.

    Returns:
        `None` if nothing was compiled for such arguments, or if it can't run by itself (it is in several steps, or this torch
        keeps it elsewhere). Where somebody told torch to run everything eager, nothing compiled is returned either.
    """
    try:
        if torch._dynamo.eval_frame._stance.stance == "force_eager":
            return None
        entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(function.__code__)
        given = dict(zip(function.__code__.co_varnames, arguments, strict=False))
        code = next((entry.code for entry in entries if entry.guard_manager.check(given)), None)
    except (AttributeError, TypeError):
        return None
    # What follows a graph break is compiled by itself, and only found by Dynamo.
    if code is None or any(name.startswith("__resume_at") for name in code.co_names):
        return None
    return types.FunctionType(code, function.__globals__, function.__name__)


def layout_of_arguments(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Shapes and strides of the tensors and trees among some arguments."""
    found = []
    for value in arguments:
        if isinstance(value, TokenTree):
            # The rest of a chain follows from the shape of its tokens.
            rest = () if value.is_chain else (value.parents.stride(), value.ancestors.stride())
            found.append((value.is_chain, value.tokens.shape, value.tokens.stride(), rest))
        elif isinstance(value, torch.Tensor):
            found.append((value.shape, value.stride()))
    return tuple(found)


def _nothing() -> None:
    pass
