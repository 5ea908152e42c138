"""The commands ``actshard report`` and ``actshard plot``."""

from __future__ import annotations

from typing import Annotated

import typer

from actshard.cli._app import output
from actshard.cli._options import (
    PLOTS,
    PLOTS_OF_CACHES,
    CacheOption,
    FormatOption,
    JsonOption,
    LayoutOption,
    LongStorageOption,
    PathArgument,
    QuietOption,
    StatsLayers,
    StatsRows,
    StatsTokens,
)

_OF_TOKENS = f"; of a token cache: {', '.join(PLOTS_OF_CACHES)}"
TokenizerFolder = Annotated[str, typer.Option(help="A folder with tokenizer.json, to show the text of tokens.")]

PlotLayers = Annotated[
    str,
    typer.Option(
        help="Layers: comma-separated names; one for dimensions and shuffle, and at most 6 are drawn by histogram, positions and "
        "spectrum. Default: all; for histogram, positions and spectrum the first, the middle and the last; for dimensions the last "
        "and for shuffle the first.",
        show_default=False,
    ),
]


def report_command(
    path: PathArgument,
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="FILE", help="The file to write: .html or .htm.")
    ] = "report.html",
    layer: StatsLayers = "",
    tokens: StatsTokens = "content",
    rows: StatsRows = None,
    examples: Annotated[int, typer.Option(min=0, max=20, help="Number of examples to show token by token.")] = 6,
    tokenizer: TokenizerFolder = "",
    deep: Annotated[bool, typer.Option("--deep", help="Also check every value.")] = False,
    format: FormatOption = None,
    storage_option: LongStorageOption = None,
    cache: CacheOption = "",
    layout: LayoutOption = None,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Write one HTML file about a dataset or token cache: findings with advice, plots, layers, texts coloured by norm."""
    from actshard.cli import plot as verb

    page = verb.run_report(
        path,
        out,
        layer,
        quiet=quiet or json,
        storage_option=storage_option,
        tokens=tokens,
        rows=rows,
        examples=examples,
        tokenizer=tokenizer or None,
        deep=deep,
        format=format,
        cache=cache or None,
        layout=layout,
    )
    output(json, page.as_dict, lambda: typer.echo(str(page.path)))


def plot_command(
    path: PathArgument,
    what: Annotated[
        str,
        typer.Argument(
            help=f"Plot of a dataset: {', '.join(x for x in PLOTS if x not in PLOTS_OF_CACHES)}{_OF_TOKENS}.",
            show_default=False,
        ),
    ],
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="FILE", help="The file to write: .svg or .png.", show_default=False)
    ],
    layer: PlotLayers = "",
    tokens: Annotated[
        str,
        typer.Option(help="Tokens: content, all, last or special. Default: content; for pca last.", show_default=False),
    ] = "",
    label: Annotated[
        str,
        typer.Option(help="For separability: the column with the classes. Default: label, labels, class or target."),
    ] = "",
    color: Annotated[
        str, typer.Option(help="For pca: the column that colours the points. Default: label, labels, class or target.")
    ] = "",
    format: FormatOption = None,
    storage_option: LongStorageOption = None,
    cache: CacheOption = "",
    layout: LayoutOption = None,
    quiet: QuietOption = False,
) -> None:
    """Draw one plot of a dataset or token cache to an SVG or PNG file."""
    from actshard.cli import plot as verb
    from actshard.cli._options import place

    location = place(path, storage_option, cache)
    options = {"tokens": tokens, "format": format, "layout": layout, "of": label or None, "color": color or None}
    typer.echo(str(verb.run_plot(location, what, out, layer, quiet=quiet, **options)))
