"""Conditions as texts choose the examples for which Python, with None as neither true nor false, finds them true."""

from __future__ import annotations

import ast
import operator
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import actshard

N = 24
COLUMNS = {
    "label": [i % 3 for i in range(N)],
    "score": [None if i % 5 == 0 else i / 8 for i in range(N)],
    "verb": [["run", "walk", "swim"][i % 3] if i % 7 else None for i in range(N)],
    "two words": [i % 2 for i in range(N)],
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> actshard.Store:
    path: Path = tmp_path_factory.mktemp("conditions") / "acts"
    with actshard.create(path, "zarr", layers=[0], d_model=4) as writer:
        writer.append(np.ones((N, 1, 2, 4), np.float32), columns=COLUMNS)
    return actshard.open(path)


NUMBERS = st.sampled_from(["label", "score", "`two words`", "label + score", "-1 * label", "label / 2"])
ATOMS = st.one_of(
    st.builds(
        "{} {} {}".format,
        NUMBERS,
        st.sampled_from(["==", "!=", "<", "<=", ">", ">="]),
        st.sampled_from(["0", "1", "2.5", "-1", "label"]),
    ),
    st.builds("verb {} {}".format, st.sampled_from(["==", "!="]), st.sampled_from(["'run'", '"swim"', "'flies'"])),
    st.builds("{} {} None".format, st.sampled_from(["score", "verb"]), st.sampled_from(["is", "is not"])),
    st.builds("{} in ({},)".format, st.sampled_from(["label", "score"]), st.sampled_from(["0, 1", "2", "5", "0.125"])),
    st.builds(
        "{} not in ({},)".format, st.sampled_from(["label", "score"]), st.sampled_from(["0, 1", "2", "5", "0.125"])
    ),
    st.just("0 < label <= 1"),
)
CONDITIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.builds("({} and {})".format, inner, inner),
        st.builds("({} or {})".format, inner, inner),
        st.builds("(not {})".format, inner),
    ),
    max_leaves=5,
)


COMPUTED = {ast.Add: operator.add, ast.Mult: operator.mul, ast.Div: operator.truediv}
COMPARISONS = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def truth(text: str, row: dict[str, object]) -> bool | None:
    """The condition by Kleene's logic over one row, computed from Python's syntax tree in the slowest way."""

    def value(node: ast.expr):  # any value
        match node:
            case ast.Name(id=name):
                return row[name.replace("__", " ")]
            case ast.UnaryOp(op=ast.USub()):
                return -value(node.operand)
            case ast.UnaryOp():
                inner = value(node.operand)
                return None if inner is None else not inner
            case ast.BinOp():
                a, b = value(node.left), value(node.right)
                if a is None or b is None:
                    return None
                return COMPUTED[type(node.op)](a, b)
            case ast.BoolOp():
                parts = [value(part) for part in node.values]
                decided = isinstance(node.op, ast.Or)
                return decided if decided in parts else None if None in parts else not decided
            case ast.Compare():
                sides = [value(node.left), *map(value, node.comparators)]
                return value_of_chain([pair(op, a, b) for op, a, b in zip(node.ops, sides, sides[1:], strict=False)])
            case ast.Tuple():
                return tuple(map(value, node.elts))
        return node.value  # a constant

    def pair(op: ast.cmpop, a: object, b: object) -> bool | None:
        if isinstance(op, ast.Is | ast.IsNot):
            return (a is None) == isinstance(op, ast.Is)
        if a is None or b is None:
            return None
        if isinstance(op, ast.In | ast.NotIn):
            return (a in b) == isinstance(op, ast.In)
        return COMPARISONS[type(op)](a, b)

    def value_of_chain(parts: list[bool | None]) -> bool | None:
        return False if False in parts else None if None in parts else True

    return value(ast.parse(text.replace("`two words`", "two__words"), mode="eval").body)


@given(condition=CONDITIONS)
@settings(deadline=None, max_examples=150)
@pytest.mark.filterwarnings("ignore")
def test_conditions_choose_what_a_reader_of_python_expects(store: actshard.Store, condition: str) -> None:
    expected = [i for i in range(N) if truth(condition, {name: column[i] for name, column in COLUMNS.items()}) is True]
    assert list(store.filter(condition).chosen) == expected


def test_a_condition_is_the_expression_it_stands_for(store: actshard.Store) -> None:
    part = store.filter("label == 1 and score is not None")
    same = store.filter((pc.field("label") == 1) & pc.field("score").is_valid())
    assert part.chosen.tolist() == same.chosen.tolist() != []


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("lable == 1", "do you mean 'label'"),
        ("label = 1", "is no condition"),
        ("", "is no condition"),
        ("__import__('os').system('true')", "cannot stand in a condition"),
        ("label.__class__ == 1", "cannot stand in a condition"),
        ("[x for x in label]", "cannot stand in a condition"),
        ("label is 1", "Write =="),
        ("label in verb", "values in parentheses"),
        ("label in (verb,)", "values in parentheses"),
        ("label == 'x'", "label"),
        ("label", "label"),
        ("(" * 5000 + "label" + ")" * 4000, "is no condition"),
        ("label == 1" + " or label == 1" * 3000, "at most 10,000 characters"),
        ("label == 99999999999999999999999", "is no condition"),
    ],
)
def test_what_is_no_condition_is_an_error_that_helps(store: actshard.Store, condition: str, words: str) -> None:
    with pytest.raises(actshard.ArgumentError) as error:
        store.filter(condition)
    assert words in str(error.value)
    assert len(str(error.value)) < 2000


def test_backquotes_in_texts_are_texts(tmp_path: Path) -> None:
    texts = ["a `b` c", "x", None]
    with actshard.create(tmp_path / "acts", "lmprobe", layers=[0], d_model=4) as writer:
        writer.append(np.ones((3, 1, 2, 4), np.float32), columns={"text": ["1", "2", "3"], "note": texts})
    store = actshard.open(tmp_path / "acts")
    assert store.filter("note == 'a `b` c'").chosen.tolist() == [0]
    assert store.filter("note in ('a `b` c', 'x')").chosen.tolist() == [0, 1]
    assert store.filter('`note` == "x"').chosen.tolist() == [1]
    assert store.filter("note not in ('x',)").chosen.tolist() == [0]
    assert store.filter("None == note").chosen.tolist() == [2]
