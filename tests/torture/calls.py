"""Generates calls of the public API with hostile values, of right and wrong types, for every parameter.

A call succeeds, or raises an :class:`actshard.ActshardError`, or TypeError for a wrong type. Nothing else.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

import actshard
from actshard import tokens
from actshard.streaming import quality

HUGE = 10**30
numbers = st.one_of(
    st.sampled_from(
        [0, 1, -1, 2, 3, 7, 2**31, -(2**31) - 1, 2**32, 2**53, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, HUGE, -HUGE]
    ),
    st.sampled_from([True, False, 0.0, -0.0, 0.5, 1.0, 2.5, 1e300, -1e300, float("nan"), float("inf"), float("-inf")]),
    st.sampled_from([np.int8(1), np.uint64(2**64 - 1), np.float32(2), np.float16(np.inf), np.bool_(True), 1j]),
)
texts = st.sampled_from(
    ["", "x", "0", "\0", "\ud800", "é", "a" * 5000, "window", "exact", "content", "all", "last", "mmap", "1GiB", "-1GiB",
     "9" * 400 + "GiB", "nan", "1e400GiB", "float32", "float16", "bfloat16", "int8", "V3", "O", "s3://b/x", "~nosuchuser/x"]
)  # fmt: skip
arrays = st.sampled_from(
    [
        np.zeros(0), np.zeros((0, 3)), np.zeros(3, np.int64), np.array(1), np.array([2**62]), np.array([-1, -(2**62)]),
        np.array([True, False]), np.array([1.5, 2.0]), np.array([np.nan]), np.array(["a"]), np.array([None, 1], object),
        np.zeros((2, 2, 2), np.int32), np.array([[0, 1]]), np.array([2**64 - 1], np.uint64), np.zeros(2, "M8[s]"),
        np.zeros(3, [("a", "i4")]), np.arange(10)[::-2], np.zeros((3, 4), np.float32), np.zeros((2, 2, 3, 8), np.float32),
        np.zeros((1, 8), ">f4"), np.zeros((4, 8), np.float16)[:, ::2],
    ]
)  # fmt: skip
things = st.one_of(
    st.none(),
    numbers,
    texts,
    arrays,
    st.sampled_from(
        [b"", b"\xff", (), [], {}, set(), object(), int, len, Ellipsis, slice(None), range(3), range(2**40)]
    ),
    st.lists(st.one_of(numbers, texts, st.none()), max_size=4),
    st.lists(numbers, max_size=3).map(tuple),
    st.dictionaries(texts, st.one_of(numbers, texts, st.none()), max_size=2),
    st.just([[0], [1, 2]]),
    st.builds(iter, st.lists(numbers, max_size=3)),
)


@dataclass
class Call:
    """A public function: `make` returns it with its dependencies; `good` are strategies of sensible arguments."""

    name: str
    make: Callable[[Path], Callable[..., Any]]
    good: dict[str, Any] = field(default_factory=dict)
    skip: tuple[str, ...] = ()
    """Parameters that are not generated: callables provided by the caller."""


examples = st.one_of(st.integers(0, 4), st.lists(st.integers(0, 4), max_size=4), st.just(range(3)))
positions = st.one_of(st.integers(-1, 0), st.lists(st.integers(-1, 0), max_size=4))


def _store(name: str, method: str) -> Callable[[Path], Callable[..., Any]]:
    return lambda root: getattr(actshard.open(root / name), method)


def _stream(root: Path, method: str) -> Callable[..., Any]:
    store = actshard.open(root / "lmprobe")
    return getattr(store.stream(0, 3, shuffle="window"), method)  # type: ignore[no-any-return]


def _cache(root: Path) -> tokens.TokenCache:
    return tokens.open_cache(root / "cache")


def _append(root: Path) -> Callable[..., Any]:
    import tempfile

    folder = tempfile.mkdtemp(dir=root)
    writer = actshard.create(Path(folder) / "d", "lmprobe", layers=[0, 1], d_model=8)

    def append(**arguments: Any) -> None:
        try:
            writer.append(**arguments)
            writer.flush()
            writer.close()
        finally:
            writer.abort()

    append.__signature__ = inspect.signature(writer.append)  # type: ignore[attr-defined]
    return append


def _somewhere(root: Path, function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Calls that write, each into a separate folder. The path argument is generated elsewhere."""
    import tempfile

    def call(**arguments: Any) -> Any:
        arguments[name] = Path(tempfile.mkdtemp(dir=root)) / "d"
        made = function(**arguments)
        if hasattr(made, "abort"):
            made.abort()
        return made

    parameters = inspect.signature(function).parameters.values()
    call.__signature__ = inspect.Signature([p for p in parameters if p.name != name])  # type: ignore[attr-defined]
    return call


def _consume(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> list[Any]:
        stream = function(*arguments, **named)
        return [batch for batch, _ in zip(stream, range(20), strict=False)]

    call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return call


layer = st.sampled_from([0, 1])
dtype = st.sampled_from([None, "float32", "float16", "bfloat16", np.float64])
FORMATS = ("saev", "lmprobe", "zarr", "pickle")
sources = st.just([])
CALLS = [
    *(Call(f"{f}.gather", _store(f, "gather"),
           {"layer": layer, "examples": examples, "tokens": positions, "dtype": dtype}) for f in FORMATS),
    *(Call(f"{f}.sequences", _store(f, "sequences"), {"examples": examples, "layer": layer}) for f in FORMATS),
    *(Call(f"{f}.last_tokens", _store(f, "last_tokens"), {"layer": layer, "examples": examples}) for f in FORMATS),
    *(Call(f"{f}.sequence", _store(f, "sequence"), {"example": st.integers(0, 4), "layer": layer}) for f in FORMATS),
    *(
        Call(
            f"{f}.stream",
            lambda root, f=f: _consume(actshard.open(root / f).stream),
            {"layer": layer, "batch_size": st.integers(1, 9), "memory": st.just("1MiB")},
            skip=("keep",),
        )
        for f in FORMATS
    ),
    Call("stats", _store("lmprobe", "stats"), {"layer": layer}, skip=("keep",)),
    Call("logits", _store("lmprobe", "logits"), {"examples": examples}),
    Call("router", _store("lmprobe", "router"), {"layer": layer}),
    Call("tokens_of", _store("zarr", "tokens_of"), {"examples": examples}),
    Call("tokens_in", _store("zarr", "tokens_in"), {"layer": layer}),
    Call("read_columns", _store("zarr", "read_columns"), {"names": st.just(["label"])}),
    Call("set_epoch", lambda root: _stream(root, "set_epoch"), {"epoch": st.integers(0, 3)}),
    Call("load_state_dict", lambda root: _stream(root, "load_state_dict")),
    Call("batches", lambda root: _consume(_stream(root, "batches")), {"first": st.integers(0, 2)}),
    Call("append", _append, {"activations": st.just(np.zeros((2, 2, 3, 8), np.float32))}),
    Call("open", lambda root: actshard.open),
    Call("open here", lambda root: lambda **k: actshard.open(root / "zarr", **k)),
    Call("verify", lambda root: actshard.verify),
    Call("create", lambda root: _somewhere(root, actshard.create, "path"),
         {"format": st.sampled_from(FORMATS), "layers": st.just([0]), "d_model": st.just(8)}),
    Call("convert", lambda root: _somewhere(root, actshard.convert, "dst"),
         {"src": st.sampled_from(["zarr", "lmprobe"]), "format": st.sampled_from(FORMATS)}, skip=("progress",)),
    Call("merge", lambda root: actshard.merge, skip=("progress",)),
    Call("quality.measure", lambda root: lambda **k: quality.measure(actshard.open(root / "zarr").stream(0, 3), **k)),
    Call("open_cache", lambda root: tokens.open_cache),
    Call("rows", lambda root: _cache(root).rows, {"indices": examples}),
    Call("TokenSeqDataset", lambda root: lambda seq_len: tokens.TokenSeqDataset(_cache(root), seq_len),
         {"seq_len": st.integers(1, 5)}),
    Call("TokenSeqDataset.get_batch", lambda root: tokens.TokenSeqDataset(_cache(root), 4).get_batch, {"indices": examples}),
    Call("CausalLmDataset.get_batch",
         lambda root: tokens.CausalLmDataset(tokens.TokenSeqDataset(_cache(root), 4), eos_id=1).get_batch, {"indices": examples}),
    Call("CausalLmDataset", lambda root: lambda **k: tokens.CausalLmDataset(tokens.TokenSeqDataset(_cache(root), 4), **k)),
    Call("permutation", lambda root: tokens.permutation,
         {"kind": st.sampled_from(["block", "feistel", "linear"]), "length": st.integers(0, 9), "key": st.integers(0, 3)}),
    Call("permutation()", lambda root: tokens.permutation("feistel", 10, 0), {"indices": examples}),
    Call("prng_key", lambda root: tokens.prng_key, {"seed": st.integers(0, 9)}),
    Call("split", lambda root: tokens.split, {"key": st.integers(0, 9), "n": st.integers(0, 4)}),
    Call("fold_in", lambda root: tokens.fold_in, {"key": st.integers(0, 9), "data": st.integers(0, 4)}),
    Call("Mixture", lambda root: tokens.Mixture),
    Call("LmDataConfig.from_dict", lambda root: tokens.LmDataConfig.from_dict),
    Call("LmDataConfig.from_yaml", lambda root: tokens.LmDataConfig.from_yaml),
    Call("TextFormat", lambda root: tokens.TextFormat),
    Call("ChatFormat", lambda root: tokens.ChatFormat),
    Call("PrebuiltFormat", lambda root: tokens.PrebuiltFormat),
    Call("load_tokenizer", lambda root: tokens.load_tokenizer),
    Call("build_cache", lambda root: _somewhere(root, tokens.build_cache, "out"), skip=("progress",)),
]  # fmt: skip


def prepare(root: Path) -> None:
    """A small dataset of each format, and a token cache."""
    rng = np.random.default_rng(0)
    for name in FORMATS:
        n = [3] * 5 if name == "saev" else [2, 3, 1, 4, 2]
        with actshard.create(root / name, name, layers=[0, 1], d_model=8) as writer:
            extra = {} if name == "saev" else {"columns": {"label": list(range(5))}}
            writer.append([rng.standard_normal((2, t, 8)).astype(np.float32) for t in n], **extra)
    texts = [{"input_ids": rng.integers(0, 9, 7)} for _ in range(6)]
    with tokens.CacheWriter(root / "cache", {"input_ids": np.int32}) as writer:
        writer.append(texts)


@st.composite
def arguments(draw: st.DrawFn, call: Call, function: Callable[..., Any]) -> dict[str, Any]:
    """Arguments for some of a function's parameters: sensible, hostile or omitted."""
    parameters = [
        p for p in inspect.signature(function).parameters.values() if p.name not in call.skip and p.name != "self"
    ]
    drawn = {}
    hostile = draw(st.integers(0, 3))
    for parameter in parameters:
        if parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
            continue
        good = call.good.get(parameter.name)
        needed = parameter.default is inspect.Parameter.empty
        if hostile and draw(st.integers(0, 3 if good is not None or not needed else 0)) == 0:
            hostile -= 1
            drawn[parameter.name] = draw(things)
        elif good is not None and (needed or draw(st.booleans())):
            drawn[parameter.name] = draw(good)
        elif needed:
            drawn[parameter.name] = draw(things)
    return drawn


def attempt(call: Call, function: Callable[..., Any], given: dict[str, Any], root: Path) -> None:
    """Makes the call. Propagates exceptions other than ActshardError and TypeError."""
    if call.name == "convert" and isinstance(given.get("src"), str) and given["src"] in FORMATS:
        given = {**given, "src": root / str(given["src"])}
    parameters = list(inspect.signature(function).parameters.values())
    leading = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_ONLY and p.name in given]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            function(*[given[name] for name in leading], **{k: v for k, v in given.items() if k not in leading})
        except actshard.InternalError:
            raise
        except (actshard.ActshardError, TypeError):
            pass
