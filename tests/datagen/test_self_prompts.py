"""Dialogues that a target writes by itself: users' turns in any template, each once, whatever happens in between."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import TopPLogitsWarper

import in_process
from hf_pardraft.cli import regenerate as regenerate_commands
from hf_pardraft.datagen import self_prompts
from hf_pardraft.datagen.draws import Nucleus
from hf_pardraft.datagen.local_writer import LocalWriter, PromptTooLongError
from hf_pardraft.datagen.prompt_writer import PromptSampling, PromptWriter, UserTurn, gist, refusal
from hf_pardraft.datagen.regenerate import Shard
from hf_pardraft.datagen.resumable_jsonl import ResumableJsonl
from hf_pardraft.datagen.rewriting import Answer
from hf_pardraft.datagen.self_prompts import Dialogue, write_dialogues
from hf_pardraft.datagen.user_turns import TurnEnd, UserTurns
from hf_pardraft.training.data.dataset import prepare_data
from tiny_models import tiny_drafter, tiny_target
from tiny_tokenizers import PARTS_ONLY, tiny_blank_first_tokenizer, tiny_chat_tokenizer

IM_END = 2
CHATML = "{% for m in messages %}{{'<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n'}}{% endfor %}"
SYSTEM = "{% if messages[0].role != 'system' %}{{'<|im_start|>system\\nhello there<|im_end|>\\n'}}{% endif %}"
GENERATION = "{% if add_generation_prompt %}{{'<|im_start|>assistant\\n'}}{% endif %}"
# Templates of several habits, what stands before a user's first message, and what ends it.
FRAMES = {
    "chatml": (CHATML + GENERATION, "<|im_start|>user\n", TurnEnd(IM_END)),
    "system by default": (
        SYSTEM + CHATML + GENERATION,
        "<|im_start|>system\nhello there<|im_end|>\n<|im_start|>user\n",
        TurnEnd(IM_END),
    ),
    "strips": (CHATML.replace("m.content", "m.content | trim"), "<|im_start|>user\n", TurnEnd(IM_END)),
    "begins with a token": ("{{'<|endoftext|>'}}" + CHATML, "<|endoftext|><|im_start|>user\n", TurnEnd(IM_END)),
    # As Mistral's: what ends a user's turn begins the assistant's.
    "no end of its own": (
        "{% for m in messages %}{{('<|im_start|>' if m.role == 'user' else '<|im_end|>') + m.content}}{% endfor %}"
        "{% if add_generation_prompt %}{{'<|im_end|>'}}{% endif %}",
        "<|im_start|>",
        TurnEnd(IM_END),
    ),
    # As Llama 2's: a text that no token stands for, and a blank that belongs to the user's first word.
    "text": (
        "{% for m in messages %}{% if m.role == 'user' %}{{'[IN] ' + m.content + ' [/IN]'}}"
        "{% else %}{{' ' + m.content + '<|im_end|>'}}{% endif %}{% endfor %}",
        "[IN]",
        TurnEnd(None, "[/IN]"),
    ),
    "plain": (
        "{% for m in messages %}{{m.role + ': ' + m.content + '\\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{'assistant: '}}{% endif %}",
        "user:",
        TurnEnd(None, "\nassistant:"),
    ),
    "nothing after it": (
        "{% for m in messages %}{{'<|im_start|>' + m.content}}{% endfor %}",
        "<|im_start|>",
        TurnEnd(),
    ),
}


def chat_tokenizer(template: str):
    tokenizer = tiny_chat_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer(SYSTEM + CHATML + GENERATION)


@pytest.fixture(scope="module")
def target(tokenizer):
    """Writes words of small letters, and ends them now and then."""
    target = tiny_target("qwen3", vocab_size=320)
    target.generation_config.eos_token_id = IM_END
    bias = torch.full((320,), -100.0)
    for token in range(3, len(tokenizer)):
        text = tokenizer.decode([token])
        if text.replace(" ", "").islower() and text.isascii():
            bias[token] = 0.0
    bias[IM_END] = 2.5
    head, target.lm_head = target.lm_head, torch.nn.Linear(32, 320)
    target.lm_head.weight, target.lm_head.bias = head.weight, torch.nn.Parameter(bias)
    return target


def local(target, tokenizer, **options) -> LocalWriter:
    return LocalWriter(target, tokenizer, **{"max_tokens": 12, "batch_size": 3, "temperature": 0.8, **options})


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


SAMPLING = PromptSampling(max_tokens=24, more_turns=0.5, max_turns=3)


def write(path, target, tokenizer, count=8, sampling=SAMPLING, shard=None, **options):
    return write_dialogues(
        count, path, local(target, tokenizer, **options), "tiny", sampling, shard=shard, progress=False
    )


def by_index(path) -> list[dict]:
    return sorted(read(path), key=lambda row: row["index"])


@pytest.mark.parametrize("name", FRAMES)
def test_a_user_turn_is_found_in_any_template(name):
    template, header, end = FRAMES[name]
    tokenizer = chat_tokenizer(template)
    turns = UserTurns(tokenizer)
    assert tokenizer.decode(turns.header_ids([])) == header
    assert turns.end == end
    before = [{"role": "user", "content": "two"}, {"role": "assistant", "content": "and three"}]
    later = tokenizer.decode(turns.header_ids(before))
    for content in ("five", "is it", "3 of 5?", "what is the sum"):
        said = {"role": "user", "content": content}
        for so_far, found in (([], header), (before, later)):
            text = tokenizer.apply_chat_template([*so_far, said], tokenize=False)
            assert text.startswith(found)
            assert text[len(found) :].lstrip().startswith(content)
            # What the target reads is what it would read before this very message.
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert ids[: len(turns.header_ids(so_far))] == turns.header_ids(so_far)


def test_a_user_turn_is_found_where_messages_are_lists_of_parts():
    turns = UserTurns(chat_tokenizer(PARTS_ONLY))
    assert turns.tokenizer.decode(turns.header_ids([])) == "<|im_start|>user\n"
    assert turns.end == UserTurns(tiny_chat_tokenizer("chatml")).end


def test_a_blank_that_belongs_to_the_first_word_is_left_to_it():
    tokenizer = tiny_blank_first_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{'<s>user ' + m.content + '</s>'}}{% endfor %}"
    turns = UserTurns(tokenizer)
    said = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    ids = tokenizer(said, add_special_tokens=False)["input_ids"]
    header = turns.header_ids([])
    assert ids[: len(header)] == header
    assert tokenizer.convert_ids_to_tokens(ids[len(header)]).startswith("▁h")
    assert turns.end == TurnEnd(tokenizer.eos_token_id)


@pytest.mark.parametrize(
    ("template", "match"),
    [
        (None, "a base model.*instruct version.*or pass prompts as a data set"),
        ("{{ raise_exception('no users here') }}", "no users here.*to begin with: pass prompts as a data set instead"),
        ("{% for m in messages %}{{m.role}}{% endfor %}", "doesn't show what a user says"),
        ("{% for m in messages %}{{m.content + '<|im_end|>'}}{% endfor %}", "nothing before a user's message"),
    ],
)
def test_templates_that_show_no_users_turn_are_refused(template, match):
    with pytest.raises(ValueError, match=match):
        UserTurns(chat_tokenizer(template))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("What is the sum of two and three?", None),
        ("def f(x):\n\treturn x + 1\r\n", None),
        ("Wie groß ist 🐘?", None),
        ("  \n", "empty"),
        ("What is <|im_end|> for?", "special tokens"),
        ("a\x00b and three", "control characters"),
        ("a \ufffd and three", "control characters"),
        ("a \ue000 and three", "control characters"),
        ("ok", "too short"),
        ("?!?! ... --- ...", "too short"),
        ("two and " * 12, "repetitive"),
        ("the sum of two and the sum of three is the sum of five", None),
    ],
)
def test_prompts_that_nobody_would_answer_are_refused(text, reason):
    tokenizer = tiny_chat_tokenizer()
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert refusal(text, ids, ["<|im_end|>", "<|im_start|>"]) == reason


def test_prompts_that_differ_in_capitals_and_punctuation_alone_are_one():
    assert gist("What's the sum,\n of two?") == gist("what s the SUM of two")
    assert gist("the sum of two") != gist("the sum of three")
    assert gist("?!") != gist("!?")


def test_only_a_message_that_its_end_ends_is_used(target, tokenizer):
    writer = PromptWriter(local(target, tokenizer), SAMPLING)
    words = tokenizer("what is the sum of two", add_special_tokens=False)["input_ids"]
    assert writer.answer_of([*words, IM_END], []).refused is None
    assert writer.answer_of([*words, IM_END, 0, 0], []).text == "what is the sum of two"
    assert writer.answer_of(words, []).refused == "cut off"
    # The user's turn may not begin another's, whatever follows.
    for special in (0, 1):
        assert writer.answer_of([*words, special, *words, IM_END], []).refused == "special tokens"
    assert writer.answer_of([IM_END], []).refused == "empty"


def test_a_text_can_end_a_message(target, tokenizer, tmp_path):
    ended = chat_tokenizer(
        "{% for m in messages %}{{'<|im_start|>' + m.content + (' e' if m.role == 'user' else '<|im_end|>')}}{% endfor %}"
    )
    writer = PromptWriter(local(target, ended), PromptSampling(max_tokens=40))
    assert writer.turns.end == TurnEnd(None, "e")
    prompts = [prompt for _, prompt in writer.ask([UserTurn(index, [], "prompt") for index in range(12)])]
    assert len(prompts) == 12
    assert all("e" not in prompt.text for prompt in prompts)
    assert sum(prompt.is_whole for prompt in prompts) > 6
    # Tokens after the text that ends it were not even sampled: some token with an "e" is the last one of each.
    assert writer.num_tokens < 12 * 40
    words = ended("sum of it the sum", add_special_tokens=False)["input_ids"]
    assert writer.answer_of(words, []).text == "sum of it th"


def check_dialogues(rows: list[dict], max_turns: int) -> None:
    for row in rows:
        messages = row["messages"]
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert len(messages) <= 2 * max_turns
    openings = [gist(row["messages"][0]["content"]) for row in rows]
    assert len(set(openings)) == len(openings)


def test_dialogues_are_written_alike_in_any_batch_and_after_any_interruption(target, tokenizer, tmp_path, monkeypatch):
    whole, talkative = tmp_path / "whole.jsonl", replace(SAMPLING, more_turns=1.0)
    result = write(whole, target, tokenizer, sampling=talkative, batch_size=8)
    assert (result.num_rows, result.num_before, result.num_written, result.failed) == (8, 0, 8, {})
    assert result.num_tokens > 0
    expected = by_index(whole)
    assert [row["index"] for row in expected] == list(range(8))
    check_dialogues(expected, max_turns=3)
    assert len({len(row["messages"]) for row in expected}) > 1
    append, calls = ResumableJsonl.append, Counter()

    def falter(file, row):
        calls["appended"] += 1
        if calls["appended"] % 5 == 0:
            raise KeyboardInterrupt
        append(file, row)

    monkeypatch.setattr(ResumableJsonl, "append", falter)
    broken, interruptions = tmp_path / "broken.jsonl", 0
    for _ in range(40):
        try:
            result = write(broken, target, tokenizer, sampling=talkative, batch_size=2)
            break
        except KeyboardInterrupt:
            interruptions += 1
    assert interruptions > 2
    assert result.num_before + result.num_written == 8
    assert by_index(broken) == expected
    prompts = read(tmp_path / ".broken.jsonl.prompts")
    assert [row["index"] for row in prompts] == list(range(len(prompts)))
    assert write(broken, target, tokenizer, sampling=talkative).num_written == 0


def test_a_larger_number_adds_to_what_is_there(target, tokenizer, tmp_path):
    once, twice = tmp_path / "once.jsonl", tmp_path / "twice.jsonl"
    write(once, target, tokenizer, count=7)
    write(twice, target, tokenizer, count=3)
    first = read(twice)
    assert write(twice, target, tokenizer, count=7).num_written == 4
    assert read(twice)[:3] == first
    assert by_index(once) == by_index(twice)
    with pytest.raises(ValueError, match=r"prompt_top_p 0\.95 \(now 0\.5\)"):
        write(twice, target, tokenizer, sampling=replace(SAMPLING, top_p=0.5))
    with pytest.raises(ValueError, match="seed 0"):
        write(twice, target, tokenizer, seed=1)


def test_shards_write_other_dialogues(target, tokenizer, tmp_path):
    for number in range(2):
        write(tmp_path / "out.jsonl", target, tokenizer, count=5, shard=Shard(number, 2))
    parts = [by_index(tmp_path / f"out-0000{number}-of-00002.jsonl") for number in range(2)]
    assert [[row["index"] for row in part] for part in parts] == [[0, 2, 4], [1, 3]]
    assert parts[0][0]["messages"] != parts[1][0]["messages"]
    # No hidden file is read as data.
    assert len(prepare_data(str(tmp_path / "out-*.jsonl"), tokenizer)) == 5


def test_what_is_written_can_be_trained_on(target, tokenizer, tmp_path):
    path = tmp_path / "out.jsonl"
    write(path, target, tokenizer, sampling=PromptSampling(max_tokens=24, more_turns=0.0))
    rows = by_index(path)
    assert all(len(row["messages"]) == 2 for row in rows)
    for example, row in zip(prepare_data(str(path), tokenizer), read(path), strict=True):
        learned = [token for token in example["labels"] if token != -100 and token != IM_END]
        assert tokenizer.decode(learned) == row["messages"][1]["content"]


def test_a_user_goes_on_until_an_answer_is_cut_off_or_the_turns_are_over(target, tokenizer, tmp_path):
    path = tmp_path / "out.jsonl"
    always = PromptSampling(max_tokens=60, more_turns=1.0, max_turns=3)
    write(path, target, tokenizer, count=32, sampling=always, max_tokens=6)
    rows = by_index(path)
    check_dialogues(rows, max_turns=3)
    lengths = Counter(len(row["messages"]) for row in rows)
    assert lengths[6] > 0
    assert any(row["truncated"] for row in rows)
    # Later messages come from the conversation before them, and another seed.
    turns = [message["content"] for row in rows for message in row["messages"][::2]]
    assert len(set(turns)) > 0.8 * len(turns)


def test_a_message_that_leaves_no_room_for_an_answer_is_taken_back(target, tokenizer, tmp_path, monkeypatch):
    path = tmp_path / "out.jsonl"
    monkeypatch.setattr(target.config, "max_position_embeddings", 110)
    always = PromptSampling(max_tokens=24, more_turns=1.0, max_turns=9)
    result = write(path, target, tokenizer, sampling=always, max_tokens=16)
    assert result.failed == {}
    rows = read(path)
    assert len(rows) == 8
    check_dialogues(rows, max_turns=8)
    dialogue = Dialogue(0, "two and three")
    dialogue.add(Answer("five"))
    dialogue.go_on("and four")
    assert not dialogue.is_done
    dialogue.take_back()
    assert dialogue.is_done
    assert [m["content"] for m in dialogue.result()["messages"]] == ["two and three", "five"]


def test_a_prompt_that_leaves_no_room_for_an_answer_gives_its_place_to_another(
    target, tokenizer, tmp_path, monkeypatch
):
    path, context = tmp_path / "out.jsonl", 40
    # What the template puts after a prompt takes room, of which the sampling of prompts knows nothing.
    monkeypatch.setattr(target.config, "max_position_embeddings", context)
    result = write(path, target, tokenizer, sampling=PromptSampling(max_tokens=24, more_turns=0.0))
    assert (result.num_written, result.failed) == (8, {})
    prompts = read(tmp_path / ".out.jsonl.prompts")
    assert result.refused["too long"] == sum(row["refused"] == "too long" for row in prompts) > 0
    answerer = local(target, tokenizer)
    for row in prompts:
        if row["refused"] == "too long":
            with pytest.raises(PromptTooLongError, match=f"the target reads fewer than {context}"):
                answerer.prompt_ids(Dialogue(0, row["prompt"]))
    used = [row["prompt"] for row in prompts if row["refused"] is None]
    assert [row["messages"][0]["content"] for row in by_index(path)] == used[:8]


def test_system_messages_steer_prompts_and_answers_do_not_see_them(target, tokenizer, tmp_path):
    path = tmp_path / "out.jsonl"
    systems = ("", "you are the sum of five")
    sampling = PromptSampling(max_tokens=24, more_turns=0.0, systems=systems)
    writer = PromptWriter(local(target, tokenizer), sampling)
    assert [writer.first_turn(number).messages for number in range(3)] == [
        [],
        [{"role": "system", "content": systems[1]}],
        [],
    ]
    steered = tokenizer.decode(writer.prompt_ids(writer.first_turn(1)))
    assert steered == "<|im_start|>system\nyou are the sum of five<|im_end|>\n<|im_start|>user\n"
    write(path, target, tokenizer, count=6, sampling=sampling, temperature=0.0)
    for row in read(path):
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"]
        prompt = tokenizer.apply_chat_template(
            row["messages"][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        written = target.generate(**prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
        text = tokenizer.decode(written[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        assert row["messages"][1]["content"] == text
    refusing = chat_tokenizer("{% if messages[0].role == 'system' %}{{raise_exception('none')}}{% endif %}" + CHATML)
    with pytest.raises(ValueError, match="none"):
        PromptWriter(local(target, refusing), sampling)


def test_prompts_follow_the_law_of_their_temperature_and_top_p(target, tokenizer, monkeypatch):
    """First tokens of many prompts have the shares that one forward says."""
    sampling = PromptSampling(temperature=0.7, top_p=0.8, max_tokens=1)
    writer = PromptWriter(local(target, tokenizer, batch_size=500), sampling)
    header = torch.tensor([writer.prompt_ids(writer.first_turn(0))])
    with torch.no_grad():
        scores = target(header).logits[:, -1].float() / 0.7
    law = TopPLogitsWarper(0.8)(None, scores).softmax(-1)[0]
    drawn = []
    monkeypatch.setattr(PromptWriter, "answer_of", lambda self, ids, prompt: drawn.append(ids[0]))
    assert len(list(writer.ask([writer.first_turn(number) for number in range(4000)]))) == 4000
    shares = torch.bincount(torch.tensor(drawn), minlength=320) / 4000
    torch.testing.assert_close(shares, law, atol=0.03, rtol=0)


def test_a_target_that_repeats_itself_is_given_up_once_its_prompts_are_answered(
    target, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(self_prompts, "PATIENCE", 48)
    # Only three prompts are told apart.
    monkeypatch.setattr(self_prompts, "gist", lambda text: str(len(text) % 3))
    path, few = tmp_path / "out.jsonl", PromptSampling(max_tokens=24, more_turns=0.0)
    with pytest.raises(ValueError, match=r"hardly any of the last 48 prompts.*3 in all; not used: .*duplicate"):
        write(path, target, tokenizer, count=40, sampling=few)
    prompts = read(tmp_path / ".out.jsonl.prompts")
    used = [row["prompt"] for row in prompts if row["refused"] is None]
    assert len(used) == 3
    assert [row["messages"][0]["content"] for row in by_index(path)] == used
    # A number that can be had is no trouble.
    assert write(path, target, tokenizer, count=3, sampling=few).num_before == 3
    for wrong, match in (({"temperature": 0.0}, "temperature of prompts above 0"), ({"more_turns": 1.5}, "more_turns")):
        with pytest.raises(ValueError, match=match):
            PromptSampling(**wrong)


@pytest.mark.parametrize("top_p", [0.1, 0.6, 0.95, 0.9999])
def test_the_nucleus_is_that_of_transformers(top_p):
    torch.manual_seed(0)
    # The last law needs more than the tokens that are looked at first.
    scores = torch.cat([torch.randn(6, 3000) * 4, torch.zeros(2, 3000) + torch.arange(3000) * 1e-4])
    found, expected = Nucleus(top_p)(None, scores), TopPLogitsWarper(top_p)(None, scores)
    # Which token reaches top_p is a question of rounding.
    differing = scores.softmax(-1).masked_fill(found == expected, 0.0)
    assert bool((differing.sum(-1) < 1e-6).all())
    peaked = scores[:6] * 2
    assert torch.equal(Nucleus(top_p)(None, peaked), TopPLogitsWarper(top_p)(None, peaked))


def test_a_drafter_writes_dialogues_too(target, tokenizer, tmp_path):
    drafter = tiny_drafter("pard", target)
    assert write(tmp_path / "out.jsonl", target, tokenizer, count=4, drafter=drafter).num_written == 4
    assert drafter.last_stats.rounds > 0


def test_the_command_writes_goes_on_and_tells_its_speed(target, tokenizer, tmp_path, monkeypatch):
    # The bias of this target's head would not be loaded again.
    monkeypatch.setattr(regenerate_commands, "load_models", lambda *names: (tokenizer, target, None))
    tokenizer.save_pretrained(tmp_path / "target")
    path = tmp_path / "out.jsonl"
    command = ["regenerate", "--target", tmp_path / "target", "--output", path, "--dtype", "float32"]
    command += ["--max-tokens", "12", "--prompt-max-tokens", "30", "--more-turns", "0.5", "--batch-size", "4"]
    command += ["--prompt-system", "", "--prompt-system", "you are five"]
    done = in_process.pardraft(*command, "--self-prompts", "3")
    assert done.code == 0, done.out
    assert "written now: 3" in done.out
    assert "tokens a second: " in done.out
    assert "prompts not used: " in done.out
    assert "tokens/s" in done.err
    done = in_process.pardraft(*command, "--self-prompts", "5")
    assert "written before: 3" in done.out
    assert "written now: 2" in done.out
    check_dialogues(read(path), max_turns=4)
    assert [row["index"] for row in by_index(path)] == list(range(5))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ([], "either a data set or --self-prompts"),
        (["data.jsonl", "--self-prompts", "3"], "either a data set or --self-prompts"),
        (["--self-prompts", "3", "--config", "c"], "--config"),
        (["--self-prompts", "3", "--prompt-temperature", "0"], "temperature of prompts above 0"),
        (["--self-prompts", "3", "--prompt-top-p", "0"], "top_p"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(arguments, match, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = in_process.pardraft("regenerate", *arguments, "--target", "no/such-model", "--output", "out.jsonl")
    assert match in done.error
    assert list(tmp_path.iterdir()) == []


def test_a_server_can_not_write_prompts_and_a_base_model_says_so_before_it_is_loaded(tmp_path):
    output = ["--output", str(tmp_path / "out.jsonl"), "--self-prompts", "3"]
    done = in_process.pardraft("regenerate", *output, "--server", "s", "--model", "m")
    assert "needs --target" in done.error
    tiny_chat_tokenizer(None).save_pretrained(tmp_path / "base")
    done = in_process.pardraft("regenerate", *output, "--target", str(tmp_path / "base"))
    assert "a base model?" in done.error
