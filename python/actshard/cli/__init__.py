"""The command ``actshard``: the same verbs as the Python API, one module each."""

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

import actshard
from actshard import formats
from actshard.errors import ActshardError, UnknownFormatError, boundary

app = typer.Typer(
    name="actshard",
    help="Open, look at and read activation datasets, whatever system wrote them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

PathArgument = Annotated[
    Path, typer.Argument(help="The dataset's folder, or a folder that holds datasets.", show_default=False)
]
FormatOption = Annotated[
    str | None, typer.Option("--format", help=f"{', '.join(formats.names())}; detected if not given.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


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
    # What a dataset's reader should know is part of what the commands print; Python's own warnings would say it twice.
    warnings.simplefilter("ignore", actshard.ActshardWarning)


@app.command("info")
def info_command(path: PathArgument, format: FormatOption = None, json: JsonOption = False) -> None:
    """Tell what a dataset or token cache is: sizes, layers or fields, type, bytes, provenance, warnings."""
    cache = _cache_at(path, format)
    if cache is not None:
        from actshard.cli import caches

        _print(json, lambda: caches.about(cache), lambda: caches.show_info(cache))
        return
    from actshard.cli import info as verb

    store = actshard.open(path, format)
    _print(json, store.info, lambda: verb.show(store))


@app.command("head")
def head_command(
    path: PathArgument,
    n: Annotated[int, typer.Option("-n", "--examples", min=1, max=1000, help="How many examples.")] = 5,
    tokenizer: Annotated[str, typer.Option(help="For token caches: decode with this one.")] = "",
    format: FormatOption = None,
    json: JsonOption = False,
) -> None:
    """Show a few examples: text, label, token count, and the norm of each layer's last token; or rows of a token cache."""
    cache = _cache_at(path, format)
    if cache is not None:
        from actshard.cli import caches

        found = caches.tokenizer_of(cache, tokenizer)
        _print(json, lambda: caches.rows(cache, n, found), lambda: caches.show_rows(cache, n, found))
        return
    from actshard.cli import head as verb

    store = actshard.open(path, format)
    _print(json, lambda: verb.rows(store, n), lambda: verb.show(store, n))


@app.command("bench-stream")
def bench_stream_command(
    path: PathArgument,
    layer: Annotated[
        str, typer.Option(help="A layer's name, several with commas, or all; the first if not given.")
    ] = "",
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per batch.")] = 16_384,
    shuffle: Annotated[str, typer.Option(help="none, window or exact.")] = "window",
    memory: Annotated[str, typer.Option(help="Of the pool of --shuffle window.")] = "1GiB",
    tokens: Annotated[str, typer.Option(help="content, all, last or special.")] = "content",
    dtype: Annotated[str, typer.Option(help="Convert while copying.")] = "",
    mode: Annotated[str, typer.Option("--io", help="mmap, pread or auto.")] = "auto",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    seconds: Annotated[float, typer.Option(min=0, help="Stop after so long, or after an epoch.")] = 30.0,
    format: FormatOption = None,
    json: JsonOption = False,
) -> None:
    """Stream a dataset: bytes per second, time to the first batch, and how well the settings shuffle."""
    from actshard.cli import bench_stream as verb

    store = actshard.open(path, format, io=mode)
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
    """Layers as a command line names them."""
    if words == "all":
        return "all"
    if not words:
        if not store.layers:
            raise actshard.NotStoredError("holds no hidden states", path=store.path)
        return store.layers[0]
    try:
        names = [int(word) for word in words.split(",")]
    except ValueError:
        raise actshard.ArgumentError(f'--layer: expected integers, or "all", found {words!r}') from None
    return names[0] if len(names) == 1 else names


@app.command("convert")
def convert_command(
    source: Annotated[Path, typer.Argument(help="The dataset to convert.", show_default=False)],
    target: Annotated[
        Path | None,
        typer.Argument(help="The folder to make; formats that name their datasets make one in it.", show_default=False),
    ] = None,
    to: Annotated[str, typer.Option("--to", help=f"{', '.join(formats.written())}.")] = "",
    layer: Annotated[
        str, typer.Option(help="Layers to take: names with commas; -1=23 renames. All if not given.")
    ] = "",
    examples: Annotated[str, typer.Option(help="Examples to take: first:last, or numbers with commas.")] = "",
    columns: Annotated[
        str, typer.Option(help="Columns to take: names with commas; label=verb renames; none. All if not given.")
    ] = "",
    tokens: Annotated[str, typer.Option(help="all, content or last.")] = "all",
    dtype: Annotated[str, typer.Option(help="Store this type: float16, float32, ...")] = "",
    pad: Annotated[bool, typer.Option("--pad", help="Fill shorter examples up with zeros.")] = False,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut longer examples.")] = False,
    tokens_per_example: Annotated[int, typer.Option(min=0, help="To how many tokens; 0: as they need.")] = 0,
    shard_bytes: Annotated[str, typer.Option(help="About how large shards are, such as 256MB.")] = "",
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="The target format's own, as name=value; may repeat.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written and lost, and stop.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted conversion stopped.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare every row with the source afterwards.")] = False,
    exist_ok: Annotated[bool, typer.Option("--exist-ok", help="Leave a finished result as it is.")] = False,
    format: FormatOption = None,
    json: JsonOption = False,
) -> None:
    """Write a dataset again in another format, resumable, with nothing lost that --dry-run does not tell."""
    from actshard.cli import convert as verb

    own = {
        "layers": verb.layers_named(layer),
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
    if dry_run:
        plans = verb.plans(source, target or Path("converted"), to or None, own)
        _print(json, lambda: [p.as_dict() for p in plans], lambda: verb.show_plans(plans, to or None))
        if to and plans[0].refused:
            raise typer.Exit(1)
        return
    if target is None or not to:
        raise actshard.ArgumentError(
            "convert: expected SOURCE TARGET --to FORMAT; --dry-run compares formats without them"
        )
    done = verb.run(source, target, to, quiet=json, resume=resume, verify=verify, exist_ok=exist_ok, **own)
    _print(json, done.as_dict, lambda: verb.show(done))


@app.command("tokenize")
def tokenize_command(
    sources: Annotated[
        list[str] | None,
        typer.Argument(help="JSON lines, JSON or parquet; plain or compressed; globs too.", show_default=False),
    ] = None,
    tokenizer: Annotated[str, typer.Option(help="A folder with tokenizer.json, or that file.")] = "",
    out: Annotated[Path | None, typer.Option(help="The cache to make: CACHE_DIR/NAME/train.")] = None,
    form: Annotated[str, typer.Option("--format", help="text, chat, prebuilt or supervised.")] = "text",
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="The format's own, such as text_key=body; may repeat.")
    ] = None,
    chat_template: Annotated[Path | None, typer.Option(help="A file with a chat template.")] = None,
    config: Annotated[Path | None, typer.Option(help="Levanter's YAML: every cache of every component.")] = None,
    component: Annotated[list[str] | None, typer.Option(help="With --config: only these; may repeat.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --config: say what is there, and stop.")] = False,
    layout: Annotated[str, typer.Option(help="consolidated or sharded.")] = "consolidated",
    storage: Annotated[str, typer.Option(help="plain (mapped, no decoding) or lz4 (as Levanter).")] = "plain",
    dtype: Annotated[str, typer.Option(help="Of token ids: int64, int32, uint32 or uint16.")] = "",
    jobs: Annotated[int, typer.Option(min=0, help="Processes; 0: as many as processors and files.")] = 0,
    skip_errors: Annotated[bool, typer.Option("--skip-errors", help="Leave out records that cannot be used.")] = False,
    keep_shards: Annotated[bool, typer.Option("--keep-shards", help="Keep the caches of single files.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a cache that was built otherwise.")] = False,
    json: JsonOption = False,
) -> None:
    """Build a token cache that Levanter opens too. Interrupted, run it again: finished files are kept."""
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
            raise actshard.ArgumentError("tokenize: --config names sources and caches itself")
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
    path: Annotated[
        Path, typer.Argument(help="Where the parts were written; or a new folder, for --part.", show_default=False)
    ],
    part: Annotated[
        list[Path] | None, typer.Option("--part", help="A dataset to put in, in this order; may repeat. They stay.")
    ] = None,
    physical: Annotated[
        bool, typer.Option("--physical", help="Make one Zarr store, not a run with a manifest.")
    ] = False,
    different_models: Annotated[
        bool, typer.Option("--different-models", help="Join datasets of different models too.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Make one dataset of the parts that many processes wrote, or of several datasets. Killed, run it again.

    With --part, a merge that is done is refused: the dataset is there.
    """
    made = actshard.merge(path, part or None, physical=physical, different_models=different_models)
    store = actshard.open(made)
    found = {"path": str(made), "format": store.format, "examples": store.num_examples}
    _print(json, lambda: found, lambda: typer.echo(f"{made}: {store.num_examples:,} examples, {store.format}"))


@app.command("verify")
def verify_command(
    path: PathArgument,
    deep: Annotated[bool, typer.Option("--deep", help="Look at every value too.")] = False,
    format: FormatOption = None,
    json: JsonOption = False,
) -> None:
    """Check everything a format promises. Exit status: 0 nothing wrong, 1 warnings, 2 errors, 3 could not check."""
    from actshard.cli import verify as verb

    report = verb.run(path, format, deep, quiet=json)
    _print(json, report.as_dict, lambda: verb.show(report))
    _checked.append(path)
    raise typer.Exit(report.status)


@app.command("demo")
def demo_command() -> None:
    """Fit a linear probe per layer on the bundled dataset and show where tense becomes readable."""
    from actshard.cli import demo as verb

    verb.run()


def _cache_at(path: Path, format: str | None) -> Any:
    """The token cache that a path stands for; None if it stands for activations, or for nothing that is known."""
    from actshard.finding import existing, find_any, of_tokens

    if format not in (None, of_tokens()):
        return None
    if format is None:
        try:
            at, found = find_any(existing(path))
        except ActshardError:
            return None  # actshard.open says why
        if found != of_tokens():
            return None
        path = at.place
    from actshard.tokens.cache import open_cache

    return open_cache(path)


def _print(json: bool, data: Callable[[], Any], pretty: Callable[[], None]) -> None:
    if not json:
        pretty()
        return
    text = json_module.dumps(data(), indent=2, ensure_ascii=False, default=str)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # a lone surrogate of a file's name or text, or a terminal without Unicode
        text = json_module.dumps(data(), indent=2, default=str)
    typer.echo(text)


_COULD_NOT_CHECK = 3
_checked: list[Path] = []
"""Paths of which ``verify`` has made a report."""


def main() -> None:
    """Runs the command; an actshard error is one line on stderr and exit status 1, never a traceback.

    ``verify`` exits with 3 where it could not check, whatever the reason: 1 and 2 are its findings.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Names and texts come from files: what the terminal cannot show is shown escaped.
            stream.reconfigure(errors="backslashreplace")
    try:
        with boundary(None, "run the command"):
            app()
    except UnknownFormatError as error:
        from rich.markup import escape

        if not error.candidates:
            _fail(str(error))
        lines = [f"{error.path} is no dataset itself but holds {len(error.candidates)}; open one:"]
        lines += [f"  {escape(str(path))}  ({name})" for path, name in error.candidates]
        _fail("\n".join(lines))
    except ActshardError as error:
        _fail(str(error))
    except BrokenPipeError:
        # `actshard info ... | head`: the reader has seen enough. Python would complain once more while exiting.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except SystemExit as stop:
        if stop.code and _verifies() and not _checked:  # wrong options
            raise SystemExit(_COULD_NOT_CHECK) from None
        raise
    except Exception:
        if not _verifies():
            raise
        import traceback

        traceback.print_exc()
        raise SystemExit(_COULD_NOT_CHECK) from None


def _verifies() -> bool:
    return next((word for word in sys.argv[1:] if not word.startswith("-")), "") == "verify"


def _fail(message: str) -> None:
    typer.echo(f"actshard: {message}", err=True)
    raise SystemExit(_COULD_NOT_CHECK if _verifies() else 1)
