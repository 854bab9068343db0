"""A byte-level tokenizer with the special tokens of chats, and chat templates of several habits."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = "user assistant system hello there what is the sum of two and three five is it not\n" * 4

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


def tiny_chat_tokenizer(template: str | None = "chatml", eos_token: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """Every text can be encoded; the vocabulary has fewer than 300 entries."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=299, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([TEXT], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=eos_token, pad_token="<|endoftext|>")
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
