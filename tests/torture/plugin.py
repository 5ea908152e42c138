"""A format of another package that overrides the methods of ``Format`` and names no rooms: it reads, writes and checks.

flat.json      layers, d_model, tokens of each example, columns, metadata
rows.f32       (examples, layers, ROOM, d_model) float32; rows beyond an example's own are zeros
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from actshard._native import Rows
from actshard.base.errors import DtypeError
from actshard.formats import Contents, Evidence, Format, Options
from actshard.formats.carrying import Carrying
from actshard.formats.target import AllExamples, Block, Target

ROOM = 8


class FlatTarget(Target):
    """Appends to one file; the list of examples comes last."""

    format: ClassVar[str] = "flat"
    format_options: ClassVar[Mapping[str, str]] = {}
    makes: ClassVar[tuple[str, ...]] = ("rows.f32", "flat.json")
    takes_shard_bytes = False

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        if dtype != np.float32:
            raise DtypeError(f"flat holds float32, not {dtype}")

    @property
    def most_tokens(self) -> tuple[int, str] | None:
        return ROOM, "as flat has room for no more"

    def _size(self, n: int) -> int:
        return n * len(self.spec.layers) * ROOM * self.row_bytes

    def restore(self, states: Sequence[dict[str, Any]], lengths: NDArray[np.int64]) -> None:
        self.n = len(lengths)

    def forget(self, lengths: NDArray[np.int64]) -> None:
        if (self.root / "rows.f32").exists():
            os.truncate(self.root / "rows.f32", self._size(len(lengths)))

    def write(self, block: Block) -> None:
        made = np.zeros((len(block), len(self.spec.layers), ROOM, self.spec.d_model), np.float32)
        for (i, layer), n in np.ndenumerate(block.lengths):
            first = int(block.starts[i, layer])
            made[i, layer, :n] = block.memory[first : first + n]
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / "rows.f32").open("r+b" if (self.root / "rows.f32").exists() else "wb") as file:
            file.seek(self._size(self.n))
            file.write(made.tobytes())
        self.n += len(block)

    def dirty(self) -> tuple[list[Path], dict[str, Any]]:
        return [self.root / "rows.f32"], {}

    def finish(self, examples: AllExamples) -> None:
        columns = {} if examples.columns is None else examples.columns.to_pydict()
        made = {
            "layers": self.spec.layers,
            "d_model": self.spec.d_model,
            "counts": examples.lengths[:, 0].tolist(),
            "columns": columns,
            "metadata": self.spec.metadata,
        }
        (self.root / "flat.json.part").write_text(json.dumps(made))
        (self.root / "flat.json.part").rename(self.root / "flat.json")

    def estimate(self, tokens: NDArray[np.int64]) -> tuple[int, int, int]:
        return 1, 2, self._size(len(tokens))


class FlatCarrying(Carrying):
    """The number of tokens follows from the rows."""

    derived: ClassVar[frozenset[str]] = frozenset({"count"})


class Flat(Format):
    """Every method by hand, paths as :class:`pathlib.Path`."""

    name: ClassVar[str] = "flat"
    description: ClassVar[str] = "one file of float32 rows"
    writes: ClassVar[bool] = True

    def detect(self, path: Any) -> Evidence:
        found = (Path(path) / "flat.json").exists()
        return Evidence(found, "a folder with flat.json", "flat.json" if found else "none")

    def open(self, path: Any, options: Options) -> Contents:
        import pyarrow as pa

        path = Path(path)
        made = json.loads((path / "flat.json").read_text())
        counts = np.array(made["counts"], np.int64)
        n, layers = len(counts), made["layers"]
        starts = np.arange(n, dtype=np.uint64) * np.uint64(len(layers) * ROOM)
        rows = Rows.spans(
            [(path / "rows.f32", 0, n * len(layers) * ROOM, False)],
            [(0, starts, counts.astype(np.uint32), ROOM)],
            num_groups=len(layers),
            width=made["d_model"],
            dtype="F32",
            descr=np.dtype(np.float32),
            io=options.io,
        )
        columns = {**made["columns"], "count": made["counts"]}
        return Contents(
            format=self.name,
            path=path,
            metadata=made["metadata"],
            layers=tuple(layers),
            d_model=made["d_model"],
            dtype=np.dtype(np.float32),
            num_examples=n,
            token_counts=counts.copy,
            rows=rows,
            column_names=tuple(columns),
            columns=lambda names: pa.table({name: columns[name] for name in names}),
            files=lambda: [path / "rows.f32"],
        )

    def target(self) -> type[Target]:
        return FlatTarget

    def check(self, path: Any, report: Any, tell: Any) -> None:
        made = json.loads((Path(path) / "flat.json").read_text())
        report.count("listed", len(made["counts"]))

    def carrying(self) -> Carrying:
        return FlatCarrying()
