from __future__ import annotations

import faulthandler
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests import alone
from tests.gpu.machine import Gpu
from tests.gpu.small_networks import DTYPES, Case, network
from tests.typed import some

import weft
from weft.device.cuda.driver import primary_context
from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc

BUDGET_S = 30.0
"""A third of it is what a worker may take to be ready, beside a dozen other tests."""
LIMIT_S = 90
"""Of one test, where its file has no `LIMIT_S`."""


@pytest.fixture(autouse=True)
def _time_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that takes longer fails; one that waits for ever, as for a kernel with wrong barriers, ends the run.

    What is compiled in fixtures of modules is not counted.
    """
    limit_s: int = getattr(request.module, "LIMIT_S", LIMIT_S)

    def late(*_: object) -> None:
        raise TimeoutError(f"not done after {limit_s} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(limit_s)
    faulthandler.dump_traceback_later(2 * limit_s, exit=True, file=some(sys.__stderr__))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def context() -> Iterator[None]:
    """The primary context of the first GPU."""
    with primary_context():
        yield


@pytest.fixture(scope="session")
def stated() -> GpuFacts:
    """What the driver states about it."""
    return gpu_facts(None, calibrate=False)


@pytest.fixture(scope="session")
def nvrtc() -> Nvrtc:
    found = find_nvrtc({})
    assert isinstance(found, Nvrtc), found.reason
    return found


@pytest.fixture(scope="module")
def gpu(nvrtc: Nvrtc, stated: GpuFacts) -> Iterator[tuple[Gpu, GpuFacts]]:
    """What runs kernels by themselves, and what the driver states about the GPU."""
    torch.zeros(1, device="cuda")
    with primary_context():
        yield Gpu(nvrtc, stated.arch), stated


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all tests of the session: a GPU is calibrated once, a network tuned once."""
    return tmp_path_factory.mktemp("shared")


HERE = Path(__file__).parent
FIRST = ("runtime/test_calls.py", "pipeline/test_networks.py", "test_surface.py", "tune/test_faults.py")
"""What users touch goes first; the parts beneath it follow."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [k for k, item in enumerate(items) if item.path.is_relative_to(HERE)]
    order = {HERE / name: k for k, name in enumerate(FIRST)}
    moved = sorted((items[k] for k in here), key=lambda item: order.get(item.path, len(order)))
    for k, item in zip(here, moved, strict=True):
        items[k] = item


Tell = Callable[[str], None]
_TOLD = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def tell(pytestconfig: pytest.Config) -> Tell:
    """Adds a line with a number to the end of the report."""
    lines = pytestconfig.stash.setdefault(_TOLD, [])
    return lines.append


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say at once why a test failed: a run on a lent machine may be cut off before its end."""
    if report.failed and report.longrepr is not None:
        stderr = some(sys.__stderr__)
        stderr.write(f"\n{report.nodeid} failed after {report.duration:.1f} s\n{report.longreprtext[-1500:]}\n")
        stderr.flush()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash.get(_TOLD, []):
        terminalreporter.write_line(line)


Compile = Callable[[str, str], Case]


@pytest.fixture(scope="session")
def compiled(shared_cache: Path) -> Compile:
    """(`cnn` or `transformer`, element type) -> the network, tuned when it is first asked for."""
    made: dict[tuple[str, str], Case] = {}
    options = weft.Options(device="cuda", budget_s=BUDGET_S, cache_dir=shared_cache)

    def get(name: str, dtype: str) -> Case:
        if (name, dtype) not in made:
            with alone.aside(f"{name} {dtype}"):  # whoever is first draws no other numbers afterwards
                module, inputs = network(name, DTYPES[dtype])
            made[name, dtype] = Case(module, inputs, weft.compile(module, inputs, options=options), options)
        return made[name, dtype]

    return get
