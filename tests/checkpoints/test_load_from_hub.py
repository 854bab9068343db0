"""Loading from the Hub, played by a server of our own: revisions, tokens, gated and missing repositories, and offline."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from huggingface_hub import constants
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig
from transformers.pipelines import base as pipelines

from hf_pardraft import AutoDrafter, DartDrafter, PardDrafter
from hf_pardraft.checkpoints.convert import convert
from local_servers import serving
from published_checkpoints import FIXTURES, LAYOUTS
from tiny_models import tiny_drafter, tiny_target

TOKEN = "hf_right"
COMMITS = {"main": "a" * 40, "old": "b" * 40}


@dataclass
class Hub:
    """Repositories with one folder per revision, and what was asked for."""

    url: str = ""
    repositories: dict[str, dict[str, Path]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)


def answer_of(hub: Hub, path: str, token: str | None) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body, as the Hub has them for `/owner/name/resolve/revision/file` and `/api/models/...`."""
    parts = path.split("?")[0].strip("/").split("/")
    is_api = parts[:2] == ["api", "models"]
    owner, name, *rest = parts[2:] if is_api else parts
    repository = f"{owner}/{name}"
    if repository not in hub.repositories:
        return 404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, b""
    if repository in hub.gated and token != TOKEN:
        return 401, {"X-Error-Code": "GatedRepo", "X-Error-Message": f"Access to model {repository} is restricted"}, b""
    revision = rest[1] if len(rest) > 1 else "main"
    revision = next((branch for branch, commit in COMMITS.items() if commit == revision), revision)
    if revision not in hub.repositories[repository]:
        return 404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev id: {revision}"}, b""
    if is_api:
        return 200, {}, json.dumps({"id": repository, "sha": COMMITS[revision], "siblings": []}).encode()
    file = hub.repositories[repository][revision].joinpath(*rest[2:])
    headers = {"X-Repo-Commit": COMMITS[revision]}
    if not file.is_file():
        return 404, {**headers, "X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}, b""
    content = file.read_bytes()
    return 200, {**headers, "ETag": f'"{hash(content) & 0xFFFFFFFF:x}"'}, content


@pytest.fixture
def hub(monkeypatch, tmp_path) -> Iterator[Hub]:
    played = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            status, headers, body = answer_of(played, self.path, token)
            played.requests.append(self.path)
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_):
            pass

    with serving(Handler) as played.url:
        for name, value in {
            "ENDPOINT": played.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": played.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_DISABLE_XET": True,
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield played


def options(tmp_path, **given):
    return {"cache_dir": tmp_path / "cache", "token": False, **given}


def test_a_repository_loads_from_the_revision_that_was_asked_for_and_from_the_cache(hub, tmp_path, monkeypatch):
    hub.repositories["someone/drafter"] = {"main": FIXTURES / "dart", "old": FIXTURES / "pard"}
    assert isinstance(AutoDrafter.from_pretrained("someone/drafter", **options(tmp_path)), DartDrafter)
    assert isinstance(AutoDrafter.from_pretrained("someone/drafter", **options(tmp_path, revision="old")), PardDrafter)
    with pytest.raises(OSError, match="newer"):
        AutoDrafter.from_pretrained("someone/drafter", **options(tmp_path, revision="newer"))
    hub.requests.clear()
    cached = AutoDrafter.from_pretrained("someone/drafter", **options(tmp_path, local_files_only=True))
    assert isinstance(cached, DartDrafter)
    assert hub.requests == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert isinstance(AutoDrafter.from_pretrained("someone/drafter", **options(tmp_path)), DartDrafter)
    assert hub.requests == []
    with pytest.raises(OSError, match="someone/other"):
        AutoDrafter.from_pretrained("someone/other", **options(tmp_path))


def test_weights_that_are_not_in_the_cache_are_not_said_to_be_nowhere(hub, tmp_path, monkeypatch):
    hub.repositories["someone/drafter"] = {"main": FIXTURES / "dart"}
    PreTrainedConfig.get_config_dict("someone/drafter", **options(tmp_path))
    told = r"someone/drafter holds no weights: expected one of .*Only the cache was looked into .*load it online"
    with pytest.raises(OSError, match=told):
        AutoDrafter.from_pretrained("someone/drafter", **options(tmp_path, local_files_only=True))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match=told):
        AutoDrafter.from_pretrained("someone/drafter", **options(tmp_path))


def test_a_gated_repository_needs_the_token(hub, tmp_path):
    hub.repositories["someone/gated"], hub.gated = {"main": FIXTURES / "dart"}, {"someone/gated"}
    for load in (AutoDrafter.from_pretrained, DartDrafter.from_pretrained, PardDrafter.from_pretrained):
        with pytest.raises(OSError, match=r"gated repo|restricted"):
            load("someone/gated", **options(tmp_path))
    with pytest.raises(OSError, match=r"gated repo|restricted"):
        convert("someone/gated", tmp_path / "out", **options(tmp_path))
    assert not (tmp_path / "out").exists()
    drafter = AutoDrafter.from_pretrained("someone/gated", **options(tmp_path, token=TOKEN))
    assert isinstance(drafter, DartDrafter)


def test_a_repository_that_is_not_there(hub, tmp_path):
    with pytest.raises(OSError, match="someone/nowhere"):
        AutoDrafter.from_pretrained("someone/nowhere", **options(tmp_path))


def test_the_published_subfolder_and_any_other_are_found(hub, tmp_path):
    hub.repositories["amd/pard2"] = {"main": LAYOUTS["pard2"](tmp_path / "pard2")}
    for given in ({}, {"subfolder": "pard_model"}):
        drafter = AutoDrafter.from_pretrained("amd/pard2", **options(tmp_path, **given))
        assert drafter.tapped_hidden_states == [-1, -3]
    convert("amd/pard2", tmp_path / "out", "native", **options(tmp_path))
    assert AutoDrafter.from_pretrained(tmp_path / "out").tapped_hidden_states == [-1, -3]


def test_transformers_own_ways_to_load_by_name_give_a_drafter(hub, tmp_path):
    target = tiny_target("qwen3")
    tiny_drafter("pard", target).save_pretrained(tmp_path / "drafter")
    target.save_pretrained(tmp_path / "target")
    hub.repositories |= {f"someone/{name}": {"main": tmp_path / name} for name in ("drafter", "target")}
    hub.repositories["amd/pard2"] = {"main": LAYOUTS["pard2"](tmp_path / "pard2")}
    for auto_class in (AutoModel, AutoModelForCausalLM):
        assert isinstance(auto_class.from_pretrained("someone/drafter", **options(tmp_path)), PardDrafter)
        assert auto_class.from_pretrained("amd/pard2", **options(tmp_path)).tapped_hidden_states == [-1, -3]
    loaded = AutoModelForCausalLM.from_pretrained("someone/target", **options(tmp_path))
    assert type(loaded) is type(target)
    drafter, tokenizer = pipelines.load_assistant_model(target, "someone/drafter", None)
    assert isinstance(drafter, PardDrafter)
    assert tokenizer is None
