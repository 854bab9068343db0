"""A conversation as token ids, so that the target reads nothing twice from turn to turn."""

from collections.abc import Collection
from typing import Any

from transformers import Cache, PreTrainedTokenizerBase

from ..pairing.chat_format import has_chat_template, render


class Conversation:
    """What was said, as messages and as the token ids that the target has read and written.

    With a chat template each prompt is what the template makes of all messages. Where that begins with the text so far, which is
    the rule, the ids of the text so far stay as they are: those that the target wrote, however a tokenizer would cut them. A
    template that changes earlier answers (many leave thoughts out) makes the target read all of them again. Without a chat
    template a message is appended to the text as it stands.

    Args:
        tokenizer: the target's.
        ends: token ids that end an answer, which templates write in their own way.
        system: the system prompt.
        use_template: whether to use a chat template, if there is one.
        template_kwargs: for the template, such as `enable_thinking`; or the template itself, `chat_template`.

    Raises:
        ValueError: if there is a system prompt and no template, or the template refuses it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        ends: Collection[int] = (),
        system: str | None = None,
        use_template: bool = True,
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.ends = ends
        self.template_kwargs = template_kwargs or {}
        self.use_template = use_template and has_chat_template(tokenizer, self.template_kwargs)
        self.begin(system)

    def begin(self, system: str | None) -> None:
        """Forget all, and begin with this system prompt."""
        if system and not self.use_template:
            raise ValueError(
                "a system prompt needs a chat template, and none is used here: leave it out, or write it into the first message"
            )
        messages = [{"role": "system", "content": system}] if system else []
        if self.use_template:
            # A template that refuses a system prompt says so now.
            render(self.tokenizer, [*messages, {"role": "user", "content": "Hello"}], self.template_kwargs)
        self.system = system
        self.messages: list[dict[str, str]] = messages
        self.ids: list[int] = []
        self._cache: Cache | None = None

    def prompt(self, message: str) -> list[int]:
        """Token ids of the conversation with another message of the user's, ready to be answered.

        Raises:
            ValueError: if the template refuses the conversation, or there is no token in it.
        """
        if self.use_template:
            messages = [*self.messages, {"role": "user", "content": message}]
            ids = self._with_ids_kept(render(self.tokenizer, messages, self.template_kwargs))
        else:
            ids = [*self.ids, *self.tokenizer(message, add_special_tokens=not self.ids)["input_ids"]]
        if not ids:
            raise ValueError("the message has no token: the target needs one at least to go on from")
        return ids

    def take_cache(self, ids: list[int]) -> Cache | None:
        """The cache of the text so far, for a call that goes on from `ids`; `None` if that begins otherwise.

        It is handed out once, since a call that fails leaves anything in it.
        """
        cache, self._cache = self._cache, None
        if cache is None:
            return None
        num_read = int(cache.get_seq_length())
        fits = 0 < num_read < len(ids) and num_read <= len(self.ids) and ids[:num_read] == self.ids[:num_read]
        return cache if fits else None

    def add(self, message: str, prompt: list[int], answer: list[int], cache: Cache | None) -> None:
        """Note a turn.

        Args:
            message: the user's.
            prompt: see [`prompt`].
            answer: token ids that the target wrote after it.
            cache: what it has read of both; `None` if that is not known.
        """
        said = self.tokenizer.decode(answer, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self.messages += [{"role": "user", "content": message}, {"role": "assistant", "content": said}]
        self.ids = [*prompt, *answer]
        if answer and answer[-1] in self.ends:
            # It was chosen, not read, so the cache does not have it.
            self.ids.pop()
        self._cache = cache

    def _with_ids_kept(self, text: str) -> list[int]:
        """The ids of a rendered conversation; those of the text so far are kept, if it begins with that."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if ids[: len(self.ids)] == self.ids:
            return ids
        so_far = self.tokenizer.decode(self.ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if not text.startswith(so_far):
            return ids
        return [*self.ids, *self.tokenizer(text[len(so_far) :], add_special_tokens=False)["input_ids"]]
