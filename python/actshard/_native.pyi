from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Addresses",
    "Batches",
    "BlockCache",
    "IndexRecords",
    "Packing",
    "ParquetChunk",
    "ParquetFooter",
    "ParquetGroup",
    "ParquetLeaf",
    "ParquetPage",
    "RefusedObject",
    "RemoteStore",
    "Rows",
    "StoredArray",
    "Stream",
    "TokenField",
    "TokenFieldWriter",
    "TokenOrder",
    "TorchContents",
    "ZarrMeta",
    "arrow_stream",
    "build_info",
    "cast_into",
    "check_decoded_size",
    "clear_disk_cache",
    "copy_range",
    "copy_ranges",
    "count_overflows",
    "count_selected",
    "decode_planes",
    "digest_file",
    "disk_cache_info",
    "dtypes",
    "encode_planes",
    "encode_shard_index",
    "error_kinds",
    "finding_codes",
    "hash_rows",
    "header_reasons",
    "is_network",
    "is_remote",
    "jax_fold_in",
    "jax_key",
    "jax_permutation",
    "jax_randint30",
    "jax_split",
    "joined_sums",
    "load_pickle",
    "load_pickle_file",
    "looks",
    "move_files",
    "num_threads",
    "pack_chunks",
    "pack_rows",
    "panic_for_test",
    "parquet_footer",
    "parquet_footer_begin",
    "parse_safetensors",
    "placed_rows",
    "quantise",
    "quantise_spans",
    "raise_largest",
    "read_array",
    "read_arrays",
    "read_torch",
    "read_zarr",
    "remove_folders",
    "rescale_rows",
    "run_lengths",
    "safetensors_header",
    "sync_files",
    "token_array_size",
    "total_sums",
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
_ChunkScales = tuple[
    str, int, NDArray[np.float32] | tuple[str | PathLike[str], bytes, bool] | Callable[[list[int]], bytes | None]
]
_Shard = tuple[str | PathLike[str], bool, int | None, bytes | None, int, tuple[int, int], list[int], int]
_SelectedTokens = (
    tuple[int, int]
    | tuple[int, NDArray[np.int64]]
    | tuple[int, NDArray[np.int64], NDArray[np.bool_]]
    | tuple[NDArray[np.int64]]
)
_ArrowColumn = tuple[str, str, list[int], list[str], list["_ArrowColumn"], list[tuple[str, str]]]
_Header = tuple[list[tuple[str, str, list[int], int, int]], list[tuple[str, str]], int]

def safetensors_header(path: str | PathLike[str]) -> _Header: ...
def parse_safetensors(data: bytes) -> _Header: ...
def arrow_stream(
    path: str | PathLike[str],
) -> tuple[
    list[_ArrowColumn],
    list[tuple[str, str]],
    list[tuple[int, int, list[tuple[int, int]], list[tuple[int, int]]]],
    bool,
]: ...
def read_zarr(
    folder: str | PathLike[str], metadata: bytes, there: Sequence[Sequence[int]], most: int
) -> bytes | list[bytes]: ...
def check_decoded_size(codec: str, data: bytes, limit: int, path: str | PathLike[str]) -> None: ...
def encode_planes(rows: bytes, typesize: int, width: int) -> bytes: ...
def decode_planes(block: bytes, limit: int) -> bytes: ...
def zarr_problem(folder: str | PathLike[str], metadata: bytes) -> str | None: ...
def count_selected(examples: int, tokens: _SelectedTokens) -> int: ...
def rescale_rows(
    rows: NDArray[np.uint8],
    stored: str,
    out: NDArray[np.generic],
    dtype: str,
    width: int,
    *,
    center: NDArray[np.float64] | None,
    scale: NDArray[np.float64] | None,
    norm: float | None,
    divide: NDArray[np.float64] | None,
    wide: bool,
) -> int: ...
def joined_sums(nodes: Sequence[Mapping[str, object]]) -> list[dict[str, Any]]: ...
def total_sums(nodes: Sequence[Mapping[str, object]]) -> dict[str, Any] | None: ...
def load_pickle(data: bytes) -> Any: ...
def load_pickle_file(path: str | PathLike[str], compressed: bool, limit: int) -> Any: ...
def placed_rows(
    files: Sequence[tuple[str | PathLike[str], int, bool, bool, StoredArray | None]],
    numbers: NDArray[np.uint32],
    starts: NDArray[np.uint64],
    tokens: NDArray[np.uint32],
    *,
    num_groups: int,
    width: int,
    dtype: str,
    decoded_memory: int,
    descr: np.dtype[np.generic],
    io: str,
    faults: Sequence[tuple[int, str, str, str | PathLike[str]]] = ...,
    scaled: Sequence[tuple[int, StoredArray, StoredArray, NDArray[np.float32] | None]] = ...,
    grows: bool = ...,
    even: tuple[int, int, Sequence[tuple[int, int, int]]] | None = ...,
) -> Rows: ...
def parquet_footer_begin(end: bytes, size: int) -> int: ...
def parquet_footer(data: bytes, begin: int) -> ParquetFooter: ...

@final
class ParquetFooter:
    @property
    def num_rows(self) -> int: ...
    @property
    def num_groups(self) -> int: ...
    @property
    def leaves(self) -> list[ParquetLeaf]: ...
    def group(self, number: int) -> ParquetGroup: ...

@final
class ParquetLeaf:
    @property
    def path(self) -> str: ...
    @property
    def physical_type(self) -> str: ...
    @property
    def max_repetition_level(self) -> int: ...

@final
class ParquetGroup:
    @property
    def num_rows(self) -> int: ...
    @property
    def total_compressed_size(self) -> int: ...
    def column(self, leaf: int) -> ParquetChunk: ...
    def pages(self, path: str | PathLike[str], leaf: int, most: int) -> list[ParquetPage]: ...

@final
class ParquetChunk:
    @property
    def num_values(self) -> int: ...
    @property
    def data_page_offset(self) -> int: ...
    @property
    def dictionary_page_offset(self) -> int | None: ...
    @property
    def total_compressed_size(self) -> int: ...
    @property
    def total_uncompressed_size(self) -> int: ...
    @property
    def codec(self) -> str: ...
    @property
    def range(self) -> tuple[int, int, int | None] | None: ...

@final
class ParquetPage:
    @property
    def is_dictionary(self) -> bool: ...
    @property
    def body(self) -> int: ...
    @property
    def stored(self) -> int: ...
    @property
    def raw(self) -> int: ...
    @property
    def values(self) -> int: ...
    @property
    def encoding(self) -> int: ...

def read_torch(places: Sequence[str | PathLike[str]], limit: int) -> list[TorchContents]: ...

@final
class TorchContents:
    def value(self) -> Any: ...
    def sizes(self) -> tuple[int, int]: ...
    def damaged(self) -> list[int]: ...
    def read(self, array: StoredArray) -> bytearray: ...
    @property
    def is_legacy(self) -> bool: ...
    @property
    def is_gzipped(self) -> bool: ...

def read_arrays(
    places: Sequence[str | PathLike[str]], kind: str, partial: bool = False
) -> list[tuple[list[tuple[str, StoredArray, str]], list[tuple[str, str]]]]: ...
def read_array(place: str | PathLike[str], array: StoredArray) -> bytearray: ...

@final
class StoredArray:
    def __new__(
        cls, dtype: str, shape: Sequence[int], strides: Sequence[int], offset: int, swapped: bool
    ) -> StoredArray: ...
    @staticmethod
    def chunked(
        dtype: str,
        shape: Sequence[int],
        swapped: bool,
        chunk_shape: Sequence[int],
        filters: Sequence[str],
        chunks: Sequence[tuple[Sequence[int], int, int, int]],
    ) -> StoredArray: ...
    @staticmethod
    def joined(axis: int, arrays: Sequence[StoredArray]) -> StoredArray: ...
    def transposed(self, order: Sequence[int]) -> StoredArray: ...
    @property
    def is_chunked(self) -> bool: ...
    def viewed(self, dtype: str) -> StoredArray: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> list[int]: ...
    @property
    def strides(self) -> list[int]: ...
    @property
    def offset(self) -> int: ...
    @property
    def swapped(self) -> bool: ...
    @property
    def deflated(self) -> tuple[int, int, int, int] | None: ...

@final
class RefusedObject:
    @property
    def name(self) -> str: ...
    @property
    def global_at(self) -> int | None: ...

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
def move_files(folders: list[str | PathLike[str]], root: str | PathLike[str], but: list[str]) -> list[Path]: ...
def remove_folders(folders: list[str | PathLike[str]]) -> None: ...
def copy_range(
    source: str | PathLike[str], start: int, size: int, target: str | PathLike[str], offset: int
) -> None: ...
def cast_into(source: NDArray[np.uint8], source_dtype: str, target: NDArray[np.generic], target_dtype: str) -> None: ...
def quantise(
    rows: NDArray[np.uint8],
    shape: tuple[int, int, int],
    dtype: str,
    per: tuple[bool, bool, bool],
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32],
) -> tuple[float, float, float, float, int, int, int, int, int | None]: ...
def raise_largest(
    rows: NDArray[np.uint8], width: int, lengths: NDArray[np.int64], layers: int, largest: NDArray[np.float32]
) -> tuple[int, int] | None: ...
def quantise_spans(
    rows: NDArray[np.uint8],
    width: int,
    lengths: NDArray[np.int64],
    layers: int,
    parts: int,
    codes: NDArray[np.int8],
    scales: NDArray[np.float32],
    own: bool,
) -> tuple[NDArray[np.float64], NDArray[np.uint64], tuple[int, int] | None]: ...
def count_overflows(array: NDArray[np.generic], dtype: object) -> int: ...
def hash_rows(rows: NDArray[np.uint8], row_bytes: int, counts: NDArray[np.int64]) -> NDArray[np.uint64]: ...
def encode_shard_index(entries: NDArray[np.uint64]) -> NDArray[np.uint8]: ...
def pack_chunks(
    rows: NDArray[np.uint8], places: NDArray[np.int64], chunk_bytes: int, codecs: bytes
) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]: ...
def pack_rows(fields: list[TokenField], most: int, segments: int, overlong: str) -> NDArray[np.int64]: ...
def run_lengths(segments: NDArray[np.int32], most: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]: ...
def token_array_size(elements: int, item: int, offsets: bool) -> tuple[int, int, int, int]: ...
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
class IndexRecords:
    def __new__(
        cls,
        files: Sequence[str | PathLike[str]],
        shards: list[int],
        *,
        num_examples: int,
        record_bytes: int,
        layers: int,
        row_bytes: int,
        last: bool,
        split: str,
        io: str,
    ) -> IndexRecords: ...

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
        descr: np.dtype[np.generic],
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
        descr: np.dtype[np.generic],
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
        descr: np.dtype[np.generic],
        io: str,
    ) -> Rows: ...
    @staticmethod
    def tensors(
        files: Sequence[tuple[str | PathLike[str], int]],
        tokens: NDArray[np.uint32],
        tensors: Sequence[tuple[int | NDArray[np.uint32], NDArray[np.uint64]]],
        groups: Sequence[tuple[int, int]],
        *,
        width: int,
        dtype: str,
        descr: np.dtype[np.generic],
        io: str,
    ) -> Rows: ...
    @staticmethod
    def indexed(
        files: Sequence[str | PathLike[str]],
        index: IndexRecords,
        *,
        column: int | None,
        width: int,
        dtype: str,
        descr: np.dtype[np.generic],
        io: str,
    ) -> Rows: ...
    @staticmethod
    def joined(
        files: Sequence[tuple[str | PathLike[str], int, int, bool, list[tuple[int, int, bool, int, int]]]],
        cut: tuple[int, int] | NDArray[np.uint64],
        *,
        void: list[int],
        num_groups: int,
        width: int,
        dtype: str,
        descr: np.dtype[np.generic],
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
        descr: np.dtype[np.generic],
        io: str,
        scales: list[_ChunkScales | None] = ...,
    ) -> Rows: ...
    @staticmethod
    def shards(shards: list[_Shard], *, layers: list[int], decoded_memory: int, io: str) -> Rows: ...
    def choose(self, examples: tuple[int, int, int] | bytes) -> Rows: ...
    @staticmethod
    def several(
        parts: list[Rows],
        groups: list[list[int]],
        dtype: str | None,
        descr: np.dtype[np.generic],
        io: str,
        shifts: list[int] = ...,
    ) -> Rows: ...
    @staticmethod
    def paired(
        parts: list[Rows], groups: list[tuple[int, int]], dtype: str | None, descr: np.dtype[np.generic], io: str
    ) -> Rows: ...
    @property
    def descr(self) -> np.dtype[np.generic]: ...
    @property
    def width(self) -> int: ...
    @property
    def inflated(self) -> int: ...
    def read_ahead(self, example: int | None) -> None: ...
    def samples(self, shard: int) -> list[int]: ...
    def stored_types(self, group: int, examples: NDArray[np.int64] | None) -> list[np.dtype[np.generic]]: ...
    def records(self, shard: int) -> list[tuple[int, str | None, list[int], list[int], Any]]: ...
    @property
    def io(self) -> str: ...
    def token_counts(self) -> NDArray[np.int64]: ...
    @property
    def decodes(self) -> bool: ...
    def table_bytes(self) -> int: ...
    def close(self) -> None: ...
    def gather(
        self,
        groups: int | NDArray[np.int64],
        examples: object,
        tokens: object,
        out: object,
        dtype: object,
        overflows: list[int] | None = None,
    ) -> NDArray[np.generic]: ...
    def gather_whole(
        self,
        groups: int | NDArray[np.int64],
        examples: NDArray[np.int64],
        out: object,
        dtype: object,
        overflows: list[int] | None = None,
    ) -> NDArray[Any]: ...
    def tokens_of(self, groups: int | NDArray[np.int64], examples: NDArray[np.int64]) -> NDArray[np.int64]: ...
    def view(self, group: int, example: int) -> NDArray[np.generic] | None: ...
    def view_all(self, group: int) -> tuple[NDArray[np.generic], int, int | None] | None: ...
    def scan(
        self,
        group: int,
        progress: Callable[[int], object] | None = None,
        *,
        examples: tuple[int, int] | None = None,
        wide: bool | None = None,
    ) -> dict[str, Any]: ...
    def leaf_rows(self, wide: bool) -> int: ...
    def sum_needs(
        self, group: int, tokens: _SelectedTokens, leaves: tuple[int, int], wide: bool, total: int
    ) -> tuple[int | None, int]: ...
    def scan_needs(self, group: int, examples: tuple[int, int], wide: bool, total: int) -> tuple[int | None, int]: ...
    def sums(
        self,
        group: int,
        tokens: _SelectedTokens,
        leaves: tuple[int, int],
        wide: bool,
        progress: Callable[[int], object] | None = None,
    ) -> list[dict[str, Any]]: ...
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
        descr: np.dtype[np.generic],
        center: NDArray[np.float64] | None,
        scale: NDArray[np.float64] | None,
        norm: float | None,
        divide: NDArray[np.float64] | None = None,
        wide: bool = False,
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
    def empty(self) -> NDArray[np.generic]: ...
    def take_overflows(self) -> int: ...
    def locate(self, picks: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
    def before(self) -> NDArray[np.int64]: ...
    def unit_bounds(self) -> NDArray[np.int64] | None: ...
    @property
    def decodes(self) -> bool: ...
    def read(
        self, firsts: NDArray[np.int64], counts: NDArray[np.int64], places: NDArray[np.int64], shape: list[int]
    ) -> tuple[NDArray[Any], NDArray[np.int64]]: ...
    def start(
        self, epoch: int, first: int, every: int, buffers: list[NDArray[np.generic]] | None, hold: bool = False
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
class Packing:
    def __new__(
        cls,
        lengths: NDArray[np.int64],
        units: NDArray[np.int64] | None,
        *,
        budget: int,
        pack: bool,
        shuffle: str | None,
        seed: int,
        world_size: int,
        drop_last: bool,
        window: int,
    ) -> Packing: ...
    @property
    def batches(self) -> int: ...
    @property
    def all_batches(self) -> int: ...
    def batch(self, epoch: int, rank: int, batch: int) -> NDArray[np.int64]: ...
    def end_of_window(self, epoch: int, rank: int, batch: int) -> int: ...

@final
class BlockCache:
    def __new__(cls, budget: int) -> BlockCache: ...
    @property
    def used(self) -> int: ...

@final
class TokenField:
    def __new__(
        cls,
        parts: list[tuple[str | PathLike[str], tuple[int, int] | None]],
        io: str,
        cache: BlockCache,
        ledger: tuple[str | PathLike[str], int, int] | None = None,
        *,
        is_complete: bool = False,
    ) -> TokenField: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_elements(self) -> int: ...
    @property
    def descr(self) -> np.dtype[np.generic]: ...
    @property
    def has_shapes(self) -> bool: ...
    def row(self, row: int) -> NDArray[np.generic]: ...
    def elements(self, start: int, n: int) -> NDArray[np.generic]: ...
    def rows(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.generic], NDArray[np.int64]]: ...
    def bounds(self, first: int, n: int) -> NDArray[np.uint64]: ...
    def extents(self, rows: NDArray[np.int64]) -> NDArray[np.uint64]: ...
    def missing_files(self) -> list[tuple[str, int]]: ...
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
    def finish(self) -> tuple[int, int, list[tuple[str, int]]]: ...

@final
class TokenOrder:
    def __new__(cls, kind: str, how: str, length: int, key: tuple[int, int], sizes: list[int]) -> TokenOrder: ...
    def map(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]: ...
    def parameters(self) -> list[int]: ...

@final
class RemoteStore:
    def __new__(
        cls, url: str, options: list[tuple[str, str]], cache: tuple[str | PathLike[str], int] | None
    ) -> RemoteStore: ...
    def cache_info(self) -> list[int] | None: ...
    def cache_warning(self) -> str | None: ...
    @staticmethod
    def from_state(state: bytes) -> RemoteStore: ...
    def state(self) -> bytes: ...
    @property
    def root(self) -> str: ...
    @property
    def lists(self) -> bool: ...
    @property
    def revision(self) -> str | None: ...
    @property
    def name(self) -> str: ...
    def is_same(self, other: RemoteStore) -> bool: ...
    def origin(self) -> str: ...
    def text(self, key: str) -> str: ...
    def counts(self) -> tuple[int, int]: ...
    def stat(self, key: str) -> tuple[int | None, str | None] | None: ...
    def stat_together(self, keys: list[str], again: bool) -> list[Literal[True] | Exception | None]: ...
    def scan(self, key: str, deep: bool) -> list[tuple[str, int | None]]: ...
    def everything(self) -> list[tuple[str, int, str]]: ...
    def upload(
        self,
        jobs: Sequence[tuple[str | PathLike[str] | bytes, str, bool, int | None, str | None]],
        progress: Callable[[int], object] | None,
    ) -> list[Literal["sent", "there", "refused"]]: ...
    def remove(self, keys: list[str]) -> None: ...
    def digests(self, keys: list[str]) -> list[str | None]: ...
    def sweep(self, keys: list[str]) -> int: ...
    def fetch(self, keys: list[str], most: int) -> list[bytes | Literal[False] | None]: ...
    def look(self, key: str) -> None: ...
    def read(self, key: str, start: int, length: int) -> bytes: ...

def is_remote(text: str) -> bool: ...
def copy_ranges(ranges: list[tuple[str | PathLike[str], str | PathLike[str], int, int]]) -> None: ...
def disk_cache_info(folder: str | PathLike[str]) -> tuple[int, int, int] | None: ...
def clear_disk_cache(folder: str | PathLike[str]) -> bool: ...
