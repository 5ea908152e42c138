"""No public call takes True for 1 or a float for an integer: each says which argument, and what it expected."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from conftest import GOLDEN, saev_dump

NOT_INTEGERS: tuple[Any, ...] = (True, np.True_, 1.0, np.float32(1), -0.0, "1", float("nan"))
NOT_LISTS: tuple[Any, ...] = (
    [True, 2],
    [2, False],
    [1, 2.0],
    [np.True_, 1],
    [[True], [1]],
    np.array([1.0]),
    [1, None],
    ["1"],
)

ROWS = np.arange(6 * 2 * 3 * 4, dtype=np.float32).reshape(6, 2, 3, 4)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> actshard.Store:
    path = tmp_path_factory.mktemp("typed") / "d"
    with actshard.create(path, "zarr", layers=[0, 1], d_model=4) as writer:
        writer.append(ROWS, columns={"prompt": list("abcdef")})
    return actshard.open(path)


Call = Callable[[actshard.Store, Any], object]

INTEGERS: dict[str, Call] = {
    "gather(layer)": lambda s, x: s.gather(x, 0, 0),
    "gather(examples)": lambda s, x: s.gather(1, x, 0),
    "gather(tokens)": lambda s, x: s.gather(1, 0, x),
    "last_tokens(layer)": lambda s, x: s.last_tokens(x),
    "last_tokens(examples)": lambda s, x: s.last_tokens(1, x),
    "sequence(example)": lambda s, x: s.sequence(x, 1),
    "sequence(layer)": lambda s, x: s.sequence(0, x),
    "sequences(examples)": lambda s, x: s.sequences(x, 1),
    "sequences(layer)": lambda s, x: s.sequences([0], x),
    "layer()": lambda s, x: s.layer(x),
    "layer()[example]": lambda s, x: s.layer(1)[x],
    "layer()[0, token]": lambda s, x: s.layer(1)[0, x],
    "layer()[0, 0, element]": lambda s, x: s.layer(1)[0, 0, x],
    "layer()[slice]": lambda s, x: s.layer(1)[x:],
    "layer().rows()[row]": lambda s, x: s.layer(1).rows()[x],
    "layer().ragged(examples)": lambda s, x: s.layer(1).ragged(x),
    "tokens_of(examples)": lambda s, x: s.tokens_of(x),
    "tokens_in(layer)": lambda s, x: s.tokens_in(x),
    "stats(layer)": lambda s, x: s.stats(x),
    "stats(ignore_labels)": lambda s, x: s.stats(1, ignore_labels=[x]),
    "filter(examples)": lambda s, x: s.filter(x),
    "split(seed)": lambda s, x: s.split(0.5, seed=x),
    "stream(layer)": lambda s, x: s.stream(x, 2),
    "stream(batch_size)": lambda s, x: s.stream(1, x),
    "stream(seed)": lambda s, x: s.stream(1, 2, seed=x),
    "stream(epoch)": lambda s, x: s.stream(1, 2, epoch=x),
    "stream(rank)": lambda s, x: s.stream(1, 2, rank=x, world_size=2),
    "stream(world_size)": lambda s, x: s.stream(1, 2, world_size=x),
    "stream(memory)": lambda s, x: s.stream(1, 2, memory=-1 if x == "1" else x),
    "set_epoch": lambda s, x: s.stream(1, 2).set_epoch(x),
    "locate(rows)": lambda s, x: s.stream(1, 2).locate(x),
    "batches(first)": lambda s, x: s.stream(1, 2).batches(x),
    "batches(every)": lambda s, x: s.stream(1, 2).batches(0, x),
    "batches_from(batch)": lambda s, x: s.stream(1, 2).batches_from(x),
    "open(decoded_memory)": lambda s, x: actshard.open(s.path, decoded_memory=-1 if x == "1" else x),
    "create(layers)": lambda s, x: actshard.create(s.path / "no", "zarr", layers=[x] if x != "1" else x, d_model=4),
    "create(d_model)": lambda s, x: actshard.create(s.path / "no", "zarr", layers=[1], d_model=x),
    "create(num_examples)": lambda s, x: actshard.create(s.path / "no", "zarr", layers=[1], d_model=4, num_examples=x),
    "create(tokens_per_example)": lambda s, x: actshard.create(
        s.path / "no", "saev", layers=[1], d_model=4, tokens_per_example=x
    ),
    "create(shard_bytes)": lambda s, x: actshard.create(
        s.path / "no", "saev", layers=[1], d_model=4, shard_bytes=-1 if x == "1" else x
    ),
    "create(part)": lambda s, x: actshard.create(s.path / "no", "zarr", layers=[1], d_model=4, part=(x, 2)),
    "convert(layers)": lambda s, x: actshard.convert(s, s.path / "no", "saev", layers=x),
    "convert(layers=mapping)": lambda s, x: actshard.convert(s, s.path / "no", "saev", layers={1: x}),
    "convert(examples)": lambda s, x: actshard.convert(s, s.path / "no", "saev", examples=x),
    "convert(tokens_per_example)": lambda s, x: actshard.convert(
        s, s.path / "no", "saev", tokens_per_example=x, pad=True
    ),
    "stage(layers)": lambda s, x: actshard.stage(s.path, s.path.parent / "no", layers=x),
}

LISTS: dict[str, Call] = {
    name: INTEGERS[name]
    for name in (
        "gather(examples)",
        "gather(tokens)",
        "last_tokens(examples)",
        "sequences(examples)",
        "layer()[example]",
        "layer()[0, token]",
        "layer().rows()[row]",
        "layer().ragged(examples)",
        "tokens_of(examples)",
        "filter(examples)",
        "locate(rows)",
        "convert(layers)",
        "convert(examples)",
        "stage(layers)",
    )
} | {
    "stream(layer)": lambda s, x: s.stream(x, 2),
    "sequences(layer)": lambda s, x: s.sequences([0] * len(x), x),
    "create(layers)": lambda s, x: actshard.create(s.path / "no", "saev", layers=x, d_model=4),
    "ignore_labels": lambda s, x: s.stream(1, 2, ignore_labels=x),
}


@pytest.mark.parametrize("value", NOT_INTEGERS, ids=repr)
@pytest.mark.parametrize("call", INTEGERS)
def test_what_is_no_integer_is_refused(store: actshard.Store, call: str, value: Any) -> None:
    with pytest.raises((actshard.ArgumentError, actshard.LayerError)) as told:
        INTEGERS[call](store, value)
    assert "\n" not in str(told.value)
    assert not (store.path / "no").exists()


@pytest.mark.parametrize("value", NOT_LISTS, ids=repr)
@pytest.mark.parametrize("call", LISTS)
def test_a_list_with_one_that_is_no_integer_is_refused(store: actshard.Store, call: str, value: Any) -> None:
    with pytest.raises((actshard.ArgumentError, actshard.LayerError)):
        LISTS[call](store, value)
    assert not (store.path / "no").exists()


@pytest.mark.parametrize(
    "test", [True, False, 0, 0.0, -0.0, 1.0, -1, 6, 1.5, float("nan"), "0.2", None, [0.2], np.True_], ids=repr
)
def test_split_takes_a_share_or_a_number(store: actshard.Store, test: Any) -> None:
    with pytest.raises(actshard.ArgumentError, match="test: expected a share between 0 and 1, or 1 to 5 examples"):
        store.split(test)


FLAGS: dict[str, Call] = {
    "stream(drop_last)": lambda s, x: s.stream(1, 2, drop_last=x),
    "stream(interleave)": lambda s, x: s.stream("all", 2, interleave=x),
    "stream(reuse)": lambda s, x: s.stream(1, 2, reuse=x),
    "open(checksums)": lambda s, x: actshard.open(s.path, checksums=x),
    "create(pad)": lambda s, x: actshard.create(s.path / "no", "saev", layers=[1], d_model=4, pad=x),
    "create(resume)": lambda s, x: actshard.create(s.path / "no", "saev", layers=[1], d_model=4, resume=x),
    "convert(pad)": lambda s, x: actshard.convert(s, s.path / "no", "saev", pad=x),
    "convert(verify)": lambda s, x: actshard.convert(s, s.path / "no", "saev", verify=x),
    "convert(exist_ok)": lambda s, x: actshard.convert(s, s.path / "no", "saev", exist_ok=x),
    "verify(deep)": lambda s, x: actshard.verify(s.path, deep=x),
}


@pytest.mark.parametrize("value", ["yes", 1.0, [], np.ones(2)], ids=repr)
@pytest.mark.parametrize("call", FLAGS)
def test_a_flag_is_true_or_false(store: actshard.Store, call: str, value: Any) -> None:
    with pytest.raises(actshard.ArgumentError, match=f"{call.split('(')[1][:-1]}: expected true or false"):
        FLAGS[call](store, value)


def test_integers_of_numpy_are_taken(store: actshard.Store, tmp_path: Path) -> None:
    for kind in (np.int64, np.int32, np.uint8, np.uint64):
        assert np.array_equal(store.gather(kind(1), [kind(2), kind(3)], kind(1)), ROWS[[2, 3], 1, 1])
        assert np.array_equal(store.sequence(kind(2), kind(1)), ROWS[2, 1])
        assert np.array_equal(store.layer(kind(1))[kind(2)], ROWS[2, 1])
        assert store.stream([kind(1)], kind(2), seed=kind(3)).layers == (1,)
        assert len(store.split(kind(2))[1]) == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.stats(5, progress=3),
        lambda s: s.spectrum(5, progress=3),
        lambda s: s.similarity(progress=3),
        lambda s: s.separability("label", progress=3),
        lambda s: actshard.verify(s, progress=3),
        lambda s: actshard.report(s, "none.html", progress=3),
    ],
)
def test_progress_is_a_function(call: Any) -> None:
    store = actshard.open(saev_dump(GOLDEN / "saev" / "v21_cls_labels_multishard"))
    with pytest.raises(actshard.ArgumentTypeError, match="progress: expected a function, found int"):
        call(store)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seed": 1 << 70}, "seed: expected an integer from 0 to 9223372036854775807, found 1180591620717411303424"),
        ({"seed": -1}, "seed: expected an integer of at least 0, found -1"),
        ({"center": "std"}, "center: expected numbers or"),
        ({"normalize": "other"}, "normalize: expected statistics of rows of"),
    ],
)
def test_messages_name_the_argument_that_is_wrong(options: dict[str, Any], said: str) -> None:
    store = actshard.open(saev_dump(GOLDEN / "saev" / "v21_cls_labels_multishard"))
    if options.get("normalize"):
        with actshard.open(GOLDEN / "lmprobe" / "fullseq_f32") as other:
            options = {"normalize": other.stats(other.layers[0])}
            object.__setattr__(options["normalize"], "layer", None)
    with pytest.raises(actshard.ArgumentError, match=said):
        store.stream(store.layers[0], 4, **options)
    stats = store.stats(store.layers[0], seed=0)
    for also in ({}, {"divide": 2.0}):
        with pytest.raises(actshard.ArgumentError, match="center: expected an offset"):
            store.stream(store.layers[0], 4, center=stats.std, **also)


@pytest.mark.parametrize("options", [np.array([]), np.array([1, 2]), [], "", 0, ()], ids=repr)
def test_storage_options_that_are_no_mapping_are_refused_for_local_paths_too(options: Any, tmp_path: Path) -> None:
    """The truth value of an array is an error of numpy's."""
    path = saev_dump(GOLDEN / "saev/v21_cls_labels_multishard")
    store = actshard.open(path)
    for call in (
        lambda: actshard.open(path, storage_options=options),
        lambda: actshard.tokens.open_cache(tmp_path, storage_options=options),
        lambda: actshard.verify(store, storage_options=options),
        lambda: actshard.convert(store, tmp_path / "d", "zarr", storage_options=options),
    ):
        with pytest.raises(actshard.ArgumentTypeError, match="storage_options: expected a mapping"):
            call()


def test_an_unknown_argument_names_the_nearest(store: actshard.Store) -> None:
    calls: tuple[tuple[Callable[..., object], str, str], ...] = (
        (
            lambda **given: store.stream(1, 4, **given),
            "shufle",
            "Store.stream: unknown argument 'shufle'. Do you mean 'shuffle'?",
        ),
        (
            lambda **given: store.gather(1, 0, 0, **given),
            "dtyp",
            "Store.gather: unknown argument 'dtyp'. Do you mean 'dtype'?",
        ),
        (lambda **given: store.stats(1, **given), "sed", "Store.stats: unknown argument 'sed'. Do you mean 'seed'?"),
        (
            lambda **given: actshard.open(store.path, **given),
            "formt",
            "open: unknown argument 'formt'. Do you mean 'format'?",
        ),
        (lambda **given: actshard.verify(store.path, **given), "xyz", "verify: unknown argument 'xyz'"),
    )
    for call, name, message in calls:
        with pytest.raises(actshard.ArgumentTypeError) as caught:
            call(**{name: 1})
        assert str(caught.value) == message
    assert list(inspect.signature(store.stream).parameters)[:3] == ["layer", "batch_size", "shuffle"]
