"""Random actors over one folder: writers, conversions, merges, plans, staged copies, a user, and kills, against a model.

The model (``place_model``) knows what lies at each place and what each verb must do there. After every step:

- no file that the verb did not write is removed or changed, and an error leaves every byte as it was;
- a verb that returns leaves exactly the requested rows, lengths, layers and labels, and no working files;
- ``open`` shows one request, never a mixture, or raises as the model expects.

After kills, the same call again gives the result that it had given without.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test
from tests.torture import place_calls as calls
from tests.torture import place_model as model
from tests.torture.budget import CountedMachine, machine_settings
from tests.torture.place_calls import CHOICES, Child, Contents, Outcome, Snapshot, Templates, is_left, snapshot
from tests.torture.place_model import Begun, Finished, Nothing, Parts, Place, Planned, Request, State, Unknown, Verdict

import actshard
from actshard.base.errors import ChangedInputError
from actshard.base.request import RECORD

pytestmark = pytest.mark.machine

PLACES = st.sampled_from(["x", "y"])
SOURCES = st.sampled_from(["a", "b"])
WRITTEN = st.sampled_from(["zarr", "npy", "lmprobe", "pickle"])
IN_PARTS = st.sampled_from(["zarr", "lmprobe", "pickle"])
KILLS = st.none() | st.integers(0, 39) | st.integers(0, 39) | st.integers(0, 99)
"""When a call is killed, in percent of its calls that change the disk."""
STEPS = {"zarr": 184, "npy": 111, "lmprobe": 120, "pickle": 95}
"""About how often a writer of such datasets changes the disk; a task of a plan, a commit, a merge and a staged copy: 60 times."""
FEW_STEPS = 60
USER = [
    "add",
    "remove all",
    "remove all",
    "remove all",
    "remove record",
    "remove file",
    "remove work",
    "rename",
    "link",
    "copy",
    "replace",
    "discard",
]


_COMMIT_LOCK = re.compile(r"[^/]+/\.actshard/plan-[0-9a-f]+/committing(/lock)?")
"""The lock of a plan's commit, which stays in the plan's working folder when the commit is refused."""


def killed() -> None:
    """Counts a kill, as :class:`CountedMachine` counts runs."""
    folder = os.environ.get("ACTSHARD_TORTURE_COUNTS")
    if folder:
        with (Path(folder) / "places.kills").open("ab") as file:
            file.write(b".")


class PlacesMachine(CountedMachine):
    """Two places, two sources, any actor at any time. Readers are this process, writers are its children."""

    templates: Templates

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="actshard-places-"))
        self.tree = self.folder / "tree"
        self.tree.mkdir()
        self.places = {name: Place(name) for name in ("x", "y")}
        self.alias: str | None = None
        """The place that the other one is a link to."""
        self.sources: dict[str, tuple[Contents, Request, int]] = {}
        """Contents, request and stamp of every source."""
        self.stamps = 0
        self.plans: list[tuple[Request, str, int, tuple[str, int], str]] = []
        """Requests, places, numbers of tasks, sources with their stamps, and formats of plans."""
        self.held: tuple[str, Child, int, Request] | None = None
        self.looked: dict[str, Snapshot] = {}
        """Every place as it was when it was last opened."""
        self.repeats: dict[str, Callable[[], None]] = {}
        """The last call at every place that a kill, or its caller, left unfinished."""

    @initialize(format=st.sampled_from(["zarr", "zarr", "lmprobe", "pickle"]), versions=st.permutations(range(8)))
    def begin(self, format: str, versions: list[int]) -> None:
        self.format = format
        for name, version in zip(("a", "b"), versions, strict=False):
            self.put_source(name, version)

    def put_source(self, name: str, version: int) -> None:
        path = self.tree / name
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self.templates.path(self.format, version), path)
        request = Request(("create", self.format, version), calls.created(version, self.format))
        self.sources[name] = (calls.created(version, self.format), request, self.stamp())

    def stamp(self) -> int:
        self.stamps += 1
        return self.stamps

    # -- steps -----------------------------------------------------------------------------------------------------

    def resolved(self, name: str) -> Place:
        """The place that a name leads to."""
        return self.places[name if self.alias is None or self.alias == name else self.alias]

    def is_dangling(self, name: str) -> bool:
        return self.alias is not None and name != self.alias and not (self.tree / self.alias).exists()

    def source(self, name: str) -> tuple[Path, Contents, int] | None:
        """A source, or a finished place as one."""
        if name in self.sources:
            contents, _, stamp = self.sources[name]
            return self.tree / name, contents, stamp
        state = self.resolved(name).state
        return (self.tree / name, state.contents, state.stamp) if isinstance(state, Finished) else None

    def act(
        self,
        name: str,
        verdict: Verdict,
        work: Callable[[Any], Any],
        kill: int | None,
        *,
        within: str = "",
        steps: int = FEW_STEPS,
    ) -> Outcome:
        """Does something in a child and compares the outcome, and what it left, with the verdict."""
        place = self.resolved(name)
        if self.is_dangling(name):
            verdict = Verdict(None if verdict.succeeds is not False else False, model.ANY, verdict.wanted)
        before = snapshot(self.tree)
        outcome = Child(work, None if kill is None else kill * steps // 100).wait()
        after = snapshot(self.tree)
        if outcome.killed:
            killed()
            place.loose = True
        elif outcome.error is not None:
            assert verdict.succeeds is not True, f"raised {outcome.error.__name__}: {outcome.text}\n{self.where(place)}"
            right = issubclass(outcome.error, verdict.errors)
            assert right, f"{outcome.error.__name__}: {outcome.text}\nexpected {verdict.errors}\n{self.where(place)}"
        else:
            assert verdict.succeeds is not False, f"expected {verdict.errors}, done\n{self.where(place)}"
        self.compare(place, verdict, outcome, before, after, within)
        return outcome

    def where(self, place: Place) -> str:
        return f"{place}\nheld: {self.held}, alias: {self.alias}, sources: {self.sources}"

    def compare(
        self, place: Place, verdict: Verdict, outcome: Outcome, before: Snapshot, after: Snapshot, within: str
    ) -> None:
        """Compares the tree before and after a step."""
        top, beside = place.name, f".{place.name}.actshard-"
        work = f"{top}/.actshard"

        def is_working(path: str) -> bool:
            """Whether it is a lock or an empty folder, what a killed call had staged so far, or began without being sure of it."""
            if path.startswith(f"{beside}stage") or _COMMIT_LOCK.fullmatch(path):
                return True
            if outcome.error is ChangedInputError and (path in (top, work) or path.startswith(f"{work}/plan-")):
                return True  # a task made its plan's folder again, and recorded there that its source is another
            unsure = not getattr(place.state, "sure", isinstance(place.state, Parts))
            return place.loose and (path in (top, work, f"{work}/lock") or (unsure and path.startswith(f"{work}/")))

        def is_own(path: str) -> bool:
            inside = path == top or path.startswith((f"{top}/{within}", beside)) or f"{top}/{within}".startswith(path)
            return inside and path not in place.extras

        for path in before:
            if after.get(path) != before[path]:
                fine = is_working(path) or (verdict.own and is_own(path))
                assert fine, f"{path} was {'changed' if path in after else 'removed'}: {outcome}\n{self.where(place)}"
        refused = outcome.error is not None or (outcome.killed and verdict.succeeds is False)
        for path in after.keys() - before.keys():
            fine = is_working(path) or (is_own(path) and (not refused or verdict.own))
            assert fine, f"{path} was left: {outcome}\n{self.where(place)}"
        for path in place.extras:
            assert path in after, path

    def check_done(self, name: str, path: Path, wanted: Contents | None) -> None:
        """Checks a result, and that no working files are left."""
        place = self.resolved(name)
        (found,) = calls.look([self.tree / name])
        assert isinstance(found[1], Contents), f"{found}\n{self.where(place)}"
        assert found[1] == wanted, f"found {found[1]}, expected {wanted}\n{self.where(place)}"
        assert os.path.realpath(path) == os.path.realpath(self.tree / name), path
        now = snapshot(self.tree / place.name)
        left = [p for p in now if is_left(p)]
        # A task that was killed before its plan was recorded leaves a folder, which its plan uses again.
        strange = isinstance(place.state, Planned) and not place.state.sure
        strange = strange or (isinstance(place.state, Finished) and place.loose)
        assert left == [] or strange, f"{left}\n{self.where(place)}"
        place.loose = bool(left)
        self.looked[place.name] = now

    def after_call(
        self,
        name: str,
        outcome: Outcome,
        verdict: Verdict,
        request: Request,
        verb: str,
        source: str | None = None,
    ) -> None:
        """The state after a call that may have finished a dataset."""
        place = self.resolved(name)
        if outcome.error is not None:
            return
        if outcome.killed:
            if verdict.succeeds:
                place.state = self.interrupted(place.state, request, verb, outcome, source)
            elif verdict.succeeds is None:
                place.state = self.unsure(place.state, request)
            return
        if place.state == Unknown():
            return  # a user may have put one dataset over another
        self.check_done(name, outcome.value, verdict.wanted)
        assert verdict.wanted is not None
        if not isinstance(place.state, Finished) or verdict.own:
            place.state = Finished(verdict.wanted, request, self.stamp(), source)

    def unsure(self, state: State, request: Request) -> State:
        """After a kill of a call over what an earlier kill left."""
        if isinstance(state, Finished) or (isinstance(state, Begun) and state.request == request):
            return state
        requests = model.tried(state)
        damaged = not requests and not isinstance(state, Nothing)
        return Unknown() if damaged else Unknown((request, *requests))

    def interrupted(
        self, state: State, request: Request, verb: str, outcome: Outcome, source: str | None = None
    ) -> State:
        if isinstance(state, Finished) and (verb != "stage" or state.request == request):
            return state
        if isinstance(state, Begun) and state.request == request and state.verb == verb:
            safe = max([state.committed, *outcome.told])
            return replace(state, committed=safe, sure=False)
        if isinstance(state, Unknown):
            return state
        return Begun(request, state, verb, max([0, *outcome.told]), source=source)

    # -- writers ---------------------------------------------------------------------------------------------------

    @rule(
        name=PLACES,
        format=WRITTEN,
        version=st.integers(0, 2),
        upto=st.none() | st.integers(0, 2),
        resume=st.booleans(),
        exist_ok=st.booleans(),
        kill=KILLS,
    )
    def create(
        self, name: str, format: str, version: int, upto: int | None, resume: bool, exist_ok: bool, kill: int | None
    ) -> None:
        place = self.resolved(name)
        request = Request(("create", format, version), calls.created(version, format))
        verdict = model.writing(
            place.state, request, bool(place.extras), resume=resume, exist_ok=exist_ok, creates=True
        )
        state = place.state
        if isinstance(state, Begun) and state.request == request and upto is not None:
            upto = max(upto, state.committed)
        work = partial(calls.create, self.tree / name, format, version, upto=upto, resume=resume, exist_ok=exist_ok)
        self.repeats[place.name] = partial(self.create, name, format, version, None, True, False, None)
        outcome = self.act(name, verdict, lambda tell: work(tell=tell), kill, steps=STEPS[format])
        if isinstance(state, Begun) and state.request == request and outcome.told and state.verb == "create":
            assert outcome.told[0] > state.committed, f"{state.committed} were committed, {outcome.told} are"
        if outcome.error is None and not outcome.killed and outcome.value is None:
            safe = max([0, *outcome.told, state.committed if isinstance(state, Begun) else 0])
            assert isinstance(state, Nothing | Begun | Unknown | Planned | Parts)
            place.state = Begun(request, Nothing(), "create", safe, sure=safe > 0)
            place.loose = True
            return
        self.after_call(name, outcome, verdict, request, "create")
        if outcome.killed and isinstance(place.state, Begun) and max([0, *outcome.told]) > 0:
            # All examples may be committed, and the dataset finished.
            place.state = replace(place.state, sure=0 < max(outcome.told) < len(calls.array(version)))

    @precondition(lambda self: self.held is None)
    @rule(name=PLACES, format=WRITTEN, version=st.integers(0, 2))
    def hold(self, name: str, format: str, version: int) -> None:
        """A writer that goes on writing while others act."""
        place = self.resolved(name)
        if not isinstance(place.state, Nothing) or place.extras or self.is_dangling(name):
            return
        request = Request(("create", format, version), calls.created(version, format))
        read, go = os.pipe()
        child = Child(partial(calls.hold, self.tree / name, format, version, read))
        os.close(read)
        assert child.next() == 1
        place.state = Begun(request, Nothing(), "create", 1, sure=True, locked=True)
        self.held = (name, child, go, request)

    @precondition(lambda self: self.held is not None)
    @rule(how=st.sampled_from(["finish", "abort", "kill"]))
    def release(self, how: str) -> None:
        assert self.held is not None
        name, child, go, request = self.held
        self.held = None
        place = self.resolved(name)
        assert isinstance(place.state, Begun)
        if how == "kill":
            killed()
            child.kill()
            os.close(go)
        else:
            os.write(go, how[0].encode())
            os.close(go)
            outcome = child.wait()
            assert outcome.error is None, outcome.text
            if how == "finish":
                self.check_done(name, outcome.value, request.wanted)
                assert request.wanted is not None
                place.state = Finished(request.wanted, request, self.stamp())
                return
        place.loose = True
        place.state = replace(place.state, locked=False)

    @rule(name=PLACES, format=IN_PARTS, index=st.integers(0, 1), resume=st.booleans(), kill=KILLS)
    def part(self, name: str, format: str, index: int, resume: bool, kill: int | None) -> None:
        """Part ``index`` of two."""
        place = self.resolved(name)
        requests = tuple(Request(("part", format, i), calls.created(3 + i, format)) for i in range(2))
        state = place.state
        if isinstance(state, Parts) and state.requests == requests and not state.merging:
            sub = state.states[index]
            verdict = model.writing(sub, requests[index], False, resume=resume, exist_ok=False, creates=True)
        elif isinstance(state, Nothing):
            sub = Nothing()
            # Files whose names the merge would create are in the way.
            verdict = Verdict(None if place.extras else True, (actshard.ExistsError,), requests[index].wanted)
        elif isinstance(state, Begun | Finished | Planned) and not (isinstance(state, Begun) and not state.sure):
            sub = Nothing()
            unsure = isinstance(state, Planned) and (state.committing or not state.sure)
            verdict = Verdict(None if unsure else False, model.REFUSED, requests[index].wanted)
        else:
            return  # parts of another dataset, or something unsure
        more = {"part": (index, 2), "metadata": {"ckpt": "parts"}, "resume": resume}
        path = self.tree / name
        outcome = self.act(
            name,
            verdict,
            lambda tell: calls.create(path, format, 3 + index, tell, **more),
            kill,
            within=f".parts/part-0000{index}-of-00002/",
            steps=STEPS[format],
        )
        if outcome.error is not None or (outcome.killed and verdict.succeeds is False):
            return
        if isinstance(state, Planned | Begun | Finished):
            place.state = Unknown()
            return
        states = list(state.states) if isinstance(state, Parts) else [Nothing(), Nothing()]
        if outcome.killed:
            states[index] = self.interrupted(sub, requests[index], "create", outcome)
        else:
            wanted = requests[index].wanted
            assert wanted is not None
            states[index] = Finished(wanted, requests[index], self.stamp())
            (found,) = calls.look([outcome.value])
            assert found[1] == wanted, found
        if isinstance(state, Nothing) and outcome.killed and not os.path.lexists(path / ".parts"):
            return
        place.state = Parts(requests, tuple(states))

    @precondition(lambda self: any(isinstance(place.state, Parts | Finished) for place in self.places.values()))
    @rule(name=PLACES, kill=KILLS)
    def merge_parts(self, name: str, kill: int | None) -> None:
        place = self.resolved(name)
        state = place.state
        verdict = model.merging_parts(state)
        if isinstance(state, Nothing) and place.extras:
            verdict = model.fails(*model.ANY)
        path = self.tree / name
        self.repeats[place.name] = partial(self.merge_parts, name, None)
        outcome = self.act(name, verdict, lambda _: actshard.merge(path), kill)
        if isinstance(state, Parts) and outcome.killed and verdict.succeeds:
            place.state = replace(state, merging=True)
        elif outcome.error is None and not outcome.killed:
            if isinstance(state, Unknown | Planned | Begun):
                place.state = Unknown() if not isinstance(state, Begun) else self.finished(place, outcome)
            else:
                self.check_done(name, outcome.value, verdict.wanted)
                if not isinstance(state, Finished):
                    assert verdict.wanted is not None
                    request = Request(("parts", *state.requests[0].key[1:2]), verdict.wanted)
                    place.state = Finished(verdict.wanted, request, self.stamp())

    def finished(self, place: Place, outcome: Outcome) -> State:
        """The state of a call that was killed after its last step."""
        assert isinstance(place.state, Begun)
        wanted = place.state.request.wanted
        self.check_done(place.name, outcome.value, wanted)
        assert wanted is not None
        return Finished(wanted, place.state.request, self.stamp(), place.state.source)

    # -- conversions and merges ------------------------------------------------------------------------------------

    @rule(
        source=SOURCES | PLACES,
        name=PLACES,
        format=WRITTEN,
        choice=st.sampled_from(["plain", "plain", *CHOICES]),
        resume=st.booleans(),
        exist_ok=st.booleans(),
        kill=KILLS,
    )
    def convert(
        self, source: str, name: str, format: str, choice: str, resume: bool, exist_ok: bool, kill: int | None
    ) -> None:
        found = self.source(source)
        if found is None or self.same_place(source, name) or (choice == "layer" and 4 not in found[1].layers):
            return
        path, contents, stamp = found
        if choice == "some" and len(contents.rows) < 3:
            return
        place = self.resolved(name)
        request = Request(("convert", format, choice, stamp), calls.converted(contents, format, choice))
        verdict = model.writing(
            place.state, request, bool(place.extras), resume=resume, exist_ok=exist_ok, creates=False
        )
        work = partial(calls.convert, path, self.tree / name, format, choice, resume=resume, exist_ok=exist_ok)
        if request.wanted is not None:
            self.repeats[place.name] = partial(self.convert, source, name, format, choice, True, False, None)
        outcome = self.act(name, verdict, lambda _: work(), kill, steps=STEPS[format])
        self.after_call(name, outcome, verdict, request, "convert")

    def same_place(self, source: str, name: str) -> bool:
        return source in self.places and self.resolved(source) is self.resolved(name)

    @rule(names=st.lists(SOURCES | PLACES, min_size=1, max_size=3), name=PLACES, resume=st.booleans(), kill=KILLS)
    def merge(self, names: list[str], name: str, resume: bool, kill: int | None) -> None:
        found = [self.source(n) for n in names]
        if None in found or any(self.same_place(n, name) for n in names):
            return
        parts = [entry for entry in found if entry is not None]
        if len({os.path.realpath(path) for path, _, _ in parts}) < len(parts):
            return
        kinds = {(c.format, c.layers, c.dtype, c.labels is None) for _, c, _ in parts}
        if len(kinds) > 1 or parts[0][1].format not in ("zarr", "lmprobe"):  # samples of pickle shards have numbers
            return
        place = self.resolved(name)
        stamps = tuple(stamp for *_, stamp in parts)
        request = Request(("merge", stamps), calls.merged([c for _, c, _ in parts]))
        verdict = model.merging(place.state, request, bool(place.extras), resume=resume)
        path = self.tree / name
        self.repeats[place.name] = partial(self.merge, names, name, True, None)
        paths = [path for path, _, _ in parts]
        outcome = self.act(
            name, verdict, lambda _: actshard.merge(path, paths, resume=resume, different_models=True), kill
        )
        self.after_call(name, outcome, verdict, request, "merge")

    # -- plans -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.plans) < 4)
    @rule(source=SOURCES, name=PLACES, format=WRITTEN, choice=st.sampled_from(["plain", "plain", *CHOICES]))
    def plan(self, source: str, name: str, format: str, choice: str) -> None:
        found = self.source(source)
        assert found is not None
        path, contents, stamp = found
        place = self.resolved(name)
        request = Request(("convert", format, choice, stamp), calls.converted(contents, format, choice))
        verdict = model.planning(place.state, request, bool(place.extras), None)
        file = self.folder / f"plan{len(self.plans)}.json"
        work = partial(calls.plan, path, self.tree / name, format, choice, file)
        outcome = self.act(name, verdict, lambda _: work(), None)
        if outcome.error is None:
            self.plans.append((request, name, outcome.value, (source, stamp), format))

    @precondition(lambda self: self.plans)
    @rule(number=st.integers(0, 3), task=st.integers(0, 5), kill=KILLS)
    def run_task(self, number: int, task: int, kill: int | None) -> None:
        number %= len(self.plans)
        request, name, tasks, (source, stamp), _ = self.plans[number]
        task %= tasks
        place = self.resolved(name)
        state = place.state
        verdict = model.running(
            state,
            self.number(number),
            request,
            bool(place.extras),
            self.sources[source][2] != stamp,
            commits=False,
        )
        file = self.folder / f"plan{number}.json"
        outcome = self.act(name, verdict, lambda _: calls.run(file, task), kill, within=".actshard/")
        place.loose = place.loose or not isinstance(state, Finished)
        if outcome.error is not None or isinstance(state, Finished | Unknown):
            return
        if verdict.succeeds is False:
            return
        done = state.done if isinstance(state, Planned) and state.number == self.number(number) else frozenset()
        committing = isinstance(state, Planned) and state.committing
        if outcome.killed:
            sure = isinstance(state, Planned) and state.sure
            place.state = Planned(self.number(number), request, done, committing, sure)
        elif outcome.value:
            assert request.wanted is not None
            self.check_done(name, self.tree / name, request.wanted)
            place.state = Finished(request.wanted, request, self.stamp())
        else:
            place.state = Planned(self.number(number), request, done | {task}, committing, sure=True)

    @precondition(lambda self: self.plans)
    @rule(number=st.integers(0, 3), source=SOURCES, choice=st.sampled_from(["plain", *CHOICES]))
    def overtake(self, number: int, source: str, choice: str) -> None:
        """A conversion finishes where a plan was made, before its tasks run."""
        number %= len(self.plans)
        _, name, *_, format = self.plans[number]
        self.convert(source, name, format, choice, False, False, None)
        self.run_task(number, 0, None)
        self.commit(number, False, None)

    def number(self, number: int) -> int:
        """The number of the first equal plan: planning twice gives the same plan."""
        request, name, *_ = self.plans[number]
        return next(i for i, (r, n, *_) in enumerate(self.plans) if (r, n) == (request, name))

    @precondition(lambda self: self.plans)
    @rule(number=st.integers(0, 3), finishes=st.booleans(), kill=KILLS)
    def commit(self, number: int, finishes: bool, kill: int | None) -> None:
        """Commits a plan, with or without its missing tasks."""
        number %= len(self.plans)
        request, name, tasks, (source, stamp), _ = self.plans[number]
        place = self.resolved(name)
        if finishes and isinstance(place.state, Nothing | Planned):
            for task in range(tasks):
                self.run_task(number, task, None)
        state = place.state
        verdict = model.running(
            state,
            self.number(number),
            request,
            bool(place.extras),
            self.sources[source][2] != stamp,
            commits=True,
        )
        mine = isinstance(state, Planned) and state.number == self.number(number)
        if mine and not state.committing and len(state.done) < tasks:
            verdict = Verdict(None if not state.sure else False, model.ANY, request.wanted)
        file = self.folder / f"plan{number}.json"
        if request.wanted is not None:
            self.repeats[place.name] = partial(self.commit, number, True, None)
        outcome = self.act(name, verdict, lambda _: calls.commit(file), kill)
        if outcome.error is not None or verdict.succeeds is False or isinstance(state, Unknown):
            return
        if outcome.killed:
            if isinstance(state, Planned) and mine:
                place.state = replace(state, committing=True)
            return
        if mine or isinstance(state, Finished):
            self.check_done(name, outcome.value, request.wanted)
            if not isinstance(state, Finished):
                assert request.wanted is not None
                place.state = Finished(request.wanted, request, self.stamp())
        else:
            place.state = Unknown()

    def discard_plan(self, name: str) -> None:
        """A user removes the working folder of a plan, as its message advises."""
        place = self.resolved(name)
        if isinstance(place.state, Planned):
            for folder in (self.tree / place.name / ".actshard").glob("plan-*"):
                shutil.rmtree(folder)
            place.state = Unknown() if place.state.committing else Nothing()
            if isinstance(place.state, Nothing):
                self.leave_nothing(place)

    def leave_nothing(self, place: Place) -> None:
        place.loose = True

    # -- staged copies ---------------------------------------------------------------------------------------------

    @rule(source=SOURCES, name=PLACES, kill=KILLS)
    def stage(self, source: str, name: str, kill: int | None) -> None:
        contents, original, stamp = self.sources[source]
        place = self.resolved(name)
        request = Request((*original.key, "staged", stamp), contents)
        verdict = model.staging(place.state, request, bool(place.extras), source)
        if self.is_dangling(name):
            return
        path = self.tree / name
        self.repeats[place.name] = partial(self.stage, source, name, None)
        origin = self.tree / source
        outcome = self.act(name, verdict, lambda _: actshard.stage(origin, path).path, kill)
        state = place.state
        self.after_call(name, outcome, verdict, replace(original, key=original.key), "stage", source)
        if outcome.killed and verdict.succeeds and isinstance(state, Finished):
            place.state = Begun(original, state, "stage", source=source)

    @rule(name=PLACES)
    def clear(self, name: str) -> None:
        """A place for the next dataset."""
        if not isinstance(self.resolved(name).state, Nothing):
            self.remove(name, "all", 0)

    @precondition(lambda self: self.repeats)
    @rule(name=PLACES)
    def again(self, name: str) -> None:
        """The last call at a place, to its end."""
        place = self.resolved(name)
        if (repeat := self.repeats.get(place.name)) is not None and not getattr(place.state, "locked", False):
            repeat()

    # -- a user ----------------------------------------------------------------------------------------------------

    @rule(what=st.sampled_from(USER), name=PLACES, source=SOURCES, pick=st.integers(0, 30))
    def user(self, what: str, name: str, source: str, pick: int) -> None:
        """Files and folders of others come, go and move."""
        other = "y" if name == "x" else "x"
        held = self.held is not None
        if what == "add":
            self.add(name, ("notes.txt", "sub/notes.txt", ".hidden")[pick % 3])
        elif what.startswith("remove"):
            self.remove(name, what.partition(" ")[2], pick)
        elif what == "discard":
            self.discard_plan(name)
        elif what == "rename" and not held:
            self.rename(name, other)
        elif what == "link" and self.alias is None and not held:
            self.link(name)
        elif what == "link" and not held:
            self.unlink()
        elif what == "copy":
            self.copy_over(source if pick % 2 else other, name)
        elif what == "replace":
            self.put_source(source, pick % 8)

    def add(self, name: str, file: str) -> None:
        place = self.resolved(name)
        if place.state.__class__ is Begun and place.state.locked:
            return
        root = self.tree / place.name
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"mine {self.stamp()}")
        place.extras |= {f"{place.name}/{file}"}
        if "/" in file:
            place.extras.add(f"{place.name}/{Path(file).parent}")
        place.state = model.unstamped(place.state, self.stamp())

    def remove(self, name: str, what: str, pick: int) -> None:
        place = self.resolved(name)
        if self.held is not None and self.resolved(self.held[0]) is place:
            return
        root = self.tree / place.name
        if what == "all":
            shutil.rmtree(root, ignore_errors=True)
            place.state, place.extras = Nothing(), set()
            if any(self.tree.glob(f".{place.name}.actshard-*")):
                place.loose = True
        elif what == "record" and isinstance(place.state, Finished):
            (root / RECORD).unlink(missing_ok=True)
            place.state = replace(place.state, request=None, stamp=self.stamp())
        elif what == "work" and (root / ".actshard").exists():
            shutil.rmtree(root / ".actshard")
            place.state = place.state if isinstance(place.state, Finished) else Unknown()
        elif what == "file":
            files = sorted(p for p, (kind, _) in snapshot(root).items() if kind == "file")
            if files and not isinstance(place.state, Nothing):
                path = files[pick % len(files)]
                (root / path).unlink()
                place.extras.discard(f"{place.name}/{path}")
                place.state = Unknown()

    def rename(self, old: str, new: str) -> None:
        if old == new or self.alias is not None or os.path.lexists(self.tree / new) or not (self.tree / old).exists():
            return
        (self.tree / old).rename(self.tree / new)
        one, two = self.places[old], self.places[new]
        two.state, two.loose = one.state, True
        two.extras = {f"{new}/{path.partition('/')[2]}" for path in one.extras}
        if isinstance(one.state, Planned | Parts):
            two.state = one.state if isinstance(one.state, Parts) and not one.state.merging else Unknown()
        elif isinstance(one.state, Begun) and one.state.verb in ("stage", "merge"):
            two.state = Unknown()
        one.state, one.extras, one.loose = Nothing(), set(), True
        if isinstance(two.state, Unknown):
            one.state = Unknown()

    def link(self, link: str) -> None:
        other = "y" if link == "x" else "x"
        if os.path.lexists(self.tree / link) or not isinstance(self.places[link].state, Nothing):
            return
        (self.tree / link).symlink_to(other)
        self.alias = other

    def unlink(self) -> None:
        (self.tree / ("y" if self.alias == "x" else "x")).unlink()
        self.alias = None

    def copy_over(self, source: str, name: str) -> None:
        """A user copies a finished dataset to a place, over what lies there."""
        found = self.source(source)
        place = self.resolved(name)
        if found is None or self.same_place(source, name) or self.is_dangling(name):
            return
        if self.held is not None and self.resolved(self.held[0]) is place:
            return
        request = self.sources[source][1] if source in self.sources else None
        copied = set()
        if source in self.places:
            state = self.resolved(source).state
            assert isinstance(state, Finished)
            request = state.request
            start = self.resolved(source).name
            copied = {f"{place.name}/{path.partition('/')[2]}" for path in self.resolved(source).extras}
            assert start != place.name
        origin = self.tree / source
        staged = (origin / ".actshard-staged.json").exists()
        clean = isinstance(place.state, Nothing) and not place.extras
        shutil.copytree(origin, self.tree / place.name, dirs_exist_ok=True, symlinks=True)
        place.extras |= copied
        place.state = Finished(found[1], request, self.stamp()) if clean else Unknown()
        if staged or (self.tree / place.name / ".actshard").exists() or isinstance(place.state, Unknown):
            place.state = Unknown()
            place.loose = True

    # -- checks ----------------------------------------------------------------------------------------------------

    @invariant()
    def opens_as_expected(self) -> None:
        """What ``open`` shows at every place that has changed since it was looked at."""
        names = []
        for name, place in self.places.items():
            now = snapshot(self.tree / place.name)
            if self.alias in (None, name) and self.looked.get(name) != now:
                names.append(name)
                self.looked[name] = now
        if not names:
            return
        found = calls.look([self.tree / name for name in names])
        for name, (path, shown) in zip(names, found, strict=True):
            place = self.places[name]
            succeeds, errors, contents = model.seen(place.state)
            if isinstance(shown, Contents):
                assert succeeds is not False, f"opened {path}: {shown}\n{self.where(place)}"
                assert not contents or shown in contents, f"opened {path}: {shown}\n{self.where(place)}"
            else:
                assert succeeds is not True, f"{path.__name__}: {shown}\n{self.where(place)}"
                assert place.loose or issubclass(path, errors), f"{path.__name__}: {shown}\n{self.where(place)}"

    def teardown(self) -> None:
        try:
            if self.held is not None:
                self.release("kill")
            for name, place in self.places.items():
                if isinstance(place.state, Begun | Parts | Planned):
                    self.again(name)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


def test_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    PlacesMachine.templates = Templates()
    try:
        run_state_machine_as_test(PlacesMachine, settings=machine_settings(12, 400, steps=24))
    finally:
        shutil.rmtree(PlacesMachine.templates.root, ignore_errors=True)
