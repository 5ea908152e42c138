"""Computes windows of examples, batch by batch, and fills their states in the examples' order."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from actshard.base._arguments import many
from actshard.base.errors import ArgumentError, FormatError, NoMemoryError, warn
from actshard.base.layers import plain
from actshard.writing.capturing.backend import Backend, BatchRows, PaddedBatch, Transfer
from actshard.writing.capturing.choosing import TokenChoice
from actshard.writing.capturing.column_types import column_of
from actshard.writing.capturing.windows import ChosenExample, batches

OnNonfinite = Literal["refuse", "count"]
IDS, SPECIAL, POSITIONS, LENGTH, PROBLEM = "input_ids", "special_tokens_mask", "positions", "text_tokens", "problem"
"""Columns of a captured dataset: the first three have one value per stored row."""
_UNPLACED = 2
"""Batches whose rows may be on their way while another one is computed."""
OWN_COLUMNS = (IDS, SPECIAL, POSITIONS, LENGTH, PROBLEM)


@dataclass(frozen=True)
class CaptureProgress:
    """How far a capture is.

    Attributes:
        examples, examples_total: computed examples, and all of them; 0 while unknown.
        tokens: tokens that this call computed.
        bytes: bytes of rows that this call computed.
        seconds: time since the first batch.
    """

    examples: int
    examples_total: int
    tokens: int
    bytes: int
    seconds: float


@dataclass
class CaptureCounts:
    """What a run has computed."""

    tokens: int = 0
    computed: int = 0
    """Token positions of the batches, padding included."""
    rows: int = 0
    nonfinite: dict[int, int] = field(default_factory=dict)
    """Rows with NaN or infinite values by example, of all layers."""


@dataclass(frozen=True)
class WindowStates:
    """The states of a window, on their way.

    Attributes:
        release: lets the next windows use the memory; the states are then undefined.
    """

    _states: NDArray[np.generic] | list[NDArray[np.generic]]
    _placements: Sequence[Future[None]]
    release: Callable[[], None]

    def wait(self) -> NDArray[np.generic] | list[NDArray[np.generic]]:
        """Returns ``(n, layers, d_model)`` for one row per example, or a list of ``(layers, tokens_i, d_model)``."""
        for placement in self._placements:
            placement.result()
        return self._states


class Run:
    """Computes windows with a backend. A context manager: its thread ends with it.

    Attributes:
        counts: what was computed.
        batch_tokens: token positions per batch; fewer after the device ran out of memory.
    """

    def __init__(
        self,
        backend: Backend,
        choice: TokenChoice,
        *,
        batch_tokens: int,
        pad_id: int,
        on_nonfinite: OnNonfinite,
        first: int = 0,
        total: int | None,
        progress: Callable[[CaptureProgress], object] | None,
    ) -> None:
        self.counts = CaptureCounts()
        self.batch_tokens = batch_tokens
        self._backend, self._choice, self._pad_id = backend, choice, pad_id
        self._refuses = on_nonfinite == "refuse"
        self._first, self._total, self._progress = first, total, progress
        self._began = time.monotonic()
        self._placing = ThreadPoolExecutor(1, "actshard-capture-rows")
        self._spare: queue.SimpleQueue[NDArray[np.uint8]] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Waits for the rows on their way."""
        self._placing.shutdown(cancel_futures=True)

    def states(self, window: Sequence[ChosenExample]) -> WindowStates:
        """The states of a window, of which the last ones may be on their way."""
        layers, width = len(self._backend.layers), self._backend.width
        counts = np.array([self._rows_of(chosen) for chosen in window], np.int64)
        starts = np.concatenate([[0], np.cumsum(counts)])
        memory, rows = self._memory(int(starts[-1]) * layers)
        places = _WindowRows(rows, starts[:-1], counts, layers)
        remaining = deque(batches(window, self.batch_tokens, pads=self._backend.pads))
        example_count = window[0].example.number - self._first
        placements: list[Future[None]] = []
        while remaining:
            indices = remaining.popleft()
            batch = self._batch(window, indices)
            for placement in placements[:-_UNPLACED]:
                placement.result()
            del placements[:-_UNPLACED]
            transfer = self._start(batch)
            if transfer is None:
                pending = [*indices, *(i for batch_indices in remaining for i in batch_indices)]
                self._halve(batch)
                remaining = deque(batches(window, self.batch_tokens, pads=self._backend.pads, among=pending))
                continue
            placements.append(self._placing.submit(self._place, places, batch, indices, transfer))
            example_count += len(indices)
            self._report(example_count)
        self._report(window[-1].example.number + 1 - self._first)
        release = partial(self._spare.put, memory)
        if self._choice.has_one_row and (counts == 1).all():
            return WindowStates(rows.reshape(len(window), layers, width), placements, release)
        examples = [
            rows[start * layers : (start + count) * layers].reshape(layers, count, width)
            for start, count in zip(starts[:-1].tolist(), counts.tolist(), strict=True)
        ]
        return WindowStates(examples, placements, release)

    def _memory(self, rows: int) -> tuple[NDArray[np.uint8], NDArray[np.generic]]:
        """Memory for a window, and its view ``(rows, width)``: that of an earlier window if it is large enough.

        New memory costs more than a copy, because the kernel clears each page when it is first written.
        """
        size = rows * self._backend.width * self._backend.dtype.itemsize
        try:
            memory = self._spare.get_nowait()
        except queue.Empty:
            memory = np.empty(0, np.uint8)
        if memory.size < size:
            memory = np.empty(size, np.uint8)
        return memory, memory[:size].view(self._backend.dtype).reshape(rows, self._backend.width)

    def _rows_of(self, chosen: ChosenExample) -> int:
        return self._choice.row_count(chosen.positions)

    def _batch(self, window: Sequence[ChosenExample], indices: Sequence[int]) -> PaddedBatch:
        members = [window[i] for i in indices]
        return PaddedBatch.of(
            [chosen.example for chosen in members],
            [c.positions for c in members],
            self._pad_id,
            mean=self._choice.has_mean,
        )

    def _start(self, batch: PaddedBatch) -> Transfer | None:
        """Starts a batch; None if the device ran out of memory, and a smaller one may succeed."""
        try:
            transfer = self._backend.start(batch)
        except Exception as error:
            if not self._backend.is_out_of_memory(error):
                raise
            if len(batch.ids) == 1:
                raise NoMemoryError(
                    f"example {batch.numbers[0]}: the model needs more memory than there is for {batch.ids.shape[1]} tokens. Pass "
                    "max_tokens=, or use a larger device"
                ) from error
            transfer = None
        if transfer is None:
            self._backend.release()  # after the exception is gone: its traceback held the batch's tensors
            return None
        self.counts.tokens += int(batch.mask.sum())
        self.counts.computed += batch.mask.size
        return transfer

    def _halve(self, batch: PaddedBatch) -> None:
        tokens = max(1, min(self.batch_tokens, batch.ids.size) // 2)
        warn(
            f"out of memory with a batch of {batch.ids.size} tokens: continuing with batch_tokens={tokens}",
            code="batch-halved",
        )
        self.batch_tokens = tokens

    def _place(self, places: _WindowRows, batch: PaddedBatch, indices: list[int], transfer: Transfer) -> None:
        rows = transfer.wait()
        if not rows.finite.all():
            self._count(batch, rows)
        places.fill(indices, rows)
        self.counts.rows += len(batch.numbers)

    def _count(self, batch: PaddedBatch, rows: BatchRows) -> None:
        """Counts rows with NaN or infinite values, or raises FormatError at the first one."""
        layer, row = (int(i[0]) for i in np.nonzero(~rows.finite))
        number, position = int(batch.numbers[row]), int(batch.positions[row])
        count = int((~rows.finite).sum())
        if self._refuses:
            token_text = "" if position < 0 else f", token {position}"
            raise FormatError(
                f"example {number}{token_text}, layer {plain(self._backend.layers[layer])}: NaN or infinite values as "
                f"{self._backend.dtype} ({many(count, 'row')} of the batch). Correct the model or the "
                "dtype, or pass on_nonfinite='count' (--on-nonfinite count) to store and count such rows"
            )
        per_row = (~rows.finite).sum(axis=0)
        for example in np.unique(batch.numbers[per_row > 0]).tolist():
            self.counts.nonfinite[example] = int(per_row[batch.numbers == example].sum())

    def _report(self, examples: int) -> None:
        if self._progress is not None:
            size = self.counts.rows * len(self._backend.layers) * self._backend.width * self._backend.dtype.itemsize
            seconds = time.monotonic() - self._began
            self._progress(CaptureProgress(examples, self._total or 0, self.counts.tokens, size, seconds))


class _WindowRows:
    """The rows of a window, ordered by example, layer and token."""

    def __init__(
        self, rows: NDArray[np.generic], starts: NDArray[np.int64], counts: NDArray[np.int64], layers: int
    ) -> None:
        # Integers of the same size: numpy assigns rows of bfloat16 element by element.
        self._bits = rows.view(f"u{rows.itemsize}")
        self._starts, self._counts, self._layers = starts, counts, layers

    def fill(self, indices: list[int], rows: BatchRows) -> None:
        """Copies the rows of the examples ``indices``, in this order: each example's rows of a layer lie together on both sides."""
        counts = self._counts[indices]
        values = [np.ascontiguousarray(layer).view(self._bits.dtype) for layer in rows.layers]
        if (counts == 1).all():
            for layer, bits in enumerate(values):
                self._bits[self._starts[indices] * self._layers + layer] = bits
            return
        ends = np.cumsum(counts)
        for first, end, first_row in zip(
            (ends - counts).tolist(), ends.tolist(), self._starts[indices].tolist(), strict=True
        ):
            for layer, bits in enumerate(values):
                start = first_row * self._layers + layer * (end - first)
                self._bits[start : start + end - first] = bits[first:end]


def columns_of(
    window: Sequence[ChosenExample],
    choice: TokenChoice,
    names: Iterable[str],
    types: Mapping[str, pa.DataType],
    text: str | None,
    allowed: Callable[[str], bool],
) -> dict[str, object]:
    """The columns of a window: of its inputs, and :data:`OWN_COLUMNS`.

    Args:
        window: the examples.
        choice: the chosen tokens.
        names: the inputs' columns.
        types: their types; those of other columns are the writer's choice.
        text: name of the column with texts; None: inputs have none.
        allowed: whether the format stores a column.
    """
    examples = [chosen.example for chosen in window]
    columns: dict[str, object] = {}
    if text is not None:
        columns[text] = pa.array([example.text for example in examples], pa.string())
    for name in names:
        columns[name] = column_of(name, [example.columns.get(name) for example in examples], types.get(name))
    if not choice.has_mean:
        counts = [len(chosen.positions) for chosen in window]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)

        def ragged(values: list[NDArray[np.generic]], kind: str | type[np.generic] | np.dtype[np.generic]) -> object:
            return pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(values).astype(kind)))

        columns[IDS] = ragged([c.example.ids[c.positions] for c in window], np.int64)
        columns[SPECIAL] = ragged([c.example.special[c.positions] for c in window], np.uint8)
        if choice.description != "all":
            columns[POSITIONS] = ragged([c.positions for c in window], np.int64)
    columns[LENGTH] = pa.array([len(example) for example in examples], pa.int64())
    columns[PROBLEM] = pa.array([example.problem for example in examples], pa.string())
    return {name: values for name, values in columns.items() if allowed(name)}


def check_columns(names: Iterable[str]) -> None:
    """Raises ArgumentError if a column of the inputs has the name of one that a capture writes."""
    conflict = next((name for name in names if name in OWN_COLUMNS), None)
    if conflict is not None:
        raise ArgumentError(
            f"columns: {conflict!r} is a column that capture writes itself; rename yours, or leave it out with columns=[...]"
        )


def check_text_column(text: str | None, key: str, names: Sequence[str]) -> None:
    """Raises ArgumentError if the column of the texts, ``key`` in the inputs, is stored by the name of another column.

    Args:
        text: its name in the dataset; None: there is none.
        key: its name in the inputs.
        names: the inputs' other columns.
    """
    if text in OWN_COLUMNS:
        raise ArgumentError(f"text: {text!r} is a column that capture writes itself; rename the column of your texts")
    if text != key and text in names:
        raise ArgumentError(
            f"columns: {text!r} is the name by which the format stores the texts of {key!r}; rename your column {text!r}, or "
            "leave it out with columns=[...]"
        )
