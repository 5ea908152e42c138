"""The order of the examples of a draft, and whether other values are in that order.

A list that has as many values as there are examples need not have their order: examples are sorted by their numbers, and a list may
be in the order in which its program wrote them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_IDS = re.compile(
    r"(?:^|[^a-z])(?:ids?|idx|index|i|n|no|number|example|sample|prompt|row|item|key|file|filename|path|name)$|^(?:Unnamed: 0)?$",
    re.IGNORECASE,
)
"""Names of fields that may number or name the examples. pandas writes its index without a name, and reads it as "Unnamed: 0"."""
_SHOWN = 4


@dataclass(frozen=True)
class ExampleOrder:
    """The examples in order.

    Attributes:
        numbers: their numbers.
        places: their places by the names of files and keys.
        doubt: why a list with a value for each example may have another order; empty: it has none.
    """

    numbers: list[int]
    places: Mapping[str, int]
    doubt: str = ""

    @classmethod
    def of(cls, numbers: Sequence[object], names: Sequence[str] = (), *, is_as_written: bool = False) -> ExampleOrder:
        """The order by number.

        Args:
            numbers: the numbers of the examples, in any order.
            names: for each number, the name of its file or key.
            is_as_written: whether the numbers are in the order in which a program wrote them.
        """
        known = [number for number in numbers if isinstance(number, int)]
        places: dict[str, int] = {}
        for place, (_, name) in enumerate(sorted(zip(known, names, strict=False))):
            file = name.rpartition("/")[2]
            places |= dict.fromkeys((name, file, file.partition(".")[0]), place)
        ordered = sorted(known)
        doubt = ""
        if ordered != list(range(ordered[0] if ordered else 0, len(ordered) + (ordered[0] if ordered else 0))):
            doubt = f"the numbers of the examples have gaps ({_format_numbers(ordered)})"
        elif ordered and ordered[0] > 1:
            doubt = f"the examples are numbered from {ordered[0]}"
        elif is_as_written and known != ordered:
            doubt = f"the file has the examples in another order ({_format_numbers(known)})"
        return cls(ordered, places, doubt)

    def joined(self, columns: Mapping[str, Sequence[object]]) -> tuple[str, str]:
        """The field that numbers the examples, if its values are in another order; and why no field shows the order.

        Args:
            columns: fields with a value for each example.
        """
        for name, values in columns.items():
            integers = [value for value in values if type(value) is int]
            if not _IDS.search(name) or len(set(integers)) != len(values):
                continue
            if integers == self.numbers:
                return "", ""
            if sorted(integers) == self.numbers:
                unnamed = "its column without a name has the examples in another order; with a name it can be 'by'"
                return name, "" if name else unnamed
            if integers != sorted(integers):
                return "", f"its {name!r} is not in ascending order, and has other numbers than the examples"
        for name, values in columns.items():
            places = [self.places.get(value) if isinstance(value, str) else None for value in values]
            known = [place for place in places if place is not None]
            if len(set(known)) == len(places) > 0:
                return "", "" if known == sorted(known) else f"its {name!r} names the examples in another order"
        return "", self.doubt


def _format_numbers(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    return f"{shown}, ..." if len(numbers) > _SHOWN else shown
