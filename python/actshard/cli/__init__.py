"""The command ``actshard``: one subcommand per function of the Python API."""

from __future__ import annotations

import io
import os
import sys
import warnings
from contextlib import suppress
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.completion as shells

import actshard
from actshard.base._arguments import many
from actshard.base.errors import ActshardError, UnknownFormatError, boundary
from actshard.base.location import Location
from actshard.cli._app import CLOSED_PIPE, COULD_NOT_RUN, ERRORS, FINE, WARNINGS, Commands, TruncatedData, about, output
from actshard.cli._capturing_commands import capture_command
from actshard.cli._looking_commands import plot_command, report_command
from actshard.cli._messages import OF_CACHES, message
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
    EstimateOfForms,
    FormatOption,
    JsonOption,
    KeepShards,
    LayoutOption,
    OutOption,
    PadOption,
    PartialOption,
    PartOption,
    PathArgument,
    PhysicalOption,
    PlanArgument,
    QuietOption,
    RowFormatOption,
    RowOptions,
    SaveOption,
    ShardBytes,
    SkipErrors,
    StagedLayers,
    StatsLayers,
    StatsRows,
    StatsTokens,
    StorageOption,
    TargetOptions,
    TextSources,
    TokenDtype,
    TokenizerOption,
    TokensPerExample,
    ToOption,
    TruncateOption,
    layers_option,
    refuse_other_options,
)
from actshard.cli._plan_commands import plan_app
from actshard.plan.runners import ENGINES

if TYPE_CHECKING:
    from actshard.base.layers import Layer
    from actshard.tokens import TokenCache


class Shell(StrEnum):
    """Shells with completion."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


# Needed by the scripts that `actshard completion` prints. typer's add_completion would also add two options to the help.
shells.completion_init()  # type: ignore[attr-defined]  # typer exports only its options

app = typer.Typer(
    cls=Commands,
    name="actshard",
    help="Capture, inspect, stream, convert, merge and verify activation datasets and token caches.\n\n"
    "Exit status: 0 success, 1 warnings found or work left, 2 errors found, 3 the command could not run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(plan_app, name="plan", **about("plan"))
cache_app = typer.Typer(
    cls=Commands, no_args_is_help=True, help="Show or clear the disk cache of remote datasets (--cache, cache=)."
)
app.add_typer(cache_app, name="cache", **about("cache"))


def _version(flag: bool) -> None:
    if flag:
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


@app.command("info", **about("info"))
def info_command(
    path: PathArgument,
    format: FormatOption = None,
    storage_option: StorageOption = None,
    cache: CacheOption = "",
    layout: LayoutOption = None,
    incomplete: PartialOption = "error",
    guess: Annotated[
        bool, typer.Option("--guess", help="Print a proposed layout.toml for a folder of plain files, or for one file.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Print a dataset's or token cache's size, layers or fields, dtype, bytes, provenance and warnings."""
    location = _place(path, storage_option, cache)
    if guess:
        from actshard.cli import info as verb

        proposal = verb.guessed(location)
        output(json, lambda: {"layout": proposal.text, "unsure": proposal.unsure}, lambda: print(proposal.text, end=""))
        return
    tokens = None if layout is not None else _cache_at(location, format)
    if tokens is not None:
        from actshard.cli import caches
        from actshard.cli.info import whence

        output(json, lambda: caches.about(tokens) | whence(location), lambda: caches.show_info(tokens))
        return
    from actshard.cli import info as verb
    from actshard.cli.latents import opened

    store = opened(location, format, layout, incomplete)
    output(json, lambda: verb.about(store), lambda: verb.show_info(store))


@app.command("head", **about("head"))
def head_command(
    path: PathArgument,
    n: Annotated[int, typer.Option("-n", "--examples", min=1, max=1000, help="Number of examples.")] = 5,
    tokenizer: Annotated[str, typer.Option(help="For token caches: the tokenizer to decode with.")] = "",
    text: Annotated[
        bool, typer.Option("--text", help="For token caches: print documents, and mark tokens without loss.")
    ] = False,
    format: FormatOption = None,
    storage_option: StorageOption = None,
    cache: CacheOption = "",
    layout: LayoutOption = None,
    incomplete: PartialOption = "error",
    json: JsonOption = False,
) -> None:
    """Print the first examples: text, label, number of tokens, norm of each layer's last token; or rows of a token cache."""
    location = _place(path, storage_option, cache)
    tokens = None if layout is not None else _cache_at(location, format)
    if tokens is not None:
        from actshard.cli import caches

        if text:
            decoded = partial(caches.decoded, tokens, n, tokenizer)
            output(json, lambda: [row.as_dict() for row in decoded()], lambda: caches.show_texts(tokens, n, tokenizer))
            return
        decoder = caches.tokenizer_of(tokens, tokenizer)
        output(json, lambda: caches.rows(tokens, n, decoder), lambda: caches.show_rows(tokens, n, decoder))
        return
    from actshard.cli import info as verb
    from actshard.cli.latents import opened

    store = opened(location, format, layout, incomplete)
    verb.refuse_options_of_caches(store, *["--tokenizer"] * bool(tokenizer), *["--text"] * text)
    output(json, lambda: verb.rows(store, n), lambda: verb.show_rows(store, n))


@app.command("top", **about("top"))
def top_command(
    path: PathArgument,
    example: Annotated[int, typer.Option("--example", "-e", help="The example's number; -1 is the last.")] = 0,
    layer: Annotated[str, layers_option("A layer's name. Default: the last layer.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to print.")] = 100,
    largest: Annotated[
        int | None,
        typer.Option(min=0, max=20, help="Number of largest dimensions to print for each token.", show_default="3"),
    ] = None,
    tokenizer: Annotated[str, typer.Option(help="A folder with tokenizer.json, to print the text of tokens.")] = "",
    format: FormatOption = None,
    storage_option: StorageOption = None,
    cache: CacheOption = "",
    layout: LayoutOption = None,
    json: JsonOption = False,
) -> None:
    """Print one example token by token: text, norm, largest dimensions; or one row of a token cache."""
    from actshard.cli import caches as verb

    location = _place(path, storage_option, cache)
    rows = None if layout is not None else _cache_at(location, format)
    if rows is not None:
        record = verb.row(rows, example, (layer, largest), tokenizer, tokens)
        output(json, lambda: record, lambda: verb.show_row(rows, record))
        return
    store = actshard.open(location, format, layout=layout)
    inspection = verb.look(store, example, layer, tokenizer, 3 if largest is None else largest)
    output(json, inspection.as_dict, lambda: verb.show_example(store, inspection, tokens))


@app.command("stats", **about("stats"))
def stats_command(
    path: PathArgument,
    layer: StatsLayers = "",
    tokens: StatsTokens = "content",
    rows: StatsRows = None,
    save: SaveOption = False,
    format: FormatOption = None,
    storage_option: StorageOption = None,
    cache: CacheOption = "",
    layout: LayoutOption = None,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Read all rows and print mean, standard deviation, range and norm of each layer. Counts NaN and infinite values."""
    from actshard.cli import stats as verb

    store = actshard.open(_place(path, storage_option, cache), format, layout=layout)
    layer_names = _layers_named(store, layer or "all")
    stats_by_layer = verb.run(
        store,
        store.layers if layer_names == "all" else layer_names if isinstance(layer_names, list) else [layer_names],
        tokens,
        rows=rows,
        save=save,
        quiet=quiet or json,
    )
    output(json, lambda: verb.as_dict(stats_by_layer), lambda: verb.show(store, stats_by_layer, rows))
    if save and not json:
        verb.show_folders(store, stats_by_layer, tokens)


app.command("report", **about("report"))(report_command)
app.command("plot", **about("plot"))(plot_command)


@app.command("bench-stream", **about("bench-stream"))
def bench_stream_command(
    path: PathArgument,
    layer: Annotated[
        str, layers_option("A layer's name, comma-separated names, a range (0-3), or all. Default: the first layer.")
    ] = "",
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per batch.")] = 16_384,
    shuffle: Annotated[str, typer.Option(help="Shuffle: none, window or exact.")] = "window",
    memory: Annotated[str, typer.Option(help="For --shuffle window: memory of the window.")] = "1GiB",
    tokens: Annotated[str, typer.Option(help="Tokens: content, all, last or special.")] = "content",
    dtype: Annotated[str, typer.Option(help="Dtype of the batches. Default: the stored dtype.")] = "",
    mode: Annotated[str, typer.Option("--io", help="How files are read: mmap, pread or auto.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the shuffle.")] = 0,
    seconds: Annotated[float, typer.Option(min=0, help="Stop after this many seconds, or after one epoch.")] = 30.0,
    format: FormatOption = None,
    storage_option: StorageOption = None,
    cache: CacheOption = "",
    layout: LayoutOption = None,
    json: JsonOption = False,
) -> None:
    """Stream a dataset and print bytes per second, time to the first batch, and the quality of the shuffle."""
    from actshard.cli import demo as verb

    reading: Any = mode  # open() checks it
    store = actshard.open(_place(path, storage_option, cache), format, io=reading, layout=layout)
    measurement = verb.measure_stream(
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
    output(json, lambda: measurement, lambda: verb.show_measurement(measurement))


def _layers_named(store: actshard.Store, words: str) -> Layer | list[Layer]:
    """Parses ``--layer`` for a stream."""
    from actshard.cli._options import of_store

    if words == "all" and "all" not in store.layers:
        return "all"
    if not words:
        if not store.layers:
            raise actshard.NotStoredError("the dataset contains no hidden states", path=store.path)
        return store.layers[0]
    names = of_store(words, store.layers, "--layer")
    return names[0] if len(names) == 1 else names


app.command("capture", **about("capture"))(capture_command)


@app.command("convert", **about("convert"))
def convert_command(
    context: typer.Context,
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
    estimate: EstimateOfForms = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted conversion.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare all rows and columns with the source afterwards.")
    ] = False,
    exist_ok: Annotated[bool, typer.Option("--exist-ok", help="Accept an existing finished result.")] = False,
    format: FormatOption = None,
    storage_option: StorageOption = None,
    cache: CacheOption = "",
    layout: LayoutOption = None,
    target_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="If TARGET is a URL: a storage option. Repeatable."),
    ] = None,
    scratch: Annotated[
        str, typer.Option(help="If TARGET is a URL: local folder for the result before its upload.")
    ] = "",
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Convert a dataset to another format. Resumable. --dry-run lists all losses; it exits with 2 if --to is not possible."""
    from actshard.cli import convert as verb
    from actshard.cli._options import has_range, options_named, renamed

    arguments = {
        "layers": renamed(layer, "--layer"),
        "examples": verb.examples_named(examples),
        "columns": verb.columns_named(columns),
        "tokens": tokens,
        "dtype": dtype or None,
        "pad": pad,
        "truncate": truncate,
        "tokens_per_example": tokens_per_example or None,
        "shard_bytes": shard_bytes or None,
        **verb.options_named(option or [], "the target format"),
    }
    dataset = verb.source_named(_place(source, storage_option, cache), format, layout)
    if has_range(layer):
        arguments["layers"] = verb.layers_of(dataset, format, layer)
    arguments["src_format"] = format if layout is None else None
    if estimate:
        refuse_other_options(context, "--estimate", verb.ESTIMATE_OPTIONS)
        estimates = verb.estimates(dataset, to, format if layout is None else None)
        output(json, lambda: [e.as_dict() for e in estimates], lambda: verb.show_estimates(estimates))
        if all(e.refused for e in estimates):
            raise typer.Exit(ERRORS)
        return
    if dry_run:
        folder = "converted" if target is None or "://" in target else target
        previews = verb.previews(dataset, folder, to or None, arguments)
        output(json, lambda: [p.as_dict() for p in previews], lambda: verb.show_previews(previews))
        if to and previews[0].refused:
            raise typer.Exit(ERRORS)
        return
    if target is None or not to:
        raise actshard.ArgumentError(
            "convert: expected SOURCE TARGET --to FORMAT. With --dry-run, TARGET and --to are optional."
        )
    arguments |= {"target_options": options_named(target_option) or None, "scratch": scratch or None}
    conversion = verb.run(
        dataset, target, to, quiet=quiet or json, resume=resume, verify=verify, exist_ok=exist_ok, **arguments
    )
    output(json, conversion.as_dict, lambda: verb.show(conversion))


@app.command("tokenize", **about("tokenize"))
def tokenize_command(
    sources: TextSources = None,
    tokenizer: TokenizerOption = "",
    out: OutOption = None,
    form: RowFormatOption = "text",
    option: RowOptions = None,
    chat_template: ChatTemplate = None,
    config: Annotated[
        str | None, typer.Option(help="Levanter's YAML file: build the caches of all components.")
    ] = None,
    component: Annotated[
        list[str] | None, typer.Option(help="With --config: build only this component. Repeatable.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --config: print the state of each cache without building.")
    ] = False,
    layout: CacheLayout = "consolidated",
    storage: CacheStorage = "plain",
    dtype: TokenDtype = "",
    jobs: Annotated[
        int, typer.Option(min=0, help="Number of processes, which also divide large files. 0: one per processor.")
    ] = 0,
    skip_errors: SkipErrors = False,
    keep_shards: KeepShards = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a cache that was built with other settings.")
    ] = False,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Build a token cache that Levanter can open. Resumable: finished files are kept."""
    from actshard.cli import tokenize as verb

    arguments = {
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
            raise actshard.ArgumentError(
                "tokenize: expected neither SOURCES nor --out with --config, which contains both"
            )
        plans = (
            verb.plans(config, component)
            if dry_run
            else verb.run_config(config, component, quiet=quiet or json, **arguments)
        )
        output(json, lambda: plans, lambda: verb.show_plans(plans))
        if any(plan["state"] == "missing" for plan in plans):
            raise typer.Exit(WARNINGS)
        return
    if dry_run or component:
        raise actshard.ArgumentError(f"{'--dry-run' if dry_run else '--component'}: expected --config FILE with it")
    if not sources or out is None:
        raise actshard.ArgumentError("tokenize: expected SOURCES --tokenizer DIR --out DIR, or --config FILE")
    row_format = verb.format_named(form, option or [], chat_template)
    summary = verb.run(sources, out, tokenizer, row_format, quiet=quiet or json, **arguments)
    output(json, lambda: summary, lambda: verb.show(summary))


@app.command("merge", **about("merge"))
def merge_command(
    path: Annotated[str, typer.Argument(help="Folder of the parts, or a new folder with --part.", show_default=False)],
    part: PartOption = None,
    physical: PhysicalOption = False,
    different_models: DifferentModels = False,
    resume: Annotated[bool, typer.Option("--resume", help="Accept a finished merge of the same parts.")] = False,
    json: JsonOption = False,
) -> None:
    """Merge the parts that several processes wrote, or several datasets. After an interruption, run it again.

    With --part, running it again after a finished merge is an error without --resume, because the dataset exists.
    """
    merged_path = actshard.merge(
        path, part or None, physical=physical, different_models=different_models, resume=resume
    )
    store = actshard.open(merged_path)
    summary = {"path": str(merged_path), "format": store.format, "examples": store.num_examples}
    output(
        json,
        lambda: summary,
        lambda: typer.echo(f"{merged_path}: {many(store.num_examples, 'example')}, {store.format}"),
    )


@app.command("verify", **about("verify"))
def verify_command(
    path: PathArgument,
    deep: Annotated[bool, typer.Option("--deep", help="Also check every value.")] = False,
    format: FormatOption = None,
    storage_option: StorageOption = None,
    cache: CacheOption = "",
    layout: LayoutOption = None,
    incomplete: PartialOption = "error",
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Check a dataset against its format. Exit status: 0 no warnings or errors, 1 warnings, 2 errors, 3 could not run."""
    from actshard.cli import info as verb

    report = verb.run_verify(_place(path, storage_option, cache), format, deep, layout, incomplete, quiet=quiet or json)
    output(json, report.as_dict, lambda: verb.show_report(report))
    raise typer.Exit(report.status)


@app.command("run", **about("run"))
def run_command(
    plan: PlanArgument,
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="Run only these tasks, and do not commit: 17, 0-63, 3,5, or auto (the share of this process, from RANK, SLURM_* "
            "or OMPI_*). Repeatable.",
            show_default=False,
        ),
    ] = None,
    on: Annotated[str, typer.Option("--on", help=f"Engine: {', '.join(ENGINES)}.")] = "local",
    workers: Annotated[int, typer.Option(min=0, help="local: number of worker processes. 0: run in this process.")] = 0,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="NAME=VALUE", help="Another option of the engine. Repeatable."),
    ] = None,
    partition: Annotated[str, typer.Option(help="Slurm: partition.", show_default=False)] = "",
    account: Annotated[str, typer.Option(help="Slurm: account.", show_default=False)] = "",
    qos: Annotated[str, typer.Option(help="Slurm: quality of service.", show_default=False)] = "",
    array_size: Annotated[int, typer.Option(min=0, help="Slurm: size of the job array. 0: up to 64.")] = 0,
    time: Annotated[
        str,
        typer.Option(help="Slurm: time limit of an array element, in minutes or as 4:00:00.", show_default=False),
    ] = "",
    logs: Annotated[str, typer.Option(help="Slurm: folder for the logs of array elements.", show_default=False)] = "",
    memory: Annotated[
        str, typer.Option(help="Slurm, Ray, Dask: memory per task, such as 8GiB.", show_default=False)
    ] = "",
    cpus: Annotated[float, typer.Option(min=0, help="Slurm, Ray: processors per task. 0: one.")] = 0,
    gpus: Annotated[float, typer.Option(min=0, help="Slurm, Ray: GPUs per task.")] = 0,
    address: Annotated[str, typer.Option(help="Ray: address of the cluster, such as auto.", show_default=False)] = "",
    scheduler: Annotated[
        str, typer.Option(help="Dask: address of the scheduler, such as tcp://host:8786.", show_default=False)
    ] = "",
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Continue with the other tasks after one has failed.")
    ] = False,
    retries: Annotated[int, typer.Option(min=0, help="Number of times to retry failed tasks.")] = 0,
    no_commit: Annotated[
        bool, typer.Option("--no-commit", help="Do not commit; run `actshard commit` afterwards.")
    ] = False,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Run the unfinished tasks of a plan, then commit it. After an interruption, run it again."""
    from actshard.cli import planning as verb
    from actshard.cli.convert import options_named

    loaded_plan = actshard.plan.load(plan)
    options = options_named(option or [], "the engine") | verb.engine_options(
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
        numbers = verb.tasks_named(task, loaded_plan)
        verb.run(loaded_plan, on, quiet=quiet or json, tasks=numbers, keep_going=keep_going, retries=retries, **options)
        output(json, lambda: {"done": numbers}, lambda: verb.show_done(loaded_plan, numbers))
        return
    outcome = verb.run(
        loaded_plan, on, quiet=quiet or json, commit=not no_commit, keep_going=keep_going, retries=retries, **options
    )
    if no_commit:
        output(json, outcome.as_dict, lambda: verb.show_status(loaded_plan, outcome, plan))
        return
    output(json, lambda: verb.plain(outcome), lambda: verb.show_outcome(loaded_plan, outcome, quiet=quiet))
    raise typer.Exit(verb.exit_status(outcome))


@app.command("status", **about("status"))
def status_command(
    plan: PlanArgument,
    watch: Annotated[
        bool, typer.Option("--watch", help="Print the status every 5 s until all tasks are done or have failed.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Print which tasks of a plan are done, running, stopped, failed and missing.

    Exit status: 0 all done, 1 tasks left, 2 tasks failed, 3 could not run.
    """
    from actshard.cli import planning as verb

    loaded_plan = actshard.plan.load(plan)
    for status in verb.statuses(loaded_plan, watch):
        output(json, status.as_dict, partial(verb.show_status, loaded_plan, status, plan))
    raise typer.Exit(ERRORS if status.failed else WARNINGS if status.left else FINE)


@app.command("commit", **about("commit"))
def commit_command(plan: PlanArgument, json: JsonOption = False) -> None:
    """Combine the results of a plan's tasks. After an interruption, run it again."""
    from actshard.cli import planning as verb

    loaded_plan = actshard.plan.load(plan)
    outcome = verb.commit(loaded_plan, plan)
    output(json, lambda: verb.plain(outcome), lambda: verb.show_outcome(loaded_plan, outcome))
    raise typer.Exit(verb.exit_status(outcome))


@app.command("stage", **about("stage"))
def stage_command(
    source: Annotated[
        str, typer.Argument(metavar="URL", help="The dataset or token cache: a URL or a path.", show_default=False)
    ],
    folder: Annotated[
        str, typer.Argument(metavar="DIR", help="The local folder to create, such as $TMPDIR/run.", show_default=False)
    ],
    layer: StagedLayers = "",
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Accept a complete copy without checking the source for changes.")
    ] = False,
    storage_option: StorageOption = None,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Copy a dataset, or some of its layers, to a local folder. Resumable. Processes that run it at once share one copy."""
    from actshard.cli import remote as verb

    copy = verb.run_stage(source, folder, layer, storage_option, check=not no_check, quiet=quiet or json)
    output(json, copy.as_dict, lambda: verb.show_copy(copy))


@cache_app.command("info", **about("cache info"))
def cache_info_command(folder: CacheFolder = None, json: JsonOption = False) -> None:
    """Print folder, size, limit and number of objects."""
    from actshard.cli import remote as verb

    usage = actshard.cache_info(folder)
    output(json, usage.as_dict, lambda: verb.show_usage(usage))


@cache_app.command("clear", **about("cache clear"))
def cache_clear_command(folder: CacheFolder = None, json: JsonOption = False) -> None:
    """Remove all cached objects. Processes that use the cache continue and download again."""
    from actshard.cli import remote as verb

    before = actshard.cache_info(folder)
    after = actshard.clear_cache(folder)
    freed = max(before.bytes - after.bytes, 0)
    output(json, lambda: {**after.as_dict(), "freed": freed}, lambda: verb.show_cleared(after, freed))


@app.command("push", **about("push"))
def push_command(
    folder: Annotated[str, typer.Argument(help="The dataset's folder.", show_default=False)],
    url: Annotated[
        str, typer.Argument(help="s3://BUCKET/RUN, gs://, az:// or hf://datasets/ORG/NAME.", show_default=False)
    ],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the dataset at the URL. Removes everything below the URL.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Check the dataset first, and refuse one with errors.")
    ] = True,
    private: Annotated[
        bool, typer.Option("--private/--public", help="Visibility of a new repository on the hub.")
    ] = True,
    links: Annotated[
        bool, typer.Option("--links", help="Follow symbolic links to files outside of the folder.")
    ] = False,
    storage_option: StorageOption = None,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Upload a dataset to a bucket or the hub. Resumable: only missing files are sent."""
    from actshard.cli import remote as verb
    from actshard.cli._options import options_named

    options = options_named(storage_option) or None
    arguments = {
        "overwrite": overwrite,
        "verify": verify,
        "private": private,
        "links": links,
        "storage_options": options,
    }
    upload = verb.run_push(folder, url, quiet=quiet or json, **arguments)
    output(json, upload.as_dict, lambda: verb.show_upload(upload))


@app.command("completion", **about("completion"))
def completion_command(
    shell: Annotated[Shell, typer.Argument(help="bash, zsh or fish.", show_default=False)],
) -> None:
    """Print a shell script that completes commands and options."""
    arguments = {"prog_name": "actshard", "complete_var": "_ACTSHARD_COMPLETE", "shell": shell.value}
    typer.echo(shells.get_completion_script(**arguments))  # type: ignore[attr-defined]  # typer exports only its options


@app.command("demo", **about("demo"))
def demo_command() -> None:
    """Fit a linear probe per layer on the bundled dataset and print its accuracy on the verb's tense."""
    from actshard.cli import demo as verb

    verb.run_demo()


def _place(path: str, options: list[str] | None, cache: str) -> Location:
    from actshard.cli._options import place

    return place(path, options, cache)


def _cache_at(location: Location, format: str | None) -> TokenCache | None:
    from actshard.reading.opening import token_cache_at

    return token_cache_at(location, format)


def main() -> None:
    """Runs the command. Prints an ActshardError to stderr without a traceback.

    Exit status: 0 success; 1 warnings found or work left; 2 errors found; 3 the command could not run; 141 closed pipe.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Names and texts come from files: escape characters that the terminal cannot encode.
            stream.reconfigure(errors="backslashreplace")
    try:
        _run()
    except (BrokenPipeError, SystemExit) as error:
        # `actshard info ... | head` closed the pipe. rich and typer exit with 1 then, which here means warnings.
        if not isinstance(error, BrokenPipeError) and not isinstance(error.__context__, BrokenPipeError):
            raise
        for stream in (sys.stdout, sys.stderr):  # Python flushes them at exit, and would print another error
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise SystemExit(CLOSED_PIPE) from None


def _run() -> None:
    try:
        with boundary(None, "run the command"):
            try:
                app()
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()
    except UnknownFormatError as error:
        from rich.markup import escape

        if not error.candidates:
            _fail(_of_token_cache(error) or message(error))
        lines = [f"{error.path}: is not a dataset, but contains {len(error.candidates)}. Open one:"]
        lines += [f"  {escape(str(path))}  ({name})" for path, name in error.candidates]
        _fail("\n".join(lines))
    except ActshardError as error:
        _fail(message(error))
    except TruncatedData as truncated:
        _fail(message(truncated.error))
    except BrokenPipeError:
        raise
    except Exception:
        # A bug. Python's own status would be 1, which means warnings.
        import traceback

        traceback.print_exc()
        raise SystemExit(COULD_NOT_RUN) from None


def _of_token_cache(error: UnknownFormatError) -> str | None:
    """The message if a command that reads activations was given a folder that contains a token cache."""
    if error.path is None or error.ambiguous:
        return None
    with suppress(ActshardError, OSError):
        cache = _cache_at(Location.at(error.path), None)
        if cache is not None:
            return f"{error.path}: expected activations, found a token cache in {cache.path}. {OF_CACHES}."
    return None


def _fail(text: str) -> None:
    typer.echo(f"actshard: {text}", err=True)
    raise SystemExit(COULD_NOT_RUN)
