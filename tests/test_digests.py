"""Orders, files, states and complaints are a promise: what actshard makes of fixed inputs never changes.

``tests/digests.json`` has digests of them. One that changes means that runs of users cannot be resumed or repeated, that files
differ between releases, or that programs which ask for a kind or a code no longer find it: mend the code, not the digest.

Nothing writes the record. ``python tests/test_digests.py [GROUP ...]`` prints what is found now, as JSON; new entries (a new
format's, say) are copied from there by hand, and those that are there stay as they are. ``tests/test_orders.py`` holds the
orders of the golden datasets likewise.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from digested import complaints, files, reads, states, still, streams, token_batches

GROUPS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "streams": streams.found,
    "states": states.found,
    "token batches": token_batches.found,
    "files": files.found,
    "complaints": complaints.found,
    "reads": reads.found,
}
VERSIONS = {"pyarrow": pa.__version__}
RECORD = Path(__file__).with_name("digests.json")


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    made = json.loads(RECORD.read_text(encoding="utf-8"))
    return without_bytes(made) if made["versions"] != VERSIONS else made


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder, in memory where that can be: hundreds of writers each wait for the disk several times."""
    with _folder() as made:
        yield made


@contextmanager
def _folder() -> Iterator[Path]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as made, still(Path(made)):
        yield Path(made)


def differences(found: Any, wanted: Any, at: str = "") -> list[str]:
    """The names of what is not as it was: shorter to read than two large dictionaries."""
    if not isinstance(found, dict) or not isinstance(wanted, dict):
        return [] if found == wanted else [f"{at}: expected {wanted}, found {found}"]
    gone = [f"{at}/{name}: is gone" for name in wanted if name not in found]
    new = [f"{at}/{name}: is not on record" for name in found if name not in wanted]
    return gone + new + [d for k in found if k in wanted for d in differences(found[k], wanted[k], f"{at}/{k}")]


def without_bytes(value: Any) -> Any:
    """A record without the bytes of Parquet files, which another release of pyarrow writes otherwise."""
    if isinstance(value, dict):
        return {k: without_bytes(v) for k, v in value.items() if k != "bytes" or "contents" not in value}
    return value


@pytest.mark.parametrize("shuffle", streams.SHUFFLES)
@pytest.mark.parametrize("layout", streams.LAYOUTS)
def test_streams_are_what_they_ever_were(
    layout: str, shuffle: str | None, recorded: dict[str, Any], folder: Path
) -> None:
    digests = json.loads(json.dumps(streams.found(folder, [layout], [shuffle])))
    name = f"{layout}, {shuffle}"
    assert differences(digests, {name: recorded["streams"][name]}) == []


def test_all_streams_on_record_are_compared(recorded: dict[str, Any]) -> None:
    assert recorded["streams"].keys() == {
        f"{layout}, {shuffle}" for layout in streams.LAYOUTS for shuffle in streams.SHUFFLES
    }


@pytest.mark.parametrize("verb", files.VERBS)
def test_files_are_what_they_ever_were(verb: str, recorded: dict[str, Any], folder: Path) -> None:
    written = json.loads(json.dumps(files.found(folder, [verb])))
    written = written if recorded["versions"] == VERSIONS else without_bytes(written)
    assert differences(written, {name: recorded["files"].get(name) for name in written}) == []


def test_all_files_on_record_are_compared(recorded: dict[str, Any]) -> None:
    assert recorded["files"].keys() == {name for jobs in files.VERBS.values() for name in jobs()}


@pytest.mark.parametrize("group", [name for name in GROUPS if name not in ("streams", "files")])
def test_what_is_found_is_what_it_ever_was(group: str, recorded: dict[str, Any], folder: Path) -> None:
    found = GROUPS[group](folder)
    found = json.loads(json.dumps(found))
    found = found if recorded["versions"] == VERSIONS else without_bytes(found)
    assert differences(found, recorded[group]) == []


@pytest.mark.parametrize("lacking", [(), ("sample", "dtype", "shape")], ids=["now", "early"])
def test_states_on_record_resume_to_the_same_rows(
    lacking: tuple[str, ...], recorded: dict[str, Any], folder: Path
) -> None:
    """Also those of checkouts that had fewer settings."""
    saved = json.loads(json.dumps(recorded["states"]))
    for each in saved.values():
        for name in lacking:
            del each["state"]["settings"][name]
    found = states.resumed(folder, saved)
    assert differences(found, recorded["states"]) == []


def _print(names: list[str]) -> None:
    found: dict[str, Any] = {"versions": VERSIONS}
    for name in names or GROUPS:
        with _folder() as folder:
            found[name] = GROUPS[name](folder)
    print(json.dumps(found, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    _print(sys.argv[1:])
