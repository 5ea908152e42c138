"""Files of ``torch.save`` with other things next to the tensors: an entry is refused, not the file, and nothing is imported or run.

The files are pickled by Python's own pickler, in each protocol that torch accepts.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import functools
import io
import pickle
import sys
import types
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import actshard
from actshard.base.containers import RefusedObject, TorchFile, read_torch
from actshard.base.errors import ActshardError, UnsafePickleError, UnsupportedError
from actshard.base.location import Location

STATES = np.random.default_rng(7).standard_normal((5, 8)).astype(np.float32)


@dataclass(frozen=True)
class Name:
    """A global of torch, which is not installed."""

    module: str
    name: str

    def __call__(self) -> None:
        """Pickle calls nothing, but checks for a callable."""


@dataclass(frozen=True)
class Storage:
    key: str
    count: int


class Tensor:
    """Pickled as torch pickles a float32 tensor."""

    def __init__(self, key: str, array: np.ndarray) -> None:
        self.key, self.array = key, array

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (Storage(self.key, self.array.size), 0, self.array.shape, (self.array.shape[1], 1))
        return Name("torch._utils", "_rebuild_tensor_v2"), (*arguments, False, collections.OrderedDict())


class TorchPickler(pickle._Pickler):  # type: ignore[name-defined]  # Python's own, which typeshed leaves out
    dispatch: ClassVar = {**pickle._Pickler.dispatch}  # type: ignore[attr-defined]  # as above

    def persistent_id(self, value: object) -> Any:
        if isinstance(value, Storage):
            return "storage", Name("torch", "FloatStorage"), value.key, "cpu", value.count
        return None

    def save_name(self, value: Name) -> None:
        self.write(f"c{value.module}\n{value.name}\n".encode())
        self.memoize(value)

    dispatch[Name] = save_name


def put(path: Path, value: Any, protocol: int) -> None:
    """Writes an archive; its tensors are named "0"."""
    pickled = io.BytesIO()
    TorchPickler(pickled, protocol).dump(value)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickled.getvalue())
        archive.writestr("a/data/0", STATES.tobytes())


class Settings:
    def __init__(self) -> None:
        self.path, self.rate = PurePosixPath("/x"), 0.5


class Slots:
    __slots__ = ("a",)

    def __init__(self) -> None:
        self.a = 1


class Output(collections.OrderedDict[str, Any]):
    """As transformers' ModelOutput: items follow, and a state."""


class Rows(list[int]):
    pass


class Names(set[str]):
    pass


class Point(NamedTuple):
    x: int


class Kind(enum.Enum):
    A = 1


@dataclass
class Config:
    sizes: list[int] = field(default_factory=lambda: [1, 2])


class Reduced:
    def __reduce__(self) -> tuple[Any, ...]:
        return collections.deque, ([1, 2],), {"a": 1}, iter([3]), iter([("k", 4)])


class OwnArray(np.ndarray):  # type: ignore[type-arg]  # any
    pass


def nested_defaultdict() -> Any:
    tree: Any = collections.defaultdict(functools.partial(collections.defaultdict, list))
    tree["a"]["b"].append(1)
    return tree


READ: dict[str, tuple[Callable[[], Any], Any]] = {
    "defaultdict": (lambda: collections.defaultdict(list, {"a": [1]}), {"a": [1]}),
    "defaultdict without a factory": (lambda: collections.defaultdict(None, {1: 2}), {1: 2}),
    "defaultdict of an own factory": (lambda: collections.defaultdict(Settings, {1: 2}), {1: 2}),
    "nested defaultdict": (nested_defaultdict, {"a": {"b": [1]}}),
    "ordered dict": (lambda: collections.OrderedDict(a=1), {"a": 1}),
    "counter": (lambda: collections.Counter("aab"), {"a": 2, "b": 1}),
    "tuple keys": (lambda: {("resid", 3): 1, (0, None): 2}, {("resid", 3): 1, (0, None): 2}),
    "set": (lambda: {1, 2}, {1, 2}),
    "bfloat16": (lambda: np.ones(3, ml_dtypes.bfloat16), [1, 1, 1]),
    "float8": (lambda: np.ones(3, ml_dtypes.float8_e4m3fn), [1, 1, 1]),
}
"""Values that are built."""

REFUSED: dict[str, Callable[[], Any]] = {
    "path": lambda: PurePosixPath("/a/b"),
    "time": lambda: datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    "decimal": lambda: decimal.Decimal("1.5"),
    "complex": lambda: 1j,
    "range": lambda: range(3),
    "namespace": lambda: types.SimpleNamespace(a=1),
    "object": Settings,
    "object with slots": Slots,
    "dataclass": Config,
    "dict of an own class": lambda: Output(a=1, b=[2]),
    "list of an own class": lambda: Rows([1, 2, 3]),
    "set of an own class": lambda: Names(["a"]),
    "named tuple": lambda: Point(3),
    "enum": lambda: Kind.A,
    "items after a call": Reduced,
    "partial": lambda: functools.partial(int, "7"),
    "class": lambda: Settings,
    "class that tensors need": lambda: np.ndarray,
    "function": lambda: put,
    "bytearray": lambda: Name("builtins", "bytearray"),
    "UserDict": lambda: collections.UserDict(a=1),
    "object array": lambda: np.array([None, {}], object),
    "structured array": lambda: np.zeros(2, [("a", "<f4")]),
    "times": lambda: np.zeros(2, "M8[s]"),
    "strings": lambda: np.array(["a", "b"]),
    "long doubles": lambda: np.zeros(2, np.longdouble),
    "complex128": lambda: np.zeros(2, np.complex128),
    "int4": lambda: np.zeros(2, ml_dtypes.int4),
    "array of an own class": lambda: np.zeros(2).view(OwnArray),
    "masked array": lambda: np.ma.masked_array([1, 2], [True, False]),
}
"""Values that are not built."""


def read(path: Path) -> TorchFile:
    (file,) = read_torch([Location.at(path)])
    return file


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", READ)
def test_plain_values_next_to_a_tensor_are_read(name: str, protocol: int, tmp_path: Path) -> None:
    make, expected = READ[name]
    put(tmp_path / "a.pt", {"h": Tensor("0", STATES), "other": make()}, protocol)
    file = read(tmp_path / "a.pt")
    assert np.array_equal(file.array(file.find(["h"])), STATES)
    other = file.find(["other"])
    found = file.array(other).astype(np.float32).tolist() if isinstance(expected, list) else other
    assert (found, file.refused) == (expected, {})


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", REFUSED)
def test_another_object_is_refused_and_the_tensor_next_to_it_is_read(name: str, protocol: int, tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    for i in range(2):
        put(folder / f"{i}.pt", {"meta": [REFUSED[name]()], "h": Tensor("0", STATES), "n": 3}, protocol)
    file = read(folder / "0.pt")
    assert np.array_equal(file.array(file.find(["h"])), STATES)
    assert file.find(["n"]) == 3
    refused = file.find(["meta", "0"])
    assert isinstance(refused, RefusedObject)
    assert file.refused == {"meta.0": refused}
    with pytest.raises((UnsafePickleError, UnsupportedError)) as caught:
        file.array(refused)
    assert refused.name in str(caught.value)
    layout = {"version": 1, "activations": {"files": "{example}.pt", "tensor": "h", "axes": ["token", "dim"]}}
    store = actshard.open(folder, layout=layout)
    assert np.array_equal(store.sequence(1, 0), STATES)
    report = actshard.verify(folder, layout=layout, deep=True)
    assert report.ok
    assert report.codes() <= {"unread-object", "duplicate-example"}
    assert [str(finding.path.name) for finding in report.findings if finding.code == "unread-object"] == [
        "0.pt",
        "1.pt",
    ]
    layout["activations"]["tensor"] = "meta"  # type: ignore[index]  # a dict
    with pytest.raises(ActshardError):
        actshard.open(folder, layout=layout)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("key", [Kind.A, PurePosixPath("a"), frozenset([1]), ((1, 2), 3), tuple(range(99))], ids=repr)
def test_a_key_that_is_not_built_refuses_no_other(key: Any, protocol: int, tmp_path: Path) -> None:
    put(tmp_path / "a.pt", {key: 1, "h": Tensor("0", STATES)}, protocol)
    file = read(tmp_path / "a.pt")
    assert np.array_equal(file.array(file.find(["h"])), STATES)
    assert [isinstance(found, RefusedObject) for found in file.value] == [True, False]


def test_tensors_under_tuples_are_layers(tmp_path: Path) -> None:
    put(tmp_path / "a.pt", {("resid", layer): Tensor("0", STATES) for layer in (3, 12)}, 2)
    layout = {"version": 1, "activations": {"files": "a.pt", "tensor": "('resid', {layer})", "axes": ["row", "dim"]}}
    store = actshard.open(tmp_path, layout=layout)
    assert store.layers == (3, 12)
    assert np.array_equal(store.gather(12, np.arange(5), 0), STATES)


def test_no_module_is_imported_for_an_object(tmp_path: Path) -> None:
    for module in ("this", "antigravity", "torch.utils.backdoor"):
        assert module not in sys.modules
        put(tmp_path / "a.pt", {"x": Name(module, "x.y"), "h": Tensor("0", STATES)}, 2)
        assert list(read(tmp_path / "a.pt").refused) == ["x"]
        assert module not in sys.modules


def test_bytes_after_the_pickle_of_an_archive_are_refused(tmp_path: Path) -> None:
    pickled = pickle.dumps({"a": 1}, 2)
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", pickled * 2)
    with pytest.raises(ActshardError, match=f"expected the end of the pickle, found {len(pickled)} more bytes"):
        read(tmp_path / "a.pt")


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "name", [name for name in READ if "own" not in name and name not in ("set", "nested defaultdict")]
)
def test_shards_of_pickle_take_plain_dicts_of_other_classes(name: str, protocol: int, tmp_path: Path) -> None:
    from actshard._native import load_pickle

    make, expected = READ[name]
    found = load_pickle(pickle.dumps({"x": make()}, protocol))["x"]
    assert (np.asarray(found).astype(np.float32).tolist() if isinstance(expected, list) else found) == expected


@pytest.mark.parametrize("name", ["path", "object", "named tuple", "UserDict", "class"])
def test_shards_of_pickle_refuse_other_classes_by_name(name: str) -> None:
    from actshard._native import load_pickle

    with pytest.raises(UnsafePickleError, match="names the global"):
        load_pickle(pickle.dumps(REFUSED[name](), 4))
