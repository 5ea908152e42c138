"""Files that ask for more memory than there is raise errors: the process goes on."""

import gzip
import io
import json
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from arrow_files import shared_names

LIMIT = 2 << 30
"""Address space of the process that reads."""

SCRIPT = f"""
import resource, sys, warnings
warnings.simplefilter("ignore")
resource.setrlimit(resource.RLIMIT_AS, ({LIMIT}, {LIMIT}))
import actshard
pattern, expected = sys.argv[2:]
axes = {{"files": pattern, "axes": ["token", "dim"], **({{"tensor": "acts"}} if pattern.endswith("npz") else {{}})}}
options = {{"layout": {{"version": 1, "activations": axes}}}} if pattern else {{}}
def read():
    store = actshard.open(sys.argv[1], **options)
    return store.table if not pattern else store.gather(0, [0], [1])
try:
    read()
except actshard.ActshardError as error:
    assert type(error).__name__ == expected, error
    assert sys.argv[1] in str(error), error
else:
    raise AssertionError("read")
try:
    report = actshard.verify(sys.argv[1], deep=True, **options)
    assert report.ok == (expected == "NoMemoryError"), report
except actshard.NoMemoryError:
    assert expected == "NoMemoryError"
"""


def sparse(path: Path, head: bytes, size: int) -> None:
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size)


def header(rows: int, width: int, fortran: bool = False) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<f4", "fortran_order": fortran, "shape": (rows, width)})
    return buffer.getvalue()


def write_columns(folder: Path) -> str:
    """Column-major, 3 GiB."""
    head = header(3 << 18, 1024, fortran=True)
    sparse(folder / "0.npy", head, len(head) + (3 << 30))
    return "{example:d}.npy"


def write_archive_member(folder: Path) -> str:
    """A member that inflates to 3 GiB, in 3 MB."""
    with (
        zipfile.ZipFile(folder / "0.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("acts.npy", "w", force_zip64=True) as member,
    ):
        member.write(header(3 << 18, 1024))
        for _ in range(48):
            member.write(bytes(64 << 20))
    return "{example:d}.npz"


def write_gzipped(folder: Path) -> str:
    sparse(folder / "0.pt.gz", gzip.compress(b"")[:10], 3 << 30)
    return "{example:d}.pt.gz"


def write_long_record(folder: Path) -> str:
    """A torch file whose pickle has 100 bytes, in 3 GiB of deflated data."""
    name, stored = b"a/data.pkl", 3 << 30
    extra = struct.pack("<HHQQ", 1, 16, 100, stored)
    sizes = (8, 0, 33, 0, 0xFFFFFFFF, 0xFFFFFFFF, len(name), len(extra))
    local = struct.pack("<IHHHHHIIIHH", 0x04034B50, 45, 0, *sizes) + name + extra
    central = struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, 45, 45, 0, *sizes, 0, 0, 0, 0, 0) + name + extra
    at = len(local) + stored
    end = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, 1, 1, len(central), at)
    end += struct.pack("<IIQI", 0x07064B50, 0, at + len(central), 1)
    end += struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 1, 1, len(central), 0xFFFFFFFF, 0)
    sparse(folder / "0.pt", local, at)
    with (folder / "0.pt").open("ab") as file:
        file.write(central + end)
    return "{example:d}.pt"


def write_shared_names(folder: Path) -> str:
    """4000 columns that share a name of 1 MiB."""
    (folder / "data-00000-of-00001.arrow").write_bytes(shared_names(4000, "a" * (1 << 20)))
    files = [{"filename": "data-00000-of-00001.arrow"}]
    state = {
        "_data_files": files,
        "_fingerprint": "x",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
    }
    (folder / "state.json").write_text(json.dumps({**state, "_output_all_columns": False, "_split": None}))
    features = {"a": {"feature": {"dtype": "float32", "_type": "Value"}, "length": 4, "_type": "Sequence"}}
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    return ""


def write_fill(folder: Path) -> str:
    """100,000 strings without chunks, whose fill value has 256 KiB."""
    group = {"zarr_format": 3, "node_type": "group", "attributes": {}}

    def array(shape: list[int], kind: str, fill: object, codec: dict[str, object]) -> dict[str, object]:
        grid = {"name": "regular", "configuration": {"chunk_shape": shape}}
        keys = {"name": "default", "configuration": {"separator": "/"}}
        fields = {
            "shape": shape,
            "data_type": kind,
            "chunk_grid": grid,
            "chunk_key_encoding": keys,
            "fill_value": fill,
            "codecs": [codec],
        }
        return {"zarr_format": 3, "node_type": "array", "attributes": {}, **fields}

    n = 100_000
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    documents = {
        "": group,
        "arrays": group,
        "arrays/activations": array([n, 1, 1, 4], "float32", 0.0, little),
        "arrays/name": array([n], "string", "a" * (1 << 18), {"name": "vlen-utf8"}),
    }
    for name, document in documents.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "zarr.json").write_text(json.dumps(document))
    return ""


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (write_columns, "NoMemoryError"),
        (write_archive_member, "NoMemoryError"),
        (write_gzipped, "NoMemoryError"),
        (write_long_record, "FormatError"),
        (write_shared_names, "FormatError"),
        (write_fill, "FormatError"),
    ],
)
@pytest.mark.slow
def test_a_file_that_needs_too_much_memory_is_an_error(
    write: Callable[[Path], str], expected: str, tmp_path: Path
) -> None:
    folder = tmp_path / "a.zarr"
    folder.mkdir()
    pattern = write(folder)
    command = [sys.executable, "-c", SCRIPT, str(folder.resolve()), pattern, expected]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


FLAT = """
import sys, warnings
warnings.simplefilter("ignore")
import resource
import numpy as np, actshard
kind, n = sys.argv[2], int(sys.argv[3])
shape = {"shape": [-1, 4], "dtype": "float16"} if kind == "bin" else {}
axes = {"files": "rows." + kind, "axes": ["row", "dim"], **shape}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
store = actshard.open(sys.argv[1], layout={"version": 1, "activations": axes})
assert store.num_examples == len(store.token_counts) == n
assert store.gather(0, [0, n - 1, n // 2], [0]).tolist() == [[0] * 4, [1] * 4, [0] * 4]
assert store.tokens_of([n - 1]).tolist() == [1] and store.layer(0)[n - 1].tolist() == [[1] * 4]
batch = next(iter(store.stream(0, 64)))
assert batch.examples.tolist() == list(range(64))
batch = next(iter(store.stream(0, 64, shuffle="exact", seed=3)))
assert len(set(batch.examples.tolist())) == 64
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bin", "npy"])
def test_rows_of_a_flat_file_take_no_memory_each(kind: str, tmp_path: Path) -> None:
    n = 300_000_000
    head = b"" if kind == "bin" else header(n, 4).replace(b"<f4", b"<f2")
    sparse(tmp_path / f"rows.{kind}", head, len(head) + 8 * (n - 1))
    with (tmp_path / f"rows.{kind}").open("ab") as file:
        file.write(np.ones(4, np.float16).tobytes())
    command = [sys.executable, "-c", FLAT, str(tmp_path), kind, str(n)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) < 200 << 10  # KiB: the pages of the rows that were read, and of libraries
