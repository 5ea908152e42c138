"""The command ``actshard``: one subcommand per function of the Python API, one module each."""

from __future__ import annotations

import io
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

import actshard
from actshard.cli._options import (
    CacheFolder,
    CacheLayout,
    CacheOption,
    CacheStorage,
    ChatTemplate,
    ConvertColumns,
    ConvertDtype,
    ConvertExamples,
    ConvertLayers,
    ConvertSource,
    ConvertTarget,
    ConvertTokens,
    DifferentModels,
    FormatOption,
    JsonOption,
    KeepShards,
    LayoutOption,
    LongStorageOption,
    OutOption,
    PadOption,
    PartOption,
    PathArgument,
    PhysicalOption,
    PlanArgument,
    RowFormatOption,
    RowOptions,
    ShardBytes,
    SkipErrors,
    StatsLayers,
    StatsTokens,
    StorageOption,
    TargetOptions,
    TextSources,
    TokenDtype,
    TokenizerOption,
    TokensPerExample,
    ToOption,
    TruncateOption,
)
from actshard.cli._output import output
from actshard.cli._plan_commands import plan_app
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

app.add_typer(plan_app, name="plan")
cache_app = typer.Typer(no_args_is_help=True, help="The cache on disk of remote datasets (--cache, cache=).")
app.add_typer(cache_app, name="cache")


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
        output(json, lambda: {"layout": proposal.text, "unsure": proposal.unsure}, lambda: print(proposal.text, end=""))
        return
    if layout is not None:
        from actshard.cli import info as verb

        store = actshard.open(at, format, layout=layout)
        output(json, lambda: verb.about(store), lambda: verb.show(store))
        return
    tokens = _cache_at(at, format)
    if tokens is not None:
        from actshard.cli import caches
        from actshard.cli.info import whence

        output(json, lambda: caches.about(tokens) | whence(at), lambda: caches.show_info(tokens))
        return
    from actshard.cli import info as verb

    store = actshard.open(at, format)
    output(json, lambda: verb.about(store), lambda: verb.show(store))


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
        output(json, lambda: caches.rows(tokens, n, found), lambda: caches.show_rows(tokens, n, found))
        return
    from actshard.cli import head as verb

    store = actshard.open(at, format, layout=layout)
    output(json, lambda: verb.rows(store, n), lambda: verb.show(store, n))


@app.command("stats")
def stats_command(
    path: PathArgument,
    layer: StatsLayers = "",
    tokens: StatsTokens = "content",
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
    output(json, lambda: verb.as_dict(found), lambda: verb.show(store, found))


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
    output(json, lambda: found, lambda: verb.show(found))


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
    source: ConvertSource,
    target: ConvertTarget = None,
    to: ToOption = "",
    layer: ConvertLayers = "",
    examples: ConvertExamples = "",
    columns: ConvertColumns = "",
    tokens: ConvertTokens = "all",
    dtype: ConvertDtype = "",
    pad: PadOption = False,
    truncate: TruncateOption = False,
    tokens_per_example: TokensPerExample = 0,
    shard_bytes: ShardBytes = "",
    option: TargetOptions = None,
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
        output(json, lambda: [p.as_dict() for p in previews], lambda: verb.show_previews(previews, to or None))
        if to and previews[0].refused:
            raise typer.Exit(1)
        return
    if target is None or not to:
        raise actshard.ArgumentError(
            "convert: expected SOURCE TARGET --to FORMAT. With --dry-run, TARGET and --to are optional."
        )
    own |= {"target_options": options_named(target_option) or None, "scratch": scratch or None}
    done = verb.run(at, target, to, quiet=json, resume=resume, verify=verify, exist_ok=exist_ok, **own)
    output(json, done.as_dict, lambda: verb.show(done))


@app.command("tokenize")
def tokenize_command(
    sources: TextSources = None,
    tokenizer: TokenizerOption = "",
    out: OutOption = None,
    form: RowFormatOption = "text",
    option: RowOptions = None,
    chat_template: ChatTemplate = None,
    config: Annotated[Path | None, typer.Option(help="Levanter's YAML: builds all caches of all components.")] = None,
    component: Annotated[
        list[str] | None, typer.Option(help="With --config: build only this component. Repeatable.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --config: print the state of each cache without building.")
    ] = False,
    layout: CacheLayout = "consolidated",
    storage: CacheStorage = "plain",
    dtype: TokenDtype = "",
    jobs: Annotated[int, typer.Option(min=0, help="Number of processes. 0: by processors and files.")] = 0,
    skip_errors: SkipErrors = False,
    keep_shards: KeepShards = False,
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
        output(json, lambda: plans, lambda: verb.show_plans(plans))
        if any(plan["state"] == "missing" for plan in plans):
            raise typer.Exit(1)
        return
    if not sources or out is None:
        raise actshard.ArgumentError("tokenize: expected SOURCES --tokenizer DIR --out DIR, or --config FILE")
    named = verb.format_named(form, option or [], chat_template)
    done = verb.run(sources, out, tokenizer, named, quiet=json, **own)
    output(json, lambda: done, lambda: verb.show(done))


@app.command("merge")
def merge_command(
    path: Annotated[str, typer.Argument(help="Folder of the parts, or a new folder with --part.", show_default=False)],
    part: PartOption = None,
    physical: PhysicalOption = False,
    different_models: DifferentModels = False,
    json: JsonOption = False,
) -> None:
    """Merge the parts that several processes wrote, or several datasets. Run it again after an interruption.

    With --part, running it again after a finished merge is an error, because the dataset exists.
    """
    made = actshard.merge(path, part or None, physical=physical, different_models=different_models)
    store = actshard.open(made)
    found = {"path": str(made), "format": store.format, "examples": store.num_examples}
    output(json, lambda: found, lambda: typer.echo(f"{made}: {store.num_examples:,} examples, {store.format}"))


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
    output(json, report.as_dict, lambda: verb.show(report))
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
    partition: Annotated[str, typer.Option(help="Slurm's partition.", show_default=False)] = "",
    account: Annotated[str, typer.Option(help="Slurm's account.", show_default=False)] = "",
    qos: Annotated[str, typer.Option(help="Slurm's quality of service.", show_default=False)] = "",
    array_size: Annotated[int, typer.Option(min=0, help="Slurm: elements of the array. 0: up to 64.")] = 0,
    time: Annotated[str, typer.Option(help="Slurm: limit of an element, minutes or 4:00:00.", show_default=False)] = "",
    logs: Annotated[str, typer.Option(help="Slurm: keep the elements' logs in this folder.", show_default=False)] = "",
    memory: Annotated[str, typer.Option(help="Slurm, Ray, Dask: of a task, such as 8GiB.", show_default=False)] = "",
    cpus: Annotated[float, typer.Option(min=0, help="Slurm, Ray: processors of a task. 0: one.")] = 0,
    gpus: Annotated[float, typer.Option(min=0, help="Slurm, Ray: GPUs of a task.")] = 0,
    address: Annotated[str, typer.Option(help="Ray's cluster, such as auto.", show_default=False)] = "",
    scheduler: Annotated[str, typer.Option(help="Dask's scheduler, such as tcp://host:8786.", show_default=False)] = "",
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Run the other tasks after one has failed.")] = False,
    retries: Annotated[int, typer.Option(min=0, help="How often tasks that failed are run again.")] = 0,
    no_commit: Annotated[bool, typer.Option("--no-commit", help="Leave the commit to `actshard commit`.")] = False,
    json: JsonOption = False,
) -> None:
    """Run the tasks of a plan that are not done, and commit it. Run it again after an interruption.

    Examples: actshard run plan.json --workers 8

    actshard run plan.json --on slurm --partition cpu --array-size 64 --memory 8GiB --time 4:00:00

    actshard run plan.json --on ray --address auto
    """
    from actshard.cli import running as verb
    from actshard.cli.convert import options_named

    found = actshard.plan.load(plan)
    options = options_named(option or []) | verb.engine_options(
        workers=workers,
        partition=partition,
        account=account,
        qos=qos,
        array_size=array_size,
        time=time,
        logs=logs,
        memory=memory,
        cpus=cpus,
        gpus=gpus,
        address=address,
        scheduler=scheduler,
    )
    if task:
        numbers = verb.tasks_named(task, found)
        verb.run(found, on, quiet=json, tasks=numbers, keep_going=keep_going, retries=retries, **options)
        output(json, lambda: {"done": numbers}, lambda: typer.echo(f"{len(numbers):,} of {len(found):,} tasks: done"))
        return
    made = verb.run(found, on, quiet=json, commit=not no_commit, keep_going=keep_going, retries=retries, **options)
    if no_commit:
        output(json, made.as_dict, lambda: verb.show_status(found, made, plan))
        return
    output(json, lambda: verb.plain(made), lambda: verb.show(found, made))
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
        output(json, now.as_dict, partial(verb.show_status, found, now, plan))
    raise typer.Exit(1 if now.left else 0)


@app.command("commit")
def commit_command(plan: PlanArgument, json: JsonOption = False) -> None:
    """Put the results of a plan's tasks together. Run it again after a kill."""
    from actshard.cli import running as verb

    found = actshard.plan.load(plan)
    made = found.commit()
    output(json, lambda: verb.plain(made), lambda: verb.show(found, made))
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
    output(json, done.as_dict, lambda: verb.show(done))


@cache_app.command("info")
def cache_info_command(folder: CacheFolder = None, json: JsonOption = False) -> None:
    """Print folder, size, limit and number of objects."""
    from actshard.cli import caching as verb

    found = actshard.cache_info(folder)
    output(json, found.as_dict, lambda: verb.show(found))


@cache_app.command("clear")
def cache_clear_command(folder: CacheFolder = None, json: JsonOption = False) -> None:
    """Remove what is cached. Processes that read through the cache go on, and download again."""
    from actshard.cli import caching as verb

    before = actshard.cache_info(folder)
    after = actshard.clear_cache(folder)
    freed = max(before.bytes - after.bytes, 0)
    output(json, lambda: {**after.as_dict(), "freed": freed}, lambda: verb.show_cleared(after, freed))


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
    output(json, done.as_dict, lambda: verb.show(done))


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
