"""Arguments and options that several commands have."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Literal

import typer

from actshard import formats
from actshard.base.errors import ActshardError, ActshardWarning, ArgumentError
from actshard.base.layers import Layer, named, short
from actshard.base.location import Location
from actshard.cli._messages import message
from actshard.reading.finding import existing_anywhere

CacheFolder = Annotated[
    str | None,
    typer.Argument(help="The cache's folder. Default: $ACTSHARD_CACHE, or ~/.cache/actshard.", show_default=False),
]
PathArgument = Annotated[
    str,
    typer.Argument(
        help="The dataset's folder or URL (s3, gs, az, https, hf), or a folder that contains one dataset.",
        show_default=False,
    ),
]
_STORAGE_HELP = (
    "For a URL: a storage option, such as region=eu-west-1 or anon=true. Repeatable. Other users of this machine can see command "
    "lines: pass secrets in environment variables (AWS_SECRET_ACCESS_KEY, HF_TOKEN, ...)."
)
StorageOption = Annotated[list[str] | None, typer.Option("--storage-option", metavar="KEY=VALUE", help=_STORAGE_HELP)]
LongStorageOption = StorageOption
CacheOption = Annotated[
    str,
    typer.Option(
        "--cache",
        metavar="SIZE|FOLDER",
        help="For a URL: cache data on the local disk. The cache's size, such as 50GiB, or its folder.",
    ),
]
FormatOption = Annotated[
    str | None, typer.Option("--format", help=f"Format: {', '.join(formats.names())}. Default: detected.")
]
LayoutOption = Annotated[
    str | None, typer.Option("--layout", metavar="FILE", help="A layout.toml that describes the folder's files.")
]
PartialOption = Annotated[
    Literal["error", "skip"],
    typer.Option(
        "--incomplete",
        help="Examples whose files are missing or unfinished: skip gives them no tokens.",
        show_default=True,
    ),
]
PlanArgument = Annotated[
    str,
    typer.Argument(metavar="PLAN", help="The plan's JSON file, from `actshard plan` or Plan.save.", show_default=False),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Do not show progress.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ConvertSource = Annotated[str, typer.Argument(help="The dataset to convert: a path or a URL.", show_default=False)]
ConvertTarget = Annotated[
    str | None,
    typer.Argument(
        help="The folder to create, or its parent for formats that name their datasets; or a URL.",
        show_default=False,
    ),
]
ToOption = Annotated[str, typer.Option("--to", help=f"Target format: {', '.join(formats.written())}.")]


EstimateOfForms = Annotated[
    bool,
    typer.Option("--estimate", help="Print sizes, errors and speeds in all forms, from a sample; --to: of one format."),
]


def refuse_other_options(context: typer.Context, mode: str, allowed: Collection[str]) -> None:
    """Raises ArgumentError if the command line has an option that a mode of the command does not take.

    Args:
        context: the command's.
        mode: the option that chooses the mode.
        allowed: parameters of the command's function.
    """
    for parameter in context.command.params:
        name, is_option = parameter.name, parameter.param_type_name == "option"
        if is_option and name is not None and name not in allowed and _is_given(context, name):
            raise ArgumentError(f"{max(parameter.opts, key=len)}: has no effect with {mode}; leave it out")


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether the command line has a parameter."""
    return getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"


def _not_empty(ctx: typer.Context, param: typer.CallbackParam, value: str) -> str:
    """Refuses an empty text, which is the default: it would silently mean all layers."""
    if value == "" and param.name is not None and _is_given(ctx, param.name):
        raise ArgumentError(f"{param.opts[0]}: expected names of layers, found an empty text")
    return value


def layers_option(help: str, *names: str) -> object:
    """An option with names of layers."""
    return typer.Option(*names, callback=_not_empty, help=help, show_default=False)


ConvertLayers = Annotated[
    str, layers_option("Layers to convert: comma-separated names; 0-3 is a range; -1=23 renames. Default: all.")
]
ConvertExamples = Annotated[str, typer.Option(help="Examples to convert: first:last, or comma-separated numbers.")]
ConvertColumns = Annotated[
    str,
    typer.Option(help="Columns to convert: comma-separated names; label=verb renames; none: no columns. Default: all."),
]
ConvertTokens = Annotated[str, typer.Option(help="Tokens to convert: all, content or last.")]
ConvertDtype = Annotated[str, typer.Option(help="Dtype to store: float16, float32, ... Default: the source's.")]
PadOption = Annotated[bool, typer.Option("--pad", help="Pad short examples with zeros.")]
TruncateOption = Annotated[bool, typer.Option("--truncate", help="Truncate long examples.")]
TokensPerExample = Annotated[
    int, typer.Option(min=0, help="Tokens per example for --pad and --truncate. 0: from the source.")
]
ShardBytes = Annotated[str, typer.Option(help="Approximate size of a shard, such as 256MB.")]
TargetOptions = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", help="Option of the target format. Repeatable.", metavar="NAME=VALUE"),
]
TextSources = Annotated[
    list[str] | None,
    typer.Argument(help="JSON lines, JSON or Parquet files, plain or compressed, or globs.", show_default=False),
]
TokenizerOption = Annotated[str, typer.Option(help="A folder with tokenizer.json, or the file itself.")]
OutOption = Annotated[str | None, typer.Option(help="The cache to create: CACHE_DIR/NAME/train.")]
RowFormatOption = Annotated[str, typer.Option("--format", help="Row format: text, chat, prebuilt or supervised.")]
RowOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option", "-o", metavar="NAME=VALUE", help="Option of the row format, such as text_key=body. Repeatable."
    ),
]
ChatTemplate = Annotated[str | None, typer.Option(help="A file with a chat template.")]
CacheLayout = Annotated[
    str, typer.Option(help="consolidated (one array per field) or sharded (one per field and file).")
]
CacheStorage = Annotated[str, typer.Option(help="plain (memory-mapped, no decoding) or lz4 (Levanter's default).")]
TokenDtype = Annotated[str, typer.Option(help="Dtype of token ids: int64, int32, uint32 or uint16.")]
SkipErrors = Annotated[bool, typer.Option("--skip-errors", help="Skip invalid records.")]
KeepShards = Annotated[
    bool, typer.Option("--keep-shards", help="Also keep each file's own cache, next to a consolidated cache.")
]
PartOption = Annotated[
    list[str] | None,
    typer.Option("--part", help="A dataset to merge; it is not changed. Repeatable, in this order."),
]
PhysicalOption = Annotated[
    bool, typer.Option("--physical", help="Write one Zarr store instead of a run with a manifest.")
]
DifferentModels = Annotated[
    bool, typer.Option("--different-models", help="Also merge datasets of different models or revisions.")
]
StatsLayers = Annotated[str, layers_option("Layers: comma-separated names; 0-3 is a range. Default: all.")]
StagedLayers = Annotated[
    str,
    layers_option("Layers to copy: comma-separated names; 0-3 is a range. Default: all.", "--layers", "--layer"),
]
SaveOption = Annotated[
    bool,
    typer.Option(
        "--save", help="Save the statistics next to the dataset, in PATH.stats; reused while it is unchanged."
    ),
]
StatsRows = Annotated[
    int | None,
    typer.Option(
        "--rows", min=1, metavar="N", help="Sample N rows of each layer. Default: all rows.", show_default=False
    ),
]
StatsTokens = Annotated[str, typer.Option(help="Tokens: content, all, last or special.")]
FormatOptionsOfPlan = Annotated[
    list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help="Option of the target format. Repeatable.")
]
RowOptionsOfPlan = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="NAME=VALUE", help="Option of the row format, such as text_key=body. Repeatable."),
]
TasksOption = Annotated[
    int, typer.Option("--tasks", min=1, help="Maximum number of tasks; fewer if the data cannot be divided further.")
]
PlanFile = Annotated[str, typer.Option("--out", "-o", metavar="FILE", help="File for the plan; - prints the plan.")]
ReplacePlan = Annotated[bool, typer.Option("--replace", help="Overwrite the file even if it contains another plan.")]
NoMeasure = Annotated[
    bool, typer.Option("--no-measure", help="Do not run a sample of the work to measure its speed on this machine.")
]
WorkFolder = Annotated[
    str,
    typer.Option(
        "--work",
        metavar="DIR",
        help="Folder for the tasks' results, on a file system that all machines share.",
        show_default=False,
    ),
]
PLOTS = (
    "norms",
    "histogram",
    "positions",
    "gamma",
    "ranges",
    "dimensions",
    "spectrum",
    "similarity",
    "separability",
    "pca",
    "shuffle",
    "lengths",
    "frequency",
    "packing",
)
"""Functions of :mod:`actshard.plot`."""
PLOTS_OF_CACHES = ("lengths", "frequency", "packing")


# Parses ``--layer``: names of layers on a command line.


_INTEGER = re.compile(r"[+-]?\d{1,18}")
_RANGE = re.compile(r"(\d{1,18})(?:-|\.\.)(\d{1,18})")


def several(words: str, option: str) -> list[Layer]:
    """Parses comma-separated integers and texts; or a JSON list, for names with commas and for texts that consist of digits."""
    if words.startswith("["):
        try:
            layers: list[Layer] = json.loads(words)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"{option}: expected names of layers, or a JSON list: {error}") from error
        return layers
    return [_name(word, words, option) for word in words.split(",")]


def has_range(words: str) -> bool:
    """Whether comma-separated names contain ``0-3`` or ``0..3``, for which the stored layers are needed."""
    return not words.startswith(("[", "{")) and any(_RANGE.fullmatch(word.strip()) for word in words.split(","))


def renamed(words: str, option: str) -> list[Layer] | dict[Layer, Layer] | None:
    """Parses ``3,7`` or ``-1=23,-2=22``, or JSON; returns None for an empty text."""
    if not words:
        return None
    if words.startswith("{"):
        try:
            mapping: dict[Layer, Layer] = json.loads(words)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"{option}: expected names of layers, or JSON: {error}") from error
        return mapping
    if words.startswith("[") or "=" not in words:
        return several(words, option)
    pairs = [word.split("=") for word in words.split(",")]
    if any(len(pair) > 2 for pair in pairs):
        raise ArgumentError(f"{option}: expected names of layers, old=new, or JSON, found {words!r:.200}")
    return {_name(pair[0], words, option): _name(pair[-1], words, option) for pair in pairs}


def of_store(words: str, layers: Sequence[Layer], option: str) -> list[Layer]:
    """Like :func:`several`, for the layers of a dataset: digits become a text if the dataset's names are texts.

    ``0-3`` and ``0..3`` are the stored layers from 0 to 3, unless a layer has that name.
    """
    if (exact_match := named(words, layers)) is not None:  # a name with commas
        return [exact_match]
    is_json = words.startswith("[")
    selection: list[Layer] = []
    ranged: set[Layer] = set()
    for name in several(words, option):
        match, ends = named(str(name), layers), None if is_json else _RANGE.fullmatch(str(name))
        if match is not None or ends is None:
            if match not in ranged:  # 0-3,1
                selection.append(name if match is None else match)
            continue
        first, last = int(ends[1]), int(ends[2])
        range_layers = [layer for layer in layers if str(layer).isdecimal() and first <= int(layer) <= last]
        if not range_layers:
            raise ArgumentError(
                f"{option}: the range {name} contains no stored layer; the layers are {short(layers, 200)}"
            )
        selection += [layer for layer in range_layers if layer not in selection]
        ranged |= {*range_layers}
    return selection


def _name(word: str, words: str, option: str) -> Layer:
    word = word.strip()
    if not word:
        raise ArgumentError(f"{option}: expected names of layers, comma-separated, found {words!r:.200}")
    return int(word) if _INTEGER.fullmatch(word) else word


# Paths and URLs of commands, and the options of their storage.


def options_named(words: Sequence[str] | None) -> dict[str, str]:
    """Parses ``--storage-option NAME=VALUE``. Messages do not contain the values, which may be secrets."""
    options: dict[str, str] = {}
    for number, word in enumerate(words or (), 1):
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ArgumentError(f"--storage-option: expected KEY=VALUE, found no key or no '=' in option {number}")
        if name in options:
            raise ArgumentError(f"--storage-option: expected {name!r:.40} once, found it again in option {number}")
        options[name] = value
    return options


def place(path: str, words: Sequence[str] | None = None, cache: str = "") -> Location:
    """Returns the location of an existing path or URL. Prints a warning if the disk cache cannot be used."""
    return _located(path, options_named(words), cache)


def _located(path: str, options: Mapping[str, str], cache: str) -> Location:
    with shown_warnings():
        return existing_anywhere(path, options or None, cache or None)


@contextmanager
def shown_warnings(*listed: str) -> Iterator[None]:
    """Prints the warnings of calls whose results do not contain them, each once. ``listed``: codes of those that they contain."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ActshardWarning)
        try:
            yield
        finally:
            shown = [
                w.message for w in caught if isinstance(w.message, ActshardWarning) and w.message.code not in listed
            ]
            for text in dict.fromkeys(map(str, shown)):
                typer.echo(f"actshard: warning: {message(ActshardError(text))}", err=True)
