"""``actshard plan capture | convert | verify | stats | tokenize | merge | stage``: plans that divide these commands into tasks."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import actshard
from actshard import formats
from actshard.cli._app import Commands, about, output
from actshard.cli._capturing_commands import (
    CaptureColumns,
    CaptureDtype,
    CaptureLayers,
    CaptureTokenizer,
    CaptureTokens,
    CutOption,
    DeviceOption,
    HostMemory,
    MaxTokens,
    ModelArgument,
    ModelOptions,
    NonfiniteOption,
    RevisionOption,
    SpecialTokens,
    TextColumn,
    TextsArgument,
)
from actshard.cli._options import (
    CacheLayout,
    CacheStorage,
    ChatTemplate,
    ConvertColumns,
    ConvertDtype,
    ConvertExamples,
    ConvertLayers,
    ConvertSource,
    ConvertTokens,
    DifferentModels,
    FormatOption,
    FormatOptionsOfPlan,
    JsonOption,
    KeepShards,
    LayoutOption,
    NoMeasure,
    PadOption,
    PathArgument,
    PhysicalOption,
    PlanFile,
    ReplacePlan,
    RowFormatOption,
    RowOptionsOfPlan,
    SaveOption,
    ShardBytes,
    SkipErrors,
    StagedLayers,
    StatsLayers,
    StatsTokens,
    TasksOption,
    TextSources,
    TokenDtype,
    TokenizerOption,
    TokensPerExample,
    TruncateOption,
    WorkFolder,
    shown_warnings,
)
from actshard.formats import registry

plan_app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    help="Divide work into tasks for Slurm, Ray, Dask or local processes. Prints bytes, files, memory, time and the next commands.",
)

_TASKS = 64
_FILE = "plan.json"


def _write_plan(plan: Any, file: str, replace: bool, no_measure: bool, json: bool) -> None:
    from actshard.cli import planning as verb

    if file == "-":
        output(True, plan.as_dict, lambda: None)
        return
    path = verb.save(plan, file, replace)
    summary = verb.PlanSummary.of(plan, path, "--no-measure" if no_measure else verb.rate(plan, quiet=json))
    output(json, summary.as_dict, lambda: verb.show_plan(summary))


@plan_app.command("capture", **about("plan capture"))
def plan_capture_command(
    model: ModelArgument,
    texts: TextsArgument,
    target: Annotated[
        str, typer.Argument(help="The folder to create, on a file system that all machines share.", show_default=False)
    ],
    to: Annotated[str, typer.Option(help="Format: one whose parts can be merged.")] = registry.DEFAULT_OF_PARTS,
    tasks: TasksOption = _TASKS,
    out: PlanFile = _FILE,
    layers: CaptureLayers = "",
    tokens: CaptureTokens = "all",
    dtype: CaptureDtype = "",
    tokenizer: CaptureTokenizer = "",
    text: TextColumn = "",
    columns: CaptureColumns = "",
    max_tokens: MaxTokens = None,
    truncate: CutOption = False,
    special_tokens: SpecialTokens = True,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Token positions per batch.")] = 16_384,
    memory: HostMemory = "2GiB",
    on_nonfinite: NonfiniteOption = "refuse",
    revision: RevisionOption = "",
    device: DeviceOption = "",
    model_option: ModelOptions = None,
    pad: PadOption = False,
    shard_bytes: ShardBytes = "",
    option: FormatOptionsOfPlan = None,
    replace: ReplacePlan = False,
    json: JsonOption = False,
) -> None:
    """Plan a capture. Tasks are balanced by tokens, and compute the same batches for any number of tasks."""
    from actshard.cli import capture as verb
    from actshard.cli.convert import options_named

    plan = actshard.plan.capture(
        model,
        texts,
        target,
        to,
        tasks=tasks,
        layers=verb.layers_named(layers),
        tokens=verb.tokens_named(tokens),
        dtype=dtype or None,
        tokenizer=tokenizer or None,
        text=text or None,
        columns=verb.columns_chosen(columns),
        max_tokens=max_tokens,
        truncate=truncate,
        special_tokens=special_tokens,
        batch_tokens=batch_tokens,
        memory=memory,
        on_nonfinite=verb.nonfinite_named(on_nonfinite),
        revision=revision or None,
        device=device or None,
        model_options=options_named(model_option or [], "the model", short=False) or None,
        pad=pad,
        shard_bytes=shard_bytes or None,
        options=options_named(option or [], "the target format", short=False),
    )
    _write_plan(plan, out, replace, False, json)


@plan_app.command("convert", **about("plan convert"))
def plan_convert_command(
    source: ConvertSource,
    target: Annotated[
        str, typer.Argument(help="The folder to create, on a file system that all machines share.", show_default=False)
    ],
    to: Annotated[
        str, typer.Option("--to", help=f"Target format: {', '.join(formats.written())}.", show_default=False)
    ],
    tasks: TasksOption = _TASKS,
    out: PlanFile = _FILE,
    layer: ConvertLayers = "",
    examples: ConvertExamples = "",
    columns: ConvertColumns = "",
    tokens: ConvertTokens = "all",
    dtype: ConvertDtype = "",
    pad: PadOption = False,
    truncate: TruncateOption = False,
    tokens_per_example: TokensPerExample = 0,
    shard_bytes: ShardBytes = "",
    option: FormatOptionsOfPlan = None,
    format: FormatOption = None,
    layout: LayoutOption = None,
    replace: ReplacePlan = False,
    no_measure: NoMeasure = False,
    json: JsonOption = False,
) -> None:
    """Plan a conversion. For any number of tasks, the result is byte-identical to that of `actshard convert`."""
    from actshard.cli import convert as verb
    from actshard.cli._options import has_range, renamed

    kinds: Any = tokens  # convert() checks it
    plan = actshard.plan.convert(
        source,
        target,
        to,
        tasks=tasks,
        layers=verb.layers_of(source, format, layer) if has_range(layer) else renamed(layer, "--layer"),
        examples=verb.examples_named(examples),
        columns=verb.columns_named(columns),
        tokens=kinds,
        dtype=dtype or None,
        pad=pad,
        truncate=truncate,
        tokens_per_example=tokens_per_example or None,
        shard_bytes=shard_bytes or None,
        src_format=format,
        layout=layout,
        **verb.options_named(option or [], "the target format", short=False),
    )
    _write_plan(plan, out, replace, no_measure, json)


@plan_app.command("verify", **about("plan verify"))
def plan_verify_command(
    path: PathArgument,
    tasks: TasksOption = _TASKS,
    out: PlanFile = _FILE,
    format: FormatOption = None,
    layout: LayoutOption = None,
    work: WorkFolder = "",
    replace: ReplacePlan = False,
    no_measure: NoMeasure = False,
    json: JsonOption = False,
) -> None:
    """Plan a check of every value. The commit prints the same report as `actshard verify --deep`."""
    plan = actshard.plan.verify(path, tasks=tasks, format=format, layout=layout, work=work or None)
    _write_plan(plan, out, replace, no_measure, json)


@plan_app.command("stats", **about("plan stats"))
def plan_stats_command(
    path: PathArgument,
    layer: StatsLayers = "",
    tokens: StatsTokens = "content",
    tasks: TasksOption = _TASKS,
    out: PlanFile = _FILE,
    format: FormatOption = None,
    layout: LayoutOption = None,
    save: SaveOption = False,
    work: WorkFolder = "",
    replace: ReplacePlan = False,
    no_measure: NoMeasure = False,
    json: JsonOption = False,
) -> None:
    """Plan the statistics of layers. The commit prints the same values as `actshard stats`, bit for bit."""
    from actshard.cli._options import of_store

    layers = None
    if layer and layer != "all":
        with actshard.open(path, format, layout=layout) as store:
            layers = of_store(layer, store.layers, "--layer")
    kinds: Any = tokens  # stats() checks it
    where: dict[str, Any] = {"format": format, "layout": layout, "work": work or None}
    plan = actshard.plan.stats(path, layers, tasks=tasks, tokens=kinds, save=save, **where)
    _write_plan(plan, out, replace, no_measure, json)


@plan_app.command("tokenize", **about("plan tokenize"))
def plan_tokenize_command(
    sources: TextSources,
    cache: Annotated[
        str, typer.Option("--cache", help="The cache to create: CACHE_DIR/NAME/train.", show_default=False)
    ],
    tokenizer: TokenizerOption = "",
    tasks: TasksOption = _TASKS,
    out: PlanFile = _FILE,
    form: RowFormatOption = "text",
    option: RowOptionsOfPlan = None,
    chat_template: ChatTemplate = None,
    layout: CacheLayout = "consolidated",
    storage: CacheStorage = "plain",
    dtype: TokenDtype = "",
    skip_errors: SkipErrors = False,
    keep_shards: KeepShards = False,
    work: WorkFolder = "",
    replace: ReplacePlan = False,
    no_measure: NoMeasure = False,
    json: JsonOption = False,
) -> None:
    """Plan a token cache. The result is byte-identical to that of `actshard tokenize`."""
    from actshard.cli.tokenize import format_named

    with shown_warnings():
        plan = actshard.plan.tokenize(
            sources or [],
            cache,
            tokenizer or None,
            format_named(form, option or [], chat_template, short=False),
            tasks=tasks,
            layout=layout,
            storage=storage,
            dtype=dtype or None,
            on_error="skip" if skip_errors else "raise",
            keep_shards=keep_shards,
            work=work or None,
        )
    _write_plan(plan, out, replace, no_measure, json)


@plan_app.command("merge", **about("plan merge"))
def plan_merge_command(
    target: Annotated[
        str, typer.Argument(help="A new folder, on a file system that all machines share.", show_default=False)
    ],
    part: Annotated[
        list[str],
        typer.Option(
            "--part", help="A dataset to merge; it is not changed. Repeatable, in this order.", show_default=False
        ),
    ],
    physical: PhysicalOption = False,
    different_models: DifferentModels = False,
    tasks: TasksOption = _TASKS,
    out: PlanFile = _FILE,
    work: WorkFolder = "",
    replace: ReplacePlan = False,
    no_measure: NoMeasure = False,
    json: JsonOption = False,
) -> None:
    """Plan a merge of datasets. The result is byte-identical to that of `actshard merge`."""
    plan = actshard.plan.merge(
        target, part, tasks=tasks, physical=physical, different_models=different_models, work=work or None
    )
    _write_plan(plan, out, replace, no_measure, json)


@plan_app.command("stage", **about("plan stage"))
def plan_stage_command(
    source: Annotated[
        str, typer.Argument(metavar="URL", help="The dataset or token cache: a URL or a path.", show_default=False)
    ],
    folder: Annotated[
        str,
        typer.Argument(
            metavar="DIR", help="The folder to create, on a file system that all machines share.", show_default=False
        ),
    ],
    layer: StagedLayers = "",
    tasks: TasksOption = _TASKS,
    out: PlanFile = _FILE,
    replace: ReplacePlan = False,
    no_measure: NoMeasure = False,
    json: JsonOption = False,
) -> None:
    """Plan a copy of a dataset, or some of its layers. The result is the same folder as that of `actshard stage`."""
    from actshard.cli.remote import layers_of

    names = layers_of(source, layer, None)
    _write_plan(actshard.plan.stage(source, folder, names, tasks=tasks), out, replace, no_measure, json)
