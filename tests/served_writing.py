"""The writing half of the tests' S3 server: PUT, conditional PUT, uploads in parts, DELETE, and a fault at any request.

Google's XML protocol is the same with other headers (https://cloud.google.com/storage/docs/xml-api/reference-headers).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import itertools
import threading
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from arrivals import CountingHandler


@dataclass
class Written:
    """What was written to a server, and the faults to come.

    Attributes:
        uploads: unfinished uploads: bucket and key, parts, metadata.
        meta: user metadata by bucket and key.
        faults: by the number of a request, counted from 0: ``"503"``, ``"before"`` (reset, nothing done), ``"after"`` (done, but
            no answer), ``"cut"`` (done, half of the answer).
        puts: bucket and key of each object written.
        count: number of requests so far.
        conditional: whether ``If-None-Match`` is supported.
        refuse: requests, by method and query, that are answered with a status.
    """

    uploads: dict[str, tuple[str, dict[int, bytes], dict[str, str]]] = field(default_factory=dict)
    meta: dict[str, dict[str, str]] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)
    puts: list[str] = field(default_factory=list)
    count: int = 0
    conditional: bool = True
    refuse: tuple[Callable[[str, str], bool], int] | None = None
    ids: Any = field(default_factory=itertools.count)
    lock: Any = field(default_factory=threading.RLock)


class _Cut(io.BytesIO):
    """Keeps an answer, and sends a part of it at the end."""

    def __init__(self, to: Any, share: float) -> None:
        super().__init__()
        self._to, self._share = to, share

    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()
            with contextlib.suppress(OSError):
                self._to.write(data[: int(len(data) * self._share)])
        super().close()


class WriteHandler(CountingHandler):
    """Requests that write. ``root`` and ``written`` are set by the server."""

    root: Path
    written: Written
    requests: list[tuple[str, str, str]]
    body: bytes = b""

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        raise NotImplementedError

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.written.lock:
            fault = self.written.faults.pop(self.written.count, None)
            self.written.count += 1
        query = urllib.parse.urlsplit(self.path).query
        if self.written.refuse is not None and self.written.refuse[0](self.command, query):
            self.answer(self.written.refuse[1], b"<Error><Code>No</Code><Message>no</Message></Error>")
            return False
        if fault == "503":
            self.answer(503, b"<Error><Code>SlowDown</Code><Message>slow</Message></Error>")
            return False
        if fault == "before":
            self.close_connection = True
            return False
        if fault in ("after", "cut"):
            self.close_connection = True
            self.wfile = _Cut(self.wfile, 0.5 if fault == "cut" else 0.0)
        return True

    def place(self) -> tuple[str, dict[str, str]]:
        url = urllib.parse.urlsplit(self.path)
        path = urllib.parse.unquote(url.path).strip("/")
        self.requests.append((self.command, path, url.query))
        return path, dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))

    def error(self, status: int, code: str) -> None:
        self.answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def metadata(self) -> dict[str, str]:
        ours = ("x-amz-meta-", "x-goog-meta-")
        return {name.lower(): value for name, value in self.headers.items() if name.lower().startswith(ours)}

    def store(self, path: str, data: bytes, meta: dict[str, str]) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        self.written.meta[path] = meta
        self.written.puts.append(path)

    def is_damaged(self) -> bool:
        if self.headers.get("Authorization", "").startswith("Bearer"):  # Google's protocol has no such checksum
            return False
        sent = self.headers.get("x-amz-checksum-sha256")
        return sent is None or base64.b64decode(sent) != hashlib.sha256(self.body).digest()

    def do_PUT(self) -> None:
        path, query = self.place()
        with self.written.lock:
            if self.is_damaged():
                return self.error(400, "BadDigest")
            tag = f'"{hashlib.md5(self.body, usedforsecurity=False).hexdigest()}"'
            if "uploadId" in query:
                upload = self.written.uploads.get(query["uploadId"])
                if upload is None or upload[0] != path:
                    return self.error(404, "NoSuchUpload")
                upload[1][int(query["partNumber"])] = self.body
                return self.answer(200, ETag=tag)
            if not (self.root / path.partition("/")[0]).is_dir():
                return self.error(404, "NoSuchBucket")
            if self.headers.get("If-None-Match") == "*" or self.headers.get("x-goog-if-generation-match") == "0":
                if not self.written.conditional:
                    return self.error(501, "NotImplemented")
                if (self.root / path).exists():
                    return self.error(412, "PreconditionFailed")
            self.store(path, self.body, self.metadata())
            return self.answer(200, ETag=tag)

    def do_POST(self) -> None:
        path, query = self.place()
        with self.written.lock:
            if "uploads" in query:
                id = f"upload-{next(self.written.ids)}"
                self.written.uploads[id] = (path, {}, self.metadata())
                key = f"<Key>{escape(path)}</Key><UploadId>{id}</UploadId>"
                return self.answer(
                    200, f"<InitiateMultipartUploadResult>{key}</InitiateMultipartUploadResult>".encode()
                )
            upload = self.written.uploads.pop(query.get("uploadId", ""), None)
            if upload is None or upload[0] != path:
                return self.error(404, "NoSuchUpload")
            parts = [upload[1][n] for n in sorted(upload[1])]
            assert all(len(part) >= 5 << 20 for part in parts[:-1])
            self.store(path, b"".join(parts), upload[2])
            key = f"<Location>x</Location><Bucket>b</Bucket><Key>{escape(path)}</Key><ETag>x</ETag>"
            return self.answer(200, f"<CompleteMultipartUploadResult>{key}</CompleteMultipartUploadResult>".encode())

    def do_DELETE(self) -> None:
        path, query = self.place()
        with self.written.lock:
            if "uploadId" in query:
                if self.written.uploads.pop(query["uploadId"], None) is None:
                    return self.error(404, "NoSuchUpload")
                return self.answer(204)
            (self.root / path).unlink(missing_ok=True)
            self.written.meta.pop(path, None)
            return self.answer(204)

    def list_uploads(self, path: str) -> bool:
        """Answers ListMultipartUploads; False for other requests."""
        query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query, keep_blank_values=True))
        if "uploads" not in query:
            return False
        start = f"{path}/"
        with self.written.lock:
            found = [
                f"<Upload><Key>{escape(key.removeprefix(start))}</Key><UploadId>{id}</UploadId></Upload>"
                for id, (key, _, _) in self.written.uploads.items()
                if key.startswith(start + query.get("prefix", ""))
            ]
        body = (
            f"<ListMultipartUploadsResult><IsTruncated>false</IsTruncated>{''.join(found)}</ListMultipartUploadsResult>"
        )
        self.answer(200, body.encode())
        return True
