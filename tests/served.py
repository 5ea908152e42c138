"""A web server and S3 server for tests: serves the files of a folder, with ranges, ETags, listings, and faults."""

from __future__ import annotations

import hashlib
import json
import threading
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from xml.sax.saxutils import escape

from arrivals import Arrivals
from served_writing import WriteHandler, Written
from waiting import PATIENCE


class Meeting:
    """A place where requests for ranges wait until so many different ones are there; later ones pass."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.ranges: set[tuple[str, str]] = set()
        self.complete = threading.Event()

    def wait(self, path: str, wanted: str) -> None:
        """Waits for the others. A repetition of a request is none of them."""
        self.ranges.add((path, wanted))
        if len(self.ranges) >= self.number:
            self.complete.set()
        self.complete.wait(PATIENCE)


@dataclass
class Served:
    """A running server. ``requests`` has (method, path, range or query) of each request so far, without repetitions."""

    root: Path
    port: int = 0
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    failing: dict[str, list[int]] = field(default_factory=dict)
    """Statuses to answer with first, by the end of a path."""
    cutting: dict[str, list[int]] = field(default_factory=dict)
    """Lengths to cut bodies to first, by the end of a path."""
    silent: set[str] = field(default_factory=set)
    """Ends of paths that are not answered until the server ends."""
    together: Meeting | None = None
    """Requests for ranges wait here for each other."""
    ended: threading.Event = field(default_factory=threading.Event)
    written: Written = field(default_factory=Written)

    @property
    def keys(self) -> dict[str, object]:
        """storage_options with credentials, which writing needs."""
        return {
            "endpoint_url": f"http://127.0.0.1:{self.port}",
            "key": "AKIAPUBLIC",
            "secret": "hushhush",
            "region": "x",
        }

    @property
    def google(self) -> dict[str, object]:
        """storage_options of ``gs://FOLDER/...`` that can write: an account whose tokens the server does not check."""
        account = {"private_key": "hushhush", "private_key_id": "1", "client_email": "lab", "disable_oauth": True}
        return {"google_service_account_key": json.dumps(account), "google_base_url": f"http://127.0.0.1:{self.port}"}

    absent: tuple[int, bytes] = (404, b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>")
    """Status and body for names that do not exist."""
    is_listed: bool = True
    """Whether listings are allowed."""
    times: dict[str, float] = field(default_factory=dict)
    """Times of the last change, in s since 1970, by path; by default, an hour that is past."""

    def changed(self, path: str, form: str) -> str:
        """The time of the last change of a file as text."""
        return time.strftime(form, time.gmtime(self.times.get(path, 1795341600)))

    def web(self, path: str) -> str:
        """The URL of a file or folder on the web server."""
        return f"http://127.0.0.1:{self.port}/{path}"

    def since(self, count: int) -> list[str]:
        """Paths of the requests after the first ``count``."""
        return [path for _, path, _ in self.requests[count:]]

    @property
    def options(self) -> dict[str, object]:
        """storage_options of ``s3://FOLDER/...``: folders directly below the root are buckets."""
        return {"endpoint_url": f"http://127.0.0.1:{self.port}", "anon": True, "region": "us-east-1"}


def _tag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def part_of(wanted: str, size: int) -> tuple[int, int]:
    """The first byte of a header ``Range``, and the one after its last; the first may lie after the end."""
    first, _, last = wanted.removeprefix("bytes=").partition("-")
    start = int(first) if first else max(size - int(last), 0)
    return start, min(int(last) + 1 if first and last else size, size)


class ManyConnections(ThreadingHTTPServer):
    """A server that takes as many connections at once as a reader makes; more than the backlog would wait for seconds."""

    request_queue_size = 512
    daemon_threads = True


@contextmanager
def served(root: Path) -> Iterator[Served]:
    """Serves a folder until the block ends."""
    server = Served(root)

    class Handler(WriteHandler):
        written, root, requests, arrivals = server.written, server.root, server.requests, Arrivals()
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # headers and body are two writes; the second would wait 40 ms

        def log_message(self, *_: object) -> None:
            """Prints nothing."""

        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                path = urllib.parse.urlsplit(self.path).path
                cuts = next((cuts for end, cuts in server.cutting.items() if path.endswith(end) and cuts), None)
                self.wfile.write(body if cuts is None else body[: cuts.pop(0)])
                self.close_connection = cuts is not None or self.close_connection

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            url = urllib.parse.urlsplit(self.path)
            path, query = urllib.parse.unquote(url.path).strip("/"), dict(urllib.parse.parse_qsl(url.query))
            if not self.is_again:
                server.requests.append((self.command, path, self.headers.get("Range") or url.query))
            for end, statuses in server.failing.items():
                if path.endswith(end) and statuses:
                    # A repetition uses up no fault: it gets the next one, too, if there is one.
                    return self.answer(statuses[0] if self.is_again else statuses.pop(0), b"no")
            if any(path.endswith(end) for end in server.silent):
                server.ended.wait()
                return None
            if self.list_uploads(path):
                return None
            if "list-type" in query and not server.is_listed:
                return self.answer(403, b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>")
            if "list-type" in query:
                return self.list(path, query)
            file = server.root / path
            if not file.is_file():
                return self.answer(*server.absent)
            data = file.read_bytes()
            more = {"ETag": _tag(data), "Accept_Ranges": "bytes"}
            more["Last_Modified"] = server.changed(path, "%a, %d %b %Y %H:%M:%S GMT")
            more |= {name.replace("-", "_"): value for name, value in server.written.meta.get(path, {}).items()}
            wanted = self.headers.get("Range")
            if wanted is None:
                return self.answer(200, data, **more)
            if server.together is not None:
                server.together.wait(path, wanted)
            start, end = part_of(wanted, len(data))
            if start >= len(data):
                return self.answer(416, b"", Content_Range=f"bytes */{len(data)}")
            return self.answer(206, data[start:end], Content_Range=f"bytes {start}-{end - 1}/{len(data)}", **more)

        def list(self, bucket: str, query: dict[str, str]) -> None:
            """ListObjectsV2."""
            prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
            folder = server.root / bucket
            keys = sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())
            found: dict[str, str] = {}
            for key in keys:
                if not key.startswith(prefix):
                    continue
                rest = key[len(prefix) :]
                if delimiter and delimiter in rest:
                    name = prefix + rest.partition(delimiter)[0] + delimiter
                    found[name] = f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
                else:
                    data = (folder / key).read_bytes()
                    changed = server.changed(f"{bucket}/{key}", "%Y-%m-%dT%H:%M:%S.000Z")
                    found[key] = (
                        f"<Contents><Key>{escape(key)}</Key><LastModified>{changed}</LastModified>"
                        f"<ETag>{escape(_tag(data))}</ETag><Size>{len(data)}</Size></Contents>"
                    )
            after = query.get("continuation-token", "")
            names = [name for name in sorted(found) if name > after]
            page = names[:1000]
            more = (
                f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if len(names) > len(page) else ""
            )
            body = (
                f"<ListBucketResult><Name>{bucket}</Name><KeyCount>{len(page)}</KeyCount><IsTruncated>"
                f"{'true' if more else 'false'}</IsTruncated>{more}{''.join(found[n] for n in page)}</ListBucketResult>"
            )
            self.answer(200, body.encode(), Content_Type="application/xml")

    http = ManyConnections(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server.port = http.server_address[1]
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        http.shutdown()
        http.server_close()
        thread.join()
