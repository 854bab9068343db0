"""`pardraft serve` is Transformers' own server: the same answers as without a drafter, in fewer rounds."""

import asyncio
import json
import shutil
import threading
from pathlib import Path
from unittest import mock

import pytest
from transformers import AutoConfig, GenerationConfig, Qwen3ForCausalLM
from transformers.cli.serve import Serve

from hf_pardraft import DFlashDrafter
from hf_pardraft.cli import serve
from hf_pardraft.generation.candidate_generator import ParallelCandidateGenerator
from in_process import pardraft, run_main

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
pytest.importorskip("openai")
httpx = pytest.importorskip("httpx2")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DIALOGUE = [("user", "def add(a, b):"), ("assistant", "return a"), ("user", "class Point:")]
MESSAGES = [{"role": role, "content": content} for role, content in DIALOGUE]
REQUESTS = {
    "/v1/completions": {"prompt": "def add(a, b):\n", "max_tokens": 12},
    "/v1/chat/completions": {"messages": MESSAGES, "max_completion_tokens": 12},
    "/v1/responses": {"input": MESSAGES, "instructions": "return a", "max_output_tokens": 12},
}
DRAWN = {"temperature": 0.8, "seed": 3, "generation_config": json.dumps({"do_sample": True, "max_new_tokens": 12})}
CHANGING = ("id", "created", "created_at", "completed_at", "item_id")


@pytest.fixture(scope="module")
def family(tiny_family, tmp_path_factory) -> Path:
    """The tiny one; its target has a chat template."""
    folder = tmp_path_factory.mktemp("served") / "family"
    shutil.copytree(tiny_family, folder)
    (folder / "target" / "chat_template.jinja").write_text(CHATML)
    other = AutoConfig.from_pretrained(folder / "target")
    other.hidden_size = 16
    DFlashDrafter.for_target(Qwen3ForCausalLM(other), num_layers=1, block_size=4, mask_token_id=1).save_pretrained(
        folder / "narrow"
    )
    return folder


def started(entry, *words):
    """What `uvicorn` would run, and how the command ended."""
    served = []
    with mock.patch.object(uvicorn.Server, "run", lambda server: served.append(server.config.app)):
        ended = entry(*words)
    return served, ended


def application(family, *more):
    target, drafter = family / "target", family / "pard"
    words = ("serve", "--target", target, "--drafter", drafter, "--dtype", "float32", "--log-level", "error")
    (served,), ended = started(pardraft, *words, *more)
    assert ended.code == 0, ended.err
    return served


@pytest.fixture(scope="module")
def drafting(family):
    return application(family)


@pytest.fixture(scope="module")
def plain(family):
    def command():
        Serve(str(family / "target"), dtype="float32", log_level="error")

    return started(lambda: run_main(command))[0][0]


async def answers_to(app, *requests):
    """Answers to requests `(route, body)` that arrive together."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
        return await asyncio.gather(*(client.post(route, json=body) for route, body in requests))


def ask(app, *requests):
    return asyncio.run(answers_to(app, *requests))


def without_marks(value):
    """An answer without what is another in each: names and times."""
    if isinstance(value, dict):
        return {key: without_marks(entry) for key, entry in value.items() if key not in CHANGING}
    return [*map(without_marks, value)] if isinstance(value, list) else value


def events_of(answer) -> list:
    """What an answer holds: JSON, or a stream of it."""
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith(("data: ", "{"))]
    return [without_marks(json.loads(line)) for line in lines]


def usage_of(event) -> dict:
    return (event.get("response") or event)["usage"]


@pytest.fixture
def rounds(monkeypatch) -> list[int]:
    """One entry, for each draft: its depth."""
    drafted, draft_logits = [], ParallelCandidateGenerator.draft_logits

    def noted(generator, depth):
        drafted.append(depth)
        return draft_logits(generator, depth)

    monkeypatch.setattr(ParallelCandidateGenerator, "draft_logits", noted)
    return drafted


@pytest.mark.parametrize(("more", "stream"), [({}, False), (DRAWN, True)], ids=["greedy", "drawn and streamed"])
@pytest.mark.parametrize("route", REQUESTS)
def test_every_route_answers_as_without_a_drafter_in_fewer_rounds(drafting, plain, rounds, route, more, stream):
    body = {**REQUESTS[route], **more, "stream": stream}
    (found,) = ask(drafting, (route, body))
    assert 0 < len(rounds) < 8
    (expected,) = ask(plain, (route, body))
    assert events_of(found) == events_of(expected)
    assert 12 in usage_of(events_of(found)[-1]).values()


def test_clients_that_come_together_get_each_their_own_text_and_count(drafting):
    bodies = [{"prompt": "x = " * n, "max_tokens": 6 + n, "stream": n % 2 == 0} for n in range(1, 6)]
    requests = [("/v1/completions", body) for body in bodies]
    alone = [ask(drafting, request)[0] for request in requests]
    together = ask(drafting, *requests)
    assert [*map(events_of, together)] == [*map(events_of, alone)]
    counts = [usage_of(events_of(answer)[-1])["completion_tokens"] for answer in together]
    assert counts == [7, 8, 9, 10, 11]


async def leave_after_first_text(app, body):
    """Ask for a stream, and be gone as soon as some of it has come."""
    request, gone = json.dumps(body).encode(), asyncio.Event()
    said = iter([{"type": "http.request", "body": request, "more_body": False}])

    async def receive():
        if (event := next(said, None)) is not None:
            return event
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(event):
        if event["type"] == "http.response.body" and event.get("body"):
            gone.set()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(request)).encode())],
    }
    await app(scope, receive, send)


def test_a_client_that_leaves_ends_its_text_and_no_other(drafting, rounds, monkeypatch):
    short = ("/v1/completions", REQUESTS["/v1/completions"])
    (expected,) = ask(drafting, short)
    rounds.clear()
    has_left, draft_logits = threading.Event(), ParallelCandidateGenerator.draft_logits

    def held_in_the_third(generator, depth):
        if len(rounds) == 2:
            assert has_left.wait(60)
        return draft_logits(generator, depth)

    monkeypatch.setattr(ParallelCandidateGenerator, "draft_logits", held_in_the_third)
    # 100 rounds at least.
    endless = {"min_new_tokens": 200, "max_new_tokens": 200, "num_assistant_tokens": 1}
    long = {"prompt": short[1]["prompt"], "stream": True, "generation_config": json.dumps(endless)}

    async def leave_and_come_back():
        await leave_after_first_text(drafting, long)
        has_left.set()
        return await answers_to(drafting, short)

    (found,) = asyncio.run(leave_and_come_back())
    assert events_of(found) == events_of(expected)
    assert len(rounds) < 3 + 8


def test_what_has_no_drafts_is_written_without_a_drafter(drafting, plain, rounds):
    for setting in ({"num_beams": 2}, {"use_cache": False}):
        body = {**REQUESTS["/v1/completions"], "generation_config": json.dumps(setting)}
        answers = [ask(app, ("/v1/completions", body))[0] for app in (drafting, plain)]
        assert events_of(answers[0]) == events_of(answers[1])
    assert rounds == []


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ({"num_beams": 2}, "beam_search"),
        ({"use_cache": False}, "use_cache=False"),
        ({"cache_implementation": "quantized"}, "cache_implementation='quantized'"),
        ({"cache_implementation": "paged"}, "cache_implementation='paged'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_why_a_request_has_no_drafter(setting, word):
    from hf_pardraft.serving import obstacle_of

    assert obstacle_of(GenerationConfig(**setting)) == word
    assert obstacle_of(GenerationConfig(do_sample=True, cache_implementation="static")) is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"tree_budget": "many"}, "tree_budget"),
        ({"draft_schedule": "later"}, "draft_schedule"),
        ({"tree_budget": 8, "ngram_model": "/nowhere"}, "no n-gram model at /nowhere"),
    ],
)
def test_a_setting_that_is_wrong_is_the_clients_error_and_is_told(drafting, setting, reason, stream):
    body = {**REQUESTS["/v1/completions"], "generation_config": json.dumps(setting), "stream": stream}
    (answer,) = ask(drafting, ("/v1/completions", body))
    assert answer.status_code == (200 if stream else 400)
    assert reason in answer.text
    (after,) = ask(drafting, ("/v1/completions", REQUESTS["/v1/completions"]))
    assert after.status_code == 200


def test_a_target_that_was_unloaded_drafts_again(drafting, rounds):
    (expected,) = ask(drafting, ("/v1/completions", REQUESTS["/v1/completions"]))
    num_rounds = len(rounds)
    assert ask(drafting, ("/reset", {}))[0].status_code == 200
    (found,) = ask(drafting, ("/v1/completions", REQUESTS["/v1/completions"]))
    assert events_of(found) == events_of(expected)
    assert len(rounds) > num_rounds


def test_a_request_for_another_model_or_of_other_fields_is_refused_as_ever(drafting, plain):
    for body in ({"model": "nobody/knows"}, {"colour": "green"}):
        requests = [
            ask(app, ("/v1/completions", {**REQUESTS["/v1/completions"], **body}))[0] for app in (drafting, plain)
        ]
        assert requests[0].status_code == requests[1].status_code >= 400
        assert requests[0].text == requests[1].text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--drafter", "nowhere/at-all"], "can't load nowhere/at-all"),
        (["--drafter", "family/target"], "describes no drafter that this package reads"),
        (["--drafter", "family/narrow"], "hidden size"),
        (["--drafter", "family/pard", "--target", "nowhere/at-all"], "can't load 'nowhere/at-all'"),
        (["--drafter", "family/pard", "--target", "/nowhere/at-all"], "'/nowhere/at-all' is no folder here"),
        (["--drafter", "family/pard", "--continuous-batching"], "continuous batching works without a drafter"),
        (["--drafter", "family/pard", "--dtype", "float33"], "no dtype 'float33'"),
        (["--drafter", "family/pard", "--device", "gpu9"], "no device 'gpu9'"),
        (["--drafter", "family/pard", "--log-level", "loud"], "can't start with --log-level loud"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_said_before_the_server_starts(family, monkeypatch, options, reason):
    monkeypatch.chdir(family.parent)
    served, ended = started(pardraft, "serve", "--target", "family/target", *options)
    assert reason in ended.error
    assert served == []


def test_without_the_libraries_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(serve, "is_serve_available", lambda: False)
    assert "pip install 'hf-pardraft[serve]'" in pardraft("serve", "--target", "x", "--drafter", "y").error
