"""Dataclasses are read from JSON as their annotations describe them; everything else is an error that names the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import actshard
from actshard.base._schema import Amount, Count, FileName, MismatchError, Rule, at_least, json_values, read


class Range(NamedTuple):
    first: Amount
    end: Amount


@dataclass(frozen=True)
class Inner:
    name: FileName
    ranges: tuple[Range, ...] = ()


@dataclass(frozen=True)
class Other:
    error: str


@dataclass(frozen=True)
class Outer:
    folder: Path
    mode: Literal["fast", "slow", 3]
    inner: Inner | Other
    any: Any
    sizes: Mapping[str, Count] = field(default_factory=dict)
    version: int | str | None = None
    flag: bool = False
    even: Annotated[tuple[int, ...], Rule("an even number of integers", lambda values: len(values) % 2 == 0)] = ()
    pair: tuple[str, Annotated[int, at_least(-3)]] | None = None

    def __post_init__(self) -> None:
        if self.flag and self.version is None:
            raise MismatchError("a version, because of the flag", self.version, "version")


GOOD: dict[str, Any] = {"folder": "/a", "mode": "fast", "inner": {"name": "a/b"}, "any": None}
WHOLE = GOOD | {
    "inner": {"name": "ä", "ranges": [[0, 5], [5, 5]]},
    "sizes": {"x": 1},
    "version": "v",
    "flag": True,
    "even": [1, -2],
    "pair": ["p", -3],
}


def test_values_come_back_as_they_were() -> None:
    for values in (GOOD, WHOLE, GOOD | {"inner": {"error": "e"}, "mode": 3, "version": -1}):
        outer = read(Outer, json.loads(json.dumps(values)), Path("f.json"))
        written = json_values(outer)
        assert read(Outer, written, Path("f.json")) == outer
        assert {name: written[name] for name in values if name != "inner"} == {
            name: value for name, value in values.items() if name != "inner"
        }
        assert json.loads(json.dumps(written)) == written
    outer = read(Outer, WHOLE, Path("f.json"))
    assert (outer.folder, outer.even) == (Path("/a"), (1, -2))
    assert isinstance(outer.inner, Inner)
    assert outer.inner.ranges[0].end == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"folder": "a"}, 'folder\': expected an absolute path, found "a"'),
        ({"folder": "/a\0"}, "folder': expected an absolute path"),
        ({"folder": "/\ud800"}, "folder': expected an absolute path"),
        ({"mode": "fats"}, "mode': expected one of fast, slow, 3, found"),
        ({"mode": 3.0}, "mode': expected one of fast, slow, 3, found 3.0"),
        ({"inner": 5}, "inner': expected an object, found 5"),
        ({"inner": {}}, "inner.name': expected the name of a file below a folder, found nothing"),
        ({"inner": {"name": "../x"}}, "inner.name': expected the name of a file below a folder"),
        (
            {"inner": {"name": "x", "ranges": [[0, 1], [1]]}},
            "inner.ranges[1]': expected a list of 2 values [first, end]",
        ),
        (
            {"inner": {"name": "x", "ranges": [[0, -1]]}},
            "inner.ranges[0][1]': expected an integer of at least 0, found -1",
        ),
        ({"inner": {"error": None}}, "inner.error': expected a string, found null"),
        ({"sizes": []}, "sizes': expected an object"),
        ({"sizes": {"x": 0}}, "sizes.x': expected an integer of at least 1, found 0"),
        ({"sizes": {"x": True}}, "sizes.x': expected an integer of at least 1, found true"),
        ({"sizes": {"x": 1 << 62}}, "sizes.x': expected an integer of at least 1"),
        ({"version": 1.5}, "version': expected an integer or a string or null, found 1.5"),
        ({"version": "\udc80"}, "version': expected an integer or a string or null"),
        ({"flag": 1}, "flag': expected true or false, found 1"),
        ({"flag": True}, "version': expected a version, because of the flag, found null"),
        ({"even": [1]}, "even': expected an even number of integers, found [1]"),
        ({"even": [1, "2"]}, 'even[1]\': expected an integer, found "2"'),
        ({"even": "12"}, 'even\': expected a list, found "12"'),
        ({"pair": ["p", -4]}, "pair[1]': expected an integer of at least -3, found -4"),
        ({"flags": 1}, "flags': expected no such field, found 1. Do you mean 'flag'?"),
    ],
)
def test_a_wrong_value_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(actshard.FormatError) as refused:
        read(Outer, GOOD | change, Path("f.json"), "arguments")
    assert str(refused.value).startswith(f"f.json: field 'arguments.{message}")


@pytest.mark.parametrize("name", GOOD)
def test_a_missing_value_is_named(name: str) -> None:
    with pytest.raises(actshard.FormatError, match=rf"field '{name}': expected .*, found nothing"):
        read(Outer, {key: value for key, value in GOOD.items() if key != name}, Path("f.json"))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*WHOLE, "name", "ranges"]), inner),
    max_leaves=8,
)


@given(st.sampled_from([*WHOLE]), VALUES)
def test_any_value_is_read_or_refused_in_one_line(name: str, value: Any) -> None:
    try:
        outer = read(Outer, WHOLE | {name: value}, Path("f.json"))
    except actshard.FormatError as error:
        text = str(error)
    else:
        assert read(Outer, json_values(outer), Path("f.json")) == outer
        return
    assert text.startswith("f.json: field '")
    assert len(text.splitlines()) == 1
