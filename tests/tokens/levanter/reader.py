"""Opens caches with Levanter and stores the examples; run by Levanter's Python.

Argument: a JSON file that lists caches, formats and lengths. Results are written to an ``.npz`` file next to each cache.
"""

import asyncio
import json
import logging
import sys
from pathlib import Path

import haliax as hax
import jax
import numpy as np
from levanter.data.text import (
    ChatLmDatasetFormat,
    DatasetComponent,
    PrebuiltLmDatasetFormat,
    SupervisedLmDatasetFormat,
    TextLmDatasetFormat,
)
from levanter.data.text.cache import load_lm_dataset_cache
from levanter.data.text.datasets import dataset_for_component
from levanter.tokenizers import load_tokenizer

FORMATS = {
    "text": TextLmDatasetFormat,
    "chat": ChatLmDatasetFormat,
    "prebuilt": PrebuiltLmDatasetFormat,
    "supervised": SupervisedLmDatasetFormat,
}


class Said(logging.Handler):
    """Collects Levanter's log messages about caches."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> None:
    said = Said()
    logging.getLogger("levanter").addHandler(said)
    for job in json.loads(Path(sys.argv[1]).read_text()):
        options = dict(job["format"])
        format = FORMATS[options.pop("type")](**options)
        tokenizer = load_tokenizer(job["tokenizer"])
        said.lines.clear()
        cache = load_lm_dataset_cache(job["cache"], format, tokenizer)
        made = {"num_rows": len(cache), "warnings": json.dumps(said.lines)}
        rows = cache.get_batch_sync(list(range(len(cache))))
        for name in rows[0]:
            flat = [np.asarray(row[name]) for row in rows]
            made[f"rows_{name}"] = np.concatenate(flat)
            made[f"rows_{name}_lengths"] = [len(row) for row in flat]
        for pack in job["packs"]:
            component = DatasetComponent(format=format, pack=pack)
            dataset = dataset_for_component(
                component,
                hax.Axis("position", job["length"]),
                cache,
                eos_id=tokenizer.eos_token_id,
                block_cross_document_attention=True,
            )
            n = asyncio.run(dataset.async_len())
            examples = asyncio.run(dataset.get_batch(list(range(n))))
            made[f"pack{pack}_tokens"] = np.stack([np.asarray(e.tokens) for e in examples])
            made[f"pack{pack}_loss_weight"] = np.stack([np.asarray(e.loss_weight) for e in examples])
            ids = [e.attn_mask.segment_ids for e in examples]
            if ids[0] is not None:
                made[f"pack{pack}_segment_ids"] = np.stack([np.asarray(s[0]) for s in ids])
        np.savez(job["out"], **made)
    print("read", jax.__version__)


main()
