"""What is at work in a folder, and what is safe on the disk: locks, journals, files that are whole or not there.

The lowest room that writes. Writers of datasets, merges and builds of token caches use it, and so does finding, which says what is
finished.

.. code-block:: text

    <dataset>/.actshard/lock                     who writes: process, host, since when
    <dataset>/.actshard/journal.jsonl            what was asked for; then a line per commit; then "finished"
    <dataset>/.actshard/examples-000003.arrow    what commit 3 added about examples: columns, tokens per layer
    <dataset>/.actshard/merging.json             a merge: what was asked for, and where it is
    <dataset>/.parts/                            parts that are not merged yet
    <cache>/.actshard-build/                     a token cache that is being built (actshard.tokens.placing)
"""

from __future__ import annotations

from actshard.work.files import (
    make_folder,
    remove,
    remove_made,
    rename,
    sync_folders,
    sync_tree,
    whole_file,
    write_bytes,
    write_json,
)
from actshard.work.finished import count_parts, is_building, is_merging, tidy, unfinished
from actshard.work.journal import Journal
from actshard.work.lock import Lock, locked
from actshard.work.names import BUILDING, EMPTY, FOLDER, JOURNAL, MERGING, PART, PARTS

__all__ = [
    "BUILDING",
    "EMPTY",
    "FOLDER",
    "JOURNAL",
    "MERGING",
    "PART",
    "PARTS",
    "Journal",
    "Lock",
    "count_parts",
    "is_building",
    "is_merging",
    "locked",
    "make_folder",
    "remove",
    "remove_made",
    "rename",
    "sync_folders",
    "sync_tree",
    "tidy",
    "unfinished",
    "whole_file",
    "write_bytes",
    "write_json",
]
