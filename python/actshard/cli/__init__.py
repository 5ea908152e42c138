"""The command ``actshard``: one subcommand per function of the Python API, one module each."""

from __future__ import annotations

import io
import json as json_module
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

import actshard
from actshard import formats
from actshard.errors import ActshardError, UnknownFormatError, boundary
from actshard.runners import ENGINES


class _TruncatedData(Exception):  # noqa: N818 -- carries an error through click
    """An error of ours that is an EOFError: click takes those for the end of its input, and would print "Aborted." alone."""

    def __init__(self, error: ActshardError) -> None:
        super().__init__(str(error))
        self.error = error


class _Commands(typer.core.TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Runs the command that was asked for."""
        try:
            return super().invoke(ctx)
        except EOFError as error:
            if isinstance(error, ActshardError):
                raise _TruncatedData(error) from error
            raise


app = typer.Typer(
    cls=_Commands,
    name="actshard",
    help="Inspect, stream, convert, merge and verify activation datasets and token caches.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

cache_app = typer.Typer(no_args_is_help=True, help="The cache on disk of remote datasets (--cache, cache=).")
app.add_typer(cache_app, name="cache")

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
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"actshard {actshard.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    # The commands print a dataset's warnings themselves.
    warnings.simplefilter("ignore", actshard.ActshardWarning)


@app.command("info")
def info_command(
    path: PathArgument,
    format: FormatOption = None,
    storage_option: StorageOption = None,
    cache: CacheOption = "",
    layout: LayoutOption = None,
    guess: Annotated[
        bool, typer.Option("--guess", help="Print a proposed layout.toml for a folder of plain files.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Print a dataset's or token cache's size, layers or fields, dtype, bytes, provenance and warnings."""
    at = _place(path, storage_option, cache)
    if guess:
        from actshard.cli import info as verb

        proposal = verb.guessed(at)
        _print(json, lambda: {"layout": proposal.text, "unsure": proposal.unsure}, lambda: print(proposal.text, end=""))
        return
    if layout is not None:
        from actshard.cli import info as verb

        store = actshard.open(at, format, layout=layout)
        _print(json, lambda: verb.about(store), lambda: verb.show(store))
        return
    tokens = _cache_at(at, format)
    if tokens is not None:
        from actshard.cli import caches
        from actshard.cli.info import whence

        _print(json, lambda: caches.about(tokens) | whence(at), lambda: caches.show_info(tokens))
        return
    from actshard.cli import info as verb

    store = actshard.open(at, format)
    _print(json, lambda: verb.about(store), lambda: verb.show(store))


@app.command("head")
def head_command(
    path: PathArgument,
    n: Annotated[int, typer.Option("-n", "--examples", min=1, max=1000, help="Number of examples.")] = 5,
    tokenizer: Annotated[str, typer.Option(help="For token caches: the tokenizer to decode with.")] = "",
    format: FormatOption = None,
    storage_option: StorageOption = None,
    cache: CacheOption = "",
    layout: LayoutOption = None,
    json: JsonOption = False,
) -> None:
    """Print the first examples: text, label, number of tokens, norm of each layer's last token; or rows of a token cache."""
    at = _place(path, storage_option, cache)
    tokens = None if layout is not None else _cache_at(at, format)
    if tokens is not None:
        from actshard.cli import caches

        found = caches.tokenizer_of(tokens, tokenizer)
        _print(json, lambda: caches.rows(tokens, n, found), lambda: caches.show_rows(tokens, n, found))
        return
    from actshard.cli import head as verb

    store = actshard.open(at, format, layout=layout)
    _print(json, lambda: verb.rows(store, n), lambda: verb.show(store, n))


@app.command("stats")
def stats_command(
    path: PathArgument,
    layer: Annotated[str, typer.Option(help="Layers: comma-separated names. Default: all.")] = "",
    tokens: Annotated[str, typer.Option(help="content, all, last or special.")] = "content",
    format: FormatOption = None,
    storage_option: StorageOption = None,
    cache: CacheOption = "",
    json: JsonOption = False,
) -> None:
    """Read all rows and print mean, deviation, range and norm of each layer; NaN and infinite values are counted."""
    from actshard.cli import stats as verb

    store = actshard.open(_place(path, storage_option, cache), format)
    named = _layers_named(store, layer or "all")
    found = verb.run(
        store, store.layers if named == "all" else named if isinstance(named, list) else [named], tokens, quiet=json
    )
    _print(json, lambda: verb.as_dict(found), lambda: verb.show(store, found))


@app.command("bench-stream")
def bench_stream_command(
    path: PathArgument,
    layer: Annotated[
        str, typer.Option(help="A layer's name, comma-separated names, or all. Default: the first layer.")
    ] = "",
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per batch.")] = 16_384,
    shuffle: Annotated[str, typer.Option(help="none, window or exact.")] = "window",
    memory: Annotated[str, typer.Option(help="Size of the window of --shuffle window.")] = "1GiB",
    tokens: Annotated[str, typer.Option(help="content, all, last or special.")] = "content",
    dtype: Annotated[str, typer.Option(help="Dtype of the batches. Default: the stored dtype.")] = "",
    mode: Annotated[str, typer.Option("--io", help="mmap, pread or auto.")] = "auto",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    seconds: Annotated[float, typer.Option(min=0, help="Stop after this time, or after one epoch.")] = 30.0,
    format: FormatOption = None,
    storage_option: StorageOption = None,
    cache: CacheOption = "",
    json: JsonOption = False,
) -> None:
    """Stream a dataset and print bytes per second, time to the first batch, and quality of the shuffle."""
    from actshard.cli import bench_stream as verb

    reading: Any = mode  # open() checks it
    store = actshard.open(_place(path, storage_option, cache), format, io=reading)
    found = verb.run(
        store,
        _layers_named(store, layer),
        batch_size,
        seconds,
        shuffle=None if shuffle.lower() == "none" else shuffle,
        memory=memory,
        tokens=tokens,
        dtype=dtype or None,
        seed=seed,
    )
    _print(json, lambda: found, lambda: verb.show(found))


def _layers_named(store: actshard.Store, words: str) -> Any:
    """Parses ``--layer`` for a stream."""
    from actshard.cli._layers import of_store

    if words == "all" and "all" not in store.layers:
        return "all"
    if not words:
        if not store.layers:
            raise actshard.NotStoredError("the dataset contains no hidden states", path=store.path)
        return store.layers[0]
    names = of_store(words, store.layers, "--layer")
    return names[0] if len(names) == 1 else names


@app.command("convert")
def convert_command(
    source: Annotated[str, typer.Argument(help="The dataset to convert: a path or a URL.", show_default=False)],
    target: Annotated[
        str | None,
        typer.Argument(
            help="The folder to create, or its parent for formats that name their datasets; or a URL.",
            show_default=False,
        ),
    ] = None,
    to: Annotated[str, typer.Option("--to", help=f"{', '.join(formats.written())}.")] = "",
    layer: Annotated[
        str, typer.Option(help="Layers to convert: comma-separated names; -1=23 renames. Default: all.")
    ] = "",
    examples: Annotated[str, typer.Option(help="Examples to convert: first:last, or comma-separated numbers.")] = "",
    columns: Annotated[
        str, typer.Option(help="Columns to convert: comma-separated names; label=verb renames; none. Default: all.")
    ] = "",
    tokens: Annotated[str, typer.Option(help="all, content or last.")] = "all",
    dtype: Annotated[str, typer.Option(help="Dtype to store: float16, float32, ... Default: the source's.")] = "",
    pad: Annotated[bool, typer.Option("--pad", help="Pad short examples with zeros.")] = False,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut long examples.")] = False,
    tokens_per_example: Annotated[
        int, typer.Option(min=0, help="Tokens per example for --pad and --truncate. 0: from the source.")
    ] = 0,
    shard_bytes: Annotated[str, typer.Option(help="Approximate size of a shard, such as 256MB.")] = "",
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="Option of the target format: name=value. Repeatable.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print sizes and losses without writing.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted conversion.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare every row with the source afterwards.")] = False,
    exist_ok: Annotated[bool, typer.Option("--exist-ok", help="Keep a finished result instead of failing.")] = False,
    format: FormatOption = None,
    storage_option: LongStorageOption = None,
    cache: CacheOption = "",
    target_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="For a TARGET that is a URL: an option of its storage. Repeatable."),
    ] = None,
    scratch: Annotated[
        str, typer.Option(help="For a TARGET that is a URL: the local folder in which the result is made.")
    ] = "",
    json: JsonOption = False,
) -> None:
    """Convert a dataset to another format. Resumable; --dry-run lists everything that would be lost."""
    from actshard.cli import convert as verb
    from actshard.cli._layers import renamed
    from actshard.cli._places import options_named

    own = {
        "layers": renamed(layer, "--layer"),
        "examples": verb.examples_named(examples),
        "columns": verb.columns_named(columns),
        "tokens": tokens,
        "dtype": dtype or None,
        "pad": pad,
        "truncate": truncate,
        "tokens_per_example": tokens_per_example or None,
        "shard_bytes": shard_bytes or None,
        "src_format": format,
        **verb.options_named(option or []),
    }
    at = _place(source, storage_option, cache)
    if dry_run:
        folder = "converted" if target is None or "://" in target else target
        previews = verb.previews(at, folder, to or None, own)
        _print(json, lambda: [p.as_dict() for p in previews], lambda: verb.show_previews(previews, to or None))
        if to and previews[0].refused:
            raise typer.Exit(1)
        return
    if target is None or not to:
        raise actshard.ArgumentError(
            "convert: expected SOURCE TARGET --to FORMAT. With --dry-run, TARGET and --to are optional."
        )
    own |= {"target_options": options_named(target_option) or None, "scratch": scratch or None}
    done = verb.run(at, target, to, quiet=json, resume=resume, verify=verify, exist_ok=exist_ok, **own)
    _print(json, done.as_dict, lambda: verb.show(done))


@app.command("tokenize")
def tokenize_command(
    sources: Annotated[
        list[str] | None,
        typer.Argument(help="JSON lines, JSON or parquet files or globs, also compressed.", show_default=False),
    ] = None,
    tokenizer: Annotated[str, typer.Option(help="A folder with tokenizer.json, or that file.")] = "",
    out: Annotated[Path | None, typer.Option(help="The cache to create: CACHE_DIR/NAME/train.")] = None,
    form: Annotated[str, typer.Option("--format", help="text, chat, prebuilt or supervised.")] = "text",
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", help="Option of the format, such as text_key=body. Repeatable."),
    ] = None,
    chat_template: Annotated[Path | None, typer.Option(help="A file with a chat template.")] = None,
    config: Annotated[Path | None, typer.Option(help="Levanter's YAML: builds all caches of all components.")] = None,
    component: Annotated[
        list[str] | None, typer.Option(help="With --config: build only this component. Repeatable.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --config: print the state of each cache without building.")
    ] = False,
    layout: Annotated[str, typer.Option(help="consolidated or sharded.")] = "consolidated",
    storage: Annotated[
        str, typer.Option(help="plain (memory-mapped, no decoding) or lz4 (Levanter's default).")
    ] = "plain",
    dtype: Annotated[str, typer.Option(help="Dtype of token ids: int64, int32, uint32 or uint16.")] = "",
    jobs: Annotated[int, typer.Option(min=0, help="Number of processes. 0: by processors and files.")] = 0,
    skip_errors: Annotated[bool, typer.Option("--skip-errors", help="Skip invalid records.")] = False,
    keep_shards: Annotated[bool, typer.Option("--keep-shards", help="Keep the caches of single files.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a cache that was built with other settings.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Build a token cache that Levanter can open. Run it again after an interruption: finished files are kept."""
    from actshard.cli import tokenize as verb

    own = {
        "layout": layout,
        "storage": storage,
        "dtype": dtype or None,
        "jobs": jobs or None,
        "on_error": "skip" if skip_errors else "raise",
        "keep_shards": keep_shards,
        "overwrite": overwrite,
    }
    if config is not None:
        if sources or out is not None:
            raise actshard.ArgumentError("tokenize: expected no SOURCES and --out with --config, which names both")
        plans = verb.plans(config, component) if dry_run else verb.run_config(config, component, quiet=json, **own)
        _print(json, lambda: plans, lambda: verb.show_plans(plans))
        if any(plan["state"] == "missing" for plan in plans):
            raise typer.Exit(1)
        return
    if not sources or out is None:
        raise actshard.ArgumentError("tokenize: expected SOURCES --tokenizer DIR --out DIR, or --config FILE")
    named = verb.format_named(form, option or [], chat_template)
    done = verb.run(sources, out, tokenizer, named, quiet=json, **own)
    _print(json, lambda: done, lambda: verb.show(done))


@app.command("merge")
def merge_command(
    path: Annotated[str, typer.Argument(help="Folder of the parts, or a new folder with --part.", show_default=False)],
    part: Annotated[
        list[str] | None,
        typer.Option("--part", help="A dataset to merge; it is not changed. Repeatable, in this order."),
    ] = None,
    physical: Annotated[
        bool, typer.Option("--physical", help="Make one Zarr store instead of a run with a manifest.")
    ] = False,
    different_models: Annotated[
        bool, typer.Option("--different-models", help="Also merge datasets of different models.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Merge the parts that several processes wrote, or several datasets. Run it again after an interruption.

    With --part, running it again after a finished merge is an error, because the dataset exists.
    """
    made = actshard.merge(path, part or None, physical=physical, different_models=different_models)
    store = actshard.open(made)
    found = {"path": str(made), "format": store.format, "examples": store.num_examples}
    _print(json, lambda: found, lambda: typer.echo(f"{made}: {store.num_examples:,} examples, {store.format}"))


@app.command("verify")
def verify_command(
    path: PathArgument,
    deep: Annotated[bool, typer.Option("--deep", help="Also check every value.")] = False,
    format: FormatOption = None,
    storage_option: StorageOption = None,
    cache: CacheOption = "",
    layout: LayoutOption = None,
    json: JsonOption = False,
) -> None:
    """Check a dataset against its format. Exit status: 0 no problems, 1 warnings, 2 errors, 3 the check could not run."""
    from actshard.cli import verify as verb

    report = verb.run(_place(path, storage_option, cache), format, deep, layout, quiet=json)
    _print(json, report.as_dict, lambda: verb.show(report))
    _checked.append(path)
    raise typer.Exit(report.status)


@app.command("run")
def run_command(
    plan: PlanArgument,
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="Run only these: 17, 0-63, 3,5, or auto: this process's share by RANK, SLURM_*, OMPI_*. Repeatable. "
            "Commits nothing.",
            show_default=False,
        ),
    ] = None,
    on: Annotated[str, typer.Option("--on", help=f"Where: {', '.join(ENGINES)}.")] = "local",
    workers: Annotated[int, typer.Option(min=0, help="For local: number of processes. 0: this process.")] = 0,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", metavar="NAME=VALUE", help="Engine's option. Repeatable.")
    ] = None,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Run the other tasks after one has failed.")] = False,
    retries: Annotated[int, typer.Option(min=0, help="How often tasks that failed are run again.")] = 0,
    no_commit: Annotated[bool, typer.Option("--no-commit", help="Leave the commit to `actshard commit`.")] = False,
    json: JsonOption = False,
) -> None:
    """Run the tasks of a plan that are not done, and commit it. Run it again after an interruption."""
    from actshard.cli import running as verb
    from actshard.cli.convert import options_named

    found = actshard.plan.load(plan)
    options = options_named(option or []) | ({"workers": workers} if workers else {})
    if task:
        numbers = verb.tasks_named(task, found)
        verb.run(found, on, quiet=json, tasks=numbers, keep_going=keep_going, retries=retries, **options)
        _print(json, lambda: {"done": numbers}, lambda: typer.echo(f"{len(numbers):,} of {len(found):,} tasks: done"))
        return
    made = verb.run(found, on, quiet=json, commit=not no_commit, keep_going=keep_going, retries=retries, **options)
    if no_commit:
        _print(json, made.as_dict, lambda: verb.show_status(found, made, plan))
        return
    _print(json, lambda: verb.plain(made), lambda: verb.show(found, made))
    raise typer.Exit(verb.exit_status(made))


@app.command("status")
def status_command(
    plan: PlanArgument,
    watch: Annotated[bool, typer.Option("--watch", help="Print it again and again until all tasks are done.")] = False,
    json: JsonOption = False,
) -> None:
    """Print which tasks of a plan are done, running, stopped, failed and missing. Exit status: 0 all are done, 1 not."""
    from actshard.cli import running as verb

    found = actshard.plan.load(plan)
    for now in verb.statuses(found, watch):
        _print(json, now.as_dict, lambda now=now: verb.show_status(found, now, plan))  # type: ignore[misc]  # a default in a lambda
    raise typer.Exit(1 if now.left else 0)


@app.command("commit")
def commit_command(plan: PlanArgument, json: JsonOption = False) -> None:
    """Put the results of a plan's tasks together. Run it again after a kill."""
    from actshard.cli import running as verb

    found = actshard.plan.load(plan)
    made = found.commit()
    _print(json, lambda: verb.plain(made), lambda: verb.show(found, made))
    raise typer.Exit(verb.exit_status(made))


@app.command("stage")
def stage_command(
    source: Annotated[
        str, typer.Argument(metavar="URL", help="The dataset or token cache: a URL or a path.", show_default=False)
    ],
    folder: Annotated[
        str, typer.Argument(metavar="DIR", help="The local folder to create, such as $TMPDIR/run.", show_default=False)
    ],
    layer: Annotated[str, typer.Option("--layers", "--layer", help="Comma-separated names. Default: all.")] = "",
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Accept a complete copy without asking whether the source changed.")
    ] = False,
    storage_option: StorageOption = None,
    json: JsonOption = False,
) -> None:
    """Copy a dataset, or some of its layers, to a local folder, once: run it in every process of a node, and again after a kill."""
    from actshard.cli import stage as verb

    done = verb.run(source, folder, layer, storage_option, check=not no_check, quiet=json)
    _print(json, done.as_dict, lambda: verb.show(done))


@cache_app.command("info")
def cache_info_command(folder: CacheFolder = None, json: JsonOption = False) -> None:
    """Print folder, size, limit and number of objects."""
    from actshard.cli import caching as verb

    found = actshard.cache_info(folder)
    _print(json, found.as_dict, lambda: verb.show(found))


@cache_app.command("clear")
def cache_clear_command(folder: CacheFolder = None, json: JsonOption = False) -> None:
    """Remove what is cached. Processes that read through the cache go on, and download again."""
    from actshard.cli import caching as verb

    before = actshard.cache_info(folder)
    after = actshard.clear_cache(folder)
    freed = max(before.bytes - after.bytes, 0)
    _print(json, lambda: {**after.as_dict(), "freed": freed}, lambda: verb.show_cleared(after, freed))


@app.command("push")
def push_command(
    folder: Annotated[str, typer.Argument(help="The dataset's folder.", show_default=False)],
    url: Annotated[
        str, typer.Argument(help="s3://BUCKET/RUN, gs://, az:// or hf://datasets/ORG/NAME.", show_default=False)
    ],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace another dataset: removes everything below the URL.")
    ] = False,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Refuse a dataset with errors.")] = True,
    private: Annotated[
        bool, typer.Option("--private/--public", help="Visibility of a new repository on the hub.")
    ] = True,
    links: Annotated[bool, typer.Option("--links", help="Follow links that lead outside of the folder.")] = False,
    storage_option: StorageOption = None,
    json: JsonOption = False,
) -> None:
    """Upload a dataset to a bucket or the hub. Run it again after an interruption: only what is missing is sent."""
    from actshard.cli import push as verb
    from actshard.cli._places import options_named

    options = options_named(storage_option) or None
    own = {"overwrite": overwrite, "verify": verify, "private": private, "links": links, "storage_options": options}
    done = verb.run(folder, url, quiet=json, **own)
    _print(json, done.as_dict, lambda: verb.show(done))


@app.command("demo")
def demo_command() -> None:
    """Fit a linear probe per layer on the bundled dataset and print its accuracy on the verb's tense."""
    from actshard.cli import demo as verb

    verb.run()


def _place(path: str, options: list[str] | None, cache: str) -> Any:
    from actshard.cli._places import place

    return place(path, options, cache)


def _cache_at(at: Any, format: str | None) -> Any:
    """Opens the token cache at or below a location; None for activations and unknown datasets."""
    from actshard.finding import find_any, of_tokens

    if format not in (None, of_tokens()):
        return None
    if format is None:
        try:
            at, found = find_any(at)
        except ActshardError:
            return None  # actshard.open then raises the error
        if found != of_tokens():
            return None
    from actshard.tokens.cache import open_cache

    return open_cache(at.place)


def _print(json: bool, data: Callable[[], Any], pretty: Callable[[], None]) -> None:
    if not json:
        pretty()
        return
    text = json_module.dumps(data(), indent=2, ensure_ascii=False, default=str)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # a lone surrogate in a name or text, or a terminal without Unicode
        text = json_module.dumps(data(), indent=2, default=str)
    typer.echo(text)


_COULD_NOT = {"verify": 3, "status": 2}
"""Exit status of commands for which 1 is a finding, if they could not run."""
_checked: list[str] = []
"""Paths for which ``verify`` has printed a report."""


def main() -> None:
    """Runs the command. An ActshardError is printed to stderr without a traceback; the exit status is 1.

    ``verify`` exits with 3 if the check could not run, because 1 and 2 mean findings; ``status`` with 2: 1 means tasks left.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Names and texts come from files: escape characters that the terminal cannot encode.
            stream.reconfigure(errors="backslashreplace")
    try:
        with boundary(None, "run the command"):
            app()
    except UnknownFormatError as error:
        from rich.markup import escape

        if not error.candidates:
            _fail(str(error))
        lines = [f"{error.path}: is not a dataset, but contains {len(error.candidates)}. Open one:"]
        lines += [f"  {escape(str(path))}  ({name})" for path, name in error.candidates]
        _fail("\n".join(lines))
    except ActshardError as error:
        _fail(str(error))
    except _TruncatedData as truncated:
        _fail(str(truncated.error))
    except BrokenPipeError:
        # `actshard info ... | head` closed the pipe. Without this, Python prints another error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except SystemExit as stop:
        if stop.code and _verifies() and not _checked:  # wrong options
            raise SystemExit(_COULD_NOT["verify"]) from None
        raise
    except Exception:
        if not _verifies():
            raise
        import traceback

        traceback.print_exc()
        raise SystemExit(_COULD_NOT["verify"]) from None


def _verifies() -> bool:
    return _command() == "verify"


def _command() -> str:
    return next((word for word in sys.argv[1:] if not word.startswith("-")), "")


def _fail(message: str) -> None:
    typer.echo(f"actshard: {message}", err=True)
    raise SystemExit(_COULD_NOT.get(_command(), 1))
