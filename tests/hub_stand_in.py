"""A stand-in for the Hub's HTTP API: repositories in memory, behind a real server on this machine."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

from local_servers import serving

COMMIT = "c" * 40


@dataclass
class Hub:
    """What was asked for, and what is there.

    Attributes:
        repositories: by name, how they were made.
        files: content by (repository, branch, path).
        first: the same, as it was first uploaded.
        objects: what was uploaded apart from a commit, by its hash.
        requests: method and path of everything asked for, in order.
        commits: the header of each commit, and its repository and branch.
        unknown: requests that no route answers.
    """

    token: str = "hf_right"
    repositories: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[tuple[str, str, str], bytes] = field(default_factory=dict)
    first: dict[tuple[str, str, str], bytes] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    commits: list[dict[str, Any]] = field(default_factory=list)
    branches: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def names(self, repository: str, branch: str = "main") -> list[str]:
        return sorted(path for repo, rev, path in self.files if (repo, rev) == (repository, branch))

    def put_file(self, repo: str, branch: str, path: str, content: bytes) -> None:
        self.files[repo, branch, path] = content
        self.first.setdefault((repo, branch, path), content)

    # Routes: each takes what its pattern matched and the body, and answers with a status and an object.

    def create(self, body: bytes) -> tuple[int, Any]:
        wanted = json.loads(body)
        name = f"{wanted.get('organization') or 'someone'}/{wanted['name']}"
        if name in self.repositories:
            return 409, {"error": "exists", "url": f"{self.url}/{name}"}
        self.repositories[name] = wanted
        return 200, {"url": f"{self.url}/{name}", "name": name, "id": "1"}

    def branch(self, body: bytes, repo: str, branch: str) -> tuple[int, Any]:
        self.branches.append(branch)
        return 200, {}

    def preupload(self, body: bytes, repo: str, branch: str) -> tuple[int, Any]:
        if repo not in self.repositories:
            return 404, {"error": "no such repository"}
        files = json.loads(body)["files"]
        return 200, {
            "files": [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                    "oid": None,
                }
                for file in files
            ],
            "commitOid": COMMIT,
        }

    def lfs_batch(self, body: bytes, repo: str) -> tuple[int, Any]:
        objects = [
            {**wanted, "actions": {"upload": {"href": f"{self.url}/objects/{wanted['oid']}", "header": {}}}}
            for wanted in json.loads(body)["objects"]
        ]
        return 200, {"transfer": "basic", "objects": objects}

    def put_object(self, body: bytes, oid: str) -> tuple[int, Any]:
        if hashlib.sha256(body).hexdigest() != oid:
            return 400, {"error": "not what was announced"}
        self.objects[oid] = body
        return 200, {}

    def commit(self, body: bytes, repo: str, branch: str) -> tuple[int, Any]:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.commits.append({"repo": repo, "branch": branch, **value})
            elif line["key"] == "file":
                self.put_file(repo, branch, value["path"], base64.b64decode(value["content"]))
            elif line["key"] == "lfsFile":
                self.put_file(repo, branch, value["path"], self.objects[value["oid"]])
            elif line["key"] == "deletedFile":
                del self.files[repo, branch, value["path"]]
        return 200, {
            "success": True,
            "commitOid": COMMIT,
            "commitUrl": f"{self.url}/{repo}/commit/{COMMIT}",
            "pullRequestUrl": None,
        }

    def info(self, body: bytes, repo: str, branch: str = "main") -> tuple[int, Any]:
        names = self.names(repo, branch)
        if not names:
            return 404, {"error": "no such revision"}
        siblings = [{"rfilename": name} for name in names]
        return 200, {"id": repo, "modelId": repo, "sha": COMMIT, "private": False, "siblings": siblings, "tags": []}

    def tree(self, body: bytes, repo: str, branch: str) -> tuple[int, Any]:
        if repo not in self.repositories:
            return 404, {"error": "no such repository"}
        files = {path: content for (name, rev, path), content in self.files.items() if (name, rev) == (repo, branch)}
        return 200, [
            {"type": "file", "path": path, "size": len(content), "oid": "0" * 40} for path, content in files.items()
        ]

    def whoami(self, body: bytes) -> tuple[int, Any]:
        return 200, {"type": "user", "name": "someone", "orgs": [], "auth": {"type": "access_token"}}

    def valid(self, body: bytes) -> tuple[int, Any]:
        return 200, {"errors": [], "warnings": []}


NAME = r"([\w.-]+/[\w.-]+)"
ROUTES = [
    ("POST", r"/api/repos/create", "create"),
    ("POST", rf"/api/models/{NAME}/branch/(.+)", "branch"),
    ("POST", rf"/api/models/{NAME}/preupload/([^/]+)", "preupload"),
    ("POST", rf"/{NAME}\.git/info/lfs/objects/batch", "lfs_batch"),
    ("PUT", r"/objects/(\w+)", "put_object"),
    ("POST", rf"/api/models/{NAME}/commit/([^/]+)", "commit"),
    ("GET", rf"/api/models/{NAME}/tree/([^/]+)", "tree"),
    ("GET", rf"/api/models/{NAME}/revision/([^/]+)", "info"),
    ("GET", rf"/api/models/{NAME}", "info"),
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/validate-yaml", "valid"),
]
FILE = re.compile(rf"/{NAME}/resolve/([^/]+)/(.+)")
NEEDS_NO_TOKEN = {"GET", "HEAD"}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append(f"{self.command} {path}")
        needs_token = self.command not in NEEDS_NO_TOKEN and not path.startswith("/objects/")
        if needs_token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self.reply(401, {"error": "Invalid credentials"})
            return
        file = FILE.fullmatch(path)
        if self.command in NEEDS_NO_TOKEN and file:
            self.reply_file(*file.groups())
            return
        for method, pattern, name in ROUTES:
            match = re.fullmatch(pattern, path)
            if method == self.command and match:
                self.reply(*getattr(self.hub, name)(body, *match.groups()))
                return
        self.hub.unknown.append(f"{self.command} {path}")
        self.reply(404, {"error": "no such route"})

    do_GET = do_HEAD = do_POST = do_PUT = answer  # noqa: N815 - the names that http.server asks for

    def reply(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def reply_file(self, repo: str, revision: str, path: str) -> None:
        branch = "main" if revision == COMMIT else revision
        content = self.hub.files.get((repo, branch, path))
        if content is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound" if repo in self.hub.repositories else "RepoNotFound")
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        """Quietly."""


@contextmanager
def serve(hub: Hub) -> Iterator[None]:
    """Let `hub` be reached at its `url`."""
    with serving(type("HubHandler", (Handler,), {"hub": hub})) as hub.url:
        yield
