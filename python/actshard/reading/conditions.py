"""Conditions as texts, such as ``label == 1 and verb in ("run", "walk")``, become pyarrow expressions. Nothing runs as Python."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from actshard.base import _arguments
from actshard.base.errors import ArgumentError

if TYPE_CHECKING:
    import pyarrow.compute as pc

_BINARY: dict[type[ast.operator], Callable[[pc.Expression, pc.Expression], pc.Expression]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: left.cast("float64") / right.cast("float64"),
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[pc.Expression, pc.Expression], pc.Expression]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_MOST_CHARACTERS = 10_000
_QUOTED = re.compile(r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|`([^`]+)`""")
"""A text, which is kept, or a name in backquotes."""


def parse(text: str, columns: Sequence[str]) -> pc.Expression:
    """The pyarrow expression of a condition.

    It has names of columns (others than identifiers in backquotes), numbers, texts, ``True``, ``False``, ``None``, comparisons,
    ``in``, ``is None``, ``and``, ``or``, ``not``, ``+ - * /`` and parentheses, with the precedence of Python.

    Raises:
        ArgumentError: the text is no such condition, or names a column that is not there.
    """
    if len(text) > _MOST_CHARACTERS:
        raise ArgumentError(
            f"filter: expected a condition of at most {_MOST_CHARACTERS:,} characters, found {len(text):,}"
        )
    quoted: list[str] = []

    def placeholder(match: re.Match[str]) -> str:
        if match[2] is None:
            return match[0]
        quoted.append(match[2])
        return f"__column_{len(quoted) - 1}__"

    try:
        tree = ast.parse(_QUOTED.sub(placeholder, text).strip(), mode="eval")
        names = {f"__column_{i}__": name for i, name in enumerate(quoted)}
        return _ConditionReader(columns, names).expression(tree.body)
    except ArgumentError:
        raise
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        example = 'store.filter("label == 1")'
        raise ArgumentError(f"filter: {text!r:.200} is no condition ({reason}). Write it like {example}") from error


class _ConditionReader:
    """Turns the nodes of a parsed condition into expressions."""

    def __init__(self, columns: Sequence[str], quoted: dict[str, str]) -> None:
        self._columns = columns
        self._quoted = quoted

    def expression(self, node: ast.expr) -> pc.Expression:
        """The expression of a node."""
        import pyarrow.compute as pc

        match node:
            case ast.Name(id=name):
                return self._column(self._quoted.get(name, name))
            case ast.Constant(value=bool() | int() | float() | str() | None as value):
                return pc.scalar(value)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return ~self.expression(operand)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return pc.scalar(-number)
            case ast.BoolOp(op=op, values=values):
                join = operator.and_ if isinstance(op, ast.And) else operator.or_
                joined = self.expression(values[0])
                for operand in values[1:]:
                    joined = join(joined, self.expression(operand))
                return joined
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return _BINARY[type(op)](self.expression(left), self.expression(right))
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                joined = self._comparison(left, ops[0], comparators[0])
                for i, comparison in enumerate(ops[1:]):
                    joined = joined & self._comparison(comparators[i], comparison, comparators[i + 1])
                return joined
        raise ArgumentError(
            f"filter: {ast.unparse(node)!r:.200} cannot stand in a condition, which has columns, numbers, texts, comparisons, "
            "in, is None, and, or, not and + - * /. A function of the table can do more: store.filter(lambda table: ...)"
        )

    def _comparison(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> pc.Expression:
        match op, right:
            case (ast.Is() | ast.Eq(), ast.Constant(value=None)):
                return self.expression(left).is_null()
            case (ast.IsNot() | ast.NotEq(), ast.Constant(value=None)):
                return self.expression(left).is_valid()
            case (ast.Eq() | ast.NotEq(), _) if isinstance(left, ast.Constant) and left.value is None:
                return self._comparison(right, op, left)
            case (ast.In(), _):
                return _is_in(self.expression(left), _literals(right))
            case (ast.NotIn(), _):
                return ~_is_in(self.expression(left), _literals(right))
        if type(op) not in _COMPARISONS:
            raise ArgumentError(f"filter: 'is' compares only with None, found {ast.unparse(right)!r:.100}. Write ==")
        return _COMPARISONS[type(op)](self.expression(left), self.expression(right))

    def _column(self, name: str) -> pc.Expression:
        import pyarrow.compute as pc

        return pc.field(_arguments.one_of(name, self._columns, "filter: a column"))


def _is_in(values: pc.Expression, literals: Sequence[bool | int | float | str | None]) -> pc.Expression:
    """Whether values are among literals; null for null, as comparisons are."""
    import pyarrow as pa
    import pyarrow.compute as pc

    null: pc.Expression = pc.scalar(pa.scalar(None, pa.bool_()))
    return pc.if_else(values.is_null(), null, values.isin(literals))


def _literals(node: ast.expr) -> list[bool | int | float | str | None]:
    """The values behind ``in``."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        try:
            return [ast.literal_eval(element) for element in node.elts]
        except ValueError:
            pass
    raise ArgumentError(f"filter: expected values in parentheses behind 'in', found {ast.unparse(node)!r:.200}")
