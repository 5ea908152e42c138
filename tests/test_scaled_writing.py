"""Writing float8 and int8 states with scales: bytes of hs-connectors, a numpy oracle, measured errors, resumption, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import actshard
from draft_files import DRAFT, opened
from test_speculators import read_tensors

GOLDEN = DRAFT / "speculators_fp8"
BF16 = np.dtype(ml_dtypes.bfloat16)
LIMIT = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
AXES: dict[str, tuple[int, ...]] = {"token": (1, 2), "whole": (0, 1, 2), "layer": (0, 2), "channel": (0, 1)}
MASK = (1 << 64) - 1


def mixed(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def golden_input(example: int, tokens: int) -> np.ndarray:
    """The states that were quantised for the golden data, ``(tokens, 4, 24)``: see its README."""
    seed = mixed(202)
    made = np.empty((tokens, 4, 24), np.float32)
    for t in range(tokens):
        for k, slot in enumerate((0, 1, 2, 60000)):
            for d in range(24):
                made[t, k, d] = ((mixed((example << 48 | slot << 32 | t << 16 | d) ^ seed) >> 56) - 128) / 16
    if example == 2:
        made[3, 1] *= 0  # zeros with the signs of the values
    if example == 3:
        made[2] = 0
    if example == 4:
        made[0, 0] *= 2.0**20
        made[1, 3] *= 2.0**-30
    return made


def written(
    path: Path, states: list[np.ndarray], dtype: str = "float8_e4m3fn", scales: str = "token", **more: Any
) -> Path:
    """Writes examples ``(tokens, 4, width)``."""
    with actshard.create(
        path, "speculators", layers=[0, 1, 2, "last"], d_model=states[0].shape[2], dtype=dtype, scales=scales, **more
    ) as writer:
        for x in states:
            writer.append([x.transpose(1, 0, 2)], columns={"input_ids": [list(range(len(x)))]})
    return path


def test_files_are_those_of_hs_connectors_byte_for_byte(tmp_path: Path) -> None:
    source = opened(GOLDEN)
    with actshard.create(
        tmp_path / "out", "speculators", layers=[0, 1, 2, "last"], d_model=24, dtype="float8_e4m3fn", scales="token"
    ) as writer:
        for i, ids in enumerate(source.table["input_ids"].to_pylist()):
            states = golden_input(i, len(ids)).astype(BF16)
            writer.append([states.transpose(1, 0, 2)], columns={"input_ids": [ids]})
    for i in range(5):
        found = tmp_path / f"out/hidden_states/hs_{i}.safetensors"
        assert found.read_bytes() == (GOLDEN / f"hidden_states/hs_{i}.safetensors").read_bytes(), i
    assert actshard.verify(tmp_path / "out", deep=True).ok


def quantised(x: np.ndarray, dtype: str, scales: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales and what is read back, by numpy."""
    wide = x.astype(np.float32)
    size = np.abs(np.where(np.isfinite(wide), wide, 0)).max(AXES[scales], keepdims=True)
    scale = np.maximum(size / np.float32(LIMIT[dtype]), np.float32(1e-12))
    ratio = wide / scale
    codes = np.rint(ratio).clip(-127, 127).astype(np.int8) if dtype == "int8" else ratio.astype(np.dtype(dtype))
    with np.errstate(invalid="ignore"):
        return codes, scale, codes.astype(BF16) * scale.astype(BF16)


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("scales", AXES)
def test_codes_scales_and_error_are_those_of_numpy(tmp_path: Path, dtype: str, scales: str) -> None:
    random = np.random.default_rng(len(dtype) + len(scales))
    states = [
        (random.normal(size=(n, 4, 40)) * np.exp(random.normal(0, 6, (n, 4, 1)))).astype(BF16) for n in (1, 7, 33)
    ]
    states[1][2] = 0
    path = written(tmp_path / "out", states, dtype, scales)
    store = opened(path)
    error, worst, squares, both, vanished = 0.0, 0.0, 0.0, 0.0, 0
    for i, x in enumerate(states):
        codes, scale, back = quantised(x, dtype, scales)
        held = read_tensors_of(path, i)
        assert np.array_equal(held["hidden_states"].reshape(-1).view(np.uint8), codes.reshape(-1).view(np.uint8))
        assert np.array_equal(held["hidden_states_scales"], scale)
        for k, layer in enumerate(store.layers):
            assert np.array_equal(store.sequence(i, layer).view(np.uint16), back[:, k].view(np.uint16))
        lost = back.astype(np.float64) - x.astype(np.float64)
        wide = x.astype(np.float64)
        error = max(error, float(np.abs(lost).max()))
        norms = np.square(wide).sum(2)
        worst = max(worst, float(np.sqrt(np.square(lost).sum(2)[norms > 0] / norms[norms > 0]).max()))
        squares, both = squares + np.square(lost).sum(), both + norms.sum()
        vanished += int(((wide != 0) & (back == 0)).sum())
    said = store.metadata["actshard_scales"]
    assert (said["dtype"], said["scales"], said["vanished"], said["saturated"]) == (dtype, scales, vanished, 0)
    assert said["max_abs_error"] == error
    np.testing.assert_allclose([said["max_row_error"], said["relative_error"]], [worst, np.sqrt(squares / both)])


def read_tensors_of(path: Path, i: int) -> dict[str, np.ndarray]:
    data = (path / f"hidden_states/hs_{i}.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    numpy = {"F8_E4M3": "u1", "F8_E5M2": "u1", "I8": "u1", "F32": "<f4", "I64": "<i8"}
    return {
        name: np.frombuffer(data[8 + size :][slice(*entry["data_offsets"])], numpy[entry["dtype"]]).reshape(
            entry["shape"]
        )
        for name, entry in json.loads(data[8 : 8 + size]).items()
    }


def test_a_conversion_reports_the_error_and_compares_what_was_stored(tmp_path: Path) -> None:
    source = DRAFT / "speculators_bf16"
    done = actshard.convert(source, tmp_path / "out", "speculators", dtype="float8_e4m3fn", scales="token", verify=True)
    (loss,) = [loss for loss in done.losses if loss.what == "scales"]
    assert "bfloat16 rows are stored as float8_e4m3fn with scales (token): relative error 0.0" in loss.detail
    assert "0 values saturated" in loss.detail
    again = actshard.convert(
        source, tmp_path / "out", "speculators", dtype="float8_e4m3fn", scales="token", exist_ok=True
    )
    assert [x for x in again.losses if x.what == "scales"] == [loss]
    with pytest.raises(actshard.ExistsError, match="another dataset"):
        actshard.convert(source, tmp_path / "out", "speculators", dtype="float8_e4m3fn", scales="layer", exist_ok=True)
    with pytest.raises(actshard.ExistsError, match="another dataset"):
        actshard.convert(source, tmp_path / "out", "speculators", exist_ok=True)
    (plan,) = actshard.writing.converting.preview(
        source, tmp_path / "plan", "speculators", dtype="int8", scales="channel"
    )
    assert any(x.what == "scales" and "convert() measures the error" in x.detail for x in plan.losses)


def test_damage_of_codes_is_found_by_verify_after_a_conversion(tmp_path: Path) -> None:
    source = DRAFT / "speculators_bf16"
    actshard.convert(source, tmp_path / "out", "speculators", dtype="int8", scales="channel")
    path = tmp_path / "out/hidden_states/hs_1.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x55
    path.write_bytes(data)
    with pytest.raises(actshard.FormatError, match=r"example 1, layer last, token \d+: differs from its source"):
        actshard.convert(
            source, tmp_path / "out", "speculators", dtype="int8", scales="channel", exist_ok=True, verify=True
        )


def test_a_resumed_writer_makes_the_same_files_and_the_same_error(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    states = [random.normal(size=(n, 4, 8)).astype(BF16) for n in (3, 5, 2, 4)]
    whole = written(tmp_path / "whole", states)
    settings: dict[str, Any] = {
        "layers": [0, 1, 2, "last"],
        "d_model": 8,
        "dtype": "float8_e4m3fn",
        "resume": True,
    }
    for part in (states[:2], states[2:]):
        writer = actshard.create(tmp_path / "parts", "speculators", scales="token", **settings)
        for x in part:
            writer.append([x.transpose(1, 0, 2)], columns={"input_ids": [list(range(len(x)))]})
        writer.flush()
        if part is not states[2:] and len(part) == 2 and writer.committed == 2:
            writer.abort()
            with pytest.raises(actshard.ArgumentError, match="scales"):
                actshard.create(tmp_path / "parts", "speculators", scales="layer", **settings)
        else:
            writer.close()
    for file in sorted(p.relative_to(whole) for p in whole.rglob("*") if p.is_file()):
        assert (tmp_path / "parts" / file).read_bytes() == (whole / file).read_bytes(), file


@pytest.mark.parametrize(("dtype", "bad"), [("float8_e4m3fn", np.inf), ("int8", np.nan), ("int8", -np.inf)])
def test_values_that_codes_cannot_express_are_refused(tmp_path: Path, dtype: str, bad: float) -> None:
    states = np.ones((5, 4, 8), BF16)
    states[3, 1, 2] = bad
    with pytest.raises(actshard.DtypeError, match=r"example 1, token 3: expected values .* found 1 from this token on"):
        written(tmp_path / "out", [np.ones((2, 4, 8), BF16), states], dtype)


def test_nan_and_infinity_that_codes_have_are_kept_and_told(tmp_path: Path) -> None:
    states = np.full((4, 4, 8), 3, BF16)
    states[1, 0, 0], states[2, 3, 7] = np.nan, -np.inf
    store = opened(written(tmp_path / "out", [states], "float8_e5m2"))
    assert np.isnan(store.gather(0, 0, 1)[0, 0])
    assert store.gather("last", 0, 2)[0, 7] == -np.inf
    assert store.metadata["actshard_scales"]["nan"] == 1
    assert np.array_equal(store.gather(1, 0, 1)[0], states[1, 1])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dtype": "float8_e4m3fn"}, "speculators stores float8_e4m3fn with scales: pass scales='token'"),
        (
            {"scales": "token"},
            "scales: expected dtype= to be one of 'float8_e4m3fn', 'float8_e5m2', 'int8', found none",
        ),
        ({"dtype": "bfloat16", "scales": "token"}, "found bfloat16"),
        (
            {"dtype": "int8", "scales": "row"},
            "scales: expected one of 'token', 'whole', 'layer', 'channel', found 'row'",
        ),
    ],
)
def test_dtype_and_scales_belong_together(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises((actshard.ArgumentError, actshard.DtypeError), match=said):
        actshard.create(tmp_path / "out", "speculators", layers=[0, "last"], d_model=8, **given)


def test_the_error_is_not_carried_to_a_dataset_without_scales(tmp_path: Path) -> None:
    path = written(tmp_path / "out", [np.ones((2, 4, 8), BF16)])
    actshard.convert(path, tmp_path / "plain", "speculators")
    assert "actshard_scales" not in opened(tmp_path / "plain").metadata
    assert read_tensors(tmp_path / "plain/hidden_states/hs_0.safetensors")["hidden_states"].dtype == np.uint16


@pytest.mark.parametrize("scales", AXES)
@pytest.mark.parametrize("dtype", LIMIT)
def test_verify_reports_scales_that_are_not_positive_and_clipped_codes(tmp_path: Path, dtype: str, scales: str) -> None:
    """What is written has no such finding, whatever shares a scale."""
    random = np.random.default_rng(1)
    path = written(tmp_path / "out", [random.normal(size=(9, 4, 64)).astype(BF16)], dtype, scales)
    assert actshard.verify(path).ok
    assert actshard.verify(path).codes() <= {"no-checksum"}
    file = path / "hidden_states/hs_0.safetensors"
    data = bytearray(file.read_bytes())
    codes = np.frombuffer(data, np.uint8)[-9 * 4 * 64 :]
    codes[: len(codes) // 2] = {"float8_e4m3fn": 0xFE, "float8_e5m2": 0x7B, "int8": 0x81}[dtype]
    begin = len(data) - 9 * 4 * 64 - 4 * {"token": 9, "whole": 1, "layer": 4, "channel": 64}[scales]
    data[begin : begin + 4] = np.float32(-1).tobytes()
    file.write_bytes(data)
    found = {finding.code: str(finding) for finding in actshard.verify(path).findings}
    assert "1 of" in found["scale-value"]
    assert "the first is -1.0" in found["scale-value"]
    assert "have the largest magnitude" in found["saturated-codes"]
