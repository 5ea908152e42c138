"""Plots of datasets and token caches: each function returns matplotlib axes, or with ``table=True`` the data as an Arrow table.

>>> ax = actshard.plot.norms(store)
>>> ax.figure.savefig("norms.png")
>>> actshard.plot.norms(store, table=True)

A path or URL may be given instead of an open store or token cache. ``ax=`` draws into axes of yours. Needs
``pip install 'actshard[report]'``, except for tables.
"""

from __future__ import annotations

from actshard.plot.activations import dimensions, frequency, gamma, lengths, packing, ranges, shuffle
from actshard.plot.norms import histogram, norms, positions
from actshard.plot.sampled import pca, separability, similarity, spectrum
from actshard.plot.style import save, style

__all__ = [
    "dimensions",
    "frequency",
    "gamma",
    "histogram",
    "lengths",
    "norms",
    "packing",
    "pca",
    "positions",
    "ranges",
    "save",
    "separability",
    "shuffle",
    "similarity",
    "spectrum",
    "style",
]
