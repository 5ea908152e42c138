"""Described folders of float8 or int8 codes with scales open as their products in bfloat16, bit for bit; wrong scales are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import actshard
from actshard.base.errors import ActshardError, FormatError, MissingFileError, UnsupportedError

BF16 = np.dtype(ml_dtypes.bfloat16)
CODES = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2, "int8": np.int8}
KINDS = {
    "whole": ("", (1, 1, 1)),
    "token": ("", (3, 5, 1)),
    "example": ("", (3, 1, 1)),
    "channel": ("", (1, 1, 8)),
    "last axes": ("", (5, 1)),
    "named": ('axes = ["example", "token"]', (3, 5)),
    "scalar": ("", ()),
}
AXES = 'axes = ["example", "token", "dim"]'


def codes_of(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Codes of all values that are finite."""
    raw = np.random.default_rng(3).integers(0, 256, shape).astype(np.uint8).view(CODES[dtype])
    finite = np.isfinite(raw.astype(np.float32))
    return np.where(finite, raw, np.zeros(1, raw.dtype)).astype(raw.dtype)


def scales_of(dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(np.random.default_rng(4).uniform(0.01, 2, shape)).astype(dtype)


def described(folder: Path, scales: str, axes: str = AXES, dtype: str = "int8", more: str = "") -> Path:
    text = f'version = 1\n[activations]\nfiles = "acts.npy"\n{axes}\ndtype = "{dtype}"\n{more}[activations.scales]\n{scales}\n'
    (folder / "layout.toml").write_text(text)
    return folder


def product(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The oracle: code and scale rounded to bfloat16, and their product."""
    return codes.astype(BF16) * scales.astype(np.float32).astype(BF16)


def rows_of(store: actshard.Store, layer: Any) -> np.ndarray:
    return np.concatenate([store.sequence(example, layer) for example in range(len(store))])


def same(found: np.ndarray, want: np.ndarray) -> None:
    assert found.dtype == BF16
    assert np.array_equal(found.view("u2"), np.ascontiguousarray(want.reshape(found.shape)).view("u2"))


@pytest.mark.parametrize("io", ["auto", "pread"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", CODES)
def test_rows_are_codes_times_scales(tmp_path: Path, dtype: str, kind: str, io: str) -> None:
    said, shape = KINDS[kind]
    codes = codes_of(dtype, (3, 5, 8))
    np.save(tmp_path / "acts.npy", codes.view(np.int8))
    for number in (np.float32, np.float16):
        scales = scales_of(number, shape)
        np.save(tmp_path / "scales.npy", scales)
        with actshard.open(described(tmp_path, f'file = "scales.npy"\n{said}', dtype=dtype), io=io) as store:
            wide = scales[:, :, None] if kind == "named" else scales
            same(rows_of(store, 0), product(codes, wide))
            assert store.info()["provenance"]["stored_dtype"] in ("F8_E4M3", "F8_E5M2", "I8")
            assert store.gather(0, [2, 0], [4, 1]).tobytes() == product(codes, wide)[[2, 0], [4, 1]].tobytes()


@pytest.mark.parametrize("number", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("shape", [(4, 3, 1), (1, 3, 1), (4, 1, 1), (4, 1, 8), (1, 1, 8), (1, 1, 1)])
def test_scales_in_the_same_file_along_tokens_and_layers(tmp_path: Path, number: Any, shape: tuple[int, ...]) -> None:
    from safetensors.numpy import save_file

    wants = []
    for n in range(2):
        codes, scales = codes_of("int8", (4, 3, 8)) ^ n, scales_of(number, shape)
        if number is BF16:
            np.save(tmp_path / f"{n}.scales.npy", scales.view("u2"))
            save_file({"acts": codes}, tmp_path / f"{n}.safetensors")
        else:
            save_file({"acts": codes, "acts_scales": scales}, tmp_path / f"{n}.safetensors")
        wants.append(product(codes, scales))
    where = 'files = "{example:d}.scales.npy"\ndtype = "bfloat16"' if number is BF16 else 'tensor = "acts_scales"'
    (tmp_path / "layout.toml").write_text(
        f'version = 1\n[activations]\nfiles = "{{example:d}}.safetensors"\ntensor = "acts"\n'
        f'axes = ["token", "layer", "dim"]\n[activations.scales]\n{where}\n'
    )
    with actshard.open(tmp_path) as store:
        for layer in range(3):
            same(rows_of(store, layer), np.concatenate(wants)[:, layer])
    assert actshard.verify(tmp_path, deep=True).ok


def test_scales_of_axes_that_cannot_be_joined_are_repeated(tmp_path: Path) -> None:
    codes, scales = codes_of("int8", (2, 3, 4, 8)), scales_of(np.float32, (2, 1, 4, 1))
    np.save(tmp_path / "acts.npy", codes)
    np.save(tmp_path / "scales.npy", scales)
    axes = 'axes = ["example", "layer", "token", "dim"]'
    with actshard.open(described(tmp_path, 'file = "scales.npy"', axes)) as store:
        for layer in range(3):
            same(rows_of(store, layer), product(codes, scales)[:, layer])


def test_a_file_and_scales_per_layer(tmp_path: Path) -> None:
    codes = [codes_of("int8", (5, 8)) ^ n for n in range(3)]
    scales = [scales_of(np.float32, (5, 1)) * np.float32(n + 1) for n in range(3)]
    for n in range(3):
        np.save(tmp_path / f"layer_{n}.npy", codes[n])
        np.save(tmp_path / f"scales_{n}.npy", scales[n])
    (tmp_path / "layout.toml").write_text(
        'version = 1\n[activations]\nfiles = "layer_{layer:d}.npy"\naxes = ["row", "dim"]\n'
        '[activations.scales]\nfiles = "scales_{layer:d}.npy"\n'
    )
    with actshard.open(tmp_path) as store:
        for layer in range(3):
            same(rows_of(store, layer), product(codes[layer], scales[layer]))


WRONG: dict[str, tuple[str, Any, type[ActshardError], str]] = {
    "shape": (
        "",
        np.ones((3, 4, 1), "f4"),
        FormatError,
        r"line 6 .*expected axes of \[3, 5, 8\] or 1, found \[3, 4, 1\]",
    ),
    "more axes": ("", np.ones((1, 3, 5, 1), "f4"), FormatError, r"found \[1, 3, 5, 1\]"),
    "float64": ("", np.ones(1, "f8"), FormatError, "expected float32, float16 or bfloat16, found F64"),
    "integers": ("", np.ones(1, "i4"), FormatError, "found I32"),
    "NaN": ("", np.array([[1], [1], [np.nan], [1], [1]], "f4"), FormatError, "expected finite scales, found nan at 2"),
    "infinite": ("", np.full((), np.inf, "f2"), FormatError, "expected finite scales, found inf"),
    "no tensor": ('tensor = "x"', np.ones(1, "f4"), FormatError, "line 6 .*expected an array named 'x'"),
    "no file": ("", None, MissingFileError, "scales.npy"),
    "key": ("pad = 'left'", np.ones(1, "f4"), FormatError, r"line 8: activations.scales.pad: unknown key"),
    "axis": ('axes = ["layer"]', np.ones(1, "f4"), FormatError, r"line 8: activations.scales.axes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_scales_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    said, scales, kind, text = WRONG[name]
    np.save(tmp_path / "acts.npy", codes_of("int8", (3, 5, 8)))
    if scales is not None:
        np.save(tmp_path / "scales.npy", scales)
    with pytest.raises(kind, match=text) as caught:
        actshard.open(described(tmp_path, f'file = "scales.npy"\n{said}'))
    assert "\n" not in str(caught.value)


def test_codes_that_the_core_cannot_take_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "scales.npy", np.ones(1, "f4"))
    np.save(tmp_path / "acts.npy", np.asfortranarray(codes_of("int8", (3, 5, 8))))
    with pytest.raises(UnsupportedError, match="uncompressed and in C order"):
        actshard.open(described(tmp_path, 'file = "scales.npy"'))
    np.save(tmp_path / "acts.npy", np.ones((3, 5, 8), "f4"))
    with pytest.raises(FormatError, match="found F32"):
        actshard.open(described(tmp_path, 'file = "scales.npy"', dtype="float32"))
