"""Guarantee: rows, windows, packs, masks and streams of token caches equal those of a naive encoder, whatever the corpus was.

Corpora grow, are compressed in pieces, damaged and repaired; tokenizers pad, truncate, add tokens and lack special ones; a cache
stays open while another one replaces it. `test_tokens_machine.py` covers kills and files of others.
"""

from __future__ import annotations

import bz2
import functools
import gzip
import io
import json
import lzma
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from tests.torture.budget import CountedMachine, machine_settings

import actshard
from actshard import tokens
from actshard.plan import tokenizing
from actshard.plan.data import Predicted
from actshard.tokens import building

pytestmark = pytest.mark.machine

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
WORDS = ["fox", "Brown fox", "the", "<eos>", "<|x|>", "é", "🙂", "\n", "  ", "12", "\u2028"]
Record = dict[str, Any]
Rows = list[dict[str, list[int]]]

texts = st.lists(st.sampled_from(WORDS), max_size=9).map(" ".join)
chats = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), texts), max_size=3).map(
    lambda turns: [{"role": role, "content": text} for role, text in [*turns, ("assistant", "yes")]]
)
COMPRESSED: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: bytes(pa.compress(data, codec="zstd", asbytes=True)),
}
KINDS = [".jsonl", ".jsonl", ".json", ".parquet", *(f".jsonl{suffix}" for suffix in COMPRESSED)]


@dataclass(frozen=True)
class Settings:
    """A tokenizer: special tokens that it has, and state of the library's object that a file may contain."""

    bos: bool
    eos: bool
    added: bool
    lower: bool
    pads: bool
    longest: int | None


tokenizers_drawn = st.builds(
    Settings, st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.sampled_from([None, 3, 8])
)


@functools.cache
def backend_of(settings: Settings) -> Any:
    """The library's tokenizer, without padding."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if settings.lower:
        made.normalizer = normalizers.Lowercase()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<pad>", "<bos>", "<eos>"]
    made.train_from_iterator(
        ["the brown fox 12 fox the"] * 9,
        trainers.BpeTrainer(vocab_size=290, special_tokens=specials, initial_alphabet=alphabet, show_progress=False),
    )
    if settings.added:
        made.add_tokens([AddedToken("<|x|>"), AddedToken("Brown fox", normalized=False)])
    if settings.longest is not None:
        made.enable_truncation(settings.longest)
    return made


def save_tokenizer(settings: Settings, folder: Path) -> None:
    """The files of a tokenizer. The padding of the file must not change rows."""
    from tokenizers import Tokenizer

    folder.mkdir(exist_ok=True)
    made = Tokenizer.from_str(backend_of(settings).to_str())
    if settings.pads:
        made.enable_padding(pad_id=0, pad_token="<pad>", length=random.choice([None, 20]))
    made.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<bos>"} if settings.bos else {}
    names |= {"eos_token": "<eos>"} if settings.eos else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def naive_row(record: Record, settings: Settings) -> dict[str, list[int]]:
    """A row, encoded text by text."""

    def ids_of(text: str) -> list[int]:
        return list(backend_of(settings).encode(text, add_special_tokens=False).ids)

    if "text" in record:
        head = [1] if settings.bos else []
        return {"input_ids": head + ids_of(record["text"] + (" <eos>" if settings.eos else ""))}
    pieces: list[tuple[str, int]] = []
    for message in record["messages"]:
        is_reply = int(message["role"] == "assistant")
        if pieces and not is_reply and not pieces[-1][1]:
            pieces[-1] = (pieces[-1][0] + message["content"], 0)
        else:
            pieces.append((message["content"], is_reply))
    ids = [(i, mask) for text, mask in pieces for i in ids_of(text)]
    return {"input_ids": [i for i, _ in ids], "assistant_masks": [mask for _, mask in ids]}


@dataclass
class SourceState:
    """A source file.

    Attributes:
        kind: its ending.
        pieces: its records, by piece: members, streams, frames or row groups, which were appended one after another.
        broken: whether its bytes are damaged.
        ends: the positions at which a cut of the file leaves whole pieces.
    """

    kind: str
    pieces: list[list[Record]] = field(default_factory=list)
    broken: bool = False
    ends: list[int] = field(default_factory=list)

    @property
    def records(self) -> list[Record]:
        return [record for piece in self.pieces for record in piece]

    def write(self, path: Path) -> None:
        """Writes the file, all pieces."""
        self.broken, self.ends = False, [0]
        lines = ["".join(json.dumps(record, ensure_ascii=False) + "\n" for record in piece) for piece in self.pieces]
        suffix = Path(self.kind).suffix
        if suffix in COMPRESSED:
            parts = [COMPRESSED[suffix](text.encode()) for text in lines]
            self.ends = np.cumsum([0, *map(len, parts)]).tolist()
            path.write_bytes(b"".join(parts))
        elif self.kind == ".json":
            path.write_text(json.dumps(self.records, ensure_ascii=False), encoding="utf-8")
        elif self.kind == ".parquet":
            table = pa.Table.from_pylist(self.records)
            buffer = io.BytesIO()
            pq.write_table(table, buffer, row_group_size=max(len(self.pieces[0]), 1) if self.pieces else 1)
            path.write_bytes(buffer.getvalue())
        else:
            path.write_text("\ufeff" * (len(self.records) % 2) + "".join(lines), encoding="utf-8")


class Corpora(CountedMachine):
    """Sources, a tokenizer, and a cache that was built from them."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="actshard-corpus-"))
        self.sources: list[SourceState] = []
        self.built: Rows | None = None
        """Rows of the cache that is in place."""
        self.open: list[tuple[tokens.TokenCache, Rows]] = []
        """Caches that were opened, and their rows."""
        self.originals = building._WORTH_PROCESSES, tokenizing._predict
        building._WORTH_PROCESSES = 100  # files of some hundred bytes are divided
        tokenizing._predict = lambda *_: Predicted(0, 0, 0, 0)  # starts a process

    def teardown(self) -> None:
        building._WORTH_PROCESSES, tokenizing._predict = self.originals
        self.open.clear()
        shutil.rmtree(self.root, ignore_errors=True)

    @initialize(settings=tokenizers_drawn, is_chat=st.booleans())
    def begin(self, settings: Settings, is_chat: bool) -> None:
        self.is_chat = is_chat
        self.use(settings)

    def use(self, settings: Settings) -> None:
        self.settings = settings
        save_tokenizer(settings, self.root / "tok")

    def place(self, i: int) -> Path:
        return self.root / f"s{i}{self.sources[i].kind}"

    def draw_records(self, data: st.DataObject) -> list[Record]:
        if self.is_chat:
            return [{"messages": chat} for chat in data.draw(st.lists(chats, min_size=1, max_size=5))]
        return [{"text": text} for text in data.draw(st.lists(texts, min_size=1, max_size=8))]

    # -- sources -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.sources) < 4)
    @rule(data=st.data(), kind=st.sampled_from(KINDS))
    def add_a_source(self, data: st.DataObject, kind: str) -> None:
        pieces = [self.draw_records(data) for _ in range(data.draw(st.integers(1, 3)))]
        self.sources.append(SourceState(kind, pieces))
        self.sources[-1].write(self.place(len(self.sources) - 1))

    @precondition(lambda self: self.sources)
    @rule(data=st.data(), pick=st.integers(0, 3))
    def grow(self, data: st.DataObject, pick: int) -> None:
        """Appends a piece: to a compressed file another member, stream or frame."""
        i = pick % len(self.sources)
        self.sources[i].pieces.append(self.draw_records(data))
        self.sources[i].write(self.place(i))

    @precondition(lambda self: self.sources)
    @rule(
        pick=st.integers(0, 3),
        part=st.floats(0, 1, exclude_max=True),
        bit=st.integers(0, 7),
        byte=st.none() | st.integers(0, 3),
    )
    def flip_a_bit(self, pick: int, part: float, bit: int, byte: int | None) -> None:
        """In a file whose compression has checksums: anywhere, or in the first bytes of a piece."""
        i = pick % len(self.sources)
        data = bytearray(self.place(i).read_bytes())
        if Path(self.sources[i].kind).suffix not in (".gz", ".bz2", ".xz") or not data:
            return
        ends = self.sources[i].ends
        place = int(part * len(data)) if byte is None else ends[int(part * (len(ends) - 1))] + byte
        data[min(place, len(data) - 1)] ^= 1 << bit
        self.place(i).write_bytes(data)
        self.sources[i].broken = True

    @precondition(lambda self: self.sources)
    @rule(pick=st.integers(0, 3), part=st.floats(0, 1, exclude_max=True), at_piece=st.booleans())
    def cut(self, pick: int, part: float, at_piece: bool) -> None:
        """Between two pieces a cut leaves a shorter file, which nothing tells apart from a whole one; but not one of no bytes."""
        i = pick % len(self.sources)
        source = self.sources[i]
        if Path(source.kind).suffix not in COMPRESSED or source.broken:
            return
        data = self.place(i).read_bytes()
        end = source.ends[int(part * (len(source.ends) - 1))] if at_piece else int(part * len(data))
        self.place(i).write_bytes(data[:end])
        if end in source.ends[1:]:
            source.pieces = source.pieces[: source.ends.index(end)]
            source.ends = source.ends[: source.ends.index(end) + 1]
        else:
            source.broken = True

    @precondition(lambda self: self.sources)
    @rule(pick=st.integers(0, 3), kind=st.sampled_from(KINDS))
    def write_again(self, pick: int, kind: str) -> None:
        i = pick % len(self.sources)
        self.place(i).unlink()
        self.sources[i].kind = kind
        if kind == ".parquet" and not self.sources[i].records:
            self.sources[i].kind = ".jsonl"
        self.sources[i].write(self.place(i))

    @rule(settings=tokenizers_drawn)
    def replace_the_tokenizer(self, settings: Settings) -> None:
        self.use(settings)

    # -- builds --------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.sources)
    @rule(
        layout=st.sampled_from(["consolidated", "sharded"]),
        storage=st.sampled_from(["plain", "lz4"]),
        dtype=st.sampled_from([None, "int32", "uint16"]),
        keep_shards=st.booleans(),
        jobs=st.sampled_from([1, 1, 1, 1, 1, 2]),
    )
    def build(self, **options: Any) -> None:
        cache = self.unless_broken(lambda *call: tokens.build_cache(*call, overwrite=True, **options), self.root / "c")
        if cache is None:
            if self.built is not None:
                self.check_rows(tokens.open_cache(self.root / "c"), self.built)
            return
        # A flipped bit may be in a header that changes nothing; then the rows are those of before.
        self.built = self.expected()
        self.check_rows(cache, self.built)
        assert actshard.verify(self.root / "c", deep=True).ok

    @precondition(lambda self: self.sources)
    @rule(
        layout=st.sampled_from(["consolidated", "sharded"]),
        storage=st.sampled_from(["plain", "lz4"]),
        tasks=st.integers(1, 6),
        seed=st.integers(0, 5),
    )
    def build_in_tasks(self, layout: str, storage: str, tasks: int, seed: int) -> None:
        """Tasks read ranges of files, in any order."""

        def run(*call: Any) -> tokens.TokenCache:
            plan = actshard.plan.tokenize(*call, tasks=tasks, layout=layout, storage=storage)
            for task in random.Random(seed).sample(range(len(plan)), len(plan)):
                plan.run(task)
            made: tokens.TokenCache = plan.commit()
            return made

        cache = self.unless_broken(run, self.root / "planned")
        if cache is not None:
            self.check_rows(cache, self.expected())
        shutil.rmtree(self.root / "planned", ignore_errors=True)

    def expected(self) -> Rows:
        return [naive_row(record, self.settings) for source in self.sources for record in source.records]

    def unless_broken(self, run: Callable[..., tokens.TokenCache], out: Path) -> tokens.TokenCache | None:
        """Builds a cache. None: a source is damaged, and an error."""
        form: Any = tokens.ChatFormat(chat_template=TEMPLATE) if self.is_chat else tokens.TextFormat()
        paths = [self.place(i) for i in range(len(self.sources))]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", actshard.ActshardWarning)  # of special tokens and truncation
                return run(paths, out, self.root / "tok", form)
        except actshard.FormatError as error:
            note(f"{error}")
            assert any(source.broken for source in self.sources)
            return None

    @precondition(lambda self: self.built is not None)
    @rule(io=st.sampled_from(["mmap", "pread"]))
    def open_it(self, io: str) -> None:
        assert self.built is not None
        self.open = [*self.open[-1:], (tokens.open_cache(self.root / "c", io=io), self.built)]

    @precondition(lambda self: self.open)
    @rule(pick=st.integers(0, 1))
    def read_an_open_cache(self, pick: int) -> None:
        """After a replacement it gives its rows, or errors."""
        cache, rows = self.open[pick % len(self.open)]
        for i, row in enumerate(rows):
            try:
                stored = cache[i]
            except (actshard.FormatError, actshard.MissingFileError):
                assert self.built is not rows, "the cache was not replaced"
                continue
            assert {name: values.tolist() for name, values in stored.items()} == row

    def check_rows(self, cache: tokens.TokenCache, rows: Rows) -> None:
        assert len(cache) == len(rows)
        assert [{name: values.tolist() for name, values in row.items()} for row in cache] == rows

    # -- examples ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.built)
    @rule(length=st.integers(1, 12), world=st.integers(1, 3), batch=st.integers(1, 4), seed=st.integers(0, 3))
    def read_windows(self, length: int, world: int, batch: int, seed: int) -> None:
        assert self.built is not None
        flat = [i for row in self.built for i in row["input_ids"]]
        expected = [flat[at : at + length] for at in range(0, len(flat) - length + 1, length)]
        windows = tokens.TokenSeqDataset(tokens.open_cache(self.root / "c"), length)
        assert len(windows) == len(expected)
        if not expected:
            return
        assert np.asarray(windows.get_batch(range(len(expected)))).tolist() == expected
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", actshard.ActshardWarning)  # of tokenizers without eos
            causal = tokens.CausalLmDataset(windows, eos_id=2)
        mixture = tokens.Mixture({"a": causal}, {"a": 1.0}, block_size=4, key=seed, stop_strategy="first_exhausted")
        streams = [mixture.stream(batch, rank=rank, world_size=world, drop_last=True) for rank in range(world)]
        read = [part.tolist() for stream in streams for made in stream for part in made.tokens]
        assert len(read) == len(mixture) // (batch * world) * batch * world
        for window in read:
            expected.remove(window)  # each at most once

    @precondition(lambda self: self.built)
    @rule(length=st.integers(1, 30), pack=st.sampled_from([True, False, 2]))
    def read_packs(self, length: int, pack: bool | int) -> None:
        assert self.built is not None
        cache = tokens.open_cache(self.root / "c")
        kind: Any = tokens.ChatDataset if self.is_chat else tokens.PackedTokenDataset
        dataset = kind(cache, length, pack=pack)
        batch = dataset.get_batch(range(len(dataset))) if len(dataset) else None
        packs = packed(self.built, length, {True: 64, False: 1}.get(pack, int(pack)))
        assert len(dataset) == len(packs)
        if batch is None:
            return
        for number, rows in enumerate(packs):
            ids = [i for row in rows for i in row["input_ids"][:length]]
            assert batch.tokens[number].tolist() == ids + [0] * (length - len(ids))
            if self.is_chat:
                masks = [mask for row in rows for mask in row["assistant_masks"][:length]]
                # A position is trained if the next token is the assistant's and of the same conversation or the next one's reply.
                weights = [*masks[1:], 0][: len(masks)] + [0] * (length - len(ids))
                assert batch.loss_weight[number].tolist() == weights


def packed(rows: Rows, length: int, most: int) -> list[Rows]:
    """Rows by example. A row that does not fit uncut begins the next example, as one after the most rows of an example does."""
    made: list[Rows] = []
    room = -1
    for row in rows:
        size = len(row["input_ids"])
        if not made or size > room or len(made[-1]) == most:
            made.append([])
            room = length
        made[-1].append(row)
        room -= size
    return made


TestCorpora = Corpora.TestCase
TestCorpora.settings = machine_settings(12, 5_000, steps=25)
