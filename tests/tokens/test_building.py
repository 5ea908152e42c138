"""Guarantee: caches built here equal Levanter's, row for row and in the ledger; errors in records name file and line."""

from __future__ import annotations

import bz2
import glob
import gzip
import json
import lzma
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.tokens.conftest import BUILDS, GOLDEN, GPT2, LLAMA, expected, write_lines

import actshard
from actshard import tokens
from actshard.tokens.sources import matching
from waiting import wait_until

WAYS = [
    (layout, storage, jobs) for layout in ("consolidated", "sharded") for storage in ("plain", "lz4") for jobs in (1, 2)
]


def same_rows(ours: tokens.TokenCache, theirs: tokens.TokenCache) -> None:
    assert ours.fields == theirs.fields
    for name in ours.fields:
        assert ours.dtype(name) == theirs.dtype(name)
        assert np.array_equal(ours.view(name).offsets, theirs.view(name).offsets)
        assert np.array_equal(ours.view(name).elements(), theirs.view(name).elements())


def digests(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


@pytest.mark.filterwarnings("ignore:.*has no eos token")  # one of Levanter's tokenizers has no eos token
@pytest.mark.parametrize(("layout", "storage", "jobs"), WAYS)
@pytest.mark.parametrize("variant", BUILDS)
def test_built_caches_are_levanters(variant, layout, storage, jobs, in_golden, tmp_path) -> None:
    files, tokenizer, form = BUILDS[variant]
    sources = [f"{variant}/{file}" for file in files]
    ours = tokens.build_cache(sources, tmp_path / "c", tokenizer, form, layout=layout, storage=storage, jobs=jobs)
    theirs = tokens.open_cache(GOLDEN / variant / "cache")
    same_rows(ours, theirs)
    made, wanted = ours.ledger.as_dict(), theirs.ledger.as_dict()
    own = made.pop("actshard")
    assert own["layout"] == layout
    if layout == "sharded":
        if variant != "text_llama3style_multishard":
            return
        wanted = tokens.open_cache(GOLDEN / "text_llama3style_sharded" / "cache").ledger.as_dict()
    assert list(made) == list(wanted)
    assert made == wanted
    assert actshard.verify(tmp_path / "c", deep=True).findings == []


@pytest.mark.filterwarnings("ignore:.*has no eos token")
def test_lz4_caches_are_levanters_bytes(in_golden, tmp_path) -> None:
    """Also bytes: frames, index and zarr.json."""
    for variant, (files, tokenizer, form) in BUILDS.items():
        sources = [f"{variant}/{file}" for file in files]
        cache = tokens.build_cache(sources, tmp_path / variant, tokenizer, form, storage="lz4")
        for name in cache.fields:
            theirs = digests(GOLDEN / variant / "cache" / "train" / name)
            ours = digests(tmp_path / variant / name)
            assert ours.keys() == theirs.keys()
            for file, data in theirs.items():
                if file.endswith("zarr.json"):
                    assert json.loads(ours[file]) == json.loads(data)
                elif len(files) == 1:
                    assert ours[file] == data, file


def test_options_of_the_golden_rows(in_golden, tmp_path) -> None:
    body = tokens.TextFormat("body")
    cache = tokens.build_cache("text_llama3style_multishard/part*", tmp_path / "a", LLAMA, body, enforce_eos=False)
    found = expected("text_llama3style_multishard", "expected_enforce_eos_false.npz")
    assert np.array_equal(cache.view("input_ids").elements(), found["rows_input_ids"])
    cache = tokens.build_cache(
        "chat_llama3style/train.jsonl", tmp_path / "b", LLAMA, tokens.ChatFormat(system_prompt="system")
    )
    found = expected("chat_llama3style")
    assert np.array_equal(cache.view("input_ids").elements(), found["system_rows_input_ids"])
    assert np.array_equal(cache.view("assistant_masks").elements(), found["system_rows_assistant_masks"])


@pytest.mark.parametrize("dtype", ["int32", "uint32", "uint16"])
def test_ids_may_be_stored_narrower(dtype, in_golden, tmp_path) -> None:
    cache = tokens.build_cache("text_gpt2style_single/train.jsonl", tmp_path / "c", GPT2, dtype=dtype)
    assert cache.dtype("input_ids") == np.dtype(dtype)
    assert np.array_equal(cache.view("input_ids").elements(), expected("text_gpt2style_single")["rows_input_ids"])
    windows = tokens.TokenSeqDataset(cache, 64)
    wide = tokens.TokenSeqDataset(tokens.open_cache(GOLDEN / "text_gpt2style_single" / "cache"), 64)
    assert np.array_equal(windows.get_batch(range(len(windows))), wide.get_batch(range(len(wide))))


RECORDS = [{"text": f"document {i}, with ünïcode and\nlines", "more": i} for i in range(30)]


def _parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(RECORDS), path, row_group_size=7)


WRITERS: dict[str, Any] = {
    "a.jsonl": lambda p, t: p.write_text(t),
    "a.jsonl.gz": lambda p, t: p.write_bytes(gzip.compress(t.encode())),
    "a.jsonl.bz2": lambda p, t: p.write_bytes(bz2.compress(t.encode())),
    "a.jsonl.xz": lambda p, t: p.write_bytes(lzma.compress(t.encode())),
    "a.jsonl.zst": lambda p, t: p.write_bytes(pa.Codec("zstd").compress(t.encode(), asbytes=True)),
    "a.jsonl.zstd": lambda p, t: p.write_bytes(pa.Codec("zstd").compress(t.encode(), asbytes=True)),
    "array.json": lambda p, t: p.write_text(json.dumps(RECORDS)),
    "lines.json": lambda p, t: p.write_text(t),
    "array.json.gz": lambda p, t: p.write_bytes(gzip.compress(json.dumps(RECORDS).encode())),
    "a.parquet": lambda p, t: _parquet(p),
    "no_end.jsonl": lambda p, t: p.write_text(t.rstrip("\n")),
    "crlf.jsonl": lambda p, t: p.write_bytes(t.replace("\n", "\r\n").encode()),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    plain = write_lines(tmp_path / "plain.jsonl", RECORDS)
    path = tmp_path / name
    WRITERS[name](path, plain.read_text())
    tokenizer = str(GOLDEN / LLAMA)
    ours = tokens.build_cache(path, tmp_path / "out", tokenizer)
    same_rows(ours, tokens.build_cache(plain, tmp_path / "reference", tokenizer))


@pytest.mark.slow
def test_tokenizers_of_every_kind(in_golden, tmp_path) -> None:
    from tokenizers import Tokenizer

    wanted = expected("text_llama3style_multishard")["rows_input_ids"]
    bare = Tokenizer.from_file(f"{LLAMA}/tokenizer.json")

    class Fast:
        """Has the attributes of a fast tokenizer of transformers."""

        backend_tokenizer = bare
        name_or_path = "somewhere/llama"
        bos_token = "<|begin_of_text|>"
        eos_token = "<|end_of_text|>"
        chat_template = None

    kinds = [
        LLAMA,
        Path(LLAMA),
        f"{LLAMA}/tokenizer.json",
        Fast(),
        tokens.load_tokenizer(bare, bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>"),
    ]
    for i, kind in enumerate(kinds):
        cache = tokens.build_cache(
            "text_llama3style_multishard/part*", tmp_path / str(i), kind, tokens.TextFormat("body"), jobs=1 + i % 2
        )
        assert np.array_equal(cache.view("input_ids").elements(), wanted)
    made = tokens.load_tokenizer(LLAMA)
    assert made.decode([0, 1]) == "<|begin_of_text|><|end_of_text|>"
    assert tokens.Tokenizer.from_dict(made.as_dict()).digest() == made.digest()


def test_passthrough_reads_integers(tmp_path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"text": "1 2  3"}, {"text": ""}, {"text": "70000"}])
    tokenizer = tokens.load_tokenizer("passthrough", vocab_size=100_000)
    cache = tokens.build_cache(tmp_path / "a.jsonl", tmp_path / "c", tokenizer)
    assert [row["input_ids"].tolist() for row in cache] == [[1, 2, 3], [], [70000]]


def test_special_tokens_that_are_there_already(tmp_path) -> None:
    """As in the published text: added only where missing."""
    tokenizer = tokens.load_tokenizer(str(GOLDEN / LLAMA))
    write_lines(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "<|begin_of_text|>a<|end_of_text|>"}])
    form = tokens.TextFormat(special_tokens="if_missing")
    made = [
        row["input_ids"].tolist() for row in tokens.build_cache(tmp_path / "a.jsonl", tmp_path / "c", tokenizer, form)
    ]
    always = [row["input_ids"].tolist() for row in tokens.build_cache(tmp_path / "a.jsonl", tmp_path / "d", tokenizer)]
    assert made[0] == always[0]
    assert made[1].count(tokenizer.bos_id) == made[1].count(tokenizer.eos_id) == 1
    assert always[1].count(tokenizer.bos_id) == always[1].count(tokenizer.eos_id) == 2


def test_whole_texts_are_encoded_as_hugging_face_does(tmp_path, in_golden) -> None:
    """Pieces split at special tokens encode to the same ids; those split within a word do not (levanter.md 2.3.6)."""
    pieces = tokens.build_cache("chat_llama3style/train.jsonl", tmp_path / "a", LLAMA, tokens.ChatFormat())
    whole = tokens.build_cache(
        "chat_llama3style/train.jsonl", tmp_path / "b", LLAMA, tokens.ChatFormat(encoding="whole")
    )
    same_rows(whole, pieces)
    template = "{% for m in messages %}wor{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    write_lines(tmp_path / "x.jsonl", [{"messages": [{"role": "assistant", "content": "d"}]}])
    forms = [tokens.ChatFormat(chat_template=template, encoding=e) for e in ("pieces", "whole")]
    made = [tokens.build_cache(tmp_path / "x.jsonl", tmp_path / f.encoding, LLAMA, f)[0] for f in forms]
    assert made[0]["input_ids"].tolist() != made[1]["input_ids"].tolist()
    assert made[1]["assistant_masks"][-1] == 1


CHAT_ERRORS = [c for c in json.loads((GOLDEN / "chat_llama3style" / "errors.json").read_text()) if "rows" in c]
CHAT_SAID = {
    "no assistant message": r"line 2: no token of this conversation is marked as the assistant's",
    "template without generation, mask_user_turns true": r"must mark the assistant's text",
    "template without generation, mask_user_turns false": r"line 1: no token .* require_assistant=False",
    "tokenizer has no template and none given": r"has no chat template",
    "missing messages field": r"line 1: expected the key 'messages', found 'conversations'",
    "empty conversation": r"line 1: no token",
    "kwargs not a mapping": r"line 1: field 'chat_template_kwargs': expected an object",
    "kwargs forbid tokenize": r"may not set 'tokenize'",
    "kwargs forbid return_dict": r"may not set 'return_dict'",
    "system mapping without content": r"line 1: field 'system': expected 'content'",
    "message without content": r"line 1: the chat template uses an undefined value: a message has no attribute 'content'",
    "template syntax error": r"chat template: line 1:",
    "template undefined variable": r"'nope' is undefined",
    "empty generation block only": r"line 1: no token",
}


@pytest.mark.parametrize("case", CHAT_ERRORS, ids=lambda c: c["case"])
def test_chats_that_levanter_refuses_are_refused_better(case: dict[str, Any], tmp_path: Path) -> None:
    path = write_lines(tmp_path / "chat.jsonl", case["rows"])
    tokenizer = str(GOLDEN / case["tokenizer"])
    if case["error"] is None:
        assert len(tokens.build_cache(path, tmp_path / "c", tokenizer, {"type": "chat", **case["format"]})) == len(
            case["rows"]
        )
        return
    with pytest.raises((actshard.FormatError, actshard.ArgumentError), match=CHAT_SAID[case["case"]]) as caught:
        tokens.build_cache(path, tmp_path / "c", tokenizer, {"type": "chat", **case["format"]})
    if "line" in CHAT_SAID[case["case"]][:5]:
        assert caught.value.path == path
    assert not (tmp_path / "c" / "shard_ledger.json").exists()


PREBUILT_ERRORS = json.loads((GOLDEN / "prebuilt_weights" / "errors.json").read_text())
PREBUILT_SAID = {
    "missing input ids": r"line 1: expected the key 'input_ids', found 'x'",
    "missing weights": r"line 1: expected the key 'loss_weights', found 'input_ids'",
    "float ids": r"line 1: field 'input_ids': expected integers, found float64",
    "weights length differs (no check)": r"line 1: field 'loss_weights': expected 3 weights",
    "id too big for int32": r"line 1: field 'input_ids': expected ids from 0 to 2147483647, found 2147483648",
    "nested ids": r"line 1: field 'input_ids': expected a 1-D list, found one with 2 axes",
    "null ids": r"line 1: field 'input_ids': expected a list of numbers, found null",
}


@pytest.mark.parametrize("case", PREBUILT_ERRORS, ids=lambda c: c["case"])
def test_prebuilt_rows_are_checked(case: dict[str, Any], tmp_path: Path) -> None:
    """Rejects what Levanter rejects, and what it accepts but silently changes."""
    path = write_lines(tmp_path / "rows.jsonl", case["rows"])
    form = tokens.PrebuiltFormat(loss_weights_key="loss_weights")
    said = PREBUILT_SAID.get(case["case"])
    if said is None:
        assert case["case"] == "empty ids"
        assert len(tokens.build_cache(path, tmp_path / "c", None, form)[0]["input_ids"]) == 0
        return
    with pytest.raises(actshard.FormatError, match=said):
        tokens.build_cache(path, tmp_path / "c", None, form)


def test_templates_without_marks_learn_everything_where_asked(tmp_path) -> None:
    """As Levanter's documentation describes mask_user_turns: false (levanter.md 5.3, 6)."""
    write_lines(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "a"}]}])
    form = tokens.ChatFormat(mask_user_turns=False, require_assistant=False)
    cache = tokens.build_cache(
        tmp_path / "a.jsonl", tmp_path / "c", str(GOLDEN / "tokenizers/bpe_llama3style_nogen"), form
    )
    batch = tokens.ChatDataset(cache, 16, mask_user_turns=False).get_batch([0])
    n = len(cache[0]["input_ids"])
    assert batch.loss_weight[0].tolist() == [1.0] * (n - 1) + [0.0] * (17 - n)


BAD_LINES = [
    ("not json", r"line 2: expected a JSON object: Expecting value"),
    ("", r"line 2: expected a JSON object, found a blank line"),
    ("[1]", r"line 2: expected an object"),
    ('{"text": 3}', r"line 2: field 'text': expected a string, found 3"),
    ('{"other": "x"}', r"line 2: expected the key 'text', found 'other'"),
    ('{"\\ud800": "x"}', r"line 2: expected the key 'text', found '\\ud800'"),
    ('{"text": "a', r"line 2: expected a JSON object: Unterminated string"),
    ("\udc80", r"line 2: expected UTF-8 text"),
    ('{"text": "ab\\ud800"}', r"line 2: field 'text': .*found the lone surrogate \\ud800 at character 2"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("line", "said"), BAD_LINES)
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_broken_line_is_named_or_skipped_and_counted(line: str, said: str, jobs: int, tmp_path: Path) -> None:
    good = write_lines(tmp_path / "0.jsonl", RECORDS)
    text = f'{{"text": "one"}}\n{line}\n{{"text": "three"}}\n'
    (tmp_path / "1.jsonl").write_bytes(text.encode("utf-8", "surrogateescape"))
    sources, tokenizer = [good, tmp_path / "1.jsonl"], str(GOLDEN / GPT2)
    with pytest.raises(actshard.FormatError, match=said) as caught:
        tokens.build_cache(sources, tmp_path / "c", tokenizer, jobs=jobs)
    assert caught.value.path == tmp_path / "1.jsonl"
    assert str(caught.value).encode()
    assert not (tmp_path / "c" / "shard_ledger.json").exists()
    with pytest.warns(actshard.ActshardWarning, match="1 record was skipped"):
        cache = tokens.build_cache(sources, tmp_path / "c", tokenizer, on_error="skip", jobs=jobs)
    assert len(cache) == len(RECORDS) + 2
    assert cache.ledger.extra["actshard"]["skipped"] == {"00001_1_jsonl": 1}


@pytest.mark.parametrize("encoding", ["pieces", "whole"])
def test_a_conversation_with_half_of_a_surrogate_pair_is_a_bad_record(encoding: Any, tmp_path: Path) -> None:
    """JSON can contain it, but no tokenizer can encode it."""
    talk = [[{"role": "user", "content": text}, {"role": "assistant", "content": "x"}] for text in ("hi", "hi \udfff")]
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in talk))
    chat = tokens.ChatFormat(encoding=encoding)
    with pytest.raises(actshard.FormatError, match=r"line 2: .*lone surrogate \\udfff") as caught:
        tokens.build_cache(source, tmp_path / "c", str(GOLDEN / LLAMA), chat)
    assert caught.value.path == source
    with pytest.warns(actshard.ActshardWarning, match="1 record was skipped"):
        assert len(tokens.build_cache(source, tmp_path / "c", str(GOLDEN / LLAMA), chat, on_error="skip")) == 1


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.bz2", "a.jsonl.xz", "a.jsonl.zst", "a.parquet", "array.json"])
def test_files_that_end_in_the_middle_are_refused(name: str, tmp_path: Path) -> None:
    plain = write_lines(tmp_path / "plain.jsonl", RECORDS * 40)
    path = tmp_path / name
    WRITERS[name](path, plain.read_text())
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    with pytest.raises(actshard.FormatError) as caught:
        tokens.build_cache(path, tmp_path / "c", str(GOLDEN / GPT2))
    assert caught.value.path == path


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layout": "x"}, "layout"),
        ({"storage": "zip"}, "storage"),
        ({"dtype": "float32"}, "dtype"),
        ({"dtype": "nonsense"}, "dtype"),
        ({"on_error": "x"}, "on_error"),
        ({"jobs": 0}, "jobs"),
        ({"format": "txet"}, "did you mean 'text'"),
        ({"format": {"type": "text", "pack": True}}, "unknown key 'pack'"),
        ({"format": {"type": "chat", "mesages_field": "x"}}, "did you mean 'messages_field'"),
        ({"tokenizer": None}, "needs a tokenizer"),
        ({"tokenizer": "/nowhere"}, "tokenizer.json"),
        ({"tokenizer": 3}, "tokenizer: expected"),
        ({"sources": []}, "at least one file"),
        ({"sources": "https://example.org/a.jsonl"}, "URL"),
        ({"sources": "nothing*.jsonl"}, "found none"),
        ({"sources": __file__}, "file name ending in"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    given = {
        "sources": write_lines(tmp_path / "a.jsonl", RECORDS),
        "tokenizer": str(GOLDEN / GPT2),
        "format": None,
        **options,
    }
    with pytest.raises(actshard.ActshardError, match=said):
        tokens.build_cache(given.pop("sources"), tmp_path / "c", given.pop("tokenizer"), given.pop("format"), **given)
    assert not (tmp_path / "c").exists()


def test_ids_that_do_not_fit_are_refused(tmp_path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"text": "70000"}])
    with pytest.raises(actshard.ArgumentError, match="do not fit uint16"):
        tokens.build_cache(
            tmp_path / "a.jsonl",
            tmp_path / "c",
            tokens.load_tokenizer("passthrough", vocab_size=100_000),
            dtype="uint16",
        )


class TestFinishedCaches:
    """Guarantee: a finished cache is reused, and never mistaken for another."""

    def test_building_again_opens_it(self, tmp_path) -> None:
        path = write_lines(tmp_path / "a.jsonl", RECORDS)
        tokens.build_cache(path, tmp_path / "c", str(GOLDEN / GPT2))
        before = {p: p.stat().st_mtime_ns for p in (tmp_path / "c").rglob("*")}
        tokens.build_cache(path, tmp_path / "c", str(GOLDEN / GPT2))
        assert {p: p.stat().st_mtime_ns for p in (tmp_path / "c").rglob("*")} == before

    def test_levanters_own_is_opened(self, in_golden, tmp_path) -> None:
        shutil.copytree(GOLDEN / "text_gpt2style_single" / "cache", tmp_path / "c")
        before = digests(tmp_path)
        cache = tokens.build_cache("text_gpt2style_single/train.jsonl", tmp_path / "c" / "train", GPT2)
        assert len(cache) == 50
        assert digests(tmp_path) == before
        with pytest.raises(actshard.ExistsError, match="was built with tokenizer"):
            tokens.build_cache("text_gpt2style_single/train.jsonl", tmp_path / "c" / "train", LLAMA)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"tokenizer": str(GOLDEN / LLAMA)}, "was built with tokenizer"),
            ({"dtype": "int32"}, "other settings"),
            ({"layout": "sharded"}, "has the layout consolidated"),
            ({"storage": "lz4"}, "has the storage plain"),
        ],
    )
    def test_another_is_refused_and_replaced_where_asked(self, change, said, tmp_path) -> None:
        path = write_lines(tmp_path / "a.jsonl", RECORDS)
        tokens.build_cache(path, tmp_path / "c", str(GOLDEN / GPT2))
        options = {"tokenizer": str(GOLDEN / GPT2), **change}
        with pytest.raises(actshard.ExistsError, match=said):
            tokens.build_cache(path, tmp_path / "c", **options)
        tokens.build_cache(path, tmp_path / "c", overwrite=True, **options)
        tokens.build_cache(path, tmp_path / "fresh", **options)
        assert digests(tmp_path / "c") == digests(tmp_path / "fresh")

    def test_changed_files_are_noticed(self, tmp_path) -> None:
        path = write_lines(tmp_path / "a.jsonl", RECORDS)
        tokens.build_cache(path, tmp_path / "c", str(GOLDEN / GPT2))
        write_lines(path, RECORDS[:-1])
        with pytest.raises(actshard.ExistsError, match="from other files, or from older versions of these"):
            tokens.build_cache(path, tmp_path / "c", str(GOLDEN / GPT2))

    def test_shards_are_kept_where_asked(self, in_golden, tmp_path) -> None:
        sources = "text_llama3style_multishard/part*"
        tokens.build_cache(sources, tmp_path / "c", LLAMA, tokens.TextFormat("body"), keep_shards=True)
        kept = {p.name for p in (tmp_path / "c").iterdir() if p.is_dir()}
        assert kept == {
            "input_ids",
            "00000_0_jsonl",
            "00001_1_jsonl_gz",
            "00002_2_parquet",
            "00003_3_jsonl",
            "00004_4_jsonl_zst",
        }
        assert len(tokens.open_cache(tmp_path / "c" / "00002_2_parquet")) == 14
        tokens.build_cache(sources, tmp_path / "d", LLAMA, tokens.TextFormat("body"))
        assert {p.name for p in (tmp_path / "d").iterdir()} == {"input_ids", "shard_ledger.json"}


SCRIPT = """
import sys
from actshard import tokens
from actshard.tokens.sources import matching
tokens.build_cache(sys.argv[1:-4], sys.argv[-4], sys.argv[-3], layout=sys.argv[-2], jobs=int(sys.argv[-1]))
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> list[Path]:
    root = tmp_path_factory.mktemp("sources")
    return [write_lines(root / f"{i}.jsonl", RECORDS * (40 + 10 * i)) for i in range(4)]


class TestInterruptions:
    """Guarantee: after kill -9 at any time, the next run produces the same bytes; incomplete caches are not opened."""

    @pytest.mark.parametrize("layout", ["consolidated", "sharded"])
    @pytest.mark.parametrize("jobs", [1, 2])
    def test_killed_and_run_again(self, sources, layout, jobs, tmp_path) -> None:
        tokenizer = str(GOLDEN / GPT2)
        tokens.build_cache(sources, tmp_path / "whole", tokenizer, layout=layout)
        wanted = digests(tmp_path / "whole")
        out = tmp_path / "c"
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            SCRIPT,
            *map(str, sources),
            str(out),
            tokenizer,
            layout,
            str(jobs),
        ]
        rng = np.random.default_rng(jobs)
        wanted_kills = max(int(os.environ.get("ACTSHARD_KILLS", "12")) // 2, 1)
        kills = 0
        for _ in range(20 * wanted_kills):
            process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE)
            # Kill during the build, not during imports: wait for its folder.
            begun = out / ".actshard-build"
            wait_until(lambda: begun.exists() or process.poll() is not None, "the build")  # noqa: B023 -- called at once
            time.sleep(float(rng.uniform(0, 0.2)))
            if process.poll() is None:
                process.kill()  # only this process: its workers must notice
                kills += 1
            killed = process.wait() == -signal.SIGKILL
            assert process.stderr is not None
            assert killed or process.returncode == 0, process.stderr.read()
            if (out / "shard_ledger.json").exists():
                same_rows(tokens.open_cache(out), tokens.open_cache(tmp_path / "whole"))
            else:
                assert killed
                with pytest.raises((actshard.MissingFileError, actshard.UnfinishedError)):
                    tokens.open_cache(out)
            if kills >= wanted_kills:
                break
            if not killed:
                assert digests(out) == wanted
                shutil.rmtree(out)
        assert kills, "nothing was killed"
        tokens.build_cache(sources, out, tokenizer, layout=layout)
        assert digests(out) == wanted

    @pytest.mark.slow
    def test_every_step_of_finishing(self, sources, monkeypatch, tmp_path) -> None:
        """Stopped before each rename, link, removal and ledger: the next run produces the same bytes."""
        from actshard.tokens import shards
        from actshard.tokens import shards as combining
        from actshard.tokens.ledger import Ledger

        tokenizer = str(GOLDEN / GPT2)
        tokens.build_cache(sources[:2], tmp_path / "whole", tokenizer)
        wanted = digests(tmp_path / "whole")

        class Stop(BaseException):
            pass

        def run(stop_at: int) -> bool:
            """Returns whether the build finished."""
            steps = 0

            def counted(original):
                def wrapper(*args, **kwargs):
                    nonlocal steps
                    steps += 1
                    if steps == stop_at:
                        raise Stop
                    return original(*args, **kwargs)

                return wrapper

            with monkeypatch.context() as patch:
                patch.setattr(Path, "rename", counted(Path.rename))
                patch.setattr(Ledger, "write", counted(Ledger.write))
                patch.setattr(combining.shutil, "rmtree", counted(combining.shutil.rmtree))
                patch.setattr(shards.FieldWriters, "finish", counted(shards.FieldWriters.finish))
                try:
                    tokens.build_cache(sources[:2], tmp_path / "c", tokenizer, jobs=1)
                except Stop:
                    return False
            return True

        for stop_at in range(1, 60):
            if run(stop_at):
                break
            if (tmp_path / "c" / "shard_ledger.json").exists():
                same_rows(tokens.open_cache(tmp_path / "c"), tokens.open_cache(tmp_path / "whole"))
            tokens.build_cache(sources[:2], tmp_path / "c", tokenizer, jobs=1)
            assert digests(tmp_path / "c") == wanted
            shutil.rmtree(tmp_path / "c")
        else:
            pytest.fail("the build has more steps than were tried")
        assert stop_at > 10

    def test_shards_are_not_taken_for_the_cache(self, in_golden, tmp_path) -> None:
        """Interrupted builds, ours or Levanter's, leave finished shards."""
        shutil.copytree(GOLDEN / "text_gpt2style_single" / "cache", tmp_path / "c")
        (tmp_path / "c" / "train" / "shard_ledger.json").unlink()
        for path in (tmp_path, tmp_path / "c", tmp_path / "c" / "train"):
            with pytest.raises(
                actshard.UnfinishedError, match=r"named like shards.*00000_train_jsonl.*open one.*build the cache again"
            ):
                tokens.open_cache(path)
        assert actshard.verify(tmp_path / "c").codes() == {"unfinished"}
        assert len(tokens.open_cache(tmp_path / "c" / "train" / "00000_train_jsonl")) == 50

    def test_only_the_names_of_folders_below_count(self, in_golden, tmp_path) -> None:
        cache = GOLDEN / "text_gpt2style_single" / "cache" / "train"
        shutil.copytree(cache, tmp_path / "20250_run" / "wiki")
        assert len(tokens.open_cache(tmp_path / "20250_run")) == 50
        shutil.copytree(cache, tmp_path / "20250_run" / "00000_web" / "train")
        with pytest.raises(actshard.UnfinishedError, match=r"named like shards of a token cache: 00000_web/train\. If"):
            tokens.open_cache(tmp_path / "20250_run")

    def test_finished_files_are_not_built_again(self, sources, tmp_path) -> None:
        bad = write_lines(tmp_path / "bad.jsonl", [{"text": 1}])
        tokenizer = str(GOLDEN / GPT2)
        with pytest.raises(actshard.FormatError):
            tokens.build_cache([*sources[:2], bad], tmp_path / "c", tokenizer, jobs=1)
        shard = next((tmp_path / "c").glob(".actshard-build/new/00000_*"))
        before = (shard / "shard_ledger.json").stat().st_mtime_ns
        write_lines(bad, [{"text": "good"}])
        cache = tokens.build_cache([*sources[:2], bad], tmp_path / "c", tokenizer, jobs=1, keep_shards=True)
        assert len(cache) == len(RECORDS) * 90 + 1
        assert (tmp_path / "c" / shard.name / "shard_ledger.json").stat().st_mtime_ns == before

    def test_two_builds_at_once_are_one(self, sources, tmp_path) -> None:
        context = multiprocessing.get_context("spawn")
        with context.Pool(2) as pool:
            made = pool.starmap(_build, [(sources, tmp_path / "c", str(GOLDEN / GPT2))] * 2)
        assert sorted(made)[-1] == "built"
        assert len(tokens.open_cache(tmp_path / "c")) == len(RECORDS) * 220


def _build(sources: list[Path], out: Path, tokenizer: str) -> str:
    try:
        tokens.build_cache(sources, out, tokenizer)
    except actshard.LockedError:
        return "a: locked"
    return "built"


def test_progress_is_told(tmp_path) -> None:
    sources = [write_lines(tmp_path / f"{i}.jsonl", RECORDS) for i in range(3)]
    told: list[tokens.BuildProgress] = []
    tokens.build_cache(sources, tmp_path / "c", str(GOLDEN / GPT2), progress=told.append)
    assert told[-1].stage == "consolidating"
    assert told[-1].rows == 90
    assert told[-1].files == told[-1].files_done == 3
    assert told[-1].bytes == told[-1].bytes_total == sum(s.stat().st_size for s in sources)


def test_records_of_a_program(tmp_path) -> None:
    sources = [tokens.RowSource(name, lambda: iter(RECORDS)) for name in ("a", "b")]
    cache = tokens.build_cache(sources, tmp_path / "c", str(GOLDEN / GPT2))
    assert list(cache.ledger.shard_rows) == ["00000_a", "00001_b"]
    assert len(cache) == 60
    with pytest.raises(actshard.FormatError, match="row 2: expected an object"):
        tokens.build_cache(tokens.RowSource("c", lambda: [{"text": "a"}, 3]), tmp_path / "d", str(GOLDEN / GPT2))


@pytest.mark.parametrize(
    "pattern",
    ["*.jsonl", "a/*.jsonl", "./a/*", "a//x*", "**/*.jsonl", "a/**", "**", "**/b/**/*.jsonl", "[ab]/?1.jsonl", "a*/x1.jsonl",
     ".*", ".h/*", "*/", "a/*/", "*/b/", "nothing*/x", "link/*.jsonl", "**/x1.jsonl", "a/x1.jsonl", "a/no.jsonl", "**/.h*"],
)  # fmt: skip
@pytest.mark.parametrize("absolute", [False, True])
def test_patterns_match_what_glob_matches(
    pattern: str, absolute: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "a/x1.jsonl",
        "a/x2.jsonl",
        "a/b/x1.jsonl",
        "a/b/c/.x.jsonl",
        "b/y1.jsonl",
        ".h/x1.jsonl",
        "top.jsonl",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "broken.jsonl").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path)
    asked = f"{tmp_path}/{pattern}" if absolute else pattern
    expected = sorted(glob.glob(asked, recursive=True))  # noqa: PTH207
    if expected and not asked.endswith("a/x1.jsonl"):
        assert matching(asked) == expected
    elif not expected:
        with pytest.raises(actshard.MissingFileError):
            matching(asked)


def test_globs_and_braces(tmp_path) -> None:
    for i in range(12):
        write_lines(tmp_path / f"part{i:02d}.jsonl", [{"text": str(i)}])
    tokenizer = str(GOLDEN / GPT2)
    for i, pattern in enumerate(["part*.jsonl", "part{00..11}.jsonl", "part{0,1}?.jsonl"]):
        cache = tokens.build_cache(f"{tmp_path}/{pattern}", tmp_path / f"c{i}", tokenizer)
        assert len(cache.ledger.finished_shards) == 12
    assert cache.ledger.finished_shards[:2] == ("00000_00_jsonl", "00001_01_jsonl")


@pytest.mark.slow
def test_a_worker_builds_many_files_with_one_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: interpreters and tokenizers are loaded once per job, not per file; the cache is the same."""
    from actshard.base.work import pool

    files = [write_lines(tmp_path / f"{i}.jsonl", [{"text": f"text {i} {j}"} for j in range(i + 1)]) for i in range(7)]
    started: list[Any] = []
    original = pool.subprocess.Popen
    monkeypatch.setattr(pool.subprocess, "Popen", lambda *a, **k: started.append(a) or original(*a, **k))
    seen: list[tokens.BuildProgress] = []
    many = tokens.build_cache(files, tmp_path / "many", GOLDEN / GPT2, jobs=2, progress=seen.append)
    assert len(started) == 2
    assert seen[-1].files_done == 7
    one = tokens.build_cache(files, tmp_path / "one", GOLDEN / GPT2, jobs=1)
    assert len(started) == 2
    assert many.ledger.shard_rows == one.ledger.shard_rows
    assert np.array_equal(many.view("input_ids").elements(), one.view("input_ids").elements())
    # An error names the bad file and ends all processes.
    files[3].write_text('{"text": "x"}\n{"text": 5}\n')
    with pytest.raises(actshard.FormatError, match=r"line 2") as caught:
        tokens.build_cache(files, tmp_path / "bad", GOLDEN / GPT2, jobs=3)
    assert caught.value.path == files[3]


def _worker_with(folder: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes workers run code when their interpreters start."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))


def test_what_workers_print_is_not_taken_for_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    files = [write_lines(tmp_path / f"{i}.jsonl", [{"text": f"text {i}"}]) for i in range(3)]
    code = """
        import os
        from actshard.tokens import processing
        print("hello", flush=True)
        prepare = processing.TextProcessor.prepare
        def prints(self, *given):
            print('{"done": "nothing"}', flush=True)
            os.write(1, b"half a line")
            return prepare(self, *given)
        processing.TextProcessor.prepare = prints
    """
    _worker_with(tmp_path / "site", textwrap.dedent(code), monkeypatch)
    seen: list[tokens.BuildProgress] = []
    cache = tokens.build_cache(files, tmp_path / "c", GOLDEN / GPT2, jobs=2, progress=seen.append)
    assert len(cache) == 3
    assert seen[-1].files_done == 3
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("half a line") == 3


@pytest.mark.parametrize(
    ("failing", "cls", "said"),
    [
        (
            'raise errors.TruncatedFileError("cut", path=self.path, offset=7, reason="r", code="odd")',
            actshard.TruncatedFileError,
            {"offset": 7, "reason": "r", "code": "odd", "kind": "truncated"},
        ),
        (
            'raise errors.from_os(OSError(28, "no space"), self.path, "write")',
            actshard.DiskFullError,
            {"errno": 28},
        ),
        ("raise MemoryError('no room')", actshard.NoMemoryError, {}),
        ('os.stat("/nowhere")', actshard.MissingFileError, {"path": Path("/nowhere"), "errno": 2}),
    ],
)
def test_an_error_in_a_worker_is_the_error_that_it_would_be_without(
    failing: str,
    cls: type[actshard.ActshardError],
    said: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = [write_lines(tmp_path / f"{i}.jsonl", [{"text": f"text {i}"}]) for i in range(3)]
    code = f"""
        import os
        from actshard.base import errors
        from actshard.tokens import sources
        def fails(self, columns, read, blocks=()):
            {failing}
        sources.Source.records = fails
    """
    _worker_with(tmp_path / "site", textwrap.dedent(code), monkeypatch)
    with pytest.raises(cls) as caught:
        tokens.build_cache(files, tmp_path / "c", GOLDEN / GPT2, jobs=2)
    assert caught.value.path is not None
    assert {name: getattr(caught.value, name) for name in said} == said


def test_every_error_keeps_what_it_says_on_its_way_to_another_process() -> None:
    from actshard.base import errors

    classes = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.ActshardError)]
    assert len(classes) > 20
    for cls in classes:
        for given in ({}, {"path": "/a/b", "offset": 9, "reason": "r", "code": "c"}):
            error = cls("detail \udc80", **given)
            if isinstance(error, OSError):
                error.errno, error.filename = 28, "/a/b"
            again = errors.from_plain(json.loads(json.dumps(errors.as_plain(error))))
            assert type(again) is cls
            assert str(again) == str(error)
            for name in ("detail", "path", "offset", "reason", "code", "errno", "filename"):
                assert getattr(again, name, None) == getattr(error, name, None)
