"""Randomized tests that search for unknown bugs: small budgets in `make test`, large ones in `make torture`."""
