"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from actshard import formats

CacheFolder = Annotated[
    str | None,
    typer.Argument(help="Its folder. Default: $ACTSHARD_CACHE, or ~/.cache/actshard.", show_default=False),
]
PathArgument = Annotated[
    str,
    typer.Argument(
        help="The dataset's folder, or a folder that contains one dataset; or its URL (s3, gs, az, https, hf).",
        show_default=False,
    ),
]
_STORAGE_HELP = (
    "For a URL: an option of its storage, such as region=eu-west-1 or anon=true. Repeatable. Other users can see the words of a "
    "command: pass secrets in environment variables (AWS_SECRET_ACCESS_KEY, HF_TOKEN, ...)."
)
StorageOption = Annotated[
    list[str] | None, typer.Option("--storage-option", "-o", metavar="KEY=VALUE", help=_STORAGE_HELP)
]
LongStorageOption = Annotated[
    list[str] | None, typer.Option("--storage-option", metavar="KEY=VALUE", help=_STORAGE_HELP)
]
CacheOption = Annotated[
    str,
    typer.Option(
        "--cache", metavar="SIZE|FOLDER", help="For a URL: keep what is read on the local disk, such as 50GiB."
    ),
]
FormatOption = Annotated[str | None, typer.Option("--format", help=f"{', '.join(formats.names())}. Default: detected.")]
LayoutOption = Annotated[
    str | None, typer.Option("--layout", metavar="FILE", help="A layout.toml that describes the folder's files.")
]
PlanArgument = Annotated[
    str, typer.Argument(metavar="PLAN", help="The plan's JSON file, by Plan.save.", show_default=False)
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ConvertSource = Annotated[str, typer.Argument(help="The dataset to convert: a path or a URL.", show_default=False)]
ConvertTarget = Annotated[
    str | None,
    typer.Argument(
        help="The folder to create, or its parent for formats that name their datasets; or a URL.",
        show_default=False,
    ),
]
ToOption = Annotated[str, typer.Option("--to", help=f"{', '.join(formats.written())}.")]
ConvertLayers = Annotated[
    str, typer.Option(help="Layers to convert: comma-separated names; -1=23 renames. Default: all.")
]
ConvertExamples = Annotated[str, typer.Option(help="Examples to convert: first:last, or comma-separated numbers.")]
ConvertColumns = Annotated[
    str, typer.Option(help="Columns to convert: comma-separated names; label=verb renames; none. Default: all.")
]
ConvertTokens = Annotated[str, typer.Option(help="all, content or last.")]
ConvertDtype = Annotated[str, typer.Option(help="Dtype to store: float16, float32, ... Default: the source's.")]
PadOption = Annotated[bool, typer.Option("--pad", help="Pad short examples with zeros.")]
TruncateOption = Annotated[bool, typer.Option("--truncate", help="Cut long examples.")]
TokensPerExample = Annotated[
    int, typer.Option(min=0, help="Tokens per example for --pad and --truncate. 0: from the source.")
]
ShardBytes = Annotated[str, typer.Option(help="Approximate size of a shard, such as 256MB.")]
TargetOptions = Annotated[
    list[str] | None, typer.Option("--option", "-o", help="Option of the target format: name=value. Repeatable.")
]
TextSources = Annotated[
    list[str] | None,
    typer.Argument(help="JSON lines, JSON or parquet files or globs, also compressed.", show_default=False),
]
TokenizerOption = Annotated[str, typer.Option(help="A folder with tokenizer.json, or that file.")]
OutOption = Annotated[Path | None, typer.Option(help="The cache to create: CACHE_DIR/NAME/train.")]
RowFormatOption = Annotated[str, typer.Option("--format", help="text, chat, prebuilt or supervised.")]
RowOptions = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", help="Option of the format, such as text_key=body. Repeatable."),
]
ChatTemplate = Annotated[Path | None, typer.Option(help="A file with a chat template.")]
CacheLayout = Annotated[str, typer.Option(help="consolidated or sharded.")]
CacheStorage = Annotated[str, typer.Option(help="plain (memory-mapped, no decoding) or lz4 (Levanter's default).")]
TokenDtype = Annotated[str, typer.Option(help="Dtype of token ids: int64, int32, uint32 or uint16.")]
SkipErrors = Annotated[bool, typer.Option("--skip-errors", help="Skip invalid records.")]
KeepShards = Annotated[bool, typer.Option("--keep-shards", help="Keep the caches of single files.")]
PartOption = Annotated[
    list[str] | None,
    typer.Option("--part", help="A dataset to merge; it is not changed. Repeatable, in this order."),
]
PhysicalOption = Annotated[
    bool, typer.Option("--physical", help="Make one Zarr store instead of a run with a manifest.")
]
DifferentModels = Annotated[bool, typer.Option("--different-models", help="Also merge datasets of different models.")]
StatsLayers = Annotated[str, typer.Option(help="Layers: comma-separated names. Default: all.")]
SaveOption = Annotated[
    bool,
    typer.Option("--save", help="Keep them beside the dataset, in PATH.stats; use those kept there if still true."),
]
StatsRows = Annotated[
    int | None,
    typer.Option(
        "--rows", min=1, metavar="N", help="Sample N rows of each layer. Default: all rows.", show_default=False
    ),
]
StatsTokens = Annotated[str, typer.Option(help="content, all, last or special.")]
FormatOptionsOfPlan = Annotated[
    list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help="Option of the target format. Repeatable.")
]
RowOptionsOfPlan = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="NAME=VALUE", help="Option of the format, such as text_key=body. Repeatable."),
]
TasksOption = Annotated[
    int, typer.Option("--tasks", min=1, help="Number of tasks; fewer if the data divide into fewer.")
]
PlanFile = Annotated[str, typer.Option("--out", "-o", metavar="FILE", help="The plan's file; - prints it.")]
ReplacePlan = Annotated[bool, typer.Option("--replace", help="Replace a file that has another plan.")]
NoMeasure = Annotated[
    bool, typer.Option("--no-measure", help="Do not measure how fast this machine does a sample of the work.")
]
WorkFolder = Annotated[
    str,
    typer.Option(
        "--work", metavar="DIR", help="Folder for tasks' results, which all machines see.", show_default=False
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
    "shuffle",
    "lengths",
    "frequency",
    "packing",
)
"""Functions of :mod:`actshard.plot`."""
PLOTS_OF_CACHES = ("lengths", "frequency", "packing")
