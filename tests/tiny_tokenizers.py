"""Byte-level tokenizers: of code, and with the special tokens of chats and chat templates of several habits."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = "user assistant system hello there what is the sum of two and three five is it not\n" * 4
SAMPLE_TEXT = 'def add(a, b):\n    """Return the sum of a and b."""\n    return a + b\n\n\nclass Point:\n    pass\n'
CODE_VOCABULARY = 300

HEAD = "{{'<|im_start|>' + m.role + '\\n'}}"
PROMPT = "{% if add_generation_prompt %}{{'<|im_start|>assistant\\n'}}{% endif %}"
# As of models that see images, too: a content that is a text shows nothing.
PARTS_ONLY = (
    "{% for m in messages %}"
    + HEAD
    + "{% for part in m.content %}{% if part.type == 'text' %}{{part.text}}{% endif %}{% endfor %}"
    + "{{'<|im_end|>\\n'}}{% endfor %}"
    + PROMPT
)
TEMPLATES = {
    # Every turn alike.
    "chatml": "{% for m in messages %}" + HEAD + "{{m.content + '<|im_end|>\\n'}}{% endfor %}" + PROMPT,
    # The answer's thinking is shown in the last turn only.
    "thinking": (
        "{% for m in messages %}"
        + HEAD
        + "{% if m.role == 'assistant' and not loop.last %}{{m.content.split('</think>')[-1].strip()}}"
        "{% else %}{{m.content}}{% endif %}{{'<|im_end|>\\n'}}{% endfor %}"
        + PROMPT
        + "{% if add_generation_prompt and enable_thinking is false %}{{'<think></think>'}}{% endif %}"
    ),
    # The prompt makes the target think, and no answer shows it.
    "prompted_thinking": (
        "{% for m in messages %}"
        + HEAD
        + "{{m.content.split('</think>')[-1].strip() + '<|im_end|>\\n'}}{% endfor %}"
        + PROMPT
        + "{% if add_generation_prompt %}{{'<think>\\n'}}{% endif %}"
    ),
    # A conversation ends in a token of its own.
    "closed": (
        "{% for m in messages %}" + HEAD + "{{m.content + '<|im_end|>\\n'}}{% endfor %}"
        "{% if not add_generation_prompt %}{{'<|endoftext|>'}}{% endif %}" + PROMPT
    ),
    # Says itself what is learned, but not the end of a turn.
    "generation": (
        "{% for m in messages %}"
        + HEAD
        + "{% if m.role == 'assistant' %}{% generation %}{{m.content}}{% endgeneration %}"
        "{% else %}{{m.content}}{% endif %}{{'<|im_end|>\\n'}}{% endfor %}" + PROMPT
    ),
    # No token ends a turn.
    "plain": "{% for m in messages %}{{m.role + ': ' + m.content + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'assistant: '}}{% endif %}",
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Every text can be encoded, for targets with `CODE_VOCABULARY` entries; no chat template."""
    return _byte_level([SAMPLE_TEXT], CODE_VOCABULARY - 8, ["<|endoftext|>", "<|reserved_0|>"], "<|endoftext|>")


def tiny_chat_tokenizer(template: str | None = "chatml", eos_token: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """Every text can be encoded; the vocabulary has fewer than 300 entries."""
    tokenizer = _byte_level([TEXT], 299, SPECIAL, eos_token)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = TEMPLATES[template] if template else None
    return tokenizer


def tiny_blank_first_tokenizer(adds: str = "<s> $A") -> PreTrainedTokenizerFast:
    """As Llama's: each text is read as if it began with a blank, and blanks belong to the words behind them.

    Args:
        adds: what the tokenizer puts around a text.
    """
    special = [("<s>", 0), ("</s>", 1)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    bpe.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=99, special_tokens=[name for name, _ in special], show_progress=False)
    bpe.train_from_iterator([TEXT], trainer)
    bpe.post_processor = processors.TemplateProcessing(single=adds, special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def _byte_level(texts: list[str], vocab_size: int, special: list[str], eos_token: str) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=eos_token, pad_token="<|endoftext|>")
