"""``actshard plot`` and ``actshard report``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actshard import plot
from actshard.base import _arguments
from actshard.base.errors import ArgumentError, UnknownFormatError
from actshard.base.location import Location
from actshard.cli._options import PLOTS, PLOTS_OF_CACHES, has_range, of_store, options_named, several
from actshard.cli._progress import progress
from actshard.looking.reporting import ENDS, WrittenReport, written
from actshard.looking.reporting.page import OF_DATA
from actshard.plot.activations import measured
from actshard.plot.norms import spread
from actshard.plot.sampled import named_label
from actshard.plot.style import FORMATS, check_name, library
from actshard.reading.finding import existing_anywhere
from actshard.reading.opening import open_quietly, token_cache_at
from actshard.reading.store import Store
from actshard.streaming.selection import Selection
from actshard.tokens.looking import look

if TYPE_CHECKING:
    from collections.abc import Callable


_ONE_LAYER = ("dimensions", "pca", "shuffle")
_FEW_LAYERS = ("histogram", "positions", "spectrum")


def run_plot(
    location: Location,
    what: str,
    out: str,
    layer: str,
    *,
    quiet: bool,
    tokens: object,
    format: str | None,
    layout: str | None,
    of: str | None = None,
    color: str | None = None,
) -> Path:
    """Draws a plot and shows progress."""
    library()
    tokens = tokens or ("last" if what == "pca" else "content")
    file = _arguments.local_path(out, "--out")
    if what not in PLOTS:
        raise ArgumentError(f"expected one of the plots {', '.join(PLOTS)}, found {what!r:.80}")
    check_name(file, FORMATS, "--out")
    if color is not None and what != "pca":
        raise ArgumentError(f"--color: expected the plot pca, found {what}")
    if of is not None and what != "separability":
        raise ArgumentError(f"--label: expected the plot separability, found {what}")
    if what == "separability" and tokens != "content":
        raise ArgumentError(
            f"--tokens: expected content for separability, which uses each example's last content token, found {tokens!r:.80}"
        )
    cache = None if layout is not None else token_cache_at(location, format)
    if (cache is not None) != (what in PLOTS_OF_CACHES):
        alternatives = [x for x in PLOTS if (x in PLOTS_OF_CACHES) == (cache is not None)]
        kind = "a token cache" if cache is not None else "a dataset of activations"
        raise ArgumentError(f"expected a plot of {kind} ({', '.join(alternatives)}), found {what}", path=location)
    if cache is not None and layer:
        raise ArgumentError("--layer: token caches have no layers. Leave it out.", path=location)
    if cache is not None and tokens != "content":
        raise ArgumentError("--tokens: plots of a token cache cover all tokens. Leave it out.", path=location)
    draw = getattr(plot, what)
    with plot.style(), progress(what, quiet=quiet, unit="tokens") as watch:
        if cache is not None:
            ax = draw(look(cache, progress=watch.counts))
        else:
            store = open_quietly(location, format, "auto", layout=layout)
            names = of_store(layer, store.layers, "--layer") if layer else None
            if what in _ONE_LAYER:
                if names is not None and len(names) != 1:
                    raise ArgumentError(f"--layer: expected one layer for {what}, found {layer!r:.200}")
                options = {"color": color} if what == "pca" else {}
                ax = draw(store, names[0] if names else None, tokens=tokens, **options)
            else:
                if what in _FEW_LAYERS and names is None:
                    names = spread(store.layers)
                ax = _drawn(store, what, names, of, tokens, watch.stage)
        plot.save(ax, file)
    return file


def _drawn(
    store: Store,
    what: str,
    names: Any,
    of: str | None,
    tokens: Any,
    tell: Callable[[str, int, int], object],
) -> object:
    """Draws a plot of several layers, from all rows or a sample of them."""

    def rows(done: int, total: int) -> None:
        tell("rows", done, total)

    if what == "spectrum":
        spectra = {name: store.spectrum(name, tokens=tokens, progress=rows) for name in names}
        return plot.spectrum(store, spectra=spectra)
    if what == "similarity":
        return plot.similarity(store, found=store.similarity(names, tokens=tokens, progress=rows))
    if what == "separability":
        label = named_label(store) if of is None else of
        return plot.separability(store, found=store.separability(label, names, progress=rows))
    return getattr(plot, what)(store, stats=measured(store, names, selection=Selection(tokens), progress=tell))


def run_report(
    path: str, out: str, layer: str, *, quiet: bool, storage_option: Sequence[str] | None, **options: Any
) -> WrittenReport:
    """Writes a report and shows progress."""
    check_name(Path(_arguments.local_path(out, "--out")), ENDS, "--out")
    options["storage_options"] = options_named(storage_option) or None
    if layer or options["rows"] is not None or options["tokens"] != "content":
        _refuse_caches(path, layer, options)
    layers = None
    if layer:
        layers = several(layer, "--layer")
        if has_range(layer) or any(
            isinstance(name, int) for name in layers
        ):  # digits name a text if the dataset's names are texts
            arguments = {name: options[name] for name in ("storage_options", "cache", "layout")}
            try:
                layers = of_store(layer, open_quietly(path, options["format"], "auto", **arguments).layers, "--layer")
            except UnknownFormatError:
                raise
            except OF_DATA:  # the report of a dataset that cannot be opened has no layers, and lists the damage
                layers = None
    selection = Selection(options.pop("tokens"))
    with progress("report", quiet=quiet) as watch:
        return written(path, out, layers=layers, selection=selection, progress=watch.stage, **options)


def _refuse_caches(path: str, layer: str, options: dict[str, Any]) -> None:
    """Checks that the options have a use.

    Raises:
        ArgumentError: they are those of datasets, and there is a token cache.
    """
    location = existing_anywhere(path, options["storage_options"], options["cache"])
    if options["layout"] is not None or token_cache_at(location, options["format"]) is None:
        return
    if layer:
        raise ArgumentError("--layer: token caches have no layers. Leave it out.", path=location)
    if options["rows"] is not None:
        raise ArgumentError("--rows: token caches have no rows of layers to sample. Leave it out.", path=location)
    raise ArgumentError("--tokens: the report of a token cache covers all tokens. Leave it out.", path=location)
