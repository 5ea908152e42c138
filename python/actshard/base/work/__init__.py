"""Crash safety: locks, journals and atomic file writes.

Used by writers of datasets, merges and builds of token caches, and by all verbs to see what is unfinished (:func:`look`).

.. code-block:: text

    <dataset>/.actshard/lock                     the writer: process, host, start time
    <dataset>/.actshard/journal.jsonl            the request and settings; then one line per commit; then "finished"
    <dataset>/.actshard/examples-000003.arrow    examples added by commit 3: columns, tokens per layer
    <dataset>/.actshard/merging.json             a merge: its arguments and progress
    <dataset>/.actshard/plan-XXXXXXXX/           tasks of a plan that is not committed (actshard.plan.book)
    <dataset>/.actshard-record.json              a finished dataset: the request it was made by (actshard.base.request)
    <dataset>/.actshard-columns.arrow            columns that were added to a finished dataset (actshard.reading.extending)
    <dataset>/.parts/                            parts that are not merged yet
    .<dataset>.actshard-stage/plan-XXXXXXXX/     tasks of a plan that stages to this folder (actshard.plan.staging)
    <cache>/.actshard-build/                     an unfinished token cache (actshard.tokens.placing)
"""

from __future__ import annotations

from actshard.base.work.files import (
    BUILDING,
    COLUMNS,
    COLUMNS_LOCK,
    DUMPS_PLAN_FOLDER,
    EMPTY,
    FOLDER,
    JOURNAL,
    LOCK,
    MERGING,
    PART,
    PARTS,
    PLAN,
    PLAN_FOLDER,
    PUSHING,
    STAGED,
    as_json,
    existing_above,
    files_below,
    first_difference,
    is_below,
    keep_request,
    make_folder,
    names_like,
    names_of,
    record_files,
    recorded_files,
    refuse_other,
    refuse_within,
    remove,
    remove_empty_folders,
    remove_files,
    rename,
    staging_folder,
    sync_folders,
    sync_tree,
    whole_file,
    write_bytes,
    write_bytes_at_once,
    write_json,
    write_json_at_once,
)
from actshard.base.work.journal import Commit, Journal, Lock, locked, read_table, write_table
from actshard.base.work.marks import MESSAGES, Mark, Marks, look, tidy

__all__ = [
    "BUILDING",
    "COLUMNS",
    "COLUMNS_LOCK",
    "DUMPS_PLAN_FOLDER",
    "EMPTY",
    "FOLDER",
    "JOURNAL",
    "LOCK",
    "MERGING",
    "MESSAGES",
    "PART",
    "PARTS",
    "PLAN",
    "PLAN_FOLDER",
    "PUSHING",
    "STAGED",
    "Commit",
    "Journal",
    "Lock",
    "Mark",
    "Marks",
    "as_json",
    "existing_above",
    "files_below",
    "first_difference",
    "is_below",
    "keep_request",
    "locked",
    "look",
    "make_folder",
    "names_like",
    "names_of",
    "read_table",
    "record_files",
    "recorded_files",
    "refuse_other",
    "refuse_within",
    "remove",
    "remove_empty_folders",
    "remove_files",
    "rename",
    "staging_folder",
    "sync_folders",
    "sync_tree",
    "tidy",
    "whole_file",
    "write_bytes",
    "write_bytes_at_once",
    "write_json",
    "write_json_at_once",
    "write_table",
]
