"""Peers that read the same files: numpy as commonly used, and the original libraries."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from benches import data


class NumpyMemmap:
    """saev shards with numpy, as in the protocol's text: one memmap and one fancy index per shard."""

    def __init__(self, folder: Path) -> None:
        self.eps = data.SAEV["examples"] // data.SAEV["shards"]
        shape = (self.eps, len(data.SAEV["layers"]), data.SAEV["content"] + 1, data.SAEV["d_model"])
        self.maps = [np.memmap(p, np.float32, "r", shape=shape) for p in sorted(folder.glob("acts*.bin"))]

    def gather(self, layer: int, examples: NDArray[Any], tokens: NDArray[Any], out: NDArray[Any] | None = None) -> Any:
        """Reads rows into `out`, or into a new array."""
        if out is None:
            out = np.empty((len(examples), self.maps[0].shape[-1]), np.float32)
        shard = examples // self.eps
        for s, mapped in enumerate(self.maps):
            mine = np.flatnonzero(shard == s)
            out[mine] = mapped[examples[mine] % self.eps, layer, tokens[mine]]
        return out


class SafetensorsRows:
    """lmprobe rows with safetensors' get_slice: one row per call, from files opened once."""

    def __init__(self, folder: Path, layer: int, shards: int) -> None:
        paths = [folder / f"tensors/hidden_layer{layer:03}_shard{s:03}.safetensors" for s in range(shards)]
        self.slices = [safe_open(p, "numpy").get_slice(f"hidden.layer_{layer}") for p in paths]

    def rows(self, shard: list[int], row: list[int]) -> Any:
        """Reads single rows and concatenates them."""
        return np.concatenate([self.slices[s][r : r + 1] for s, r in zip(shard, row, strict=True)])


def numpy_sequences(folder: Path, layer: int, shards: int, ids: NDArray[Any], rows: NDArray[Any]) -> Any:
    """All tokens in prompt order: reads each shard once, then gathers once."""
    from safetensors.numpy import load_file

    key = f"hidden.layer_{layer}"
    read = [load_file(folder / f"tensors/hidden_layer{layer:03}_shard{s:03}.safetensors")[key] for s in range(shards)]
    starts = np.cumsum([0, *(len(r) for r in read[:-1])])
    return np.concatenate(read)[starts[ids] + rows]


@contextlib.contextmanager
def lmprobe_on(folder: Path, cache: Path) -> Iterator[Any]:
    """Lets lmprobe read `folder` as if it were downloaded. Only the Hub's download function is replaced."""
    os.environ["LMPROBE_CACHE_DIR"] = str(cache)
    import huggingface_hub
    import lmprobe.cache
    import lmprobe.sharing

    lmprobe.cache.set_cache_backend(str(cache))

    before = huggingface_hub.hf_hub_download
    huggingface_hub.hf_hub_download = lambda repo_id, filename, **_: str(folder / filename)
    try:
        yield lmprobe.sharing
    finally:
        huggingface_hub.hf_hub_download = before
