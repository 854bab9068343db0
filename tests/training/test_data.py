"""Raw examples: each kind becomes what it should, from wherever it comes, and nothing is lost without a word."""

import copy
import json
import logging
import os
import random
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset, is_caching_enabled, load_dataset
from transformers import GPT2Config, GPT2LMHeadModel

from hf_pardraft import DraftTrainer, DraftTrainingArguments
from hf_pardraft.datagen.local_writer import LocalWriter
from hf_pardraft.datagen.regenerate import regenerate
from hf_pardraft.training.data.dataset import prepare_data
from hf_pardraft.training.data.documents import checked, pack
from hf_pardraft.training.data.trainer_data import chat_arguments
from hf_pardraft.training.layouts import AnchoredBlocks, DroppedMasks, SharedPrefixes
from hf_pardraft.user_input.data import load_data
from tiny_models import tiny_drafter, tiny_target
from tiny_tokenizers import tiny_chat_tokenizer
from training.tiny_training import trainer_for

CHAT = {"messages": [{"role": "user", "content": "two and three"}, {"role": "assistant", "content": "is five"}]}
UNANSWERED = {"messages": [{"role": "user", "content": "two and three"}]}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_chat_tokenizer("chatml")


def learned(tokenizer, row) -> str:
    return tokenizer.decode([label for label in row["labels"] if label != -100])


def test_every_kind_of_example_becomes_tokens_and_labels(tokenizer):
    sharegpt = {"conversations": [{"from": "human", "value": "two"}, {"from": "gpt", "value": "is five"}]}
    pair = {"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]}
    for raw in (CHAT, sharegpt, pair, {"prompt": "two and three", "completion": "is five"}):
        row = prepare_data([raw], tokenizer)[0]
        assert learned(tokenizer, row) == "is five<|im_end|>", raw
        assert "two" in tokenizer.decode(row["input_ids"])
    row = prepare_data([{"text": "two and three"}], tokenizer)[0]
    assert row["labels"] == row["input_ids"]
    assert tokenizer.decode(row["input_ids"]) == "two and three<|im_end|>"
    # A text that says its end has no second one.
    assert prepare_data([{"text": "two and three<|im_end|>"}], tokenizer)[0] == row


def test_tokens_pass_through_as_they_are():
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, 8]}, {"input_ids": [9, 10, 11], "labels": [9, 10, 11]}]
    assert prepare_data(rows, max_length=2).to_list() == rows
    torch_rows = Dataset.from_list(rows).with_format("torch")
    assert [row["labels"].tolist() for row in prepare_data(torch_rows)] == [row["labels"] for row in rows]


IDS = [5, 6, 7, 8, 9]


@pytest.mark.parametrize("form", ["rows", "arrow", "torch", "stream"])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(
    ("masks", "expected"),
    [
        ({"completion_mask": [0, 0, 1, 1, 1]}, [-100, -100, 7, 8, 9]),
        ({"assistant_masks": [0, 1, 0, 1, 1]}, [-100, 6, -100, 8, 9]),
        ({"completion_mask": [0, 0, 1, 1, 1], "assistant_masks": [0, 1, 0, 1, 1]}, [-100, -100, -100, 8, 9]),
        ({"completion_mask": [0, 0, 1, 1, 1], "labels": [-100, 6, 7, 8, -100]}, [-100, -100, 7, 8, -100]),
        ({"assistant_masks": [False, False, True, True, False]}, [-100, -100, 7, 8, -100]),
    ],
)
def test_rows_that_trl_has_tokenised_are_learned_where_their_masks_say(form, packing, masks, expected):
    rows = [{"input_ids": IDS, **masks}, {"input_ids": IDS, **masks}]
    data = rows if form == "rows" else Dataset.from_list(rows)
    if form == "torch":
        data = data.with_format("torch")
    if form == "stream":
        data = data.to_iterable_dataset()
    found = list(prepare_data(data, max_length=5, packing=packing))
    assert [torch.as_tensor(row["labels"]).tolist() for row in found] == [expected] * 2
    assert all(torch.as_tensor(row["input_ids"]).tolist() == IDS for row in found)
    assert not any("mask" in name for row in found for name in row)
    # A data set of another kind comes to the collators as it is.
    assert checked(rows[0])[1].tolist() == expected


def test_masks_that_do_not_fit_or_leave_nothing_are_refused():
    for mask, message in (
        ([0, 1, 1], r"completion_mask should be .* 5 tokens, got \(3,\)"),
        ([0, 1, 2, 1, 1], r"\[0, 1, 2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare_data([{"input_ids": IDS, "completion_mask": mask}])
    with pytest.raises(ValueError, match="none of 1 examples has something to learn"):
        prepare_data([{"input_ids": IDS, "assistant_masks": [0] * 5}])


def test_tools_and_template_settings_reach_the_template(tokenizer):
    tokenizer = tiny_chat_tokenizer("chatml")
    tokenizer.chat_template = (
        "{{ tools[0].function.name if tools else 'none' }} {{ mood }} "
        "{{ tools is not none and tools[0].function.kind is defined }}" + tokenizer.chat_template
    )
    tools = [{"type": "function", "function": {"name": "add", "kind": None}}]
    rows = [
        {**CHAT, "tools": tools, "chat_template_kwargs": None},
        {**CHAT, "tools": json.dumps(tools), "chat_template_kwargs": {"mood": "glad"}},
        CHAT,
    ]
    texts = [
        tokenizer.decode(row["input_ids"]) for row in prepare_data(rows, tokenizer, template_kwargs={"mood": "calm"})
    ]
    assert [text.split("<")[0] for text in texts] == ["add calm False", "add glad False", "none calm False"]


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "jsonl.gz", "folder", "list", "iterable"])
def test_data_comes_from_files_folders_and_memory(tokenizer, tmp_path, kind):
    rows = [{"prompt": f"two and {i}", "completion": f"is {i}"} for i in range(5)]
    data = Dataset.from_list(rows)
    path = tmp_path / f"data.{kind}"
    if kind in ("jsonl", "json"):
        data.to_json(path, lines=kind == "jsonl")
    elif kind == "jsonl.gz":
        data.to_json(path, compression="gzip")
    elif kind == "folder":
        DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(path)
        assert len(load_data(path, split="test")) == 1
        with pytest.raises(ValueError, match="no split 'other': it has train, test"):
            load_data(path, split="other")
    elif kind in ("csv", "parquet"):
        getattr(data, f"to_{kind}")(path)
    source = {"list": rows, "iterable": data.to_iterable_dataset()}.get(kind, str(path))
    found = [learned(tokenizer, row) for row in prepare_data(source, tokenizer)]
    assert found == [f"is {i}<|im_end|>" for i in range(5)]


def test_a_file_that_is_not_there_is_no_name_on_the_hub():
    with pytest.raises(FileNotFoundError, match="no data file 'nowhere"):
        prepare_data("nowhere.jsonl")


def test_cutting_off_leaves_no_label_without_its_context(tokenizer):
    whole = prepare_data([CHAT], tokenizer)[0]
    for length in range(2, len(whole["input_ids"]) + 3):
        try:
            row = prepare_data([CHAT], tokenizer, max_length=length)[0]
        except ValueError:
            assert set(whole["labels"][:length]) == {-100}
            continue
        assert row["input_ids"] == whole["input_ids"][:length]
        assert row["labels"] == whole["labels"][:length]


def test_examples_without_an_answer_are_dropped_and_counted(tokenizer, caplog):
    with caplog.at_level(logging.WARNING):
        rows = prepare_data([CHAT, UNANSWERED, UNANSWERED, CHAT], tokenizer)
    assert len(rows) == 2
    assert [record.args for record in caplog.records] == [(2, 4)]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        stream = Dataset.from_list([CHAT, UNANSWERED, UNANSWERED]).to_iterable_dataset()
        assert len(list(prepare_data(stream, tokenizer))) == 1
    assert len(caplog.records) == 1
    with pytest.raises(ValueError, match="none of 1 examples has something to learn"):
        prepare_data([UNANSWERED], tokenizer)


@pytest.mark.parametrize(
    ("rows", "num_kept"),
    [
        ([{"text": None}, {"text": "two and three"}, {"text": ""}, {"text": "is"}], 2),
        (
            [
                {"prompt": "two", "completion": None},
                {"prompt": None, "completion": "x"},
                {"prompt": "two", "completion": "is"},
            ],
            1,
        ),
        ([{"messages": None}, CHAT], 1),
    ],
)
@pytest.mark.parametrize("source", ["memory", "file", "stream"])
def test_rows_of_nulls_are_dropped_as_those_that_teach_nothing(rows, num_kept, source, tokenizer, tmp_path):
    data = rows
    if source != "memory":
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = load_data(tmp_path / "rows.jsonl", streaming=source == "stream")
    kept = list(prepare_data(data, tokenizer))
    assert len(kept) == num_kept
    assert all(tokenizer.eos_token_id in row["labels"] for row in kept)


def test_packed_examples_hold_no_padding():
    rows = [
        {"input_ids": [2, 2, 5, 6, 7], "attention_mask": [0, 0, 1, 1, 1]},
        {"input_ids": [8, 9], "attention_mask": [1, 1]},
    ]
    (packed,) = prepare_data(rows, max_length=5, packing=True)
    assert packed == {"input_ids": [5, 6, 7, 8, 9], "labels": [5, 6, 7, 8, 9], "document_ids": [0, 0, 0, 1, 1]}


@pytest.mark.parametrize("packing", [False, True])
def test_of_rows_without_labels_among_others_all_is_learned(packing):
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8, 9, 10]}]
    prepared = prepare_data(tuple(rows), max_length=3, packing=packing)
    found = [tensor.tolist() for row in prepared for tensor in checked(row)[:2]]
    assert found == [[5, 6, 7], [-100, 6, 7], [8, 9, 10], [8, 9, 10]]


def test_a_lone_label_is_something_to_learn_for_some_layouts_only():
    lone = [{"input_ids": [5, 6, 7], "labels": [-100, 6, -100]}, {"input_ids": [5, 6, 7], "labels": [5, 6, 7]}]
    assert len(prepare_data(lone, layout=DroppedMasks)) == 2
    assert len(prepare_data(lone, layout=AnchoredBlocks)) == 1
    pair = [{"input_ids": [5, 6, 7], "labels": [5, 6, -100]}]
    assert len(prepare_data(pair, layout=AnchoredBlocks)) == 1
    with pytest.raises(ValueError, match="something to learn"):
        prepare_data(pair, layout=SharedPrefixes)
    with pytest.raises(ValueError, match="something to learn"):
        prepare_data([{"input_ids": [5, 6], "labels": [5, -100]}])


@pytest.mark.parametrize("seed", range(5))
def test_packing_fills_packs_and_keeps_every_example_once(seed):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 40) for _ in range(60)] + [70]
    rows = pack(lengths, 50)
    assert sorted(index for row in rows for index in row) == list(range(61))
    sums = [sum(lengths[index] for index in row) for row in rows]
    assert all(total <= 50 for row, total in zip(rows, sums, strict=True) if row != [60])
    assert rows.count([60]) == 1
    # Best fit decreasing needs at most 11/9 of the fewest rows, and one.
    assert len(rows) - 1 <= sum(lengths[:-1]) / 50 * 11 / 9 + 1


@pytest.mark.parametrize("iterable", [False, True])
def test_packed_examples_hold_the_examples_one_after_another(tokenizer, iterable):
    texts = [{"text": "two and three " * n} for n in (1, 2, 3, 1)]
    data = Dataset.from_list(texts)
    data = data.to_iterable_dataset() if iterable else data
    alone = [row["input_ids"] for row in prepare_data(data, tokenizer)]
    packed = list(prepare_data(data, tokenizer, max_length=max(map(len, alone)) + 8, packing=True))
    assert len(packed) < 4
    found = []
    for row in packed:
        assert row["labels"] == row["input_ids"]
        for document in sorted(set(row["document_ids"])):
            places = [place for place, number in enumerate(row["document_ids"]) if number == document]
            found.append([row["input_ids"][place] for place in places])
    assert sorted(found) == sorted(alone)


def test_what_can_not_be_prepared_is_refused_before_any_work(tokenizer):
    with pytest.raises(ValueError, match="got columns question, answer"):
        prepare_data([{"question": "a", "answer": "b"}], tokenizer)
    with pytest.raises(ValueError, match="processing_class"):
        prepare_data([CHAT])
    with pytest.raises(ValueError, match="has none"):
        prepare_data([CHAT], tiny_chat_tokenizer(None))
    with pytest.raises(ValueError, match="empty"):
        prepare_data([])
    with pytest.raises(ValueError, match="expected a text in column 'text', got int"):
        prepare_data([{"text": 3}], tokenizer)


@pytest.mark.parametrize("kind", ["pard", "dflash", "dart"])
@pytest.mark.parametrize("packing", [False, True])
def test_the_trainer_takes_conversations_as_they_are(kind, packing, tmp_path, tokenizer):
    target = tiny_target("qwen3", vocab_size=320)
    rows = [
        {"messages": [{"role": "user", "content": "two"}, {"role": "assistant", "content": "is it five " * n}]}
        for n in range(1, 6)
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    saved = load_dataset("json", data_files=str(data), split="train", cache_dir=tmp_path / "cache")
    arguments = DraftTrainingArguments(
        tmp_path / "run",
        max_steps=2,
        packing=packing,
        max_length=128,
        per_device_train_batch_size=2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1,
    )
    trainer = DraftTrainer(
        tiny_drafter(kind, target),
        target=target,
        args=arguments,
        train_dataset=DatasetDict({"train": saved, "other": saved}),
        eval_dataset={"chats": rows},
        processing_class=tokenizer,
    )
    assert (len(trainer.train_dataset) < 5) == packing
    trainer.train()
    assert all(torch.isfinite(torch.tensor(e["loss"])) for e in trainer.state.log_history if "loss" in e)
    assert trainer.evaluate()["eval_chats_loss"] > 0


@pytest.mark.parametrize("packing", [False, True])
def test_the_trainer_takes_a_stream(tmp_path, tokenizer, packing):
    target = tiny_target("qwen3", vocab_size=320)
    stream = Dataset.from_list([CHAT, UNANSWERED, CHAT]).to_iterable_dataset()
    settings = {"max_steps": 3, "packing": packing, "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
    arguments = DraftTrainingArguments(tmp_path, report_to=[], use_cpu=True, **settings)
    trainer = DraftTrainer(
        tiny_drafter("dflash", target),
        target=target,
        args=arguments,
        train_dataset=stream,
        processing_class=tokenizer,
    )
    trainer.train()
    assert sum("loss" in entry for entry in trainer.state.log_history) == 3


def test_flex_attention_is_refused_where_it_can_not_train(tmp_path):
    target = tiny_target("qwen3")
    with pytest.raises(ValueError, match="no backward pass on cpu"):
        DraftTrainer(
            tiny_drafter("pard", target),
            args=DraftTrainingArguments(tmp_path, use_cpu=True, training_attention="flex", report_to=[]),
            train_dataset=[{"input_ids": [1, 2, 3]}],
        )


@pytest.mark.parametrize(
    ("setting", "value", "match"),
    [
        ("max_length", 1, "max_length"),
        ("training_attention", "fast", "training_attention"),
        ("chat_template_kwargs", "x", "chat_template_kwargs"),
    ],
)
def test_data_settings_out_of_range_are_refused(tmp_path, setting, value, match):
    with pytest.raises(ValueError, match=match):
        DraftTrainingArguments(tmp_path, use_cpu=True, **{setting: value})
    with pytest.raises(ValueError, match="max_length"):
        DraftTrainingArguments(tmp_path, use_cpu=True, packing=True, max_length=None)


@pytest.mark.parametrize("form", ["rows", "arrow", "stream"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"labels": [1, 2, 3]}, "labels has 3 entries, and there are 4 tokens"),
        ({"labels": [1, 2, 3, 4, 5]}, "labels has 5 entries, and there are 4 tokens"),
        ({"attention_mask": [1, 1, 1]}, "attention_mask has 3 entries, and there are 4 tokens"),
        ({"document_ids": [0]}, "document_ids has 1 entries, and there are 4 tokens"),
        ({"attention_mask": [0, 0, 0, 0]}, "padding alone"),
    ],
)
def test_rows_whose_columns_have_other_lengths_are_refused_by_number(wrong, message, form):
    right = {name: [0, 1, 1, 1] for name in wrong}
    rows = [{"input_ids": [1, 2, 3, 4], **columns} for columns in (right, wrong, right)]
    data = rows if form == "rows" else Dataset.from_list(rows)
    with pytest.raises(ValueError, match=f"example 1: {message}|example 1: attention_mask .*{message}"):  # noqa: PT012
        prepared = prepare_data(data.to_iterable_dataset() if form == "stream" else data)
        list(prepared)


def test_texts_end_where_the_targets_context_does(tokenizer, caplog):
    words = {"text": " ".join(["two and three"] * 30)}
    whole = len(prepare_data([words], tokenizer)[0]["input_ids"])
    assert whole > 40
    with caplog.at_level(logging.WARNING):
        (row,) = prepare_data([words], tokenizer, max_length=50, context=20)
    assert len(row["input_ids"]) == len(row["labels"]) == 20
    assert "the target reads 20 tokens" in caplog.text
    assert len(prepare_data([words], tokenizer, max_length=20, context=50)[0]["input_ids"]) == 20
    tokens = [{"input_ids": [*range(3, 33)], "labels": [*range(3, 33)]}, {"input_ids": [3, 4, 5], "labels": [3, 4, 5]}]
    for data in (tokens, Dataset.from_list(tokens), Dataset.from_list(tokens).to_iterable_dataset()):
        rows = list(prepare_data(data, context=20))
        assert [len(row["input_ids"]) for row in rows] == [len(row["labels"]) for row in rows] == [20, 3]
    assert "1 of 2 examples are longer" in caplog.text
    # Each text of a pack begins at position 0.
    packed = [{**tokens[0], "document_ids": [0] * 15 + [1] * 15}]
    assert len(prepare_data(packed, context=20)[0]["input_ids"]) == 30


def test_a_target_with_a_table_of_positions_is_trained_for_and_drafted_for_within_it(tmp_path):
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32, "vocab_size": 64}
    target = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=None, pad_token_id=0)).eval()
    rows = [{"input_ids": [3 + n % 50] * 40, "labels": [-100] * 28 + [3 + n % 50] * 12} for n in range(4)]
    settings = {"tau_prompts": 2, "tau_new_tokens": 64, "max_steps": 1}
    trainer = trainer_for("pard", target, rows, tmp_path, drafter=tiny_drafter("pard", target), **settings)
    trainer.train()
    assert trainer.evaluate()["eval_tau"] >= 1


def test_a_drafter_remembers_what_rows_say_to_the_chat_template(tmp_path):
    args = DraftTrainingArguments(tmp_path, chat_template_kwargs={"a": 1}, use_cpu=True, report_to=[])
    own = {**CHAT, "chat_template_kwargs": {"enable_thinking": False}}
    assert chat_arguments([own] * 3, args) == {"a": 1, "enable_thinking": False}
    assert chat_arguments(Dataset.from_list([CHAT] * 3), args) == {"a": 1}
    # Of several modes none is remembered.
    assert chat_arguments([own, CHAT], args) is None
    assert chat_arguments([{"text": "two"}], args) is None


@pytest.mark.parametrize("form", ["rows", "arrow"])
def test_a_chat_template_may_come_with_what_templates_take(tokenizer, target, form):
    bare, brought = copy.deepcopy(tokenizer), {"chat_template": tokenizer.chat_template}
    bare.chat_template = None
    data = [CHAT] * 2 if form == "rows" else Dataset.from_list([CHAT] * 2)
    assert prepare_data(data, bare, template_kwargs=brought).to_list() == prepare_data(data, tokenizer).to_list()
    drafter = tiny_drafter("dflash", target)
    drafter.note_target(target, bare, brought)
    assert drafter.config.chat_format["prompt_end"]


def test_a_file_whose_name_is_a_pattern_is_read(tmp_path):
    folder = tmp_path / "runs[v2]"
    folder.mkdir()
    for name in ("train.jsonl", "a*.jsonl"):
        (folder / name).write_text(json.dumps({"text": name}) + "\n")
    for name in ("train.jsonl", "a*.jsonl"):
        assert [row["text"] for row in load_data(str(folder / name))] == [name]


@pytest.mark.parametrize("form", ["rows", "arrow", "stream"])
def test_a_row_that_can_not_be_learned_from_is_named(tokenizer, form):
    rows = [CHAT, {"messages": [{"role": "nobody", "content": "x"}, CHAT["messages"][1]]}, CHAT]
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{{ raise_exception('no such role') if messages[0]['role'] == 'nobody' else messages[0]['content'] }}"
    )
    data = rows if form == "rows" else Dataset.from_list(rows)
    with pytest.raises(ValueError, match=r"example 1: .*no such role"):
        list(prepare_data(data.to_iterable_dataset() if form == "stream" else data, tokenizer))


def test_a_generator_is_refused_with_advice_before_any_row_is_read(target, tokenizer, tmp_path):
    def rows():
        pytest.fail("a row was read")
        yield CHAT

    uses = (
        load_data,
        lambda data: regenerate(data, tmp_path / "out.jsonl", LocalWriter(target, tokenizer), "tiny"),
        lambda data: trainer_for("pard", target, data, tmp_path, trainer_options={"processing_class": tokenizer}),
    )
    for use in uses:
        with pytest.raises(TypeError, match=r"got a generator: pass a list of its rows"):
            use(rows())


def test_a_tokenizers_name_is_no_tokenizer():
    with pytest.raises(TypeError, match=r"tokenizer as processing_class, got a str: load it with AutoTokenizer"):
        prepare_data([CHAT], "a/path")


GOOD = {"input_ids": [9, 9, 7, 40, 41, 5, 6], "attention_mask": [1] * 7, "labels": None, "document_ids": None}
TEACH_NOTHING = {
    "padding": {"input_ids": [5, 0, 0, 0, 0], "attention_mask": [1, 0, 0, 0, 0]},
    "labels in padding": {
        "input_ids": [5, 6, 7, 8, 9],
        "attention_mask": [1, 1, 1, 0, 0],
        "labels": [-100, -100, -100, 8, 9],
    },
    "documents of a token each": {"input_ids": [5, 6, 7, 8], "document_ids": [0, 1, 2, 3]},
    "a token without labels": {"input_ids": [5], "labels": None},
    "nothing without labels": {"input_ids": [], "labels": None},
}


@pytest.mark.parametrize(("kind", "source"), [("pard", list), ("dflash", list), ("dart", Dataset.from_list)])
@pytest.mark.parametrize("row", TEACH_NOTHING.values(), ids=TEACH_NOTHING)
def test_rows_that_teach_nothing_are_dropped_before_training(row, kind, source, tmp_path):
    names = {"input_ids", *row}
    good = {name: value for name, value in GOOD.items() if name in names}
    if "document_ids" in names:
        good["document_ids"] = [0] * 7
    rows = source([good, row, good])
    trainer = trainer_for(kind, tiny_target(), rows, tmp_path, max_steps=3, per_device_train_batch_size=1)
    assert len(trainer.train_dataset) == 2
    trainer.train()


def test_what_a_drafter_needs_more_of_is_counted_in_documents_without_padding():
    two = {"input_ids": [5, 6, 7, 8], "document_ids": [0, 0, 1, 1]}
    padded = {"input_ids": [0, 0, 5, 6], "attention_mask": [0, 0, 1, 1]}
    three = {"input_ids": [0, 5, 6, 7], "attention_mask": [0, 1, 1, 1]}
    assert len(prepare_data([two], layout=AnchoredBlocks)) == len(prepare_data([padded], layout=AnchoredBlocks)) == 1
    for nothing in (two, padded):
        with pytest.raises(ValueError, match="none of 1 examples has something to learn"):
            prepare_data([nothing], layout=SharedPrefixes)
    assert len(prepare_data([three], layout=SharedPrefixes)) == 1


def test_rows_of_a_stream_may_have_unlike_columns():
    rows = [
        {"input_ids": [1, 2, 3], "labels": [1, 2, 3], "attention_mask": [1, 1, 1]},
        {"input_ids": [4, 5], "labels": [4, 5]},
    ]
    stream = IterableDataset.from_generator(lambda: iter(rows))
    assert [row["input_ids"] for row in prepare_data(stream)] == [[1, 2, 3], [4, 5]]


@pytest.mark.parametrize("documents", [["a", "b", "c"], [[0], [0], [1]]])
def test_documents_that_are_no_numbers_are_told(documents):
    with pytest.raises(ValueError, match="document_ids"):
        prepare_data([{"input_ids": [1, 2, 3], "document_ids": documents}])


@pytest.fixture
def saved(tmp_path) -> Path:
    """The folder of a data set of texts."""
    Dataset.from_list([{"text": f"two and {word}"} for word in ("three", "four", "five")]).save_to_disk(
        tmp_path / "saved"
    )
    return tmp_path / "saved"


def test_a_data_set_in_a_folder_that_can_only_be_read_is_prepared(tokenizer, saved, monkeypatch):
    may = os.access
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != saved and may(place, mode))
    files = sorted(saved.iterdir())
    rows = prepare_data(str(saved), tokenizer)
    assert learned(tokenizer, rows[0]).startswith("two and three")
    assert sorted(saved.iterdir()) == files
    assert is_caching_enabled()


@contextmanager
def full_disk():
    """Whatever is written beyond a few bytes finds no room."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_is_full_where_data_sets_are_copied_is_told(tokenizer, saved, tmp_path):
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": f"written to {tmp_path}"}) + "\n")
    with (
        full_disk(),
        pytest.raises(OSError, match=r"can't read .*text.jsonl': there is no room to write .* HF_DATASETS_CACHE"),
    ):
        load_data(str(tmp_path / "text.jsonl"))
    with full_disk(), pytest.raises(OSError, match=rf"there is no room to write {saved} "):
        prepare_data(str(saved), tokenizer)
