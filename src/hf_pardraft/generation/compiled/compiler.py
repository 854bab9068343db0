"""Compiling the pieces of a round, once for each shape, and doing without where that fails."""

import types
import warnings
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException
from torch.nn.modules import module
from transformers import CompileConfig, PreTrainedModel
from transformers.utils import logging

from .guards import code_for, layout
from .steps import DrafterSide, changing

logger = logging.get_logger(__name__)

# Hooks that come or go between two calls are otherwise not noticed.
HOOKS_ARE_SEEN = {"skip_nnmodule_hook_guards": False}
# Inductor (torch 2.13) computes what is concatenated in its place in the result. Where that is also the new value of an
# argument that is changed in place, it then uses the memory again before the value has been copied to the argument.
CATS_ARE_COPIES = {"force_pointwise_cat": True}


@dataclass(frozen=True)
class CompiledPiece:
    """What was compiled.

    Attributes:
        source: the function that torch.compile was given.
        function: what it returned, which checks guards and compiles anew if they fail; `source` itself where that failed.
    """

    source: Callable
    function: Callable


# For each target what was compiled for it: by options and global hooks, then by piece and shape.
_compiled: "weakref.WeakKeyDictionary[PreTrainedModel, dict[Hashable, dict[Hashable, CompiledPiece]]]"
_compiled = weakref.WeakKeyDictionary()


class Compiler:
    """Compiles functions for one target, and remembers them for later calls of `generate`.

    Args:
        target: the model whose text is written.
        config: how to compile, with the meaning that transformers gives it; `None` for transformers' own choice.
    """

    def __init__(self, target: PreTrainedModel, config: CompileConfig | None) -> None:
        config = config or CompileConfig()
        # `to_dict` copies the backend, and a copy would be compiled for anew in every call.
        options = {**config.to_dict(), "backend": config.backend}
        # What differs from call to call is a tensor's value, or a dimension that is marked as dynamic.
        options["dynamic"] = bool(options["dynamic"])
        known = _compiled.setdefault(target, {})
        # No guard looks at the hooks of all modules.
        key = (repr(options), *module._global_forward_pre_hooks, *module._global_forward_hooks)
        if key not in known:
            # Whatever is wrong with the options is said now, before the prompt is read.
            torch.compile(_nothing, **options)
        self.options = options
        self.known = known.setdefault(key, {})
        self.checked: dict[Hashable, Callable] = {}

    def __call__(self, piece: Callable, shape: Hashable, *arguments: Any) -> Any:
        """`piece(*arguments)`, compiled.

        Args:
            piece: a function that depends on its arguments only.
            shape: all that its compiled code depends on, besides the target.
        """
        own_key = (piece, shape, layout(arguments))
        checked = self.checked.get(own_key)
        if checked is not None:
            return checked(*arguments)
        compiled = self.known.get((piece, shape))
        if compiled and compiled.function is piece:
            return piece(*arguments)
        code = code_for(compiled.source, arguments) if compiled else None
        if code is not None:
            self.checked[own_key] = code
            return code(*arguments)
        if compiled is None:
            # Compiled code belongs to a code object, of which only so many versions are kept: each shape gets one of its own.
            copy = types.FunctionType(piece.__code__.replace(), piece.__globals__, piece.__name__)
            compiled = CompiledPiece(copy, torch.compile(copy, **self.options))
            for drafter in (value.model for value in arguments if isinstance(value, DrafterSide)):
                # Its code is of no use without it, and it may be one of many that a target meets.
                weakref.finalize(drafter, self.known.pop, (piece, shape), None)
        return self._run(piece, shape, compiled, arguments)

    def check_again(self) -> None:
        """Look at everything anew in the next calls: arguments have become others."""
        self.checked.clear()

    def _run(self, piece: Callable, shape: Hashable, compiled: CompiledPiece, arguments: tuple[Any, ...]) -> Any:
        """A call that may compile: the first one with a shape, and any that finds other things than those before."""
        before = [(tensor, tensor.clone()) for tensor in changing(arguments)]
        try:
            # Older torch can't enter one patch twice, as calls in two threads would.
            hooks, cats = torch._dynamo.config.patch(HOOKS_ARE_SEEN), torch._inductor.config.patch(CATS_ARE_COPIES)
            with hooks, cats, warnings.catch_warnings():
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
            self.known[piece, shape] = CompiledPiece(piece, piece)
            # What stands before a graph break has run when what follows it fails to compile.
            for tensor, values in before:
                tensor.copy_(values)
            return piece(*arguments)
        self.known[piece, shape] = compiled
        return result


# Those of backends are among them.
COMPILE_ERRORS = (TorchDynamoException, FailOnRecompileLimitHit)


def _nothing() -> None:
    pass
