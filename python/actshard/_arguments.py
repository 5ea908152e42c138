"""What users may pass for indices, dtypes and outputs, made into what the native half takes.

The native half recognises the plain cases by itself (an int, an int64 array, a numpy output of the right type) and
calls these functions, by name, for all others.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

import actshard._native as _native
from actshard.errors import (
    ArgumentError,
    ArgumentTypeError,
    DtypeError,
    NoMemoryError,
    OutOfRangeError,
    UnsupportedError,
)

NUMPY_BY_NAME: dict[str, np.dtype[Any]] = {}
"""numpy (or ml_dtypes) type of each safetensors name that has one."""

_NAME_BY_NUMPY: dict[np.dtype[Any], str] = {}


def _fill_tables() -> None:
    import ml_dtypes

    for name, numpy_name, _ in _native.dtypes():
        if numpy_name is None:
            continue
        made = getattr(ml_dtypes, numpy_name, None) or getattr(np, numpy_name, None)
        dtype = np.dtype(made if made is not None else numpy_name)
        NUMPY_BY_NAME[name] = dtype
        _NAME_BY_NUMPY[dtype] = name


_fill_tables()


def numpy_type(asked: Any, what: str) -> np.dtype[Any]:
    """Whatever says what a numpy type is, as one; ``what`` says in the message what was asked for."""
    try:
        made: np.dtype[Any] = np.dtype(asked)
    # numpy parses texts, lists and dicts, and asks other objects for their dtype: each fails in its own way.
    except (TypeError, ValueError, SyntaxError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
        raise DtypeError(f"{what}{asked!r:.80} is no numpy type") from error
    return made


def is_one_of(value: Any, words: Iterable[str]) -> bool:
    """Whether a value is one of some words. Arrays, which compare element by element, are none."""
    return isinstance(value, str) and value in tuple(words)


def as_array(value: Any, expected: str) -> NDArray[Any]:
    """A value as numpy has it; ``expected`` says in messages what it should have been."""
    try:
        return np.asarray(value)
    except MemoryError as error:
        raise NoMemoryError(f"{expected}, found {type(value).__name__} of more than there is memory for") from error
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ArgumentError(f"{expected}, found {type(value).__name__}: {error}") from error


def listed(values: Iterable[Any], expected: str) -> list[Any]:
    """What can be iterated, as a list; ``expected`` says in messages what it should have been."""
    try:
        return list(values)
    except TypeError as error:
        raise ArgumentTypeError(f"{expected}, found {type(values).__name__}") from error
    except MemoryError as error:
        raise NoMemoryError(f"{expected}, found {type(values).__name__} of more than there is memory for") from error


def switch(value: Any, what: str) -> bool:
    """A switch: true, false, or the number or None that other libraries say it by."""
    if value is not None and not isinstance(value, bool | np.bool_ | int | np.integer):
        raise ArgumentTypeError(f"{what}: expected true or false, found {value!r:.80}")
    return bool(value)


def dtype(asked: DTypeLike) -> tuple[np.dtype[Any], str]:
    """The numpy type asked for, and its safetensors name."""
    # torch dtypes print as "torch.float32"; users hand them over without thinking, and the meaning is plain.
    if type(asked).__module__ == "torch" and str(asked).startswith("torch."):
        asked = str(asked).removeprefix("torch.")
    found = numpy_type(asked, "dtype=")
    name = _NAME_BY_NUMPY.get(found)
    if name is None or not found.isnative:
        raise DtypeError(f"rows cannot be given as {found}: ask for float16, bfloat16, float32 or float64")
    return found, name


def elements(array: Any) -> tuple[NDArray[np.uint8], str]:
    """An array's elements as flat bytes, copied only if they do not lie together in native order, and their safetensors name."""
    found = np.asarray(array)
    native = np.ascontiguousarray(found, found.dtype.newbyteorder("="))
    return native.reshape(-1).view(np.uint8), name_of(native.dtype)


def stored(name: str) -> np.dtype[Any]:
    """The numpy type of a safetensors name."""
    return NUMPY_BY_NAME[name]


def pickled_array(
    data: bytearray, name: str, swapped: bool, shape: list[int], fortran: bool, over_buffer: bool
) -> NDArray[Any]:
    """A numpy array of a pickle, over ``data``.

    In the byte order in which numpy's own unpickling gives it: ``_frombuffer`` keeps the stored one, ``ndarray.__setstate__`` turns
    the bytes of numbers around.
    """
    dtype = NUMPY_BY_NAME[name]
    order: Any = "F" if fortran else "C"
    made: NDArray[Any] = np.ndarray(shape, dtype.newbyteorder("S") if swapped else dtype, data, order=order)
    return made.byteswap(inplace=True).view(dtype) if swapped and not over_buffer else made


def pickled_scalar(data: bytes, name: str, swapped: bool) -> Any:
    """A numpy scalar of a pickle."""
    dtype = NUMPY_BY_NAME[name]
    return np.frombuffer(data, dtype.newbyteorder("S") if swapped else dtype)[0]


def name_of(stored: np.dtype[Any], path: str | os.PathLike[str] | None = None) -> str:
    """The safetensors name of a stored type."""
    name = _NAME_BY_NUMPY.get(stored)
    if name is None:
        raise UnsupportedError(f"elements of {stored} are not read", path=path)
    return name


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:/")
"""A URL's beginning. ``Path("s3://bucket")`` is ``s3:/bucket``, so one slash is enough; a scheme has two letters at least."""


def local_path(value: Any, what: str = "path") -> Path:
    """The absolute path of a local file or folder, with ``~`` expanded and links not followed.

    Args:
        value: a str or an ``os.PathLike`` of str. Nothing needs to be there.
        what: the argument's name, for messages.

    Raises:
        ArgumentTypeError: another type. It is an ArgumentError and a TypeError.
        ArgumentError: a URL, an unknown ``~user``, or a name that no local file can have.
    """
    try:
        name = os.fspath(value)
    except TypeError:
        name = None
    if not isinstance(name, str):
        raise ArgumentTypeError(f"{what}: expected a path, found {type(value).__name__}")
    if not name:
        raise ArgumentError(f"{what}: expected a path, found an empty string")
    if _URL.match(name):
        raise ArgumentError(
            f"{what}: remote paths are not supported: {_shortened(name)}; copy the data to a local folder"
        )
    try:
        os.fsencode(name)
    except UnicodeEncodeError as error:
        raise ArgumentError(f"{what}: expected a path, found a lone surrogate at character {error.start}") from error
    if "\0" in name:
        raise ArgumentError(f"{what}: expected a path, found a null byte at character {name.index(chr(0))}")
    try:
        path = Path(os.path.abspath(Path(name).expanduser()))  # noqa: PTH100 -- Path.resolve would follow links
    except (RuntimeError, KeyError) as error:  # "~user" of no user
        raise ArgumentError(f"{what}: {_shortened(name)}: there is no such user or home folder") from error
    try:
        path.lstat()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ArgumentError(f"{what}: {_shortened(name)}: the name is too long for this file system") from error
    return path


def _shortened(name: str) -> str:
    return name if len(name) <= 200 else f"{name[:197]}..."


_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for suffix, base in (("B", 1000), ("iB", 1024), ("", 1024))
}


def size(value: int | str, what: str) -> int:
    """A number of bytes, given as one or in words: ``"512MiB"``, ``"4GB"``."""
    words = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value) if isinstance(value, str) else None
    if words is not None:
        unit = next((n for name, n in _UNITS.items() if name.lower() == words[2].lower()), None)
        found = None if unit is None or len(words[1]) > 30 else int(float(words[1]) * unit)
    else:
        found = int(value) if isinstance(value, int | np.integer) and not isinstance(value, bool) else None
    if found is None or not 0 <= found < 1 << 62:
        raise ArgumentError(f'{what}: expected a number of bytes or a size such as "512MiB", found {value!r:.80}')
    return found


def whole(
    value: Any,
    what: str,
    least: int = 0,
    most: int = (1 << 63) - 1,
    *,
    wrong_type: type[ArgumentError] = ArgumentError,
) -> int:
    """An integer of Python's or numpy's, from ``least`` to ``most``; True and False are none.

    Raises:
        ArgumentError: it is out of these bounds. ``wrong_type`` is raised for what is not an integer.
    """
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if is_integer and least <= value <= most:
        return int(value)
    expected = f"from {least} on" if most >= 1 << 60 else f"from {least} to {most}"
    kind = ArgumentError if is_integer else wrong_type
    raise kind(f"{what}: expected an integer {expected}, found {value!r:.80}")


def _integers(values: Any, what: str) -> NDArray[np.int64]:
    array = as_array(values, f"{what}: expected an integer or an array of integers")
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


def index(values: Any, what: str) -> tuple[NDArray[np.int64], list[int]]:
    """Integers as one flat int64 array, and the shape they had; a single integer has the shape (1,)."""
    array = _integers(values, what)
    return np.ascontiguousarray(array).reshape(-1), list(array.shape) or [1]


def flat(values: Any, what: str) -> NDArray[np.int64]:
    """A list of integers, or a single one, as one int64 array; of no particular type if it is empty."""
    if type(values) is np.ndarray and values.dtype == np.int64 and values.ndim == 1 and values.flags.c_contiguous:
        return values
    if type(values) is np.ndarray and values.shape == (0,):
        return np.empty(0, np.int64)
    array = np.atleast_1d(_integers(values, f"indices of {what}s"))
    if array.ndim != 1:
        raise ArgumentError(f"{what}: expected a list of integers, found an array of shape {array.shape}")
    return array


def members(values: Any, count: int, what: str, path: Path | None = None) -> NDArray[np.int64]:
    """Indices of ``count`` members as one int64 array; negative ones count from the end.

    Raises:
        OutOfRangeError: there is no such member. It names ``path``.
        ArgumentError: they are not integers.
    """
    made = flat(values, what)
    low = made < 0
    if low.any():
        made = np.where(low, made + count, made)
    bad = (made < 0) | (made >= count)
    if bad.any():
        first = int(made[np.flatnonzero(bad)[0]])
        raise OutOfRangeError(f"{what} {first}: there are {count}", path=path)
    return np.ascontiguousarray(made)


def broadcast(examples: Any, tokens: Any) -> tuple[NDArray[np.int64], NDArray[np.int64], list[int]]:
    """Examples and tokens broadcast together, flat, and the shape they make."""
    e, t = _integers(examples, "examples"), _integers(tokens, "tokens")
    try:
        e, t = np.broadcast_arrays(e, t)
    except ValueError as error:
        raise ArgumentError(f"examples {e.shape} and tokens {t.shape} cannot be broadcast together") from error
    shape = list(e.shape) or [1]
    return np.ascontiguousarray(e).reshape(-1), np.ascontiguousarray(t).reshape(-1), shape


def writable(out: Any, dtype: np.dtype[Any], shape: list[int]) -> NDArray[Any]:
    """The caller's buffer as a C-contiguous writable numpy array that holds exactly the output."""
    size = int(np.prod(shape, dtype=object)) * dtype.itemsize
    array = _share(out)
    expected = f"out: expected a writable C-contiguous buffer of {size} bytes for {tuple(shape)} {dtype}"
    if not array.flags.c_contiguous:
        raise ArgumentError(f"{expected}, found one with strides {array.strides}")
    if not array.flags.writeable:
        raise ArgumentError(f"{expected}, found a read-only one")
    if array.nbytes != size:
        raise ArgumentError(f"{expected}, found {array.nbytes} bytes, {array.shape} {array.dtype}")
    # Raw bytes take any type; an array of numbers has said which numbers it wants.
    if array.dtype not in (dtype, np.dtype(np.uint8)):
        raise DtypeError(f"out: expected {dtype}, found {array.dtype}; dtype= converts while copying")
    return array


def _share(out: Any) -> NDArray[Any]:
    """A numpy array over the same memory; never a copy."""
    if isinstance(out, np.ndarray):
        return out
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(out, torch.Tensor):
        if out.device.type != "cpu":
            raise ArgumentError(
                f"out: expected memory of the CPU, found a tensor on {out.device}; a pinned one copies fast"
            )
        if not out.is_contiguous():
            raise ArgumentError("out: expected a contiguous tensor")
        name = str(out.dtype).removeprefix("torch.")
        flat: NDArray[Any] = out.detach().view(-1).view(torch.uint8).numpy()
        try:
            return flat.view(np.dtype(name)) if name != "uint8" else flat
        except TypeError as error:
            raise DtypeError(f"out: a tensor of {name} has no numpy type") from error
    try:
        return np.asarray(memoryview(out))
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"out: expected a writable buffer, found {type(out).__name__}") from error
