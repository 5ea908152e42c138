"""Benchmarks: peers and actshard as engines in one run, outputs compared before anything is timed."""
