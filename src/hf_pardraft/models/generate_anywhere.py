"""Draft with a published drafter, with the package hf_pardraft or without it.

Saved as `custom_generate/generate.py` beside every drafter, so that transformers finds it:

    target.generate(**inputs, assistant_model=drafter, custom_generate=REPOSITORY, trust_remote_code=True)

With hf_pardraft (`pip install hf-pardraft`) everything works, and `custom_generate` is not needed: import the package and pass
`assistant_model=drafter`. Without it transformers' own loops run DFlash, DFlare and PARD drafters: one sequence, chains only,
and none of hf_pardraft's settings (`tree_budget`, `ngram_model`, `draft_schedule`, `verification`). A DART drafter, and what a
PARD-2 drafter reads of its target, need the package.
"""

import importlib
import warnings
from typing import Any

PACKAGE = "hf_pardraft"
INSTALL = "pip install hf-pardraft"
# Which of transformers' own ways of speculating runs a kind of drafter: `None` is its ordinary assisted decoding.
STOCK_SPECULATION = {"dflash": "dflash", "dflare": "dflash", "pard": None}


def generate(*args: Any, model: Any, assistant_model: Any = None, **kwargs: Any) -> Any:
    """`model.generate(*args, assistant_model=assistant_model, **kwargs)`, by hf_pardraft where it is installed.

    Args:
        model: the target, or a drafter that is asked for its own tokens.
        assistant_model: the drafter.
        **kwargs: everything else that `generate` takes.

    Raises:
        ImportError: for a drafter that only hf_pardraft can run, where it is missing.
        ValueError: for a drafter that was made for another target.
    """
    # A model that was loaded with this file has it as its `generate`; what is wanted is the one of its class.
    own_generate = type(model).generate
    if assistant_model is None:
        return own_generate(model, *args, **kwargs)
    # Any model may be an assistant, and only drafters' configurations have this attribute.
    kind = getattr(assistant_model.config, "drafter_kind", None)
    if kind is not None and not install_package():
        if kind not in STOCK_SPECULATION:
            raise ImportError(
                f"a {type(assistant_model).__name__} drafts with the package {PACKAGE}, which is not installed: {INSTALL}, then "
                f"import {PACKAGE} and call generate with assistant_model=drafter"
            )
        assistant_model.check_target(model)
        if STOCK_SPECULATION[kind] is not None:
            kwargs.setdefault("speculation_type", STOCK_SPECULATION[kind])
        warnings.warn(
            f"{PACKAGE} is not installed, so transformers' own loop runs this {type(assistant_model).__name__}: one sequence, "
            f"chains only, without {PACKAGE}'s settings. For the rest: {INSTALL}",
            UserWarning,
            stacklevel=2,
        )
    return own_generate(model, *args, assistant_model=assistant_model, **kwargs)


def install_package() -> bool:
    """Import hf_pardraft, which teaches every model's `generate` about drafters; whether it is there."""
    try:
        importlib.import_module(PACKAGE)
    except ImportError:
        return False
    return True
