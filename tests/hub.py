"""A lookalike of the Hugging Face hub for tests: datasets, revisions, redirects to a second origin with signed URLs, and commits.

Written from what ``huggingface_hub`` 2.4 sends and expects; ``make test-remote`` runs that client against it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
import time
import urllib.parse
from base64 import b64decode
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arrivals import Arrivals, CountingHandler
from served import ManyConnections, part_of

LARGE = 512
"""Files from this size on are "LFS files", which another origin serves."""
PAGE = 100
"""Entries per page of a listing; few, so that tests turn pages."""


@dataclass
class Repository:
    """A dataset: its commits, newest last, and names of commits."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    token: str = ""
    """Who reads it needs this token, if it has one."""

    def commit(self, files: dict[str, bytes], name: str = "main") -> str:
        """Adds a commit with these files; ``name`` refers to it."""
        digest = hashlib.sha1(f"{len(self.commits)}".encode(), usedforsecurity=False)
        for path, data in sorted(files.items()):
            digest.update(path.encode() + b"\0" + data)
        self.commits[digest.hexdigest()] = dict(files)
        self.names[name] = digest.hexdigest()
        return digest.hexdigest()


@dataclass
class Hub:
    """A running hub. ``requests`` has (kind, path, range) of each request so far."""

    port: int = 0
    other_port: int = 0
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes of bodies by kind."""
    leaked: int = 0
    """Requests that brought a token to the other origin."""
    lifetime: float = 3600
    """Seconds that a signed URL lives."""
    busy: list[dict[str, str]] = field(default_factory=list)
    """Headers of 429 answers to give first."""
    uploads: dict[str, bytes] = field(default_factory=dict)
    """LFS objects by SHA-256."""
    trees: dict[tuple[str, str, int], dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Entries by commit, folder above and number of files."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def count(self, kind: str) -> int:
        return sum(found == kind for found, _, _ in self.requests)

    def add(self, name: str, folder: Path, *, token: str = "", revision: str = "main") -> str:
        """Commits the files of a folder to a dataset, and returns the commit."""
        repository = self.repositories.setdefault(name, Repository())
        repository.token = token
        files = {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}
        return repository.commit(files, revision)


@functools.lru_cache(maxsize=1 << 14)  # a request for an object looks for its digest among those of all files
def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _tree_entry(path: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "oid": _git_oid(data), "size": len(data), "path": path}
    if len(data) >= LARGE:
        entry["lfs"] = {"oid": _sha256(data), "size": len(data), "pointerSize": 133}
    return entry


def _tree(files: dict[str, bytes], above: str) -> dict[str, dict[str, Any]]:
    """Entries of all files and folders below a folder."""
    entries: dict[str, dict[str, Any]] = {}
    for path, data in sorted(files.items()):
        if not path.startswith(above):
            continue
        folders = path[len(above) :].split("/")[:-1]
        for depth in range(1, len(folders) + 1):
            folder = above + "/".join(folders[:depth])
            entries.setdefault(folder, {"type": "directory", "oid": "0" * 40, "size": 0, "path": folder})
        entries[path] = _tree_entry(path, data)
    return entries


class _Handler(CountingHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes; the second would wait 40 ms
    hub: Hub

    def log_message(self, *_: object) -> None:
        """Prints nothing."""

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = b""
        while length := int(self.rfile.readline().strip() or b"0", 16):
            found += self.rfile.read(length)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def answer(self, kind: str, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        if not self.is_again:
            self.hub.requests.append((kind, path, self.headers.get("Range", "")))
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.hub.sent[kind] += len(body)
            self.wfile.write(body)

    def json(self, kind: str, found: Any, headers: dict[str, str] | None = None) -> None:
        self.answer(kind, 200, json.dumps(found).encode(), {"Content-Type": "application/json"} | (headers or {}))

    def file(self, kind: str, data: bytes, tag: str, headers: dict[str, str] | None = None) -> None:
        more = {"ETag": f'"{tag}"', "Accept-Ranges": "bytes"} | (headers or {})
        wanted = self.headers.get("Range")
        if wanted is None:
            return self.answer(kind, 200, data, more)
        start, end = part_of(wanted, len(data))
        if start >= len(data):
            return self.answer(kind, 416, b"", {"Content-Range": f"bytes */{len(data)}"})
        return self.answer(kind, 206, data[start:end], more | {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"})

    def refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.answer("refused", status, json.dumps({"error": message}).encode(), headers)


class _Front(_Handler):
    """The hub itself."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.hub.busy:
            return self.answer("429", 429, b'{"error": "rate limited"}', self.hub.busy.pop(0))
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        parts = [urllib.parse.unquote(part) for part in url.path.strip("/").split("/")]
        match parts:
            case ["api", "whoami-v2"]:
                return self.json("api", {"name": "tester", "type": "user", "orgs": []})
            case ["api", "datasets", org, name, *rest] if rest[:1] in ([], ["revision"]):
                if (found := self.find(f"{org}/{name}", rest[1] if rest else "main")) is None:
                    return None
                siblings = [{"rfilename": path} for path in sorted(found[1])]
                about = {"id": f"{org}/{name}", "sha": found[0], "private": False, "gated": False, "siblings": siblings}
                return self.json("info", about)
            case ["api", "datasets", org, name, "tree", revision, *below]:
                return self.tree(f"{org}/{name}", revision, "/".join(below), query)
            case ["datasets", org, name, "resolve", revision, *path] | [
                "api",
                "resolve-cache",
                "datasets",
                org,
                name,
                revision,
                *path,
            ]:
                return self.resolve(f"{org}/{name}", revision, "/".join(path), parts[0] == "api")
            case _:
                return self.refuse(404, "", "Not found")

    def find(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The commit of a revision and its files; refuses if there is none, or for the token."""
        repository = self.hub.repositories.get(name)
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if repository is None or (repository.token and not given):
            self.refuse(401, "RepoNotFound", "Repository not found")
        elif repository.token and given != repository.token:
            self.refuse(401, "", "Invalid credentials in Authorization header")
        elif (sha := repository.names.get(revision, revision)) not in repository.commits:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return sha, repository.commits[sha]
        return None

    def tree(self, name: str, revision: str, below: str, query: dict[str, str]) -> None:
        if (found := self.find(name, revision)) is None:
            return None
        above = f"{below}/" if below else ""
        key = (*found[:1], above, len(found[1]))
        if key not in self.hub.trees:  # asked for page by page
            self.hub.trees[key] = _tree(found[1], above)
        entries = self.hub.trees[key]
        if query.get("recursive", "false").lower() != "true":
            entries = {path: entry for path, entry in entries.items() if "/" not in path[len(above) :]}
        if below and not entries:
            return self.refuse(404, "EntryNotFound", f"{below} does not exist on {revision}")
        start = int(query.get("cursor", "0"))
        page = sorted(entries.values(), key=lambda entry: entry["path"])[start : start + PAGE]
        headers = {}
        if start + PAGE < len(entries):
            after = urllib.parse.urlencode(query | {"cursor": str(start + PAGE)})
            headers["Link"] = f'<{self.hub.url}{urllib.parse.urlsplit(self.path).path}?{after}>; rel="next"'
        return self.json("tree", page, headers)

    def resolve(self, name: str, revision: str, path: str, cached: bool) -> None:
        if (found := self.find(name, revision)) is None:
            return None
        sha, files = found
        if path not in files:
            return self.refuse(404, "EntryNotFound", f"{path} does not exist")
        data = files[path]
        about = {"X-Repo-Commit": sha}
        if len(data) < LARGE:
            if cached:
                return self.file("small", data, _git_oid(data), about)
            about["X-Linked-Size"] = str(len(data))
            here = f"/api/resolve-cache/datasets/{name}/{sha}/{urllib.parse.quote(path)}"
            return self.answer("resolve", 307, b"", about | {"ETag": f'"{_git_oid(data)}"', "Location": here})
        about |= {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{_sha256(data)}"'}
        ends = int(time.time() + self.hub.lifetime)
        there = f"http://127.0.0.1:{self.hub.other_port}/{_sha256(data)}?Expires={ends}&Signature=hidden"
        return self.answer("resolve", 302, b"", about | {"Location": there})

    def do_POST(self) -> None:
        body = self.body()
        if not self.headers.get("Authorization"):
            return self.refuse(401, "", "Invalid username or password.")
        parts = [urllib.parse.unquote(p) for p in urllib.parse.urlsplit(self.path).path.strip("/").split("/")]
        match parts:
            case ["api", "repos", "create"]:
                asked = json.loads(body)
                name = "/".join(filter(None, (asked.get("organization") or "tester", asked["name"].split("/")[-1])))
                about = {"url": f"{self.hub.url}/datasets/{name}", "name": name, "id": name}
                if name in self.hub.repositories:
                    about["error"] = "You already created this dataset repo"
                    return self.answer("api", 409, json.dumps(about).encode(), {"Content-Type": "application/json"})
                self.hub.repositories[name] = Repository()
                self.hub.repositories[name].commit({})
                return self.json("api", about)
            case ["api", "validate-yaml"]:
                return self.json("api", {"errors": [], "warnings": []})
            case ["api", "datasets", org, name, "paths-info", revision]:
                if (found := self.find(f"{org}/{name}", revision)) is None:
                    return None
                wanted = urllib.parse.parse_qs(body.decode()).get("paths", [])
                return self.json("api", [_tree_entry(path, found[1][path]) for path in wanted if path in found[1]])
            case ["api", "datasets", _, _, "preupload", _]:
                files = json.loads(body)["files"]
                modes = [
                    {"path": f["path"], "uploadMode": "lfs" if f["size"] >= LARGE else "regular", "shouldIgnore": False}
                    for f in files
                ]
                return self.json("preupload", {"files": modes})
            case ["datasets", _, _, "info", "lfs", "objects", "batch"]:
                return self.batch(json.loads(body))
            case ["api", "datasets", org, name, "commit", revision]:
                return self.commit(f"{org}/{name}", revision, body)
            case _:
                return self.refuse(404, "", "Not found")

    def batch(self, asked: dict[str, Any]) -> None:
        """The git-LFS batch call: objects that are here already need no upload."""
        objects = []
        for thing in asked["objects"]:
            found = {"oid": thing["oid"], "size": thing["size"]}
            if thing["oid"] not in self.hub.uploads:
                found["actions"] = {"upload": {"href": f"http://127.0.0.1:{self.hub.other_port}/upload/{thing['oid']}"}}
            objects.append(found)
        self.json("lfs", {"transfer": "basic", "objects": objects})

    def commit(self, name: str, revision: str, body: bytes) -> None:
        """Applies all operations as one commit; none if an object was not uploaded."""
        if (found := self.find(name, revision)) is None:
            return None
        files = dict(found[1])
        for line in filter(None, body.split(b"\n")):
            operation = json.loads(line)
            value = operation["value"]
            match operation["key"]:
                case "header":
                    if value.get("parentCommit", found[0]) != found[0]:
                        return self.refuse(412, "", "A commit has happened since")
                case "file":
                    files[value["path"]] = b64decode(value["content"])
                case "lfsFile":
                    if value["oid"] not in self.hub.uploads:
                        return self.refuse(400, "", f"LFS object {value['oid']} was not uploaded")
                    files[value["path"]] = self.hub.uploads[value["oid"]]
                case "deletedFile":
                    files.pop(value["path"], None)
                case "deletedFolder":
                    files = {p: d for p, d in files.items() if not p.startswith(value["path"].rstrip("/") + "/")}
        sha = self.hub.repositories[name].commit(files, revision)
        return self.json("commit", {"commitOid": sha, "commitUrl": f"{self.hub.url}/datasets/{name}/commit/{sha}"})


class _Other(_Handler):
    """The origin that signed URLs point to."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.hub.leaked += "Authorization" in self.headers
        url = urllib.parse.urlsplit(self.path)
        if int(dict(urllib.parse.parse_qsl(url.query)).get("Expires", "0")) < time.time():
            return self.answer("expired", 403, b"<Error><Code>AccessDenied</Code><Message>expired</Message></Error>")
        wanted = url.path.strip("/")
        for repository in self.hub.repositories.values():
            for files in repository.commits.values():
                for data in files.values():
                    if len(data) >= LARGE and _sha256(data) == wanted:  # the tag differs from the hub's own
                        return self.file("data", data, f"x{wanted[:32]}")
        return self.answer("data", 404)

    def do_PUT(self) -> None:
        data = self.body()
        oid = urllib.parse.urlsplit(self.path).path.rpartition("/")[2]
        if _sha256(data) != oid:
            return self.answer("upload", 400, b"wrong digest")
        self.hub.uploads[oid] = data
        return self.answer("upload", 200)


@contextmanager
def hub() -> Iterator[Hub]:
    """Serves datasets until the block ends. Clients find it by ``HF_ENDPOINT`` or ``storage_options={"endpoint": hub.url}``."""
    found = Hub()
    servers = []
    for base in (_Front, _Other):
        server = ManyConnections(("127.0.0.1", 0), type(base.__name__, (base,), {"hub": found, "arrivals": Arrivals()}))
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        servers.append(server)
    found.port, found.other_port = (server.server_address[1] for server in servers)
    try:
        yield found
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
