"""Messages of commands use the words of the shell: options, not Python arguments."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import actshard
from actshard.cli import main
from actshard.cli._messages import Spelling
from actshard.cli._options import of_store
from actshard.reading import inputs
from conftest import GOLDEN
from test_commands import leaves

CACHE = GOLDEN / "levanter/text_gpt2style_single/cache/train"
TOKENIZER = GOLDEN / "levanter/tokenizers/bpe_gpt2style"
WITHOUT_MESSAGES = {"demo", "completion", "cache info", "cache clear", "status", "commit"}
"""Commands without options that have values."""
BASES = {
    "plot": "plot {d} norms --out {out}.svg -q",
    "report": "report {d} --out {out}.html --examples 0 -q",
    "convert": "convert {d} {out} --to npy -q",
    "tokenize": "tokenize {texts} --tokenizer {tokenizer} --out {out} -q",
    "merge": "merge {out} --part {d}",
    "run": "run {plan} -q",
    "stage": "stage {d} {out} -q",
    "push": "push {d} s3://bucket/run -q",
    "plan convert": "plan convert {d} {out} --to npy --out {out}.json --no-measure",
    "plan tokenize": "plan tokenize {texts} --tokenizer {tokenizer} --cache {out} --out {out}.json --no-measure",
    "plan merge": "plan merge {out} --part {d} --part {e} --out {out}.json --no-measure",
    "plan stage": "plan stage {d} {out} --out {out}.json --no-measure",
    "plan stats": "plan stats {d} --out {out}.json --work {out} --no-measure",
    "plan verify": "plan verify {d} --out {out}.json --work {out} --no-measure",
    "bench-stream": "bench-stream {d} --seconds 0",
    "stats": "stats {d} -q",
}


def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> str:
    """Output and messages of a command, in one line."""
    monkeypatch.setattr(sys, "argv", ["actshard", *map(str, words)])
    with pytest.raises(SystemExit):
        main()
    found = capsys.readouterr()
    return " ".join((found.out + found.err).split())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("data")
    for name in "de":
        with actshard.create(root / name, "npy", layers=[0, 1, 2, 5, 9], d_model=4) as writer:
            writer.append(np.random.default_rng(0).normal(size=(3, 5, 2, 4)).astype(np.float32))
    (root / "texts.jsonl").write_text('{"text": "a b"}\n')
    actshard.plan.stats(root / "d", work=root / "work").save(root / "plan.json")
    return {
        **{name: root / name for name in "de"},
        "texts": root / "texts.jsonl",
        "tokenizer": TOKENIZER,
        "plan": root / "plan.json",
    }


def bad(param: object) -> list[str]:
    kinds = {
        "--out": [""],
        "--work": ["", "s3://bucket/x"],
        "--scratch": ["s3://bucket/x"],
        "--cache": ["x", "1 parsec"],
    }
    longest = max(param.opts, key=len)  # type: ignore[attr-defined]
    return kinds.get(longest, ["no-such", "-7", "", "x=[1"])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(leaves()) - WITHOUT_MESSAGES))
def test_messages_name_options_and_not_arguments(
    name: str,
    data: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = leaves()[name]
    known = Spelling.of(command)
    tried = 0
    for param in command.params:
        if param.param_type_name == "argument" or param.is_flag:
            continue
        for value in bad(param):
            tried += 1
            words = BASES.get(name, f"{name} {{d}}").format(**data, out=tmp_path / f"out{tried}").split()
            text = said(capsys, monkeypatch, *words, f"{max(param.opts, key=len)}={value}")
            assert "Traceback" not in text
            plain = re.sub(r"[Ii]n Python, \w+ \w+=|\w+=\S+ \(in Python\)|found '[^']*'", "", text)
            wrong = [
                each for each in known.options if re.search(rf"(?<![\w-])(?<!-o )(?<!--option ){each}=(?!=)", plain)
            ]
            assert not wrong, text
            starts = [each for each in known.options if text.startswith(f"actshard: {each}: ")]
            assert not starts, text
    assert tried


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("pass dtype='bfloat16' to convert", "pass --dtype bfloat16 to convert"),
        ("name a layer 'last', or pass last=NAME; found", "name a layer 'last', or pass -o last=NAME; found"),
        ("pass metadata= with them; x", "pass -o metadata=... with them; x"),
        ("pass columns={'input_ids': [...]}, a list", "in Python, pass columns={'input_ids': [...]}, a list"),
        ("use columns= (--columns) to rename", "use --columns to rename"),
        ("Pass pad=True (--pad) to fill it.", "Pass --pad to fill it."),
        ("pad=True to create() pads shorter ones", "--pad pads shorter ones"),
        ("or pass overflow='allow' (-o overflow=allow).", "or pass -o overflow=allow."),
        ("Pass exist_ok=True (--exist-ok) to accept it", "Pass --exist-ok to accept it"),
        ("Pass them: convert(layers={3: 5, 'a': 7}) now", "Pass them: --layer 3=5,a=7 now"),
        ("damaged; checksums=False reads it anyway", "damaged; checksums=False (in Python) reads it anyway"),
        ("Set nothing=3. Then", "In Python, set nothing=3. Then"),
        ("Use store.stream(scale='x', seed=3).", "Use store.stream(scale='x', seed=3) (in Python)."),
        ("expected name=value, found 'dtype=3'", "expected name=value, found 'dtype=3'"),
        ("/data/layers=3/x: a == b", "/data/layers=3/x: a == b"),
        ("layers={0: [1]} tokens=", "layers={0: [1]} (in Python) --tokens"),
        ("Use actshard.tokens.open_cache.", None),
    ],
)
def test_arguments_become_options(text: str, shown: str | None) -> None:
    found = Spelling.of(leaves()["convert"]).spelled(text)
    assert found == shown if shown is not None else found.startswith("Commands for token caches: info, head")


def test_a_value_with_spaces_is_quoted() -> None:
    stats = Spelling.of(leaves()["stats"])
    assert stats.spelled("layers=['a b', 'c']") == "--layer 'a b,c'"
    assert stats.spelled("last=NAME") == "last=NAME (in Python)"
    assert stats.named("storage_options: expected") == "--storage-option: expected"
    assert stats.named("path: expected") == "PATH: expected"
    assert stats.named("loss: expected") == "loss: expected"
    assert Spelling.of(leaves()["tokenize"]).spelled("set mask_user_turns=False") == "set -o mask_user_turns=false"


@pytest.mark.parametrize("command", ["stats", "plan stats --no-measure", "bench-stream", "convert --dry-run"])
@pytest.mark.parametrize("folder", [CACHE, CACHE.parent])
def test_a_token_cache_is_named_with_its_commands(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = said(capsys, monkeypatch, *command.split(), folder)
    assert "expected activations, found a token cache" in text
    assert "Commands for token caches: info, head, top, report; plot lengths, frequency or packing" in text


@pytest.mark.parametrize("words", ["0-2", "0..2", "0-2,1", "[0, 1, 2]"])
def test_a_range_names_stored_layers(
    words: str,
    data: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = json.loads(said(capsys, monkeypatch, "stats", data["d"], "--layer", words, "--json"))
    assert list(found) == ["0", "1", "2"]
    said(capsys, monkeypatch, "convert", data["d"], tmp_path / "c", "--to", "npy", "-q", "--layer", words)
    assert actshard.open(tmp_path / "c").layers == (0, 1, 2)
    said(capsys, monkeypatch, "stage", data["d"], tmp_path / "s", "-q", "--layers", words)
    assert actshard.open(tmp_path / "s").layers == (0, 1, 2)
    for command in (("convert", data["d"], tmp_path / "p", "--to", "npy", "--layer"), ("stats", data["d"], "--layer")):
        said(capsys, monkeypatch, "plan", *command, words, "--out", tmp_path / f"{command[0]}.json", "--no-measure")
        plan = actshard.plan.load(tmp_path / f"{command[0]}.json")
        assert len(plan.arguments["layers"]) == 3


def test_ranges_without_layers_and_empty_texts_are_refused(
    data: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = said(capsys, monkeypatch, "stats", data["d"], "--layer", "6-8")
    assert "--layer: the range 6-8 contains no stored layer; the layers are [0, 1, 2, 5, 9]" in text
    for command, option in (("stats", "--layer"), ("top", "--layer"), ("convert", "--layer"), ("report", "--layer")):
        assert "expected names of layers, found an empty text" in said(
            capsys, monkeypatch, command, data["d"], f"{option}="
        )
    assert of_store("0-3", ("0-3", "0", "1"), "--layer") == ["0-3"]
    assert of_store("0-3", ("0", "1", "x"), "--layer") == ["0", "1"]


def test_o_is_an_output_file_or_name_value(
    data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, command in leaves().items():
        longest = {max(p.opts, key=len) for p in command.params if "-o" in p.opts}
        assert longest <= {"--out", "--option"}, name
    assert "No such option: -o" in said(capsys, monkeypatch, "stats", data["d"], "-o", "x.json")
    text = said(capsys, monkeypatch, "convert", data["d"], tmp_path / "x", "--to", "npy", "-o", "x.json")
    assert "-o, --option: expected name=value, an option of the target format, found 'x.json'" in text
    text = said(capsys, monkeypatch, "run", data["plan"], "-o", "x.json")
    assert "an option of the engine, found 'x.json'" in text


def test_commands_say_where_results_are_kept(
    data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(data["d"], tmp_path / "d")
    text = said(capsys, monkeypatch, "stats", tmp_path / "d", "--save", "-q")
    assert f"saved in {tmp_path / 'd.stats'}" in text
    said(
        capsys,
        monkeypatch,
        "plan",
        "stats",
        tmp_path / "d",
        "--out",
        tmp_path / "p.json",
        "--no-measure",
        "--work",
        tmp_path / "w",
    )
    text = said(capsys, monkeypatch, "run", tmp_path / "p.json")
    assert f"result kept in {tmp_path / 'w.json'}: another commit prints it again" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("stats", "d", "--rows", "0"), "Invalid value for '--rows': expected at least 1, found '0'"),
        (("stats", "d", "--rows", "x"), "Invalid value for '--rows': expected an integer, found 'x'"),
        (("top", "d", "--largest", "99"), "Invalid value for '--largest': expected at most 20, found '99'"),
        (("run", "d", "--cpus", "x"), "Invalid value for '--cpus': expected a number, found 'x'"),
        (("completion",), "Missing argument 'SHELL': expected one of bash, zsh, fish"),
        (("completion", "csh"), "expected one of 'bash', 'zsh', 'fish', found 'csh'"),
        (("plot",), "[OPTIONS] PATH WHAT"),
    ],
)
def test_errors_of_the_parser_are_plain(
    words: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = said(capsys, monkeypatch, *words)
    assert expected in text
    assert not re.search(r"Input should|Value error|[{}]", text)


@pytest.mark.parametrize("name", leaves())
def test_help_has_no_types_of_python(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = said(capsys, monkeypatch, *name.split(), "--help")
    assert not re.search(r"<(int|str|float)|\{\w+\}", text)


def test_changed_inputs_are_shown_with_times() -> None:
    told = inputs.told_versions(1795662543555631970, 1795663230815570888)
    assert told == "expected modification time 2026-11-26T03:09:03Z, found 2026-11-26T03:20:30Z"
    told = inputs.told_versions(1795662543555631970, 1795662543555631971)
    assert told.endswith("03:09:03.555631970Z, found 2026-11-26T03:09:03.555631971Z")
    assert inputs.told_versions('"a1"', '"b2"') == 'expected ETag "a1", found "b2"'
