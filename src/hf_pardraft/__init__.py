"""hf_pardraft: parallel drafters for speculative decoding, native to Hugging Face Transformers.

Importing it lets every decoder-only model take a drafter: `target.generate(..., assistant_model=drafter)`.
"""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoModel

from . import by_name
from .auto import AutoDrafter
from .generation import hooks
from .generation.candidate_generator import ParallelCandidateGenerator
from .generation.stats import DecodeStats
from .models.base import ParallelDrafter
from .models.configuration_dart import DartConfig
from .models.configuration_dflare import DFlareConfig
from .models.configuration_dflash import DFlashConfig
from .models.configuration_pard import PardConfig
from .models.modeling_dart import DartDrafter
from .models.modeling_dflare import DFlareDrafter
from .models.modeling_dflash import DFlashDrafter
from .models.modeling_pard import PardDrafter
from .ngram.model import NgramModel
from .services import PackageServices

if TYPE_CHECKING:
    from .training.arguments import DraftTrainingArguments
    from .training.trainer import DraftTrainer

__version__ = version("hf-pardraft")

__all__ = [
    "AutoDrafter",
    "DFlareConfig",
    "DFlareDrafter",
    "DFlashConfig",
    "DFlashDrafter",
    "DartConfig",
    "DartDrafter",
    "DecodeStats",
    "DraftTrainer",
    "DraftTrainingArguments",
    "NgramModel",
    "ParallelCandidateGenerator",
    "PardConfig",
    "PardDrafter",
]


def __getattr__(name: str) -> Any:
    # Training pulls in accelerate and the Trainer, which a generate caller has no use for.
    if name == "DraftTrainer":
        from .training.trainer import DraftTrainer

        return DraftTrainer
    if name == "DraftTrainingArguments":
        from .training.arguments import DraftTrainingArguments

        return DraftTrainingArguments
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


for drafter_class in (DFlashDrafter, DFlareDrafter, DartDrafter):
    AutoConfig.register(drafter_class.config_class.model_type, drafter_class.config_class, exist_ok=True)
    AutoModel.register(drafter_class.config_class, drafter_class, exist_ok=True)
ParallelDrafter.services = PackageServices()
hooks.install()
by_name.install()
