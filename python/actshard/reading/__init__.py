"""Datasets that exist: found, opened, joined, filtered, indexed as arrays, and checked."""
