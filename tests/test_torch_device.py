"""Batches on a device: copies that are delayed, fail, or outlast the loop. The device is a fake, except in the last test."""

from __future__ import annotations

import gc
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from conftest import GOLDEN, saev_dump

pytestmark = pytest.mark.peers
torch = pytest.importorskip("torch")

import actshard.torch  # noqa: E402 -- skipped without torch

SAEV = saev_dump(GOLDEN / "saev/v21_cls_labels_multishard")


class FakeEvent:
    def __init__(self, device: FakeDevice, number: int) -> None:
        self.device, self.number = device, number

    def query(self) -> bool:
        return self.device.look(self.number)

    def synchronize(self) -> None:
        self.device.complete(self.number)


class FakeDevice:
    """A device whose copies happen later: after ``looks`` queries of an event, on a thread, or when they are waited for.

    Until then a copy's destination holds garbage. ``refilled`` counts copies whose source changed after they were sent.
    """

    def __init__(self, looks: int | None = None, thread: bool = False, lies: bool = False) -> None:
        self.looks, self.lies = looks, lies
        self.pinned: list[int] = []
        self.sent: deque[tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = deque()
        self.count = self.done = self.received = self.refilled = self.most = 0
        self.fails_at: int | None = None
        self.asked: dict[int, int] = {}
        self.lock = threading.Lock()
        self.over = threading.Event()
        if thread:
            threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while not self.over.is_set():
            time.sleep(0.001)
            self.complete(self.done + 1)

    def pin(self, size: int) -> Any:
        self.pinned.append(size)
        return torch.full((size,), 0x55, dtype=torch.uint8)

    def send(self, batch: dict[str, Any]) -> tuple[dict[str, Any], FakeEvent]:
        if self.count == self.fails_at:
            raise RuntimeError("CUDA out of memory, said the fake")
        with self.lock:
            to = {name: torch.empty_like(x) for name, x in batch.items()}
            for made in to.values():
                made.view(-1).view(torch.uint8).fill_(0x7F)
            self.count += 1
            self.sent.append((self.count, batch, {name: x.clone() for name, x in batch.items()}, to))
            self.most = max(self.most, self.count - self.received)
            return to, FakeEvent(self, self.count)

    def receive(self, batch: dict[str, Any], event: FakeEvent) -> None:
        assert event.number == self.received + 1, "batches come in the order of their copies"
        self.received = event.number

    def look(self, number: int) -> bool:
        if self.lies:
            return True
        self.asked[number] = self.asked.get(number, 0) + 1
        if self.looks is not None and self.asked[number] > self.looks:
            self.complete(number)
        return self.done >= number

    def complete(self, number: int) -> None:
        """Does all copies up to one."""
        with self.lock:
            while self.sent and self.sent[0][0] <= number:
                at, source, was, to = self.sent.popleft()
                self.refilled += any(not bits(source[k]).equal(bits(was[k])) for k in source)
                for name, made in to.items():
                    made.copy_(source[name])
                self.done = at

    def idle(self) -> bool:
        return not self.sent


def bits(tensor: Any) -> Any:
    return tensor.contiguous().view(-1).view(torch.uint8)


def stream(shuffle: Any = "window", **options: Any) -> actshard.Stream:
    return actshard.open(SAEV).stream(5, 7, shuffle=shuffle, seed=3, memory=30_000, **options)


def token_stream(path: Path, bare: bool = False) -> Any:
    from actshard import tokens

    if not (path / "cache").exists():
        with tokens.CacheWriter(path / "cache", {"input_ids": np.int32}) as writer:
            writer.append([{"input_ids": np.arange(6) + 6 * i} for i in range(40)])
    rows = tokens.TokenSeqDataset(tokens.open_cache(path / "cache"), 4)
    return (rows if bare else tokens.CausalLmDataset(rows, eos_id=5)).stream(4, shuffle="block")


KINDS: dict[str, Callable[[Path], Any]] = {
    "rows in stored order": lambda _: stream(None),
    "rows of a window": lambda _: stream("window"),
    "all rows as float64": lambda _: stream("exact", tokens="all", dtype="float64"),
    "aligned layers": lambda _: actshard.open(SAEV).stream("all", 5, shuffle="exact"),
    "interleaved layers": lambda _: actshard.open(SAEV).stream("all", 5, shuffle="exact", interleave=True),
    "bfloat16, reused arrays": lambda _: bfloat16(reuse=True),
    "bfloat16, given buffers": lambda _: bfloat16(
        buffers=[torch.empty(bfloat16().batch_shape, dtype=torch.bfloat16) for _ in range(2)]
    ),
    "dicts of tokens": token_stream,
    "bare tokens": lambda path: token_stream(path, bare=True),
}


def bfloat16(**options: Any) -> actshard.Stream:
    store = actshard.open(GOLDEN / "lmprobe/fullseq_bf16")
    return store.stream(store.layers[0], 5, **options)


def plain(batch: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    return {name: (x.dtype, tuple(x.shape), bits(x).numpy().tobytes()) for name, x in batch.items()}


def wanted(stream: Any) -> list[Any]:
    return [plain({name: x.clone() for name, x in batch.items()}) for batch in actshard.torch.batches(stream)]


def copied(given: Any, device: FakeDevice, depth: int = 3) -> list[Any]:
    """The batches of a loop, when all copies are complete."""
    got = list(actshard.torch.to_device(given, "cpu", depth, _backend=device))
    device.complete(device.count)
    return [plain(batch) for batch in got]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [2, 3, 8])
@pytest.mark.parametrize("how", [{"looks": 0}, {"looks": 2}, {}, {"thread": True}], ids=str)
def test_values_and_order_are_the_streams(kind: str, depth: int, how: dict[str, Any], tmp_path: Path) -> None:
    """Also for a consumer that looks at no batch before the loop ends, and whatever the time of a copy."""
    reference, given = KINDS[kind](tmp_path), KINDS[kind](tmp_path)
    want = [wanted(reference) for _ in range(2)]
    device = FakeDevice(**how)
    moved = actshard.torch.to_device(given, "cpu", depth, _backend=device)
    for epoch in range(2):
        got = list(moved)
        device.complete(device.count)
        assert [plain(batch) for batch in got] == want[epoch]
        assert len(want[epoch]) == len(moved) or kind == "bare tokens"
    device.over.set()
    assert device.refilled == 0


def test_no_buffer_is_refilled_while_its_copy_runs() -> None:
    """And the test would notice: a device whose events come before the copies loses batches."""
    for lies in (False, True):
        device = FakeDevice(lies=lies)
        given = stream("exact")
        want = wanted(stream("exact"))
        got = []
        for batch in actshard.torch.to_device(given, "cpu", 3, _backend=device):
            time.sleep(0.001)  # the reader's turn
            got.append(batch)
        device.complete(device.count)
        assert (device.refilled > 0) is lies
        assert ([plain(batch) for batch in got] != want) is lies


@pytest.mark.parametrize("depth", [2, 3, 6])
def test_depth_bounds_memory(depth: int) -> None:
    device, given = FakeDevice(), stream("exact")
    size = int(np.prod(given.batch_shape)) * 4
    moved = actshard.torch.to_device(given, "cpu", depth, _backend=device)
    for _ in range(2):
        batches = iter(moved)
        for _batch in batches:
            time.sleep(0.0005)
            assert len(batches._copying) <= depth  # type: ignore[attr-defined] -- copies that may still read a buffer
    assert sum(n == size for n in device.pinned) == depth, "allocated once for all epochs"
    assert sum(device.pinned) < depth * (size + 7 * 3 * 8 + 64)
    assert device.most <= depth - 1, "batches on the device that were not handed out"


def test_the_position_counts_batches_that_were_handed_out() -> None:
    want = wanted(stream("window"))
    for stop in range(1, len(want)):
        first = stream("window")
        moved = actshard.torch.to_device(first, "cpu", 5, _backend=FakeDevice(looks=1))
        batches = iter(moved)
        for _ in range(stop):
            next(batches)
            time.sleep(0.0005)
        state = moved.state_dict()
        assert (state["batch"], state["epoch"]) == (stop, 0)
        assert state == first.state_dict()
        rest = stream("window")
        actshard.torch.to_device(rest, "cpu").load_state_dict(state)
        assert copied(rest, FakeDevice(looks=0), 2) == want[stop:]
        assert rest.state_dict()["epoch"] == 1
        # The plain stream continues there too.
        again = stream("window")
        again.load_state_dict(state)
        assert wanted(again) == want[stop:]


def test_an_error_comes_after_the_batches_before_it(tmp_path: Path) -> None:
    copy = tmp_path / SAEV.name
    shutil.copytree(SAEV, copy)
    given = actshard.open(copy).stream(5, 7)
    want = wanted(actshard.open(SAEV).stream(5, 7))
    sorted(copy.glob("acts*.bin"))[-1].unlink()
    device = FakeDevice(looks=1)
    batches, got = iter(actshard.torch.to_device(given, "cpu", 4, _backend=device)), []
    with pytest.raises(FileNotFoundError, match="acts"):  # noqa: PT012 -- the batches before it come first
        while True:
            got.append(next(batches))
            time.sleep(0.001)
    assert 0 < len(got) < len(want)
    assert [plain(b) for b in got] == want[: len(got)]
    assert given.state_dict()["batch"] == len(got)
    with pytest.raises(actshard.ClosedError, match="an error ended this loop: MissingFileError"):
        next(batches)


def test_a_copy_that_fails_is_an_error_and_the_position_stays() -> None:
    device, given = FakeDevice(), stream("exact")
    want = wanted(stream("exact"))
    device.fails_at = 5
    moved = actshard.torch.to_device(given, "cpu", _backend=device)
    got = []
    with pytest.raises(RuntimeError, match="out of memory"):  # noqa: PT012 -- some batches come before
        for batch in moved:
            got.append(batch)
    assert given.state_dict()["batch"] == len(got) < len(want)
    assert device.idle(), "copies were waited for before the buffers were freed"
    device.fails_at = None
    got += list(moved)  # the epoch from its beginning, as after a break
    device.complete(device.count)
    assert [plain(b) for b in got[-len(want) :]] == want


@pytest.mark.parametrize("way", ["close", "with", "del", "stream", "other loop", "state"])
def test_a_loop_ends_early_in_every_way(way: str) -> None:
    device, given = FakeDevice(), stream("exact")
    want = wanted(stream("exact"))
    moved = actshard.torch.to_device(given, "cpu", 3, _backend=device)
    batches = iter(moved)
    got = [next(batches), next(batches)]
    if way == "close":
        moved.close()
        assert list(batches) == []
    elif way == "with":
        with pytest.raises(ZeroDivisionError), moved:
            raise ZeroDivisionError
        assert list(batches) == []
    elif way == "del":
        del batches
        gc.collect()
    elif way == "stream":
        given.close()
        assert list(batches) == []
    else:
        if way == "state":
            given.load_state_dict(given.state_dict())
        else:
            second = iter(moved) if len(want) % 2 else iter(given)
            next(second)
        for _ in range(2):
            with pytest.raises(actshard.ClosedError, match="another loop" if way == "other loop" else "state"):
                next(batches)
    if way != "other loop":
        assert device.idle()
        live = given._live()
        assert live is None or not live.reads
        assert given.state_dict()["batch"] == 2
    device.complete(device.count)
    assert [plain(b) for b in got] == want[:2]
    assert copied(stream("exact"), FakeDevice(looks=0)) == want


def test_a_loop_does_not_continue_in_a_forked_process() -> None:
    batches = iter(actshard.torch.to_device(stream("exact"), "cpu", _backend=FakeDevice(looks=0)))
    next(batches)
    child = os.fork()
    if child == 0:
        try:
            next(batches)
        except actshard.ClosedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    next(batches)


def test_other_devices_are_copied_to_plainly() -> None:
    want = wanted(stream("window"))
    given = stream("window")
    with actshard.torch.to_device(given, "cpu") as moved:
        assert [plain(b) for b in moved] == want
        assert len(moved) == len(given) == len(want)
    again = stream("window")
    shapes = [
        {name: (x.device.type, tuple(x.shape)) for name, x in b.items()}
        for b in actshard.torch.to_device(again, "meta")
    ]
    assert shapes == [{name: ("meta", shape) for name, (_, shape, _) in b.items()} for b in want]
    batches = iter(actshard.torch.to_device(again, "cpu"))
    next(batches)
    assert again.state_dict()["batch"] == 1


def test_arguments_are_checked_at_once() -> None:
    given, no_stream = stream(), actshard.open(SAEV)
    with pytest.raises(actshard.ArgumentError, match=r"expected an actshard\.Stream"):
        actshard.torch.to_device(no_stream, "cpu")  # type: ignore[arg-type] -- wrong on purpose
    for depth in (1, 0, 2.0, True):
        with pytest.raises((actshard.ArgumentError, TypeError), match="depth"):
            actshard.torch.to_device(given, "cpu", depth)  # type: ignore[arg-type] -- wrong on purpose
    for device in ("gpu", None, 3.5):
        with pytest.raises(actshard.ArgumentError, match="device"):
            actshard.torch.to_device(given, device)
    if not torch.cuda.is_available():
        with pytest.raises(actshard.UnsupportedError, match="finds no CUDA device"):
            actshard.torch.to_device(given)


def refusal(device: str) -> str | None:
    """Why torch does not copy to a device, or None if it does."""
    try:
        torch.zeros(1).to(device)
    except Exception as error:  # RuntimeError, AssertionError or ModuleNotFoundError
        return str(error).splitlines()[0]
    return None


@pytest.mark.parametrize("device", ["mps", "xpu", "mtia", "hpu", "vulkan"])
def test_a_device_that_torch_does_not_find_is_an_argument_error(device: str) -> None:
    reason = refusal(device)
    if reason is None:
        pytest.skip("the device is there: its absence cannot be tested")
    with pytest.raises(actshard.ArgumentError, match=f"^device: torch .* cannot copy to {device}: ") as raised:
        actshard.torch.to_device(stream(), device)
    assert reason in str(raised.value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_values_on_a_real_device(kind: str, tmp_path: Path) -> None:
    want = wanted(KINDS[kind](tmp_path))
    side = torch.cuda.Stream()
    got = []
    with torch.cuda.stream(side):
        for batch in actshard.torch.to_device(KINDS[kind](tmp_path), "cuda"):
            assert {x.device.type for x in batch.values()} == {"cuda"}
            got.append({name: x.clone() for name, x in batch.items()})
            del batch
    side.synchronize()
    assert [plain({name: x.cpu() for name, x in b.items()}) for b in got] == want
