"""Plug-ins by the version of the contract that they were written for: taken, taken with a warning, refused."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib.metadata import EntryPoint

import pytest

from weft.device.any import DeviceFacts
from weft.errors import PlugInError
from weft.generate import protocol, registry
from weft.generate.protocol import CONTRACT, Generator, PlugIn
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import Kernel, Schedule


class Plain:
    """By the first contract: it declares nothing."""

    name = "plain"

    def schedules(self, problem: Problem, facts: DeviceFacts) -> Sequence[Schedule] | Declined:
        return Declined("a test's")

    def emit(self, problem: Problem, schedule: Schedule) -> Kernel | Declined:
        return Declined("a test's")


class First(Plain):
    name, contract = "first", 1


class Today(Plain):
    name, contract, devices = "today", 2, ("cuda",)


class Newer(Today):
    contract = CONTRACT + 1


class NoVersion(Today):
    contract = "2"  # type: ignore[assignment]


class Truth(Today):
    contract = True


class Zero(Today):
    contract = 0


class NoDevices(Plain):
    contract = 2


class Misspelt(Today):
    devices = ("gpu",)


class OneWord(Today):
    devices = "cpu"  # type: ignore[assignment]


class NoName(Today):
    name = ""


class Ours(Today):
    name = "cpp"


class NoEmit:
    name, contract, devices = "half", 2, ("cpu",)

    def schedules(self, problem: Problem, facts: DeviceFacts) -> Declined:
        return Declined("a test's")


class Broken(Today):
    def __init__(self) -> None:
        raise RuntimeError("no licence")


def entry(name: str, attribute: str) -> EntryPoint:
    return EntryPoint(name, f"{__name__}:{attribute}", "weft.generators")


def install(patch: pytest.MonkeyPatch, *entries: EntryPoint) -> None:
    """As if packages with these entry points were installed, beside Weft's own."""
    own = EntryPoint("cpp", "weft.generate.cpp:CppGenerator", "weft.generators")
    patch.setattr(registry, "entry_points", lambda *, group: [own, *entries] if group == "weft.generators" else [])


def names(found: Sequence[Generator]) -> list[str]:
    return [g.name for g in found]


def test_a_plug_in_of_today_is_asked_for_its_devices_and_nothing_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    today: PlugIn = Today()  # type: ignore[assignment] # its devices are a tuple
    assert today.contract == CONTRACT, "a version of its own: change the plug-in of this test with the contract"
    install(monkeypatch, entry("today", "Today"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert names(registry.generators(device="cuda")) == ["library", "cuda", "today"]
        assert names(registry.generators()) == ["library", "cpp"]
        assert names(registry.generators(device="cuda", generated=False)) == ["library"]


@pytest.mark.parametrize(("attribute", "name"), [("Plain", "plain"), ("First", "first")])
def test_one_of_the_first_contract_works_as_it_did_and_is_told(
    monkeypatch: pytest.MonkeyPatch, attribute: str, name: str
) -> None:
    install(monkeypatch, entry("old", attribute))
    for device, own in (("cpu", "cpp"), ("cuda", "cuda")):
        with pytest.warns(DeprecationWarning, match=r"'old' .*version 1 .*declare contract = 2 and devices"):
            found = registry.generators(device=device)
        assert names(found) == ["library", own, name]


def test_one_older_than_the_oldest_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "OLDEST", 2)
    install(monkeypatch, entry("old", "First"))
    with pytest.raises(PlugInError, match=r"version 1 .*this Weft takes 2 \[W014\]") as error:
        registry.generators()
    assert "install a newer version of the package" in str(error.value)


def test_one_newer_than_weft_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, entry("tomorrow", "Newer"))
    message = rf"'tomorrow' .*version {CONTRACT + 1} .*this Weft has {CONTRACT}"
    with pytest.raises(PlugInError, match=message) as error:
        registry.generators(device="cuda")
    assert "install a newer Weft" in str(error.value) and error.value.exit_code == 2


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("NoVersion", "'2', no version"), ("Truth", "True, no version"), ("Zero", "0, no version"),
        ("NoDevices", r"devices are \(\); there are cpu, cuda"), ("Misspelt", "'gpu'"),
        ("OneWord", "devices are 'cpu'"),
        ("NoName", "has no name"), ("NoEmit", "has no emit"), ("Ours", "Weft's own"),
        ("Broken", "RuntimeError: no licence"), ("Missing", "cannot be loaded .AttributeError"),
    ],
)  # fmt: skip
def test_what_is_no_plug_in_is_refused(monkeypatch: pytest.MonkeyPatch, attribute: str, message: str) -> None:
    install(monkeypatch, entry("odd", attribute))
    with pytest.raises(PlugInError, match=message) as error:
        registry.generators()
    assert str(error.value).startswith(f"generator 'odd' ({__name__}:{attribute}): ")


def test_two_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, entry("one", "Today"), entry("two", "Today"))
    with pytest.raises(PlugInError, match=r"'two' .*its name 'today' is that of 'one'"):
        registry.generators()


def test_versions_are_in_order() -> None:
    assert 1 <= protocol.OLDEST <= protocol.CONTRACT
