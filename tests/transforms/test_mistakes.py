"""What users write by mistake, and where they may find themselves: each is answered by a sentence that helps."""

import re
import subprocess
import sys
from importlib import metadata

import pytest
import thunder
import torch
from packaging.requirements import Requirement
from thunder.dynamo import thunderfx
from torch import nn

from tests.fuzzing.command import uncompiled_regions
from thunder_mem import ChunkLossHead, MemEfficient, MemEfficientPlugin, _versions, explain, last_plan, why_no_plan

X = torch.ones(4, 4)
BRACKETS = r"transforms= takes a list: write transforms=\[MemEfficient\(...\)\] with brackets"
PARENTHESES = r"write transforms=\[MemEfficient\(\)\] with parentheses"


@pytest.fixture(autouse=True)
def _anew():
    torch._dynamo.reset()


def of_a_function(transforms):
    thunder.jit(torch.sin, transforms=transforms)(X)


def of_a_module(transforms):
    thunder.jit(nn.Linear(4, 4), transforms=transforms)(X)


def of_thunderfx(transforms):
    thunderfx(nn.Linear(4, 4), transforms=transforms)(X)


@pytest.mark.parametrize("way", [of_a_function, of_a_module, of_thunderfx])
def test_a_transform_without_its_list(way):
    with pytest.raises(Exception, match=BRACKETS):
        way(MemEfficient())


@pytest.mark.parametrize("way", [of_a_function, of_a_module, of_thunderfx])
def test_a_class_in_place_of_its_object(way):
    with pytest.raises(Exception, match=PARENTHESES):
        way([MemEfficient])


@pytest.mark.parametrize("way", [of_a_function, of_a_module, of_thunderfx])
def test_two_of_them_with_other_options(way):
    with pytest.raises(Exception, match=r"one MemEfficient plans a program, with all options: not both .*budget=64"):
        way([MemEfficient(budget=64), MemEfficient()])


@pytest.mark.parametrize("way", [of_a_function, of_a_module, of_thunderfx])
def test_a_plugin_in_place_of_a_transform(way):
    with pytest.raises(Exception, match=r"is a plugin: write transforms=\[MemEfficient\(...\)\], or thunder.compile"):
        way([MemEfficientPlugin()])


def test_a_transform_in_place_of_a_compiler():
    with pytest.raises(TypeError, match=r"ChunkLossHead compiles nothing itself: write thunder.jit\(fn, transforms="):
        ChunkLossHead()(nn.Linear(4, 4))
    with pytest.raises(Exception, match=r"MemEfficient compiles nothing itself: write thunder.jit\(fn, transforms="):
        torch.compile(nn.Linear(4, 4), backend=MemEfficient())(X)


@pytest.mark.slow
def test_importing_this_package_changes_nothing_of_thunders():
    """Who imports it and uses no transform has Thunder as it is."""
    program = """
import sys, thunder
import thunder.recipes
from thunder.core.interpreter import InterpreterRuntimeCtx
from thunder.core.prims import PrimIDs
from thunder.core.recipe import Recipe
from thunder.core.transforms import _grad_fn_map

def state():
    theirs = {key: rule for key, rule in _grad_fn_map.items() if isinstance(key, PrimIDs)}
    return thunder.jit, InterpreterRuntimeCtx.get_current_user_source_location, theirs, dict(Recipe._registry)

before = state()
import thunder_mem
sys.exit(state() != before)
"""
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", program]).returncode == 0


def test_it_is_the_class_that_is_named():
    with pytest.raises(TypeError, match=r"write transforms=\[ChunkLossHead\(...\)\] with brackets"):
        of_a_function(ChunkLossHead())
    with pytest.raises(ValueError, match=r"ChunkLossHead'> is a class, write transforms=\[ChunkLossHead\(\)\]"):
        of_a_function([ChunkLossHead])
    assert repr(MemEfficient) == "<class 'thunder_mem.transforms.mem_efficient.MemEfficient'>"


def test_a_plugin_that_is_a_transform_or_a_class():
    with pytest.raises(AttributeError, match=r'MemEfficient is a transform.* write plugins="mem-efficient" or'):
        thunder.compile(nn.Linear(4, 4), plugins=MemEfficient())
    with pytest.raises(TypeError, match=r"write plugins=MemEfficientPlugin\(\) with parentheses"):
        thunder.compile(nn.Linear(4, 4), plugins=MemEfficientPlugin)


def test_no_fusion_executor():
    with uncompiled_regions():
        bare, fused = (
            thunder.jit(nn.Linear(4, 4), transforms=[MemEfficient()], **way) for way in ({"executors": []}, {})
        )
        bare(X), fused(X)
    assert last_plan(bare) is not None
    told = "no executor of this compilation fuses operations, so none is rebuilt at no cost: leave executors= out"
    assert any(note.startswith(told) for note in explain(bare, bounds=False).notes)
    assert not any(note.startswith(told) for note in explain(fused, bounds=False).notes)


# --- versions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("distribution", "installed", "said"),
    [
        ("torch", "2.13.0+cu130", "'torch>=2.8,<2.12', or import thunder_mem.compat before thunder"),
        ("torch", "2.16.0", "works with torch>=2.8,<2.12, not with 2.16.0: pip install 'torch>=2.8,<2.12'"),
        ("torch", "2.7.1", "not with 2.7.1"),
        ("torch", "2.12.0a0+git1f2e", "not with 2.12.0a0"),
        ("torch", None, "needs torch>=2.8,<2.12, which is not installed: pip install"),
        ("lightning-thunder", "0.2.5", "works with lightning-thunder>=0.2.6,<0.3, not with 0.2.5"),
        ("lightning-thunder", "0.3.0", "not with 0.3.0"),
        ("torch", "2.8.0", ""),
        ("torch", "2.11.0a0+git1f2e", ""),
        ("lightning-thunder", "0.2.7.dev20260101", ""),
    ],
)
def test_versions_that_are_not_known(distribution, installed, said, monkeypatch):
    monkeypatch.delitem(sys.modules, "thunder_mem.compat")
    wanted = next(r for r in map(Requirement, metadata.requires("thunder-mem")) if r.name == distribution)
    told = _versions.mismatch(wanted, installed)
    assert (said in told) if said else (told == "")


def test_versions_that_compat_makes_work():
    wanted = Requirement("torch>=2.8,<2.12")
    assert _versions.mismatch(wanted, "2.15.0+cu132") == "" and "2.16.0" in _versions.mismatch(wanted, "2.16.0")


def _other_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "thunder_mem.compat")
    real = metadata.version
    monkeypatch.setattr(_versions.metadata, "version", lambda name: "2.13.0" if name == "torch" else real(name))


def test_an_unknown_version_is_warned_of(monkeypatch):
    _other_torch(monkeypatch)
    with pytest.warns(UserWarning, match=r"not with 2\.13\.0: pip install"):
        _versions.check_versions()


@pytest.mark.parametrize("known", [True, False])
def test_where_thunder_cannot_be_imported_the_versions_are_named(monkeypatch, known):
    if not known:
        _other_torch(monkeypatch)
    monkeypatch.setitem(sys.modules, "thunder", None)
    said = "`import thunder` fails" if known else r"not with 2\.13\.0: pip install"
    with pytest.raises(ImportError, match=said) as raised:
        _versions.check_versions()
    assert isinstance(raised.value.__cause__, ImportError)


def test_known_versions_are_silent(recwarn):
    _versions.check_versions()
    assert not recwarn.list


# --- no plan ---------------------------------------------------------------------------------------


def without_transform():
    (jitted := thunder.jit(torch.sin, executors=[]))(X)
    return jitted


def that_failed():
    (jitted := thunder.jit(torch.sin, executors=[], transforms=[MemEfficient(sort=lambda graph: 1 / 0)]))(X)
    return jitted


NO_PLANS = {
    "not called": (lambda: thunder.jit(torch.sin, transforms=[MemEfficient()]), "nothing of it was compiled yet: call"),
    "not asked": (without_transform, r"it has no MemEfficient: write thunder.jit\(..., transforms="),
    "failed": (that_failed, "planning failed, and Thunder alone compiled it: ZeroDivisionError"),
    "not jitted": (lambda: torch.sin, "is nothing that Thunder compiled: give what"),
}


@pytest.mark.filterwarnings("ignore:MemEfficient left this program")
@pytest.mark.parametrize("make, told", NO_PLANS.values(), ids=NO_PLANS.keys())
def test_why_there_is_no_plan(make, told):
    jitted = make()
    assert last_plan(jitted) is None and re.search(told, why_no_plan(jitted)), why_no_plan(jitted)


def test_where_there_is_a_plan_there_is_no_reason():
    (jitted := thunder.jit(torch.sin, executors=[], transforms=[MemEfficient()]))(X)
    assert last_plan(jitted) is not None and why_no_plan(jitted) == ""
