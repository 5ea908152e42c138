"""A lookalike of Azure Blob Storage for tests: containers that are folders, listings in pages, ranges, and writing in blocks.

No emulator of Azure can be installed with pip, cargo or apt. Written from the service's REST reference (List Blobs, Get Blob, Put
Blob, Put Block, Put Block List, Blob Batch, version 2023-11-03), without checking signatures.
"""

from __future__ import annotations

import base64
import hashlib
import re
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from arrivals import Arrivals, CountingHandler
from served import ManyConnections, part_of

ACCOUNT = "lab"
WRITTEN = "Sun, 22 Nov 2026 10:00:00 GMT"
PAGE = 50
KEY = base64.b64encode(b"hushhush, a key").decode()


@dataclass
class Azure:
    """A running service. ``requests`` has (method, path, range or query); ``signed`` whether each brought a signature."""

    root: Path
    port: int = 0
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    signed: list[bool] = field(default_factory=list)
    meta: dict[str, dict[str, str]] = field(default_factory=dict)
    """User metadata by container and name."""
    blocks: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Uncommitted blocks by container and name, which the service removes after a week."""
    failing: list[int] = field(default_factory=list)
    """Statuses to answer writes with first."""
    lost: int = 0
    """Number of writes that are done and answered with 500."""
    lock: Any = field(default_factory=threading.Lock)

    @property
    def keys(self) -> dict[str, object]:
        """As ``options``, with an account key, which writing needs."""
        return {name: value for name, value in self.options.items() if name != "anon"} | {"account_key": KEY}

    @property
    def options(self) -> dict[str, object]:
        """storage_options of ``az://CONTAINER/...``."""
        return {"account_name": ACCOUNT, "endpoint": f"http://127.0.0.1:{self.port}/{ACCOUNT}", "anon": True}


def _tag(data: bytes) -> str:
    return f"0x8D{hashlib.md5(data, usedforsecurity=False).hexdigest()[:14].upper()}"


@contextmanager
def azure(root: Path) -> Iterator[Azure]:
    """Serves the folders directly below ``root`` as containers until the block ends."""
    found = Azure(root)

    class Handler(CountingHandler):
        arrivals = Arrivals()
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # headers and body are two writes; the second would wait 40 ms

        def log_message(self, *_: object) -> None:
            """Prints nothing."""

        def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in ({"x-ms-version": "2023-11-03"} | (headers or {})).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            url = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(url.query))
            account, _, path = urllib.parse.unquote(url.path).strip("/").partition("/")
            wanted = self.headers.get("Range") or self.headers.get("x-ms-range") or ""
            if not self.is_again:
                found.requests.append((self.command, path, wanted or url.query))
            found.signed.append("Authorization" in self.headers or "sig" in query)
            if account != ACCOUNT:
                return self.answer(404)
            if query.get("comp") == "list":
                return self.list(path, query)
            file = found.root / path
            if not file.is_file():
                code = "<?xml version='1.0'?><Error><Code>BlobNotFound</Code><Message>none</Message></Error>"
                return self.answer(404, code.encode(), {"x-ms-error-code": "BlobNotFound"})
            data = file.read_bytes()
            headers = {
                "ETag": f'"{_tag(data)}"',
                "Last-Modified": WRITTEN,
                "Accept-Ranges": "bytes",
                "x-ms-blob-type": "BlockBlob",
            } | found.meta.get(path, {})
            if not wanted:
                return self.answer(200, data, headers)
            start, end = part_of(wanted, len(data))
            if start >= len(data):
                return self.answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            return self.answer(
                206, data[start:end], headers | {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}
            )

        def refuse(self, status: int, code: str) -> None:
            body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
            self.answer(status, body.encode(), {"x-ms-error-code": code})

        def written(self) -> tuple[str, dict[str, str], bytes] | None:
            """Container and name, query and body of a request that writes; None if it was answered."""
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            url = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(url.query))
            account, _, path = urllib.parse.unquote(url.path).strip("/").partition("/")
            found.requests.append((self.command, path, url.query))
            if account != ACCOUNT or not (found.root / path.partition("/")[0]).is_dir():
                return self.refuse(404, "ContainerNotFound")
            if "Authorization" not in self.headers and "sig" not in query:
                return self.refuse(403, "AuthenticationFailed")
            if found.failing:
                return self.refuse(found.failing[0] if self.is_again else found.failing.pop(0), "ServerBusy")
            return path, query, body

        def store(self, path: str, data: bytes) -> None:
            file = found.root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            named = {name.lower(): value for name, value in self.headers.items()}
            found.meta[path] = {name: value for name, value in named.items() if name.startswith("x-ms-meta-")}
            found.blocks.pop(path, None)
            self.done(data)

        def done(self, data: bytes = b"") -> None:
            if found.lost > 0:
                found.lost -= 1
                return self.refuse(500, "InternalError")
            self.answer(201, b"", {"ETag": f'"{_tag(data)}"', "Last-Modified": WRITTEN})

        def do_PUT(self) -> None:
            with found.lock:
                asked = self.written()
                if asked is None:
                    return None
                path, query, body = asked
                if query.get("comp") == "block":
                    found.blocks.setdefault(path, {})[query["blockid"]] = body
                    return self.done()
                if query.get("comp") == "blocklist":
                    names = re.findall(r"<(?:Latest|Uncommitted)>([^<]*)</", body.decode())
                    blocks = found.blocks.get(path, {})
                    if any(name not in blocks for name in names):
                        return self.refuse(400, "InvalidBlockList")
                    return self.store(path, b"".join(blocks[name] for name in names))
                if self.headers.get("x-ms-blob-type") != "BlockBlob":
                    return self.refuse(400, "MissingRequiredHeader")
                if self.headers.get("If-None-Match") == "*" and (found.root / path).is_file():
                    return self.refuse(409, "BlobAlreadyExists")
                return self.store(path, body)

        def do_POST(self) -> None:
            """Blob Batch: requests that delete, each answered by a part."""
            with found.lock:
                asked = self.written()
                if asked is None:
                    return None
                if asked[1].get("comp") != "batch":
                    return self.refuse(400, "InvalidQueryParameterValue")
                parts = []
                for part in asked[2].decode().split("--batch_")[1:-1]:
                    number, url = re.findall(r"(?i)content-id: (\d+)", part)[0], re.findall(r"DELETE /(\S*)", part)[0]
                    path = urllib.parse.unquote(url.partition("?")[0]).removeprefix(f"{ACCOUNT}/")
                    found.requests.append(("DELETE", path, ""))
                    there = (found.root / path).is_file()
                    (found.root / path).unlink(missing_ok=True)
                    found.meta.pop(path, None)
                    status = "202 Accepted" if there else "404 The specified blob does not exist."
                    parts.append(
                        f"--answer\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\nHTTP/1.1 {status}\r\n"
                        "x-ms-version: 2023-11-03\r\n\r\n"
                    )
                body = "".join(parts) + "--answer--\r\n"
                self.answer(202, body.encode(), {"Content-Type": "multipart/mixed; boundary=answer"})

        def list(self, container: str, query: dict[str, str]) -> None:
            """List Blobs: names in order, at most PAGE per answer, the rest by marker."""
            prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
            folder = found.root / container
            items: dict[str, str] = {}
            for file in sorted(f for f in folder.rglob("*") if f.is_file()):
                key = str(file.relative_to(folder))
                if not key.startswith(prefix):
                    continue
                rest = key[len(prefix) :]
                if delimiter and delimiter in rest:
                    name = prefix + rest.partition(delimiter)[0] + delimiter
                    items[name] = f"<BlobPrefix><Name>{escape(name)}</Name></BlobPrefix>"
                else:
                    data = file.read_bytes()
                    items[key] = (
                        f"<Blob><Name>{escape(key)}</Name><Properties><Last-Modified>{WRITTEN}</Last-Modified>"
                        f"<Etag>{_tag(data)}</Etag><Content-Length>{len(data)}</Content-Length>"
                        "<Content-Type>application/octet-stream</Content-Type><BlobType>BlockBlob</BlobType>"
                        "</Properties></Blob>"
                    )
            names = [name for name in sorted(items) if name >= query.get("marker", "")]
            after = escape(names[PAGE]) if len(names) > PAGE else ""
            body = (
                f'<?xml version="1.0" encoding="utf-8"?><EnumerationResults ContainerName="{escape(container)}"><Blobs>'
                f"{''.join(items[name] for name in names[:PAGE])}</Blobs><NextMarker>{after}</NextMarker></EnumerationResults>"
            )
            self.answer(200, body.encode(), {"Content-Type": "application/xml"})

    server = ManyConnections(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found.port = server.server_address[1]
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
