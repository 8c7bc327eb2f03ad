"""Apply, verify and undo replacements of upstream attributes.

A patch is data (:class:`Patch`). :func:`apply` works in two phases: :func:`plan` resolves and
checks every patch, imports every replacement and builds every wrapper; only when all of that has
succeeded is anything changed. Each changed binding is recorded in an :class:`Applied`, so undo is
exact and needs no code from the author of a patch.

``from m import f [as g]`` copies a reference. Every module-level copy of a patched function or
class in the modules of ``scope`` is therefore rebound too, found by identity through
``vars(module)``; modules that are imported while the patch is active and copy the *replacement* are
put right by the undo. References in default arguments, ``functools.partial`` objects and instances
are out of reach: patch functions and methods, not classes that specs hold by value.

Standard library only; knows neither torch nor Megatron.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ExtensionFileLoader
from typing import Any, Concatenate, Literal, NamedTuple

__all__ = [
    "AUDIENCE",
    "Applied",
    "Binding",
    "Patch",
    "PatchError",
    "aliases",
    "apply",
    "around",
    "plan",
    "replaced_by",
    "resolve",
    "source_hash",
    "table",
    "written_in",
]

AUDIENCE = ("megatron", "__main__", "__mp_main__")
"""The packages that see the device runtime; `__mp_main__` is the script in a process that it has spawned."""

_ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "<absent>"})()


class PatchError(RuntimeError):
    """A patch cannot be applied or undone; nothing was changed."""

    def __init__(self, message: str, problems: Sequence[Problem] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class Problem(NamedTuple):
    """One reason why a set of patches does not fit."""

    target: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One replaced upstream attribute."""

    target: str
    """``package.module:name`` or ``package.module:Class.name``."""
    replacement: str
    """Same grammar; imported when the patch is planned."""
    why: str
    """One sentence: what upstream lacks, and what the replacement changes."""
    how: Literal["replace", "wrap", "provide"] = "replace"
    """``wrap``: the replacement is called with the original and returns the new object.
    ``provide``: the target is a name that a guarded import of upstream left unbound, or None."""
    expects: tuple[str, ...] | None = None
    """Parameter names of the upstream callable that the replacement was written against; ``None`` for
    what is no function, and where an :class:`around` names them."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Upstream version -> :func:`source_hash` of the body that was read before it was replaced. A
    wrap depends on the signature alone; a replacement also on the body whose work it takes over,
    which must be one of these."""
    bound: Literal["refused", "replaced", "kept"] = "refused"
    """Of ``provide``: what becomes of a name that upstream's guarded import has bound after all."""
    optional: bool = False
    """The target may be missing in some supported versions (the feature's reason says which)."""

    @property
    def contract(self) -> tuple[str, ...] | None:
        """The names that upstream's parameters must have: ``expects``, or those that the replacement, an
        :class:`around`, names itself; ``None``: they are not checked."""
        if self.expects is not None or self.how != "wrap":
            return self.expects
        adapter = _replacement(self)
        return adapter.expects if isinstance(adapter, around) else None

    @property
    def takes_over(self) -> bool:
        """Whether it does the work of upstream's body, so that another's in its place would be lost."""
        return self.how == "replace" or bool(self.sources)


class around[**P, R]:
    """Decorator that makes the replacement of a ``wrap`` of ``adapter(original, *args, **kwargs)``, which is
    called in the original's place with the original before its arguments.

    The original is given by position; the name of its parameter must be none of upstream's.
    """

    def __init__(self, adapter: Callable[Concatenate[Callable[..., Any], P], R]) -> None:
        functools.update_wrapper(self, adapter)
        self.adapter = adapter

    def __call__(self, original: Callable[..., Any]) -> Callable[P, R]:
        adapter = self.adapter

        @functools.wraps(original)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return adapter(original, *args, **kwargs)

        vars(call)["accel_adapter"] = adapter
        return call

    @property
    def expects(self) -> tuple[str, ...] | None:
        """The adapter's parameter names after the original; ``None`` if it takes ``*args`` or
        ``**kwargs``."""
        _, *own = inspect.signature(self.adapter).parameters.values()
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in own):
            return None
        return tuple(p.name for p in own)


@dataclass(frozen=True)
class Binding:
    """One changed name: ``owner.name`` was ``before`` and is ``after``."""

    owner: Any
    name: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.name}"


@dataclass(frozen=True)
class Change:
    """A checked target and the object it will be bound to."""

    patches: tuple[Patch, ...]
    owner: Any
    name: str
    raw: Any
    new: Any

    @property
    def target(self) -> str:
        return self.patches[0].target


@dataclass
class Applied:
    """The changed bindings of one :func:`apply` call, in order."""

    changes: list[Change] = field(default_factory=list)
    bindings: list[Binding] = field(default_factory=list)
    scope: tuple[str, ...] = ()
    known: frozenset[str] = frozenset()
    """Modules that had been imported before."""
    own_copies: set[tuple[str, str]] = field(default_factory=set)
    """(module, name) of what was bound to one of the replacements before: somebody else's business."""

    def check(self) -> None:
        """Raise :class:`PatchError` if somebody rebound one of the names since."""
        for b in self.bindings:
            if vars(b.owner).get(b.name, _ABSENT) is not b.after:
                raise PatchError(f"{b} was changed after accel patched it; undo that change first")

    def stale_copies(self) -> list[str]:
        """What modules beyond the scope have copied of ``megatron`` before: it stays upstream's there."""
        swaps = {
            id(c.raw): (c.raw, c.new)
            for c in self.changes
            if isinstance(c.owner, types.ModuleType)
            and c.owner.__name__.startswith("megatron.")
            and _has_aliases(c.raw)
        }
        beyond = _imported_since(frozenset(), self.scope)
        return [f"{module.__name__}.{name}" for module, name, _ in _copies(swaps, beyond)]

    def undo(self) -> None:
        """Restore every binding; raises as :meth:`check` does, and then changes nothing."""
        self.check()
        for b in reversed(self.bindings):
            _set(b.owner, b.name, b.before)
        # Modules imported while the patch was active have copied the replacement.
        swaps: dict[int, tuple[Any, Any]] = {}
        for c in self.changes:
            if not isinstance(c.owner, types.ModuleType) or not _has_aliases(c.new):
                continue
            if id(c.new) not in swaps or _has_aliases(c.raw):
                swaps[id(c.new)] = (c.new, c.raw)
        for module, name, (_, before) in aliases(swaps, self.scope):
            if (module.__name__, name) not in self.own_copies:
                _set(module, name, before)
        # Elsewhere accel's own ops may be meant as such, by whatever name accel's layers know them.
        swaps = {key: swap for key, swap in swaps.items() if not _is_public(swap[0])}
        for module, name, (_, before) in _copies(swaps, _imported_since(self.known, self.scope)):
            _set(module, name, before)
        self.changes.clear()
        self.bindings.clear()

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, *exc: object) -> None:
        self.undo()


def table(
    module: str,
    replacements: Mapping[str, str],
    why: str,
    how: Literal["replace", "wrap"] = "wrap",
) -> tuple[Patch, ...]:
    """Patches with one reason: each target with the name of its replacement in ``module``."""
    return tuple(
        Patch(target=target, replacement=f"{module}:{name}", why=why, how=how)
        for target, name in replacements.items()
    )


def resolve(path: str) -> tuple[Any, str, Any]:
    """Return ``(owner, name, raw)``; ``raw`` is the descriptor, not the bound object.

    Raises :class:`PatchError` that lists near names when there is no such attribute. The last name
    is looked up in ``vars()``, so no module ``__getattr__`` runs.
    """
    owner, name = _owner(path)
    raw = _lookup(owner, name)
    if raw is _ABSENT:
        raise PatchError(f"{path}: {_describe(owner)} has no {name!r}{_near(name, dir(owner))}")
    return owner, name, raw


def replaced_by(path: str) -> str | None:
    """The module that somebody else's function at ``path`` comes from; None for upstream's own.

    A decorator of torch's or of the standard library may stand before upstream's function, and so may
    accel's; ``functools.wraps`` cannot hide where another one was written. What upstream itself binds
    from Transformer Engine or Apex, where they are installed, is its own choice.
    """
    home = path.partition(":")[0].partition(".")[0]
    known = {"accel", "torch", "transformer_engine", "apex", *sys.stdlib_module_names}
    found = _function(resolve(path)[2])
    while found is not None:
        module = written_in(found)
        package = (module or home).partition(".")[0]
        if package == home:
            return None
        if package not in known:
            return module
        found = getattr(found, "__wrapped__", None)
    return None


def written_in(function: Any) -> str | None:
    """The module that a function was written in, which ``functools.wraps`` cannot hide: of a wrapper by
    :class:`around` that of its adapter. ``None`` for what has none."""
    module = getattr(function, "__globals__", {}).get("__name__")
    if module == __name__ and (adapter := getattr(function, "accel_adapter", None)):
        module = inspect.unwrap(adapter).__globals__["__name__"]
    return module or getattr(function, "__module__", None)


def source_hash(raw: Any) -> str:
    """First 12 hex digits of the SHA-256 of the dedented source text of a function or class."""
    return _hash_of(inspect.unwrap(_function(raw)))


@functools.cache
def _hash_of(written: Any) -> str:
    text = textwrap.dedent(inspect.getsource(written))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def parameters(raw: Any) -> tuple[str, ...]:
    """Parameter names of a function, method, descriptor or class."""
    return tuple(inspect.signature(_function(raw)).parameters)


def plan(patches: Iterable[Patch]) -> list[Change]:
    """Resolve and check every patch; change nothing. A patch that several features share counts once.

    Raises:
        PatchError: with *all* problems, in its text and as ``problems``.
    """
    by_target: dict[str, list[Patch]] = {}
    for patch in patches:
        group = by_target.setdefault(patch.target, [])
        if patch not in group:
            group.append(patch)
    problems: list[Problem] = []
    changes: list[Change] = []
    for target, group in by_target.items():
        found: list[str] = []
        try:
            change = _plan_target(group, found)
        except Exception as e:  # upstream's modules run code of their own when they are imported
            text = str(e).removeprefix(f"{target}: ")
            found.append(text if isinstance(e, PatchError) else f"{type(e).__name__}: {text}")
        else:
            if change is not None and not _is_done_already(change, changes, found):
                changes.append(change)
        problems.extend(Problem(target, text) for text in found)
    problems.extend(_indistinguishable(changes))
    if problems:
        raise PatchError(_listed(problems), problems)
    return changes


def apply(patches: Iterable[Patch], *, scope: Sequence[str] = ("megatron",)) -> Applied:
    """Check all patches, then apply them.

    Args:
        patches: in any order; for one target, the replacement goes below the wraps, and wraps nest
            in the order given (first is innermost).
        scope: top-level packages in whose modules copies of a patched function are rebound.

    Raises:
        PatchError: on any problem; then nothing has been changed.
    """
    changes = plan(patches)
    applied = Applied(changes=changes, scope=tuple(scope), known=frozenset(sys.modules))
    new = {id(c.new): (c.new, None) for c in changes if _has_aliases(c.new)}
    applied.own_copies = {(m.__name__, name) for m, name, _ in aliases(new, applied.scope)}
    try:
        for c in changes:
            _bind(applied, c.owner, c.name, c.new)
        swaps = {
            id(c.raw): (c.raw, c.new)
            for c in changes
            if isinstance(c.owner, types.ModuleType) and _has_aliases(c.raw)
        }
        for module, name, (_, new) in list(aliases(swaps, applied.scope)):
            _bind(applied, module, name, new)
    except BaseException:
        applied.undo()
        raise
    return applied


def _plan_target(group: list[Patch], problems: list[str]) -> Change | None:
    first = group[0]
    if any(p.how == "provide" for p in group):
        return _plan_provided(group, problems)
    try:
        owner, name, raw = resolve(first.target)
    except (PatchError, ImportError):
        if all(p.optional for p in group):
            return None
        raise
    for patch in group:
        problems.extend(_contract_problems(patch, raw))
    replacing = [p for p in group if p.how == "replace"]
    if len(replacing) > 1:
        problems.append(f"replaced by both {' and '.join(p.replacement for p in replacing)}")
    new = _replacement(replacing[0]) if replacing else _function(raw)
    for patch in group:
        if patch.how == "wrap":
            new = _replacement(patch)(new)
    if isinstance(raw, (staticmethod, classmethod)):
        new = type(raw)(new)
    return Change(tuple(group), owner, name, raw, new)


def _is_done_already(change: Change, changes: list[Change], problems: list[str]) -> bool:
    """Whether the target is another one under another name: upstream moves classes and leaves aliases."""
    for other in changes:
        if other.owner is change.owner and other.name == change.name:
            if [p.replacement for p in other.patches] != [p.replacement for p in change.patches]:
                problems.append(f"is {other.target} under another name, which is patched otherwise")
            return True
    return False


def _plan_provided(group: list[Patch], problems: list[str]) -> Change | None:
    patch, *more = group
    if more:
        problems.append(f"provided by {patch.replacement}, patched again by {more[0].replacement}")
    try:
        owner, name = _owner(patch.target)
    except (PatchError, ImportError):
        if patch.optional:
            return None
        raise
    raw = _lookup(owner, name)
    if raw is _ABSENT and name not in inspect.getsource(owner):
        if patch.optional:
            return None
        problems.append(f"{_describe(owner)} never mentions {name!r}")
    elif raw is not _ABSENT and raw is not None:
        if patch.bound == "kept":
            return None
        if patch.bound == "refused":
            problems.append("upstream binds it already; a provided name must be unbound, or None")
    return Change((patch,), owner, name, raw, _replacement(patch))


def _contract_problems(patch: Patch, raw: Any) -> Iterable[str]:
    contract = patch.contract
    if contract is not None and (found := parameters(raw)) != contract:
        yield f"upstream takes {found}, {patch.replacement} expects {contract}"
    if patch.sources and (found_hash := source_hash(raw)) not in patch.sources.values():
        yield (
            f"upstream's body (hash {found_hash}) is none of those that {patch.replacement} was "
            f"written against ({', '.join(patch.sources)})"
        )


def _indistinguishable(changes: Iterable[Change]) -> Iterable[Problem]:
    """Undo finds late copies by identity, so no two functions may be given the same object. A name that
    holds nothing (``None``, or unbound) may: late copies go back to what the function was."""
    seen: dict[int, str] = {}
    for change in changes:
        if not _has_aliases(change.new) or not _has_aliases(change.raw):
            continue
        other = seen.setdefault(id(change.new), change.target)
        if other != change.target and isinstance(change.owner, types.ModuleType):
            text = f"is given the same object as {other}; undo could not tell them apart"
            yield Problem(change.target, text)


def _listed(problems: Iterable[Problem]) -> str:
    lines = (f"{p.target}: {p.text}" for p in problems)
    return "cannot patch, nothing was changed:\n  " + "\n  ".join(lines)


def _owner(path: str) -> tuple[Any, str]:
    module, separator, qualname = path.partition(":")
    if not (module and separator and qualname):
        raise PatchError(f"{path!r} is not of the form 'package.module:name'")
    owner: Any = importlib.import_module(module)
    *parents, name = qualname.split(".")
    for parent in parents:
        found = _lookup(owner, parent)
        if found is _ABSENT:
            raise PatchError(
                f"{path}: {_describe(owner)} has no {parent!r}{_near(parent, dir(owner))}"
            )
        owner = found
    return owner, name


def _lookup(owner: Any, name: str) -> Any:
    for holder in inspect.getmro(owner) if inspect.isclass(owner) else (owner,):
        if name in vars(holder):
            return vars(holder)[name]
    return _ABSENT


def _replacement(patch: Patch) -> Any:
    return _function(resolve(patch.replacement)[2])


def _function(raw: Any) -> Any:
    return raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw


def _describe(owner: Any) -> str:
    return f"{'class' if inspect.isclass(owner) else 'module'} {owner.__name__}"


def _near(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=3)
    return f"; near names: {', '.join(near)}" if near else ""


def _bind(applied: Applied, owner: Any, name: str, new: Any) -> None:
    applied.bindings.append(Binding(owner, name, vars(owner).get(name, _ABSENT), new))
    setattr(owner, name, new)


def _set(owner: Any, name: str, value: Any) -> None:
    if value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _is_public(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith(("accel.ops", "accel.layers"))


def _has_aliases(value: Any) -> bool:
    """Constants such as False are shared by everybody; only what has an identity of its own is
    swept."""
    return callable(value) or isinstance(value, types.ModuleType)


def aliases(
    swaps: Mapping[int, tuple[Any, Any]], scope: tuple[str, ...]
) -> Iterable[tuple[types.ModuleType, str, tuple[Any, Any]]]:
    """Every module-level name in ``scope`` that is bound to the first object of one of the
    ``swaps``."""
    return _copies(swaps, _within(scope))


def _copies(
    swaps: Mapping[int, tuple[Any, Any]], modules: Iterable[types.ModuleType]
) -> Iterable[tuple[types.ModuleType, str, tuple[Any, Any]]]:
    for module in modules if swaps else ():
        for name, value in list(vars(module).items()):  # vars(): never runs a module __getattr__
            swap = swaps.get(id(value))
            if swap is not None and swap[0] is value:
                yield module, name, swap


def _within(scope: tuple[str, ...]) -> Iterator[types.ModuleType]:
    """But extension modules, which hold the classes by whose identity others tell them."""
    for name, module in list(sys.modules.items()):
        within = isinstance(module, types.ModuleType) and name.partition(".")[0] in scope
        if within and not isinstance(vars(module).get("__loader__"), ExtensionFileLoader):
            yield module


def _imported_since(known: frozenset[str], scope: tuple[str, ...]) -> Iterator[types.ModuleType]:
    """Those beyond the scope; none of accel's, and no lazy ones, which would be imported by this."""
    for name, module in list(sys.modules.items()):
        beyond = name.partition(".")[0] not in (*scope, "accel")
        if beyond and name not in known and type(module) is types.ModuleType:
            yield module
