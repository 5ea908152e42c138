"""Properties of layers from a fixed sample of rows: spectrum, similarity, and how well they separate labels.

The statistics of ``stats`` are sums, which one pass over all rows makes. Those here need all pairs of columns or of rows: they are
made from a sample that depends only on the number of rows and on a seed.

``rows``: the sample. ``spectrum``, ``similarity``, ``separability``: one result each. ``verbs``: the methods of a store. Only numpy
is used.
"""
