"""Draws the byte diagrams of docs/formats: a file as a strip, and below it one piece of the strip, enlarged.

python docs/pictures/bytes.py

tests/test_docs.py fails while a picture differs from this table. Sizes are not to scale.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "bytes"
STYLE = """<style>
:root { --paper: #fff; --ink: #1f2328; --dim: #59636e; --line: #8c959f; --meta: #eaeef2; --data: #ddf4ff; --row: #ffd8a8 }
@media (prefers-color-scheme: dark) {
:root { --paper: #0d1117; --ink: #f0f6fc; --dim: #9198a1; --line: #656c76; --meta: #262c36; --data: #12304f; --row: #7d4e14 } }
svg { background: var(--paper) } text { font: 13px system-ui, sans-serif; fill: var(--ink) }
.head { font: 600 13px ui-monospace, monospace } .dim { fill: var(--dim); font-size: 11px }
rect { stroke: var(--line) } .meta { fill: var(--meta) } .data { fill: var(--data) } .row { fill: var(--row) }
.zoom { stroke: var(--line); stroke-dasharray: 3 3; fill: none }
</style>"""
WIDTH, LEFT, STEP = 760, 20, 92


class Piece(NamedTuple):
    """A stretch of bytes: what it is, its share of the strip, its kind, and where it begins."""

    name: str
    share: float = 1
    kind: str = "data"
    at: str = ""


class Strip(NamedTuple):
    """A file, or a piece of the strip above; ``zoom`` is the number of the piece that the next strip enlarges."""

    title: str
    pieces: tuple[Piece, ...]
    zoom: int | None = None


def row(name: str, share: float = 1, at: str = "") -> Piece:
    """Rows of activations."""
    return Piece(name, share, "row", at)


def meta(name: str, share: float = 1, at: str = "") -> Piece:
    """Bytes that describe others."""
    return Piece(name, share, "meta", at)


MORE = Piece("...", 0.4)
SAFETENSORS = (meta("n: u64", 0.6, "0"), meta("header: JSON, padded with spaces", 2.4, "8"))

DIAGRAMS: dict[str, tuple[str, tuple[Strip, ...]]] = {
    "saev": (
        "A saev shard: examples contain layers, layers contain tokens; each token is a row of float32",
        (
            Strip(
                "acts000000.bin", (Piece("example 0", 2, at="0"), Piece("example 1", 2), Piece("example 2", 2), MORE), 0
            ),
            Strip("example 0", (Piece("layer 0", 2), Piece("layer 1", 2), MORE), 0),
            Strip("layer 0", (row("token 0 (CLS, if there is one)", 2), row("token 1"), row("token 2"), MORE), 0),
            Strip("token 0: a row", (row("d_model x float32, native byte order", 4),)),
        ),
    ),
    "lmprobe": (
        "An lmprobe tensor file: a safetensors header and the rows of one layer",
        (
            Strip(
                "tensors/hidden_layer007_shard002.safetensors",
                (*SAFETENSORS, Piece("hidden.layer_7: (rows, dim)", 3, at="8 + n")),
                2,
            ),
            Strip("hidden.layer_7", (row("row 0"), row("row 1"), row("row 2"), row("row 3"), MORE), 1),
            Strip("row 1", (row("dim x float16, bfloat16, float32 or float64; see the header", 4),)),
        ),
    ),
    "zarr": (
        "An uncompressed chunk of a Zarr store: samples contain layers, layers contain tokens",
        (
            Strip(
                "arrays/activations/a.b.c.d", (Piece("sample a*c0", 2, at="0"), Piece("sample a*c0 + 1", 2), MORE), 0
            ),
            Strip("sample", (Piece("layer b*c1", 2), Piece("layer b*c1 + 1", 2), MORE), 0),
            Strip("layer", (row("token c*c2"), row("token c*c2 + 1"), MORE), 0),
            Strip("token", (row("c3 elements; the whole row if c3 = H", 4),)),
        ),
    ),
    "pickle": (
        "A compressed pickle shard: gzip around a pickle that contains the bytes of arrays",
        (
            Strip(
                "shard_0001.pkl.gz",
                (meta("gzip header", 0.8, "0"), Piece("deflate: inflated as a whole", 4), meta("CRC-32, size", 0.9)),
                1,
            ),
            Strip(
                "pickle",
                (
                    meta("opcodes: dict, list, dict", 2),
                    Piece("array of sample 0", 1.6),
                    meta("opcodes", 0.7),
                    Piece("array of sample 1", 1.6),
                    MORE,
                ),
                1,
            ),
            Strip("array of sample 0", (row("token 0"), row("token 1"), row("token 2"), MORE)),
        ),
    ),
    "levanter": (
        "A file of a Levanter token cache: blosc frames and an index of 512 entries",
        (
            Strip(
                "input_ids/data/c/0",
                (
                    Piece("frame", 1.2),
                    Piece("frame", 1.2),
                    MORE,
                    meta("index: 512 x (offset u64, length u64)", 3),
                    meta("crc32c", 0.8),
                ),
                0,
            ),
            Strip(
                "frame: 262,144 numbers",
                (
                    meta("02 01 flags typesize", 1.8, "0"),
                    meta("nbytes", 0.7, "4"),
                    meta("blocksize", 0.9, "8"),
                    meta("cbytes", 0.7, "12"),
                    Piece("stored numbers, or offsets and LZ4 blocks", 3.2, at="16"),
                ),
            ),
        ),
    ),
    "deepspec": (
        "A DeepSpec cache: records of 56 bytes that point into shards",
        (
            Strip(
                "samples.idx, one record",
                (
                    meta("sample_id", 1, "0"),
                    meta("shard", 0.7, "8"),
                    meta("seq_len", 0.8, "12"),
                    meta("input_ids", 1, "16"),
                    meta("attention", 1, "24"),
                    meta("loss_mask", 1, "32"),
                    meta("hidden", 1, "40"),
                    meta("last", 0.8, "48"),
                ),
            ),
            Strip(
                "shard-00000.bin, one example",
                (
                    meta("input_ids (S,) i32", 1.5),
                    meta("attention (S,) u8", 1.5),
                    meta("loss_mask (S,) u8", 1.5),
                    Piece("hidden states (C, L, H)", 2),
                    row("last states (C, H)", 1.6),
                ),
                3,
            ),
            Strip(
                "hidden states, bfloat16",
                (row("token 0, layer 0", 1.3), row("token 0, layer 1", 1.3), MORE, row("token 1, layer 0", 1.3), MORE),
            ),
        ),
    ),
    "hallulens": (
        "A HalluLens array without a header: samples contain layers, layers contain tokens",
        (
            Strip(
                "response_activations.npy (no header)", (Piece("sample 0", 2, at="0"), Piece("sample 1", 2), MORE), 0
            ),
            Strip("sample 0", (Piece("layer 0: embeddings", 2), Piece("layer 1", 2), MORE, Piece("layer L", 1.5)), 1),
            Strip("layer 1", (row("token 0"), row("token 1"), MORE, row("token S - 1")), 0),
            Strip("token 0: a row", (row("H x float16, little-endian", 4),)),
        ),
    ),
    "hf_arrow": (
        "An Arrow file: a schema, then record batches whose bodies end with the rows",
        (
            Strip(
                "data-00000-of-00003.arrow",
                (
                    meta("ff ff ff ff, u32 n, schema", 2.2, "0"),
                    Piece("record batch", 2),
                    Piece("record batch", 2),
                    MORE,
                    meta("end"),
                ),
                1,
            ),
            Strip(
                "record batch",
                (
                    meta("ff ff ff ff, u32 n, lengths", 2),
                    meta("validity", 0.8),
                    meta("offsets", 0.8),
                    Piece("values of a column", 3),
                ),
                3,
            ),
            Strip("values", (row("vector 0: d floats", 1.4), row("vector 1", 1.4), row("vector 2", 1.4), MORE)),
        ),
    ),
    "jkminder": (
        "A shard of an activation cache: rows without a header",
        (
            Strip(
                "layer_13_out/shard_0.memmap",
                (row("row 0", at="0"), row("row 1", at="d_model * itemsize"), row("row 2"), MORE),
                0,
            ),
            Strip("row 0", (row("d_model elements; the dtype is in shard_0.meta", 4),)),
        ),
    ),
    "llamascopium": (
        "A chunk: a safetensors file of tokens, masks and activations",
        (
            Strip(
                "chunk-00000000.safetensors",
                (
                    *SAFETENSORS,
                    Piece("tokens (B, T)", 1.2, at="8 + n"),
                    Piece("masks (B, T)", 1.2),
                    Piece("activation (B, T, d_model)", 2.4),
                ),
                4,
            ),
            Strip("activation", (row("b 0, t 0"), row("b 0, t 1"), MORE, row("b 1, t 0"), MORE)),
        ),
    ),
    "speculators": (
        "A file of hidden states: token ids and, for each token, its layers in order",
        (
            Strip(
                "hidden_states/hs_7.safetensors",
                (*SAFETENSORS, Piece("hidden_states (S, L + 1, H)", 2.4, at="8 + n"), meta("token_ids (S,) i64", 1.4)),
                2,
            ),
            Strip("hidden_states", (Piece("token 0", 2), Piece("token 1", 2), MORE), 0),
            Strip("token 0", (row("layer 0"), row("layer 1"), MORE, row("last"))),
        ),
    ),
    "torch": (
        "A file of torch.save: a zip archive whose records are stored uncompressed",
        (
            Strip(
                "sample_0.pt",
                (
                    meta("data.pkl: values and offsets", 2.4),
                    meta("byteorder"),
                    Piece("data/0", 1.6, at="a multiple of 64"),
                    Piece("data/1", 1.6),
                    meta("zip directory", 1.4),
                ),
                2,
            ),
            Strip(
                "data/0: a storage",
                (Piece("before the tensor's offset", 1.6, "meta"), row("row 0"), row("row 1"), MORE),
            ),
        ),
    ),
    "plain": (
        "Plain folders: rows after an npy header, or after a safetensors header",
        (
            Strip(
                "activations/5.npy",
                (
                    meta('93 "NUMPY" 01 00', 1.4, "0"),
                    meta("u16 118", 0.8, "8"),
                    meta("{'descr': '<f4', ...} spaces", 2.2, "10"),
                    row("row 0", at="128"),
                    row("row 1"),
                    MORE,
                ),
            ),
            Strip(
                "activations/5.safetensors",
                (*SAFETENSORS, row("row 0", at="8 + n, a multiple of 64"), row("row 1"), MORE),
            ),
        ),
    ),
    "parquet_vectors": (
        "A parquet file: row groups contain columns, which are decoded as a whole",
        (
            Strip(
                "train-00000-of-00002.parquet",
                (
                    meta("PAR1", 0.6, "0"),
                    Piece("row group 0", 2),
                    Piece("row group 1", 2),
                    MORE,
                    meta("footer: schema, offsets", 2),
                    meta("u32, PAR1", 0.9),
                ),
                1,
            ),
            Strip(
                "row group 0",
                (Piece("column v: pages of vectors, compressed", 3), meta("column text: pages", 1.6), MORE),
                0,
            ),
            Strip("column v, decoded", (row("example 0"), row("example 1"), row("example 2"), MORE)),
        ),
    ),
    "automodel": (
        "A shard of a NeMo Automodel cache: every tensor is stacked over samples; layers of a token are contiguous",
        (
            Strip(
                "shard-000000.safetensors",
                (
                    *SAFETENSORS,
                    Piece("ids and masks (n, S)", 1.6, at="8 + n"),
                    Piece("hidden states (n, S, L x H)", 2.2),
                    Piece("others", 0.8),
                ),
                3,
            ),
            Strip("hidden states", (Piece("sample 0", 2), Piece("sample 1", 2), MORE), 0),
            Strip("sample 0", (Piece("token 0", 2), Piece("token 1", 2), MORE), 0),
            Strip("token 0", (row("layer 0"), row("layer 1"), MORE, row("layer L - 1"))),
        ),
    ),
    "specforge": (
        "A SpecForge file: a zip archive of torch.save; in hidden states the layers of a token are contiguous",
        (
            Strip(
                "rows_0-2000/data_0.ckpt",
                (
                    meta("data.pkl: names and offsets", 2.2),
                    Piece("input_ids", 1),
                    Piece("loss_mask", 1),
                    Piece("L layers (1, S, L x H)", 2),
                    row("last (1, S, H)", 1.4),
                    meta("zip directory", 1.2),
                ),
                3,
            ),
            Strip("L layers", (Piece("token 0", 2), Piece("token 1", 2), MORE), 0),
            Strip("token 0", (row("layer 0"), row("layer 1"), MORE, row("layer L - 1"))),
        ),
    ),
    "modelopt": (
        "Two files of Model-Optimizer: two storages, or one storage that two tensors share",
        (
            Strip(
                "compute_hidden_states_hf.py: storage of aux_hidden_states",
                (row("token 0, layer 0"), MORE, row("token 0, layer L - 1"), row("token 1, layer 0"), MORE),
            ),
            Strip("and of hidden_states", (row("token 0, last"), row("token 1, last"), row("token 2, last"), MORE)),
            Strip(
                "compute_hidden_states_vllm.py: one storage",
                (
                    row("token 0, layer 0"),
                    MORE,
                    row("token 0, layer L - 1"),
                    row("token 0, last"),
                    row("token 1, layer 0"),
                    MORE,
                ),
            ),
        ),
    ),
    "angelslim": (
        "An AngelSlim file: a zip archive of torch.save; in hidden states the layers of a token are contiguous",
        (
            Strip(
                "rank_0/rows_0-5000/data_0.ckpt (EAGLE-3)",
                (
                    meta("data.pkl: names and offsets", 2),
                    Piece("ids, mask (1, S)", 1.4),
                    Piece("hidden_states (1, S, 3 x H)", 2.2),
                    row("target_hiddens (1, S, H)", 2),
                ),
                2,
            ),
            Strip(
                "hidden_states",
                (
                    row("token 0, layer 0"),
                    row("token 0, layer 1"),
                    row("token 0, layer 2"),
                    row("token 1, layer 0"),
                    MORE,
                ),
            ),
        ),
    ),
    "eagle": (
        "An EAGLE file: a zip archive of torch.save with a row per token",
        (
            Strip(
                "0/data_0.ckpt",
                (
                    meta("data.pkl: names and offsets", 2),
                    Piece("input_ids (S,)", 1.3),
                    Piece("hidden_state (S, H)", 2),
                    Piece("loss_mask (S,)", 1.3),
                    meta("zip directory", 1.2),
                ),
                2,
            ),
            Strip("hidden_state", (row("token 0"), row("token 1"), row("token 2"), MORE)),
        ),
    ),
}


def drawn(name: str) -> str:
    """The picture of a format."""
    title, strips = DIAGRAMS[name]
    parts = []
    for k, strip in enumerate(strips):
        y = 14 + STEP * k
        parts.append(f'<text class="head" x="{LEFT}" y="{y + 10}">{escaped(strip.title)}</text>')
        scale, x = WIDTH / sum(piece.share for piece in strip.pieces), float(LEFT)
        for i, piece in enumerate(strip.pieces):
            wide = piece.share * scale
            parts.append(f'<rect class="{piece.kind}" x="{x:.1f}" y="{y + 18}" width="{wide:.1f}" height="32"/>')
            parts.append(f'<text x="{x + wide / 2:.1f}" y="{y + 39}" text-anchor="middle">{escaped(piece.name)}</text>')
            if piece.at:
                parts.append(f'<text class="dim" x="{x + 1:.1f}" y="{y + 63}">{escaped(piece.at)}</text>')
            if strip.zoom == i:
                below = y + STEP + 18
                parts.append(
                    f'<path class="zoom" d="M{x:.1f} {y + 50}L{LEFT} {below}M{x + wide:.1f} {y + 50}L{LEFT + WIDTH} {below}"/>'
                )
            x += wide
    height = 14 + STEP * (len(strips) - 1) + 72
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 2 * LEFT} {height}" role="img">'
    return "\n".join([head, f"<title>{escaped(title)}</title>", STYLE, *parts, "</svg>"]) + "\n"


def escaped(text: str) -> str:
    """Text in XML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def main() -> None:
    """Writes the pictures."""
    FOLDER.mkdir(exist_ok=True)
    for name in DIAGRAMS:
        (FOLDER / f"{name}.svg").write_text(drawn(name), encoding="utf-8")


if __name__ == "__main__":
    main()
