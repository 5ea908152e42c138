"""``actshard.capture`` with the same forward passes and nothing stored, and with the loop that people write.

The model is a GPT-2 with random weights and a head, so that no weights are needed. Rows are compared before anything is timed. The
loop: dataset order, batches of 32, padded to the longest, ``output_hidden_states=True``, a file per batch.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import actshard
from actshard.writing.capturing.backend import PaddedBatch
from actshard.writing.capturing.choosing import choice_of
from actshard.writing.capturing.encoding import Encodings
from actshard.writing.capturing.windows import BATCHES_OF_A_WINDOW, Limits, batches, windows
from benches.measure import Engine, Row, compared, interleave
from benches.sizes import size, turns

EXAMPLES = size(200, 6)
WIDTH, BLOCKS, VOCABULARY = size(256, 16), size(4, 2), size(8_000, 50)
LAYERS = [0, BLOCKS // 2, BLOCKS]
LOOP_BATCH, BATCH_TOKENS = 32, 4096
MEDIAN_TOKENS, SPREAD = 60, 0.8


def _inputs() -> list[list[int]]:
    """Token ids of examples with log-normal lengths."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(MEDIAN_TOKENS), SPREAD, EXAMPLES), 2, 1000).astype(int)
    return [rng.integers(0, VOCABULARY, n).tolist() for n in lengths]


def _model() -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    heads = size(8, 2)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=BLOCKS,
        n_head=heads,
        n_positions=1024,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config).eval()


def _forward(model: Any, inputs: list[list[int]]) -> None:
    """The forward passes of a capture's batches, without hooks, and nothing stored."""
    import torch

    encodings = Encodings(None, "input_ids", (), True, None, False)
    limits = Limits(BATCH_TOKENS * BATCHES_OF_A_WINDOW, 1 << 60)
    rows = [{"input_ids": ids} for ids in inputs]
    for window in windows(rows, encodings, choice_of("all"), limits):
        for indices in batches(window, BATCH_TOKENS, pads=True):
            some = [window[i] for i in indices]
            batch = PaddedBatch.of([c.example for c in some], [c.positions for c in some], 0, mean=False)
            with torch.inference_mode():
                model.transformer(
                    torch.from_numpy(batch.ids), attention_mask=torch.from_numpy(batch.mask).long(), use_cache=False
                )


def _loop(model: Any, inputs: list[list[int]], folder: Path) -> None:
    """What people write first."""
    import torch

    folder.mkdir()
    for first in range(0, len(inputs), LOOP_BATCH):
        some = inputs[first : first + LOOP_BATCH]
        width = max(map(len, some))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in some])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in some])
        with torch.no_grad():
            hidden = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
        states = {layer: hidden[layer].cpu() for layer in LAYERS}
        torch.save({"states": states, "mask": mask, "ids": ids}, folder / f"batch_{first:06}.pt")


def _compare(store: actshard.Store, folder: Path, inputs: list[list[int]]) -> None:
    import torch

    for number, file in enumerate(sorted(folder.iterdir())):
        states = torch.load(file)["states"]
        for row in range(len(states[0])):
            example = number * LOOP_BATCH + row
            for layer in LAYERS[:-1]:  # the last of the loop is behind the final norm
                ours = store.sequence(example, layer)
                np.testing.assert_allclose(ours, states[layer][row, : len(inputs[example])].numpy(), rtol=0, atol=1e-4)


def capture(repeats: int) -> Iterator[Row]:
    """200 texts of log-normal lengths, three layers, every token, float32, on the CPU."""
    model, inputs = _model(), _inputs()
    tokens = sum(map(len, inputs))
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        count = 0

        def fresh() -> tuple[Path]:
            nonlocal count
            count += 1
            shutil.rmtree(root / f"d{count - 1}", ignore_errors=True)
            return (root / f"d{count}",)

        def ours(path: Path) -> None:
            actshard.capture(model, inputs, path, layers=LAYERS, batch_tokens=BATCH_TOKENS)

        def nothing_stored(path: Path) -> None:
            actshard.capture(model, inputs, path, layers=LAYERS, batch_tokens=BATCH_TOKENS, tokens="last")

        actshard.capture(model, inputs, root / "checked", layers=LAYERS, batch_tokens=BATCH_TOKENS)
        _loop(model, inputs, root / "loop")
        _compare(actshard.open(root / "checked"), root / "loop", inputs)
        engines = [
            Engine("the same forward passes, nothing stored", lambda: _forward(model, inputs)),
            Engine("usual loop", lambda path: _loop(model, inputs, path), fresh),
            Engine("capture", ours, fresh),
            Engine("capture, last tokens", nothing_stored, fresh),
        ]
        times = interleave(engines, turns(min(repeats, 5)))
    note = f"{tokens} tokens, {BLOCKS} blocks, d_model {WIDTH}, CPU"
    yield compared(
        "capture: three layers, every token", "CPU", "the same forward passes, nothing stored", times, "capture", 1 / 1.05,
        note=note, unit=("s", 1),
    )  # fmt: skip
    yield compared(
        "capture: three layers, every token", "CPU", "usual loop", times, "capture", 3, note=note, unit=("s", 1)
    )
    yield compared(
        "capture: three layers, last tokens", "CPU", "the same forward passes, nothing stored", times,
        "capture, last tokens", 1 / 1.05, note=note, unit=("s", 1),
    )  # fmt: skip
