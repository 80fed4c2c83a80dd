"""The generators that take part: our own, and plug-ins of the entry-point group `weft.generators`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points

from weft.device.kinds import KINDS, kind_of, part
from weft.errors import PlugInError
from weft.generate.library import LibraryGenerator
from weft.generate.protocol import CONTRACT, OLDEST, Generator

_GUIDE = "docs/writing-a-generator.md"


def generators(*, library: bool = True, generated: bool = True, device: str = "cpu") -> Sequence[Generator]:
    """Instances for one kind of device (see `weft.device.kinds`), the library first. Plug-ins count as generated.

    Works from a source tree too, where our own entry points are not installed.

    Raises:
        PlugInError: an installed plug-in cannot be loaded, or is of a version that this Weft does not take [W014].
    """
    found: list[Generator] = []
    if library:
        found.append(LibraryGenerator())
    if generated:
        found.append(part(kind_of(device).generator)())
        ours, taken = _ours(), dict[str, str]()
        for entry in sorted(entry_points(group="weft.generators"), key=lambda e: e.name):
            if entry.name in ours:
                continue
            made, devices = plug_in(entry)
            if made.name in taken:
                problem = f"its name {made.name!r} is that of {taken[made.name]}, too"
                raise _refused(entry, problem, "install only one of them")
            taken[made.name] = _named(entry)
            found += [made] if device in devices else []
    return found


def plug_in(entry: EntryPoint) -> tuple[Generator, frozenset[str]]:
    """An instance of a plug-in, and the kinds of devices that it is asked for.

    One written for an older contract that is still taken works as it did, with a DeprecationWarning.

    Raises:
        PlugInError: it cannot be loaded, lacks what a generator has, has a name of Weft's own, or was written for a
            contract that this Weft does not take; the error has both versions and what to do [W014].
    """
    try:
        made = entry.load()()
    except Exception as error:  # whatever the package's own code does
        problem = f"cannot be loaded ({type(error).__name__}: {error})"
        raise _refused(entry, problem, "repair or uninstall the package") from error
    contract = getattr(made, "contract", 1)
    if type(contract) is not int or contract < 1:
        raise _refused(entry, f"its contract is {contract!r}, no version", f"see {_GUIDE}")
    if contract > CONTRACT:
        problem = f"written for version {contract} of the contract of generators; this Weft has {CONTRACT}"
        raise _refused(entry, problem, f"install a newer Weft, or a version of the package for contract {CONTRACT}")
    if contract < OLDEST:
        problem = f"written for version {contract} of the contract of generators; this Weft takes {_taken()}"
        raise _refused(entry, problem, f"install a newer version of the package; its author finds {_GUIDE} helpful")
    lacks = [x for x in ("schedules", "emit") if not callable(getattr(made, x, None))]
    name = getattr(made, "name", None)
    if lacks or not isinstance(name, str) or not name:
        raise _refused(entry, f"has no {lacks[0] if lacks else 'name'}, which a generator has", f"see {_GUIDE}")
    if name in _ours():
        raise _refused(entry, f"its name {name!r} is that of a generator of Weft's own", "ask its author for another")
    return made, _devices(made, contract, entry)


def _ours() -> frozenset[str]:
    """Names of generators of Weft's own."""
    return frozenset({LibraryGenerator.name, *(part(kind.generator).name for kind in KINDS.values())})


def _devices(made: Generator, contract: int, entry: EntryPoint) -> frozenset[str]:
    if contract == 1:
        warnings.warn(
            f"generator {_named(entry)} was written for version 1 of the contract of generators and is asked for every"
            f" kind of device; a coming Weft refuses it: declare contract = {CONTRACT} and devices (see {_GUIDE})",
            DeprecationWarning,
            stacklevel=2,
        )
        return frozenset(KINDS)
    devices = getattr(made, "devices", ())
    known = not isinstance(devices, str) and bool(devices) and all(d in KINDS for d in devices)
    if not known:
        problem = f"its devices are {devices!r}; there are {', '.join(sorted(KINDS))}"
        raise _refused(entry, problem, f"see {_GUIDE}")
    return frozenset(devices)


def _taken() -> str:
    return str(CONTRACT) if OLDEST == CONTRACT else f"{OLDEST} to {CONTRACT}"


def _named(entry: EntryPoint) -> str:
    """The entry point, with its package where that is known."""
    return f"{entry.name!r} ({entry.dist.name if entry.dist is not None else entry.value})"


def _refused(entry: EntryPoint, problem: str, remedy: str) -> PlugInError:
    return PlugInError(generator=_named(entry), problem=problem, remedy=remedy)
