"""JAX arrays from a stream's batches, and a source of rows for grain.

Requires jax, which actshard does not install. :class:`DataSource` needs numpy only.

>>> stream = store.stream(5, 16384, shuffle="window", drop_last=True)
>>> for batch in actshard.jax.batches(stream):
...     loss = step(batch["activations"])
>>> rows = NamedSharding(jax.make_mesh((4,), ("data",)), PartitionSpec("data"))
>>> for batch in actshard.jax.batches(stream, sharding=rows):          # a quarter of the rows on each device
...     loss = step(batch["activations"])
>>> loader = grain.DataLoader(data_source=actshard.jax.DataSource(store, 5), sampler=sampler, worker_count=2)

One batch is copied to the devices while the loop body computes with the previous one. A CPU device may use the memory of a batch
without a copy: neither JAX arrays nor these batches ever change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from actshard.base._arguments import many
from actshard.base.errors import ArgumentError, ArgumentTypeError, DtypeError, MissingExtraError, OutOfRangeError
from actshard.base.layers import Layer, is_one, one
from actshard.streaming import Batch, Stream
from actshard.streaming.epochs import Epochs, Loop
from actshard.streaming.mixing import MixedBatch
from actshard.streaming.pairing import PairedBatch
from actshard.streaming.selection import Limit, Mask, Selection, Tokens
from actshard.streaming.sequences import SequenceBatch
from actshard.tokens.stream import arrays

if TYPE_CHECKING:
    import jax

    from actshard.reading.store import Store

__all__ = ["DataSource", "batches"]


def batches(
    stream: Epochs[object], sharding: jax.sharding.Sharding | jax.Device | None = None
) -> Iterator[dict[str, Any]]:
    """Yields the rest of a stream's epoch as dicts of JAX arrays.

    Keys and shapes are those of :class:`~actshard.Batch`: activations, examples, tokens, layers (a list, if the names are
    texts), labels if the dataset has labels, sources of a mixture, and stores of a pair; for whole sequences, those of
    :meth:`actshard.SequenceBatch.arrays`; for a token dataset, the names of its arrays. bfloat16 stays bfloat16. Without
    ``jax_enable_x64``, JAX has no 64-bit types: int64 arrays become int32 after a check of their values, and float64 activations
    are refused.

    ``stream.state_dict()`` is the position after the last yielded batch; the batch that is copied ahead does not count.

    Args:
        stream: a stream of activations or of tokens.
        sharding: where arrays are placed. None: JAX's default device. A device, or a sharding of one device. A
            ``NamedSharding``: the first entry of its spec splits the rows of all arrays, the others split the other axes of
            activations; ``layers`` is replicated. Of packed sequences, arrays with one entry per token are split, and the others
            replicated: pass ``fixed_shape=True``. With several processes, each passes the stream of its own rank, and the
            arrays consist of the rows of all processes.

    Raises:
        ArgumentError: ``sharding`` is something else, or the rows of a batch cannot be split evenly.
        DtypeError: float64 activations, without ``jax_enable_x64``.
        MissingExtraError: jax is not installed.
    """
    if not isinstance(stream, Epochs):
        raise ArgumentTypeError(f"stream: expected an actshard.Stream or a token stream, found {type(stream).__name__}")
    return _read(stream, _Placing(stream, sharding))


def _read(stream: Epochs[object], placing: _Placing) -> Iterator[dict[str, object]]:
    loop = stream.loop(None)
    try:
        ahead = _sent(loop, placing)
        while ahead is not None:
            batch, ahead = ahead, None
            if loop.ready():
                ahead = _sent(loop, placing)
            loop.check()
            if not loop.reads:  # closed by the user
                return
            loop.hand_out()
            yield batch
            if ahead is None:
                ahead = _sent(loop, placing)
        if loop.reads:
            loop.finish()
    finally:
        loop.close()


def _sent(loop: Loop[object], placing: _Placing) -> dict[str, object] | None:
    """The next batch, whose copy to the devices was started; None at the end, or if the loop was closed."""
    try:
        batch = loop.take()
    except StopIteration:
        return None
    return None if batch is None else placing.put(batch)


class _Placing:
    """Puts arrays on devices."""

    def __init__(self, stream: Epochs[object], sharding: jax.sharding.Sharding | jax.Device | None) -> None:
        try:
            import jax
        except ImportError as error:
            raise MissingExtraError.of("actshard.jax.batches", "jax") from error
        self._jax = jax
        self._wide = bool(jax.config.jax_enable_x64)
        self._rows = self._layers = self._activations = sharding
        if isinstance(sharding, jax.sharding.NamedSharding):
            spec = jax.sharding.PartitionSpec
            self._rows = jax.sharding.NamedSharding(sharding.mesh, spec(*sharding.spec[:1]))
            self._layers = jax.sharding.NamedSharding(sharding.mesh, spec())
        elif sharding is not None and not isinstance(sharding, jax.Device | jax.sharding.SingleDeviceSharding):
            raise ArgumentError(
                f"sharding: expected a device, a SingleDeviceSharding or a NamedSharding, found {type(sharding).__name__}"
            )
        # Such a batch is overwritten while a device may still use its memory.
        self._copies = stream.reuses
        dtype = getattr(stream, "dtype", None)
        if dtype == np.float64 and isinstance(dtype, np.dtype) and not self._wide:
            raise DtypeError(
                'float64: JAX has no 64-bit types unless jax_enable_x64 is set. Pass dtype="float32" to store.stream'
            )

    def put(self, batch: object) -> dict[str, object]:
        """A batch's arrays on their devices; the copies may still be under way."""
        if isinstance(batch, SequenceBatch):
            return self._sequences(batch)
        if not isinstance(batch, Batch):
            return {name: self._array(name, array, self._rows) for name, array in arrays(batch).items()}
        device_arrays: dict[str, object] = {
            "activations": self._array("activations", batch.activations, self._activations),
            "examples": self._array("examples", batch.examples, self._rows),
            "tokens": self._array("tokens", batch.tokens, self._rows),
        }
        per_row = batch.activations.ndim == 2 and len(batch.layers) == len(batch.examples) > 1
        of_layers = self._rows if per_row else self._layers
        if batch.layers.dtype.kind in "UO":  # names that are texts; JAX has none
            device_arrays["layers"] = batch.layers.tolist()
        else:
            device_arrays["layers"] = self._array("layers", batch.layers, of_layers)
        if batch.labels is not None:
            device_arrays["labels"] = self._array("labels", batch.labels, self._rows)
        if isinstance(batch, MixedBatch):
            device_arrays["sources"] = self._array("sources", batch.sources, self._rows)
        if isinstance(batch, PairedBatch):
            device_arrays["stores"] = self._array("stores", batch.stores, of_layers)
        return device_arrays

    def _sequences(self, batch: SequenceBatch) -> dict[str, object]:
        """Arrays of tokens are split, and arrays of sequences too if sequences are padded; others are replicated."""
        host_arrays, padded = batch.arrays(), batch.tokens.ndim == 2
        if host_arrays["layers"].dtype.kind in "UO":
            del host_arrays["layers"]
        split = isinstance(self._rows, self._jax.sharding.NamedSharding)
        if split and self._jax.process_count() > 1:
            raise ArgumentError(
                "sharding: batches of sequences are placed by each process on its own devices; pass sharding=None"
            )
        device_arrays: dict[str, object] = {}
        for name, array in host_arrays.items():
            of_rows = array.shape[: batch.tokens.ndim] == batch.tokens.shape
            of_rows |= padded and name not in ("offsets", "layers")
            where = self._activations if name == "activations" else self._rows if of_rows else self._layers
            device_arrays[name] = self._array(name, array, where)
        return device_arrays if "layers" in host_arrays else device_arrays | {"layers": batch.layers.tolist()}

    def _array(self, name: str, array: NDArray[np.generic], where: object) -> jax.Array:
        if not self._wide and array.dtype.kind in "iu" and array.dtype.itemsize == 8:
            narrow = np.dtype(f"{array.dtype.kind}4")
            if array.size and (array.min() < np.iinfo(narrow).min or array.max() > np.iinfo(narrow).max):
                raise DtypeError(f"{name}: a value needs 64 bits, which JAX has only if jax_enable_x64 is set")
            array = array.astype(narrow)
        elif self._copies and name == "activations":
            array = array.copy()
        if not isinstance(where, self._jax.sharding.NamedSharding):
            return self._jax.device_put(array, where)
        try:
            return self._jax.make_array_from_process_local_data(where, array)
        except ValueError as error:
            raise ArgumentError(
                f"sharding: {name} {array.shape} cannot be split as {where.spec} over {dict(where.mesh.shape)}. Choose a "
                "batch_size that can, and drop_last=True; for sequences, batch_tokens that can, and fixed_shape=True"
            ) from error


class DataSource:
    """One layer's rows as a ``RandomAccessDataSource`` of grain: ``{"activation": (d_model,), "example", "token"}``.

    Row numbers run over the selected tokens, example after example. Items are numpy arrays and integers. ``__getitems__`` reads
    a whole batch at once, in parallel. Pickled as its store's path, for workers. ``repr`` depends only on the dataset and the
    selection: grain compares it when it continues at a checkpoint.

    Args:
        store: an open store.
        layer: a name from ``store.layers``.
        tokens: as in ``store.stream``.
        ignore_labels: as in ``store.stream``.
        keep: as in ``store.stream``.
        max_norm: as in ``store.stream``.
        min_token: as in ``store.stream``.
        dtype: as in ``store.gather``.
    """

    def __init__(
        self,
        store: Store,
        layer: Layer,
        *,
        tokens: Tokens = "content",
        ignore_labels: Sequence[int] = (),
        keep: Mask = None,
        max_norm: Limit = None,
        min_token: int = 0,
        dtype: DTypeLike | None = None,
    ) -> None:
        self._store, self._layer, self._dtype = store, one(layer) if is_one(layer) else layer, dtype
        # Used only to map row numbers to (example, token); it is never read.
        selection = Selection(tokens, ignore_labels, keep, max_norm, min_token)
        self._rows = Stream(store, layer, 1, selection, dtype=dtype)
        settings: Mapping[str, object] = self._rows.state()["settings"]
        self._name = (
            f"actshard.jax.DataSource(dataset={settings['dataset']}, layer={self._layer!r}, tokens={tokens!r}, "
            f"selection={settings['selection']}, rows={len(self)}, dtype={self._rows.dtype})"
        )

    def __len__(self) -> int:
        return self._rows.num_rows

    def __repr__(self) -> str:
        return self._name

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Reads several rows in parallel. The activations are parts of one array.

        Raises:
            OutOfRangeError: a row does not exist. It is an IndexError.
        """
        numbers, n = np.asarray(indices), len(self)
        if numbers.size and numbers.dtype.kind not in "iu":
            raise ArgumentTypeError(f"index: expected integers, found {numbers.dtype}")
        numbers = numbers.astype(np.int64)
        outside = (numbers < -n) | (numbers >= n)
        if outside.any():
            raise OutOfRangeError(
                f"row {numbers[outside][0]} is out of range: there {'is' if n == 1 else 'are'} {many(n, 'row')}"
            )
        if not numbers.size:
            return []
        examples, tokens = self._rows.locate(np.where(numbers < 0, numbers + n, numbers))
        rows = self._store.gather(self._layer, examples, tokens, dtype=self._dtype)
        triples = zip(rows, examples.tolist(), tokens.tolist(), strict=True)
        return [{"activation": row, "example": e, "token": t} for row, e, t in triples]
