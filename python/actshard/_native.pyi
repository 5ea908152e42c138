from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Addresses",
    "Batches",
    "BlockCache",
    "Rows",
    "Stream",
    "TokenField",
    "TokenFieldWriter",
    "TokenOrder",
    "ZarrMeta",
    "build_info",
    "cast_into",
    "check_decoded_size",
    "copy_range",
    "count_overflows",
    "count_selected",
    "digest_file",
    "dtypes",
    "error_kinds",
    "finding_codes",
    "header_reasons",
    "is_network",
    "jax_fold_in",
    "jax_key",
    "jax_permutation",
    "jax_randint30",
    "jax_split",
    "load_pickle",
    "load_pickle_file",
    "looks",
    "num_threads",
    "pack_rows",
    "panic_for_test",
    "parse_safetensors",
    "read_zarr",
    "run_lengths",
    "safetensors_header",
    "sync_files",
    "write_pieces",
    "write_segments",
    "zarr_problem",
]

_ChunkArray = tuple[
    str | PathLike[str],
    str | PathLike[str],
    str,
    str,
    list[int],
    list[int],
    list[int] | bytes,
    bool,
    tuple[str | PathLike[str], str, bool] | Callable[[list[int]], bytes] | None,
]
_Shard = tuple[str | PathLike[str], bool, int | None, bytes | None, int, tuple[int, int], list[int], int]
_SelectedTokens = (
    tuple[int, int]
    | tuple[int, NDArray[np.int64]]
    | tuple[int, NDArray[np.int64], NDArray[np.bool_]]
    | tuple[NDArray[np.int64]]
)
_Header = tuple[list[tuple[str, str, list[int], int, int]], list[tuple[str, str]], int]

def safetensors_header(path: str | PathLike[str]) -> _Header: ...
def parse_safetensors(data: bytes) -> _Header: ...
def read_zarr(
    folder: str | PathLike[str], metadata: bytes, there: Sequence[Sequence[int]], most: int
) -> bytes | list[bytes]: ...
def check_decoded_size(codec: str, data: bytes, limit: int, path: str | PathLike[str]) -> None: ...
def zarr_problem(folder: str | PathLike[str], metadata: bytes) -> str | None: ...
def count_selected(examples: int, tokens: _SelectedTokens) -> int: ...
def load_pickle(data: bytes) -> Any: ...
def load_pickle_file(path: str | PathLike[str], compressed: bool, limit: int) -> Any: ...
def write_pieces(
    sources: list[NDArray[np.uint8]],
    files: list[tuple[str | PathLike[str], int]],
    pieces: NDArray[np.int64],
    direct: bool,
) -> None: ...
def write_segments(
    path: str | PathLike[str], segments: list[NDArray[np.uint8]], level: int | None = None
) -> tuple[int, str]: ...
def digest_file(path: str | PathLike[str]) -> tuple[int, str]: ...
def sync_files(paths: list[str | PathLike[str]]) -> None: ...
def copy_range(
    source: str | PathLike[str], start: int, size: int, target: str | PathLike[str], offset: int
) -> None: ...
def cast_into(source: NDArray[np.uint8], source_dtype: str, target: NDArray[Any], target_dtype: str) -> None: ...
def count_overflows(array: NDArray[Any], dtype: Any) -> int: ...
def pack_rows(fields: list[TokenField], most: int, segments: int, overlong: str) -> NDArray[np.int64]: ...
def run_lengths(segments: NDArray[np.int32], most: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]: ...
def jax_key(seed: int) -> tuple[int, int]: ...
def jax_split(key: tuple[int, int], n: int) -> list[tuple[int, int]]: ...
def jax_fold_in(key: tuple[int, int], data: int) -> tuple[int, int]: ...
def jax_randint30(key: tuple[int, int]) -> int: ...
def jax_permutation(key: tuple[int, int], n: int) -> NDArray[np.uint32]: ...
def dtypes() -> list[tuple[str, str | None, int]]: ...
def error_kinds() -> list[str]: ...
def finding_codes() -> list[str]: ...
def header_reasons() -> list[str]: ...
def is_network(path: str | PathLike[str]) -> bool: ...
def looks() -> int: ...
def panic_for_test(detached: bool) -> None: ...
def num_threads() -> int: ...
def build_info() -> dict[str, str]: ...

@final
class ZarrMeta:
    def __new__(cls, version: int, text: bytes, place: str) -> ZarrMeta: ...
    @property
    def shape(self) -> list[int]: ...
    @property
    def outer(self) -> list[int]: ...
    @property
    def chunks(self) -> list[int]: ...
    @property
    def dtype(self) -> str | None: ...
    @property
    def swapped(self) -> bool: ...
    @property
    def fill(self) -> int | float | bool | bytes | str: ...
    @property
    def prefix(self) -> str: ...
    @property
    def separator(self) -> str: ...
    @property
    def how(self) -> str: ...
    @property
    def inner(self) -> bool: ...
    @property
    def codecs(self) -> list[str]: ...

@final
class Addresses:
    def __new__(cls, shards: int) -> Addresses: ...
    def push(
        self,
        shards: NDArray[np.int64],
        rows: NDArray[np.int64],
        lists: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]] | None = None,
    ) -> None: ...

@final
class Rows:
    @staticmethod
    def strided(
        files: list[tuple[str | PathLike[str], int]],
        *,
        num_examples: int,
        examples_per_file: int,
        num_groups: int,
        num_tokens: int,
        width: int,
        dtype: str,
        descr: np.dtype[Any],
        io: str,
    ) -> Rows: ...
    @staticmethod
    def table(
        files: list[tuple[str | PathLike[str], str]],
        addresses: Addresses,
        *,
        num_groups: int,
        width: int,
        dtype: str,
        descr: np.dtype[Any],
        io: str,
    ) -> Rows: ...
    @staticmethod
    def spans(
        files: list[tuple[str | PathLike[str], int, int, bool]],
        parts: list[tuple[int | NDArray[np.uint32], NDArray[np.uint64], int | NDArray[np.uint32], int]],
        *,
        num_groups: int,
        width: int,
        dtype: str,
        descr: np.dtype[Any],
        io: str,
    ) -> Rows: ...
    @staticmethod
    def chunked(
        arrays: list[_ChunkArray],
        members: list[tuple[int, list[int]]],
        lengths: list[int | NDArray[np.uint32]],
        *,
        num_groups: int,
        width: int,
        dtype: str,
        decoded_memory: int,
        descr: np.dtype[Any],
        io: str,
    ) -> Rows: ...
    @staticmethod
    def shards(shards: list[_Shard], *, layers: list[int], decoded_memory: int, io: str) -> Rows: ...
    @property
    def descr(self) -> np.dtype[Any]: ...
    @property
    def width(self) -> int: ...
    @property
    def inflated(self) -> int: ...
    def samples(self, shard: int) -> list[int]: ...
    def stored_types(self, group: int, examples: NDArray[np.int64] | None) -> list[np.dtype[Any]]: ...
    def records(self, shard: int) -> list[tuple[int, str | None, list[int], list[int], Any]]: ...
    @property
    def io(self) -> str: ...
    def token_counts(self) -> NDArray[np.int64]: ...
    def table_bytes(self) -> int: ...
    def close(self) -> None: ...
    def gather(
        self, group: int, examples: Any, tokens: Any, out: Any, dtype: Any, overflows: list[int] | None = None
    ) -> Any: ...
    def gather_whole(
        self, groups: Any, examples: NDArray[np.int64], out: Any, dtype: Any, overflows: list[int] | None = None
    ) -> Any: ...
    def tokens_of(self, groups: Any, examples: NDArray[np.int64]) -> NDArray[np.int64]: ...
    def view(self, group: int, example: int) -> NDArray[Any] | None: ...
    def scan(self, group: int, progress: Callable[[int], object] | None = None) -> dict[str, Any]: ...
    def stats(
        self, group: int, tokens: _SelectedTokens, progress: Callable[[int], object] | None = None
    ) -> dict[str, Any]: ...

@final
class Stream:
    def __new__(
        cls,
        rows: Rows,
        tokens: _SelectedTokens,
        *,
        groups: list[int],
        stacked: bool,
        interleaved: bool,
        batch_size: int,
        shuffle: str | None,
        seed: int,
        drop_last: bool,
        rank: int,
        world_size: int,
        memory: int,
        dtype: str,
        descr: np.dtype[Any],
        center: NDArray[np.float64] | None,
        scale: NDArray[np.float64] | None,
        norm: float | None,
        given: bool = False,
        unit_bytes: int | None = None,
    ) -> Stream: ...
    @property
    def batches(self) -> int: ...
    @property
    def items(self) -> int: ...
    @property
    def window(self) -> int: ...
    @property
    def unit_bytes(self) -> int | None: ...
    @property
    def units(self) -> int: ...
    def empty(self) -> NDArray[Any]: ...
    def take_overflows(self) -> int: ...
    def locate(self, picks: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
    def start(
        self, epoch: int, first: int, every: int, buffers: list[NDArray[Any]] | None, hold: bool = False
    ) -> Batches: ...

@final
class Batches:
    def next(
        self,
    ) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64] | None] | None: ...
    def ready(self) -> bool: ...
    def release(self, number: int) -> None: ...
    def stop(self) -> None: ...

@final
class BlockCache:
    def __new__(cls, budget: int) -> BlockCache: ...
    @property
    def used(self) -> int: ...

@final
class TokenField:
    def __new__(
        cls, parts: list[tuple[str | PathLike[str], tuple[int, int] | None]], io: str, cache: BlockCache
    ) -> TokenField: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_elements(self) -> int: ...
    @property
    def descr(self) -> np.dtype[Any]: ...
    @property
    def has_shapes(self) -> bool: ...
    def row(self, row: int) -> NDArray[Any]: ...
    def elements(self, start: int, n: int) -> NDArray[Any]: ...
    def rows(self, rows: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]: ...
    def bounds(self, first: int, n: int) -> NDArray[np.uint64]: ...
    def check(self, deep: bool) -> list[tuple[str, str | None, str, str | None, int | None, bool]]: ...
    def shape(self, row: int) -> list[int]: ...
    def windows(
        self,
        numbers: NDArray[np.int64],
        stride: int,
        count: int,
        length: int,
        *,
        loss: str,
        field: TokenField | None,
        weights: bool,
        segments: bool,
        eos: int | None,
    ) -> tuple[NDArray[np.int32], Any, Any]: ...
    def packed(
        self,
        packs: NDArray[np.int64],
        length: int,
        *,
        loss: str,
        field: TokenField | None,
        segments: bool,
        right: bool,
        mask_padding: bool,
    ) -> tuple[NDArray[np.int32], Any, Any]: ...

@final
class TokenFieldWriter:
    def __new__(
        cls, folder: str | PathLike[str], dtype: str, axes: int, storage: str, direct: bool
    ) -> TokenFieldWriter: ...
    def append(self, elements: NDArray[np.uint8], lengths: NDArray[np.int64], shapes: NDArray[np.int64]) -> None: ...
    def extend(self, field: TokenField) -> None: ...
    def counts(self) -> tuple[int, int]: ...
    def finish(self) -> tuple[int, int]: ...

@final
class TokenOrder:
    def __new__(cls, kind: str, how: str, length: int, key: tuple[int, int], sizes: list[int]) -> TokenOrder: ...
    def map(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]: ...
    def parameters(self) -> list[int]: ...
