"""Compiling the pieces of a round, once for each shape, and doing without where that fails."""

import types
import warnings
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from transformers import CompileConfig, GenerationConfig, PreTrainedModel
from transformers.utils import logging

logger = logging.get_logger(__name__)

# For each target what was compiled for it: by piece, options and shape.
_compiled: "weakref.WeakKeyDictionary[PreTrainedModel, dict[Hashable, Callable]]" = weakref.WeakKeyDictionary()


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
        # Whatever is wrong with them is said now, before the prompt is read.
        torch.compile(_nothing, **options)
        self.options = options
        self.known = _compiled.setdefault(target, {})

    def __call__(self, piece: Callable, shape: Hashable, *arguments: Any) -> Any:
        """`piece(*arguments)`, compiled.

        Args:
            piece: a function that depends on its arguments only.
            shape: all that its compiled code depends on, besides the target.
        """
        key = (piece, shape, repr(self.options))
        compiled = self.known.get(key)
        if compiled is not None:
            return compiled(*arguments)
        # Compiled code belongs to a code object, of which only so many versions are kept: each shape gets one of its own.
        copy = types.FunctionType(piece.__code__.replace(), piece.__globals__, piece.__name__)
        compiled = torch.compile(copy, **self.options)
        try:
            with warnings.catch_warnings():
                # That caches of constants are looked through, and the like.
                warnings.simplefilter("ignore")
                result = compiled(*arguments)
        except COMPILE_ERRORS as error:
            # A backend's own error is wrapped.
            cause = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
            if isinstance(cause, (torch.OutOfMemoryError, MemoryError)):
                raise cause from error
            first_line = str(cause).strip().split("\n")[0]
            logger.warning_once(
                f"Compiling the rounds failed, so they run uncompiled: {type(cause).__name__}: {first_line}"
            )
            torch._dynamo.reset_code(copy.__code__)
            self.known[key] = piece
            return piece(*arguments)
        self.known[key] = compiled
        return result


# Those of backends are among them.
COMPILE_ERRORS = (TorchDynamoException,)


def _nothing() -> None:
    pass


def wants_compiled(generation_config: GenerationConfig) -> bool:
    """Whether a call of `generate` asks for compiled rounds."""
    if generation_config.disable_compile:
        return False
    return generation_config.cache_implementation == "static"
