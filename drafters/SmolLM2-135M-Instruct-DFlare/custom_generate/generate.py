"""Draft with a published drafter, with the package hf_pardraft or without it.

Saved as `custom_generate/generate.py` beside every drafter, so that transformers finds it:

    target.generate(**inputs, assistant_model=drafter, custom_generate=REPOSITORY, trust_remote_code=True)

With hf_pardraft (`pip install hf-pardraft`) everything works, with `assistant_model=REPOSITORY` too; once it is imported,
`assistant_model` is enough. Without it transformers' own loops run DFlash, DFlare and PARD drafters: one sequence, chains only,
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
        assistant_model: the drafter, or its name.
        **kwargs: everything else that `generate` takes.

    Raises:
        ImportError: for a drafter that only hf_pardraft can run or load, where it is missing.
        ValueError: for a drafter that was made for another target, or none.
    """
    # Any model may be an assistant, and only drafters' configurations have this attribute.
    kind = getattr(getattr(assistant_model or model, "config", None), "drafter_kind", None)
    if assistant_model is None and kind is None:
        raise ValueError("custom_generate names the code that drafts, assistant_model the drafter: pass that, too")
    is_ordinary = assistant_model is None or (kind is None and not isinstance(assistant_model, str))
    if not is_ordinary and not install_package():
        if kind not in STOCK_SPECULATION:
            what = "a drafter's name" if isinstance(assistant_model, str) else f"a {type(assistant_model).__name__}"
            raise ImportError(
                f"{what} needs the package {PACKAGE}, which is not installed: {INSTALL}, or, for a drafter that is no DART, pass "
                "what AutoModel.from_pretrained(name, trust_remote_code=True) loads as assistant_model"
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
    # A model that was loaded with this file has it as its `generate`; what is wanted is the one of its class.
    return type(model).generate(model, *args, assistant_model=assistant_model, **kwargs)


def install_package() -> bool:
    """Import hf_pardraft, which teaches every model's `generate` about drafters; whether it is there."""
    try:
        importlib.import_module(PACKAGE)
    except ImportError:
        return False
    return True
