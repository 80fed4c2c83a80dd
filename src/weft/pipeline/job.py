"""What one compilation is asked for, what it has come to, and what it gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch

from weft.errors import ArtifactError
from weft.frontends.imported import Imported
from weft.ir.graph import Graph
from weft.kernels.plan import IndexCheck, Plan
from weft.kernels.record import CompileRecord, PlanRecord
from weft.orchestrate.enumerate import Enumeration
from weft.pipeline import reference
from weft.pipeline.deadline import Deadline
from weft.pipeline.indices import with_checks
from weft.pipeline.problems import Problems
from weft.pipeline.search.prices import Known
from weft.pipeline.setting import Setting
from weft.pipeline.stages import Stages
from weft.pipeline.verdict import Judged
from weft.runtime.any import AnyExecutable

Tensors = Sequence[torch.Tensor]
Start = Callable[[float], Callable[..., Tensors] | None]
"""Makes the framework's own execution within so many seconds; None where there is none."""
NOTHING_FOUND = Enumeration((), 0, 0, Counter(), True, 0.0)
"""What is found where there was no time to look."""


@dataclass(frozen=True)
class Compilation:
    """What answers calls and how it came about."""

    graph: Graph
    """What is computed."""
    plan: AnyExecutable | None
    """The best plan; None: none is left."""
    record: CompileRecord
    eager: Callable[..., Tensors] | None = None
    """The framework's own execution, where that is the answer; on a GPU recorded into a CUDA graph where possible."""
    parts: tuple[Compilation, ...] = ()
    """Of a model that no plan holds whole: what its parts came to, which `eager` runs with what is between them."""

    @property
    def run(self) -> Callable[..., Tensors]:
        """What a call should run."""
        return self.eager or self.executable

    @property
    def executable(self) -> AnyExecutable:
        """The best plan, whether or not the framework's own execution beats it.

        Raises:
            ArtifactError: there is none [W401].
        """
        if self.parts:
            problem = (
                f"there is no one plan: it is compiled in parts ({len(self.parts)}), and torch runs what no plan holds"
            )
            raise ArtifactError(problem=problem, remedy="`Compiled.parts` has what each part came to")
        if self.plan is None:
            problem = "no plan of this model is left: the framework's own execution answers its calls"
            remedy = "compile it again with a larger budget, without other load on the machine"
            raise ArtifactError(problem=problem, remedy=remedy)
        return self.plan


@dataclass(frozen=True)
class Framework:
    """The framework's own execution of a model: a baseline, and the answer where no plan is left."""

    name: str
    """In the record."""
    run: Callable[..., Tensors] | None
    settle: Callable[[], None] | None
    """Called when it has won: from then on it must not depend on what others hold."""
    start: Start | None
    """Makes `run` where that takes time."""
    has_run: bool = False
    """Whether it ran before, in this process: what a first run loads is there."""


@dataclass(frozen=True)
class Job:
    """What one compilation is asked for, and what it works with."""

    imported: Imported
    checks: tuple[IndexCheck, ...]
    """Of indices, whose values are further outputs of `cleaned` and `graph`."""
    cleaned: Graph
    """The model as primitives, once it is cleaned up; as it was imported before."""
    graph: Graph
    """With the alternatives: what plans are made of."""
    example_inputs: Tensors | None
    framework: Framework
    model: str
    """The model's name in the record."""
    setting: Setting
    stages: Stages
    clock: Deadline
    replaces: Mapping[int, int]
    """Outputs that callers have written into an input's memory, as a training step's weights are: the positions."""

    @classmethod
    def of(
        cls,
        imported: Imported,
        example_inputs: Tensors | None,
        framework: Framework,
        model: str,
        setting: Setting,
        stages: Stages,
        clock: Deadline,
        replaces: Mapping[int, int] = MappingProxyType({}),
    ) -> Job:
        """The job as it is given, nothing done yet; its plans share what a platform lends."""
        setting = replace(setting, platform=setting.platform.lending())
        given, checks = with_checks(imported) if setting.options.check_indices else (imported, ())
        if checks:  # the framework gives no indices out, and on a GPU dies of one outside
            framework = Framework(framework.name, None, None, None)
        graph = given.graph
        return cls(imported, checks, graph, graph, example_inputs, framework, model, setting, stages, clock, replaces)

    def inputs(self) -> list[torch.Tensor]:
        """What plans are judged and timed on, on the device: the example inputs, or else drawn ones."""
        given = self.example_inputs
        if given is None:
            given = reference.example_inputs(self.cleaned, self.setting.options.seed, self.imported.integers)
        return [x.to(self.setting.platform.device) for x in given]

    @property
    def tunes(self) -> bool:
        """Whether anything is measured."""
        return self.setting.options.budget_s > 0

    @property
    def stands_in(self) -> bool:
        """Whether the framework's own execution may answer; nothing is known of what it takes of memory or of an SM."""
        return self.framework.run is not None and not self.setting.options.bounds_plans


@dataclass(frozen=True, slots=True)
class Decision:
    """What whole plans came to when they were judged and timed."""

    executable: AnyExecutable | None
    """The best plan; None: none is left."""
    chosen: str
    """Who answers calls: the name of a plan, or of the framework."""
    plans: tuple[PlanRecord, ...]
    """All of them, and the framework's own execution."""
    step_us: Sequence[float] = ()
    """Of each step of the best plan, where it stands; empty: not measured."""

    by_framework: bool = False
    """Whether the framework answers, and not the plan."""


@dataclass(frozen=True)
class Searched:
    """What a search has come to, as far as it came."""

    found: Enumeration = NOTHING_FOUND
    problems: Problems = field(default_factory=lambda: Problems({}))
    known: Known = field(default_factory=Known)
    plans: Sequence[Plan] = ()
    """Those that may run, the best first."""
    verdict: Judged | None = None
    """None: there was no search."""
