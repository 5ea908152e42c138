"""The loaders people already have, on top of actshard: change an import, keep the code.

- :mod:`actshard.compat.saev`: ``saev.data``'s indexed, ordered and shuffled loaders
- :mod:`actshard.compat.lmprobe`: ``load_activations``, ``load_activation_dataset``, ``ActivationStore``
- :mod:`actshard.compat.pickle_shards`: the published text's functions for pickle shards, without unpickling anything
- :mod:`actshard.compat.levanter`: Levanter's datasets over token caches, without JAX or TensorStore reading anything
- :mod:`actshard.compat.zarr`: a read-only group, and the published text's training dataset

Each says what it does better than the original, and what it does otherwise. Those that give tensors need torch.
"""
