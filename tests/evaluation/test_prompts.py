"""Benchmarks' rows become questions, and questions become the tokens that a chat model would get."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config

from hf_pardraft.evaluation.encoding import Chat, encode, encode_all, room_for_prompts
from hf_pardraft.evaluation.prompt_sources import PromptSource, evenly, load_questions, read_source
from hf_pardraft.evaluation.prompts import BENCHMARKS, Question, asked
from tiny_tokenizers import PARTS_ONLY, tiny_chat_tokenizer, tiny_tokenizer

# Rows with the columns of the data sets on the Hub, and what has to be in the question.
ROWS = {
    "humaneval": ({"task_id": "HumanEval/0", "prompt": "def one():\n    '''1'''\n", "test": "t"}, "def one():"),
    "gsm8k": ({"question": "How many ducks?", "answer": "#### 2"}, "How many ducks?"),
    "math500": ({"problem": "Find $x$.", "solution": "s", "answer": "1"}, "Find $x$."),
    "mbpp": ({"task_id": 1, "text": "Add two.", "code": "c", "test_list": ["assert f(1) == 3"]}, "assert f(1) == 3"),
    "mt_bench": ({"prompt": ["Write.", "Rewrite."], "prompt_id": 1, "category": "writing", "reference": []}, "Write."),
    "spec_bench": ({"question_id": 81, "category": "qa", "turns": ["Who?"]}, "Who?"),
    "alpaca": ({"instruction": "Sort these.", "input": "3, 1", "output": "1, 3", "text": "..."}, "3, 1"),
    "aime": ({"id": 1, "problem": "Find $n$.", "solution": "s", "answer": "204"}, "Find $n$."),
    "livecodebench": ({"question_content": "Print n.", "starter_code": "class S:", "platform": "leetcode"}, "class S:"),
}
SHARED = Path(__file__).parents[3] / "shared" / "data"
SHARED_FILES = {
    "humaneval": ("humaneval/HumanEval.jsonl.gz", 164),
    "gsm8k": ("gsm8k/test.jsonl", 1319),
    "math500": ("math500/math500.jsonl", 500),
    "mbpp": ("mbpp/mbpp.jsonl", 974),
    "mt_bench": ("mt_bench/question.jsonl", 80),
    "spec_bench": ("spec_bench/question.jsonl", 480),
}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if thinking %}<think>{% endif %}{% endif %}"
)


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_makes_a_question_of_its_rows(name, tmp_path):
    row, part = ROWS[name]
    source = read_source(f"{name}={written(tmp_path / 'rows.jsonl', [row])}")
    (question,) = load_questions(source)
    assert source.name == name
    assert [message["role"] for message in question.messages] == ["user"]
    assert part in question.messages[0]["content"]
    assert part in question.completion
    # What the answer is must not be in the question.
    assert not any(str(row[column]) in question.messages[0]["content"] for column in ("code",) if column in row)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmarks_come_through_datasets(name, monkeypatch):
    datasets = pytest.importorskip("datasets")
    row, _ = ROWS[name]
    asked_for = []

    def load_dataset(path, split, **options):
        asked_for.append((path, split, options))
        return datasets.Dataset.from_list([row] * 3)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(load_questions(PromptSource(name, None), limit=2)) == 2
    path, split, options = asked_for[0]
    assert "/" in path or "/" in options["data_files"]
    assert split in ("train", "test")


def test_without_the_hub_the_error_says_what_to_do(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(*args, **options):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(OSError, match=r"can't get gsm8k from the Hub .*: --prompts gsm8k=FILE"):
        load_questions(PromptSource("gsm8k", None))


@pytest.mark.parametrize("name", SHARED_FILES)
def test_the_published_files_are_read(name):
    file, count = SHARED_FILES[name]
    if not (SHARED / file).is_file():
        pytest.skip("the real prompts are not part of the project: ../shared/data is absent")
    questions = load_questions(read_source(f"{name}={SHARED / file}"))
    assert len(questions) == count
    assert all(q.completion.strip() and q.messages[-1]["content"].strip() for q in questions)
    assert {len(q.later_turns) for q in questions} == {"mt_bench": {1}, "spec_bench": {0, 1}}.get(name, {0})


def test_base_models_complete_code_as_it_is():
    row, _ = ROWS["humaneval"]
    assert BENCHMARKS["humaneval"].question(row).completion == row["prompt"]


def test_a_users_own_files(tmp_path):
    rows = [
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "u"},
                {"role": "assistant", "content": "a"},
            ]
        },
        {"prompt": [{"role": "user", "content": "p"}]},
        {"turns": ["one", "two"]},
        {"prompt": "plain", "text": "not this"},
        {"instruction": "do", "input": "it"},
        {"text": "some\u2028text"},
    ]
    file = tmp_path / "own.jsonl"
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n", encoding="utf-8")
    questions = load_questions(read_source(str(file)))
    assert [q.messages[-1]["content"] for q in questions] == ["u", "p", "one", "plain", "do\n\nit", "some\u2028text"]
    assert [m["role"] for m in questions[0].messages] == ["system", "user"]
    assert questions[2].later_turns == ("two",)
    zipped, listed = tmp_path / "own.jsonl.gz", tmp_path / "own.json"
    zipped.write_bytes(gzip.compress(file.read_bytes()))
    listed.write_text(json.dumps(rows))
    text = tmp_path / "lines.txt"
    text.write_text("Once upon a time\n\nThere was\n")
    assert load_questions(read_source(str(zipped))) == load_questions(read_source(str(listed))) == questions
    assert [q.completion for q in load_questions(read_source(str(text)))] == ["Once upon a time", "There was"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"answer": "x"}', r"prompt 1 of a.jsonl has the columns \['answer'\]: expected messages"),
        ("a.jsonl", "[1]", "no object"),
        ("a.jsonl", "{", "line 1, is no JSON"),
        ("a.json", "{}", "expected a list of rows"),
        ("a.jsonl", "", "there is no prompt"),
        ("a.txt", "\n", "there is no prompt"),
        ("a.jsonl", '{"turns": []}', "expected turns to be a list of texts"),
        ("a.jsonl", '{"prompt": 5}', "expected prompt to be a text"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}', "a role and a content"),
        ("a.jsonl", '{"messages": [{"role": "system", "content": "x"}]}', "a message of the role 'user'"),
        ("a.pkl", "", "can't tell what is in a.pkl"),
        ("a.jsonl.gz", "text", "can't read"),
    ],
)
def test_a_file_without_prompts_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_questions(read_source(str(tmp_path / name)))


def test_an_unknown_benchmark_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no prompts 'gsm9k': expected a file, one of humaneval, gsm8k"):
        read_source("gsm9k")
    with pytest.raises(ValueError, match=r"there is no file 'nowhere\.jsonl'"):
        read_source("gsm8k=nowhere.jsonl")
    file = written(tmp_path / "rows.jsonl", [{"instruction": "x"}])
    with pytest.raises(ValueError, match=r"\['instruction'\]: expected question for gsm8k"):
        load_questions(read_source(f"gsm8k={file}"))


def test_a_limit_takes_questions_from_all_over():
    assert evenly(list(range(10)), 5) == [0, 2, 4, 6, 8]
    assert evenly(list(range(3)), 5) == evenly(list(range(3)), None) == [0, 1, 2]


def test_a_row_that_a_limit_leaves_keeps_its_number(tmp_path):
    rows = [{"prompt": "x"}] * 5 + [{"answer": "x"}] + [{"prompt": "x"}] * 4
    with pytest.raises(ValueError, match=r"prompt 6 of rows\.jsonl has the columns"):
        load_questions(read_source(str(written(tmp_path / "rows.jsonl", rows))), limit=2)


def test_a_line_of_a_text_ends_at_a_line_feed_only(tmp_path):
    file = tmp_path / "lines.txt"
    file.write_bytes("some\u2028text\r\nmore\x0c\n".encode())
    assert [q.completion for q in load_questions(read_source(str(file)))] == ["some\u2028text", "more\x0c"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json"])
def test_the_mark_that_an_editor_begins_a_file_with_is_no_text(tmp_path, name):
    content = {"a.txt": "Once", "a.jsonl": '{"prompt": "Once"}', "a.json": '[{"prompt": "Once"}]'}[name]
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert [q.completion for q in load_questions(read_source(str(tmp_path / name)))] == ["Once"]


def test_the_chat_template_is_used_with_its_arguments():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    question = asked("Hi", "completed")
    with_template = encode(question, tokenizer, Chat(True, {"thinking": True}))
    assert tokenizer.decode(with_template[0]) == "<user>Hi<assistant><think>"
    assert tokenizer.decode(encode(question, tokenizer, Chat(False))[0]) == "completed"


def test_a_template_that_reads_lists_of_parts_alone_shows_the_question():
    tokenizer = tiny_chat_tokenizer()
    tokenizer.chat_template = PARTS_ONLY
    prompt = encode(asked("Hi", "completed"), tokenizer, Chat(True))
    assert tokenizer.decode(prompt[0]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_later_turns_follow_the_targets_answers():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    question = Question(({"role": "user", "content": "a"},), "a", ("b", "c"))
    answers = iter(("1", "2"))

    def answer(prompt):
        return tokenizer(next(answers)).input_ids

    prompts, num_left_out = encode_all([question], tokenizer, Chat(True), answer, room=None)
    assert [tokenizer.decode(prompt[0]) for prompt in prompts] == [
        "<user>a<assistant>",
        "<user>a<assistant>1<user>b<assistant>",
        "<user>a<assistant>1<user>b<assistant>2<user>c<assistant>",
    ]
    assert num_left_out == 0
    first_only, _ = encode_all([question], tokenizer, Chat(False), None, room=None)
    assert len(first_only) == 1


def test_what_does_not_fit_is_left_out_and_counted():
    tokenizer = tiny_tokenizer()
    prompts, num_left_out = encode_all([asked("ab"), asked("abcdefghijkl")], tokenizer, Chat(False), None, room=5)
    assert (len(prompts), num_left_out) == (1, 1)
    assert room_for_prompts(Qwen3Config(max_position_embeddings=100), 40) == 60
    with pytest.raises(ValueError, match="at most 99"):
        room_for_prompts(Qwen3Config(max_position_embeddings=100), 100)


def test_a_real_chat_template():
    folder = SHARED.parent / "tokenizers" / "qwen2.5"
    if not folder.is_dir():
        pytest.skip("../shared/tokenizers is absent")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = encode(asked("Hi"), tokenizer, Chat(True))
    assert ids.dtype == torch.long
    assert tokenizer.decode(ids[0]).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_a_conversation_may_call_tools_and_come_in_parts(tmp_path):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    parts = [{"type": "text", "text": "and 3 + 3?"}]
    row = {
        "messages": [
            {"role": "user", "content": "2 + 2?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "4"},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": "6"},
        ],
        "tools": json.dumps([{"type": "function", "function": {"name": "add"}}]),
        "chat_template_kwargs": {"enable_thinking": False},
    }
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    (question,) = load_questions(read_source(str(file)))
    assert question.messages[1] == {"role": "assistant", "tool_calls": [call]}
    assert question.messages[3] == {"role": "user", "content": parts}
    assert len(question.messages) == 4
    assert question.completion == "2 + 2?\n\n4\n\nand 3 + 3?"

    class Tokenizer:
        def get_chat_template(self, given, tools):
            return "a template of this tokenizer"

        def apply_chat_template(self, messages, tokenize=True, **given):
            self.given = given
            return {"input_ids": torch.ones(1, 3, dtype=torch.long)} if tokenize else ""

    tokenizer = Tokenizer()
    encode(question, tokenizer, Chat(True, {"enable_thinking": True, "other": 1}))
    assert tokenizer.given["tools"] == json.loads(row["tools"])
    # A row's own arguments come on top, as in training.
    assert (tokenizer.given["enable_thinking"], tokenizer.given["other"]) == (False, 1)
