"""Token datasets as batches: in an order, read ahead by a thread, resumable, shared by ranks.

Positions, states and loops are those of activation streams (:mod:`actshard.epochs`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from actshard import _arguments
from actshard.epochs import Epochs, Loop
from actshard.errors import ActshardError, ArgumentError, ArgumentTypeError
from actshard.tokens.orders import Key, Permutation, permutation, prng_key

TokenShuffle = Literal["block", "feistel", "linear"] | Permutation | None
_SAMPLES = 8
"""Examples that a dataset is told from others by."""
_ENDLESS = 1 << 20
"""Where those of a dataset without an end are taken from."""


@runtime_checkable
class Examples(Protocol):
    """What can be streamed, mixed and permuted: a dataset of examples."""

    def __len__(self) -> int: ...

    def get_batch(self, indices: Sequence[int] | NDArray[Any]) -> Any:
        """The examples of some indices."""


class Streamed:
    """A dataset that has a stream."""

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
        """Batches of all examples, epoch after epoch, read ahead by a thread; see :class:`TokenStream`.

        Args:
            batch_size: examples of a batch, of each rank.
            shuffle: ``"block"`` (Levanter's default), ``"feistel"``, ``"linear"``, or an order that :func:`permutation` made.
                None: the dataset's own order, which for a mixture is already random.
            seed: a seed or a key of JAX, as :func:`permutation` takes it. Epoch 0 is in the order of
                ``permutation(shuffle, len(dataset), seed)``; later epochs fold their number into the key.
            epoch: the first epoch.
            drop_last: leaves out the examples that do not fill a batch of every rank.
            rank: the number of this rank. Ranks take turns: one of them reads each example, and all have equally many batches.
            world_size: how many ranks there are.
            ahead: batches that are read ahead.

        Raises:
            ArgumentError: an argument that makes no sense.
        """
        # Every class that has this has the rest of Examples.
        return TokenStream(
            self,  # type: ignore[arg-type]
            batch_size,
            shuffle=shuffle,
            seed=seed,
            epoch=epoch,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
            ahead=ahead,
        )


class TokenStream(Epochs[Any]):
    """Batches of a token dataset: what its ``get_batch`` returns. Made by ``dataset.stream(...)``, where arguments are explained.

    ``for batch in stream`` reads one epoch, the next loop the next one; a mixture that restarts its datasets has a single epoch
    without an end. ``state_dict`` and ``load_state_dict`` resume at any batch. A stream pickles as its dataset and its state,
    and works after a fork.

    Attributes:
        dataset: what is read: anything with ``get_batch`` and a length.
        epoch: the epoch that is being read, or comes next.
        batch_size, drop_last, rank, world_size, seed, shuffle: as asked for.
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
                f"dataset: expected one with get_batch and a length, found {type(dataset).__name__}"
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
        self._ordered: tuple[int, Permutation | None] = (0, self._order)
        self._batches = self._shared()
        self._identity: str | None = None
        super().__init__(_arguments.whole(epoch, "epoch"))

    def _first_order(self) -> Permutation | None:
        """The order of epoch 0."""
        if self.shuffle is None:
            return None
        if self.num_examples is None:
            raise ArgumentError("shuffle: expected None for a dataset that does not end; a mixture shuffles by itself")
        if not isinstance(self.shuffle, Permutation):
            if not _arguments.is_one_of(self.shuffle, ("block", "feistel", "linear")):
                raise ArgumentError(
                    f'shuffle: expected "block", "feistel", "linear", an order or None, found {self.shuffle!r:.80}'
                )
            return permutation(self.shuffle, self.num_examples, prng_key(self.seed))
        if len(self.shuffle) != self.num_examples:
            raise ArgumentError(
                f"shuffle: an order of {len(self.shuffle)} indices does not fit a dataset of {self.num_examples} examples"
            )
        if self.seed != 0:
            raise ArgumentError("seed: the order that shuffle= gives has a key of its own")
        return self.shuffle

    def _shared(self) -> int | None:
        """Batches of an epoch, of each rank."""
        n, ranks = self.num_examples, self.world_size
        if n is None:
            return None
        together = self.batch_size * ranks
        batches = n // together if self.drop_last else -(-n // together)
        if batches * ranks > n:
            raise ArgumentError(
                f"{n} examples cannot be shared by {ranks} ranks such that each has {batches} batches of 1 to {self.batch_size} "
                "and no example is read twice; drop_last=True leaves out those that are too few"
            )
        return batches

    def __len__(self) -> int:
        """Batches of an epoch, of this rank; every rank has as many."""
        if self._batches is None:
            raise ArgumentTypeError("the dataset does not end, and neither does its stream")
        return self._batches

    def __bool__(self) -> bool:
        return self._batches != 0

    def __repr__(self) -> str:
        count = "endless" if self._batches is None else f"{self._batches}"
        shuffle = "an order" if isinstance(self.shuffle, Permutation) else repr(self.shuffle)
        return (
            f"<actshard.tokens.TokenStream of {type(self.dataset).__name__}: {count} batches of {self.batch_size}, "
            f"shuffle={shuffle}, seed={self.seed}, epoch {self.epoch}>"
        )

    @property
    def identity(self) -> str:
        """A digest of the dataset's length and of a few examples: the same wherever its cache lies."""
        if self._identity is None:
            n = self.num_examples
            digest = hashlib.sha256(json.dumps(n).encode())
            among = _ENDLESS if n is None else n
            for index in range(0, among, -(-among // _SAMPLES) or 1):
                try:
                    found = self.dataset.get_batch(np.array([index], np.int64))
                except ActshardError:
                    digest.update(b"unreadable")
                    continue
                for name, array in arrays(found).items():
                    digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
            self._identity = digest.hexdigest()[:16]
        return self._identity

    def indices(self, batch: int, epoch: int | None = None) -> NDArray[np.int64]:
        """The dataset's indices that make up a batch of this rank; of the epoch that is being read, or comes next.

        ``dataset.get_batch(stream.indices(batch))`` is that batch.
        """
        batch = _arguments.whole(batch, "batch", 0, (1 << 62) if self._batches is None else self._batches - 1)
        epoch = self.epoch if epoch is None else _arguments.whole(epoch, "epoch")
        first, last = self._begin_of(batch), self._begin_of(batch + 1)
        # The last rounds may be short: each rank an equal part, and at least one.
        cut = [first + (last - first) * rank // self.world_size for rank in (self.rank, self.rank + 1)]
        numbers = np.arange(*cut, dtype=np.int64)
        order = self._order_of(epoch)
        return numbers if order is None else order(numbers)

    def _begin_of(self, batch: int) -> int:
        """The first example of a batch of all ranks together."""
        full = batch * self.batch_size * self.world_size
        n, batches = self.num_examples, self._batches
        if n is None or batches is None or self.drop_last:
            return full
        return n if batch == batches else min(full, n - (batches - batch) * self.world_size)

    def _order_of(self, epoch: int) -> Permutation | None:
        known, order = self._ordered
        if known != epoch:
            order = None if self._order is None else self._order.of_epoch(epoch)
            self._ordered = (epoch, order)
        return order

    def _read(self, epoch: int, batch: int) -> Any:
        return self.dataset.get_batch(self.indices(batch, epoch))

    def _count(self) -> int | None:
        return self._batches

    def _place(self) -> Path | None:
        cache = getattr(self.dataset, "cache", None)
        return getattr(cache, "path", None)

    def _ready(self) -> None:
        _ = self.identity

    def _loop(self, first: int, every: int) -> _TokenLoop:
        return _TokenLoop(self, first, every)

    def _settings(self) -> dict[str, Any]:
        shuffle = None
        if self._order is not None:
            kind, how, length, key, sizes = self._order.made_of
            shuffle = [kind, how, length, list(key), list(sizes)]
        return {
            "dataset": self.identity,
            "format": "tokens",
            "examples": self.num_examples,
            "batch_size": self.batch_size,
            "shuffle": shuffle,
            "drop_last": self.drop_last,
            "world_size": self.world_size,
        }


class _TokenLoop(Loop[Any]):
    """Batches of tokens on their way to one loop."""

    def __init__(self, stream: TokenStream, first: int, every: int) -> None:
        self._source = stream
        super().__init__(stream, first, every)

    def _start(self) -> _Ahead:
        stream, epoch = self._source, self._epoch
        count = stream._count()
        wanted = itertools.count(self._next, self._every) if count is None else range(self._next, count, self._every)
        return _Ahead(lambda batch: stream._read(epoch, batch), wanted, stream._ahead)

    def _made(self, found: Any) -> Any:
        return found


class _Ahead:
    """Reads batches on a thread, some ahead of what was asked for."""

    def __init__(self, read: Callable[[int], Any], wanted: Iterable[int], ahead: int) -> None:
        self._read, self._wanted, self._most = read, wanted, ahead
        self._changed = threading.Condition()
        self._held: deque[Any] = deque()
        self._ended = self._stopped = False
        self._error: BaseException | None = None
        # It ends with the process: whoever forgets a loop does not keep a program from ending.
        self._thread = threading.Thread(target=self._fill, name="actshard-tokens", daemon=True)
        self._thread.start()

    def _fill(self) -> None:
        try:
            for batch in self._wanted:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped or len(self._held) < self._most)
                    if self._stopped:
                        return
                made = self._read(batch)
                with self._changed:
                    self._held.append(made)
                    self._changed.notify_all()
        except BaseException as error:  # raised where the batch is asked for
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def next(self) -> Any:
        """Waits for the next batch; None at the end. What went wrong while it was read is raised here."""
        with self._changed:
            self._changed.wait_for(lambda: self._held or self._ended or self._stopped)
            if self._held:
                made = self._held.popleft()
                self._changed.notify_all()
                return made
        if self._error is not None and not self._stopped:
            raise self._error
        return None

    def stop(self) -> None:
        """Ends the thread, after the batch that it is reading."""
        with self._changed:
            self._stopped = True
            self._held.clear()
            self._changed.notify_all()
        # The last reference to a loop may go while its own thread collects garbage.
        if self._thread is not threading.current_thread():
            self._thread.join()


def arrays(batch: Any) -> dict[str, NDArray[Any]]:
    """The arrays of a batch of a token dataset, by name: an array's name is ``tokens``."""
    if isinstance(batch, np.ndarray):
        return {"tokens": batch}
    if dataclasses.is_dataclass(batch):
        found = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    else:
        found = dict(batch) if isinstance(batch, dict) else {}
    return {name: value for name, value in found.items() if isinstance(value, np.ndarray)}
