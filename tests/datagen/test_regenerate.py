"""Regenerating answers: each row once, whatever happens in between; by the target here or on a server."""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler

import huggingface_hub.constants
import pytest
import torch

import in_process
from hf_pardraft.datagen.draws import ItemDraws
from hf_pardraft.datagen.local_writer import LocalWriter
from hf_pardraft.datagen.regenerate import Shard, regenerate
from hf_pardraft.datagen.resumable_jsonl import ResumableJsonl
from hf_pardraft.datagen.rewriting import Answer, Rewrite
from hf_pardraft.datagen.server_writer import ServerWriter
from hf_pardraft.training.data.dataset import prepare_data
from local_servers import serving
from processes import begin, is_running
from tiny_models import tiny_drafter, tiny_target
from tiny_tokenizers import tiny_chat_tokenizer


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **extra):
    return {"role": "assistant", "content": text, **extra}


def conversations(count: int) -> list[dict]:
    """Of one to three turns and different lengths."""
    rows = []
    for i in range(count):
        turns = []
        for turn in range(i % 3 + 1):
            turns += [user(f"{i} and {turn} " * (i % 5 + 1)), assistant("the old answer")]
        rows.append({"messages": turns, "id": f"row {i}"})
    return rows


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def target():
    target = tiny_target("qwen3", vocab_size=320)
    target.generation_config.eos_token_id = 2
    # Else it would write long texts of nothing but special tokens and ids that mean nothing.
    bias = torch.zeros(320)
    bias[2] = 4.0
    bias[[0, 1]] = bias[299:] = -100.0
    head, target.lm_head = target.lm_head, torch.nn.Linear(32, 320)
    target.lm_head.weight, target.lm_head.bias = head.weight, torch.nn.Parameter(bias)
    return target


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_chat_tokenizer("chatml")


def local(target, tokenizer, **options) -> LocalWriter:
    return LocalWriter(target, tokenizer, **{"max_tokens": 12, "batch_size": 3, **options})


def test_each_turn_is_written_after_the_new_answers_before_it():
    call = assistant("", tool_calls=[{"function": {"name": "f"}}])
    row = {"messages": [user("a"), assistant("old 1"), user("b"), call, {"role": "tool", "content": "7"}, user("c")]}
    rewrite = Rewrite(5, row)
    assert rewrite.messages == [user("a")]
    rewrite.add(Answer("new 1"))
    assert not rewrite.is_done
    assert rewrite.messages == [user("a"), assistant("new 1"), *row["messages"][2:]]
    seed = rewrite.seed(0)
    rewrite.add(Answer("new 2", reasoning="because"))
    assert rewrite.is_done
    assert rewrite.seed(0) != seed
    assert rewrite.result()["messages"][-1] == assistant("new 2", reasoning_content="because")
    assert rewrite.result()["index"] == 5
    calling = Rewrite(0, {"messages": [user("a"), assistant("x"), user("b"), assistant("y")]})
    calling.add(Answer("", tool_calls=[{"function": {"name": "f"}}]))
    # Nobody knows what the tool would say.
    assert calling.is_done
    assert calling.result() == {"index": 0, "truncated": False, "messages": [user("a"), call]}
    cut = Rewrite(0, {"messages": [user("a"), assistant("x"), user("b"), assistant("y")]})
    cut.add(Answer("half", is_whole=False))
    assert cut.is_done
    assert cut.result() == {"index": 0, "truncated": True, "messages": [user("a"), assistant("half")]}


def test_prompts_get_completions():
    text = Rewrite(0, {"prompt": "two and", "completion": "old", "id": 3})
    text.add(Answer(" three"))
    assert text.result() == {"prompt": "two and", "completion": " three", "id": 3, "index": 0, "truncated": False}
    chat = Rewrite(1, {"prompt": [user("two")], "completion": [assistant("old")]})
    assert chat.messages == [user("two")]
    chat.add(Answer("new"))
    assert chat.result()["completion"] == [assistant("new")]
    for row in ({"text": "two"}, {"messages": []}, {"messages": [{"role": "system", "content": "x"}]}):
        with pytest.raises(ValueError, match="expected"):
            Rewrite(0, row)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_is_written_alike_in_any_batch(target, tokenizer, tmp_path, temperature):
    rows = conversations(7)
    found = {}
    for batch_size in (1, 3):
        path = tmp_path / f"{batch_size}.jsonl"
        writer = local(target, tokenizer, batch_size=batch_size, temperature=temperature)
        result = regenerate(rows, path, writer, "tiny", progress=False)
        assert (result.num_rows, result.num_written, result.failed) == (7, 7, {})
        found[batch_size] = sorted(read(path), key=lambda row: row["index"])
    assert found[1] == found[3]
    for row, old in zip(found[1], rows, strict=True):
        assert row["id"] == old["id"]
        assert [m for m in row["messages"] if m["role"] == "user"] == old["messages"][: len(row["messages"]) : 2]
        assert all(m["content"] != "the old answer" for m in row["messages"])


def test_greedy_answers_are_those_of_generate_with_and_without_a_drafter(target, tokenizer, tmp_path):
    rows = [{"messages": [user(f"{i} and two")]} for i in range(3)]
    drafter = tiny_drafter("pard", target)
    for name, options in (("plain", {}), ("drafted", {"drafter": drafter})):
        path = tmp_path / f"{name}.jsonl"
        regenerate(rows, path, local(target, tokenizer, temperature=0.0, **options), "tiny", progress=False)
        for row in read(path):
            prompt = tokenizer.apply_chat_template(
                row["messages"][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            expected = target.generate(**prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
            text = tokenizer.decode(expected[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
            assert row["messages"][1]["content"] == text
    assert drafter.last_stats.rounds > 0


def test_a_drafter_samples_too(target, tokenizer, tmp_path):
    drafter = tiny_drafter("pard", target)
    writer = local(target, tokenizer, drafter=drafter, temperature=1.0)
    assert regenerate(conversations(4), tmp_path / "out.jsonl", writer, "tiny", progress=False).num_written == 4


def test_the_token_that_is_left_is_a_sample_of_the_law():
    law = torch.tensor([0.0, 0.5, 0.3, 0.0, 0.15, 0.05, 0.0])
    generators = [torch.Generator().manual_seed(seed) for seed in range(20000)]
    drawn = ItemDraws(generators)(None, law.log().repeat(20000, 1))
    assert torch.equal(drawn.isfinite().sum(dim=1), torch.ones(20000, dtype=torch.long))
    shares = torch.bincount(drawn.argmax(dim=1), minlength=7) / 20000
    torch.testing.assert_close(shares, law, atol=0.015, rtol=0)
    assert not shares[law == 0].any()


def test_answers_that_were_cut_off_teach_no_end(target, tokenizer, tmp_path):
    path = tmp_path / "out.jsonl"
    regenerate(conversations(8), path, local(target, tokenizer, temperature=1.0, max_tokens=9), "tiny", progress=False)
    rows = read(path)
    assert {row["truncated"] for row in rows} == {True, False}
    for row, raw in zip(prepare_data(str(path), tokenizer), rows, strict=True):
        learned = [label for label in row["labels"] if label != -100]
        assert row["input_ids"][-1] in (learned[-1], tokenizer.encode("\n")[-1])
        assert (learned[-1] != tokenizer.eos_token_id) == raw["truncated"]


def test_shards_have_every_row_once(target, tokenizer, tmp_path, monkeypatch):
    rows, output = conversations(7), tmp_path / "out.jsonl"
    writer = local(target, tokenizer)
    regenerate(rows, output, writer, "tiny", shard=Shard.parse("0/2"), progress=False)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    regenerate(rows, output, writer, "tiny", progress=False)
    parts = [tmp_path / f"out-0000{number}-of-00002.jsonl" for number in (0, 1)]
    assert sorted(row["index"] for part in parts for row in read(part)) == list(range(7))
    assert len(prepare_data(str(tmp_path / "out-*.jsonl"), tokenizer)) == 7
    for wrong in ("4/4", "1", "a/b", "1/0"):
        with pytest.raises(ValueError, match="expected a shard"):
            Shard.parse(wrong)


def test_a_shard_without_a_row_writes_nothing_and_is_no_error(target, tokenizer, tmp_path):
    """Where there are more processes than rows, a launcher would end those that have some."""
    writer, shard = local(target, tokenizer), Shard(2, 3)
    result = regenerate(conversations(2), tmp_path / "out.jsonl", writer, "tiny", shard=shard, progress=False)
    assert result.facts()["rows"] == 0
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="no row"):
        regenerate([], tmp_path / "out.jsonl", writer, "tiny", shard=shard, progress=False)


def test_a_torn_line_is_mended_and_other_settings_are_refused(target, tokenizer, tmp_path):
    rows, path = conversations(5), tmp_path / "out.jsonl"
    regenerate(rows, path, local(target, tokenizer), "tiny", progress=False)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]) + lines[3][:20])
    result = regenerate(rows, path, local(target, tokenizer, batch_size=2), "tiny", progress=False)
    assert (result.num_before, result.num_written) == (3, 2)
    assert sorted(path.read_bytes().splitlines()) == sorted(whole.splitlines())
    for options, name, match in (
        ({"temperature": 0.1}, "tiny", "temperature 0.6"),
        ({"max_tokens": 5}, "tiny", "max_tokens"),
        ({}, "other", "target"),
    ):
        with pytest.raises(ValueError, match=match):
            regenerate(rows, path, local(target, tokenizer, **options), name, progress=False)
    with pytest.raises(ValueError, match="checksum"):
        regenerate(conversations(6)[1:], path, local(target, tokenizer), "tiny", progress=False)
    with (
        ResumableJsonl(tmp_path / "busy.jsonl", {}),
        pytest.raises(OSError, match=r"busy.jsonl is being written by process"),
    ):
        ResumableJsonl(tmp_path / "busy.jsonl", {})
    path.write_bytes(lines[0] + b"nonsense\n")
    with pytest.raises(ValueError, match="line 2"):
        regenerate(rows, path, local(target, tokenizer), "tiny", progress=False)
    with pytest.raises(ValueError, match=r"\.jsonl"):
        regenerate(rows, tmp_path / "out.parquet", local(target, tokenizer), "tiny", progress=False)


def test_a_killed_run_goes_on_without_a_duplicate_or_a_gap(target, tokenizer, tmp_path):
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in conversations(60)))
    path = tmp_path / "out.jsonl"
    command = ["regenerate", tmp_path / "data.jsonl", "--target", tmp_path / "target", "--output", path]
    command += ["--batch-size", "2", "--max-tokens", "24", "--dtype", "float32"]
    process, deadline = begin(lambda: in_process.pardraft(*command)), time.monotonic() + 600
    while not (path.exists() and path.stat().st_size) and is_running(process) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    before = read(path) if path.read_bytes().endswith(b"\n") else []
    assert 0 < len(path.read_bytes().splitlines()) < 60
    done = in_process.pardraft(*command)
    assert done.code == 0, done.out
    after = read(path)
    assert sorted(row["index"] for row in after) == list(range(60))
    assert after[: len(before)] == before
    again = in_process.pardraft(*command)
    assert "written now: 0" in again.out


class FickleServer:
    """Answers chats with the number of messages, but only now and then at once."""

    def __init__(self, trouble):
        self.requests, self.troubles, self.lock = [], {}, threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server.lock:
                    server.requests.append((body, dict(self.headers)))
                    key = json.dumps(body["messages"])
                    tries = server.troubles[key] = server.troubles.get(key, 0) + 1
                status = trouble(body, tries)
                if status == "drop":
                    self.connection.close()
                    return
                content = {"role": "assistant", "content": f"answer {len(body['messages'])}"}
                choice = {"index": 0, "message": content, "finish_reason": "stop"}
                choices = None
                if isinstance(status, dict):
                    choices, choice, status = status, choice | status, 200
                answer = {"choices": choices["choices"] if choices and "choices" in choices else [choice]}
                answer |= {"id": "x", "created": 0, "model": "m", "system_fingerprint": "", "object": "chat.completion"}
                answer |= {"usage": {"completion_tokens": 1, "prompt_tokens": 1, "total_tokens": 2}}
                data = json.dumps(answer if status == 200 else {"error": "trouble"}).encode()
                if isinstance(status, bytes):
                    data, status = status, 200
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments):
                pass

        self.running = serving(Handler)

    def __enter__(self):
        self.url = f"{self.running.__enter__()}/v1"
        return self

    def __exit__(self, *error):
        self.running.__exit__(*error)


@pytest.fixture
def online(monkeypatch):
    """The server is on this machine, but huggingface_hub would not even ask it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")


def test_a_server_answers_every_row_though_it_fails_at_times(online, tmp_path):
    statuses = [429, 503, "drop", 200]
    with FickleServer(lambda body, tries: statuses[len(body["messages"][0]["content"]) % 3 :][tries - 1]) as server:
        writer = ServerWriter(
            server.url, "m", backoff=0.001, concurrency=4, template_kwargs={"enable_thinking": False}, temperature=0.3
        )
        rows, path = conversations(12), tmp_path / "out.jsonl"
        result = regenerate(rows, path, writer, "m", progress=False)
    assert result.failed == {}
    found = sorted(read(path), key=lambda row: row["index"])
    assert [row["index"] for row in found] == list(range(12))
    for row, old in zip(found, rows, strict=True):
        answers = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        assert answers == [f"answer {2 * turn + 1}" for turn in range(len(old["messages"]) // 2)]
    body, headers = server.requests[0]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0.3, 2048)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    # One seed per answer, the same at each try.
    seeds = {(json.dumps(body["messages"]), body["seed"]) for body, _ in server.requests}
    assert len(seeds) == len({messages for messages, _ in seeds})
    assert "hf_secret" not in str(headers)


CALLED = {"id": "x1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": [3]}'}}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"message": {"role": "assistant", "content": None}}, "without a text"),
        ({"message": None}, "without a text"),
        ({"message": {"role": "assistant", "content": 7}}, r"content of an unexpected kind \(int: 7\)"),
        ({"message": {"role": "assistant", "content": [{"type": "text", "text": "7"}]}}, r"content .*\(list: "),
        ({"message": {"role": "assistant", "content": {"text": "7"}}}, r"content .*\(dict: "),
        ({"message": {"role": "assistant", "content": True}}, r"content .*\(bool: True\)"),
        ({"message": {"role": "assistant", "content": "5", "reasoning": [1]}}, r"reasoning .*\(list: "),
        ({"message": {"role": "assistant", "content": "5", "tool_calls": "add"}}, r"tool_calls .*\(str: 'add'\)"),
        (
            {"message": {"role": "assistant", "content": "5", "tool_calls": [{"function": "add"}]}},
            r"a function .*'add'",
        ),
        ({"message": {"content": "5", "get": 1, "items": 2, "keys": 3}}, Answer("5")),
        ({"message": "hello"}, r"a message .*\(str: 'hello'\)"),
        ({"message": ["hello"]}, "no chat completion"),
        ({"choices": "abc"}, r"choices of an unexpected kind \(str: 'abc'\)"),
        ({"choices": []}, "without a choice"),
        ({"choices": None}, "without a choice"),
        ({"choices": {"message": {"content": "5"}}}, "choices of an unexpected kind"),
        ({"choices": [3]}, "no chat completion"),
        ({"finish_reason": "content_filter"}, "filter"),
        ({"finish_reason": "length"}, Answer("answer 1", is_whole=False)),
        (
            {"message": {"role": "assistant", "content": "5", "reasoning_content": "2 + 3"}},
            Answer("5", reasoning="2 + 3"),
        ),
        ({"message": {"role": "assistant", "content": "5", "reasoning": "2 + 3"}}, Answer("5", reasoning="2 + 3")),
        (
            {"message": {"role": "assistant", "content": None, "tool_calls": [CALLED]}, "finish_reason": "tool_calls"},
            Answer("", tool_calls=[{**CALLED, "function": {"name": "add", "arguments": {"a": 2, "b": [3]}}}]),
        ),
        # All its tokens went into thinking.
        (
            {"message": {"role": "assistant", "content": None, "reasoning_content": "2"}, "finish_reason": "length"},
            Answer("", is_whole=False, reasoning="2"),
        ),
    ],
)
def test_what_a_server_says_of_its_answer_is_heard(choice, expected, online):
    rewrite = Rewrite(0, {"messages": [user("two and three")]})
    with FickleServer(lambda body, tries: choice) as server:
        writer = ServerWriter(server.url, "m", backoff=0.001)
        if isinstance(expected, Answer):
            assert writer.answer(rewrite) == expected
        else:
            with pytest.raises(ValueError, match=expected):
                writer.answer(rewrite)
        # None of this gets better by asking again.
        assert len(server.requests) == 1


NESTED = b'{"choices": [{"message": {"content": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}]}"


@pytest.mark.parametrize(
    ("sent", "match"),
    [
        ({"choices": "abc"}, "choices"),
        ({"message": "hello"}, "a message"),
        ({"message": {"content": 7}}, "content"),
        (NESTED, "no chat completion .RecursionError"),
        (b"[1, 2]", "no chat completion"),
        (b"3", "no chat completion"),
        (b"nonsense", "no chat completion"),
        (b"\xff\xfe", "no chat completion"),
        ({"message": {"content": "half \ud83d"}}, "half of a surrogate pair"),
    ],
)
def test_one_strange_answer_costs_one_row_and_not_the_run(sent, match, online, tmp_path):
    def trouble(body, tries):
        return sent if body["messages"][0]["content"] == "odd" else 200

    rows = [{"messages": [user(text), assistant("old")]} for text in ("one", "odd", "two")]
    with FickleServer(trouble) as server:
        result = regenerate(rows, tmp_path / "out.jsonl", ServerWriter(server.url, "m", retries=0), "m", progress=False)
        assert (result.failed.keys(), result.lasting) == ({1}, set())
        assert re.search(match, result.failed[1])
        assert sorted(row["index"] for row in read(tmp_path / "out.jsonl")) == [0, 2]
    # The next run asks for that row again, and for no other.
    with FickleServer(lambda body, tries: 200) as server:
        result = regenerate(rows, tmp_path / "out.jsonl", ServerWriter(server.url, "m"), "m", progress=False)
        assert (result.num_before, result.num_written, len(server.requests)) == (2, 1, 1)


def test_a_row_that_is_no_text_is_told_and_costs_no_other(target, tokenizer, tmp_path):
    rows = [*conversations(2), {"messages": [user("half \udc00"), assistant("old")]}]
    result = regenerate(rows, tmp_path / "out.jsonl", local(target, tokenizer), "tiny", progress=False)
    assert result.num_written == 2
    assert "half of a surrogate pair" in result.failed[2]


def test_an_interrupt_does_not_wait_for_a_server_that_is_silent(tmp_path):
    """Ctrl-C in a process of its own, whose requests may take ten minutes."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in conversations(3)))
        command = [sys.executable, "-m", "hf_pardraft", "regenerate", str(tmp_path / "data.jsonl"), "--server", url]
        command += ["--model", "m", "--output", str(tmp_path / "out.jsonl")]
        environment = {**os.environ, "HF_HUB_OFFLINE": "0"}
        # Whoever started pytest may have told it to ignore interrupts.
        process = subprocess.Popen(
            command, env=environment, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
        )
        try:
            silent.settimeout(600)
            connection, _ = silent.accept()
            with connection:
                process.send_signal(signal.SIGINT)
                assert process.wait(timeout=600) != 0
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    "url", ["localhost:8000", "m", "", "http://", "ftp://host/v1", "http://host:port", "http://a b/"]
)
def test_a_server_that_is_no_url_is_refused_at_once(url):
    with pytest.raises(ValueError, match=r"expected a server's address, such as http://localhost:8000/v1"):
        ServerWriter(url, "m")


@pytest.mark.parametrize("torn", [0, 7])
def test_a_full_disk_is_told_and_costs_the_row_alone_that_was_written(torn, tmp_path, monkeypatch):
    """Whether nothing of it gets through, or a part."""
    with ResumableJsonl(tmp_path / "out.jsonl", {}) as answers:
        answers.append({"index": 0})
        file = answers._file

        class Full:
            def write(self, data):
                file.write(data[:torn])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            def __getattr__(self, name):
                return getattr(file, name)

        answers._file = Full()
        with pytest.raises(
            OSError, match=r"no room to write .*out.jsonl \(No space left .* free\): the rows in it are whole"
        ):
            answers.append({"index": 1})
        answers._file = file
        answers.append({"index": 2})
    with ResumableJsonl(tmp_path / "out.jsonl", {}) as answers:
        assert answers.done == {0, 2}


def test_an_answer_ends_where_the_context_ends(target, tokenizer, tmp_path, monkeypatch):
    row = {"messages": [user("two and three " * 5)]}
    ids = local(target, tokenizer).prompt_ids(Rewrite(0, row))
    prompt = len(ids)
    never_ends = target.lm_head.bias.data.clone().index_fill_(0, torch.tensor([2]), -100.0)
    # As an attribute it would be removed, and not be put back.
    monkeypatch.setitem(target.lm_head._parameters, "bias", torch.nn.Parameter(never_ends))
    monkeypatch.setattr(target.config, "max_position_embeddings", prompt + 3)
    three = target.generate(torch.tensor([ids]), max_new_tokens=3, do_sample=False, pad_token_id=0)[0, prompt:]
    for drafter in (None, tiny_drafter("pard", target)):
        path = tmp_path / f"{drafter is None}.jsonl"
        writer = local(target, tokenizer, temperature=0.0, drafter=drafter)
        regenerate([row], path, writer, "tiny", progress=False)
        (written,) = read(path)
        assert written["truncated"]
        assert written["messages"][1]["content"] == tokenizer.decode(three, skip_special_tokens=True)
    monkeypatch.setattr(target.config, "max_position_embeddings", prompt)
    failed = regenerate([row], tmp_path / "long.jsonl", local(target, tokenizer), "tiny", progress=False).failed
    assert f"{prompt} tokens" in failed[0]


@pytest.mark.parametrize("setting", [{"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.1}, {"max_tokens": 0}])
def test_settings_that_no_law_can_be_sampled_with_are_refused(setting, target, tokenizer):
    with pytest.raises(ValueError, match=f"expected .*{next(iter(setting))}"):
        local(target, tokenizer, **setting)
    with pytest.raises(ValueError, match=f"expected .*{next(iter(setting))}"):
        ServerWriter("http://127.0.0.1:9/v1", "m", **setting)


def test_a_row_that_keeps_failing_is_told_and_tried_again_by_the_next_run(online, tmp_path):
    rows, path = conversations(6), tmp_path / "out.jsonl"
    is_ill = True

    def trouble(body, tries):
        return 400 if is_ill and body["messages"][0]["content"].startswith("4 ") else 200

    with FickleServer(trouble) as server:
        writer = ServerWriter(server.url, "m", backoff=0.001, concurrency=2)
        result = regenerate(rows, path, writer, "m", progress=False)
        assert list(result.failed) == [4]
        assert "Bad request" in result.failed[4]
        # A bad request stays one: it is not sent again.
        assert sum(body["messages"][0]["content"].startswith("4 ") for body, _ in server.requests) == 1
        assert sorted(row["index"] for row in read(path)) == [0, 1, 2, 3, 5]
        is_ill = False
        assert regenerate(rows, path, writer, "m", progress=False).num_written == 1
    assert sorted(row["index"] for row in read(path)) == list(range(6))


def test_what_no_further_run_can_write_is_told_apart_from_what_may_pass(online, target, tokenizer, tmp_path):
    hopeless = [{"messages": []}, {"messages": [{"role": "system", "content": "be kind"}]}, {"prompt": "a text"}]
    rows, sent = conversations(3), {"1 ": 400, "2 ": 503}

    def trouble(body, tries):
        return next((status for text, status in sent.items() if body["messages"][0]["content"].startswith(text)), 200)

    with FickleServer(trouble) as server:
        writer = ServerWriter(server.url, "m", retries=0)
        result = regenerate([*rows, *hopeless], tmp_path / "out.jsonl", writer, "m", progress=False)
    assert result.failed.keys() == {1, 2, 3, 4, 5}
    assert result.lasting == {1, 3, 4, 5}
    told = result.failure_facts()
    assert told["failures that may pass"].startswith("1, such as row 2 (")
    assert "run the same command again" in told["failures that may pass"]
    assert told["failures that will stay"].startswith("4, such as row ")
    assert "mend them in a data set of their own" in told["failures that will stay"]
    assert "again" not in told["failures that will stay"]


def test_a_local_targets_failures_are_not_told_to_pass(target, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(target.config, "max_position_embeddings", 64)
    rows = [{"messages": [user("two")]}, {"prompt": ""}, {"messages": [user("two and three " * 30)]}]
    result = regenerate(rows, tmp_path / "out.jsonl", local(target, tokenizer), "tiny", progress=False)
    assert (result.num_written, result.failed.keys(), result.lasting) == (1, {1, 2}, {1, 2})
    (told,) = result.failure_facts().values()
    assert "no further run writes them" in told


def test_a_server_that_will_never_answer_stops_the_run(online, tmp_path):
    rows, path = conversations(40), tmp_path / "out.jsonl"
    with FickleServer(lambda body, tries: 401) as server:
        with pytest.raises(OSError, match="refuses all requests"):
            regenerate(rows, path, ServerWriter(server.url, "m", concurrency=2), "m", progress=False)
        assert len(server.requests) < 10
    with FickleServer(lambda body, tries: 500) as server:
        writer = ServerWriter(server.url, "m", concurrency=2, retries=1, backoff=0.001)
        with pytest.raises(OSError, match="one after another"):
            regenerate(rows, path, writer, "m", progress=False)
        assert len(server.requests) < 40


def test_offline_mode_is_named_as_the_reason(tmp_path):
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    with pytest.raises(OSError, match="HF_HUB_OFFLINE"):
        regenerate(conversations(2), tmp_path / "out.jsonl", ServerWriter("http://127.0.0.1:9/v1", "m"), "m")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ([], "either --target or --server"),
        (["--target", "t", "--server", "s"], "either --target or --server"),
        (["--server", "s"], "--model"),
        (["--server", "s", "--model", "m", "--drafter", "d"], "leave it out"),
        (["--server", "s", "--model", "m", "--shard", "4"], "number/count"),
        (["--server", "s", "--model", "m", "--chat-template-kwargs", "{"], "JSON"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(arguments, match, tmp_path):
    output = ["--output", str(tmp_path / "out.jsonl")]
    done = in_process.pardraft("regenerate", "data.jsonl", *output, *arguments)
    assert match in done.error


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["data.jsonl", "--output", "out.parquet"], r".jsonl file to write to"),
        (["data.jsonl", "--output", "out.jsonl"], "no data file 'data.jsonl'"),
        (["data.jsonl", "--output", "out.jsonl", "--top-p", "0"], "top_p in (0, 1]"),
    ],
)
def test_all_else_is_looked_at_before_a_target_is_loaded(arguments, match, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = in_process.pardraft("regenerate", *arguments, "--target", "no/such-model")
    assert match in done.error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["add_generation_prompt", "tokenize", "messages", "tools"])
def test_a_row_that_tells_the_template_what_the_renderer_does_costs_no_other(name, target, tokenizer, tmp_path):
    rows = conversations(3)
    rows[1]["chat_template_kwargs"] = {name: False}
    result = regenerate(rows, tmp_path / "out.jsonl", local(target, tokenizer), "tiny", progress=False)
    assert result.num_written == 2
    assert f"got {name}: leave out" in result.failed[1]


def test_settings_can_be_corrected_as_long_as_no_row_is_written(target, tokenizer, tmp_path, monkeypatch):
    out, rows = tmp_path / "out.jsonl", conversations(2)
    with monkeypatch.context() as failing:
        failing.setattr(LocalWriter, "write", lambda self, rewrites: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            regenerate(rows, out, local(target, tokenizer, max_tokens=3), "tiny", progress=False)
    regenerate(rows, out, local(target, tokenizer, max_tokens=4), "tiny", progress=False)
    with pytest.raises(ValueError, match="was begun with max_tokens 4"):
        regenerate(rows, out, local(target, tokenizer, max_tokens=3), "tiny", progress=False)


def test_what_is_no_number_is_not_drawn_from():
    scores = torch.zeros(3, 5)
    scores[1, 2] = torch.nan
    draws = ItemDraws([torch.Generator() for _ in range(3)])
    with pytest.raises(ValueError, match=r"scores of item \[1\] of this batch are no numbers"):
        draws(torch.zeros(3, 1), scores)
