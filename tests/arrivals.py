"""Requests as a program made them, for the servers of tests.

A client sends a request again that is not answered for 200 ms (rust/remote/src/reading.rs), and takes the first answer. On a busy
machine a server of a test is often as slow as that. Such a repetition is answered, and is no request more.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

_SOONEST = 0.1
"""A repetition arrives no sooner than this after the first, in s."""


@dataclass
class Arrivals:
    """When requests arrived and were answered: by method, path and range."""

    times: dict[tuple[str, str, str], tuple[float, float]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def is_again(self, request: tuple[str, str, str], arrived: float) -> bool:
        """Whether a request is the repetition of one that was not answered when it arrived."""
        with self.lock:
            first, answered = self.times.get(request, (arrived, 0.0))
            again = first + _SOONEST <= arrived < answered
            if not again:
                self.times[request] = arrived, float("inf")
            return again

    def answer(self, request: tuple[str, str, str]) -> None:
        """A request, or its repetition, is answered."""
        with self.lock:
            first, answered = self.times[request]
            self.times[request] = first, min(answered, time.monotonic())


def _age(connection: socket.socket) -> float:
    """Seconds since the last bytes arrived. The system knows, also when this process had to wait for a processor."""
    if sys.platform != "linux":
        return 0.0
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return float(struct.unpack_from("I", info, 52)[0]) / 1000  # tcpi_last_data_recv of linux/tcp.h


class CountingHandler(BaseHTTPRequestHandler):
    """A handler that knows which of its requests are repetitions; ``arrivals`` is set by the server."""

    arrivals: Arrivals
    is_again = False
    _request: tuple[str, str, str] | None = None

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        self.is_again = False
        if self.command in ("GET", "HEAD"):
            self._request = (self.command, self.path, self.headers.get("Range") or self.headers.get("x-ms-range") or "")
            self.is_again = self.arrivals.is_again(self._request, time.monotonic() - _age(self.connection))
        return True

    def end_headers(self) -> None:
        if self._request is not None:  # before they are sent: what the client requests next is no repetition
            self.arrivals.answer(self._request)
            self._request = None
        super().end_headers()
