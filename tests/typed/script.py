"""A user's script, which mypy checks strictly: what calls return, and which words they take. Never run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import actshard
from actshard import Batch, Layer, LayerArray, Store, Stream

store = actshard.open("run", format=None, io="auto")
assert_type(store, Store)
assert_type(store.layers, tuple[Layer, ...])
assert_type(store.d_model, int)
assert_type(store.path, Path)
assert_type(store.token_counts, NDArray[np.int64])

for layer in store.layers:
    rows = store.gather(layer, examples=[0, 1], tokens=-1)
    assert_type(rows, NDArray[Any])
    assert_type(store.sequence(example=0, layer=layer), NDArray[Any])
    assert_type(store.sequences(examples=[0, 1], layer=layer), list[NDArray[Any]])
    assert_type(store.layer(layer), LayerArray)
    assert_type(store.stats(layer).mean, NDArray[np.float64])
    assert_type(store.spectrum(layer, rows=4096).effective_rank, float)
assert_type(store.similarity(other=store).cka, NDArray[np.float64])
assert_type(store.separability("label", [4, 8]).accuracy, NDArray[np.float64])

named: Layer = "blocks.5.hook_resid_post"
assert_type(store.layer(named)[0, -1], NDArray[Any])
train, test = store.split(test=0.2, by="verb", seed=0)
assert_type(train, Store)
assert_type(store.filter(lambda table: table["label"]), Store)

stream = store.stream("all", 4096, shuffle="window", tokens="content", scale="unit-norm", memory="2GiB")
assert_type(stream, Stream)
store.stream([5, "ln_final"], 4096, keep=np.ones(3, bool), center=np.zeros(4))
for batch in stream:
    assert_type(batch, Batch)
    assert_type(batch.examples, NDArray[np.int64])
assert_type(stream.state_dict(), dict[str, Any])

with actshard.create("new", "zarr", layers=[4, 8], d_model=4096, dtype=np.float16, chunk_tokens=16) as writer:
    writer.append(np.zeros((1, 2, 3, 4096), np.float16), columns={"prompt": ["a"]})

done = actshard.convert(store, "converted", "saev", layers={5: 0}, tokens="content", overflow="allow", pad=True)
assert_type(done.path, Path)
actshard.convert("run", "converted", "zarr", layers=store.layers, examples=slice(0, 3))
assert_type(actshard.verify("run", deep=True).ok, bool)
assert_type(actshard.stage("s3://bucket/run", "local", layers=["a"]).path, Path)

# Refused: each line is an error, which --warn-unused-ignores would report if it were none.
store.gather(1.0, 0, 0)  # type: ignore[arg-type]
store.stream(5, 4096, shuffle="windows")  # type: ignore[arg-type]
store.stream(5, 4096, tokens="contents")  # type: ignore[arg-type]
store.stream(5, "4096")  # type: ignore[arg-type]
actshard.open("run", io="maped")  # type: ignore[arg-type]
actshard.convert("run", "new", "zarr", tokens="lasts")  # type: ignore[arg-type]
actshard.convert("run", "new", "zarr", overflow="ignore")  # type: ignore[arg-type]
actshard.create("new", "zarr", layers=[1], d_model=4, overflow="ignore")  # type: ignore[arg-type]
actshard.create("new", "zarr", layers=5, d_model=4)  # type: ignore[arg-type]
actshard.create("new", "zarr", layers=[1], d_model=4, chunk_token=16)  # type: ignore[call-arg]
actshard.convert("run", "new", "pickle", level="fast")  # type: ignore[arg-type]
