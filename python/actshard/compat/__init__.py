"""Drop-in replacements for existing loaders: change an import, keep the code.

- :mod:`actshard.compat.saev`: ``saev.data``'s indexed, ordered and shuffled loaders
- :mod:`actshard.compat.lmprobe`: ``load_activations``, ``load_activation_dataset``, ``ActivationStore``
- :mod:`actshard.compat.pickle_shards`: the published text's functions for pickle shards, without unpickling
- :mod:`actshard.compat.deepspec`: DeepSpec's dataset of target caches, over any store with token ids
- :mod:`actshard.compat.levanter`: Levanter's datasets over token caches, without JAX or TensorStore
- :mod:`actshard.compat.specforge`: SpecForge's dataset, and a feature store for its trainer, over any store with token ids
- :mod:`actshard.compat.speculators`: speculators' dataset, and a backend for its trainer, over any store with token ids
- :mod:`actshard.compat.vllm`: a dataset of the request files of vLLM's connector, also while they are written
- :mod:`actshard.compat.zarr`: a read-only group, and the published text's training dataset

Each module documents its differences from the original. Those that return tensors require torch.
"""
