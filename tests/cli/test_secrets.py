"""No token, key or folder of this machine is printed or stored."""

import base64
import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import quote

import huggingface_hub
import pytest

from hf_pardraft.datagen.rewriting import ROWS_MISSING
from hf_pardraft.user_input.redaction import redacted
from hostile_cases import evaluate, train
from in_process import pardraft
from local_servers import serving

pytest.importorskip("datasets")
pytestmark = pytest.mark.usefixtures("in_work")


def test_results_name_no_folders_of_this_machine(tmp_path):
    drafter = (Path.cwd() / "family" / "dflash").as_posix()
    command = evaluate("--drafter", f"DFlash={drafter}", "--json", tmp_path / "r.json")
    assert pardraft(*command).code == 0
    told = json.loads((tmp_path / "r.json").read_text())["command"]
    assert "--drafter DFlash=dflash --json r.json" in told


def test_a_token_of_the_hub_is_neither_printed_nor_stored(tmp_path):
    token = "hf_" + "a1" * 17
    done = pardraft("push", "family/dflash", token, "--dry-run", "--token", token)
    assert done.code in (0, 1)
    assert token not in done.err
    output = tmp_path / "trained"
    assert pardraft(*train("--output", output, "--hub-token", token)).code == 0
    holding = [path.name for path in output.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
    assert holding == []


class Echo(BaseHTTPRequestHandler):
    """A server that says back what it was sent, key included."""

    status = 200

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        sent = self.headers["Authorization"]
        choice = {"index": 0, "message": {"role": "assistant", "content": sent}, "finish_reason": "stop"}
        body = json.dumps({"error": {"message": f"wrong key: {sent}"}, "choices": [choice], "id": "x", "created": 0})
        self.send_response(self.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("status", [401, 400, 200])
@pytest.mark.parametrize(
    ("key", "with_password"),
    [("sk-0123456789abcdefghij", False), ("a/key with+signs&more", False), ("unused-key-0123", True)],
)
def test_a_key_that_a_server_says_back_is_neither_printed_nor_stored(
    status, key, with_password, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    common = ("regenerate", "chat.jsonl", "--output", tmp_path / "out.jsonl", "--model", "m", "--retries", 0)
    with serving(type("Handler", (Echo,), {"status": status})) as address:
        address = address.replace("://", "://user:passw0rd@" if with_password else "://") + "/v1"
        done = pardraft(*common, "--server", address, "--api-key-variable", "OWN", OWN=key, PARDRAFT_DEBUG="1")
    assert done.code == (1 if status == 401 else ROWS_MISSING)
    written_to = [path.read_text() for path in tmp_path.iterdir() if path.is_file()]
    for text in (done.out, done.err, caplog.text, *written_to):
        assert key not in text
        assert "passw0rd" not in text
        assert base64.b64encode(b"user:passw0rd").decode() not in text
    assert "[hidden]" in done.err + done.out or status == 200


def test_secrets_are_found_in_any_spelling():
    secret = 'a "key"/with+signs'
    for text in (secret, json.dumps(secret), quote(secret, safe=""), f"Authorization: Bearer {secret}"):
        assert "key" not in redacted(text, [secret]).replace("Authorization", "")
    assert redacted("Bearer abcdefgh, hf_" + "x1" * 17) == "Bearer [hidden], [hidden]"
    assert redacted("https://me:word@host/v1") == "https://[hidden]@host/v1"
    # A word is no key.
    assert redacted("it is a test", ["a", None, ""]) == "it is a test"
