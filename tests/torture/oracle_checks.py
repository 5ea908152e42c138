"""Each reading verb of a store, compared with the oracle, with arguments drawn from a seed."""

from __future__ import annotations

import json
import math
import pickle
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from tests.oracle import selection as oracle
from tests.oracle.examples import overflows, same
from tests.oracle.selection import Chosen, Piece, Place
from tests.oracle.stats import Summary, quantile, rescale, summarize
from tests.torture.oracle_cases import BF16, Case, draw_index, draw_key, draw_selection

import actshard


@contextmanager
def refused(*kinds: type[Exception]) -> Iterator[None]:
    """The block raises one of these errors."""
    try:
        yield
    except kinds:
        return
    raise AssertionError(f"expected {kinds}, found no error")


def refusal(call: Callable[[], Any]) -> Exception | None:
    """The error that a call raises, such as numpy for an invalid key; None if it succeeds."""
    try:
        call()
    except (IndexError, ValueError, TypeError, actshard.NotStoredError) as error:
        return error
    return None


def plain(value: Any) -> Any:
    """A value that equals itself, NaN included, and no value of another type."""
    if isinstance(value, list):
        return [plain(x) for x in value]
    return (type(value).__name__, repr(value))


def present(case: Case, layer: Any) -> list[int]:
    """Examples that have rows in a layer."""
    return [i for i, t in enumerate(case.data.tokens_in(layer)) if t]


# -- facts and columns -------------------------------------------------------------------------------------------------


def check_facts(draw: random.Random, case: Case) -> None:
    store, data = case.store, case.data
    assert len(store) == store.num_examples == len(data)
    assert (list(store.layers), store.d_model, store.dtype) == (data.layers, data.d_model, data.dtype), (
        store,
        data.layers,
    )
    assert store.special_tokens == data.special, (store.special_tokens, data.special)
    some = [draw.randrange(len(data)) for _ in range(3)] if len(data) else []
    # Without the other examples, whose tokens the store has not counted yet, and with them.
    for _ in range(2):
        assert store.tokens_of(np.array(some, np.int64)).tolist() == [data.token_counts[i] for i in some]
        assert store.token_counts.tolist() == data.token_counts, (store.token_counts, data.token_counts)
    for layer in data.layers:
        assert store.tokens_in(layer).tolist() == data.tokens_in(layer)
    lengths, labels = store.content_lengths, store.labels
    assert (None if lengths is None else lengths.tolist()) == data.content_lengths, (lengths, data.content_lengths)
    assert (None if labels is None else labels.tolist()) == data.labels, (labels, data.labels)
    assert (None if store.chosen is None else store.chosen.tolist()) == data.numbers
    whole = data.whole or data
    assert len(store.whole()) == len(whole)
    if whole.parts:
        assert [found.tolist() for found in store.origins()] == list(data.origins())


def check_table(draw: random.Random, case: Case) -> None:
    store, data = case.store, case.data
    table = store.table
    table.validate(full=True)
    assert table.num_rows == len(data)
    for name in data.columns:
        assert plain(table[name].to_pylist()) == plain(data.values(name)), (name, table[name], data.values(name))
    some = [draw.randrange(len(data)) for _ in range(draw.randint(0, 4))] if len(data) else []
    flags = np.array([draw.random() < 0.5 for _ in range(len(data))], bool)
    if data.columns:
        names = draw.sample(data.columns, draw.randint(1, len(data.columns)))
        for examples, numbers in ((np.array(some, np.int64), some), (flags, np.flatnonzero(flags).tolist())):
            found = store.read_columns(names, examples)
            assert found.column_names == names
            for name in names:
                assert plain(found[name].to_pylist()) == plain([data.values(name)[i] for i in numbers])
    if (data.whole or data).parts:  # the sources of a join are its last column
        names = [part["source"] for part in store.metadata["parts"]]
        assert table[table.column_names[-1]].to_pylist() == [names[part] for part in data.origins()[0]]


# -- random access -----------------------------------------------------------------------------------------------------


def check_gather(draw: random.Random, case: Case) -> None:
    store, data = case.store, case.data
    layer = draw.choice(data.layers)
    examples = present(case, layer)
    if not examples:
        return
    picks = [draw.choice(examples) for _ in range(draw.randint(1, 8))]
    counts = data.tokens_in(layer)
    tokens = [draw.randrange(-counts[i], counts[i]) for i in picks]
    dtype = draw.choice([None, None, "float16", "bfloat16", "float32", "float64"])
    keys: list[tuple[Any, Any]] = [
        (picks, tokens),
        (np.array(picks)[:, None], [0, -1]),
        (picks[0], tokens[0]),
        (picks, 0),
    ]
    e, t = draw.choice(keys)
    want = data.gather(layer, e, t)
    stored = [data.examples[i].rows[layer][j] for i, j in np.broadcast(e, t)]
    check_rows(lambda: store.gather(layer, e, t, dtype=dtype), data.gather(layer, e, t, asked(case, dtype)), stored)
    out = np.zeros_like(want)
    assert store.gather(layer, e, t, out=out) is out
    assert same(out, want)
    flags = np.array([i in picks for i in range(len(data))])
    assert same(store.gather(layer, flags, -1), data.gather(layer, flags, -1))
    with refused(actshard.OutOfRangeError):
        store.gather(layer, len(data), 0)
    with refused(actshard.OutOfRangeError):
        store.gather(layer, picks[0], counts[picks[0]])
    with refused(actshard.OutOfRangeError):
        store.gather(layer, picks[0], -counts[picks[0]] - 1)


def asked(case: Case, dtype: Any) -> np.dtype[Any]:
    """The dtype that a call returns."""
    return case.data.dtype if dtype is None else BF16 if dtype == "bfloat16" else np.dtype(dtype)


def check_rows(read: Callable[[], np.ndarray], want: np.ndarray, stored: list[np.ndarray]) -> None:
    """Rows as another dtype, with a warning exactly if finite stored values become infinite."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = read()
    assert same(found, want), (found, want)
    told = [w for w in caught if issubclass(w.category, actshard.OverflowWarning)]
    assert bool(told) == any(overflows(rows, want.dtype) for rows in stored)


def check_last_tokens(draw: random.Random, case: Case) -> None:
    store, data = case.store, case.data
    layer = draw.choice(data.layers)
    usable = [i for i in present(case, layer) if data.content_of(data.examples[i])[1]]
    some = [draw.choice(usable) for _ in range(draw.randint(1, 5))] if usable else []
    assert same(store.last_tokens(layer, np.array(some, np.int64)), data.last_tokens(layer, some))
    flags = np.array([i in some for i in range(len(data))], bool)
    assert same(store.last_tokens(layer, flags), data.last_tokens(layer, sorted(set(some))))
    if len(usable) == len(data):
        assert same(store.last_tokens(layer), data.last_tokens(layer, usable))
    elif not case.has_last_rows:
        with refused(actshard.OutOfRangeError, actshard.NotStoredError):
            store.last_tokens(layer)


def check_sequences(draw: random.Random, case: Case) -> None:
    store, data = case.store, case.data
    layer = draw.choice(data.layers)
    has = [i for i in range(len(data)) if layer in data.examples[i].rows]
    dtype = draw.choice([None, None, "float32", "float64"])
    picks = [draw.choice(has) for _ in range(draw.randint(0, 5))] if has else []
    for i in picks:
        want = data.sequence(layer, i, asked(case, dtype))
        check_rows(lambda i=i: store.sequence(i, layer, dtype=dtype), want, [data.examples[i].rows[layer]])
    for found, i in zip(store.sequences(np.array(picks, np.int64), layer), picks, strict=True):
        assert same(found, data.sequence(layer, i))
    several = [(i, name) for i in picks for name in data.layers if name in data.examples[i].rows]
    if several:
        found = store.sequences([i for i, _ in several], [name for _, name in several])
        assert all(same(rows, data.sequence(name, i)) for rows, (i, name) in zip(found, several, strict=True))
    for i in set(range(len(data))) - set(has):
        with refused(actshard.NotStoredError):
            store.sequence(i, layer)
    every = [draw.randrange(len(data)) for _ in range(4)] if len(data) else []
    ragged, (rows, offsets) = store.layer(layer).ragged(np.array(every, np.int64)), data.ragged(layer, every)
    assert same(ragged.values, rows)
    assert ragged.offsets.tolist() == offsets


def check_index(draw: random.Random, case: Case) -> None:
    store, data = case.store, case.data
    layer = draw.choice(data.layers)
    acts, array = store.layer(layer), data.array(layer)
    counts = data.tokens_in(layer)
    each = counts[0] if len(set(counts)) == 1 else None
    if len(data):
        assert acts.shape == (len(data), each, data.d_model)
    flat, rows = data.flat(layer), acts.rows()
    assert rows.shape == flat.shape
    assert rows.examples.tolist() == [i for i, t in enumerate(counts) for _ in range(t)]
    assert rows.tokens.tolist() == [k for t in counts for k in range(t)]
    assert same(np.asarray(rows), flat)
    compare_keys(draw, rows, flat)
    if array is not None:
        assert same(np.asarray(acts), array)
        compare_keys(draw, acts, array)
        return
    examples = present(case, layer)
    if not examples:
        return
    i = draw.choice(examples)
    key = draw_index(draw, data.examples[i].rows[layer].shape)
    compare(lambda: acts[(i, *(key if isinstance(key, tuple) else (key,)))], lambda: data.sequence(layer, i)[key], key)
    assert same(acts[i], data.sequence(layer, i))
    assert same(acts[examples, -1], data.gather(layer, examples, -1))
    stop = draw.choice([1, 2])
    if min(counts) >= stop:
        assert same(acts[:, :stop], np.stack([data.sequence(layer, i)[:stop] for i in range(len(data))]))
        assert same(acts[:, -stop:], np.stack([data.sequence(layer, i)[-stop:] for i in range(len(data))]))


def compare_keys(draw: random.Random, lazy: Any, array: np.ndarray) -> None:
    for _ in range(3):
        key = draw_index(draw, array.shape)
        compare(lambda key=key: lazy[key], lambda key=key: array[key], key)


def compare(read: Callable[[], Any], index: Callable[[], Any], key: Any) -> None:
    """Both return the same, or both refuse the key."""
    ours, numpys = refusal(read), refusal(index)
    if "is ambiguous" in str(ours):  # refused on purpose: numpy pairs lists of elements with others, and moves axes
        return
    assert (ours is None) == (numpys is None), (key, ours, numpys)
    if ours is None:
        assert same(read(), index()), key
    else:
        assert isinstance(ours, actshard.ActshardError)


# -- streams -----------------------------------------------------------------------------------------------------------


def check_stream(draw: random.Random, case: Case) -> None:
    """A stream of all ranks, its state, its pickle, its reused arrays."""
    data = case.data
    several = draw.random() < 0.35
    layers = draw.choice([list(data.layers), data.layers[::-1]]) if several else [draw.choice(data.layers)]
    arguments, chosen = draw_selection(draw, case, layers)
    options = {
        "shuffle": draw.choice([None, "window", "exact"]),
        "seed": draw.randrange(4),
        "epoch": draw.randrange(3),
        "drop_last": draw.random() < 0.3,
        "world_size": draw.choice([1, 1, 2, 3]),
        "dtype": draw.choice([None, None, "float32", "float64"]),
        "memory": draw.choice([200, 1000, 100_000]),
        "interleave": several and draw.random() < 0.4,
        **arguments,
    }
    size = draw.randint(1, 12)
    if any(data.tokens_in(layer) != data.tokens_in(layers[0]) for layer in layers):
        with refused(actshard.NotStoredError):
            case.store.stream(layers, size, **options)
        return
    places, left_out = oracle.select(data, layers, chosen)
    every: list[Any] = [(*place, layer) for place in places for layer in layers] if options["interleave"] else places
    if oracle.is_indivisible(len(every), size, options["world_size"], options["drop_last"]):
        with refused(actshard.ArgumentError):
            case.store.stream(layers if several else layers[0], size, **options)
        return
    streams = [
        case.store.stream(layers if several else layers[0], size, rank=r, **options)
        for r in range(options["world_size"])
    ]
    if chosen.max_norm is not None or chosen.min_token:
        times = len(layers) if options["interleave"] else 1
        assert {name: n * times for name, n in left_out.items()} == streams[0].left_out
    assert streams[0].num_rows == len(every)
    epochs = [[list(stream) for stream in streams] for _ in range(2)]
    for ranks in epochs:
        check_epoch(case, ranks, every, size, options, layers, several)
    assert [stream.epoch for stream in streams] == [options["epoch"] + 2] * len(streams)
    if options["shuffle"] == "exact" and len(every) > 40:
        first, second = ([keys_of(batch, options["interleave"]) for batch in ranks[0]] for ranks in epochs)
        assert first != second, "each epoch has another order"
    rank = draw.randrange(len(streams))

    def fresh(**changes: Any) -> actshard.Stream:
        return case.store.stream(layers if several else layers[0], size, rank=rank, **{**options, **changes})

    check_resumed(draw, fresh, epochs[0][rank])
    check_other_state(draw, fresh, epochs[0][rank], draw_changes(draw, options))
    if len(places) > 1:  # selections of equally many rows
        one, other = (all_but(data.tokens_in(layers[0]), place) for place in draw.sample(places, 2))
        part: list[Any] = []
        if refusal(lambda: part.extend(fresh(keep=one))) is None:
            check_other_state(draw, lambda **changes: fresh(**{"keep": one, **changes}), part, {"keep": other})
    for reused, batch in zip(
        case.store.stream(layers if several else layers[0], size, rank=rank, reuse=True, **options),
        epochs[0][rank],
        strict=True,
    ):
        assert same(reused.activations, batch.activations)


def all_but(counts: list[int], place: Place) -> list[np.ndarray]:
    """Flags that leave out one row."""
    flags = [np.ones(tokens, np.bool_) for tokens in counts]
    flags[place[0]][place[1]] = False
    return flags


def keys_of(batch: actshard.Batch, interleave: bool) -> list[Any]:
    """The place of each row, with its layer if rows of several layers alternate."""
    columns = [batch.examples.tolist(), batch.tokens.tolist()]
    return list(zip(*columns, *([batch.layers.tolist()] if interleave else []), strict=True))


def check_epoch(
    case: Case,
    ranks: list[list[Any]],
    every: list[Any],
    size: int,
    options: dict[str, Any],
    layers: list[Any],
    several: bool,
) -> None:
    """Batches of all ranks: which rows, in which order, and their values."""
    interleave = options["interleave"]
    seen = [key for batches in ranks for batch in batches for key in keys_of(batch, interleave)]
    assert len(seen) == oracle.epoch_size(len(every), size, len(ranks), options["drop_last"])
    assert not Counter(seen) - Counter(every)
    assert len({len(batches) for batches in ranks}) == 1
    if options["drop_last"]:
        assert all(len(batch) == size for batches in ranks for batch in batches)
    if options["shuffle"] is None:
        together = size * len(ranks)
        for k, group in enumerate(zip(*ranks, strict=True)):
            rows = [key for batch in group for key in keys_of(batch, interleave)]
            if all(len(batch) == size for batch in group):
                assert Counter(rows) == Counter(every[k * together : (k + 1) * together])
        if len(ranks) == 1:
            found = [keys_of(batch, interleave) for batch in ranks[0]]
            assert found == oracle.batches(every, size, options["drop_last"])
    for batches in ranks:
        for batch in batches:
            assert batch.layers.tolist() == (layers if not interleave else [key[2] for key in keys_of(batch, True)])
            check_values(case, batch, options, layers, several and not interleave)


def check_values(case: Case, batch: Any, options: dict[str, Any], layers: list[Any], aligned: bool) -> None:
    data = case.data
    dtype = asked(case, options["dtype"])
    assert batch.activations.dtype == dtype
    for k, place in enumerate(zip(batch.examples.tolist(), batch.tokens.tolist(), strict=True)):
        names = layers if aligned else [batch.layers[k] if options["interleave"] else layers[0]]
        rows = batch.activations[k] if aligned else batch.activations[k : k + 1]
        want = [data.row(name if isinstance(name, str) else int(name), *place, dtype) for name in names]
        assert same(rows, np.stack(want)), place
        label = oracle.label_of(data, place)
        if label is None or options["tokens"] == "special":
            assert label is not None or batch.labels is None
        else:
            assert int(batch.labels[k]) == label


def compare_batches(found: Any, want: Any) -> None:
    assert same(found.activations, want.activations)
    assert found.examples.tolist() == want.examples.tolist()
    assert found.tokens.tolist() == want.tokens.tolist()


def begun(stream: Any, batches: int) -> Any:
    """The stream after some batches."""
    loop = iter(stream)
    for _ in range(batches):
        next(loop)
    return stream


def check_resumed(draw: random.Random, fresh: Callable[[], Any], batches: list[Any]) -> None:
    """A state after some batches, loaded by another stream or a pickled one, reads the rest, or one of several workers' share."""
    if not batches:
        return
    done = draw.randint(0, len(batches))
    stream = begun(fresh(), done)
    state = json.loads(json.dumps(stream.state_dict()))
    if done < len(batches) and draw.random() < 0.5:
        other = pickle.loads(pickle.dumps(stream))
    else:
        other = pickle.loads(pickle.dumps(fresh())) if draw.random() < 0.5 else fresh()
        other.load_state_dict(state)
    if done == len(batches):
        assert other.epoch == fresh().epoch + 1
        return
    every = draw.choice([1, 1, 2, 3])
    worker = draw.randrange(every)
    for found, want in zip(other.batches(worker, every), batches[done:][worker::every], strict=True):
        compare_batches(found, want)


def draw_changes(draw: random.Random, options: dict[str, Any]) -> dict[str, Any]:
    """Another value of one of a stream's arguments."""
    return draw.choice(
        [
            {"seed": options["seed"] + 1},
            {"shuffle": draw.choice([x for x in (None, "window", "exact") if x != options["shuffle"]])},
            {"drop_last": not options["drop_last"]},
            {"world_size": options["world_size"] + 1},
            {"dtype": "float64" if options["dtype"] == "float32" else "float32"},
            {"tokens": draw.choice([x for x in ("content", "all", "last") if x != options["tokens"]])},
            {"min_token": options.get("min_token", 0) + 1},
            {"max_norm": 1.5},
            {"keep": lambda table: np.arange(table.num_rows) % 2 == 0},
        ]
    )


def check_other_state(
    draw: random.Random, fresh: Callable[..., Any], batches: list[Any], changes: dict[str, Any]
) -> None:
    """A stream with other arguments refuses a state, unless it reads the same rest."""
    if not batches:
        return
    done = draw.randrange(len(batches))
    state = json.loads(json.dumps(begun(fresh(), done).state_dict()))
    try:
        other = fresh(**changes)
        other.load_state_dict(state)
    except actshard.ActshardError:
        return
    for found, want in zip(other, batches[done:], strict=True):
        compare_batches(found, want)


def check_rescaled(draw: random.Random, case: Case) -> None:
    """``center``, ``scale``, ``divide`` and ``normalize``, within the rounding of float32."""
    data = case.data
    layer = draw.choice(data.layers)
    arguments, chosen = draw_selection(draw, case, [layer])
    changes = draw_rescaling(draw)
    places, _ = oracle.select(data, [layer], chosen)
    summary = summarize(data, layer, places)
    if np.isinf(summary.variance).any():  # the variance overflows float64: refused
        return
    stream = case.store.stream(layer, 5, dtype="float64", **changes, **arguments)
    for batch in stream:
        for k, place in enumerate(zip(batch.examples.tolist(), batch.tokens.tolist(), strict=True)):
            want = rescale(data.row(layer, *place, np.float64), changes, summary)
            assert np.allclose(batch.activations[k], want, rtol=1e-9, atol=1e-9, equal_nan=True), (place, changes)


def draw_rescaling(draw: random.Random) -> dict[str, Any]:
    return draw.choice(
        [
            {"center": np.array([0.5, -1.0, 2.0]), "scale": 2.0},
            {"scale": draw.choice(["unit-norm", "sqrt-d", "mean-sqrt-d"])},
            {"center": draw.choice(["mean", np.array([0.5, -1.0, 2.0])]), "scale": "mean-sqrt-d"},
            {"center": "mean"},
            {"divide": "std"},
            {"center": "mean", "divide": "std"},
            {"normalize": "stats"},
        ]
    )


def check_normalizer(draw: random.Random, case: Case, other: Case) -> None:
    """A normalizer of one store, applied to another one: the oracle's numbers, with the same bits by every verb."""
    layer = draw.choice([layer for layer in case.data.layers if layer in other.data.layers])
    arguments, chosen = draw_selection(draw, case, [layer])
    changes = draw_rescaling(draw)
    summary = summarize(case.data, layer, oracle.select(case.data, [layer], chosen)[0])
    if np.isinf(summary.variance).any():  # the variance overflows float64: refused
        return
    values = {} if "normalize" in changes else changes
    norm = case.store.normalizer(layer, **values, **arguments)
    if draw.random() < 0.3:
        norm = pickle.loads(pickle.dumps(norm))
    store, data = other.store, other.data
    dtype = draw.choice([None, "float16", "float32", "float64", "float64"])
    streamed: dict[Place, np.ndarray] = {}
    for batch in store.stream(layer, draw.randint(1, 9), tokens="all", dtype=dtype, normalize=norm, shuffle="window"):
        places = zip(batch.examples.tolist(), batch.tokens.tolist(), strict=True)
        streamed |= {place: row.copy() for place, row in zip(places, batch.activations, strict=True)}
    assert sorted(streamed) == [(i, t) for i, tokens in enumerate(data.tokens_in(layer)) for t in range(tokens)]
    for place, row in streamed.items():
        assert row.dtype == asked(other, dtype)
        if dtype == "float64":
            want = rescale(data.row(layer, *place, np.float64), changes, summary)
            assert np.allclose(row, want, rtol=1e-9, atol=1e-9, equal_nan=True), (place, row, want)
    if not streamed:
        return

    def rows_of(places: list[Place]) -> np.ndarray:
        return np.stack([streamed[place] for place in places])

    places = draw.choices(sorted(streamed), k=draw.randint(1, 6))
    examples, tokens = (list(x) for x in zip(*places, strict=True))
    options: dict[str, Any] = {"dtype": dtype, "normalize": norm}
    assert same(store.gather(layer, examples, tokens, **options), rows_of(places))
    whole = [[place for place in sorted(streamed) if place[0] == i] for i in examples]
    for rows, i, expected in zip(store.sequences(examples, layer, **options), examples, whole, strict=True):
        assert same(rows, rows_of(expected))
        assert same(store.sequence(i, layer, **options), rows)
    acts = store.layer(layer, **options)
    assert same(np.asarray(acts.rows()), rows_of(sorted(streamed)))
    assert same(acts.ragged(examples).values, rows_of([place for part in whole for place in part]))
    lasts = [(i, data.content_of(data.examples[i])[1] - 1) for i in examples]
    if all(token >= 0 for _, token in lasts):
        assert same(store.last_tokens(layer, examples, **options), rows_of(lasts))
    for batch in store.sequences_stream(layer, 9, tokens="all", too_long="split", columns=[], **options):
        numbers = batch.examples[batch.segment_ids].tolist()
        assert same(batch.activations, rows_of(list(zip(numbers, batch.tokens.tolist(), strict=True))))


def check_sequences_stream(draw: random.Random, case: Case) -> None:
    store, data = case.store, case.data
    several = draw.random() < 0.3
    layers = list(data.layers) if several else [draw.choice(data.layers)]
    arguments, chosen = draw_selection(draw, case, layers, ("content", "all"))
    pack = draw.random() < 0.6
    columns = [name for name in ("label", "answer_mask", "weights", "input_ids") if name in data.columns]
    columns = [name for name in columns if None not in data.values(name)]
    tokens = data.tokens_in(layers[0])
    for name in [name for name in columns if name != "label"]:  # lists without any entry have no type in some formats
        if not sum(tokens) or [len(values) for values in data.values(name)] != tokens:
            columns.remove(name)
    options = {
        "pack": pack,
        "fixed_shape": pack and draw.random() < 0.3,
        "too_long": draw.choice(["truncate", "split", "drop"]),
        "shuffle": draw.choice([None, "window", "exact"]),
        "seed": draw.randrange(3),
        "drop_last": draw.random() < 0.3,
        "memory": draw.choice([200, 1000, 100_000]),
        "dtype": draw.choice([None, "float32"]),
        "columns": columns,
        **arguments,
    }
    budget, ranks = draw.randint(2, 14), draw.choice([1, 1, 2])
    if any(data.tokens_in(layer) != data.tokens_in(layers[0]) for layer in layers):
        with refused(actshard.NotStoredError):
            store.sequences_stream(layers, budget, **options)
        return
    places, left_out = oracle.select(data, layers, chosen)
    want = oracle.pieces(places, budget, options["too_long"])
    layer = layers if several else layers[0]

    def fresh(rank: int = 0) -> actshard.SequenceStream:
        return store.sequences_stream(layer, budget, rank=rank, world_size=ranks, **options)

    error = refusal(fresh)
    if error is not None:
        assert "cannot be split" in str(error)
        assert 0 < len(want) < ranks * math.ceil(len(want) / ranks)
        return
    streams = [fresh(rank) for rank in range(ranks)]
    if chosen.max_norm is not None or chosen.min_token:
        assert {name: streams[0].left_out[name] for name in left_out} == left_out
    gone = oracle.too_long(places, budget, options["too_long"])
    assert {name: streams[0].left_out[name] for name in gone} == gone
    assert streams[0].num_sequences == len(want)
    batches = [list(stream) for stream in streams]
    assert {len(part) for part in batches} == {len(streams[0])}
    seen = [
        piece
        for part in batches
        for batch in part
        for piece in pieces_of(case, batch, layers, several, options, budget)
    ]
    assert not Counter(seen) - Counter(want)
    if not options["drop_last"]:
        assert Counter(seen) == Counter(want)
        assert streams[0].num_tokens == sum(len(tokens) for _, tokens, _ in want)
    check_resumed(draw, fresh, batches[0])


def pieces_of(
    case: Case, batch: Any, layers: list[Any], several: bool, options: dict[str, Any], budget: int
) -> list[Piece]:
    """The sequences of a batch, after a check of everything in it."""
    data, found = case.data, []
    dtype = asked(case, options["dtype"])
    inside = batch.segment_ids >= 0
    assert batch.tokens.size <= budget
    assert batch.tokens.shape == ((budget,) if options["fixed_shape"] else batch.tokens.shape)
    assert (batch.mask is None) == bool(inside.all()) or options["fixed_shape"] or not options["pack"]
    assert batch.mask is None or np.array_equal(batch.mask, inside)
    assert not batch.activations[~inside].astype(np.float64).any()
    assert (batch.tokens[~inside] == -1).all()
    assert batch.offsets.tolist() == [0, *np.cumsum(batch.lengths).tolist()]
    for k, example in enumerate(batch.examples.tolist()):
        part = batch.segment_ids == k
        tokens = batch.tokens[part].tolist()
        assert batch.lengths[k] == len(tokens)
        first = int(batch.position_ids[part][0])
        assert batch.position_ids[part].tolist() == list(range(first, first + len(tokens)))
        rows = batch.activations[part]
        for z, layer in enumerate(layers):
            want = data.gather(layer, np.full(len(tokens), example), np.array(tokens, np.int64), dtype)
            assert same(rows[:, z] if several else rows, want)
        labels = [oracle.label_of(data, (example, t)) for t in tokens]
        assert batch.labels is None if data.labels is None else batch.labels[part].tolist() == labels
        for name, column in batch.columns.items():
            value = data.values(name)[example]
            assert (column[part].tolist() if isinstance(value, list) else column[k]) == (
                [value[t] for t in tokens] if isinstance(value, list) else value
            )
        found.append((example, tuple(tokens), first))
    return found


# -- statistics --------------------------------------------------------------------------------------------------------


def check_stats(draw: random.Random, case: Case) -> None:
    layer = draw.choice(case.data.layers)
    arguments, chosen = draw_selection(draw, case, [layer])
    places, _ = oracle.select(case.data, [layer], chosen)
    want = summarize(case.data, layer, places)
    compare_stats(draw, case.store.stats(layer, **arguments), want, places)


def compare_stats(draw: random.Random, stats: actshard.Stats, want: Summary, places: list[Place]) -> None:
    assert stats.rows == want.rows
    for name in ("min", "max", "nan", "inf", "zeros"):
        assert np.array_equal(getattr(stats, name), getattr(want, name)), name
    for name in ("mean", "variance"):
        found, exact = getattr(stats, name), getattr(want, name)
        scale = np.where(np.isfinite(want.max), np.maximum(abs(want.max), abs(want.min)), 0)
        bound = 1e-9 * np.maximum(scale if name == "mean" else scale**2, 1e-300)
        assert ((found == exact) | (abs(found - exact) <= bound) | (np.isnan(found) & np.isnan(exact))).all(), (
            name,
            found,
            exact,
        )
    largest = [(each.column, each.magnitude, each.example, each.token) for each in stats.largest_columns]
    assert largest == want.largest_columns, (largest, want.largest_columns)
    norms = want.norms
    assert stats.norms.rows == len(norms)
    assert [(row.example, row.token) for row in stats.largest_rows] == want.largest_rows
    position = stats.norms_by_position
    rows = dict(zip(position.first.tolist(), position.rows.tolist(), strict=True))
    assert rows == {token: len(found) for token, found in want.norms_by_position.items()}
    assert (stats.repeats.rows, stats.repeats.different) == (len(norms), want.different)
    if not norms:
        assert math.isnan(stats.mean_norm)
        return
    assert math.isclose(stats.mean_norm, math.fsum(norms) / len(norms), rel_tol=1e-9)
    share = draw.random()
    exact = quantile(norms, share)
    assert abs(float(stats.norms.quantile(share)) - exact) <= exact / 256, (share, norms)
    median, massive = quantile(norms, 0.5), {(row.example, row.token) for row in stats.massive_rows}
    for row in stats.largest_rows:  # the median is known within 1/256
        assert row.norm > 101 * median > 0 or (row.example, row.token) not in massive or row.norm > 99 * median
        assert row.norm < 101 * median or not median or (row.example, row.token) in massive
    means = dict(zip(position.first.tolist(), position.mean.tolist(), strict=True))
    for token, found in want.norms_by_position.items():
        assert math.isclose(means[token], math.fsum(found) / len(found), rel_tol=1e-9)


# -- several stores ----------------------------------------------------------------------------------------------------


def check_mixture(draw: random.Random, cases: list[Case]) -> None:
    """Each source's rows of one of its epochs are different ones of its rows; every batch has the shares."""
    layers = [layer for layer in cases[0].data.layers if all(layer in case.data.layers for case in cases)]
    if not layers or len({case.data.d_model for case in cases}) > 1:
        return
    layer, size, ranks = draw.choice(layers), draw.randint(2, 10), draw.choice([1, 2])
    weights = [draw.choice([1.0, 2.0, 0.5]) for _ in cases]
    exhausted = draw.choice(["stop", "repeat"])
    options = {
        "shuffle": draw.choice([None, "window", "exact"]),
        "dtype": "float64",
        "memory": draw.choice([200, 5000]),
        "tokens": draw.choice(["content", "all"]),
        "min_token": draw.choice([0, 1]),
    }
    chosen = Chosen(options["tokens"], min_token=options["min_token"])
    places = [oracle.select(case.data, [layer], chosen)[0] for case in cases]
    seed = draw.randrange(3)

    def fresh(rank: int = 0) -> actshard.MixedStream:
        mixture = actshard.mix(
            [(case.store, w) for case, w in zip(cases, weights, strict=True)], seed=seed, exhausted=exhausted
        )
        return mixture.stream(layer, size, rank=rank, world_size=ranks, **options)

    error = refusal(fresh)
    if error is not None:
        assert "row" in str(error)
        return
    streams = [fresh(rank) for rank in range(ranks)]
    counts = streams[0].counts
    exact = [size * weight / sum(weights) for weight in weights]
    assert sum(counts) == size
    assert all(abs(count - share) < 1 for count, share in zip(counts, exact, strict=True))
    lengths = [len(part) // (count * ranks) for part, count in zip(places, counts, strict=True)]
    assert len(streams[0]) == (min(lengths) if exhausted == "stop" else max(lengths))
    epochs = [[list(stream) for _ in range(2)] for stream in streams]
    unlabelled = any(case.data.labels is None for case in cases)
    for k, (case, length) in enumerate(zip(cases, lengths, strict=True)):
        rows = [[batch for epoch in rank for batch in epoch] for rank in epochs]
        seen = []
        for step in zip(*rows, strict=True):
            own = [
                [
                    (int(b.examples[i]), int(b.tokens[i]), b.activations[i], b.labels, i)
                    for i in np.flatnonzero(b.sources == k)
                ]
                for b in step
            ]
            assert all(len(part) == counts[k] for part in own)
            seen.append([(e, t) for part in own for e, t, *_ in part])
            for e, t, row, labels, i in (x for part in own for x in part):
                assert same(row, case.data.row(layer, e, t, np.float64))
                assert labels is None if unlabelled else labels[i] == oracle.label_of(case.data, (e, t))
        for start in range(0, len(seen), length):
            once = Counter(place for step in seen[start : start + length] for place in step)
            assert not once - Counter(places[k]), "a row occurs once in an epoch of its source"
    check_resumed(draw, fresh, epochs[0][0])


def check_pair(draw: random.Random, a: Case, b: Case) -> None:
    """Rows of two stores side by side."""
    layers = [layer for layer in a.data.layers if layer in b.data.layers]
    dtype = "float64"
    pair = actshard.pair({"a": a.store, "b": b.store}, layers=layers, dtype=dtype, compare=[])
    if draw.random() < 0.5:
        key = draw_key(draw, len(a.data))
        pair, a, b = pair.filter(key), *(replace(case, data=case.data.filter(key)) for case in (a, b))
        assert len(pair) == pair.table.num_rows == len(a.data)
        assert pair.token_counts.tolist() == a.data.token_counts
    names = draw.choice([layers, layers[:1]])
    size = draw.randint(1, 9)
    interleave = draw.random() < 0.3
    chosen = Chosen(draw.choice(["content", "all"]), min_token=draw.choice([0, 1]))
    options = {
        "tokens": chosen.tokens,
        "min_token": chosen.min_token,
        "shuffle": draw.choice([None, "window", "exact"]),
    }
    places, _ = oracle.select(a.data, names, chosen)

    def fresh() -> Any:
        return pair.stream(names, size, interleave=interleave, **options)

    batches = list(fresh())
    check_resumed(draw, fresh, batches)
    seen = []
    for batch in batches:
        for k, place in enumerate(zip(batch.examples.tolist(), batch.tokens.tolist(), strict=True)):
            whose = [(int(s), layer) for s, layer in zip(batch.stores, batch.layers.tolist(), strict=True)]
            found = batch.activations[k : k + 1] if interleave else batch.activations[k]
            whose = whose[k : k + 1] if interleave else whose
            want = np.stack([(a, b)[s].data.row(layer, *place, dtype) for s, layer in whose])
            assert same(found, want), (found, want, place, whose)
            seen += [(place, *x) for x in whose]
    want = Counter((place, s, layer) for place in places for s in (0, 1) for layer in names)
    assert Counter(seen) == want, (Counter(seen) - want, want - Counter(seen), options)
    if places:
        examples, tokens = (list(x) for x in zip(*places[:5], strict=True))
        rows = pair.gather(names, examples, tokens)
        want = [
            [case.data.row(layer, e, t, dtype) for case in (a, b) for layer in names]
            for e, t in zip(examples, tokens, strict=True)
        ]
        assert same(rows, np.stack([np.stack(each) for each in want]))
