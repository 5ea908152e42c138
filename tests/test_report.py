"""``actshard.report``: one file without network and script, whose texts are escaped, with findings that fit the data."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

import actshard
from actshard.base._arguments import shown_bytes
from actshard.cli import app
from actshard.looking.examining import massive_rows
from actshard.looking.reporting import _packing
from actshard.looking.reporting.page import Grid, Page, colour_of, quoted
from actshard.looking.stats import advice_of, together
from actshard.looking.stats.summary import Advice
from actshard.tokens import CacheWriter, open_cache
from actshard.tokens.looking import Fill, look
from conftest import GOLDEN, SAEV, refuses

pytest.importorskip("matplotlib")

CACHE = GOLDEN / "levanter/text_llama3style_multishard"
TOKENIZER = GOLDEN / "levanter/tokenizers/bpe_llama3style"
RUN = GOLDEN / "saev/v21_cls_labels_multishard/saev/shards/efe18415"
HOSTILE = (
    "{{ 7*7 }}</style><script>alert(1)</script><img src='https://evil.example/x' onerror=alert(1)> $\\frac{$ \x1b[31m"
)
VOID = {"meta", "wbr", "br", "img", "link"}


class Reader(HTMLParser):
    """Reads a page: its tags, its text without styles, and whether elements are closed."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.raw = file.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(self.raw)
        self.close()
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.getpos()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)


def read(file: Path) -> Reader:
    """A page that needs nothing from elsewhere."""
    page = Reader(file)
    assert page.open == []
    assert page.raw.startswith("<!doctype html>")
    assert file.stat().st_size < 1_500_000
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "img", "link", "iframe", "object", "embed", "form", "base"}
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for tag, attrs in page.tags:
        for name, value in attrs.items():
            assert not name.startswith("on"), (tag, attrs)
            assert name not in ("src", "srcset", "action", "data"), (tag, attrs)
            if name == "href":
                assert str(value).removeprefix("#") in ids, (tag, attrs)
    markup = re.sub(r">[^<]*<", "><", re.sub(r'"[^"]*"', '""', page.raw))
    assert "://" not in markup
    for style in re.findall(r"<style.*?</style>", page.raw, re.DOTALL):
        assert "url(" not in style
        assert "@import" not in style
    assert set(re.findall(r"url\((.)", page.raw)) <= {"#"}
    assert "prefers-color-scheme: dark" in page.raw
    assert "@media print" in page.raw
    assert 'name="viewport"' in page.raw
    assert not re.search(r"#0a0a[01]\d", page.raw), "colours that are no page's"
    return page


LONG = 12
"""Tokens of each example."""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """60 examples of 12 tokens and 3 layers, each with other defects.

    Layer 2 has a large mean. Layer 5 has a massive dimension, a dead and a constant one, NaN and infinite values. First tokens of
    layer 8 are sinks. The last 20 examples repeat the first.
    """
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(60, 3, LONG, 32)).astype(np.float32)
    rows[:, 0] += 8
    rows[:, 1, :, 7] *= 900
    rows[:, 1, :, 9], rows[:, 1, :, 10] = 0, 0.5
    rows[23, 1, 2, 11], rows[24, 1, 3, 12] = np.nan, np.inf
    rows[:, 2, 0] *= 300
    rows[40:] = rows[:20]
    with actshard.create(tmp_path / "run", "lmprobe", layers=[2, 5, 8], d_model=32, model="m") as writer:
        for i, x in enumerate(rows):
            words = ["<b>", "str", "ength", " of", "\n", f"{i % 40}", *"abcdef"]
            writer.append([x], columns={"text": ["".join(words)], "str_tokens": [words]})
    return tmp_path / "run"


PARTS = ("opening", "statistics", "plots", "samples", "tables and texts", "check of the files", "other")
"""Parts of the work whose times a report names."""
DEFECTS = {
    "gamma": ("layer 2", ["gamma is 8", "Centre before training"], "center=stats.mean"),
    "NaN": ("layer 5", ["1 NaN value in 1 of 32 dimensions"], 'max_norm=float("inf")'),
    "infinite": ("layer 5", ["1 infinite value in 1 of 32 dimensions"], 'max_norm=float("inf")'),
    "always 0": ("layer 5", ["1 of 32 dimensions is always 0: 9.", "Check the hook"], ""),
    "constant": ("layer 5", ["1 of 32 dimensions is constant: 10.", "Check the hook"], ""),
    "massive dimensions": (
        "layer 5",
        ["1 massive dimension: 7 (", "times the median dimension's"],
        "stats.inverse_std",
    ),
    "massive rows": (
        "layer 8",
        ["60 massive rows", "token 0 (norm ", "attention sinks", "Leave them out"],
        "min_token=1",
    ),
    "repeats": (
        "3 layers (2, 5, 8)",
        ["33.43% of the rows with finite norms equal an earlier row", "Look for repeated texts"],
        "",
    ),
}
"""Of each kind of defect: where it is, parts of its text, and of the code."""


@pytest.mark.slow
def test_every_known_defect_is_named_with_numbers_and_advice(data: Path, tmp_path: Path) -> None:
    page = read(actshard.report(data, tmp_path / "r.html"))
    found = advice_of({layer: actshard.open(data).stats(layer) for layer in (2, 5, 8)})
    assert [x.kind for x in found if x.kind != "norms"] == [
        "gamma", "repeats", "NaN", "infinite", "always 0", "constant", "massive dimensions", "massive rows",
    ]  # fmt: skip
    for kind, (where, parts, code) in DEFECTS.items():
        advice = next(x for x in found if x.kind == kind)
        assert advice.where == where
        for part in parts:
            assert part in str(advice), (kind, str(advice))
        assert code in advice.code
        assert f"{advice.severity} {advice.where}: {advice.text}" in page.text, kind
        assert advice.do in page.text
    assert "median norms differ by a factor of" in page.text
    assert "warning examples: 20 examples of 60 have the text of an earlier one: 40 = 0, 41 = 1" in page.text
    assert "41 1 <b>strength of\\n1abcdef" in page.text[page.text.index("example equals example text begins") :]
    assert "all 2,160 rows of 3 layers" in page.text
    assert sum(tag == "svg" for tag, _ in page.tags) == 10
    for axis in (
        "L2 norm of a row",
        "position of the token in the example",
        "gamma = |mean| / |std|",
        "dimension",
        "linear CKA",
    ):
        assert axis in page.text, axis


@pytest.mark.slow
def test_massive_dimensions_and_tokens_are_listed_with_place_and_text(data: Path, tmp_path: Path) -> None:
    page = read(actshard.report(data, tmp_path / "r.html"))
    column, row = actshard.open(data).stats(5).massive_columns[0], actshard.open(data).stats(8).massive_rows[0]
    dimensions = page.text[page.text.index("Massive dimensions") :]
    assert f" 5 7 {column.magnitude:.4g} " in dimensions
    assert f" {column.example} {column.token} Massive tokens" in dimensions
    assert f" 8 {row.example} {row.token} {row.norm:.4g} " in dimensions[dimensions.index("Massive tokens") :]
    assert "'<b>' <b>strength of" in page.text
    store = actshard.open(data)
    rows = massive_rows(store, {8: store.stats(8)}, most=2)
    assert [(x.token, x.text, x.id) for x in rows] == [(0, "<b>", None)] * 2
    for x in rows:
        assert x.norm == pytest.approx(np.linalg.norm(store.sequence(x.example, 8)[0].astype(np.float64)), rel=1e-12)
        assert x.context is not None
        assert x.times > 100


def test_the_command_stats_names_the_findings_of_the_report(data: Path, tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["stats", str(data), "--quiet"])
    assert told.exit_code == 0, told.output
    said = " ".join(told.output.split())
    for advice in advice_of({layer: actshard.open(data).stats(layer) for layer in (2, 5, 8)}):
        assert f"{advice.severity} {advice.where}: {advice.text}" in said
        assert advice.do.removesuffix(".") in said
        assert advice.code in said
    assert "warning examples: 20 examples of 60 have the text of an earlier one: 40 = 0" in said
    assert "'<b>'" in said
    told = CliRunner().invoke(app, ["stats", str(data), "--layer", "8", "--json"])
    found = json.loads(told.output)["8"]["findings"]
    assert [each["text"] for each in found] == [each.text for each in actshard.open(data).stats(8).advice()]
    assert {each["severity"] for each in found} <= {"error", "warning", "note"}
    assert found[0]["do"]


@pytest.mark.slow
def test_a_clean_dataset_has_no_findings(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(40, 2, 6, 32)).astype(np.float32)
    with actshard.create(tmp_path / "run", "lmprobe", layers=[2, 5], d_model=32, model="m") as writer:
        for i, x in enumerate(rows):
            writer.append([x], columns={"text": [f"text {i}"], "str_tokens": [list("abcdef")]})
    page = read(actshard.report(tmp_path / "run", tmp_path / "r.html", deep=True))
    assert "Nothing unusual." in page.text
    assert "No problems" in page.text
    assert "Massive" not in page.text
    told = CliRunner().invoke(app, ["stats", str(tmp_path / "run"), "--quiet"])
    assert "layer 2:" not in told.output


@pytest.mark.slow
def test_the_report_names_the_size_of_the_packed_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(0).normal(size=(64, 1, 16, 64)).astype(ml_dtypes.bfloat16)
    for name, options in {
        "flat": {"format": "safetensors"},
        "packed": {"format": "zarr", "version": 3, "pack": "lossless"},
    }.items():
        with actshard.create(tmp_path / name, layers=[2], d_model=64, **options) as writer:
            writer.append(rows)
    assert "without loss" not in read(actshard.report(tmp_path / "flat", tmp_path / "r.html")).text  # it is small
    monkeypatch.setattr("actshard.looking.reporting.activations._LARGE", 1)
    store = actshard.open(tmp_path / "flat")
    (form,) = actshard.estimate(store, "zarr 3 lossless")
    text = read(actshard.report(store, tmp_path / "r.html")).text
    assert f"about {shown_bytes(form.bytes)} without loss, {1 - form.bytes / store.info()['bytes']:.0%} less" in text
    assert "without loss" not in read(actshard.report(tmp_path / "packed", tmp_path / "r.html")).text


def test_tokens_are_coloured_by_their_norm(data: Path, tmp_path: Path) -> None:
    page = read(actshard.report(data, tmp_path / "r.html", layers=2, examples=2))
    store = actshard.open(data)
    titles = [str(attrs["title"]) for _, attrs in page.tags if "title" in attrs]
    assert len(titles) == 2 * LONG
    norms = np.linalg.norm(store.sequence(30, 2).astype(np.float64), axis=1)
    assert [t.partition(",")[0] for t in titles[LONG:]] == [f"token {i}: norm {x:.4g}" for i, x in enumerate(norms)]
    assert "<b>" in page.text
    assert colour_of(1.1, 1) == 4
    assert colour_of(0.1, 1) == 0
    assert colour_of(101, 1) == 9
    assert colour_of(float("nan"), 1) == 10
    assert colour_of(1, float("nan")) == 3


def test_norms_of_examples_with_one_token_are_divided_by_the_layers_mean_norm(tmp_path: Path) -> None:
    rows = np.ones((4, 1, 1, 4), np.float32) * np.array([1, 1, 1, 9], np.float32)[:, None, None, None]
    with actshard.create(tmp_path / "run", "zarr", layers=[0], d_model=4) as writer:
        writer.append(rows, columns={"prompt": list("abcd")})
    page = read(actshard.report(tmp_path / "run", tmp_path / "r.html"))
    assert "divided by the layer's mean norm" in page.text
    shown = [attrs["class"] for _, attrs in page.tags if "title" in attrs]
    assert shown == ["k0", "k0", "k0", f"k{colour_of(9, 3)}"]


@pytest.mark.slow
def test_hostile_texts_are_texts(tmp_path: Path) -> None:
    """In names of layers, columns, metadata and tokens."""
    names = [f"{i}{HOSTILE}" for i in range(3)]
    rows = np.random.default_rng(0).normal(size=(5, 3, 2, 8)).astype(np.float32)
    with actshard.create(tmp_path / "run", "zarr", layers=names, d_model=8) as writer:
        writer.append(rows, columns={"prompt": [HOSTILE] * 5})
    with actshard.create(tmp_path / "<b>&amp;", "lmprobe", layers=[1], d_model=8, model=HOSTILE) as other:
        other.append(rows[:, :1], columns={"text": [HOSTILE + "\x00"] * 5, "str_tokens": [[HOSTILE, "<script>"]] * 5})
    pages = [read(actshard.report(tmp_path / name, tmp_path / "r.html")) for name in ("run", "<b>&amp;")]
    for page in pages:
        assert "<script>alert(1)</script>" in page.text
        assert "{{ 7*7 }}" in page.text
        assert not set(page.raw) & set("\x1b\x00")


@pytest.mark.slow
def test_large_datasets_have_small_reports(tmp_path: Path) -> None:
    """200 layers, long texts and long sequences."""
    rows = np.random.default_rng(0).normal(size=(2, 200, 400, 8)).astype(np.float16)
    rows[0, :, 0] = np.nan
    with actshard.create(tmp_path / "run", "zarr", layers=list(range(200)), d_model=8) as writer:
        writer.append(rows, columns={"prompt": ["<&>" * 100_000] * 2})
    page = read(actshard.report(tmp_path / "run", tmp_path / "r.html", examples=20))
    assert "50 more" in page.text
    assert "240 more" in page.text


@pytest.mark.slow
def test_the_same_dataset_gives_the_same_bytes(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    one = actshard.report(data, tmp_path / "a.html").read_bytes()
    two = actshard.report(actshard.open(data), tmp_path / "b.html").read_bytes()
    assert one == two
    assert b"1970-01-02" in one
    assert "took" not in read(tmp_path / "a.html").text
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    again = read(actshard.report(data, tmp_path / "a.html"))
    assert "took" in again.text
    assert "1970" not in again.text


def test_a_token_cache(tmp_path: Path) -> None:
    page = read(actshard.report(CACHE, tmp_path / "r.html", tokenizer=TOKENIZER))
    for expected in (
        "token cache",
        "26,414",
        "<|end_of_text|>",
        "Packing",
        "Repeated documents",
        "Lengths of documents",
    ):
        assert expected in page.text, expected
    assert sum(tag == "svg" for tag, _ in page.tags) == 3
    assert "id 0" in str([attrs.get("title") for _, attrs in page.tags])


def test_findings_of_a_token_cache(tmp_path: Path) -> None:
    with CacheWriter(tmp_path / "train", {"input_ids": np.int64}) as writer:
        writer.append([{"input_ids": np.array(x)} for x in [[1, 2, 9]] * 5 + [[], [-3, 9], [4, 5]]])
    text = read(actshard.report(tmp_path / "train", tmp_path / "r.html")).text
    assert "50.0% of the documents repeat an earlier one (4)" in text
    assert "1 empty document" in text
    assert "1 token id below 0" in text
    assert "1 of 7 documents do not end with id 9" in text


@pytest.mark.parametrize(
    ("fills", "text"),
    [
        (
            [(512, 0.89, 8280), (4096, 0.7, 400), (8192, 0.6, 0)],
            "with 8,192 tokens per example, 40% of positions are padding and 0 of tokens are cut off; with 4,096, 30% and 4.00%.",
        ),
        (
            [(512, 0.89, 8280), (8192, 0.6, 120)],
            "with 8,192 tokens per example, 40% of positions are padding and 1.20% of tokens are cut off; "
            "lengths with less padding cut off over 5% of tokens.",
        ),
        (
            [(512, 0.6, 120)],
            "with 512 tokens per example, 40% of positions are padding and 1.20% of tokens are cut off.",
        ),
    ],
)
def test_the_finding_of_packing_recommends_no_length_that_cuts_much(
    fills: list[tuple[int, float, int]], text: str, tmp_path: Path
) -> None:
    with CacheWriter(tmp_path / "train", {"input_ids": np.int64}) as writer:
        writer.append([{"input_ids": np.arange(5)}])
    found = replace(
        look(open_cache(tmp_path / "train")), fills=tuple(Fill(n, 1, fill, lost, fill) for n, fill, lost in fills)
    )
    (advice,) = _packing(replace(found, tokens=10_000))
    assert advice.text == text


def test_datasets_without_rows_have_a_report(tmp_path: Path) -> None:
    with CacheWriter(tmp_path / "train", {"input_ids": np.int64}):
        pass
    assert "contains no tokens" in read(actshard.report(tmp_path / "train", tmp_path / "r.html")).text


@pytest.mark.slow
def test_damage_that_verify_finds_is_in_the_report(data: Path, tmp_path: Path) -> None:
    text = read(actshard.report(data, tmp_path / "r.html", deep=True)).text
    found = actshard.verify(data, deep=True)
    assert found.findings
    for finding in found.findings:
        assert finding.code in text


def test_damaged_datasets_have_a_report_of_the_damage(data: Path, tmp_path: Path) -> None:
    whole = data.parent / "cut"
    shutil.copytree(data, whole)
    for shard in whole.rglob("*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:-100])
    page = read(actshard.report(whole, tmp_path / "r.html"))
    assert "error dataset: cannot be " in page.text
    assert "Fix what the check of the files names" in page.text
    assert ".safetensors" in page.text
    assert " errors" in page.text
    with refuses(actshard.UnknownFormatError, tmp_path / "none"):
        (tmp_path / "none").mkdir()
        actshard.report(tmp_path / "none", tmp_path / "r.html")


@pytest.mark.parametrize("layer", [[], ["--layer", "0"], ["--layer", "0-5"], ["--layer", "a"]])
def test_the_report_of_the_damage_does_not_depend_on_the_layer(data: Path, tmp_path: Path, layer: list[str]) -> None:
    for shard in data.rglob("*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:-100])
    words = ["report", str(data), "-o", str(tmp_path / "r.html"), "--json", "--quiet", *layer]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert "error" in {each["severity"] for each in made["findings"]}
    assert made["check"] == actshard.verify(data).as_dict()
    assert "Fix what the check of the files names" in read(tmp_path / "r.html").text


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["cut", "missing"])
def test_layers_that_can_be_read_are_reported_if_others_cannot(data: Path, tmp_path: Path, harm: str) -> None:
    shard = min(data.rglob("*layer005*.safetensors"))
    if harm == "missing":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-100])
    page = read(actshard.report(data, tmp_path / "r.html"))
    assert "error layer 5: cannot be read, the report covers the other layers: " in page.text
    assert shard.name in page.text
    assert "rows of 2 layers" in page.text
    assert re.findall(r"Dimensions of layer (\d)", page.text) == ["2", "8"]
    table = page.text[page.text.index("Layers Norms are L2 norms") :]
    assert " 2 720 " in table
    assert " 8 720 " in table
    assert " 5 720 " not in table
    assert "layer 8; norm of a token" in page.text
    assert "warning layer 8: 60 massive rows" in page.text


def test_layers_with_the_same_damage_are_one_finding(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = actshard.Store.stats

    def stats(store: actshard.Store, layer: Any, **options: Any) -> Any:
        if layer != 5:
            raise actshard.FormatError("damaged", path=data)
        return compute(store, layer, **options)

    monkeypatch.setattr(actshard.Store, "stats", stats)
    page = read(actshard.report(data, tmp_path / "r.html"))
    assert page.text.count("cannot be read") == 1
    assert "error layers 2, 8: cannot be read" in page.text


@pytest.mark.slow
def test_every_golden_dump_has_a_report(tmp_path: Path) -> None:
    for dump in (*SAEV[:3], *sorted((GOLDEN / "llamascopium").iterdir()), *sorted((GOLDEN / "zarr").iterdir())[:3]):
        read(actshard.report(dump, tmp_path / "r.html", examples=1))


def test_wrong_requests(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refuses(actshard.LayerError, actshard.open(data).path):
        actshard.report(data, tmp_path / "r.html", layers=9)
    with refuses(actshard.ArgumentError, None, "examples"):
        actshard.report(data, tmp_path / "r.html", examples=-1)
    with pytest.raises(actshard.MissingFileError):
        actshard.report(tmp_path / "none", tmp_path / "r.html")
    for option, value in (("layers", 2), ("rows", 5), ("tokens", "last")):
        with refuses(
            actshard.ArgumentError, open_cache(CACHE / "cache/train").path, rf"{option}: .* Leave {option}= out\.$"
        ):
            actshard.report(CACHE, tmp_path / "r.html", **{option: value})
    for name in ("r.pdf", "r", "html"):
        with refuses(actshard.ArgumentError, None, r"out: expected a name that ends with \.html or \.htm, found"):
            actshard.report(data, tmp_path / name)
        assert not (tmp_path / name).exists()
    assert not (tmp_path / "r.html").exists()
    for module in ("matplotlib", "jinja2"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            with refuses(actshard.MissingExtraError, None, r"pip install 'actshard\[report\]'"):
                actshard.report(data, tmp_path / "r.html")


@pytest.mark.slow
def test_the_command(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "r.html"
    told = CliRunner().invoke(app, ["report", str(data), "-o", str(file), "--layer", "5", "--examples", "1"])
    assert (told.exit_code, told.stdout.strip()) == (0, str(file))
    assert "all 720 rows of 1 layer," in read(file).text
    assert "Writes" not in told.stdout
    told = CliRunner().invoke(app, ["report", str(data), "-o", str(tmp_path / "r.HTM"), "--layer", "5,8", "--json"])
    made = json.loads(told.output)
    assert (made["path"], made["bytes"]) == (str(tmp_path / "r.HTM"), (tmp_path / "r.HTM").stat().st_size)
    assert made["layers"] == [5, 8]
    assert made["seconds"] > 0
    assert {"severity", "where", "kind", "text", "do", "code"} == set(made["findings"][0])
    stats = json.loads(CliRunner().invoke(app, ["stats", str(data), "--layer", "8", "--json"]).output)["8"]["findings"]
    assert stats
    for each in stats:
        assert each["kind"] in {found["kind"] for found in made["findings"]}
    assert {**stats[0], "where": "layer 8"} in made["findings"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--layer", "3"], "--layer: token caches have no layers. Leave it out."),
        (["--rows", "5", "--deep"], "--rows: token caches have no rows of layers to sample. Leave it out."),
        (["--tokens", "last"], "--tokens: the report of a token cache covers all tokens. Leave it out."),
        (["-o", "x.pdf"], "--out: expected a name that ends with .html or .htm, found 'x.pdf'"),
    ],
)
def test_the_command_refuses_options_without_a_use(words: list[str], text: str, tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["report", str(CACHE), "-o", str(tmp_path / "r.html"), *words])
    assert isinstance(told.exception, actshard.ArgumentError)
    assert str(told.exception).endswith(text)
    assert not list(tmp_path.iterdir())


def test_findings_of_one_kind_in_many_layers_are_one() -> None:
    some = [(i, Advice("warning", f"layer {i}", f"gamma {i}", kind="gamma", size=20 - abs(i - 7))) for i in range(12)]
    few = [(i, Advice("error", f"layer {i}", "NaN", kind="NaN")) for i in range(2)]
    one, *rest = together([*some, *few])
    assert one.where == "12 layers (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)"
    assert one.text == "worst in layer 7: gamma 7"
    assert rest == [advice for _, advice in few]


def test_advice_is_sorted_and_bounded() -> None:
    from actshard.looking.reporting.page import MOST_FINDINGS

    page = Page("", "", [])
    page.advice = [Advice(s, str(i), "") for i, s in enumerate(["note", "error", "warning"] * 30)]
    shown: list[Any] = page.sorted_advice()
    assert len(shown) == MOST_FINDINGS
    assert [x.severity for x in shown[:31]] == ["error"] * 30 + ["warning"]
    assert [x.where for x in shown[:2]] == ["1", "4"]


def test_columns_without_cells_are_left_out() -> None:
    grid = Grid(["a", "b", "c"], [["1", "", "x"], ["", "", "y"]], 3, (1, 2)).full()
    assert grid == Grid(["a", "c"], [["1", "x"], ["", "y"]], 3, (1,))


def test_errors_of_files_name_the_file(data: Path, tmp_path: Path) -> None:
    shard = min(data.rglob("*layer002*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    page = read(actshard.report(data, tmp_path / "r.html"))
    assert f"header {shard.relative_to(data)} tensor" in page.text


@pytest.mark.slow
def test_kept_statistics_are_used_while_they_are_true(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the report, plots and the command stats; layers without kept ones are computed."""
    store = actshard.open(data)
    for layer in (2, 5):
        store.stats(layer, save=True)
    computed, compute = [], actshard.Store.stats
    monkeypatch.setattr(actshard.Store, "stats", lambda *a, **b: (computed.append(a[1]), compute(*a, **b))[1])
    page = read(actshard.report(data, tmp_path / "r.html"))
    assert computed == [8]
    assert "2 layers read from files that actshard stats --save kept" in page.text
    parts = "".join(rf"{sep} {name} \d+\.\d s" for sep, name in zip(":,,,,,,", PARTS, strict=True))
    took = re.search(rf"took \d+\.\d s{parts}", page.text)
    assert took is not None
    total, *each = map(float, re.findall(r"\d+\.\d", took[0]))
    assert total == pytest.approx(sum(each), abs=0.05 * len(PARTS) + 0.05)
    told = CliRunner().invoke(app, ["stats", str(data), "--layer", "2,5", "--json"])
    assert told.exit_code == 0, told.output
    assert actshard.plot.dimensions(store, 5, table=True).num_rows == 32
    assert actshard.plot.positions(store, [2, 5], table=True).num_rows == 2 * LONG
    assert computed == [8]
    for shard in data.rglob("*.safetensors"):
        shard.touch()
    assert "stats --save" not in read(actshard.report(data, tmp_path / "r.html")).text
    assert computed == [8, 2, 5, 8]


@pytest.mark.slow
def test_samples_are_drawn_where_single_rows_are_cheap(tmp_path: Path) -> None:
    """Spectrum, similarity, and the separability of a label; of files that are decoded whole a line says why not."""
    rng = np.random.default_rng(0)
    labels = np.arange(40) % 2
    rows = rng.normal(size=(40, 2, 5, 16)).astype(np.float32)
    rows[:, 1] += 4 * labels[:, None, None]
    with actshard.create(tmp_path / "run", "lmprobe", layers=[2, 5], d_model=16, model="m") as writer:
        for i, x in enumerate(rows):
            writer.append([x], columns={"text": [f"text {i}"], "label": [int(labels[i])]})
    page = read(actshard.report(tmp_path / "run", tmp_path / "r.html"))
    for expected in (
        "variance explained",
        "effective rank",
        "200 of 200 rows",
        "Similarity of layers",
        "Linear probe of label",
        "balanced accuracy",
        "2 classes; bars are standard errors",
    ):
        assert expected in page.text, expected
    for dump in sorted((GOLDEN / "pickle").iterdir())[:1]:
        assert "single rows of this dataset are slow to read" in read(actshard.report(dump, tmp_path / "r.html")).text


@pytest.mark.slow
def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(actshard.MissingFileError, match=r"none: expected a folder, found nothing. Create it first"):
        actshard.report(RUN, tmp_path / "none/report.html")


@pytest.mark.slow
def test_a_report_of_a_sample_is_marked(tmp_path: Path) -> None:
    marked = "a sample of at most 3 rows of each layer"
    assert marked in actshard.report(RUN, tmp_path / "sample.html", rows=3).read_text()
    assert "a sample of at most" not in actshard.report(RUN, tmp_path / "all.html").read_text()


def test_whitespace_of_tokens_is_seen(tmp_path: Path) -> None:
    assert quoted(" ") == "' '"
    assert quoted(" " * 32) == "' ' x 32"
    assert quoted("\n\n") == r"'\n\n'"
    assert quoted("  a") == "'  a'"
    page = read(actshard.report(CACHE, tmp_path / "r.html", tokenizer=TOKENIZER))
    common = page.text[page.text.index("Commonest tokens") :]
    assert "1,099 ' ' x 32 784" in common
    assert "226 ' ' 287" in common
    assert "td.text { white-space: pre; }" in page.raw


@pytest.mark.slow
def test_the_table_of_layers_counts_rows_and_dimensions(data: Path, tmp_path: Path) -> None:
    page = read(actshard.report(data, tmp_path / "r.html"))
    cells = page.text[page.text.index("massive rows massive dims constant dims NaN infinite") :].split()[8:56]
    assert [cells[i] for i in (0, 16, 32)] == ["2", "5", "8"]
    assert [cells[i + 11 : i + 16] for i in (0, 16, 32)] == [
        ["0", "0", "0", "0", "0"],
        ["0", "1", "2", "1", "1"],
        ["60", "0", "0", "0", "0"],
    ]


def test_gamma_of_equal_rows_is_infinite(tmp_path: Path) -> None:
    rows = np.zeros((6, 2, 3, 4), np.float32)
    rows[:, 1] = [1, 2, 3, 4]
    with actshard.create(tmp_path / "run", "zarr", layers=[0, 1], d_model=4) as writer:
        writer.append(rows)
    text = read(actshard.report(tmp_path / "run", tmp_path / "r.html")).text
    assert "0 18 0 0 0 - 0 " in text
    assert re.search(r" 1 18 5.477 5.48\d 5.48\d infinite 0 1 4 ", text)


@pytest.mark.slow
def test_wide_tables_show_that_they_scroll(data: Path, tmp_path: Path) -> None:
    """By shadows at their sides, on phones by a line above them too, and their first column stays in place."""
    page = read(actshard.report(data, tmp_path / "r.html"))
    assert page.text.count("16 columns: scroll sideways") == 1
    assert "var(--shade)" in page.raw
    assert page.raw.index('<div class="scroll names"') > page.raw.index("<h2>Layers</h2>")
    assert "hint" not in page.raw[page.raw.index("<h2>Repeated examples</h2>") : page.raw.index("Texts, coloured")]
    assert Grid(list("abcde"), [["x" * 40, *"bcde"]]).has_short_names is False
    assert Grid(list("abc"), [list("abc")]).has_short_names is False
