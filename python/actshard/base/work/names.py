"""Names of working folders and of the files in them."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = ".actshard"
"""The working folder of a dataset."""
JOURNAL, LOCK = "journal.jsonl", "lock"
PARTS = ".parts"
"""Folder of a dataset's unmerged parts."""
PART = re.compile(r"part-(\d{5})-of-(\d{5})")
"""Name of a part's folder: its number and the number of parts."""
EMPTY = ".empty.json"
"""The only file of a part without examples."""
MERGING = "merging.json"
"""File in the working folder that describes an unfinished merge."""
PLAN_FOLDER, DUMPS_PLAN_FOLDER = "plan-", "dumps-plan-"
"""Prefixes of working folders of plans, in the working folder of a dataset, or of a folder of datasets."""
PLAN = "plan.json"
"""The file that marks a folder as the working folder of a plan. It is removed first after the plan was committed."""
PUSHING = ".actshard-pushing.json"
"""Marker object in the folder of a remote dataset that is being written, or whose writer was killed."""
BUILDING = ".actshard-build"
"""The working folder of an unfinished token cache."""
STAGED = ".actshard-staged.json"
"""File in a staged copy that records its source."""
COLUMNS = ".actshard-columns.arrow"
"""File in a finished dataset with columns that were added later (:mod:`actshard.reading.extending`)."""
COLUMNS_LOCK = ".actshard-columns.lock"
"""Working folder while columns are added."""


def staging_folder(target: Path) -> Path:
    """The working folder of a staged copy, next to it."""
    return target.with_name(f".{target.name}.actshard-stage")
