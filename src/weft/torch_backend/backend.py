"""`torch.compile(model, backend="weft")`.

The results are eager's within the tolerance table, with one known difference: an index outside its tensor, for which
eager raises, is clamped (see `weft.ir.prims`).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, final

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import _disable_current_modes

from weft.errors import OptionError, UnsupportedError
from weft.frontends.torch import calls_of_framework, decompositions, whole_resizes
from weft.options import Options
from weft.torch_backend.engine import Engine, compiling_engine
from weft.torch_backend.region import Compiled, Region, boxed, log
from weft.torch_backend.specialised import Specialised, is_symbolic, scalars_of, with_scalars
from weft.torch_backend.split import Part, Parts, split
from weft.torch_backend.weights import given_integers, static_inputs, traced_positions

_serial = itertools.count()
_NAMES = frozenset(f.name for f in fields(Options))


@final
@dataclass(frozen=True)
class Backend:
    """A backend of torch.compile; regions that cannot be compiled run eagerly, named in the log of `weft`."""

    options: Options
    engine: Engine = compiling_engine
    on_region: Callable[[Region], None] | None = None
    """Told of every region, for tests and statistics."""
    weight_sets: int = 1
    """How many sets of weights a region is compiled with beside each other, see `Region`."""

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
    ) -> Callable[..., Any]:
        """Compile one graph of dynamo.

        Raises:
            OptionError: `torch.compile(..., options=...)` names something that `weft.Options` lacks [W001].
        """
        if options:
            unknown = sorted(set(options) - _NAMES)
            if unknown:
                raise OptionError(option=str(unknown[0]), problem="no such option")
            return replace(self, options=replace(self.options, **options))(gm, example_inputs)
        serial = next(_serial)
        scalars = scalars_of(gm)
        if scalars or any(is_symbolic(x) for x in example_inputs):
            return Specialised(
                lambda arguments: self._compile(with_scalars(gm, arguments, scalars), arguments, serial),
                self.options.max_plans,
                scalars,
                gm if scalars else None,
            )
        return self._compile(gm, example_inputs, serial)

    def _compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any], serial: int) -> Callable[..., Any]:
        options = replace(self.options, device=_device_of(example_inputs, self.options.device))
        statics = static_inputs(gm, example_inputs) if options.freeze_weights else {}
        integers = given_integers(example_inputs)

        def compiler(kind: str) -> Callable[[fx.GraphModule, Sequence[Any]], Compiled]:
            def compile_region(graph: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
                weights = traced_positions(graph, statics) if kind == "inference" else {}
                name = f"graph {serial} ({kind})"
                values = traced_positions(graph, integers)
                parts = parts_of(graph, inputs, name, options.device)
                if parts is None:
                    return self._region(graph, name, inputs, options, weights, values).boxed()

                return self.in_parts(parts, name, options, weights, values)

            return compile_region

        compile_graph = aot_autograd(
            fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"),
            inference_compiler=compiler("inference"),
            decompositions=decompositions(),
            keep_inference_input_mutations=True,
        )
        with whole_resizes():
            found: Callable[..., Any] = compile_graph(gm, list(example_inputs))
        return found

    def in_parts(
        self,
        parts: Parts,
        name: str,
        options: Options,
        weights: Mapping[int, torch.Tensor],
        integers: Mapping[int, torch.Tensor],
    ) -> Compiled:
        """A graph of which each part is a region with its share of the budget; tensors by the graph's arguments."""

        def compiled(part: Part) -> Region:
            own = [n.meta.get("val") for n in part.graph.graph.nodes if n.op == "placeholder"]
            given = enumerate(part.arguments)
            places = {k: position for k, position in given if position >= 0}
            return self._region(
                part.graph,
                f"{name}, {part.name.removeprefix('submod_')}",
                own,
                replace(options, budget_s=options.budget_s * part.share),
                {k: weights[p] for k, p in places.items() if p in weights},
                {k: integers[p] for k, p in places.items() if p in integers},
            )

        return boxed(parts.with_compiled(compiled))

    def _region(
        self,
        graph: fx.GraphModule,
        name: str,
        inputs: Sequence[object],
        options: Options,
        weights: Mapping[int, torch.Tensor],
        integers: Mapping[int, torch.Tensor],
    ) -> Region:
        region = Region(graph, name, weights, integers, self.weight_sets)
        region.compile(inputs, options, self.engine)
        if self.on_region is not None:
            self.on_region(region)
        return region


def parts_of(graph: fx.GraphModule, inputs: Sequence[object], name: str, device: str) -> Parts | None:
    """The parts of a graph that holds calls which no plan does; None: there are none, or nothing is won by parts."""
    with _disable_current_modes(), torch.no_grad():
        try:
            left = calls_of_framework(graph, inputs, device=device)
            parts = split(graph, left) if left else None
        except UnsupportedError:
            return None  # an argument, of which the region speaks
        except Exception:
            # never the user's problem: the whole graph is one region then, which is compiled or left to eager
            log.debug("weft: %s cannot be split", name, exc_info=True)
            return None
    if parts is not None:
        told = str(next(iter(left.values()))).partition("\n")[0]
        count = len(parts.compiled)
        text = "weft: %s is compiled in parts (%d), and eager runs what no plan holds (%d calls): %s"
        log.warning(text, name, count, len(left), told)
    return parts


def _device_of(arguments: Sequence[object], default: str) -> str:
    """Where the model is: dynamo's graphs say it themselves."""
    places = [a.device for a in arguments if isinstance(a, torch.Tensor)]
    return next((str(p) for p in places if p.type != "cpu"), "cpu" if places else default)


def weft_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The entry point `torch_dynamo_backends: weft`, with the options of the environment.

    `torch.compile(model, backend="weft", options={"budget_s": 60.0})` sets fields of `weft.Options`.

    Raises:
        OptionError: an option or a variable WEFT_... that cannot be taken [W001].
    """
    return Backend(Options.from_environment(os.environ))(gm, example_inputs, options=options)


def register() -> None:
    """Make `backend="weft"` known to torch, where the entry point of an installed package is not; may be repeated."""
    from torch._dynamo.backends import registry

    if "weft" not in registry.list_backends(exclude_tags=()):
        registry.register_backend(weft_backend, name="weft")


def weft_backend_with(engine: Engine, options: Options | None = None) -> Backend:
    """A backend with another engine, e.g. `reference_engine`."""
    return Backend(options or Options.from_environment(os.environ), engine)


__all__ = ["Backend", "register", "weft_backend", "weft_backend_with"]
