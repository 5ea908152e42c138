"""``store.filter`` and ``store.split``: resolve the chosen examples, and build the contents of a filtered store.

A filtered store is a :class:`~actshard.Store` like any other. ``Contents.chosen``, a ``Chosen``, stores the numbers of its examples
in the dataset. They are computed once from an expression, a function, a mask, integers or a slice, and used as follows:

- rows: ``Rows.choose`` of the binding returns rows whose examples are renumbered. Numbers are translated before they reach a
  layout, so gathers, views, streams and statistics of all formats work unchanged. A range takes three numbers, a list 8 bytes per
  example, shared by Python and Rust.
- columns, labels, lengths, logits, router: those of the dataset, cut to the chosen examples when they are read.
- everything else, such as layers, metadata and files, is unchanged.

Filtering a filtered store combines both choices, so numbers are translated only once. Conversion and verification need the
dataset's own numbering, and use ``Contents.whole`` and ``Contents.chosen``.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from actshard.base import _arguments
from actshard.base.errors import ArgumentError, ArgumentTypeError, ClosedError, warn
from actshard.formats.contents import Contents, Logits, Router
from actshard.reading.chosen import Chosen
from actshard.streaming.readable import tokens_anywhere
from actshard.streaming.selection import index_of, plain_index

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard._native import Rows
    from actshard.streaming.readable import Readable

_Read = TypeVar("_Read")

_NUMBER = "actshard:example"
"""Name of the column of numbers that is added to the table for an expression."""


def choose(contents: Contents, positions: Chosen) -> Contents:
    """The contents of the examples at these positions; reads nothing."""
    dataset = contents.whole or contents
    chosen = positions if contents.chosen is None else positions.within(contents.chosen)

    def of_whole(read: Callable[[], _Read]) -> _Read:
        """Calls ``read``. Replaces a ClosedError, which would name this open part instead of the closed store of the dataset."""
        try:
            return read()
        except ClosedError as error:
            raise whole_closed(dataset) from error

    def cut(make: Callable[[], NDArray[Any] | None]) -> Callable[[], NDArray[Any] | None]:
        def picked() -> NDArray[np.generic] | None:
            values = of_whole(make)
            return None if values is None else chosen.pick(values)

        return picked

    def choose_rows(rows: Rows) -> Rows:
        return rows.choose(chosen.native)

    def logits() -> Logits | None:
        dataset_logits = of_whole(dataset.logits)
        return (
            None
            if dataset_logits is None
            else Logits(choose_rows(dataset_logits.values), choose_rows(dataset_logits.indices))
        )

    def router() -> Router | None:
        dataset_router = of_whole(dataset.router)
        return None if dataset_router is None else Router(dataset_router.layers, choose_rows(dataset_router.rows))

    def columns_of_some(names: Sequence[str], numbers: NDArray[np.int64]) -> pa.Table:
        read = dataset.example_columns
        assert read is not None, "set only if the dataset has it"
        return of_whole(lambda: read(names, chosen.numbers_at(numbers)))

    rows = None if contents.rows is None else choose_rows(contents.rows)

    def token_counts() -> NDArray[np.int64]:
        if rows is None or dataset.units is None:
            return chosen.pick(of_whole(dataset.token_counts))
        # Counts the chosen examples only.
        return (
            tokens_anywhere(rows, len(dataset.layers), np.arange(len(chosen)))
            if dataset.layers_differ
            else rows.token_counts()
        )

    return replace(
        dataset,
        whole=dataset,
        chosen=chosen,
        num_examples=len(chosen),
        rows=rows,
        token_counts=token_counts,
        columns=lambda names: chosen.pick_rows(of_whole(lambda: dataset.columns(names))),
        content_lengths=cut(dataset.content_lengths),
        labels=cut(dataset.labels),
        logits=logits,
        router=router,
        one_row_each=dataset.one_row_each or None,
        units=None,
        unit_columns=None,
        head_columns=None,
        column_batches=None,
        example_columns=None if dataset.example_columns is None else columns_of_some,
    )


def whole_closed(dataset: Contents) -> ClosedError:
    """The error for a part whose dataset's store was closed."""
    return ClosedError(
        "the store that this one was filtered from was closed: keep it open, or open the dataset again",
        path=dataset.path,
    )


def check_whole_open(dataset: Contents) -> None:
    """Raises the error of :func:`whole_closed` if the dataset's store was closed."""
    try:
        if dataset.rows is not None:
            dataset.rows.tokens_of(0, np.empty(0, np.int64))
    except ClosedError as error:
        raise whole_closed(dataset) from error


def resolve(store: Readable, examples: object) -> Chosen:
    """The positions that the argument of :meth:`Store.filter` chooses."""
    if tests := callable(examples):
        examples = examples(store.table)
        if examples is None:
            raise ArgumentError("filter: expected a function that returns flags or integers, found None as its result")
    if isinstance(examples, range) and (not examples or 0 <= min(examples) <= max(examples) < store.num_examples):
        return Chosen.of(examples)
    if isinstance(examples, str):
        from actshard.reading.conditions import parse

        examples = parse(examples, store.table.column_names)
    if _is_expression(examples):
        index, tests = _matching(store, examples), True
    else:
        key = plain_index(examples)
        tests = tests or (isinstance(key, np.ndarray) and key.dtype == np.bool_)
        index = index_of(key, store.num_examples, "example")
    if isinstance(index, slice):
        return Chosen.of(range(store.num_examples)[index])
    if isinstance(index, int):
        raise ArgumentTypeError(
            f"filter: expected several examples, found the integer {index}. [{index}] keeps one example."
        )
    if index.ndim != 1:
        raise ArgumentError(f"filter: expected one dimension, found {index.ndim}")
    if tests and not len(index) and store.num_examples:  # integers and slices are empty on purpose
        text = f"{store.path}: filter: no example was chosen of {store.num_examples:,}"
        warn(text, code="no-example-chosen")
    return Chosen.of(index)


def _is_expression(value: object) -> bool:
    module = sys.modules.get("pyarrow.compute")
    return module is not None and isinstance(value, module.Expression)


def _matching(store: Readable, expression: object) -> NDArray[np.int64]:
    """Numbers of the examples for which a pyarrow expression over the table is true, ascending."""
    import pyarrow as pa

    table = store.table
    numbered = table.append_column(_NUMBER, pa.array(np.arange(store.num_examples)))
    try:
        numbers = numbered.filter(expression)[_NUMBER]
    except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
        names = ", ".join(table.column_names[:20])
        reason = str(error).partition("\n")[0]
        raise ArgumentError(f"filter: {reason:.300}. The columns are: {names:.500}", path=store.path) from error
    return np.sort(numbers.to_numpy())  # evaluated by threads: the order is not guaranteed


def split(store: Readable, test: float, by: object, seed: int) -> tuple[Chosen, Chosen]:
    """The positions of the training and the test examples, both ascending."""
    n, seed = store.num_examples, _arguments.whole(seed, "seed")
    test_count = _test_count(test, n)
    if by is None:
        sizes, codes, order = np.ones(n, np.int64), np.arange(n), np.argsort(scrambled(n, seed), kind="stable")
    else:
        codes, keys = _groups(store, by)
        sizes, order = (
            np.bincount(codes, minlength=len(keys)),
            np.array(sorted(range(len(keys)), key=_rank(keys, seed)), np.int64),
        )
    if len(sizes) < 2:
        what = "examples" if by is None else f"groups of by={by!r:.40}"
        raise ArgumentError(f"split: expected at least two {what}, found {len(sizes)}", path=store.path)
    running_totals = np.cumsum(sizes[order])[:-1]
    last = int(np.argmin(np.abs(running_totals - test_count)))
    in_test = np.zeros(len(sizes), np.bool_)
    in_test[order[: last + 1]] = True
    flags = in_test[codes]
    return Chosen.of(np.flatnonzero(~flags)), Chosen.of(np.flatnonzero(flags))


def _test_count(test: object, n: int) -> float:
    """The requested number of test examples."""
    if isinstance(test, float | np.floating) and 0 < test < 1:
        return float(test) * n
    if isinstance(test, int | np.integer) and not isinstance(test, bool) and 0 < test < n:
        return float(test)
    raise ArgumentError(f"test: expected a share between 0 and 1, or 1 to {n - 1} examples, found {test!r:.80}")


def scrambled(n: int, seed: int | str) -> NDArray[np.uint64]:
    """A pseudo-random number for each position: the generator splitmix64, whose state is the seed and the position."""
    key = int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:8], "little")
    with np.errstate(over="ignore"):
        x = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _groups(store: Readable, by: object) -> tuple[NDArray[np.int64], list[object]]:
    """The group of each example as an index, and the groups' values."""
    import pyarrow as pa

    try:
        column: Any = store.read_columns([by])[by] if isinstance(by, str) else by
        if not isinstance(column, pa.Array | pa.ChunkedArray):
            column = pa.array(_arguments.listed(column, "by: expected a column"))
        chunked = pa.chunked_array([column]) if isinstance(column, pa.Array) else column
        if pa.types.is_dictionary(chunked.type):  # a dictionary may contain a value twice
            chunked = chunked.cast(chunked.type.value_type)
        if pa.types.is_string(chunked.type):  # the chunks may have more than 2 GiB in total
            chunked = chunked.cast(pa.large_string())
        encoded = chunked.combine_chunks().dictionary_encode(null_encoding="encode")
    except (pa.ArrowException, TypeError) as error:
        raise ArgumentError(f"by: expected a column of numbers or texts, found {error!s:.200}") from error
    if len(encoded) != store.num_examples:
        raise ArgumentError(f"by: expected {store.num_examples} values, one per example, found {len(encoded)}")
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()


def _rank(keys: list[object], seed: int) -> Callable[[int], tuple[bytes, str]]:
    """Returns sort keys for a pseudo-random order of groups, which depends only on their values and the seed."""

    def rank(i: int) -> tuple[bytes, str]:
        text = json.dumps(keys[i], default=str, sort_keys=True)
        return hashlib.blake2b(f"{seed}\0{text}".encode(), digest_size=16).digest(), text

    return rank
