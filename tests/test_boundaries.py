"""Errors of the system or of a file become one ActshardError with a path; commands print it in one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard.base.errors import boundary
from actshard.formats.report import Report
from conftest import GOLDEN, refuses, saev_dump
from shell import run_command, run_script
from waiting import PATIENCE

Copy = Callable[..., Path]
DATASETS = {
    "saev": saev_dump(GOLDEN / "saev/v21_cls_labels_multishard"),
    "lmprobe": GOLDEN / "lmprobe/fullseq_logits_router",
    "zarr": GOLDEN / "zarr/single_consolidated",
    "pickle": GOLDEN / "pickle/numpy2_proto4",
}


def run(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "actshard.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE, **options)


AS_NOBODY = """
import json, os, signal, sys, warnings
warnings.simplefilter("ignore")
import actshard
root, made = sys.argv[1:]
def everything():
    verbs = {"open": actshard.open, "verify": actshard.verify, "merge": lambda p: actshard.merge(made, [p]),
             "convert": lambda p: actshard.convert(p, made + "2", "zarr")}
    for name, verb in verbs.items():
        try:
            found = verb(root)
            told[name] = [] if name != "verify" else sorted(found.codes())
        except actshard.ActshardError as error:
            told[name] = [type(error).__name__, str(error)]
        except BaseException as error:
            told[name] = ["FOREIGN", repr(error)]
told = {}
everything()  # once as root: modules are imported while they can be
os.setgroups([]); os.setgid(65534); os.setuid(65534)
everything()
print(json.dumps(told))
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user who may not read")
@pytest.mark.parametrize("format", DATASETS)
def test_folders_that_may_not_be_read_are_one_clear_error(tmp_path: Path, format: str) -> None:
    for above in [tmp_path, *tmp_path.parents]:
        above.chmod(above.stat().st_mode | 0o055)
    copy = tmp_path / DATASETS[format].name
    shutil.copytree(DATASETS[format], copy)
    folders = [copy, *(p for p in sorted(copy.rglob("*")) if p.is_dir())]
    for folder in folders:
        for mode in (0o000, 0o444):
            before = folder.stat().st_mode
            folder.chmod(mode)
            done = run_script(AS_NOBODY, copy, tmp_path / "made")
            folder.chmod(before)
            for made in tmp_path.glob("made*"):
                shutil.rmtree(made)
            told = json.loads(done.stdout)
            assert not [found for found in told.values() if "FOREIGN" in found], (folder, mode)
            if folder == copy:
                assert told["open"][0] in ("FileAccessError", "UnknownFormatError"), told


def test_loops_of_links_are_one_clear_error(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for verb in (actshard.open, actshard.verify, lambda p: actshard.convert(p, tmp_path / "d", "zarr")):
        with refuses(actshard.FileAccessError, loop, "symbolic links"):
            verb(loop)
    for format, source in DATASETS.items():
        copy = tmp_path / format
        shutil.copytree(source, copy)
        files = sorted(p for p in copy.rglob("*") if p.is_file())
        for file in files[:: max(1, len(files) // 12)]:
            data = file.read_bytes()
            file.unlink()
            file.symlink_to(file)
            actshard.verify(copy)
            file.unlink()
            file.write_bytes(data)


def test_what_python_itself_raises_becomes_ours() -> None:
    for raised, kind in (
        (MemoryError("Unable to allocate 16.0 GiB"), actshard.NoMemoryError),
        (RecursionError(), actshard.FormatError),
        (PermissionError(13, "Permission denied", "/x"), actshard.FileAccessError),
        (OSError(12, "Cannot allocate memory", "/x"), actshard.NoMemoryError),
    ):
        with refuses(kind, Path("/x")), boundary("/x", "open"):
            raise raised
    with pytest.raises(MemoryError), boundary(None, "open"):
        raise MemoryError
    with refuses(actshard.ClosedError, None), boundary("/x", "open"):
        raise actshard.ClosedError("ours stay as they are")


@pytest.mark.parametrize("size", ["9" * 400 + "GiB", "9" * 400, "1" + "0" * 30 + "TB", 10**400])
def test_sizes_of_hundreds_of_digits_are_refused(size: Any) -> None:
    with refuses(actshard.ArgumentError, None, "decoded_memory"):
        actshard.open(DATASETS["zarr"], decoded_memory=size)


def test_json_of_millions_of_values_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_bytes(b"[" + b"[]," * 5_000_000 + b"[]]")
    with refuses(actshard.FormatError, tmp_path / "metadata.json", "JSON values"):
        actshard.open(tmp_path, format="saev")


@pytest.mark.slow
def test_the_commands_show_what_no_terminal_can(tmp_path: Path) -> None:
    """Lone surrogates from metadata are escaped, in text and in JSON."""
    with actshard.create(tmp_path / "d", "zarr", layers=[0], d_model=2, metadata={"model_id": "m"}) as writer:
        writer.append(np.ones((1, 1, 2, 2), np.float32))
    for file in (tmp_path / "d").rglob(".z*"):
        file.write_text(file.read_text().replace('"model_id": "m"', '"model_id": "\\ud800é"'))
    for environment in ({}, {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}):
        shown = run("info", tmp_path / "d", env={**os.environ, **environment})
        assert shown.returncode == 0, shown.stderr
        assert "\\ud800" in shown.stdout
        told = run("info", tmp_path / "d", "--json", env={**os.environ, **environment})
        assert told.returncode == 0, told.stderr
        assert json.loads(told.stdout)["model"] == "\\ud800é"  # valid JSON for any program


def test_the_status_of_verify_tells_warnings_from_what_could_not_be_checked(tmp_path: Path) -> None:
    warned = tmp_path / "w"
    shutil.copytree(DATASETS["lmprobe"], warned)
    (warned / "tensors/stray.safetensors").write_bytes(b"")
    assert run_command("verify", DATASETS["lmprobe"]).returncode == 0
    assert run_command("verify", warned).returncode == 1
    (tmp_path / "empty").mkdir()
    assert run_command("verify", tmp_path / "empty").returncode == 2  # it exists, but is not a dataset
    for words in ([tmp_path / "nowhere"], [warned, "--format", "csv"], [warned, "--depe"], [], ["s3://b/x"]):
        done = run_command("verify", *words)
        assert done.returncode == 3, (words, done.stderr)
        assert "Traceback" not in done.stderr
    assert run_command("verify", "--help").returncode == 0
    assert run_command("info", tmp_path / "nowhere").returncode == 3


def nested(root: Path, caches: int) -> Path:
    """An lmprobe dataset that contains token caches."""
    dataset = root / "d"
    shutil.copytree(DATASETS["lmprobe"], dataset)
    (root / "texts.jsonl").write_text('{"input_ids": [1, 2, 3]}\n' * 4)
    for i in range(caches):
        from actshard.tokens import build_cache

        build_cache(root / "texts.jsonl", dataset / f"tokens{i}" / "train", None, {"type": "prebuilt"})
    return dataset


@pytest.mark.parametrize("caches", [1, 2])
def test_every_verb_looks_at_what_is_at_the_path(tmp_path: Path, caches: int) -> None:
    dataset = nested(tmp_path, caches)
    assert actshard.open(dataset).format == "lmprobe"
    report = actshard.verify(dataset)
    assert (report.format, report.path, report.ok) == ("lmprobe", dataset, True)
    assert json.loads(run_command("info", dataset, "--json").stdout)["format"] == "lmprobe"
    assert "norms" in json.loads(run_command("head", dataset, "--json", "-n", "1").stdout)[0]
    # A dataset at the path takes precedence over datasets below it.
    cache = dataset / "tokens0/train"
    assert actshard.verify(cache).format == "levanter"
    assert actshard.verify(dataset, format="levanter").ok == (caches == 1)
    assert actshard.verify(dataset / "tokens0").path == cache
    assert actshard.verify(tmp_path).path == dataset
    assert actshard.open(tmp_path).path == dataset
    if caches == 1:
        shutil.rmtree(dataset / "index")
        shutil.rmtree(dataset / "tensors")
        assert actshard.verify(tmp_path).path == cache
        assert json.loads(run_command("info", tmp_path, "--json").stdout)["format"] == "levanter"


def test_the_folder_of_parts_is_no_dataset(tmp_path: Path) -> None:
    with actshard.create(tmp_path / "d", "zarr", layers=[0], d_model=2, part=(0, 2)) as writer:
        writer.append(np.ones((1, 1, 2, 2), np.float32))
    for path in (tmp_path / "d", tmp_path / "d/.parts"):
        with refuses(actshard.UnfinishedError, path, "1 unmerged part of a dataset"):
            actshard.open(path)
        assert actshard.verify(path).codes() == {"unfinished"}


def test_a_report_of_many_findings_compares_none_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from actshard.formats.report import Finding

    compared = 0
    equal = Finding.__eq__

    def counted(self: Finding, other: object) -> bool:
        nonlocal compared
        compared += 1
        return equal(self, other)

    monkeypatch.setattr(Finding, "__eq__", counted)
    report = Report(Path("x"), None, False)
    for _ in range(2):
        for i in range(3000):
            report.add("layout", Path("x"), f"{i}")
            report.error(actshard.FormatError(f"{i}", path="y"), Path("x"))
    assert len(report.findings) == 3001
    assert compared < 10_000
