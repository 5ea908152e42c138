"""lmprobe extractions."""
