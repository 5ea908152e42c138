"""What actshard does not read is named, with what to do: stores of other tools, and files under another extension."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import tarfile
import zipfile
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


def _zip(name: str, content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, content)
    return file.getvalue() + bytes(600)


def _safetensors(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + bytes(600)


NPY = saved(lambda file: np.save(file, ARRAY))
TABLE = pa.table({"x": [1.0]})
VECTORS = saved(lambda file: pq.write_table(pa.table({"hidden": [[1.0, 2.0]]}), file))
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
    "zip archive: unzip": _zip("acts/0.npy", NPY),
    "zip archive, as torch.save writes: give it the extension .pt": _zip("x/data.pkl", b"\x80\x02}."),
    "Office": _zip("[Content_Types].xml", b""),
    "7z archive": b"7z\xbc\xaf\x27\x1c" + bytes(600),
    "RAR archive": b"Rar!\x1a\x07" + bytes(600),
    "lz4: lz4 -dk": b"\x04\x22\x4d\x18" + bytes(600),
    "MATLAB file": b"MATLAB 5.0 MAT-file" + bytes(600),
    "ORC": b"ORC" + bytes(600),
    "Avro": b"Obj\x01" + bytes(600),
    "an image, not activations": b"\x89PNG\r\n\x1a\n" + bytes(600),
    "image, not activations": b"RIFF\x00\x00\x00\x00WEBPVP8 " + bytes(600),
    "recording": b"RIFF\x00\x00\x00\x00WAVEfmt " + bytes(600),
    "PDF": b"%PDF-1.7" + bytes(600),
    "weights of a model": b"GGUF\x03" + bytes(600),
    "a pickle, which runs code": b"\x80\x04]\x94." + b"\xff" * 600,
    "sparse latents of delphi": _safetensors(b'{"activations":{},"locations":{}}'),
    "SQLite": b"SQLite format 3\x00" + bytes(600),
}
LAYOUT = 'version = 1\n[activations]\nfiles = "{layer:d}%s"\naxes = ["row", "dim"]\n'


@pytest.mark.parametrize("ending", [".npy", ".safetensors"])
@pytest.mark.parametrize("text", CONTENTS)
def test_a_file_under_another_extension_is_named(text: str, ending: str, tmp_path: Path) -> None:
    if (ending == ".npy" and CONTENTS[text] == NPY) or (ending == ".safetensors" and "delphi" in text):
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
    "a repository of Icechunk": ["refs/branch.main", "snapshots/1", "manifests/1"],
    "weights of an adapter": ["adapter_config.json", "adapter_model.safetensors"],
    "weights of a sparse autoencoder": ["cfg.json", "sae_weights.safetensors"],
    "weights of a model": ["config.json", "model-00001-of-00002.safetensors"],
    "a checkpoint of DeepSpeed": ["latest", "zero_pp_rank_0_mp_rank_00_optim_states.pt"],
    "a checkpoint of Orbax": ["_CHECKPOINT_METADATA"],
    "a checkpoint of TensorFlow": ["checkpoint", "model.ckpt.index"],
    "logs of TensorBoard": ["events.out.tfevents.1"],
    "text, not activations": ["a.txt", "b.txt"],
    "a program": ["train.py"],
    "JSON, which": ["meta.json"],
    "train/shard.00000.mds: a dataset of MosaicML": ["train/index.json", "train/shard.00000.mds"],
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
    assert not re.search("info FOLDER --guess|read them with the program", str(caught.value)), "it could not help"
    done = run_command("info", tmp_path)
    assert done.returncode != 0
    assert text in done.stderr


def test_a_file_that_is_what_it_says_is_not_renamed(tmp_path: Path) -> None:
    (tmp_path / "layout.toml").write_text(LAYOUT % ".npy")
    (tmp_path / "0.npy").write_bytes(NPY[:-5])
    with pytest.raises(actshard.ActshardError) as caught:
        actshard.open(tmp_path)
    assert "It is" not in str(caught.value)


SINGLE = {
    "notes.txt": (b"a note", "text, not activations"),
    "acts.npy.gz": (gzip.compress(NPY), "gzip: gzip -dk acts.npy.gz"),
    "acts.tar.gz": (gzip.compress(NPY), "a tar archive compressed by gzip: tar -xf acts.tar.gz"),
    "acts.tgz": (gzip.compress(NPY), "tar -xf acts.tgz"),
    "page.html": (b"<html></html>", "a web page"),
    "acts.zip": (_zip("acts/0.npy", NPY), "a zip archive: unzip acts.zip"),
    "empty.npy": (b"", "an empty file"),
    "data": (b"1 2 3", "text: read numbers with numpy.loadtxt"),
    "data.safetensors.bin": (_safetensors(b'{"x":{}}'), "safetensors file: give it the extension .safetensors"),
    "model.onnx": (b"\x08\x07\xff", "read them with the program that wrote them"),
}


@pytest.mark.parametrize("name", SINGLE)
def test_a_single_file_is_named_with_the_next_step(name: str, tmp_path: Path) -> None:
    data, text = SINGLE[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(actshard.UnknownFormatError, match=re.escape(text)):
        actshard.open(tmp_path / name)


def test_files_of_one_kind_are_described_once(tmp_path: Path) -> None:
    for n in range(3):
        (tmp_path / f"{n}.npy").write_bytes(LFS)
    with pytest.raises(actshard.UnknownFormatError) as caught:
        actshard.open(tmp_path)
    assert str(caught.value).count("Git LFS") == 1


@pytest.mark.parametrize("data", [b"\xe4" * 600, b"\xc3\xa4" * 600, b"a" * 511 + b"\xc3\xa4", b"\x00" * 8, b"{" * 9])
def test_any_first_bytes_are_looked_at(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(data)
    is_text = data[:1] not in (b"\x00", b"\xe4")
    with pytest.raises(actshard.UnknownFormatError, match="x: text" if is_text else "with the program that wrote"):
        actshard.open(tmp_path / "x")


@pytest.mark.parametrize("path", ["lab/acts", "hf:lab/acts", "datasets/lab/acts", "huggingface.co/datasets/lab/acts"])
def test_a_name_of_the_hub_typed_as_a_path_is_named(path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (actshard.open, actshard.verify):
        with pytest.raises(actshard.MissingFileError, match=r"hub is hf://datasets/lab/acts$"):
            call(path)
    (tmp_path / "lab").mkdir()
    with pytest.raises(actshard.MissingFileError, match=r"found nothing$"):
        actshard.open("lab/acts")


def test_a_guess_without_arrays_describes_what_lies_there(tmp_path: Path) -> None:
    cases = {
        "zip": ({"acts.zip": _zip("acts/0.npy", NPY)}, "acts.zip: a zip archive: unzip acts.zip"),
        "table": ({"a.parquet": CONTENTS["parquet: give it"]}, "found a.parquet without such a column, with x"),
        "vectors": ({"a.parquet": VECTORS}, "it is a parquet_vectors dataset, which needs no description"),
    }
    for name, (files, text) in cases.items():
        (tmp_path / name).mkdir()
        for file, data in files.items():
            (tmp_path / name / file).write_bytes(data)
        for path in (tmp_path / name, tmp_path / name / file):
            done = run_command("info", "--guess", path)
            assert done.returncode != 0
            assert text in done.stderr
            assert "\n" not in done.stderr.strip()


def test_a_guess_of_a_file_describes_it_for_its_folder(tmp_path: Path) -> None:
    (tmp_path / "acts.npy").write_bytes(NPY)
    np.save(tmp_path / "larger.npy", np.zeros((8, 9), np.float32))
    done = run_command("info", "--guess", tmp_path / "acts.npy")
    assert done.returncode == 0
    assert np.array_equal(actshard.open(tmp_path, layout=done.stdout).gather(0, [0, 1, 2], 0), ARRAY)
