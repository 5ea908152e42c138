"""What a user sees of the objects: ``dir``, ``repr``, and the logger."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard import formats
from actshard.formats import options


@pytest.fixture
def store(tmp_path: Path) -> actshard.Store:
    """A dataset with long names, many layers and long texts."""
    path = tmp_path / "d"
    with actshard.create(path, "zarr", layers=[f"blocks.{i}.hook_resid_post" for i in range(60)], d_model=4) as writer:
        writer.append(np.zeros((3, 60, 2, 4), np.float32), columns={"prompt": ["x" * 10_000] * 3})
    return actshard.open(path)


def test_dir_shows_what_is_public(store: actshard.Store) -> None:
    for made in (store, store.stream("all", 2)):
        names = [name for name in dir(made) if not name.startswith("_")]
        inside = [n for n in names if "Internal" in (inspect.getdoc(getattr(type(made), n, None)) or "")]
        assert inside == []
        assert {"close"} <= set(names)
    assert {"gather", "sequence", "layers", "d_model", "table", "filter", "path", "io"} <= set(dir(store))
    assert {"state_dict", "load_state_dict", "epoch", "batch_size", "layers"} <= set(dir(store.stream("all", 2)))
    assert not {"contents", "rows", "group_of", "native_stream", "check_open"} & set(dir(store))


def test_repr_of_everything_fits_a_screen(store: actshard.Store, tmp_path: Path) -> None:
    name = store.layers[0]
    stream = store.stream("all", 4)
    report = actshard.verify(store.path, deep=True)
    done = actshard.convert(store, tmp_path / "other", "zarr", layers=list(store.layers[:40]))
    writer = actshard.create(tmp_path / "new", "zarr", layers=store.layers, d_model=4)
    made: list[Any] = [
        store, store.filter([0]), stream, next(iter(stream)), store.layer(name), store.layer(name).rows(),
        store.layer(name).ragged(), store.stats(name), report, done, writer,
        store.spectrum(name), store.similarity(),
    ]  # fmt: skip
    made += [*report.findings, *done.losses]
    for one in made:
        text = repr(one)
        assert len(text) < 2_000, f"{type(one).__name__}: {len(text)} characters"
        assert text.count("\n") < 20, type(one).__name__


def test_the_logger_tells_what_was_opened_and_decided(
    store: actshard.Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "actshard"):
        again = actshard.open(store.path)
        stream = again.stream("all", 4, shuffle="window")
        for _ in stream:
            pass
        actshard.convert(again, tmp_path / "copy", "zarr")
        actshard.stage(store.path, tmp_path / "staged")
        actshard.stage(store.path, tmp_path / "staged")
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert {record.name for record in caplog.records} == {"actshard"}
    for part in (
        "opened as zarr (detected), io=", "saev: no", "shuffle=window", "epoch 0 read from batch 0 of 2",
        f"converting to zarr at {tmp_path / 'copy'}, from example 0 of 3", "staging to", "already staged at",
    ):  # fmt: skip
        assert part in said
    batches = sum("read from batch" in line for line in said.splitlines())
    assert batches == 1, "one line per loop, none per batch"


def test_nothing_is_printed_unless_logging_is_configured(store: actshard.Store) -> None:
    code = f"import actshard; s = actshard.open({str(store.path)!r}); list(s.stream('all', 4))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def _public_functions() -> dict[str, Any]:
    """Every function, class, method and property that ``actshard`` exports, by name."""
    made: dict[str, Any] = {}
    for name in actshard.__all__:
        found = getattr(actshard, name)
        if inspect.isclass(found):
            made[name] = found
            for member, value in vars(found).items():
                of = (
                    value.fget
                    if isinstance(value, property)
                    else getattr(value, "__func__", getattr(value, "func", value))
                )
                if inspect.isfunction(of) and (not member.startswith("_") or member == "__init__"):
                    made[f"{name}.{member}"] = of
        elif inspect.isfunction(found):
            made[name] = found
    return made


@pytest.mark.parametrize("name", _public_functions())
def test_type_hints_resolve(name: str) -> None:
    typing.get_type_hints(_public_functions()[name])


def test_annotations_cost_no_import() -> None:
    code = "import sys, actshard; print([m for m in ('pyarrow', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(("format", "own"), [("zarr", "prompt"), ("lmprobe", "text")])
def test_texts_are_read_by_either_name(tmp_path: Path, format: str, own: str) -> None:
    texts = ["a", "b", "c"]
    with actshard.create(tmp_path / "d", format, layers=[0], d_model=4) as writer:
        writer.append(np.zeros((3, 1, 2, 4), np.float32), columns={own: texts})
    store = actshard.open(tmp_path / "d")
    assert own in store.table.column_names
    for names in (["text"], ["prompt"], ["text", "prompt"]):
        found = store.read_columns(names)
        assert found.column_names == names
        assert found.to_pydict() == dict.fromkeys(names, texts)
    assert len(store.split(1, by="text")[1]) == len(store.split(1, by="prompt")[1]) == 1
    with pytest.raises(actshard.NotStoredError, match="has no column"):
        store.read_columns(["text", "text_preview"])


def test_the_types_of_options_are_those_that_formats_take() -> None:
    """Both directions: an editor offers no option that is refused, and misses none."""
    typed = {
        name.removesuffix("Options").lower(): set(kind.__annotations__)
        for name, kind in vars(options).items()
        if name.endswith("Options") and name != "FormatOptions"
    }
    assert typed == {
        name.replace("_", ""): set(formats.get(name).target().format_options) for name in formats.written()
    }
    assert set(typing.get_type_hints(options.FormatOptions)) == set().union(*typed.values())


def test_a_store_is_indexed_by_layer_and_names_are_suggested(tmp_path: Path) -> None:
    with actshard.create(tmp_path / "d", "zarr", layers=[2, "blocks.5.hook"], d_model=4) as writer:
        writer.append(np.zeros((3, 2, 2, 4), np.float32))
    store = actshard.open(tmp_path / "d")
    for use in (lambda: store[0], lambda: list(store), lambda: np.asarray(store)):
        with pytest.raises(actshard.ArgumentTypeError, match=r"store\.layer\(2\)\[0\].*store\.table"):
            use()
    with pytest.raises(actshard.LayerError, match=r"Do you mean 2\?"):
        store.layer("2")
    with pytest.raises(actshard.LayerError, match=r"Do you mean 'blocks\.5\.hook'\?"):
        store.stats("blocks.5.hok")
    with pytest.raises(actshard.LayerError, match=r"expected one of .*, found a list of them"):
        store.stats([2, "blocks.5.hook"])  # type: ignore[arg-type]  # what is refused
