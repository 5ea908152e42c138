"""Benchmarks: actshard and peers in one run. Outputs are compared before timing."""
