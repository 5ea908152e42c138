"""What actshard does not read is named, with what to do: stores of other tools, and files under another extension."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

import actshard
from shell import run_command

ARRAY = np.arange(12, dtype=np.float32).reshape(3, 4)


def saved(write: Callable[[io.BytesIO], object]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def _tar(file: io.BytesIO) -> None:
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("a"), io.BytesIO())


NPY = saved(lambda file: np.save(file, ARRAY))
TABLE = pa.table({"x": [1.0]})
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1234\n"
CONTENTS = {
    "pointer of Git LFS: git lfs pull": LFS,
    "web page: download": b"\n<!DOCTYPE html><html><title>401</title></html>" + b" " * 200,
    "zip archive": saved(lambda file: np.savez(file, a=ARRAY)),
    "HDF5: give it the extension .h5": b"\x89HDF\r\n\x1a\n" + bytes(600),
    "numpy array: give it": NPY,
    "parquet: give it": saved(lambda file: pq.write_table(TABLE, file)),
    "Feather": saved(lambda file: pyarrow.feather.write_feather(TABLE, file, compression="uncompressed")),
    "tar archive": saved(_tar),
    "gzip: gzip -dk": gzip.compress(NPY),
    "xz: xz -dk": lzma.compress(NPY),
    "bzip2: bzip2 -dk": bz2.compress(NPY),
    "SQLite": b"SQLite format 3\x00" + bytes(600),
}
LAYOUT = 'version = 1\n[activations]\nfiles = "{layer:d}%s"\naxes = ["row", "dim"]\n'


@pytest.mark.parametrize("ending", [".npy", ".safetensors"])
@pytest.mark.parametrize("text", CONTENTS)
def test_a_file_under_another_extension_is_named(text: str, ending: str, tmp_path: Path) -> None:
    if ending == ".npy" and CONTENTS[text] == NPY:
        pytest.skip("this is its extension")
    (tmp_path / "layout.toml").write_text(LAYOUT % ending + ('tensor = "x"\n' if ending == ".safetensors" else ""))
    (tmp_path / f"0{ending}").write_bytes(CONTENTS[text])
    with pytest.raises(actshard.FormatError, match=rf"0{ending}: .*\. It is (a |)[^:]*{text}"):
        actshard.open(tmp_path)
    assert any(text in str(finding) for finding in actshard.verify(tmp_path).errors)


@pytest.mark.parametrize("name", ["x", "data.weird"])
@pytest.mark.parametrize("text", CONTENTS)
def test_a_file_without_a_format_is_named_by_its_bytes(text: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / "d" / name
    file.parent.mkdir()
    file.write_bytes(CONTENTS[text])
    for path in (file, file.parent):
        with pytest.raises(actshard.UnknownFormatError, match=f"{name}: (a |)[^:]*{text}"):
            actshard.open(path)


STORES = {
    "a distributed checkpoint of torch": [".metadata", "__0_0.distcp"],
    "MosaicML Streaming": ["index.json", "shard.00000.mds.zstd"],
    "LitData": ["index.json", "chunk-0-0.bin"],
    "a dataset of Lance": ["acts.lance/_versions/1.manifest"],
    "Lance, which": ["_versions/1.manifest", "data/x.lance"],
    "Blosc2": ["layer_3.b2nd"],
    "perhaps of WebDataset": ["000000.tar"],
    "records of TensorFlow": ["a.tfrecord-00000-of-00001"],
    "an ArrayRecord": ["a.array_record"],
    "lines of JSON": ["out.jsonl"],
    "a table as text": ["a.csv"],
}


@pytest.mark.parametrize("text", STORES)
def test_stores_of_other_tools_are_named(text: str, tmp_path: Path) -> None:
    for name in STORES[text]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(actshard.UnknownFormatError, match=f"{text}.*actshard does not read") as caught:
        actshard.open(tmp_path)
    assert "info FOLDER --guess" not in str(caught.value), "it could not help"
    done = run_command("info", tmp_path)
    assert done.returncode != 0
    assert text in done.stderr


def test_a_file_that_is_what_it_says_is_not_renamed(tmp_path: Path) -> None:
    (tmp_path / "layout.toml").write_text(LAYOUT % ".npy")
    (tmp_path / "0.npy").write_bytes(NPY[:-5])
    with pytest.raises(actshard.ActshardError) as caught:
        actshard.open(tmp_path)
    assert "It is" not in str(caught.value)
