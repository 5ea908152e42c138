"""Validates and converts users' arguments (indices, dtypes, outputs, paths) for the Rust core.

The binding handles the common cases itself (an int, an int64 array, a numpy output of the right dtype) and calls these functions
by name for all others.
"""

from __future__ import annotations

import errno
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path, PurePath
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeGuard, TypeVar
from urllib.parse import unquote_to_bytes

import numpy as np
from numpy.typing import DTypeLike, NDArray

import actshard._native as _native
from actshard.base.errors import (
    ArgumentError,
    ArgumentTypeError,
    DtypeError,
    NoMemoryError,
    OutOfRangeError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

Io = Literal["auto", "mmap", "pread"]
Overflow = Literal["refuse", "allow"]
Kept = Literal["all", "content", "last"]
"""Tokens that a conversion keeps."""

Item = TypeVar("Item")
Group = TypeVar("Group")
Scalar = TypeVar("Scalar", bound=np.generic)
_P = ParamSpec("_P")
_R = TypeVar("_R")
_C = TypeVar("_C")

NUMPY_BY_NAME: dict[str, np.dtype[np.generic]] = {}
"""Maps safetensors dtype names to numpy (or ml_dtypes) dtypes."""

_NAME_BY_NUMPY: dict[np.dtype[np.generic], str] = {}


def _fill_tables() -> None:
    import ml_dtypes

    for name, numpy_name, _ in _native.dtypes():
        if numpy_name is None:
            continue
        scalar_type = getattr(ml_dtypes, numpy_name, None) or getattr(np, numpy_name, None)
        dtype = np.dtype(scalar_type if scalar_type is not None else numpy_name)
        NUMPY_BY_NAME[name] = dtype
        _NAME_BY_NUMPY[dtype] = name


_fill_tables()


_SHORT_NAMES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64", "fp8": "float8_e4m3fn"}


def numpy_type(value: Any, what: str) -> np.dtype[np.generic]:
    """Converts to a numpy dtype; ``what`` is the message's prefix."""
    try:
        numpy_dtype: np.dtype[np.generic] = np.dtype(value)
    # np.dtype parses strings, lists and dicts, and reads other objects' dtype attribute: each raises different errors.
    except (TypeError, ValueError, SyntaxError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
        meant = _SHORT_NAMES.get(value) if isinstance(value, str) else None
        raise DtypeError(f"{what}{value!r:.80} is not a dtype" + (f"; write {meant!r}" if meant else "")) from error
    return numpy_dtype


def popped(kind: type[Group], options: dict[str, Any]) -> Group:
    """The value of a group of options that a call may have, such as a dataclass; they are removed from the others."""
    return kind(**{name: options.pop(name) for name in kind.__annotations__ if name in options})


def is_one_of(value: object, words: Iterable[str]) -> TypeGuard[str]:
    """Whether a value is a str and one of ``words``. Safe for arrays, which compare elementwise."""
    return isinstance(value, str) and value in tuple(words)


def one_of(value: object, words: Iterable[str], name: str) -> str:
    """Returns a value that is one of ``words``; ``name`` is the argument's. Raises ArgumentError, with the nearest word."""
    words = tuple(words)
    if is_one_of(value, words):
        return str(value)
    near = get_close_matches(str(value), words, 1)
    meant = f"; do you mean {near[0]!r}?" if near else ""
    raise ArgumentError(f"{name} must be one of {', '.join(words)}, not {value!r}{meant}")


def check_names(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function with its signature; an argument that it does not have is an ArgumentTypeError with the nearest name."""
    assert isinstance(function, FunctionType)
    code, name = function.__code__, function.__name__
    names = frozenset(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    is_method = code.co_varnames[:1] == ("self",)

    @functools.wraps(function)
    def call(*args: _P.args, **arguments: _P.kwargs) -> _R:
        if not arguments.keys() <= names:
            unknown = next(argument for argument in arguments if argument not in names)
            near = get_close_matches(unknown, sorted(names - {"self"}), 1)
            meant = f". Do you mean {near[0]!r}?" if near else ""
            where = f"{type(args[0]).__name__}." if is_method and args else ""
            raise ArgumentTypeError(f"{where}{name}: unknown argument {unknown!r}{meant}")
        result: _R = function(*args, **arguments)
        return result

    return call


def check_names_of_methods(cls: type[_C]) -> type[_C]:
    """The class, with :func:`check_names` on its public methods, and on those of its bases."""
    for base in cls.__mro__[:-1]:
        for name, method in list(vars(base).items()):
            is_checked = isinstance(method, FunctionType) and not hasattr(method, "__wrapped__")
            if is_checked and not name.startswith("_") and not method.__code__.co_flags & inspect.CO_VARKEYWORDS:
                setattr(base, name, check_names(method))
    return cls


def as_array(value: object, expected: str) -> NDArray[np.generic]:
    """Converts to a numpy array; ``expected`` begins the error message.

    Raises:
        ArgumentError: not an array, or an array with masked values, of which numpy would return the number below the mask.
        NoMemoryError: too large for memory.
    """
    if masked := count_masked(value):
        raise ArgumentError(
            f"{expected}, found {many(masked, 'masked value')}: masks are not stored. Pass array.filled(VALUE), or leave these "
            "values out"
        )
    try:
        return np.asarray(value)
    except MemoryError as error:
        raise NoMemoryError(f"{expected}, found {type(value).__name__} too large for memory") from error
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ArgumentError(f"{expected}, found {type(value).__name__}: {error}") from error


def count_masked(value: object) -> int:
    """Counts the masked values of a masked array, or of nested lists of arrays."""
    if is_masked_array(value):
        return int(np.count_nonzero(value.mask))
    if not isinstance(value, list | tuple) or set(map(type, value)) <= {int, float}:
        return 0
    return sum(count_masked(item) for item in value if isinstance(item, list | tuple) or is_masked_array(item))


def is_masked_array(value: object) -> TypeGuard[np.ma.MaskedArray]:
    """Returns whether a value is one of numpy's masked arrays.

    ``np.ma`` is not named at run time: numpy imports it at its first use, and a child that is forked during that import would
    wait for it without end. Who has a masked array has imported it.
    """
    masked_arrays = sys.modules.get("numpy.ma")
    return masked_arrays is not None and isinstance(value, getattr(masked_arrays, "MaskedArray", ()))


def listed(values: Iterable[Item], expected: str) -> list[Item]:
    """Converts an iterable to a list; ``expected`` begins the error message."""
    try:
        return list(values)
    except TypeError as error:
        raise ArgumentTypeError(f"{expected}, found {type(values).__name__}") from error
    except MemoryError as error:
        raise NoMemoryError(f"{expected}, found {type(values).__name__} too large for memory") from error


def switch(value: object, what: str) -> bool:
    """Converts a flag to bool. Also accepts integers and None, which other libraries use."""
    if value is not None and not isinstance(value, bool | np.bool_ | int | np.integer):
        raise ArgumentTypeError(f"{what}: expected true or false, found {value!r:.80}")
    return bool(value)


def dtype(value: DTypeLike) -> tuple[np.dtype[np.generic], str]:
    """Returns the requested numpy dtype and its safetensors name."""
    # Accepts torch dtypes, which print as "torch.float32".
    if type(value).__module__ == "torch" and str(value).startswith("torch."):
        value = str(value).removeprefix("torch.")
    numpy_dtype = numpy_type(value, "dtype=")
    name = _NAME_BY_NUMPY.get(numpy_dtype)
    if name is None or not numpy_dtype.isnative:
        raise DtypeError(
            f"dtype: expected float16, bfloat16, float32 or float64, found {numpy_dtype}, which is not supported"
        )
    return numpy_dtype, name


def elements(array: object) -> tuple[NDArray[np.uint8], str]:
    """Returns an array's elements as flat bytes, and their safetensors name. A view if contiguous and native, else a copy."""
    values = np.asarray(array)
    native = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
    return native.reshape(-1).view(np.uint8), name_of(native.dtype)


def stored(name: str) -> np.dtype[np.generic]:
    """The numpy dtype of a safetensors name."""
    return NUMPY_BY_NAME[name]


def pickled_array(
    data: bytearray, name: str, swapped: bool, shape: list[int], fortran: bool, over_buffer: bool
) -> NDArray[np.generic]:
    """Returns a numpy array over the memory of ``data``, for an array in a pickle.

    Its byte order is that of numpy's own unpickling: ``_frombuffer`` keeps the stored order, ``ndarray.__setstate__`` swaps bytes
    to native order.
    """
    dtype = NUMPY_BY_NAME[name]
    order: Literal["F", "C"] = "F" if fortran else "C"
    array: NDArray[np.generic] = np.ndarray(shape, dtype.newbyteorder("S") if swapped else dtype, data, order=order)
    return array.byteswap(inplace=True).view(dtype) if swapped and not over_buffer else array


def pickled_scalar(data: bytes, name: str, swapped: bool) -> object:
    """Returns a numpy scalar of a pickle."""
    dtype = NUMPY_BY_NAME[name]
    return np.frombuffer(data, dtype.newbyteorder("S") if swapped else dtype)[0]


def name_of(stored: np.dtype[np.generic], path: str | os.PathLike[str] | None = None) -> str:
    """The safetensors name of a stored dtype."""
    name = _NAME_BY_NUMPY.get(stored)
    if name is None:
        raise UnsupportedError(f"dtype {stored} is not supported", path=path)
    return name


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:/")
"""Start of a URL. One slash is enough, because ``Path("s3://bucket")`` is ``s3:/bucket``. A scheme has at least two characters."""


def local_path(value: Any, what: str = "path", remedy: str = "Copy the data to a local folder.") -> Path:
    """Returns the absolute path of a local file or folder, or of a ``file://`` URL. Expands ``~``; does not follow links.

    Args:
        value: a str or an ``os.PathLike`` of str. The path need not exist.
        what: the argument's name, for messages.
        remedy: advice for the case that ``value`` is a URL.

    Raises:
        ArgumentTypeError: another type. It is an ArgumentError and a TypeError.
        ArgumentError: another URL, an unknown ``~user``, or an invalid file name.
    """
    try:
        name = os.fspath(value)
    except TypeError:
        name = None
    if not isinstance(name, str):
        raise ArgumentTypeError(f"{what}: expected a path, found {type(value).__name__}")
    if not name:
        raise ArgumentError(f"{what}: expected a path, found an empty string")
    if (url := _URL.match(name)) and not name.startswith("/", url.end()):
        slashes, removed = ("//", "others") if url.group().lower() == "file:/" else ("/", "other one")
        why = f": pathlib.Path removes the {removed}. Pass a URL as a str" if isinstance(value, PurePath) else ""
        raise ArgumentError(f"{what}: expected {url.group()}{slashes}..., found {shown_path(name)} with one slash{why}")
    if url and not is_file_url(name):
        raise ArgumentError(f"{what}: expected a local path here, found the URL {shown_path(name)}. {remedy}")
    try:
        os.fsencode(name)
    except UnicodeEncodeError as error:
        raise ArgumentError(f"{what}: expected a path, found a lone surrogate at character {error.start}") from error
    if url:
        name = path_of_url(name, what)
    if "\0" in name:
        raise ArgumentError(f"{what}: expected a path, found a null byte at character {name.index(chr(0))}")
    try:
        path = Path(os.path.abspath(Path(name).expanduser()))  # noqa: PTH100 -- Path.resolve would follow links
    except (RuntimeError, KeyError) as error:  # "~user" of an unknown user
        raise ArgumentError(f"{what}: {shown_path(name)}: the user or home folder does not exist") from error
    try:
        path.lstat()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ArgumentError(f"{what}: {shown_path(name)}: the name is too long for this file system") from error
    return path


def is_file_url(value: object) -> bool:
    """Whether a value is the URL of a local file or folder."""
    return isinstance(value, str) and value[:7].lower() == "file://"


def is_url_elsewhere(value: object) -> TypeGuard[str]:
    """Whether a value is a URL of any kind, but not that of a local file or folder."""
    return isinstance(value, str) and "://" in value and not is_file_url(value)


def path_of_url(url: str, what: str) -> str:
    """Returns the path of a ``file://`` URL without a host, or with the host localhost. Decodes ``%20``.

    Raises:
        ArgumentError: another host.
    """
    host, slash, rest = url[7:].partition("/")
    if host.lower() not in ("", "localhost") or not slash:
        raise ArgumentError(f"{what}: expected file:///PATH with three slashes, or a path, found {shown_path(url)}")
    return os.fsdecode(unquote_to_bytes(os.fsencode(f"/{rest}")))


def shown_path(name: str) -> str:
    """Formats a path for messages. Removes user, password and query from URLs: they may be secrets."""
    if url := _URL.match(name):
        rest = re.split(r"[?#]", name[url.end() :], maxsplit=1)[0]
        host, slash, rest = rest.lstrip("/").partition("/")
        slashes = "/" * (len(name) - url.end() - len(name[url.end() :].lstrip("/")))
        name = f"{url.group()}{slashes}{host.rpartition('@')[2]}{slash}{rest}"
    return name if len(name) <= 200 else f"{name[:197]}..."


_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for suffix, base in (("B", 1000), ("iB", 1024), ("", 1024))
}


def size(value: int | str, what: str) -> int:
    """Converts a size to bytes: an integer, or a string such as ``"512MiB"`` or ``"4GB"``."""
    words = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value) if isinstance(value, str) else None
    if words is not None:
        unit = next((n for name, n in _UNITS.items() if name.lower() == words[2].lower()), None)
        nbytes = None if unit is None or len(words[1]) > 30 else int(float(words[1]) * unit)
    else:
        nbytes = int(value) if isinstance(value, int | np.integer) and not isinstance(value, bool) else None
    if nbytes is None or not 0 <= nbytes < 1 << 62:
        raise ArgumentError(f'{what}: expected a number of bytes or a size such as "512MiB", found {value!r:.80}')
    return nbytes


def minutes(value: int | str, what: str) -> int:
    """Converts a time limit to minutes: a number of minutes, or Slurm's ``M:S``, ``H:M:S``, ``D-H``, ``D-H:M``, ``D-H:M:S``."""
    text = str(value) if not isinstance(value, bool) else ""
    words = re.fullmatch(r"(?:(\d{1,5})-)?(\d{1,7})(?::(\d{1,4}))?(?::(\d{1,4}))?", text, re.ASCII)
    if words is None:
        whole_minutes = 0
    else:
        days, first, second, third = (int(word or 0) for word in words.groups())
        if words[1] is not None:
            seconds = ((days * 24 + first) * 60 + second) * 60 + third
        elif words[4] is not None:
            seconds = (first * 60 + second) * 60 + third
        else:
            seconds = first * 60 + second
        whole_minutes = -(-seconds // 60)
    if whole_minutes <= 0:
        raise ArgumentError(f'{what}: expected minutes, or a limit such as "4:00:00" or "1-12", found {value!r:.40}')
    return whole_minutes


def whole(
    value: Any,
    what: str,
    least: int = 0,
    most: int = (1 << 63) - 1,
    *,
    wrong_type: type[ArgumentError] = ArgumentError,
) -> int:
    """Returns a Python or numpy integer as int. Refuses bools.

    Raises:
        ArgumentError: the value is not in ``least`` to ``most``. ``wrong_type`` is raised if it is not an integer.
    """
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if is_integer and least <= value <= most:
        return int(value)
    expected = (
        f"of at least {least}" if most >= 1 << 60 and not (is_integer and value > most) else f"from {least} to {most}"
    )
    kind = ArgumentError if is_integer else wrong_type
    raise kind(f"{what}: expected an integer {expected}, found {value!r:.80}")


def check_progress(progress: object) -> None:
    """Raises ArgumentTypeError if ``progress`` is neither None nor a function."""
    if progress is not None and not callable(progress):
        raise ArgumentTypeError(f"progress: expected a function, found {type(progress).__name__}")


def real(value: object) -> float | None:
    """Returns a Python or numpy number as float. None: another type, a bool, or an integer outside of float64's range."""
    if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def refuse_bools(values: object, array: NDArray[np.generic], what: str) -> None:
    """Raises ArgumentError if a list of integers contains a bool. ``array``, made from the list, contains it as 0 or 1."""
    if isinstance(values, list | tuple) and array.dtype.kind in "iu" and (bad := _bool_in(values)) is not None:
        raise ArgumentError(f"{what}: expected integers, found {bad} among them")


def _bool_in(values: list[object] | tuple[object, ...]) -> bool | None:
    """The first bool of nested lists, which numpy reads as 0 or 1; None if there is none."""
    kinds = set(map(type, values))
    if kinds == {int}:
        return None
    if bool in kinds or np.bool_ in kinds:
        return next(bool(value) for value in values if isinstance(value, bool | np.bool_))
    nested = (value for value in values if isinstance(value, list | tuple))
    return next((flag for value in nested if (flag := _bool_in(value)) is not None), None)


def _integers(values: object, what: str) -> NDArray[np.int64]:
    array = as_array(values, f"{what}: expected an integer or an array of integers")
    refuse_bools(values, array, what)
    if array.size == 0 and array.dtype == np.float64 and not isinstance(values, np.ndarray):
        array = array.astype(np.int64)  # np.asarray([]) is float64
    if array.dtype == np.bool_:
        raise ArgumentError(
            f"{what}: expected integers, found booleans; np.flatnonzero(mask) turns a mask into integers"
        )
    if array.ndim > 16:
        raise ArgumentError(f"{what}: expected at most 16 dimensions, found {array.ndim}")
    if array.dtype.kind not in "iu":
        raise ArgumentError(f"{what}: expected an integer or an array of integers, found {array.dtype} {array.shape}")
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and array.size and array.max() > np.iinfo(np.int64).max:
        raise OutOfRangeError(f"{what}: {array.max()} is out of range")
    return np.require(array, np.int64, ["C", "A"])


def index(values: object, what: str) -> tuple[NDArray[np.int64], list[int]]:
    """Returns integers as one flat int64 array, and their original shape; a single integer has shape [1]."""
    array = _integers(values, what)
    return np.ascontiguousarray(array).reshape(-1), list(array.shape) or [1]


def flat(values: object, what: str) -> NDArray[np.int64]:
    """Returns a list of integers, or a single one, as a 1-D int64 array. An empty array may have any dtype."""
    if type(values) is np.ndarray and values.dtype == np.int64 and values.ndim == 1 and values.flags.c_contiguous:
        return values
    if type(values) is np.ndarray and values.shape == (0,):
        return np.empty(0, np.int64)
    array = np.atleast_1d(_integers(values, f"indices of {what}s"))
    if array.ndim != 1:
        raise ArgumentError(f"{what}: expected a list of integers, found an array of shape {array.shape}")
    return array


def members(values: object, count: int, what: str, path: Path | None = None) -> NDArray[np.int64]:
    """Returns indices into ``count`` members as one int64 array; negative indices count from the end.

    Raises:
        OutOfRangeError: an index is out of range. The error names ``path``.
        ArgumentError: the indices are not integers.
    """
    numbers = flat(values, what)
    low = numbers < 0
    if low.any():
        numbers = np.where(low, numbers + count, numbers)
    bad = (numbers < 0) | (numbers >= count)
    if bad.any():
        first = int(numbers[np.flatnonzero(bad)[0]])
        raise OutOfRangeError(f"{what} {first} is out of range: there are {count}", path=path)
    return np.ascontiguousarray(numbers)


def broadcast(examples: ArrayLike, tokens: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64], list[int]]:
    """Returns broadcast examples and tokens as flat int64 arrays, and their common shape."""
    e, t = _integers(examples, "examples"), _integers(tokens, "tokens")
    try:
        e, t = np.broadcast_arrays(e, t)
    except ValueError as error:
        raise ArgumentError(f"examples {e.shape} and tokens {t.shape} cannot be broadcast together") from error
    shape = list(e.shape) or [1]
    return np.ascontiguousarray(e).reshape(-1), np.ascontiguousarray(t).reshape(-1), shape


def shared(array: NDArray[Scalar]) -> NDArray[Scalar]:
    """Makes an array read-only that a store or a loop keeps and returns several times."""
    array.flags.writeable = False
    return array


def writable(out: object, dtype: np.dtype[np.generic], shape: list[int]) -> NDArray[np.generic]:
    """Returns a view of the caller's buffer as a numpy array. It must be C-contiguous, writable and of the exact size."""
    size = int(np.prod(shape, dtype=object)) * dtype.itemsize
    array = _share(out)
    expected = f"out: expected a writable C-contiguous buffer of {size} bytes for {tuple(shape)} {dtype}"
    if not array.flags.c_contiguous:
        raise ArgumentError(f"{expected}, found one with strides {array.strides}")
    if not array.flags.writeable:
        raise ArgumentError(f"{expected}, found a read-only one")
    if array.nbytes != size:
        raise ArgumentError(f"{expected}, found {array.nbytes} bytes, {array.shape} {array.dtype}")
    # uint8 buffers accept any dtype; other arrays must have the output's dtype.
    if array.dtype not in (dtype, np.dtype(np.uint8)):
        raise DtypeError(f"out: expected {dtype}, found {array.dtype}; dtype= converts while copying")
    return array


def _share(out: Any) -> NDArray[np.generic]:
    """Returns a numpy array over the same memory; never a copy."""
    if isinstance(out, np.ndarray):
        return out
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(out, torch.Tensor):
        if out.device.type != "cpu":
            raise ArgumentError(
                f"out: expected a CPU tensor, found a tensor on {out.device}. Pinned memory makes the copy to a GPU fast."
            )
        if not out.is_contiguous():
            raise ArgumentError("out: expected a contiguous tensor")
        name = str(out.dtype).removeprefix("torch.")
        flat: NDArray[np.generic] = out.detach().view(-1).view(torch.uint8).numpy()
        try:
            return flat.view(np.dtype(name)) if name != "uint8" else flat
        except TypeError as error:
            raise DtypeError(f"out: expected a dtype that numpy supports, found torch.{name}") from error
    try:
        return np.asarray(memoryview(out))
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"out: expected a writable buffer, found {type(out).__name__}") from error


def many(n: int, what: str, one: str = "", several: str = "", *, plural: str = "") -> str:
    """A count with its noun: 1 error, 2 errors; and with the verb for one and for several: 1 error is, 2 errors are.

    ``plural``: of a noun that adds more than an s, such as ``"batches"``.
    """
    verb = one if n == 1 else several
    return f"{n:,} {what if n == 1 else plural or f'{what}s'}{verb and ' '}{verb}"


def counted(n: int, nouns: str) -> str:
    """A count with a noun that is given in the plural: 1 file, 2 files; 1 address, 2 addresses."""
    return many(n, nouns.removesuffix("es" if nouns.endswith("sses") else "s"), plural=nouns)


def shown_bytes(count: int) -> str:
    """Formats bytes with a unit: 3.6 GB."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")
