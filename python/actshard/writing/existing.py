"""Checks the output path of a writer for an existing dataset, finished or not, or other files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from actshard import formats
from actshard.base._arguments import Overflow, name_of
from actshard.base._json import Fields, read_json
from actshard.base.errors import ExistsError
from actshard.base.location import Location
from actshard.base.request import Request
from actshard.base.work import EMPTY, look, tidy
from actshard.formats.target import Target, refuse_existing, refuse_file, refuse_in_the_way, refuse_parts
from actshard.reading.finding import Place, is_finished


def complete_at(target: Target, *, resumes: bool = True) -> Path | None:
    """Returns the path of the finished dataset; None if there is none, or an unfinished one that the caller ``resumes``.

    Raises:
        ExistsError: the folder has other contents.
        UnfinishedError: it contains an unfinished dataset, and the caller is a plan, which does not resume it; or other unfinished
            work.
    """
    dataset = _finished(target, resumes)
    if dataset is not None:
        tidy(dataset)
    return dataset


def _finished(target: Target, resumes: bool) -> Path | None:
    is_part = target.spec.part is not None
    root = target.spec.path.parent.parent if is_part else target.spec.path
    look(root).refuse("planned dumps" if target.names_itself else "planned", "staging", own_plan=target.plan)
    if is_part:
        _refuse_around(root, target)
        if (target.spec.path / EMPTY).is_file():
            return target.spec.path
    dataset = target.existing(None)
    if target.names_itself:
        refuse_file(target.spec.path)
    if dataset is not None or target.names_itself:
        return dataset
    marks = look(target.root)
    if not resumes:
        marks.refuse("writing", "merging")
    if marks.journal is not None:
        return None
    if is_finished(target.root, target.format):
        return target.root
    refuse_existing(target.root)
    refuse_parts(target.root)
    return None


def _refuse_around(root: Path, target: Target) -> None:
    """Raises if the folder of a part contains an unfinished merge or a whole dataset: neither could then be opened or merged."""
    marks = look(root)
    marks.refuse("merging")
    if target.names_itself:
        return  # saev's folder contains any number of dumps, each under its own name
    marks.refuse("writing")
    if Place.of(Location.at(root)).matches:
        raise ExistsError(
            "contains a finished dataset: its parts were merged, or it was never in parts. Remove it to write it again, or "
            "choose another folder.",
            path=root,
        )
    merger = formats.get(target.format).merger()
    if merger is not None:  # checked before parts are written that could not be merged here
        refuse_in_the_way(root, merger.makes)


@dataclass(frozen=True)
class Fitting:
    """How a writer stores examples and values that do not fit: arguments of :func:`actshard.create`."""

    pad: bool = False
    truncate: bool = False
    overflow: Overflow = "refuse"


def creation_record(target: Target, fitting: Fitting, capture: Mapping[str, object] | None = None) -> Request:
    """The record of the request of :func:`actshard.create`, or of a part. The number of examples is a fact of the result.

    ``capture``: the arguments of :func:`actshard.capture`, which are compared before those of the files.
    """
    spec = target.spec
    arguments = ({} if capture is None else {"capture": capture}) | {
        "format": target.format,
        "layers": list(spec.layers),
        "d_model": spec.d_model,
        "dtype": None if spec.dtype is None else name_of(spec.dtype),
        "metadata": spec.metadata,
        "tokens_per_example": spec.tokens,
        "shard_bytes": spec.shard_bytes,
        "part": None if spec.part is None else list(spec.part),
        "pad": fitting.pad,
        "truncate": fitting.truncate,
        "overflow": fitting.overflow,
        "options": {name: value for name, value in spec.options.items() if value is not None},
    }
    return Request.of("create", arguments)


def check_written(request: Request, path: Path) -> Request:
    """Returns the recorded request of a finished dataset. Raises ExistsError unless the dataset is the result of ``request``."""
    record = Request.read(path)
    if record is not None and record == request.completed(record):
        return record
    why: object = "it has no record of its request"
    if record is not None:
        why = request.difference(record) or "the files of its source were others"
    raise ExistsError(f"contains a dataset that this plan did not write: {why}. Choose another folder", path=path)


def check_same(target: Target, path: Path | Location) -> int:
    """Returns the number of examples of a finished dataset. Raises ExistsError if the target would write another one.

    Requests are compared if the dataset has a record, and its shape. Whether its rows are those of a source is not.
    """
    from actshard.reading.opening import open_quietly

    record = Request.read(path)
    if record is not None and (difference := target.request.completed(record).difference(record)) is not None:
        raise ExistsError(f"contains another dataset: {difference}", path=path)
    expected = {
        "format": target.format,
        "layers": list(target.reading.values()),
        "d_model": target.spec.d_model,
        "dtype": None if target.dtype is None else str(target.dtype),
        "num_examples": target.spec.num_examples,
    }
    empty = Location.at(path) / EMPTY
    if target.spec.part is not None and empty.exists():
        fields = Fields(read_json(empty), empty)
        stored = {**fields.value, "dtype": expected["dtype"], "num_examples": 0}
    else:
        store = open_quietly(path, target.format, "auto", layout=target.reading_layout)
        stored = {
            "format": store.format,
            "layers": list(store.layers),
            "d_model": store.d_model,
            "dtype": str(store.dtype),
            "num_examples": store.num_examples,
        }
    for name, value in expected.items():
        if value is not None and value != stored.get(name):
            raise ExistsError(
                f"contains another dataset: {name}: expected {value}, found {stored.get(name)}", path=path
            )
    examples = stored["num_examples"]
    assert isinstance(examples, int)
    return examples
