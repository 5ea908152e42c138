"""Names of working folders and of the files in them."""

from __future__ import annotations

import re

FOLDER = ".actshard"
"""The working folder of a dataset."""
JOURNAL = "journal.jsonl"
PARTS = ".parts"
"""Folder of the parts of a dataset, until they are merged."""
PART = re.compile(r"part-(\d{5})-of-(\d{5})")
"""Name of a part's folder: its number, and how many there are."""
EMPTY = ".empty.json"
"""The only file of a part without examples."""
MERGING = "merging.json"
"""A merge's own file in the working folder."""
BUILDING = ".actshard-build"
"""The working folder of a token cache that is being built."""
