"""The reading API over examples in memory, in plain numpy and Python: what a store should return.

Nothing here is fast, and nothing imports the package. A dataset is a list of examples, an example a dict of arrays by layer. Each
verb is a loop over these. ``tests/torture/test_oracle_machine.py`` compares them with the package.
"""
