"""Pickle shards."""
