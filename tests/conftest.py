"""What holds for every test: it depends on none before it, and one that needs a GPU is skipped where there is none."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# before torch and NumPy: OpenMP's threads sleep while they wait for one another, and NumPy's products have one. There
# are more of them than cores where several processes run tests: one that spins takes the core from whom it waits for
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from tests import alone, compiled

from weft.device.cuda.api import call, driver_api
from weft.device.cuda.nvrtc import Nvrtc
from weft.device.toolchain import HostCompiler
from weft.errors import DeviceError

try:
    import hypothesis
except ModuleNotFoundError:  # a machine that is there for its GPU may have no more than pytest
    pass
else:
    # the same examples in every run, kept nowhere, and no verdict on how busy the machine is
    hypothesis.settings.register_profile(
        "weft", derandomize=True, database=None, deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )  # fmt: skip
    hypothesis.settings.load_profile("weft")

with contextlib.suppress(ModuleNotFoundError):
    importlib.import_module("rich.style")  # draws while it is imported: not on behalf of the first file that needs it

COMPILER_S = 900.0
"""How long a compiler may take where nobody says: on a busy machine the usual minute is not enough for every text."""
DREW = pytest.StashKey[list[str]]()
"""Test files that drew from a generator of the process while they were imported."""
FOR_GPU = pytest.StashKey[set[str]]()
"""Collected tests that need a GPU, whether they are selected or not."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in the order that this number gives")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[DREW] = []
    config.stash[FOR_GPU] = set()


def pytest_report_header(config: pytest.Config) -> str | None:
    number = config.getoption("--shuffle")
    return None if number is None else f"order: --shuffle {number}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where tests for a GPU alone are wanted, other files are not imported: what they import may not be there."""
    if collection_path.suffix != ".py" or not for_gpu_alone(config.option.markexpr):
        return None
    return None if "mark.gpu" in (text := collection_path.read_text()) or "mark.multigpu" in text else True


def for_gpu_alone(expression: str) -> bool:
    """Whether `-m` says so."""
    return bool(re.fullmatch(r"\s*(multi)?gpu(\s+or\s+(multi)?gpu)?(\s+and\s+not\s+\w+)*\s*", expression))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    if not isinstance(collector, pytest.Module):
        return (yield)
    with alone.aside(collector.nodeid):
        before = alone.drawn()
        report = yield
        if alone.drawn() != before:
            collector.config.stash[DREW].append(collector.nodeid)
    return report


def pytest_itemcollected(item: pytest.Item) -> None:
    if gpus_for(item):
        item.config.stash[FOR_GPU].add(item.nodeid)


def gpus_for(item: pytest.Item) -> int:
    """How many GPUs a test needs."""
    return 2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        needed = gpus_for(item)
        if needed > (count := gpus()[0] if needed else 0):
            why = gpus()[1] if count == 0 else f"there is one GPU, {needed} are needed"
            item.add_marker(pytest.mark.skip(reason=why))
    if (number := config.getoption("--shuffle")) is not None:
        items[:] = alone.shuffled(items, number)


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests stay for good: no collection of garbage looks at them again


@cache
def gpus() -> tuple[int, str]:
    """How many GPUs there are, and why there is none."""
    try:
        count = int(call(driver_api().cuDeviceGetCount))
    except DeviceError as error:
        return 0, str(error).splitlines()[0]
    return count, "no GPU is visible"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    alone.seed(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> Iterator[None]:
    if fixturedef.scope == "function":
        return (yield)
    with alone.aside(f"{fixturedef.baseid} {fixturedef.argname} {request.param_index}"):  # type: ignore[attr-defined]
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def _caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where caches are that no test has chosen, in place of the user's."""
    folder = tmp_path_factory.mktemp("caches")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_CONFIG", "")  # what the user has chosen is not what is tested
        patch.setenv("WEFT_CACHE_DIR", str(folder / "shared"))
        for compiler in (Nvrtc.compile, Nvrtc.compile_many, HostCompiler.compile):
            defaults = compiler.__kwdefaults__
            assert defaults is not None
            patch.setitem(defaults, "timeout_s", COMPILER_S)
        if kept := os.environ.get(compiled.VARIABLE):
            compiled.keep(patch, Path(kept).resolve())
        yield folder


@pytest.fixture
def compilers_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled is compiled in this test, and nothing of it kept: for tests of the compilers themselves."""
    monkeypatch.delenv(compiled.VARIABLE, raising=False)


@pytest.fixture(autouse=True)
def _alone(_caches: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """A cache of its own, but for tests on a GPU, which is calibrated once; fails a test that changes what others see.

    What a fixture of its file has changed lasts as long as that fixture.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not gpus_for(request.node):
            patch.setenv("WEFT_CACHE_DIR", str(_caches / f"{alone.number_of(request.node.nodeid):08x}"))
        before = alone.surroundings()
        yield
        left = alone.changed(before, alone.surroundings())
    if left:
        pytest.fail("left behind for other tests:\n" + "\n".join(left), pytrace=False)
