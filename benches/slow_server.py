"""A web server as slow as a distant one: it waits before each answer, and limits each connection and all of them together.

python -m benches.slow_server FOLDER [--latency 0.03] [--per-connection 80e6] [--total 200e6]

Prints one JSON line with its ports. It is an S3 server without signatures (folders of FOLDER are buckets: GET, HEAD, ranges,
ListObjectsV2), a web server of the same files, and a hub of datasets (``FOLDER/hub/ORG/NAME``; one commit; files are redirected to
the second port, as the hub's are). ``GET /_stats`` tells requests and bytes since the last ``POST /_reset``, whose body changes
``latency``, ``per_connection`` or ``total``. One thread; it answers about 10,000 small requests a second, and delays are right
to about 2 ms. Standard library only.
"""

from __future__ import annotations

import argparse
import asyncio
import email.utils
import hashlib
import json
import mmap
import signal
import socket
import sys
import urllib.parse
from collections import Counter
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

PIECE = 256 << 10
COMMIT = "0123456789abcdef0123456789abcdef01234567"
Answer = tuple[int, dict[str, str], memoryview]


class Slow:
    """The files, the limits and the counts."""

    def __init__(self, root: Path, latency: float, per_connection: float, total: float) -> None:
        self.root, self.latency, self.per_connection, self.total = root, latency, per_connection, total
        self.other_port = 0
        self.free_at = 0.0
        self.reset({})

    def reset(self, limits: dict[str, float]) -> None:
        """Sets limits, and counts from zero."""
        for name, value in limits.items():
            setattr(self, name, value)
        self.kinds: Counter[str] = Counter()
        self.bytes = 0
        # Files that are mapped stay in the page cache.
        self.maps: dict[Path, tuple[tuple[int, int], memoryview]] = {}

    def due(self, now: float, length: int) -> float:
        """When the link has sent so many more bytes. Timers are late: up to 20 ms are caught up."""
        self.free_at = max(self.free_at, now - 0.02) + length / self.total
        return self.free_at

    def file(self, path: Path) -> tuple[memoryview, str, str] | None:
        """Content, ETag and date of a file."""
        try:
            stat = path.stat()
            if not path.is_file() or not path.resolve().is_relative_to(self.root):
                return None
        except OSError:
            return None
        version = (stat.st_mtime_ns, stat.st_size)
        kept = self.maps.get(path)
        if kept is None or kept[0] != version:
            with path.open("rb") as file:
                whole = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if stat.st_size else b""
            kept = self.maps[path] = (version, memoryview(whole))
        return kept[1], f'"{version[0]:x}-{version[1]:x}"', email.utils.formatdate(stat.st_mtime, usegmt=True)

    def answer(self, method: str, target: str, fields: dict[str, str]) -> Answer:
        """The answer to a request."""
        url = urllib.parse.urlsplit(target)
        path, query = urllib.parse.unquote(url.path).strip("/"), dict(urllib.parse.parse_qsl(url.query))
        if "list-type" in query:
            return self.counted("list", _xml(self.listing(path, query)))
        if path.startswith("api/datasets/"):
            return self.counted("api", self.api(path.removeprefix("api/datasets/")))
        if path.startswith("datasets/"):
            return self.counted("resolve", self.resolve(path))
        found = self.file(self.root / path)
        if found is None:
            return self.counted("missing", _xml("<Error><Code>NoSuchKey</Code></Error>", 404))
        data, tag, date = found
        about = {"ETag": tag, "Last-Modified": date, "Accept-Ranges": "bytes", "Content-Type": "binary/octet-stream"}
        wanted = fields.get("range")
        if wanted is None:
            return self.counted("head" if method == "HEAD" else "get", (200, about, data))
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start = int(first) if first else max(len(data) - int(last), 0)
        end = min(int(last) + 1 if first and last else len(data), len(data))
        if start >= len(data):
            return self.counted("range", (416, {"Content-Range": f"bytes */{len(data)}"}, memoryview(b"")))
        about["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        return self.counted("range", (206, about, data[start:end]))

    def counted(self, kind: str, answer: Answer) -> Answer:
        """Counts an answer."""
        self.kinds[kind] += 1
        return answer

    def listing(self, bucket: str, query: dict[str, str]) -> str:
        """ListObjectsV2, in one page."""
        prefix, delimiter, folder = query.get("prefix", ""), query.get("delimiter", ""), self.root / bucket
        found: dict[str, str] = {}
        near = folder / prefix.rpartition("/")[0]
        for path in sorted(near.rglob("*") if not delimiter else near.glob("*")):
            key = str(path.relative_to(folder))
            if not (key + "/" if path.is_dir() else key).startswith(prefix):
                continue
            if path.is_dir():
                if delimiter:
                    found[key] = f"<CommonPrefixes><Prefix>{escape(key)}/</Prefix></CommonPrefixes>"
            elif entry := self.file(path):
                found[key] = (
                    f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                    f"<ETag>{escape(entry[1])}</ETag><Size>{len(entry[0])}</Size></Contents>"
                )
        return (
            f"<ListBucketResult><Name>{escape(bucket)}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(found)}</KeyCount>"
            f"<MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{''.join(found.values())}</ListBucketResult>"
        )

    def api(self, path: str) -> Answer:
        """A dataset of the hub, or the tree of its files."""
        name, _, what = path.partition("/tree/")
        name = "/".join(name.split("/")[:2])
        folder = self.root / "hub" / name
        files = sorted(f for f in folder.rglob("*") if f.is_file())
        if not files:
            return 404, {"X-Error-Code": "RepoNotFound"}, memoryview(b"{}")
        names = [str(f.relative_to(folder)) for f in files]
        if what:
            made: Any = [
                {"type": "file", "oid": _digest(n)[:40], "size": f.stat().st_size, "path": n,
                 "lfs": {"oid": _digest(n), "size": f.stat().st_size, "pointerSize": 134}}
                for n, f in zip(names, files, strict=True)
            ]  # fmt: skip
        else:
            made = {"id": name, "sha": COMMIT, "private": False, "gated": False, "disabled": False, "tags": [],
                    "downloads": 0, "likes": 0, "siblings": [{"rfilename": n} for n in names]}  # fmt: skip
        return 200, {"Content-Type": "application/json"}, memoryview(json.dumps(made).encode())

    def resolve(self, path: str) -> Answer:
        """A redirect to the second port."""
        _, org, name, _, _, *rest = path.split("/")
        file = "/".join(rest)
        found = self.file(self.root / "hub" / org / name / file)
        if found is None:
            return 404, {"X-Error-Code": "EntryNotFound"}, memoryview(b"{}")
        key = urllib.parse.quote(f"hub/{org}/{name}/{file}")
        where = f"http://127.0.0.1:{self.other_port}/{key}?X-Amz-Expires=3600&Signature=s"
        tag = f'"{_digest(file)}"'
        about = {
            "Location": where,
            "X-Repo-Commit": COMMIT,
            "X-Linked-Etag": tag,
            "X-Linked-Size": str(len(found[0])),
            "ETag": tag,
        }
        return 302, about, memoryview(b"")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _xml(text: str, status: int = 200) -> Answer:
    return (
        status,
        {"Content-Type": "application/xml"},
        memoryview(f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode()),
    )


class Connection(asyncio.Protocol):
    """One connection: a request at a time."""

    def __init__(self, slow: Slow) -> None:
        self.slow, self.loop = slow, asyncio.get_running_loop()
        self.buffer = b""
        self.busy = False

    def connection_made(self, transport: Any) -> None:
        """Sends small answers at once."""
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        """Takes bytes of requests."""
        self.buffer += data
        self.next()

    def next(self) -> None:
        """Takes the next request, if all of it has arrived."""
        end = self.buffer.find(b"\r\n\r\n")
        if self.busy or end < 0:
            return
        first, *lines = self.buffer[:end].decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ", 2)
        fields = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        length = int(fields.get("content-length", 0))
        if len(self.buffer) < end + 4 + length:
            return
        content, self.buffer = self.buffer[end + 4 : end + 4 + length], self.buffer[end + 4 + length :]
        if target.startswith("/_"):
            return self.control(target, content)
        self.busy = True
        status, about, body = self.slow.answer(method, target, fields)
        head = f"HTTP/1.1 {status} OK\r\n" + "".join(f"{k}: {v}\r\n" for k, v in about.items())
        head += f"Content-Length: {len(body)}\r\n\r\n"
        self.loop.call_later(self.slow.latency, self.begin, head.encode(), body if method != "HEAD" else body[:0])

    def control(self, target: str, content: bytes) -> None:
        """Counts and limits."""
        slow, body = self.slow, b"{}"
        if target == "/_reset":
            slow.reset(json.loads(content or b"{}"))
        else:
            body = json.dumps({"requests": slow.kinds, "bytes": slow.bytes}).encode()
        self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        self.next()

    def begin(self, head: bytes, body: memoryview) -> None:
        """The first byte."""
        self.began, self.sent = self.loop.time(), 0
        if len(body) > PIECE:
            self.transport.write(head)
            head = b""
        self.pace(head, body)

    def pace(self, head: bytes, body: memoryview) -> None:
        """Waits until the next piece would have arrived."""
        now, piece = self.loop.time(), body[self.sent : self.sent + PIECE]
        self.sent += len(piece)
        due = max(self.slow.due(now, len(piece)), self.began + self.sent / self.slow.per_connection)
        if due > now + 0.0005:
            self.loop.call_at(due, self.send, head, piece, body)
        else:
            self.send(head, piece, body)

    def send(self, head: bytes, piece: memoryview, body: memoryview) -> None:
        """Sends a piece, and goes on with the next."""
        if self.transport.is_closing():
            return
        self.slow.bytes += len(piece)
        self.transport.writelines([head, piece] if head else [piece])
        if self.sent < len(body):
            self.pace(b"", body)
        else:
            self.busy = False
            self.next()


async def main() -> None:
    """Serves until the process is ended."""
    parser = argparse.ArgumentParser(prog="python -m benches.slow_server", description=__doc__)
    parser.add_argument("folder", type=Path)
    for name, value in (("--latency", 0.03), ("--per-connection", 80e6), ("--total", 200e6)):
        parser.add_argument(name, type=float, default=value)
    asked = parser.parse_args()
    slow = Slow(asked.folder.resolve(), asked.latency, asked.per_connection, asked.total)
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(lambda: Connection(slow), "127.0.0.1", 0, backlog=1024) for _ in range(2)]
    port, slow.other_port = (server.sockets[0].getsockname()[1] for server in servers)
    ended = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    print(json.dumps({"port": port, "other_port": slow.other_port}), flush=True)
    await ended.wait()
    sys.exit(0)


if __name__ == "__main__":
    asyncio.run(main())
