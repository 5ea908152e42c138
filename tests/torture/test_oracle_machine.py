"""A state machine that compares every reading verb with ``tests/oracle``, over chains of verbs that make stores from stores.

It writes three datasets of any format, some of which lose files and are opened with ``incomplete="skip"``, draws filters, splits,
joins, pairs, pickles, forks and conversions, and reads the stores in all ways. Each step has a seed, from which its arguments come.
Hypothesis shrinks the steps of its runs, of which many are alike; numbered runs differ.
"""

from __future__ import annotations

import itertools
import pickle
import random
import shutil
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from tests.oracle.examples import Examples, cast
from tests.torture import gap_cases, oracle_checks
from tests.torture.budget import CountedMachine, first_number, machine_settings, runs
from tests.torture.datasets import in_a_child
from tests.torture.oracle_cases import DTYPES, PLAIN, Case, draw_key, make, make_twin
from tests.torture.oracle_checks import plain

import actshard

pytestmark = [pytest.mark.machine, pytest.mark.filterwarnings("ignore::actshard.ActshardWarning")]

MOST_EXAMPLES = 40
DERIVATIONS = ["filter", "filter_by_a_column", "split", "concat", "concat", "carry", "convert", "pair_as_store"]
READS = [
    "gather", "last_tokens", "sequences", "index", "stream", "stream", "rescaled", "normalizer", "sequences_stream", "stats",
    "mixture", "pair",
]  # fmt: skip
SEEDS = st.integers(0, 2**24 - 1)
"""Wider ranges are not drawn from uniformly."""


class OracleMachine(CountedMachine):
    """Stores and their oracles."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="actshard-oracle-"))
        self.folders = itertools.count()
        self.cases: list[Case] = []

    def folder(self) -> Path:
        return self.root / f"d{next(self.folders)}"

    def pick(self, draw: random.Random) -> Case:
        """Often the newest store, so that chains of verbs are long."""
        return self.cases[-1] if draw.random() < 0.3 else draw.choice(self.cases)

    def add(self, draw: random.Random, case: Case) -> None:
        """Checks what a store is made of, and keeps it. Small ones only, so that every step is fast."""
        if len(case.data) <= MOST_EXAMPLES:
            oracle_checks.check_facts(draw, case)
            oracle_checks.check_table(draw, case)
            self.cases = [*self.cases[-9:], case]

    @initialize(seed=SEEDS, io=st.sampled_from(["auto", "mmap", "pread"]))
    def write(self, seed: int, io: str) -> None:
        draw = random.Random(seed)
        for _ in range(3):
            write = gap_cases.make if draw.random() < 0.2 else make
            self.add(draw, write(draw, self.folder(), io))
        if draw.random() < 0.5 and (twin := make_twin(draw, self.cases[0], self.folder(), io)) is not None:
            self.add(draw, twin)

    # -- stores from stores --------------------------------------------------------------------------------------------

    def filter(self, draw: random.Random) -> None:
        case = self.pick(draw)
        for _ in range(draw.randint(1, 3)):
            key = draw_key(draw, len(case.data))
            name = f"{case.name}.filter({key})"
            case = replace(case, store=case.store.filter(key), data=case.data.filter(key), name=name)
            self.add(draw, case)

    def filter_by_a_column(self, draw: random.Random) -> None:
        case = self.pick(draw)
        if "label" not in case.data.columns:
            return
        value = draw.randrange(3)
        key: Any = pc.field("label") == value if draw.random() < 0.5 else lambda table: pc.equal(table["label"], value)
        flags = [label == value for label in case.data.values("label")]
        data = case.data.filter(np.array(flags, bool))
        self.add(draw, replace(case, store=case.store.filter(key), data=data, name=f"{case.name}.filter(label)"))

    def split(self, draw: random.Random) -> None:
        case = self.pick(draw)
        by = draw.choice([None, *[name for name in ("label", "topic", "score") if name in case.data.columns]])
        groups = [plain(x) for x in (case.data.values(by) if by else range(len(case.data)))]
        test: Any = draw.choice([0.3, 0.5, 1])
        if len({str(x) for x in groups}) < 2 or not 0 < (test if isinstance(test, float) else test / len(groups)) < 1:
            with oracle_checks.refused(actshard.ArgumentError):
                case.store.split(test, by=by)
            return
        number = draw.randrange(3)
        halves = case.store.split(test, by=by, seed=number)
        again = pickle.loads(pickle.dumps(case.store)).split(test, by=by, seed=number)
        datas = []
        for half, same in zip(halves, again, strict=True):
            assert half.chosen.tolist() == same.chosen.tolist()
            datas.append((case.data.whole or case.data).choose(half.chosen.tolist()))
        numbers = list(range(len(case.data))) if case.data.numbers is None else case.data.numbers
        assert Counter(numbers) == Counter(halves[0].chosen.tolist()) + Counter(halves[1].chosen.tolist())
        wanted = test * len(numbers) if isinstance(test, float) else test
        if by is None:
            assert len(halves[1]) == min(max(round(wanted), 1), len(numbers) - 1) or wanted % 1 == 0.5
            for half in halves:
                case.data.split_positions(half.chosen.tolist())  # in stored order
        else:
            sides = [{str(plain(x)) for x in data.values(by)} for data in datas]
            assert not sides[0] & sides[1]
            assert sides[0]
            assert sides[1]
            # Whole groups in some order, until one more would not be nearer: the next one is in the other side.
            excess = len(halves[1]) - wanted
            side = sides[0] if excess < 0 else sides[1]
            sizes = Counter(str(x) for x in groups)
            assert len(side) == 1 or max(sizes[x] for x in side) >= 2 * abs(excess)
        side = draw.randrange(2)
        self.add(draw, replace(case, store=halves[side], data=datas[side], name=f"{case.name}.split({by})[{side}]"))

    def concat(self, draw: random.Random) -> None:
        cases = [self.pick(draw) for _ in range(draw.randint(1, 3))]
        layers = [x for x in cases[0].data.layers if all(x in case.data.layers for case in cases)]
        dtypes, specials = {case.data.dtype for case in cases}, {case.data.special for case in cases}
        options: dict[str, Any] = {} if draw.random() < 0.5 else {"layers": draw.sample(layers, len(layers))}
        if len(dtypes) > 1:
            options["dtype"] = draw.choice(["float32", "float64"])
        if len(specials) > 1 or draw.random() < 0.4:
            options["special_tokens"] = draw.randrange(3)
        stores = [case.store for case in cases]
        if not layers or ("layers" not in options and len({frozenset(case.data.layers) for case in cases}) > 1):
            with oracle_checks.refused(actshard.ArgumentError):
                actshard.concat(stores, **options)
            return
        special = options.get("special_tokens", cases[0].data.special)
        data = Examples.concat([case.data for case in cases], options.get("layers"), options.get("dtype"), special)
        name, lasts = f"concat({', '.join(case.name for case in cases)})", any(case.has_last_rows for case in cases)
        self.add(draw, Case(actshard.concat(stores, **options), data, name, lasts))

    def carry(self, draw: random.Random) -> None:
        case = self.pick(draw)
        self.add(draw, replace(case, store=pickle.loads(pickle.dumps(case.store)), name=f"{case.name}.pickle"))

    def convert(self, draw: random.Random) -> None:
        case = self.pick(draw)
        data = case.data
        if data.special or data.content_lengths is not None or data.lacks_layers or not sum(data.token_counts):
            return
        if any(isinstance(layer, str) for layer in data.layers):
            return
        format = draw.choice([*PLAIN, "saev"])
        options: dict[str, Any] = {"overflow": "allow"}
        if format == "lmprobe":
            options["storage"] = "full_sequence"
        dtype = data.dtype
        if dtype.name not in DTYPES[format]:
            options["dtype"] = "float32"
            dtype = np.dtype(np.float32)
        if format == "saev" and len(set(data.token_counts)) > 1:
            return
        if format == "saev" and "patch_labels" in data.columns:  # joined with others, perhaps of other lengths
            lists = zip(data.values("patch_labels"), data.token_counts, strict=True)
            if any(len(labels or []) != tokens for labels, tokens in lists):
                return
        folder, paths = self.folder(), list[Any]()
        error = oracle_checks.refusal(
            lambda: paths.append(actshard.convert(case.store, folder, format, **options).path)
        )
        if error is not None:
            # Pickle shards number examples: a join may have a number twice, or none. Examples that are left out lack all layers.
            contents = case.store.contents
            reason = "lacks layer" if contents.lacks_layers or contents.absence else "sample_idx: expected"
            assert reason in str(error) or "sample_idx: expected" in str(error), repr(error)
            return
        # A column of nulls has no type: formats leave it out.
        columns = [name for name in data.columns if any(value is not None for value in data.values(name))]
        stored = replace(data, columns=columns)
        stored = stored.column_as_labels() if format == "saev" else stored.labels_as_column()
        examples = [
            replace(example, rows={layer: cast(rows, dtype) for layer, rows in example.rows.items()})
            for example in stored.examples
        ]
        after = Examples(
            examples, list(data.layers), data.d_model, dtype, columns=stored.columns, patches=stored.patches
        )
        self.add(draw, Case(actshard.open(paths[0]), after, f"{case.name}.convert({format})", format == "lmprobe"))

    def pair_as_store(self, draw: random.Random) -> None:
        case, other = self.two_alike(draw)
        if case.data.lacks_layers or case.data.dtype != other.data.dtype or case.data.layers != other.data.layers:
            return
        if any(":" in str(layer) for layer in case.data.layers):
            return
        store = actshard.pair({"a": case.store, "b": other.store}, compare=[]).as_store()
        names = {(s, layer): f"{'ab'[s]}:{layer}" for s in (0, 1) for layer in case.data.layers}
        examples = [
            replace(x, rows={names[s, la]: rows for s, each in enumerate((x, y)) for la, rows in each.rows.items()})
            for x, y in zip(case.data.examples, other.data.examples, strict=True)
        ]
        data = replace(case.data, examples=examples, layers=list(names.values()), numbers=None, whole=None, parts=[])
        self.add(draw, Case(store, data, f"pair({case.name}, {other.name})", case.has_last_rows or other.has_last_rows))

    @rule(name=st.sampled_from(DERIVATIONS), seed=SEEDS)
    def derive(self, name: str, seed: int) -> None:
        """A store from others."""
        getattr(self, name)(random.Random(seed))

    def two_alike(self, draw: random.Random) -> tuple[Case, Case]:
        """Two stores of examples with equal numbers of tokens."""
        case = self.pick(draw)

        def tokens(data: Examples) -> Any:
            content = [data.content_of(example) for example in data.examples]
            return [data.tokens_in(layer) for layer in data.layers], content, data.special

        alike = [x for x in self.cases if x.data.layers == case.data.layers and tokens(x.data) == tokens(case.data)]
        return case, draw.choice(alike)

    # -- reading -------------------------------------------------------------------------------------------------------

    def read_one(self, draw: random.Random, name: str) -> None:
        """One reading verb of one store, or of several."""
        if name == "mixture":
            cases = self.cases
            labelled = [case for case in cases if case.data.labels is not None]
            if labelled and draw.random() < 0.75:  # then the batches have labels
                cases = labelled
            oracle_checks.check_mixture(draw, [draw.choice(cases) for _ in range(draw.randint(1, 3))])
        elif name == "pair":
            case, other = self.two_alike(draw)
            if not case.data.lacks_layers:
                oracle_checks.check_pair(draw, case, other)
        elif name == "normalizer":
            case = self.pick(draw)
            others = [other for other in self.cases if set(case.data.layers) & set(other.data.layers)]
            oracle_checks.check_normalizer(draw, case, case if draw.random() < 0.5 else draw.choice(others))
        else:
            getattr(oracle_checks, f"check_{name}")(draw, self.pick(draw))

    @rule(name=st.sampled_from(READS), seed=SEEDS)
    def read(self, name: str, seed: int) -> None:
        """One verb, sometimes in a forked child."""
        draw = random.Random(seed)
        if draw.random() < 0.15:
            in_a_child(lambda: self.read_one(draw, name))
        else:
            self.read_one(draw, name)

    def teardown(self) -> None:
        for case in self.cases:
            case.store.close()
        shutil.rmtree(self.root, ignore_errors=True)


TestOracle = OracleMachine.TestCase
TestOracle.settings = machine_settings(30, 10_000, steps=30)


def run(number: int, steps: int = 30) -> None:
    """A run whose steps are drawn evenly: of 1,264 steps of hypothesis, 342 were different ones."""
    draw, machine = random.Random(number), OracleMachine()
    try:
        machine.write(draw.randrange(1 << 24), draw.choice(["auto", "mmap", "pread"]))
        for _ in range(steps):
            rule_of_step, names = draw.choice([(machine.derive, DERIVATIONS), (machine.read, READS)])
            rule_of_step(draw.choice(names), draw.randrange(1 << 24))
    finally:
        machine.teardown()


def test_numbered_runs_agree_with_the_oracle() -> None:
    for number in range(first_number(), first_number() + runs(120, 100_000)):
        try:
            run(number)
        except Exception as error:
            error.add_note(f"tests.torture.test_oracle_machine.run({number})")
            raise
