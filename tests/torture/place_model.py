"""What lies at a place, in plain Python, and what every verb must do there: for the machine of places.

The model knows classes of errors, not messages. Where it does not know what a kill or a user left, it accepts both ends of a call;
what a call may change, and what a dataset may contain, hold always.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tests.torture.place_calls import Contents

from actshard.base.errors import (
    ActshardError,
    ArgumentError,
    ChangedInputError,
    DtypeError,
    ExistsError,
    FormatError,
    LockedError,
    MissingFileError,
    UnfinishedError,
    UnknownFormatError,
)

Errors = tuple[type[ActshardError], ...]
ANY: Errors = (ActshardError,)
NOTHING_THERE: Errors = (MissingFileError, UnknownFormatError, UnfinishedError)


@dataclass(frozen=True)
class Request:
    """A request: equal keys are the same request of the same sources. ``wanted``: the result; None if it must be refused."""

    key: tuple[Any, ...]
    wanted: Contents | None

    def is_alike(self, other: Request) -> bool:
        """Whether only the sources' files are others, with the same contents."""
        return self.key[:-1] == other.key[:-1] and self.wanted == other.wanted


@dataclass(frozen=True)
class State:
    """What lies at a place."""


@dataclass(frozen=True)
class Nothing(State):
    """No dataset, and no beginning of one. Others' files are in :attr:`Place.extras`."""


@dataclass(frozen=True)
class Finished(State):
    """A dataset. ``request`` is None without a record."""

    contents: Contents
    request: Request | None
    stamp: int
    """Identifies its files: a conversion of others is another request."""
    source: str | None = None
    """The source of which it is a staged copy."""


@dataclass(frozen=True)
class Begun(State):
    """An unfinished dataset or copy. ``sure``: examples are committed, or its writer lives. Otherwise a killed call may have left
    anything between ``before`` and its end."""

    request: Request
    before: State
    verb: str
    committed: int = 0
    sure: bool = False
    locked: bool = False
    source: str | None = None


@dataclass(frozen=True)
class Parts(State):
    """Unmerged parts, each nothing, finished or begun. ``merging``: a merge of them was killed."""

    requests: tuple[Request, ...]
    states: tuple[State, ...]
    merging: bool = False


@dataclass(frozen=True)
class Planned(State):
    """Tasks of a plan. ``committing``: its commit was killed; ``surely``: a task has finished."""

    number: int
    request: Request
    done: frozenset[int] = frozenset()
    committing: bool = False
    sure: bool = False


@dataclass(frozen=True)
class Unknown(State):
    """A user damaged or mixed what lay here. Or calls of some requests were killed, one over the other: one of them, or none."""

    requests: tuple[Request, ...] = ()


@dataclass
class Place:
    """A folder of the machine. ``extras``: the user's files in it, relative to the tree; ``loose``: kills may have left locks."""

    name: str
    state: State = field(default_factory=Nothing)
    extras: set[str] = field(default_factory=set)
    loose: bool = False


@dataclass(frozen=True)
class Verdict:
    """What a verb must do. ``succeeds``: True, False, or None for either; ``errors``: the classes that it may raise.

    ``own``: whether it may change the files of the place that are not the user's; otherwise it may only add some.
    """

    succeeds: bool | None
    errors: Errors = ()
    wanted: Contents | None = None
    own: bool = False


def fails(*errors: type[ActshardError]) -> Verdict:
    return Verdict(False, errors)


REFUSED = (ExistsError, ArgumentError, UnfinishedError, LockedError, FormatError)


def writing(state: State, request: Request, extras: bool, *, resume: bool, exist_ok: bool, creates: bool) -> Verdict:
    """``create`` and ``convert``."""
    wanted = request.wanted
    done = Verdict(True, (), wanted)
    if isinstance(state, Nothing):
        if extras:
            return fails(ExistsError)
        return done if wanted is not None else fails(DtypeError)
    if isinstance(state, Finished):
        accepted = resume or exist_ok
        if not accepted:
            return fails(ExistsError)
        if state.request is None or (not creates and state.request.is_alike(request) and state.request != request):
            # Without a record, create() compares shapes only: it cannot know the rows that follow.
            same = state.contents == wanted or (creates and wanted is not None)
            return Verdict(None if same else False, (ExistsError,), state.contents)
        return Verdict(True, (), wanted) if state.request == request else fails(ExistsError, DtypeError)
    if isinstance(state, Begun):
        return _continuing(state, request, resume, exist_ok)
    if isinstance(state, Parts):
        return Verdict(None, REFUSED, wanted, own=True) if state.merging else fails(ExistsError, UnfinishedError)
    if isinstance(state, Planned):
        if not state.committing and state.sure:
            return fails(UnfinishedError, ExistsError)
        return Verdict(None, REFUSED, wanted, own=True)
    return Verdict(None, ANY, wanted, own=True)


def _continuing(state: Begun, request: Request, resume: bool, exist_ok: bool) -> Verdict:
    if state.locked:
        return fails(LockedError)
    wanted = request.wanted
    if state.request == request and state.verb != "stage":
        if wanted is None:
            return Verdict(False, (DtypeError, *REFUSED), own=True)
        if resume:
            return Verdict(True, (), wanted, own=True)
        if state.sure:
            return fails(ExistsError)
        return Verdict(None, (ExistsError,), wanted, own=True)
    if state.sure:
        alike = resume and state.request.is_alike(request)
        return Verdict(None, REFUSED, wanted, own=True) if alike else fails(ExistsError, ArgumentError, FormatError)
    return Verdict(None, (*REFUSED, DtypeError), wanted, own=True)


def merging(state: State, request: Request, extras: bool, *, resume: bool) -> Verdict:
    """``merge`` of datasets."""
    if isinstance(state, Nothing):
        return fails(ExistsError) if extras else Verdict(True, (), request.wanted)
    if isinstance(state, Finished):
        if resume and state.request == request:
            return Verdict(True, (), request.wanted)
        alike = resume and state.request is not None and state.request.is_alike(request)
        return Verdict(None if alike else False, (ExistsError,), request.wanted)
    if isinstance(state, Begun):
        if state.request == request and state.verb == "merge":
            # Killed after its last step, it is finished: the same call then needs resume=True.
            return Verdict(True if resume else None, (ExistsError,), request.wanted, own=True)
        return fails(*REFUSED) if state.sure else Verdict(None, REFUSED, request.wanted, own=True)
    if isinstance(state, Parts):
        return fails(ExistsError, ArgumentError, UnfinishedError)
    if isinstance(state, Planned) and state.sure and not state.committing:
        return fails(UnfinishedError, ExistsError)
    return Verdict(None, ANY, request.wanted, own=True)


def merging_parts(state: State) -> Verdict:
    """``merge`` of a folder's own parts."""
    if isinstance(state, Nothing):
        return fails(*NOTHING_THERE)
    if isinstance(state, Finished):
        return Verdict(True, (), state.contents)
    if isinstance(state, Begun):
        # Any dataset that was finished here is returned.
        return fails(UnfinishedError, LockedError) if state.sure else Verdict(None, ANY, state.request.wanted, own=True)
    if isinstance(state, Parts):
        from tests.torture.place_calls import merged

        wanted = merged([r.wanted for r in state.requests if r.wanted is not None])
        if state.merging or all(isinstance(s, Finished) for s in state.states):
            return Verdict(True, (), wanted, own=True)
        unsure = any(isinstance(s, Begun) and not s.sure for s in state.states)
        return Verdict(None if unsure else False, (UnfinishedError,), wanted, own=unsure)
    if isinstance(state, Planned):
        return Verdict(None if state.committing or not state.sure else False, ANY, state.request.wanted, own=True)
    return Verdict(None, ANY, None, own=True)


def planning(state: State, request: Request, extras: bool, number: int | None) -> Verdict:
    """Making a plan, which writes nothing."""
    if isinstance(state, Nothing):
        if extras:
            return fails(ExistsError)
        return Verdict(True) if request.wanted is not None else Verdict(None, (DtypeError,))
    if isinstance(state, Finished):
        return fails(ExistsError, DtypeError)
    if isinstance(state, Begun) and state.sure:
        return fails(ExistsError, UnfinishedError, LockedError)
    if isinstance(state, Parts):
        return fails(ExistsError, UnfinishedError)
    refused = () if request.wanted is not None else (DtypeError,)  # predicted from the rows
    if isinstance(state, Planned) and state.sure and not state.committing:
        return Verdict(None if state.request == request else False, (UnfinishedError, ExistsError, *refused))
    return Verdict(None, ANY)


def running(state: State, number: int, request: Request, extras: bool, changed: bool, *, commits: bool) -> Verdict:
    """Running a task of a plan, or its commit."""
    wanted = request.wanted
    if isinstance(state, Planned) and state.number == number:
        if changed or wanted is None:
            over = state.committing or (not commits and bool(state.done))
            return Verdict(None if over else False, (ChangedInputError, DtypeError, UnfinishedError), wanted, own=True)
        return Verdict(True, (), wanted, own=True)
    if isinstance(state, Finished):
        if state.request == request:
            return Verdict(True, (), wanted)
        alike = state.request is not None and state.request.is_alike(request)
        return Verdict(None if alike else False, (ExistsError,), wanted)
    if isinstance(state, Nothing):
        if commits:
            return fails(UnfinishedError, ExistsError)
        if extras or changed or wanted is None:
            return fails(ExistsError, ChangedInputError, DtypeError)
        return Verdict(True, (), wanted)
    if isinstance(state, Begun) and state.sure:
        return fails(*REFUSED, ChangedInputError)
    if isinstance(state, Parts):
        return fails(ExistsError, UnfinishedError, ChangedInputError)
    if isinstance(state, Planned) and state.sure and not state.committing:
        return fails(UnfinishedError, ExistsError, ChangedInputError)
    return Verdict(None, ANY, wanted, own=True)


def staging(state: State, request: Request, extras: bool, source: str) -> Verdict:
    """``stage``: an older copy of the same source is replaced."""
    wanted = request.wanted
    if isinstance(state, Nothing):
        return fails(ExistsError) if extras else Verdict(True, (), wanted)
    if isinstance(state, Finished):
        if state.source != source:
            return fails(ExistsError)
        return Verdict(True, (), wanted, own=True)
    if isinstance(state, Begun):
        if state.verb == "stage" and state.source == source:
            # Files that a user added before the copy came to its place are in the way.
            either = extras and not isinstance(state.before, Finished)
            return Verdict(None if either else True, (ExistsError,), wanted, own=True)
        return fails(*REFUSED) if state.sure else Verdict(None, REFUSED, wanted, own=True)
    if isinstance(state, Parts) or (isinstance(state, Planned) and state.sure and not state.committing):
        return fails(ExistsError, UnfinishedError)
    return Verdict(None, ANY, wanted, own=True)


def seen(state: State) -> tuple[bool | None, Errors, list[Contents | None]]:
    """What ``open`` shows: whether it succeeds, the errors, and the contents that it may show."""
    if isinstance(state, Nothing):
        return False, NOTHING_THERE, []
    if isinstance(state, Finished):
        return True, (), [state.contents]
    if isinstance(state, Begun):
        if state.sure:
            return False, (UnfinishedError,), []
        return None, ANY, [state.request.wanted, *seen(state.before)[2]]
    if isinstance(state, Parts):
        from tests.torture.place_calls import merged

        wanted = merged([r.wanted for r in state.requests if r.wanted is not None])
        return (None, ANY, [wanted]) if state.merging else (False, (UnfinishedError,), [])
    if isinstance(state, Planned):
        if state.committing:
            return None, ANY, [state.request.wanted]
        return False, (UnfinishedError,) if state.sure else ANY, []
    return None, ANY, [request.wanted for request in state.requests] if isinstance(state, Unknown) else []


def tried(state: State) -> tuple[Request, ...]:
    """The requests that an unsure state may be the result of; none if a user damaged it."""
    if isinstance(state, Unknown):
        return state.requests
    if isinstance(state, Begun):
        return (state.request, *tried(state.before))
    return (state.request,) if isinstance(state, Planned) else ()


def unstamped(state: State, stamp: int) -> State:
    """The same with other files: a user added some."""
    return replace(state, stamp=stamp) if isinstance(state, Finished) else state
