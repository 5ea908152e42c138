"""``actshard.create``: checks the arguments and makes the format's target."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import DTypeLike

from actshard import formats
from actshard.base import _arguments
from actshard.base._json import parse_json
from actshard.base.errors import ArgumentError, ArgumentTypeError, FormatError, NotStoredError, warn
from actshard.base.layers import Layer, checked, is_one, several, short
from actshard.base.work import PARTS
from actshard.formats.options import FormatOptions
from actshard.formats.target import Spec, Target
from actshard.writing.existing import Fitting, creation_record
from actshard.writing.writer import Writer

_AROUND = 10
"""Levels of nesting in which a metadata file may place the user's values."""


def part_folder(path: Path, part: int, parts: int) -> Path:
    """Folder of an unmerged part."""
    return path / PARTS / f"part-{part:05}-of-{parts:05}"


@dataclass(frozen=True)
class Creation:
    """A dataset to write: arguments of :func:`create`, not yet checked. ``created``, ``whole``: see :class:`Spec`."""

    path: str | os.PathLike[str]
    format: str
    layers: Sequence[Layer]
    d_model: int
    dtype: DTypeLike | None = None
    metadata: Mapping[str, object] | None = None
    num_examples: int | None = None
    tokens_per_example: int | None = None
    shard_bytes: int | str | None = None
    part: tuple[int, int] | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    created: int | None = None
    whole: int | None = None


def make_target(creation: Creation) -> Target:
    """Checks the arguments of :func:`create` and returns the format's target."""
    _arguments.one_of(creation.format, formats.written(), "format")
    root = _arguments.local_path(creation.path)
    metadata, options = _with_model(creation.format, creation.metadata, creation.options)
    format, layers, part, shard_bytes = creation.format, creation.layers, creation.part, creation.shard_bytes
    plain: dict[str, dict[str, object]] = {}
    for name, mapping in (("metadata", {} if metadata is None else metadata), ("options", options)):
        try:
            # Normalised through JSON (tuples become lists), because resume compares them with values read back.
            plain[name] = _as_json(dict(mapping))
        except FormatError as error:
            raise ArgumentError(f"{name}: expected JSON values: {error.detail}") from error
        except (TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(f"{name}: expected JSON values: {error}") from error
    if is_one(layers):
        raise ArgumentTypeError(f"layers: expected a list of names, found {layers!r:.100}")
    names = checked(several(layers))
    text = next((name for name in names if isinstance(name, str)), None)
    if text is not None and not formats.get(format).target().holds_named_layers:
        raise ArgumentError(
            f"layers: expected integers, which {format} stores as names, found {short(names)}. "
            f"Number them: convert(layers={{{text!r}: 0{', ...' if len(names) > 1 else ''}}}), "
            f"create(layers={short(range(len(names)))})"
        )
    for name in ("d_model", "num_examples", "tokens_per_example"):
        value: object = getattr(creation, name)
        if value is None and name != "d_model":
            continue
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ArgumentError(f"{name}: expected a positive integer, found {value!r}")
    if part is not None:
        if not isinstance(part, tuple | list) or len(part) != 2:
            raise ArgumentError(f"part: expected (i, n), found {part!r:.100}")
        index, count = (_arguments.whole(x, "part", most=99_999) for x in part)
        if index >= count:
            raise ArgumentError(f"part: expected (i, n) with 0 <= i < n, found {part!r:.100}")
        part = (index, count)
        root = part_folder(root, index, count)
    spec = Spec(
        path=root,
        layers=names,
        d_model=int(creation.d_model),
        dtype=None if creation.dtype is None else _arguments.dtype(creation.dtype)[0],
        metadata=plain["metadata"],
        num_examples=None if creation.num_examples is None else int(creation.num_examples),
        tokens=None if creation.tokens_per_example is None else int(creation.tokens_per_example),
        shard_bytes=None if shard_bytes is None else max(1, _arguments.size(shard_bytes, "shard_bytes")),
        part=part,
        whole=creation.whole,
        options=plain["options"],
        created=creation.created,
    )
    return formats.get(format).target()(spec)


def _with_model(
    format: str, metadata: Mapping[str, object] | None, options: Mapping[str, object]
) -> tuple[Mapping[str, object] | None, Mapping[str, object]]:
    """Metadata and options with ``model=`` where the format stores the model's name: as an option, or as a metadata field.

    Raises:
        NotStoredError: the format stores no name.
    """
    target, key = formats.get(format).target(), formats.get(format).carrying().model_key
    if "model" not in options or "model" in target.format_options:
        return metadata, options
    if key is None or not target.holds_metadata:
        raise NotStoredError(f"model: {format} does not store the name of the model; leave it out")
    if not isinstance(options["model"], str) or not options["model"]:
        raise ArgumentError(f"model: expected the model's name, found {options['model']!r:.80}")
    others = {name: value for name, value in options.items() if name != "model"}
    return {**({} if metadata is None else metadata), key: options["model"]}, others


def _as_json(value: dict[str, object]) -> dict[str, object]:
    """Returns the value as read back from a metadata file. Raises for NaN, infinities and nesting that readers refuse."""
    text = "[" * _AROUND + json.dumps(value, allow_nan=False) + "]" * _AROUND
    parsed: Any = parse_json(text, "metadata")
    for _ in range(_AROUND):
        (parsed,) = parsed
    restored: dict[str, object] = parsed
    return restored


def create(
    path: str | os.PathLike[str],
    format: str,
    *,
    layers: Sequence[Layer],
    d_model: int,
    dtype: DTypeLike | None = None,
    metadata: Mapping[str, object] | None = None,
    num_examples: int | None = None,
    tokens_per_example: int | None = None,
    pad: bool = False,
    truncate: bool = False,
    overflow: _arguments.Overflow = "refuse",
    shard_bytes: int | str | None = None,
    part: tuple[int, int] | None = None,
    resume: bool = False,
    exist_ok: bool = False,
    storage_options: Mapping[str, object] | None = None,
    scratch: str | os.PathLike[str] | None = None,
    **options: Unpack[FormatOptions],
) -> Writer:
    """Returns a writer for a new dataset, which the format's own system can read.

    Readers never see an incomplete dataset: files are written under temporary names and the manifest comes last. Background
    threads write rows to disk while the caller computes the next ones.

    Args:
        path: the dataset's folder. For saev the folder of dumps (``.../saev/shards`` for saev itself): the dataset is
            ``path/<HASH>``, which :attr:`Writer.path` contains after closing. Or a URL, ``s3://``, ``gs://``, ``az://`` or
            ``hf://``: the dataset is written to ``scratch``, uploaded as by :func:`actshard.push` on closing, and removed from
            ``scratch``, which needs disk space for the whole dataset.
        format: ``"saev"``, ``"lmprobe"``, ``"zarr"``, ``"pickle"``, ``"hf_arrow"``, ``"npy"``, ``"safetensors"``, or a format of
            draft models, such as ``"deepspec"``.
        layers: names of the layers, in the order of the arrays' layer axis: integers, or strings for formats that store
            them (zarr, hf_arrow).
        d_model: elements per row.
        dtype: dtype to store; appended arrays are cast to it. None: the dtype of the first append, without any cast.
        metadata: values that the format stores: saev's ``family``, ``ckpt``, ``data``, ``dataset``, ``pixel_agg``; a Zarr store's
            attributes; the pickle shards' ``extraction_config``; lmprobe's ``lmprobe:`` keys.
        num_examples: total number of examples, if known. A different number at the end is an error. The name of a saev dataset is
            then known from the start.
        tokens_per_example: for formats with the same number of tokens per example (saev); None: the number of the first example.
        pad: fill short examples with zeros, if the format requires equal lengths.
        truncate: cut long examples, if the format requires equal lengths or has a maximum.
        overflow: ``"refuse"`` raises if a finite value is too large for ``dtype``; ``"allow"`` stores infinity.
        shard_bytes: approximate size of a shard in bytes, or as ``"4GiB"``; each format has a default.
        part: ``(i, n)``: this process writes part i of n; :func:`actshard.merge` combines the parts. A part may be empty.
        resume: continue an unfinished dataset after its committed examples (``writer.committed``). Starts a new dataset if none
            exists; accepts a finished one (``writer.complete``).
        exist_ok: accept a finished dataset instead of raising: ``writer.complete`` is True and nothing can be appended.
        storage_options: options of a URL, as for :func:`actshard.open`.
        scratch: folder for the dataset of a URL until it is uploaded; None: the folder of temporary files. ``resume`` continues
            an interrupted call with the same ``scratch``, including its upload.
        options: ``model``, the model's name, for every format that stores it; and options of the format. An unknown one raises an
            error that lists them. saev: ``protocol``, ``cls_token``, ``max_tokens_per_shard``. lmprobe: ``storage``, ``pooling``,
            ``revision``. zarr: ``chunk_tokens``, ``t_max``, ``version``, ``pack``, ``scales``. pickle: ``compress``, ``level``,
            ``machine_id``, ``total_machines``, ``samples_per_machine``. hf_arrow: ``rows``.

    Returns:
        A :class:`~actshard.Writer`: a context manager that finishes the dataset, or after an exception leaves it resumable.

    Raises:
        ArgumentError, DtypeError: invalid arguments, or arguments that the format does not support.
        ExistsError: ``path`` contains another dataset, or this one, finished (see ``exist_ok``) or not (see ``resume``).
        LockedError: another writer is writing this dataset.
        FormatError: ``path`` contains a saev folder whose metadata do not match its hash.
    """
    return open_writer(
        Creation(
            path,
            format,
            layers,
            d_model,
            dtype,
            metadata,
            num_examples,
            tokens_per_example,
            shard_bytes,
            part,
            dict(options),
        ),
        Fitting(pad, truncate, overflow),
        resume=resume,
        exist_ok=exist_ok,
        storage_options=storage_options,
        scratch=scratch,
    )


def open_writer(
    creation: Creation,
    fitting: Fitting,
    *,
    resume: bool = False,
    exist_ok: bool = False,
    storage_options: Mapping[str, object] | None = None,
    scratch: str | os.PathLike[str] | None = None,
    capture: Mapping[str, object] | None = None,
) -> Writer:
    """:func:`create`, with the arguments of the verb that computes the rows as part of the request: ``capture``."""
    if not _arguments.is_one_of(fitting.overflow, ("refuse", "allow")):
        raise ArgumentError(f'overflow: expected "refuse" or "allow", found {fitting.overflow!r}')
    far = None
    if _arguments.is_url_elsewhere(creation.path):
        from actshard.writing.pushing import Scratch  # only if it is used

        if creation.part is not None:
            raise ArgumentError(
                "part: parts are written to local folders, merged there, and uploaded with actshard.push"
            )
        far = Scratch(creation.path, storage_options, scratch, f"create {creation.format}")
        creation = replace(creation, path=far.folder)
    else:
        for name, value in (("scratch", scratch), ("storage_options", storage_options)):
            if value is not None:
                raise ArgumentError(f"{name}: expected a URL as path to use it for, found a local path")
    target = make_target(creation)
    pad, truncate = _arguments.switch(fitting.pad, "pad"), _arguments.switch(fitting.truncate, "truncate")
    fitting = Fitting(pad, truncate, fitting.overflow)
    target.request = creation_record(target, fitting, capture)
    resume, exist_ok = _arguments.switch(resume, "resume"), _arguments.switch(exist_ok, "exist_ok")
    texts = [name for name, read in target.reading.items() if name != read and str(name) == read]
    if texts and capture is None:
        warn(
            f"{target.root}: layers {short(texts)} become strings, because other layers have strings as names",
            code="layer-names-changed",
        )
    if far is not None:
        from actshard.writing.uploading import UploadingWriter

        return UploadingWriter(target, fitting, far, resume=resume, exist_ok=exist_ok)
    return Writer(target, fitting, resume=resume, exist_ok=exist_ok)
