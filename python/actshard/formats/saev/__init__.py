"""saev activation shards."""
