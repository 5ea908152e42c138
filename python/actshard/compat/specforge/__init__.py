"""SpecForge's offline data over any store with token ids: its dataset, and a feature store for its trainer.

>>> from actshard.compat.specforge import build_offline_eagle3_dataset       # was: from specforge.data.preprocessing import ...

Samples, keys, shapes and dtypes are those of sgl-project/SpecForge a6b6b02 (specforge 0.2.0): of ``OfflineEagle3Dataset``, and of
``LocalFeatureStore`` with the references of ``OfflineManifestReader``. Samples of a SpecForge folder are sorted by path as text
(``data_10`` before ``data_2``), as in SpecForge, so that its samplers yield the same order for the same seed. Other stores, and
filtered ones, keep their own order.

:class:`StoreFeatures` is a feature store for ``specforge.launch.build_disagg_offline_runtime(feature_store=, refs=)``, and
for ``FeatureDataLoader``. Differences from SpecForge:

- nothing is unpickled (SpecForge loads with ``weights_only=False``, which may execute code in a file);
- a damaged file raises an error with its name. ``OfflineEagle3Dataset`` of SpecForge prints it and returns sample 0 instead;
- if ``data_0.ckpt`` and ``data_0.ckpt.gz`` exist, the first is read; SpecForge treats them as two samples;
- the dataset reads only the first ``max_len`` tokens of an example.

The dataset requires torch, :class:`StoreFeatures` requires specforge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actshard.compat.specforge.datasets import OfflineEagle3Dataset, build_offline_eagle3_dataset

if TYPE_CHECKING:
    from actshard.compat.specforge.features import StoreFeatures

__all__ = ["OfflineEagle3Dataset", "StoreFeatures", "build_offline_eagle3_dataset"]


def __getattr__(name: str) -> object:
    # Only the feature store needs specforge.
    if name == "StoreFeatures":
        from actshard.compat.specforge.features import StoreFeatures

        return StoreFeatures
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
