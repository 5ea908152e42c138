"""Folders of other programs whose manifest determines the description: they need no ``layout.toml``.

.. code-block:: text

    probelab 0.1.0 memmap_v1     meta.json, offsets.bin, detection_mask.bin, layer_{id}.bin
    icalens 0.4.0                activations.json, samples.safetensors, layers/layer_{id}.{dtype}.bin
    activault db6d1e4            a run: cfg.json, {hook}/metadata.json, {hook}/{uuid}--{attempt}_{job}.saved.pt; or a hook's folder

Sources: probelab/storage/memmap.py, icalens/_activation_dataset.py, activault's pipeline/vault/hook_uploader.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from actshard.base._json import Fields, read_json
from actshard.base.codes import Remark
from actshard.base.errors import ActshardError, FormatError, UnfinishedError, UnsupportedError
from actshard.base.location import Location

_SAVED = ".saved.pt"
_HOOK = "metadata.json"
"""The manifest of a hook of activault."""
_LOOKED_AT = 16
"""Number of names that are read to find activations in a folder."""


@dataclass(frozen=True)
class KnownFolder:
    """A recognized folder.

    Attributes:
        program: the program that writes such folders.
        manifest: the file by which it is recognized.
        value: the manifest's content.
    """

    program: str
    manifest: Location
    value: Mapping[str, Any]
    _describe: Callable[[Location, Fields], dict[str, Any]]
    _look: Callable[[Location], tuple[Remark, ...]] | None = None

    def remarks(self) -> tuple[Remark, ...]:
        """Warnings about missing files that the description cannot name."""
        return () if self._look is None else self._look(self.manifest.parent)

    def description(self) -> dict[str, Any]:
        """The description, as in a ``layout.toml``.

        Raises:
            FormatError: the manifest is damaged.
            UnfinishedError: the manifest states that the dataset is not complete.
        """
        return self._describe(self.manifest.parent, Fields(self.value, self.manifest))


def find(root: Location) -> KnownFolder | None:
    """Recognizes a folder by its manifest; None if it is of no known program. Damaged files raise nothing."""
    for name, is_known, program, describe, look in _PROGRAMS:
        path = root / name
        if path.kind() != "file":
            continue
        try:
            value = read_json(path)
        except ActshardError:
            continue
        if isinstance(value, dict) and is_known(value):
            return KnownFolder(program, path, value, describe, look)
    return None


def _probelab(root: Location, fields: Fields) -> dict[str, Any]:
    total, width, n = (fields.integer(name, minimum=0) for name in ("total_tokens", "hidden_dim", "n_samples"))
    columns: list[dict[str, Any]] = [
        {"file": "detection_mask.bin", "dtype": "uint8", "shape": [total], "axes": ["row"]}
    ]
    metadata = fields.value.get("metadata")
    for name, values in metadata.items() if isinstance(metadata, dict) else ():
        sound = isinstance(name, str) and name.isprintable() and name not in ("example", "detection_mask", "")
        if sound and isinstance(values, list) and len(values) == n:
            pointer = name.replace("~", "~0").replace("/", "~1")
            columns.append({"file": f"meta.json:/metadata/{pointer}", "name": name})
    return {
        "activations": {
            "files": "layer_{layer:d}.bin",
            "axes": ["row", "dim"],
            "dtype": "bfloat16",
            "shape": [total, width],
            "layers": list(fields.integers("layers")),
        },
        "lengths": {"file": "offsets.bin", "dtype": "int64", "shape": [n + 1], "kind": "offsets"},
        "columns": columns,
    }


def _icalens(root: Location, fields: Fields) -> dict[str, Any]:
    if fields.text("status") != "complete":
        raise UnfinishedError(
            f"field 'status': expected 'complete', found {fields.value['status']!r}: the capture is running, or was interrupted. "
            "Run it again",
            path=fields.path,
        )
    if (version := fields.integer("format_version")) != 1:
        raise UnsupportedError(f"field 'format_version': expected 1, found {version}", path=fields.path)
    n, width, dtype = fields.integer("sample_count", minimum=0), fields.integer("hidden_size"), fields.text("dtype")
    layers = fields.value.get("layers")
    if not isinstance(layers, dict) or not layers:
        raise fields.error("layers", "an object with layers")
    numbers: list[int] = []
    for key, entry in layers.items():
        number = int(key) if key.isascii() and key.isdecimal() and len(key) < 10 else -1
        file = f"layers/layer_{number:02d}.{dtype}.bin"
        if number < 0 or not isinstance(entry, dict) or entry.get("file") != file:
            raise fields.error("layers", f"layer numbers, each with the file 'layers/layer_NN.{dtype}.bin'")
        if entry.get("status", "complete") != "complete":
            raise UnfinishedError(
                f"layer {key} is not complete: the capture is running, or was interrupted. Run it again",
                path=fields.path,
            )
        numbers.append(number)
    if fields.text("samples_file") != "samples.safetensors":
        raise fields.error("samples_file", "'samples.safetensors'")
    names = ("document_index", "position", "token_id")
    return {
        "activations": {
            "files": f"layers/layer_{{layer:d}}.{dtype}.bin",
            "axes": ["row", "dim"],
            "dtype": dtype,
            "shape": [n, width],
            "layers": sorted(numbers),
        },
        "columns": [{"file": "samples.safetensors", "tensor": name, "axes": ["example"]} for name in names],
    }


def _activault_run(root: Location, fields: Fields) -> dict[str, Any]:
    hooks = [name for name in _folders(root) if (root / name / _HOOK).kind() == "file"]
    if not hooks:
        raise FormatError("expected folders of hooks with a metadata.json, found none", path=root)
    return _activault(f"{{layer:s}}/{{batch:s}}{_SAVED}", hooks)


def _folders(root: Location) -> list[str]:
    return [entry.name for entry in root.entries() if entry.kind == "folder"]


def _missing_hooks(root: Location) -> tuple[Remark, ...]:
    """Warnings about hooks whose metadata.json is missing although they have activations."""
    lost = [
        name
        for name in _folders(root)
        if (root / name / _HOOK).kind() != "file"
        and any(entry.name.endswith(_SAVED) for entry in (root / name).first(_LOOKED_AT))
    ]
    text = f"{_HOOK} is missing, but *{_SAVED} files exist: the hook is not read as a layer"
    return tuple(Remark("missing-file", f"{name}: {text}") for name in lost)


def _activault_hook(root: Location, fields: Fields) -> dict[str, Any]:
    return _activault(f"{{batch:s}}{_SAVED}", [root.name])


def _activault(files: str, hooks: list[str]) -> dict[str, Any]:
    return {
        "activations": {"files": files, "tensor": "states", "axes": ["example", "token", "dim"], "layers": hooks},
        "tokens": {"tensor": "input_ids"},
    }


_Program = tuple[
    str,
    Callable[[Mapping[str, Any]], bool],
    str,
    Callable[[Location, Fields], dict[str, Any]],
    Callable[[Location], tuple[Remark, ...]] | None,
]
_PROGRAMS: tuple[_Program, ...] = (
    ("meta.json", lambda v: v.get("format") == "memmap_v1", "probelab", _probelab, None),
    ("activations.json", lambda v: v.get("format") == "icalens.activations", "icalens", _icalens, None),
    (
        "cfg.json",
        lambda v: {"n_total_files", "transformer_config", "upload_config"} <= v.keys(),
        "activault",
        _activault_run,
        _missing_hooks,
    ),
    (
        _HOOK,
        lambda v: {"d_in", "sequence_length", "input_ids_shape"} <= v.keys(),
        "activault",
        _activault_hook,
        None,
    ),
)
"""For each program: the manifest's name, a test of its content, the program's name, and functions: description, warnings."""
