"""How a chat's answers are drawn: what the user asks for, checked, and the target's own settings otherwise."""

from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from ..user_input.models import check_generation_settings
from ..user_input.options import check_temperature

# What can be asked for, before the chat and in it.
NAMES = ("max_new_tokens", "temperature", "top_p", "top_k", "repetition_penalty")


@dataclass(frozen=True)
class Sampling:
    """Settings of `generate`; `None` leaves a setting as the target's generation config has it.

    Attributes:
        max_new_tokens: most tokens of an answer.
        temperature: 0 is greedy.
        top_p, top_k, repetition_penalty: as in transformers.

    Raises:
        ValueError: for a value that can't be honoured.
    """

    max_new_tokens: int = 512
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        check_generation_settings(vars(self), "the settings of this chat")
        if self.temperature is not None:
            check_temperature(self.temperature)
        if self.max_new_tokens is None or self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"top_k must be at least 0 (0: all tokens), got {self.top_k}")
        if self.repetition_penalty is not None and self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty must be above 0 (1: none), got {self.repetition_penalty}")

    def check_draws(self, target_config: GenerationConfig) -> None:
        """Raise a `ValueError` for what to draw from, where nothing is drawn.

        Args:
            target_config: the target's own settings.
        """
        draws = target_config.do_sample if self.temperature is None else self.temperature > 0
        if not draws and (self.top_p is not None or self.top_k is not None):
            raise ValueError(
                "top_p and top_k say what is drawn from, and this chat is greedy: give it a temperature above 0"
            )

    @property
    def arguments(self) -> dict[str, Any]:
        """For `generate`, besides `max_new_tokens`."""
        given = {name: value for name, value in vars(self).items() if value is not None and name != "max_new_tokens"}
        if self.temperature == 0:
            del given["temperature"]
        return given if self.temperature is None else {**given, "do_sample": self.temperature > 0}
