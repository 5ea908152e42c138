"""Streams of batches from token datasets: shuffled, read ahead by a thread, resumable, divided among ranks.

Positions, states and loops are shared with activation streams (:mod:`actshard.streaming.epochs`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from actshard.base import _arguments
from actshard.base._arguments import many
from actshard.base.errors import ActshardError, ArgumentError, ArgumentTypeError, warn
from actshard.streaming.epochs import Epochs, Loop, ReadAhead
from actshard.tokens.cache import TokenCache
from actshard.tokens.orders import Key, Permutation, permutation, prng_key

TokenShuffle = Literal["block", "feistel", "linear"] | Permutation | None
_SAMPLES = 8
"""Number of examples hashed to identify a dataset."""
_ENDLESS = 1 << 20
"""Endless datasets are identified by examples below this index."""


DatasetRecipe = str | dict[str, Any]
"""Identifies the examples of a dataset, as JSON values."""


@runtime_checkable
class Examples(Protocol):
    """A dataset of examples, which can be streamed, mixed and permuted."""

    def __len__(self) -> int: ...

    def get_batch(self, indices: Sequence[int] | NDArray[np.generic]) -> Any:
        """Returns the examples at these indices."""


class Streamed:
    """A dataset with a ``stream`` method."""

    settings: ClassVar[tuple[str, ...]] = ()
    """Attributes that determine the examples of a cache: numbers, texts, flags, or another dataset. States contain their digest."""

    def stream(
        self,
        batch_size: int,
        *,
        shuffle: TokenShuffle = None,
        seed: int | Key = 0,
        epoch: int = 0,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        ahead: int = 2,
    ) -> TokenStream:
        """Streams batches of all examples, epoch after epoch, read ahead by a thread; see :class:`TokenStream`.

        Args:
            batch_size: examples per batch and rank.
            shuffle: ``"block"`` (Levanter's default), ``"feistel"``, ``"linear"``, or a :class:`Permutation`. None: the
                dataset's own order, which is already random for a mixture.
            seed: a seed or a JAX key, as in :func:`permutation`. Epoch 0 has the order of
                ``permutation(shuffle, len(dataset), seed)``; later epochs fold their number into the key.
            epoch: the first epoch.
            drop_last: leave out the examples that do not fill a batch on every rank.
            rank: this process's rank. Each example is read by one rank, and all ranks have equally many batches.
            world_size: number of ranks.
            ahead: number of batches to read ahead.

        Raises:
            ArgumentError: an invalid argument.
        """
        return TokenStream(
            self,  # type: ignore[arg-type]  # subclasses implement the rest of Examples
            batch_size,
            shuffle=shuffle,
            seed=seed,
            epoch=epoch,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
            ahead=ahead,
        )


class Composed(Streamed, ABC):
    """A dataset of other datasets' examples."""

    @abstractmethod
    def recipe(self) -> dict[str, object]:
        """Identifies the examples, as JSON values; see :func:`recipe_of`."""


class TokenStream(Epochs[Any]):
    """Batches of a token dataset, as its ``get_batch`` returns them. Created by ``dataset.stream(...)``; see there for arguments.

    ``for batch in stream`` reads one epoch; the next loop reads the next. A mixture that restarts its datasets has a single,
    endless epoch. ``state_dict`` and ``load_state_dict`` resume at any batch. Pickling a stream pickles its dataset and state.
    Streams work after a fork.

    Attributes:
        dataset: the dataset: any object with ``get_batch`` and a length.
        epoch: the current epoch, or the next one between loops.
        batch_size, drop_last, rank, world_size, seed, shuffle: as given.
    """

    def __init__(
        self,
        dataset: Examples,
        batch_size: int,
        *,
        shuffle: TokenShuffle = None,
        seed: int | Key = 0,
        epoch: int = 0,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        ahead: int = 2,
    ) -> None:
        if not hasattr(dataset, "get_batch") or not hasattr(dataset, "__len__"):
            raise ArgumentTypeError(
                f"dataset: expected an object with get_batch and a length, found {type(dataset).__name__}"
            )
        self.dataset = dataset
        self.batch_size = _arguments.whole(batch_size, "batch_size", 1, (1 << 32) - 1)
        self.drop_last = _arguments.switch(drop_last, "drop_last")
        self.world_size = _arguments.whole(world_size, "world_size", 1, 1 << 32)
        self.rank = _arguments.whole(rank, "rank", 0, self.world_size - 1)
        self.seed, self.shuffle = seed, shuffle
        self.num_examples: int | None = len(dataset) if getattr(dataset, "is_finite", True) else None
        self._ahead = _arguments.whole(ahead, "ahead", 1, 1 << 16)
        self._order = self._first_order()
        self._epoch_order: tuple[int, Permutation | None] = (0, self._order)
        self._batches = self._shared()
        self._recipe: DatasetRecipe | None = None
        if not self.num_examples:
            self._warn_of_nothing()
        super().__init__(_arguments.whole(epoch, "epoch"))

    @property
    def reuses(self) -> bool:
        """False: each batch is a new array."""
        return False

    def _warn_of_nothing(self) -> None:
        """Warns that a finite dataset has no examples, unless its cache is empty."""
        cache = getattr(self.dataset, "cache", None)
        if self.num_examples is None or not isinstance(cache, TokenCache) or not len(cache):
            return
        text = (
            f"{cache.path}: the stream has no examples: {type(self.dataset).__name__} makes none of "
            f"{many(len(cache), 'document')}, {many(cache.num_tokens, 'token')}"
        )
        warn(text, code="no-example-chosen")

    def _first_order(self) -> Permutation | None:
        """The permutation of epoch 0."""
        if self.shuffle is None:
            return None
        if self.num_examples is None:
            raise ArgumentError("shuffle: expected None for an endless dataset; a mixture is already shuffled")
        if not isinstance(self.shuffle, Permutation):
            if not _arguments.is_one_of(self.shuffle, ("block", "feistel", "linear")):
                raise ArgumentError(
                    f'shuffle: expected "block", "feistel", "linear", an order or None, found {self.shuffle!r:.80}'
                )
            return permutation(self.shuffle, self.num_examples, prng_key(self.seed))
        if len(self.shuffle) != self.num_examples:
            raise ArgumentError(
                f"shuffle: an order of {len(self.shuffle):,} indices does not fit a dataset of {many(self.num_examples, 'example')}"
            )
        if self.seed != 0:
            raise ArgumentError("seed: must be 0 when shuffle= is a permutation, which has its own key")
        return self.shuffle

    def _shared(self) -> int | None:
        """Number of batches per epoch and rank; None if endless."""
        n, ranks = self.num_examples, self.world_size
        if n is None:
            return None
        together = self.batch_size * ranks
        batches = n // together if self.drop_last else -(-n // together)
        if batches * ranks > n:
            raise ArgumentError(
                f"{many(n, 'example', 'is', 'are')} too few for {ranks} ranks with {batches} batches of 1 to "
                f"{self.batch_size} examples each; pass "
                "drop_last=True to leave out the examples that do not fill a batch"
            )
        return batches

    def __len__(self) -> int:
        """Number of batches per epoch of this rank, the same on every rank."""
        if self._batches is None:
            raise ArgumentTypeError("the dataset is endless, so its stream has no length")
        return self._batches

    def __bool__(self) -> bool:
        return self._batches != 0

    def __repr__(self) -> str:
        count = "endless batches" if self._batches is None else many(self._batches, "batch", plural="batches")
        shuffle = "an order" if isinstance(self.shuffle, Permutation) else repr(self.shuffle)
        return (
            f"<actshard.tokens.TokenStream of {type(self.dataset).__name__}: {count} of {self.batch_size}, "
            f"shuffle={shuffle}, seed={self.seed}, epoch {self.epoch}>"
        )

    @property
    def identity(self) -> str:
        """A digest of the dataset's :func:`recipe_of`. It does not depend on the cache's path."""
        recipe = self._dataset_recipe()
        return recipe if isinstance(recipe, str) else short_digest(recipe)

    def _dataset_recipe(self) -> DatasetRecipe:
        if self._recipe is None:
            self._recipe = recipe_of(self.dataset)
        return self._recipe

    def indices(self, batch: int, epoch: int | None = None) -> NDArray[np.int64]:
        """Dataset indices in a batch of this rank: (n,) int64. Default epoch: the current one, or the next one between loops.

        ``dataset.get_batch(stream.indices(batch))`` returns that batch.
        """
        batch = _arguments.whole(batch, "batch", 0, (1 << 62) if self._batches is None else self._batches - 1)
        epoch = self.epoch if epoch is None else _arguments.whole(epoch, "epoch")
        first, last = self._begin_of(batch), self._begin_of(batch + 1)
        # The last batches may be short. Ranks share them equally, at least one example each.
        cut = [first + (last - first) * rank // self.world_size for rank in (self.rank, self.rank + 1)]
        numbers = np.arange(*cut, dtype=np.int64)
        order = self._order_of(epoch)
        return numbers if order is None else order(numbers)

    def _begin_of(self, batch: int, ranks: int | None = None) -> int:
        """Index of the first example of a batch, counted over all ranks; with batches of this size on ``ranks`` ranks."""
        ranks = self.world_size if ranks is None else ranks
        full = batch * self.batch_size * self.world_size
        n, batches = self.num_examples, self._batches
        if n is None or batches is None or self.drop_last:
            return full
        return n if batch == batches else min(full, n - (batches - batch) * ranks)

    def _order_of(self, epoch: int) -> Permutation | None:
        order_epoch, order = self._epoch_order
        if order_epoch != epoch:
            order = None if self._order is None else self._order.of_epoch(epoch)
            self._epoch_order = (epoch, order)
        return order

    def _read(self, epoch: int, batch: int) -> object:
        return self.dataset.get_batch(self.indices(batch, epoch))

    def _count(self) -> int | None:
        return self._batches

    def _place(self) -> Path | None:
        cache = getattr(self.dataset, "cache", None)
        return getattr(cache, "path", None)

    def _ready(self) -> None:
        self._dataset_recipe()

    def _loop(self, first: int, every: int, buffers: list[NDArray[np.generic]] | None) -> _TokenLoop:
        assert buffers is None, "batches of tokens are new arrays"
        return _TokenLoop(self, first, every)

    def _settings(self) -> dict[str, object]:
        return self._settings_at(0)

    def _settings_at(self, batch: int) -> dict[str, object]:
        """Settings that determine the examples before a batch. Their division among ranks is not one of them."""
        shuffle, recipe = None, self._dataset_recipe()
        if self._order is not None:
            kind, how, length, key, sizes = self._order.made_of
            shuffle = [kind, how, length, list(key), list(sizes)]
        return {
            "dataset": recipe if self._order is not None else _before(recipe, self._begin_of(batch)),
            "format": "tokens",
            "examples": self.num_examples,
            "examples_per_batch": self.batch_size * self.world_size,
            # Depends on the number of ranks in the last batches of an epoch only, which may be short.
            "examples_read": self._begin_of(batch),
            "shuffle": shuffle,
            "drop_last": self.drop_last,
        }

    def _translated(self, saved: dict[str, object], batch: int) -> dict[str, object]:
        batch_size, world_size = saved.get("batch_size"), saved.get("world_size")
        if type(batch_size) is not int or type(world_size) is not int:
            return saved
        same = {name: value for name, value in saved.items() if name not in ("batch_size", "world_size")}
        if same.get("dataset") == _digest_of_some(self.dataset).hexdigest()[:16]:
            del same["dataset"]  # older releases identified a dataset by some examples
        read = self._begin_of(batch, world_size)  # if the batches are as large as this stream's, which is compared, too
        return {**same, "examples_per_batch": batch_size * world_size, "examples_read": read}

    def _added(self, saved: dict[str, object]) -> set[str]:
        return {"dataset"} - saved.keys()


class _TokenLoop(Loop[Any]):
    """Iterates over one epoch of a token stream."""

    def __init__(self, stream: TokenStream, first: int, every: int) -> None:
        self._source = stream
        super().__init__(stream, first, every)

    def _start(self) -> ReadAhead:
        stream, epoch = self._source, self._epoch
        count = stream._count()
        batch_numbers = (
            itertools.count(self._next, self._every) if count is None else range(self._next, count, self._every)
        )
        return ReadAhead(lambda batch: stream._read(epoch, batch), batch_numbers, stream._ahead)

    def _made(self, batch: object) -> object:
        return batch


def recipe_of(dataset: Any) -> DatasetRecipe:
    """Identifies a dataset's examples as JSON values.

    The recipe of a mixture, slice or permutation. For others a digest of the settings, the length, a few examples, and the
    checksums or counts of the cache.
    """
    if isinstance(dataset, Composed):
        return dataset.recipe()
    digest = _digest_of_some(dataset)
    digest.update(json.dumps(_settings_of(dataset), sort_keys=True, default=_plain_number).encode())
    cache = getattr(dataset, "cache", None)
    if isinstance(cache, TokenCache):
        ledger = cache.ledger
        content = ledger.checksums or [ledger.total_num_rows, ledger.field_counts, ledger.shard_rows]
        digest.update(json.dumps(content, sort_keys=True).encode())
    return digest.hexdigest()[:16]


def _plain_number(value: object) -> object:
    """A number of numpy as one of Python."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"expected a number, a text or a flag, found {type(value).__name__}")


def _settings_of(dataset: object) -> dict[str, object]:
    """The values of a dataset's :attr:`Streamed.settings`, and of those of the windows that it is made of."""
    names = dataset.settings if isinstance(dataset, Streamed) else ()
    values = {name: getattr(dataset, name, None) for name in names}
    return {name: _settings_of(value) if isinstance(value, Streamed) else value for name, value in values.items()}


def _digest_of_some(dataset: Any) -> hashlib._Hash:
    """A digest of a dataset's length and a few examples."""
    n = len(dataset) if getattr(dataset, "is_finite", True) else None
    digest = hashlib.sha256(json.dumps(n).encode())
    among = _ENDLESS if n is None else n
    for index in range(0, among, -(-among // _SAMPLES) or 1):
        try:
            examples = dataset.get_batch(np.array([index], np.int64))
        except ActshardError:
            digest.update(b"unreadable")
            continue
        for name, array in arrays(examples).items():
            digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return digest


def short_digest(value: object) -> str:
    """16 hexadecimal digits of JSON values."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _before(recipe: DatasetRecipe, position: int) -> DatasetRecipe:
    """A recipe's part that determines the examples before a position: a mixture's stages may be added after it."""
    if not isinstance(recipe, dict) or "stages" not in recipe:
        return recipe
    stages = [stage for stage in recipe["stages"] if stage[0] == 0 or stage[0] < position]
    names = {name for _, counts in stages for name, _ in counts}
    datasets = {name: dataset for name, dataset in recipe["datasets"].items() if name in names}
    return {**recipe, "stages": short_digest(stages), "datasets": datasets}


def arrays(batch: Any) -> dict[str, NDArray[np.generic]]:
    """The arrays of a batch, by name. A bare array is named ``tokens``."""
    if isinstance(batch, np.ndarray):
        return {"tokens": batch}
    if callable(method := getattr(batch, "arrays", None)):
        arrays_by_name: dict[str, NDArray[np.generic]] = method()
        return arrays_by_name
    if dataclasses.is_dataclass(batch):
        attributes = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    else:
        attributes = dict(batch) if isinstance(batch, dict) else {}
    return {name: value for name, value in attributes.items() if isinstance(value, np.ndarray)}
