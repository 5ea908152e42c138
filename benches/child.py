"""One gather of 16,384 random rows in a fresh process, with a cold page cache or with hot pages that are not mapped yet.

python -m benches.child ours|numpy cold|first-touch SEED mmap|pread
"""

from __future__ import annotations

import hashlib
import json
import sys
import time

import numpy as np

import actshard
from benches import data, measure
from benches.peers import NumpyMemmap
from benches.sizes import size

ROWS = size(16_384, 512)


def main() -> None:
    """Prints the time in seconds and a digest of the output."""
    engine, state, seed, mode = sys.argv[1:5]
    folder = data.saev()
    rng = np.random.default_rng(int(seed))
    examples = rng.integers(0, data.SAEV["examples"], ROWS)
    tokens = rng.integers(0, data.SAEV["content"] + 1, ROWS)
    how = "hot page cache, nothing mapped yet"
    if state == "cold":
        try:
            how = measure.drop_page_cache(sorted(folder.glob("acts*.bin")))
        except measure.NotPermitted as why:
            print(why, file=sys.stderr)
            raise SystemExit(3) from None
    out = np.zeros((ROWS, data.SAEV["d_model"]), np.float32)
    out.fill(1)
    if engine == "ours":
        store = actshard.open(folder, io=mode)
        began = time.perf_counter()
        store.gather(data.SAEV["layers"][1], examples, tokens, out=out)
    else:
        peer = NumpyMemmap(folder)
        began = time.perf_counter()
        peer.gather(1, examples, tokens, out)
    took = time.perf_counter() - began
    print(json.dumps({"seconds": took, "digest": hashlib.sha256(out).hexdigest(), "how": how}))


if __name__ == "__main__":
    main()
