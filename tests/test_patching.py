"""The patch engine, on made-up modules: what is checked, what is rebound, that nothing is half
done."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from accel import patching
from accel.patching import Patch, PatchError


@pytest.fixture
def upstream() -> Iterator[types.SimpleNamespace]:
    """A package ``victim`` with a function, a class, and a second module that has copied the
    function."""
    source = (
        "import functools\n"
        "def f(x): return ('f', x)\n"
        "def other(x): return ('other', x)\n"
        "class Base:\n"
        "    def m(self): return 'm'\n"
        "class C(Base):\n"
        "    @staticmethod\n"
        "    def s(x): return x\n"
        "    @classmethod\n"
        "    def c(cls): return cls.__name__\n"
        "    class Inner:\n"
        "        def deep(self): return 'deep'\n"
        "FLAG = False\n"
        "def uses_missing(): return missing_name()\n"
        "NONE = None\n"
    )
    ours = (
        "def new_f(x): return ('new', x)\n"
        "def loud(original): return lambda x: ('loud', original(x))\n"
        "def louder(original): return lambda x: ('louder', original(x))\n"
        "def new_m(self): return 'new m'\n"
        "def negate(x): return -x\n"
        "def shout(cls): return cls.__name__.upper()\n"
        "def new_deep(self): return 'new deep'\n"
        "def provided(): return 'provided'\n"
        "TRUE = True\n"
        "from accel.patching import around\n"
        "@around\n"
        "def loudly(original, x): return ('loudly', original(x))\n"
        "@around\n"
        "def passing(original, *args, **kwargs): return ('passing', original(*args, **kwargs))\n"
        "@around\n"
        "def named(original, self): return (self.__class__.__name__, original(self))\n"
    )
    modules = {}
    for name, text in (("victim", source), ("victim.copy", ""), ("ours", ours)):
        module = types.ModuleType(name)
        module.__file__ = f"<{name}>"
        sys.modules[name] = modules[name] = module
        exec(compile(text, module.__file__, "exec"), vars(module))
        import linecache

        linecache.cache[module.__file__] = (len(text), None, text.splitlines(True), module.__file__)
    modules["victim.copy"].g = modules["victim"].f
    yield types.SimpleNamespace(
        victim=modules["victim"], copy=modules["victim.copy"], ours=modules["ours"]
    )
    for name in [n for n in sys.modules if n.partition(".")[0] in ("victim", "ours")]:
        del sys.modules[name]


def patch(target: str, replacement: str, **fields: object) -> Patch:
    return Patch(target=f"victim:{target}", replacement=f"ours:{replacement}", why="test", **fields)


def applied(*patches: Patch) -> patching.Applied:
    return patching.apply(patches, scope=("victim",))


def test_a_patch_that_features_share_counts_once(upstream: types.SimpleNamespace) -> None:
    with applied(patch("f", "new_f"), patch("f", "loud", how="wrap"), patch("f", "new_f")):
        assert upstream.victim.f(1) == ("loud", ("new", 1))
    with applied(patch("f", "loud", how="wrap"), patch("f", "loud", how="wrap")):
        assert upstream.victim.f(1) == ("loud", ("f", 1))
    assert upstream.victim.f(1) == ("f", 1)


def test_replaces_every_copy_and_restores_identity(upstream: types.SimpleNamespace) -> None:
    original = upstream.victim.f
    with applied(patch("f", "new_f")) as done:
        assert upstream.victim.f(1) == upstream.copy.g(1) == ("new", 1)
        assert len(done.bindings) == 2
    assert upstream.victim.f is upstream.copy.g is original


def test_modules_imported_while_patched_are_put_right(upstream: types.SimpleNamespace) -> None:
    original = upstream.victim.f
    with applied(patch("f", "loud", how="wrap")):
        late = sys.modules["victim.late"] = types.ModuleType("victim.late")
        late.f = upstream.victim.f
        assert late.f(1) == ("loud", ("f", 1))
    assert late.f is original


@pytest.mark.parametrize("module_of_ours", ["accel.patches.some", "accel.ops.some"])
def test_a_users_module_imported_while_patched_is_put_right(
    module_of_ours: str, upstream: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may have wanted an op of accel's for itself."""
    original, ours = upstream.victim.f, upstream.ours.new_f
    late, own = types.ModuleType("somebodys_loop"), types.ModuleType("somebodys_own")
    monkeypatch.setitem(sys.modules, own.__name__, own)
    own.f = ours
    ours.__module__ = module_of_ours
    with applied(patch("f", "new_f")):
        monkeypatch.setitem(sys.modules, late.__name__, late)
        late.f = upstream.victim.f
        assert late.f is ours
    assert (late.f is original) == (module_of_ours == "accel.patches.some")
    assert own.f is upstream.ours.new_f is ours, "it was there before"


def test_replacement_goes_below_wraps_which_nest_in_order(upstream: types.SimpleNamespace) -> None:
    wraps = [patch("f", "loud", how="wrap"), patch("f", "louder", how="wrap")]
    with applied(*wraps, patch("f", "new_f")):
        assert upstream.victim.f(1) == ("louder", ("loud", ("new", 1)))


def test_around_calls_the_adapter_with_the_original_first(
    upstream: types.SimpleNamespace,
) -> None:
    before = upstream.victim.f, upstream.victim.C.s, vars(upstream.victim.Base)["m"]
    with applied(
        patch("f", "loudly", how="wrap"),
        patch("C.s", "loudly", how="wrap"),
        patch("Base.m", "named", how="wrap"),
    ):
        assert upstream.victim.f(1) == upstream.copy.g(x=1) == ("loudly", ("f", 1))
        assert upstream.victim.C.s(2) == upstream.victim.C().s(2) == ("loudly", 2)
        assert upstream.victim.C().m() == ("C", "m")
    assert (upstream.victim.f, upstream.victim.C.s, vars(upstream.victim.Base)["m"]) == before


def test_around_nests_and_one_adapter_serves_several_originals(
    upstream: types.SimpleNamespace,
) -> None:
    with applied(
        patch("f", "loudly", how="wrap"),
        patch("f", "passing", how="wrap"),
        patch("other", "loudly", how="wrap"),
    ):
        assert upstream.victim.f(x=1) == ("passing", ("loudly", ("f", 1)))
        assert upstream.victim.other(1) == ("loudly", ("other", 1))


def test_around_shows_the_original(upstream: types.SimpleNamespace) -> None:
    original, adapter = upstream.victim.f, upstream.ours.passing
    wrapper = upstream.ours.loudly(adapter(original))
    assert (wrapper.__name__, wrapper.__module__) == ("f", "victim")
    assert inspect.signature(wrapper) == inspect.signature(original)
    assert inspect.unwrap(wrapper) is original
    assert patching.source_hash(wrapper) == patching.source_hash(original)
    assert adapter.__name__ == "passing"


def test_torch_compile_traces_through_around() -> None:
    @patching.around
    def twice(original: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return 2 * original(x)

    traced = torch.compile(twice(torch.sin), backend="eager", fullgraph=True)
    x = torch.ones(3)
    assert torch.equal(traced(x), 2 * x.sin())


def test_what_around_takes_is_what_it_expects(upstream: types.SimpleNamespace) -> None:
    assert patch("f", "loudly", how="wrap").contract == ("x",)
    assert patch("f", "passing", how="wrap").contract is None
    assert patch("f", "passing", how="wrap", expects=("y",)).contract == ("y",)
    assert patch("f", "loud", how="wrap").contract is None, "a factory's parameter is the original"
    assert patch("f", "new_f").contract is None


def test_descriptors_inheritance_and_nesting(upstream: types.SimpleNamespace) -> None:
    cls = upstream.victim.C
    with applied(
        patch("C.s", "negate"),
        patch("C.c", "shout"),
        patch("C.m", "new_m"),
        patch("C.Inner.deep", "new_deep"),
    ):
        assert (cls.s(3), cls().s(3), cls.c(), cls().m()) == (-3, -3, "C", "new m")
        assert (upstream.victim.Base().m(), cls.Inner().deep()) == ("m", "new deep")
    assert (cls.s(3), cls.c(), cls().m(), cls.Inner().deep()) == (3, "C", "m", "deep")
    assert "m" not in vars(cls), "an inherited method is deleted again, not copied down"


def test_constants_are_bound_but_never_swept(upstream: types.SimpleNamespace) -> None:
    upstream.copy.unrelated = False
    with applied(patch("FLAG", "TRUE")) as done:
        assert upstream.victim.FLAG is True
        assert upstream.copy.unrelated is False
        assert len(done.bindings) == 1
    assert upstream.victim.FLAG is False


def test_provides_a_name_that_a_guarded_import_left_unbound(
    upstream: types.SimpleNamespace,
) -> None:
    with applied(patch("missing_name", "provided", how="provide")):
        assert upstream.victim.uses_missing() == "provided"
    assert not hasattr(upstream.victim, "missing_name")
    with applied(patch("NONE", "provided", how="provide")):
        assert upstream.victim.NONE() == "provided"
    assert upstream.victim.NONE is None


def test_what_upstream_binds_after_all_is_replaced_or_kept_if_the_patch_says_so(
    upstream: types.SimpleNamespace,
) -> None:
    theirs = upstream.victim.f
    with applied(patch("f", "provided", how="provide", bound="replaced")):
        assert upstream.victim.f() == "provided"
    assert upstream.victim.f is theirs
    with applied(patch("f", "provided", how="provide", bound="kept")) as done:
        assert done.bindings == []
        assert upstream.victim.f is theirs
    with applied(patch("missing_name", "provided", how="provide", bound="kept")):
        assert upstream.victim.uses_missing() == "provided"


def test_provides_an_optional_name_only_where_upstream_mentions_it(
    upstream: types.SimpleNamespace,
) -> None:
    for target in ("never", "Nope.m"):
        with applied(patch(target, "provided", how="provide", optional=True)) as done:
            assert done.bindings == []
    elsewhere = Patch(
        target="victim.nowhere:f",
        replacement="ours:provided",
        why="x",
        how="provide",
        optional=True,
    )
    with applied(elsewhere) as done:
        assert done.bindings == []
    with pytest.raises(PatchError, match="upstream binds it already"):
        applied(patch("f", "provided", how="provide", optional=True))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (patch("g", "new_f"), "module victim has no 'g'"),
        (patch("othr", "new_f"), "near names: other"),
        (patch("C.nope", "new_m"), "class C has no 'nope'"),
        (patch("Nope.m", "new_m"), "module victim has no 'Nope'"),
        (patch("other", "no_such_thing"), "module ours has no 'no_such_thing'"),
        (patch("other", "new_f", expects=("a", "b")), r"upstream takes \('x',\)"),
        (patch("C.m", "loudly", how="wrap"), r"upstream takes \('self',\), .* expects \('x',\)"),
        (patch("f", "passing", how="wrap", expects=("a",)), r"upstream takes \('x',\)"),
        (patch("other", "new_f", sources={"1.0": "0" * 12}), r"none of those .* \(1.0\)"),
        (patch("f", "negate"), "replaced by both ours:new_f and ours:negate"),
        (patch("f", "provided", how="provide"), "upstream binds it already"),
        (patch("never", "provided", how="provide"), "never mentions 'never'"),
        (Patch(target="victim.nowhere:f", replacement="ours:new_f", why="x"), "victim.nowhere"),
        (Patch(target="victim", replacement="ours:new_f", why="x"), "package.module:name"),
    ],
)
def test_any_problem_changes_nothing(
    upstream: types.SimpleNamespace, bad: Patch, message: str
) -> None:
    before = dict(vars(upstream.victim)), dict(vars(upstream.victim.C))
    with pytest.raises(PatchError, match=message):
        applied(patch("f", "new_f"), bad)
    assert (dict(vars(upstream.victim)), dict(vars(upstream.victim.C))) == before


def test_all_problems_are_reported_at_once(upstream: types.SimpleNamespace) -> None:
    with pytest.raises(PatchError) as e:
        applied(patch("nope", "new_f"), patch("nada", "new_f"))
    assert "nope" in str(e.value)
    assert "nada" in str(e.value)


def test_the_same_object_for_two_functions_is_refused(upstream: types.SimpleNamespace) -> None:
    with pytest.raises(PatchError, match="could not tell them apart"):
        applied(patch("f", "new_f"), patch("other", "new_f"))


def test_names_that_hold_nothing_may_share_a_replacement(upstream: types.SimpleNamespace) -> None:
    before = upstream.victim.f
    upstream.victim.guarded = None
    with applied(patch("guarded", "new_f"), patch("f", "new_f")):
        assert upstream.victim.guarded is upstream.victim.f is upstream.ours.new_f
        late = types.ModuleType("victim.late")
        sys.modules["victim.late"] = late
        late.f = upstream.victim.guarded
    assert upstream.victim.guarded is None
    assert upstream.victim.f is before
    assert late.f is before


def test_undo_leaves_copies_alone_that_were_there_before(upstream: types.SimpleNamespace) -> None:
    upstream.copy.mine = upstream.ours.new_f
    applied(patch("f", "new_f")).undo()
    assert upstream.copy.mine is upstream.ours.new_f
    assert upstream.copy.g is upstream.victim.f


def test_optional_target_may_be_missing(upstream: types.SimpleNamespace) -> None:
    with applied(patch("gone", "new_f", optional=True)) as done:
        assert done.bindings == []


def test_an_alias_of_a_class_is_patched_once(upstream: types.SimpleNamespace) -> None:
    upstream.victim.OldName = upstream.victim.C
    both = [patch(f"{name}.m", "loud", how="wrap") for name in ("C", "OldName")]
    with applied(*both) as done:
        assert len(done.bindings) == 1
        assert upstream.victim.OldName().m() == ("loud", "m")
    assert upstream.victim.C().m() == "m"
    with pytest.raises(
        PatchError, match=r"OldName\.m: is victim:C\.m under another name, .* otherwise"
    ):
        applied(both[0], patch("OldName.m", "louder", how="wrap"))


def test_undo_refuses_when_somebody_else_rebound(upstream: types.SimpleNamespace) -> None:
    done = applied(patch("f", "new_f"))
    upstream.victim.f = len
    with pytest.raises(PatchError, match=r"victim\.f was changed after accel patched it"):
        done.undo()
    assert upstream.victim.f is len
    assert upstream.copy.g is upstream.ours.new_f, "a refused undo changes nothing"


def test_source_hash_accepts_any_known_body(upstream: types.SimpleNamespace) -> None:
    known = patching.source_hash(upstream.victim.f)
    with applied(patch("f", "new_f", sources={"1.0": "f" * 12, "1.1": known})):
        assert upstream.victim.f(0) == ("new", 0)


def test_tells_upstreams_own_from_somebody_elses(upstream: types.SimpleNamespace) -> None:
    victim = upstream.victim
    assert patching.replaced_by("victim:f") is None
    assert patching.replaced_by("victim:C.s") is None
    assert patching.replaced_by("victim:FLAG") is None
    original = victim.f
    victim.f = functools.lru_cache(original)
    assert patching.replaced_by("victim:f") is None, "a decorator of the standard library's"
    victim.f = torch.no_grad()(original)
    assert patching.replaced_by("victim:f") is None, "a decorator of torch's"
    victim.f = functools.wraps(original)(upstream.ours.new_f)
    assert victim.f.__module__ == "victim"
    assert patching.replaced_by("victim:f") == "ours"
    victim.f = torch.no_grad()(victim.f)
    assert patching.replaced_by("victim:f") == "ours", "below a decorator too"
    victim.f = upstream.ours.loudly(original)
    assert patching.replaced_by("victim:f") == "ours", "where the adapter was written"
    victim.f = patching.around(torch.no_grad()(upstream.ours.passing.adapter))(original)
    assert patching.written_in(victim.f) == "ours", "below a decorator too"
    victim.f = functools.wraps(victim.f)(lambda x: x)
    assert patching.written_in(victim.f) == __name__, "not where what it is around was"
    victim.C.s = staticmethod(upstream.ours.negate)
    assert patching.replaced_by("victim:C.s") == "ours"
    victim.C = type("C", (victim.C,), {"__module__": "ours.deeper"})
    assert patching.replaced_by("victim:C") == "ours.deeper"


@pytest.mark.parametrize(
    ("fields", "takes_over"),
    [({}, True), ({"how": "wrap"}, False), ({"how": "wrap", "sources": {"1": "0"}}, True)],
)
def test_a_wrap_leaves_the_body_its_work(fields: dict[str, Any], takes_over: bool) -> None:
    assert patch("f", "loud", **fields).takes_over is takes_over
