"""Compares actshard's datasets with Levanter's in Levanter's process: same examples, same types, through the same wrappers.

Argument: the folder of golden caches.
"""

import asyncio
import sys
from pathlib import Path

import haliax as hax
import jax
import numpy as np
from levanter.data.text import datasets as theirs
from levanter.data.text.examples import GrugLmExample
from levanter.store.cache import TreeCache

from actshard.compat import levanter as ours

IDS = {"input_ids": np.zeros(0, np.int32)}
CHAT = {**IDS, "assistant_masks": np.zeros(0, np.int32)}
POSITION = hax.Axis("position", 128)


def read(dataset):
    async def batch():
        n = await dataset.async_len()
        return await dataset.get_batch([*range(n), 0])  # the first again at the end, where Levanter is correct

    return asyncio.run(batch())


def main() -> None:
    golden = Path(sys.argv[1])
    text, chat = (str(golden / name / "cache" / "train") for name in ("text_gpt2style_single", "chat_llama3style"))
    pairs = []
    for module, cache in ((theirs, TreeCache), (ours, ours.TreeCache)):
        held, talk = cache.load(text, IDS), cache.load(chat, CHAT)
        made = [
            module.CausalLmDataset(module.TokenSeqDataset(held, 128), POSITION, eos_id=0),
            module.PackedTokenDataset(held, POSITION, max_segments_per_example=3),
            module.ChatDataset(talk, POSITION, max_segments_per_example=4),
        ]
        pairs.append([read(dataset) for dataset in made] + [read(theirs.NamedLmDataset(made[0], POSITION))])
    for left, right in zip(*pairs, strict=True):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert type(a) is type(b)
            assert jax.tree.structure(a) == jax.tree.structure(b)
            assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    assert isinstance(pairs[1][0][0], GrugLmExample)
    print("same", sum(map(len, pairs[1])))


main()
