"""Writes HalluLens captures in its writer's order: rows, then a line of generation.jsonl, then one of meta.jsonl."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Sizes:
    """Sizes from config.json, and whether prompts are stored."""

    blocks: int
    width: int
    prompt: int
    response: int
    attended: int
    top: int
    prompts: bool


@dataclass(frozen=True)
class Sample:
    """A committed sample. `rows` is (layers, tokens, width): prompt rows, then response rows."""

    row: int
    prompt_len: int
    response_len: int
    rows: NDArray[np.float16]
    ids: dict[str, list[int]]
    attention: NDArray[np.float16]
    line: dict[str, Any]


class Capture:
    """A capture on disk, and its committed samples."""

    def __init__(self, path: Path, sizes: Sizes, allocated: int, seed: int) -> None:
        self.path, self.sizes = path, sizes
        self.allocated = allocated
        self.samples: list[Sample] = []
        self.torn = False
        self._rng = np.random.default_rng(seed)
        self._next = 0
        path.mkdir(parents=True)
        config: dict[str, Any] = {
            "model_name": "tiny",
            "num_layers": sizes.blocks,
            "hidden_dim": sizes.width,
            "r_max": sizes.attended,
            "dtype": "float16",
            "response_logprobs_top_k": sizes.top,
            "max_prompt_len": sizes.prompt,
            "max_response_len": sizes.response,
            "storage_format": "inference_capture_v1",
            "n_samples": allocated,
        }
        if not sizes.prompts:
            config["_skipped_arrays"] = ["prompt_activations.npy"]
        (path / "config.json").write_text(json.dumps(config, indent=2))
        (path / "meta.jsonl").touch()
        (path / "generation.jsonl").touch()
        for name, (shape, dtype) in self._arrays().items():
            (path / f"{name}.npy").write_bytes(np.zeros((allocated, *shape), dtype).tobytes())

    def _arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        s, layers = self.sizes, self.sizes.blocks + 1
        made: dict[str, tuple[tuple[int, ...], str]] = {
            "prompt_activations": ((layers, s.prompt, s.width), "<f2"),
            "response_activations": ((layers, s.response, s.width), "<f2"),
            "response_attention": ((s.blocks, s.attended, s.attended), "<f2"),
            "prompt_token_ids": ((s.prompt,), "<i4"),
            "response_token_ids": ((s.response,), "<i4"),
            "response_token_logprobs": ((s.response,), "<f4"),
            "response_topk_token_ids": ((s.response, s.top), "<i4"),
            "response_topk_logprobs": ((s.response, s.top), "<f4"),
            "prompt_len": ((), "<i4"),
            "response_len": ((), "<i4"),
        }
        if not s.prompts:
            del made["prompt_activations"]
        return made

    def append(self, prompt_len: int, response_len: int, *, skip: int = 0, commit: bool = True) -> None:
        """Writes a sample to the next row, or `skip` rows later. Without `commit`, the writer dies before the last line."""
        s, row = self.sizes, self._next + skip
        self._next = row + 1
        stored = min(prompt_len, s.prompt), min(response_len, s.response)
        values: dict[str, NDArray[Any]] = {}
        for name, (shape, dtype) in self._arrays().items():
            # Padding is random, so that reading it would be detected.
            made = self._rng.standard_normal(shape).astype(dtype) if "f" in dtype else self._rng.integers(0, 999, shape)
            values[name] = np.asarray(made, dtype)
        values["prompt_len"] = np.array(prompt_len, "<i4")
        values["response_len"] = np.array(response_len, "<i4")
        if row >= self.allocated:  # a resumed writer extends its arrays
            self.allocated = row + 1
        for name, value in values.items():
            with (self.path / f"{name}.npy").open("r+b") as file:
                file.truncate(self.allocated * value.nbytes)
                file.seek(row * value.nbytes)
                file.write(value.tobytes())
        key, hashed = f"q{row}", f"{row:064x}"
        self._line("generation.jsonl", {"prompt": f"p {row} é", "generation": f"g {row}", "prompt_hash": hashed})
        if not commit:
            return
        line = {
            "sample_index": row,
            "key": key,
            "prompt_hash": hashed,
            "prompt_len": prompt_len,
            "response_len": response_len,
            "hallucinated": bool(row % 2),
            "wrote_at": "2026-11-21T21:05:30+00:00",
        }
        self._line("meta.jsonl", line)
        parts = [values["prompt_activations"][:, : stored[0]]] if s.prompts else []
        r = min(response_len, s.attended)
        self.samples.append(
            Sample(
                row,
                prompt_len,
                response_len,
                np.concatenate([*parts, values["response_activations"][:, : stored[1]]], axis=1),
                {
                    "prompt_token_ids": values["prompt_token_ids"][: stored[0]].tolist(),
                    "response_token_ids": values["response_token_ids"][: stored[1]].tolist(),
                },
                values["response_attention"][:, :r, :r],
                line,
            )
        )

    def _line(self, name: str, line: dict[str, Any]) -> None:
        with (self.path / name).open("a") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def tear(self, name: str, at: int) -> None:
        """Appends an incomplete line."""
        with (self.path / name).open("a") as file:
            text = json.dumps({"sample_index": self._next, "key": "torn", "prompt_hash": "x", "prompt_len": 1})
            file.write(text[: 1 + at % (len(text) - 1)])
        self.torn = True

    def mend(self) -> None:
        """Removes incomplete lines, as required before resuming a capture."""
        for name in ("meta.jsonl", "generation.jsonl"):
            path = self.path / name
            text = path.read_bytes()
            path.write_bytes(text[: text.rfind(b"\n") + 1])
        self.torn = False
