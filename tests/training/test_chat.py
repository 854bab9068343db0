"""Conversations: every turn of the assistant is learned with its end, nothing else is, whatever the template does."""

import pytest

from hf_pardraft.training.data.chat import encode_chat
from tiny_tokenizers import PARTS_ONLY, TEMPLATES, tiny_chat_tokenizer

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is it?"},
    {"role": "assistant", "content": "It is five."},
    {"role": "user", "content": "It is five."},
    {"role": "assistant", "content": "Yes, assistant: five."},
]
THINKING = [
    TURNS[1],
    {"role": "assistant", "content": "<think>two and three</think>It is five."},
    TURNS[3],
    {"role": "assistant", "content": "<think>again</think>Yes."},
]


def learned(tokenizer, example) -> list[str]:
    """The texts that are learned, run by run."""
    assert len(example["input_ids"]) == len(example["labels"])
    runs, before = [], -100
    for token, label in zip(example["input_ids"], example["labels"], strict=True):
        assert label in (-100, token)
        if label != -100:
            runs = [*runs, [label]] if before == -100 else [*runs[:-1], [*runs[-1], label]]
        before = label
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("template", [name for name in TEMPLATES if name != "plain"])
def test_all_turns_are_learned_and_their_ends(template):
    tokenizer = tiny_chat_tokenizer(template)
    example = encode_chat(tokenizer, TURNS)
    assert tokenizer.decode(example["input_ids"]) == tokenizer.apply_chat_template(TURNS, tokenize=False)
    last = "Yes, assistant: five.<|im_end|>" + ("\n<|endoftext|>" if template == "closed" else "")
    assert learned(tokenizer, example) == ["It is five.<|im_end|>", last]


@pytest.mark.parametrize("said", ["", "\nIt is five.", " five"])
def test_what_a_template_marks_is_learned_as_what_another_shows(said):
    """With the tokens of the prompt before it, and with its end, though that may be all."""
    turns = [*TURNS[:2], {"role": "assistant", "content": said}, *TURNS[3:]]
    expected = encode_chat(tiny_chat_tokenizer("chatml"), turns)
    assert encode_chat(tiny_chat_tokenizer("generation"), turns) == expected


def test_a_template_that_reads_lists_of_parts_alone_gets_texts_as_such():
    expected = encode_chat(tiny_chat_tokenizer("chatml"), TURNS)
    tokenizer = tiny_chat_tokenizer()
    tokenizer.chat_template = PARTS_ONLY
    in_parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in TURNS]
    assert encode_chat(tokenizer, TURNS) == encode_chat(tokenizer, in_parts) == expected


@pytest.mark.parametrize("template", ["chatml", "thinking", "plain"])
def test_what_is_learned_follows_the_very_tokens_of_the_prompt_at_inference(template):
    tokenizer = tiny_chat_tokenizer(template)
    example = encode_chat(tokenizer, TURNS)
    first = next(place for place, label in enumerate(example["labels"]) if label != -100)
    prompt = tokenizer.apply_chat_template(TURNS[:2], add_generation_prompt=True)["input_ids"]
    assert example["input_ids"][:first] == prompt


def test_a_template_without_an_end_of_turn_gets_the_end_of_text():
    tokenizer = tiny_chat_tokenizer("plain", eos_token="<|endoftext|>")
    runs = learned(tokenizer, encode_chat(tokenizer, TURNS))
    assert runs == ["It is five.\n", "Yes, assistant: five.\n<|endoftext|>"]
    # Not where the user has the last word.
    assert encode_chat(tokenizer, TURNS[:4])["input_ids"][-1] != tokenizer.eos_token_id


def test_thinking_that_the_template_leaves_out_of_earlier_turns_is_not_learned():
    tokenizer = tiny_chat_tokenizer("thinking")
    runs = learned(tokenizer, encode_chat(tokenizer, THINKING))
    assert runs == ["It is five.<|im_end|>", "<think>again</think>Yes.<|im_end|>"]
    prompted = tiny_chat_tokenizer("prompted_thinking")
    assert learned(prompted, encode_chat(prompted, THINKING)) == ["It is five.<|im_end|>", "Yes.<|im_end|>"]


def test_what_the_generation_prompt_gives_is_not_learned():
    tokenizer = tiny_chat_tokenizer("thinking")
    silent = [TURNS[1], {"role": "assistant", "content": "<think></think>Yes."}]
    runs = learned(tokenizer, encode_chat(tokenizer, silent, template_kwargs={"enable_thinking": False}))
    assert runs == ["Yes.<|im_end|>"]
    assert learned(tokenizer, encode_chat(tokenizer, silent)) == ["<think></think>Yes.<|im_end|>"]


def test_a_tool_call_is_learned_though_the_template_shows_it_otherwise_when_it_is_last():
    tokenizer = tiny_chat_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}{{'<|im_start|>' + m.role + '\\n'}}"
        "{% if m.role == 'assistant' and loop.last %}{{'<think></think>'}}{% endif %}{{m.content}}"
        "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}{{'\\n'}}{% endif %}"
        "{{'call ' + c.name}}{% endfor %}"
        "{{'<|im_end|>\\n'}}{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\\n'}}{% endif %}"
    )
    result, answer = {"role": "tool", "content": "5"}, {"role": "assistant", "content": "It is five."}
    for content, said in (("", ""), ("Let me see.", "Let me see.\n")):
        calls = {"role": "assistant", "content": content, "tool_calls": [{"name": "add"}, {"name": "sum"}]}
        runs = learned(tokenizer, encode_chat(tokenizer, [TURNS[1], calls, result, answer, TURNS[3], TURNS[4]]))
        assert runs == [
            f"{said}call add\ncall sum<|im_end|>",
            "It is five.<|im_end|>",
            "<think></think>Yes, assistant: five.<|im_end|>",
        ]


def test_a_tool_call_is_learned_where_the_template_shows_no_content_beside_it():
    """As Mistral's, which has the tools before the last question, and wants a question after each answer in words."""
    tokenizer = tiny_chat_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% set ns = namespace(turn=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% if ns.turn % 2 %}{{raise_exception('roles must alternate')}}{% endif %}{% set ns.turn = ns.turn + 1 %}"
        "{{('tools: add ' if loop.last else '') + '<|im_start|>' + m.content + '<|endoftext|>'}}"
        "{% elif m.role == 'tool' %}{{'<|im_start|>' + m.content + '<|endoftext|>'}}"
        "{% elif m.tool_calls %}{{'call ' + m.tool_calls[0].name + '<|im_end|>'}}"
        "{% else %}{% if ns.turn % 2 == 0 %}{{raise_exception('roles must alternate')}}{% endif %}"
        "{% set ns.turn = ns.turn + 1 %}{{' ' + m.content + '<|im_end|>'}}{% endif %}{% endfor %}"
    )
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}
    result, answer = {"role": "tool", "content": "5"}, {"role": "assistant", "content": "It is five."}
    runs = learned(tokenizer, encode_chat(tokenizer, [TURNS[1], call, result, answer, TURNS[3], TURNS[4]]))
    assert runs == ["call add<|im_end|>", " It is five.<|im_end|>", " Yes, assistant: five.<|im_end|>"]


def test_a_prompt_that_is_shown_otherwise_while_it_is_last_ends_where_it_ends():
    """As Mistral's template, which shows the system's text in the last turn of the user; an answer begins with a blank."""
    tokenizer = tiny_chat_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{'<|im_start|>' + ('Be brief. ' if loop.last else '') + m.content}}"
        "{{'<|im_end|>'}}{% elif m.role == 'assistant' %}{{' ' + m.content + '<|endoftext|>'}}{% endif %}{% endfor %}"
    )
    example = encode_chat(tokenizer, TURNS)
    assert learned(tokenizer, example) == [" It is five.<|endoftext|>", " Yes, assistant: five.<|endoftext|>"]
    assert tokenizer.tokenize(" It is five.") == tokenizer.convert_ids_to_tokens(
        [label for label in example["labels"] if label != -100][: len(tokenizer.tokenize(" It is five."))]
    )


def test_earlier_turns_may_end_with_another_token_than_the_last():
    """As gpt-oss, which writes <|return|> after the last answer and <|end|> after all others."""
    tokenizer = tiny_chat_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}{{'<|im_start|>' + m.role + ': ' + m.content}}"
        "{{'<|endoftext|>' if m.role == 'assistant' and loop.last else '<|im_end|>'}}{% endfor %}"
        "{% if add_generation_prompt %}{{'<|im_start|>assistant: '}}{% endif %}"
    )
    runs = learned(tokenizer, encode_chat(tokenizer, TURNS))
    assert runs == ["It is five.<|im_end|>", "Yes, assistant: five.<|endoftext|>"]
    # The next turn's header is no end.
    headed = tiny_chat_tokenizer("chatml")
    headed.chat_template = (
        "{% for m in messages %}{{('<|im_start|>' if m.role == 'user' else '<|im_end|>') + m.content}}{% endfor %}"
        "{{'<|im_end|>' if add_generation_prompt else '<|endoftext|>'}}"
    )
    runs = learned(headed, encode_chat(headed, TURNS[1:]))
    assert runs == ["It is five.", "Yes, assistant: five.<|endoftext|>"]


def test_the_template_decides_with_generation_blocks():
    tokenizer = tiny_chat_tokenizer("generation")
    # Without them the first letter would be learned, too.
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{% generation %}{{m.content}}", "{{m.content[0]}}{% generation %}{{m.content[1:]}}"
    )
    assert learned(tokenizer, encode_chat(tokenizer, TURNS))[0] == "t is five.<|im_end|>"


def test_a_prompt_of_messages_is_given_whoever_wrote_it():
    for template in ("chatml", "generation"):
        tokenizer = tiny_chat_tokenizer(template)
        assert learned(tokenizer, encode_chat(tokenizer, TURNS, num_given=4)) == ["Yes, assistant: five.<|im_end|>"]


def test_a_conversation_without_an_answer_has_no_label():
    tokenizer = tiny_chat_tokenizer("chatml")
    assert set(encode_chat(tokenizer, TURNS[:2])["labels"]) == {-100}
    empty = [TURNS[1], {"role": "assistant", "content": ""}]
    assert learned(tokenizer, encode_chat(tokenizer, empty)) == ["<|im_end|>"]


def test_tokens_that_grow_over_the_start_of_an_answer_are_cut_there():
    tokenizer = tiny_chat_tokenizer("plain")
    # The prompt ends in a blank, which the tokenizer puts into one token with the answer's first letters.
    turns = [TURNS[1], {"role": "assistant", "content": "there"}]
    example = encode_chat(tokenizer, turns)
    prompt = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True)["input_ids"]
    whole = tokenizer(tokenizer.apply_chat_template(turns, tokenize=False))["input_ids"]
    assert whole[: len(prompt)] != prompt
    assert example["input_ids"][: len(prompt)] == prompt
    assert learned(tokenizer, example)[0].startswith("there")


def test_messages_that_are_none_are_refused():
    tokenizer = tiny_chat_tokenizer("chatml")
    for wrong in ([], "hello", [{"content": "x"}], [["user", "x"]]):
        with pytest.raises(ValueError, match="expected a list of messages"):
            encode_chat(tokenizer, wrong)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="roles must alternate"):
        encode_chat(tokenizer, TURNS)
