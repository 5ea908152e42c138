"""Module structure: floors import only lower floors, there are no circles, and format names stay in their folders."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import actshard
from actshard import formats
from actshard.base import codes
from actshard.formats import Format, registry
from conftest import GOLDEN, install
from sources import PACKAGE as ROOT
from sources import forget_sources, nodes, nodes_of, parse

__all__ = ["forget_sources"]

FLOORS: tuple[tuple[str, ...], ...] = (
    ("base", "reading", "looking"),  # only a docstring
    ("_native", "base.errors", "base.codes", "base.logs", "base.late"),
    ("base._arguments", "base._columns", "base.storage"),
    ("base.location", "streaming.epochs", "reading.chosen", "base.layers"),
    ("base._json", "base.containers"),
    ("base._schema",),
    ("base.request",),
    ("base.work",),
    ("base.walking",),
    ("tokens",),
    ("formats",),
    ("latents",),
    ("reading.finding",),
    ("writing.columns",),
    ("writing.given",),
    ("looking.stats", "streaming.quality", "reading.caching", "reading.absent"),
    ("streaming",),
    ("reading.inputs", "reading.conditions"),
    (
        "reading.arrays",
        "reading.choosing",
        "streaming.comparing",
        "reading.describing",
        "reading.joining",
        "looking.saved",
    ),
    ("looking.sampled", "reading.extending"),
    ("reading.store",),
    ("reading.opening", "looking.examining"),
    ("reading.verifying", "writing.merging", "streaming.mixing", "streaming.pairing"),
    ("writing.pushing",),
    ("writing",),
    ("writing.converting", "writing.capturing"),
    ("writing.staging",),
    ("plan",),
    ("plan.runners",),
    ("torch", "jax", "hf", "plot"),
    ("looking.reporting",),
    ("",),  # the package itself: its public names
    ("compat", "cli"),
    ("__main__",),
)
"""Files and folders of the package, from the ground up. Modules do not import others of their own floor."""

FORMATS: tuple[tuple[str, ...], ...] = (
    ("foreign",),
    ("contents", "tables", "target", "report", "kept", "options", "numbered", "candidates", "torch_zip"),
    ("carrying", "merging", "per_token", "scales"),
    ("draft_examples",),
    ("draft_torch", "draft_writing"),
    ("format",),
    ("registry",),
    ("plain_folders",),
    ("plain_writing",),
    ("",),  # the folder itself: imported by plugins
    ("*",),  # a format's folder
)
"""Floors within ``formats/``."""


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in ROOT.rglob("*.py")}


@functools.cache
def imports(module: str) -> tuple[tuple[str, int], ...]:
    """actshard modules that a module imports, with line numbers. Includes local imports and those for types only."""

    def visit() -> Iterator[tuple[str, int]]:
        for node in nodes(MODULES[module]):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.partition(".")[0] == "actshard":
                        yield alias.name.removeprefix("actshard").removeprefix("."), node.lineno
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "actshard":
                base = (node.module or "").removeprefix("actshard").removeprefix(".")
                for alias in node.names:
                    full = f"{base}.{alias.name}".removeprefix(".")
                    yield (full if full in MODULES else base), node.lineno

    return tuple((name, line) for name, line in visit() if name != module)


def floor_of(module: str) -> tuple[int, int, str]:
    """The floor of a module, the floor within ``formats/``, and the file or folder that the module belongs to."""
    numbers = {name: number for number, names in enumerate(FLOORS) for name in names}
    parts = module.split(".")
    place = next((name for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in numbers), None)
    if place is None:
        raise AssertionError(f"{module} has no floor: add {parts[0]} to FLOORS")
    number = numbers[place]
    if place != "formats":
        return number, 0, place
    inside = ".".join(parts[1:2])
    own = next((i for i, names in enumerate(FORMATS) if inside in names), len(FORMATS) - 1)
    assert own < len(FORMATS) - 1 or MODULES[f"formats.{inside}"].name == "__init__.py", f"{module}: add it to FORMATS"
    return number, own, f"formats.{inside}"


def test_no_module_imports_one_of_a_floor_above() -> None:
    """Nor another file or folder of the same floor."""
    upward = []
    for module in MODULES:
        *own, place = floor_of(module)
        for found, line in imports(module):
            *floor, theirs = floor_of(found)
            if floor > own or (floor == own and theirs != place):
                upward.append(f"{module or 'actshard'}:{line} imports {found or 'actshard'}")
    assert upward == []


def test_a_reader_meets_few_rooms() -> None:
    """Each is a noun or a verb of the field. ``_demo`` is the bundled dataset."""
    rooms = {
        path.stem for path in ROOT.iterdir() if not path.name.startswith(("_", ".")) and path.suffix in ("", ".py")
    }
    assert len(rooms) <= 15, sorted(rooms)


def test_formats_do_not_know_each_other() -> None:
    folders = {name.split(".")[1] for name in MODULES if name.count(".") == 2 and name.startswith("formats.")}
    across = [
        f"{module}:{line} imports {found}"
        for module in MODULES
        for found, line in imports(module)
        if module.startswith("formats.") and found.startswith("formats.")
        if {module.split(".")[1], found.split(".")[1]} <= folders and module.split(".")[1] != found.split(".")[1]
    ]
    assert across == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    below = {module: {found for found, _ in imports(module) if found in MODULES} for module in MODULES}
    while True:  # a module that imports none of the remaining ones is in no circle
        free = {module for module, found in below.items() if not found & below.keys()}
        if not free:
            break
        below = {module: found for module, found in below.items() if module not in free}
    # Remove modules that none of the remaining ones import: they lead to circles but are in none.
    while above := below.keys() - {found for all_found in below.values() for found in all_found}:
        below = {module: found for module, found in below.items() if module not in above}
    assert sorted(below) == []


NAMES = re.compile(rf"\b({'|'.join(registry.installed())})\b")
ROOMS = (
    "reading.opening",
    "reading.finding",
    "reading.store",
    "streaming",
    "writing.merging",
    "writing",
    "writing.converting",
    "reading.verifying",
    "writing.pushing",
    "cli",
)


def test_no_format_is_named_outside_its_folder() -> None:
    """Docstrings may name formats. All other code asks the registry."""
    found = []
    for module, path in MODULES.items():
        if floor_of(module)[-1] not in ROOMS:
            continue
        explained = {id(node.value) for node in nodes_of(path, ast.Expr) if isinstance(node.value, ast.Constant)}
        for node in nodes(path):
            texts: list[str] = []
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in explained:
                texts = [node.value]
            elif isinstance(node, ast.Name):
                texts = [node.id.replace("_", " ")]
            elif isinstance(node, ast.Attribute):
                texts = [node.attr.replace("_", " ")]
            elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.arg):
                texts = [(node.arg if isinstance(node, ast.arg) else node.name).replace("_", " ")]
            elif isinstance(node, ast.ImportFrom):
                texts = [(node.module or "").replace(".", " ")]
            found += [f"{module}:{node.lineno}: {text!r}" for text in texts if NAMES.search(text)]  # type: ignore[attr-defined]
    assert found == []


def test_detecting_imports_no_writer() -> None:
    """Nor pyarrow, except for a folder with parquet files, whose metadata only pyarrow can read."""
    code = f"""
        import sys
        from pathlib import Path
        from actshard.base import codes; from actshard import formats
        found = set()
        for path in Path({str(GOLDEN)!r}).glob("*/*"):
            if not (path / "index").exists() and not [*path.glob("*.parquet"), *path.glob("data/*.parquet")]:
                found |= {{name for name in formats.names() if formats.get(name).detect(path).matches}}
        assert len(found) >= 2, found
        loaded = [name for name in sys.modules if name.startswith("actshard.formats.") and name.split(".")[-1] in
                  ("write", "merge", "check", "columns")]
        assert not loaded, loaded
        assert "pyarrow" not in sys.modules
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], check=True)


def test_opening_a_dataset_does_not_import_pandas() -> None:
    """It takes a second in each new process, such as a command or a task of a plan."""
    code = f"""
        import importlib.abc, sys
        from pathlib import Path
        import actshard

        class Refused(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name == "pandas":
                    asked.append(name)

        asked = []
        sys.meta_path.insert(0, Refused())
        opened = 0
        for path in sorted(Path({str(GOLDEN)!r}).glob("*/*")):
            try:
                store = actshard.open(path)
            except actshard.ActshardError:
                continue
            opened += 1
            len(store.token_counts)
            assert not asked, path
        assert opened > 50, opened
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], check=True)


def test_importing_actshard_loads_nothing_of_urls_and_arrays() -> None:
    code = """
        import sys
        import actshard
        loaded = {name for name in sys.modules if name.startswith("actshard.")}
        lazy = "writing.staging writing.pushing reading.caching reading.choosing reading.chosen"
        lazy = f"{lazy} reading.joining streaming.mixing streaming.pairing".split()
        lazy = {f"actshard.{name}" for name in lazy}
        assert not loaded & lazy, loaded & lazy
        assert "tempfile" not in sys.modules
        assert {"stage", "push", "cache_info"} <= set(dir(actshard))
        assert actshard.stage is actshard.writing.staging.stage
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], check=True)


@pytest.mark.parametrize("name", registry.installed())
def test_the_rooms_that_a_format_names_are_in_its_folder(name: str) -> None:
    format = formats.get(name)
    for method, place in format.rooms.items():
        assert re.fullmatch(r"\.\w*:\w+", place), (method, place)
        assert hasattr(Format, method)
        assert callable(format._in_room(method))
    assert format.writes == ("target" in format.rooms)
    assert format.opens_several == ("open_several" in format.rooms)
    assert ("open" in format.rooms) == (format.holds == "activations")
    assert {"detect", "check"} <= set(format.rooms)


ON_PATHS = {
    "base.location": "the file system itself",
    "base.storage": "the file system itself",
    "base.work": "locks, journals and whole files of writers, which write local folders",
    "formats.kept": "keeps indexes in the user's cache folder; compares change times and inodes of local files",
    "formats.*.write": "writes",
    "formats.*.chunks": "files of a writer",
    "formats.*.merge": "writes",
    "writing": "writes",
    "writing.merging": "moves and links what it merges",
    "writing.converting.previewing": "counts what it wrote to a scratch folder",
    "plan.book": "the working folder of a plan",
    "plan.converting": "renames the files of tasks",
    "plan.creating": "looks at the parts that its tasks wrote",
    "plan.merging": "copies files",
    "plan.reading": "reads the arrays that tasks wrote",
    "writing.pushing": "uploads local files",
    "formats.merging": "links",
    "formats.target": "looks at what is in the way of a writer",
    "formats.draft_writing": "writes",
    "formats.plain_writing": "writes",
    "writing.staging": "copies to this machine's disk",
    "reading.caching": "a folder of this machine",
    "compat.speculators.transfer": "writes rows for speculators beside a store",
    "compat.saev.loaders": "copies a dump to this machine's disk",
    "latents.writing": "writes",
    "tokens.writing": "writes",
    "tokens.building": "writes",
    "tokens.recipe": "looks at what is in the way of a build",
    "tokens.placing": "puts what was built in its place",
    "tokens.shards": "writes",
}
"""Modules that work on local paths, with reasons. All others read user data through ``Location``."""
PAST_LOCATION = {"glob", "rglob", "iglob", "iterdir", "scandir", "listdir", "walk", "is_file", "is_dir", "isfile", "isdir",
                 "read_bytes", "read_text", "memmap", "fromfile", "st_size", "st_mtime_ns", "fstat", "lexists"}  # fmt: skip


def reads_paths(module: str) -> list[str]:
    """Places where a module reads a file or lists a folder without ``Location``."""
    path = MODULES[module]
    own = {node.name for node in nodes_of(path, ast.FunctionDef)}
    own |= {alias.asname or alias.name for node in nodes_of(path, ast.ImportFrom) for alias in node.names}
    return [
        f"{module}:{node.lineno}: {ast.unparse(node)[:60]}"
        for node in nodes(path)
        if (
            isinstance(node, ast.Attribute)
            and (node.attr in PAST_LOCATION or (node.attr == "load" and ast.unparse(node) == "np.load"))
        )
        or (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "open"
            and "open" not in own
        )
    ]


def on_paths(module: str) -> str | None:
    """The entry of ``ON_PATHS`` that allows a module to work on paths."""
    parts = module.split(".")
    if parts[0] == "formats" and len(parts) > 2 and f"formats.*.{parts[2]}" in ON_PATHS:
        return f"formats.*.{parts[2]}"
    return next((name for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in ON_PATHS), None)


def test_user_data_is_read_through_locations_only() -> None:
    reads = {module: reads_paths(module) for module in MODULES}
    assert [place for module, places in reads.items() if on_paths(module) is None for place in places] == []
    assert {on_paths(module) for module, places in reads.items() if places} == set(ON_PATHS), "take off what is freed"


PICKLED = {
    "reading.arrays": "LayerArray RowArray",
    "reading.chosen": "Chosen",
    "base.codes": "Remark",
    "compat.levanter": "CausalLmDataset ChatDataset LmDataConfig PackedTokenDataset PrebuiltLmDataset TokenSeqDataset TreeCache "
    "_Training _Prepared",
    "writing.converting.planning": "Loss",
    "writing.converting.running": "Conversion",
    "formats.report": "Finding Report",
    "base.location": "Local Location Memory",
    "plan.plan": "Plan",
    "plan.creating": "CreatePlan",
    "streaming.pairing": "PairedBatch PairedStores PairedStream",
    "writing.staging": "Staged",
    "looking.stats": "Stats",
    "reading.store": "Store",
    "streaming": "Batch Stream",
    "streaming.sequences": "SequenceBatch SequenceStream",
    "tokens.cache": "TokenCache",
    "tokens.config": "BlockShuffleConfig DatasetComponent HfDatasetSourceConfig LmDataConfig UrlDatasetSourceConfig",
    "tokens.examples": "Batch TokenBatch CausalLmDataset ChatDataset PackedTokenDataset PrebuiltLmDataset TokenSeqDataset",
    "tokens.formats": "ChatFormat PrebuiltFormat SupervisedFormat TextFormat",
    "tokens.mixing": "Mixture Permuted Sliced",
    "tokens.orders": "Permutation",
    "tokens.stream": "TokenStream",
}
"""Classes by the names that pickles of this release hold; a class that moves later stays importable from its old module."""


def test_pickles_find_their_classes() -> None:
    for module, names in PICKLED.items():
        found = importlib.import_module(f"actshard.{module}")
        assert [name for name in names.split() if not isinstance(getattr(found, name, None), type)] == []


TWICE = {
    "Batch": "actshard.Batch and actshard.tokens.Batch are public",
    "Stream": "the native half of actshard.Stream",
}
"""Names used by two types, with reasons. ``compat`` uses the names of the originals."""


def test_a_type_name_means_one_thing() -> None:
    places: dict[str, set[str]] = {}
    for module, path in [*MODULES.items(), ("_native", ROOT / "_native.pyi")]:
        if module.partition(".")[0] == "compat":
            continue
        for node in parse(path).body:
            names = [node.name] if isinstance(node, ast.ClassDef) else []
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp | ast.Name):
                names = [x.id for x in node.targets if isinstance(x, ast.Name) and re.match(r"_?[A-Z]\w*[a-z]", x.id)]
            for name in names:
                places.setdefault(name.lstrip("_"), set()).add(module)
    assert {name: found for name, found in places.items() if len(found) > 1 and name not in TWICE} == {}
    assert {name for name in TWICE if len(places[name]) < 2} == set()


def test_rooms_and_functions_are_short() -> None:
    """Lines of a file, and of a function without its docstring. Tests may contain long tables."""
    tests = [path for path in Path(__file__).parent.rglob("*.py") if not path.is_relative_to(GOLDEN)]
    functions = {}
    rooms = {str(path): path.read_text().count("\n") for path in [*MODULES.values(), *tests]}
    for path in MODULES.values():
        for node in nodes_of(path, ast.FunctionDef):
            explained = len((ast.get_docstring(node, clean=False) or "").splitlines())
            functions[f"{path}: {node.name}"] = (node.end_lineno or 0) - node.lineno + 1 - explained
    assert {name: lines for name, lines in rooms.items() if lines > 800} == {}
    assert {name: lines for name, lines in functions.items() if lines > 80} == {}


WIDE = {
    "compat.speculators.datasets.__init__",  # the signatures of other packages
    "looking.reporting.report",
    "plan.capturing.capture",
    "plan.converting.convert",
    "plan.creating.create",
    "plan.runners.slurm.execute",
    "plan.tokenizing.tokenize",
    "streaming.verbs.sequences_stream",
    "streaming.verbs.stream",
    "tokens.building.build_cache",
    "writing.capturing.capture",
    "writing.capturing.request_files.fold",
    "writing.converting.running.convert",
    "writing.creating.create",
}
"""Verbs, whose keyword arguments are public. Below them, a value carries the arguments of a group."""


def test_only_verbs_and_commands_have_many_parameters() -> None:
    wide = set()
    for module, path in MODULES.items():
        if module.partition(".")[0] == "cli":
            continue
        for node in nodes_of(path, ast.FunctionDef):
            names = [x.arg for x in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            if len([name for name in names if name not in ("self", "cls")]) > 12:
                wide.add(f"{module}.{node.name}")
    assert wide == WIDE


def test_few_types_are_unknown() -> None:
    """Values that are only passed on are ``object``. ``Any`` is for results that users compute with, and for missing types."""
    count = sum(node.id == "Any" for path in MODULES.values() for node in nodes_of(path, ast.Name))
    lines = sum(path.read_text().count("\n") for path in MODULES.values())
    assert 1000 * count / lines < 8.5


def test_engines_are_thin() -> None:
    """What runs tasks is theirs: an adapter that grows does an engine's work."""
    lines = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "plan/runners").glob("*.py")}
    assert lines
    assert {name: count for name, count in lines.items() if count > 150} == {}


PLUGIN = """
from pathlib import Path

import numpy as np

from actshard._native import Rows
from actshard.formats import Contents, Evidence, Format


class Flat(Format):
    name = "flat"
    description = "files of float32 rows"

    def detect(self, path):
        found = (path / "rows.f32").exists()
        return Evidence(found, "a folder with rows.f32", "rows.f32" if found else "none")

    def open(self, path, options):
        n = (path / "rows.f32").stat().st_size // 16
        rows = Rows.strided(
            [(path / "rows.f32", n)], num_examples=n, examples_per_file=n, num_groups=1, num_tokens=1, width=4, dtype="F32",
            descr=np.dtype(np.float32), io=options.io,
        )

        def columns(names):
            import pyarrow as pa

            return pa.table({name: [] for name in names})

        return Contents(
            format=self.name, path=path, metadata={"made": "by hand"}, layers=(7,), d_model=4, dtype=np.dtype(np.float32),
            num_examples=n, token_counts=lambda: np.ones(n, np.int64), rows=rows, column_names=(), tokens_each=1,
            columns=columns, files=lambda: [path / "rows.f32"],
        )
"""


def test_another_package_adds_a_format(plugins: Path, tmp_path: Path) -> None:
    install(plugins, "flat_plugin", PLUGIN, "flat = flat_plugin:Flat")
    rows = np.arange(20, dtype=np.float32).reshape(5, 4)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/rows.f32").write_bytes(rows.tobytes())
    store = actshard.open(tmp_path / "data")
    assert store.format == "flat"
    assert np.array_equal(store.last_tokens(7), rows)
    assert np.array_equal(np.concatenate([b.activations for b in store.stream(7, 2)]), rows)
    assert actshard.verify(tmp_path / "data", deep=True).format == "flat"
    plain = [name for name in formats.written() if not formats.get(name).target().needs_columns]
    assert len(plain) >= 4
    for name in plain:
        made = actshard.convert(tmp_path / "data", tmp_path / name, name, verify=True).path
        assert np.array_equal(actshard.open(made).last_tokens(7), rows)
    assert "flat" not in formats.written()


WITH_LAYOUT = PLUGIN.replace(
    "    def detect(",
    """    takes_layout = True

    def read_layout(self, layout):
        import json

        return layout if isinstance(layout, dict) else json.loads(Path(layout).read_text())

    def detect(""",
).replace("layers=(7,)", 'layers=(options.layout["layer"],)')


def test_plans_keep_the_layout_that_a_plugin_has_read(plugins: Path, tmp_path: Path) -> None:
    install(plugins, "flat_plugin", WITH_LAYOUT, "flat = flat_plugin:Flat")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/rows.f32").write_bytes(np.arange(20, dtype=np.float32).tobytes())
    layout = tmp_path / "my.json"
    layout.write_text('{"layer": 3}')
    store = actshard.open(tmp_path / "data", format="flat", layout=layout)
    plans = [
        make(tmp_path / "data", format="flat", layout=layout, work=tmp_path / make.__name__)
        for make in (actshard.plan.stats, actshard.plan.verify)
    ]
    layout.write_text('{"layer": 9}')
    found, report = (actshard.run(plan) for plan in plans)
    assert list(found) == [3]
    assert found[3].mean.tobytes() == store.stats(3).mean.tobytes()
    assert report.ok


def test_a_format_that_cannot_be_loaded_is_a_warning(plugins: Path) -> None:
    install(
        plugins, "broken_plugin", "raise ZeroDivisionError('no')", "broken = broken_plugin:X", "saev = json:JSONDecoder"
    )
    with pytest.warns(actshard.ActshardWarning) as caught:
        formats.names()
    told = [str(w.message) for w in caught]
    assert any("'broken' (broken_plugin:X) is not used: ZeroDivisionError: no" in text for text in told)
    assert any("'saev' (json:JSONDecoder) is not used: expected an actshard.formats.Format" in text for text in told)
    assert {"saev", "lmprobe", "zarr", "pickle"} <= set(formats.names())


FAULTY = """
from actshard.formats import Evidence, Format


class Faulty(Format):
    name = "faulty"

    def detect(self, path):
        return Evidence(False, "a", "b")


class Raises(Faulty):
    def detect(self, path):
        raise KeyError("detect")

    def begun(self, path):
        raise KeyError("begun")

    def remains(self, names):
        raise KeyError("remains")


class Answers(Faulty):
    detect = begun = lambda self, path: None


class Slashed(Faulty):
    name = "a/b"


class Tokens(Faulty):
    holds = "tokens"


class Codes(Faulty):
    findings = ("a code",)


class Unordered(Faulty):
    order = None


class Exits(Faulty):
    def __init__(self):
        raise SystemExit(3)
"""


@pytest.mark.filterwarnings("ignore:format plugin:actshard.ActshardWarning")
@pytest.mark.parametrize("fault", ["Raises", "Answers", "Slashed", "Tokens", "Codes", "Unordered", "Exits"])
def test_a_faulty_plugin_does_not_keep_other_datasets_from_being_read(
    plugins: Path, tmp_path: Path, fault: str
) -> None:
    install(plugins, "broken_plugin", FAULTY, f"faulty = broken_plugin:{fault}")
    codes.findings.cache_clear()
    empty, cache = tmp_path / "empty", tmp_path / "above/cache"
    empty.mkdir()
    cache.mkdir(parents=True)
    (cache / "shard_ledger.json").write_text("{}")
    try:
        with actshard.create(tmp_path / "own", "pickle", layers=[0], d_model=2, part=(0, 1)) as writer:
            writer.append(np.ones((1, 1, 3, 2), np.float32))
        made = actshard.merge(tmp_path / "own")
        assert actshard.open(made).format == "pickle"
        assert actshard.verify(made).ok
        assert actshard.verify(cache.parent).format == "levanter"
        assert not actshard.verify(empty).ok
        for path in (empty, cache.parent):
            with pytest.raises(actshard.UnknownFormatError):
                actshard.open(path)
    finally:
        codes.findings.cache_clear()
