"""``actshard bench-stream``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.table import Table

from actshard.base._arguments import many
from actshard.base.work.children import peak_memory
from actshard.cli._format import console, size
from actshard.reading.store import Store
from actshard.streaming.quality import measure

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from actshard.base.layers import Layer


def run(store: Store, layer: Layer | list[Layer], batch_size: int, seconds: float, **options: Any) -> dict[str, object]:
    """Reads for ``seconds``, at most one epoch; returns speed, memory and the quality of the shuffle."""
    stream = store.stream(layer, batch_size, **options)
    batch_rows: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    total = 0
    began = time.perf_counter()
    first = 0.0
    batches = iter(stream)
    for batch in batches:
        elapsed = time.perf_counter() - began
        first = first or elapsed
        total += batch.activations.nbytes
        batch_rows.append((batch.examples, batch.tokens))
        if elapsed > seconds:
            break
    took = time.perf_counter() - began
    stream.close()
    rows = sum(len(e) for e, _ in batch_rows)
    return {
        "path": str(store.path),
        "format": store.format,
        "layers": list(stream.layers),
        "batch_size": batch_size,
        "shuffle": options.get("shuffle"),
        "memory": options.get("memory"),
        "batches": len(batch_rows),
        "of_batches": len(stream),
        "rows": rows,
        "bytes": total,
        "seconds": took,
        "first_batch_seconds": first,
        "bytes_per_second": total / took if took else 0.0,
        "rows_per_second": rows / took if took else 0.0,
        "peak_memory": peak_memory(),
        "quality": measure(batch_rows).as_dict(),
    }


def show(measurement: dict[str, Any]) -> None:
    """Prints the result of :func:`run`."""
    out = console()
    grid = Table(box=None, show_header=False, pad_edge=False)
    quality = measurement["quality"]
    part = (
        ""
        if measurement["batches"] == measurement["of_batches"]
        else f" (of {measurement['of_batches']:,}; increase --seconds for more)"
    )
    for name, value in (
        ("read", f"{size(measurement['bytes'])} in {many(measurement['batches'], 'batch', plural='batches')}{part}"),
        ("speed", f"{size(int(measurement['bytes_per_second']))}/s, {measurement['rows_per_second']:,.0f} rows/s"),
        ("first batch after", f"{measurement['first_batch_seconds']:.3f} s"),
        ("peak memory", f"{size(measurement['peak_memory'])} of the process, including mapped pages"),
        (
            "distinct examples",
            f"{quality['distinct']:,.0f} per batch; ideal {quality['ideal_distinct']:,.0f} ({quality['distinct_ratio']:.2f})",
        ),
        ("entropy", f"{quality['entropy']:.3f} of the ideal"),
        (
            "stored neighbours",
            f"{quality['apart']:,.0f} rows apart; ideal {quality['ideal_apart']:,.0f} ({quality['apart_ratio']:.2f})",
        ),
    ):
        grid.add_row(name, value)
    out.print(grid)
