"""The framework's own kernels as candidates: ATen operators, and oneDNN's fused forms through ATen.

`LibraryGenerator` can run any problem (each primitive has an ATen form), so that a plan of library calls
always exists; `execute` is the part a saved plan needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from weft.device.cuda.facts import GpuFacts
from weft.device.facts import CpuFacts
from weft.generate.library import attention_call as _attention  # noqa: F401 - as the next two
from weft.generate.library import conv_call as _convolutions  # noqa: F401 - makes its step known to whoever runs calls
from weft.generate.library import lt_call as _products  # noqa: F401
from weft.generate.library import recurrent_call as _recurrent  # noqa: F401
from weft.generate.library.algorithm import ENGINE_FORM, FORM
from weft.ir.attrs import OpaqueAttrs
from weft.ir.declined import Declined
from weft.ir.graph import Graph
from weft.ir.prims import FREE, Prim
from weft.kernels.candidate import Problem
from weft.kernels.source import LibraryCall, Schedule

if TYPE_CHECKING:
    from weft.device.any import DeviceFacts


def _schedule(form: str, **params: bool | str) -> Schedule:
    return Schedule("library", tuple(sorted([*params.items(), ("form", form)])))


ON_DEVICE = "device"
"""The form of a call that stands for ONNX Runtime's, which runs on the host."""
CUDA_FORMS = frozenset({"cudnn", "cublaslt", "attention", "scaled_mm", FORM, ENGINE_FORM})


def has_device_form(graph: Graph) -> bool:
    """Whether a call of ATen may stand for the one opaque operator of a graph, which is ONNX's."""
    if not any(isinstance(n.attrs, OpaqueAttrs) and n.attrs.framework == "onnx" for n in graph.nodes):
        return False
    from weft.generate.library.onnx_aten import operator_of  # loads onnx

    return bool(operator_of(graph))


def _cuda_form(form: str, problem: Problem, schedule: Schedule) -> LibraryCall | Declined:
    from weft.generate.library.convolution import engine_call
    from weft.generate.library.fused_cuda import attention, cublaslt_linear, cudnn_conv
    from weft.generate.library.lt import lt_product
    from weft.generate.library.scaled_mm import scaled_mm

    forms = {
        "cudnn": cudnn_conv,
        "cublaslt": cublaslt_linear,
        "attention": attention,
        "scaled_mm": scaled_mm,
        FORM: lt_product,
        ENGINE_FORM: engine_call,
    }
    return forms[form](problem, schedule)


@final
class LibraryGenerator:
    """Lists the library forms of a problem: one operator, one fused product, or its primitives one by one."""

    name = "library"

    def schedules(self, problem: Problem, facts: DeviceFacts) -> Sequence[Schedule] | Declined:
        """Forms worth measuring. Groups of several primitives without a library form are declined.

        So are all under a budget of an SM: what a framework or a library launches has no resources that could be asked.
        """
        if isinstance(facts, GpuFacts) and facts.sm_budget is not None:
            return Declined(
                "a call, of which nobody knows what its kernels take of an SM: none may stand under sm_budget"
            )
        on_cpu, on_gpu = isinstance(facts, CpuFacts), isinstance(facts, GpuFacts)
        prims = [n.prim for n in problem.graph.nodes if n.prim not in FREE]
        found: list[Schedule] = []
        if on_gpu and Prim.CONV in prims:
            found.append(_schedule("cudnn"))
        if on_gpu and Prim.MATMUL in prims:
            from weft.generate.library.scaled_mm import of_float8

            found.append(_schedule("scaled_mm" if of_float8(problem.graph) else "cublaslt"))
        if on_gpu and problem.origin_rule == "sdpa":
            from weft.generate.library.fused_cuda import ATTENTION_BACKENDS

            found += [_schedule("attention", backend=name) for name in ATTENTION_BACKENDS]
        if on_cpu and Prim.CONV in prims:
            found += [_schedule("conv", channels_last=True), _schedule("conv", channels_last=False)]
        if on_cpu and Prim.MATMUL in prims:
            found.append(_schedule("linear"))
        if problem.origin_rule:
            from weft.generate.library.operators import FINITE

            found.append(_schedule("operator", **({"finite": True} if problem.origin_rule in FINITE else {})))
        between = [p for p in prims if p is not Prim.CAST] in ([Prim.ADD], [Prim.MUL]) and len(prims) == 3
        if on_gpu and between:
            found.append(_schedule("widened"))
        # in front of others these are strides of an operand; on a CPU other operators copy, or are slow with them
        strided = on_gpu or (Prim.MATMUL in prims and Prim.SLICE not in prims)
        moved = sum(p in (Prim.TRANSPOSE, Prim.SLICE) for p in prims) if strided else 0
        if len(prims) - moved <= 1 or prims.count(Prim.OPAQUE) == len(prims) - moved:
            found += [_schedule(ON_DEVICE)] if on_gpu and has_device_form(problem.graph) else []
            found.append(_schedule("primitives"))
        if isinstance(facts, GpuFacts) and Prim.CONV in prims:
            from weft.generate.library.convolution import engine_schedules

            best, *others = engine_schedules(problem, facts) or (None,)
            found = [best, *found, *others] if best is not None else found
        if isinstance(facts, GpuFacts) and Prim.MATMUL in prims:
            from weft.generate.library.lt import lt_schedules

            best, *others = lt_schedules(problem, facts) or (None,)
            found = [best, *found, *others] if best is not None else found
        return found or Declined("no library form of this group")

    def emit(self, problem: Problem, schedule: Schedule) -> LibraryCall | Declined:
        """The call of one form, or why it does not apply."""
        from weft.generate.library.fused import fused_conv, fused_linear, is_weight
        from weft.generate.library.operators import FOUND_AGAIN, OPERATORS, TABLED, Operator, widened
        from weft.generate.library.translate import Program

        form = schedule.param("form")
        if form in CUDA_FORMS:
            return _cuda_form(str(form), problem, schedule)
        if form == "conv":
            return fused_conv(problem, schedule)
        if form == "linear":
            return fused_linear(problem, schedule)
        if form == "widened":
            return widened(problem, schedule)
        if form == ON_DEVICE:
            from weft.generate.library.onnx_aten import on_device

            return on_device(problem, schedule)
        lost = min(problem.origin_operand_nodes, default=0) < -1 and problem.origin_rule not in FOUND_AGAIN
        if form == "operator" and lost:
            return Declined(f"an operand of {problem.origin_rule} was changed by the clean-ups")
        program = Program(problem.graph)
        if form == "primitives":
            return program.finish(schedule, problem)
        row = OPERATORS.get(problem.origin_rule)
        if row is None or len(problem.graph.outputs) != 1 or min(problem.origin_operand_nodes[:1], default=0) < 0:
            return Declined(f"no ATen operator for rule {problem.origin_rule!r}")
        operator = Operator(program, problem.origin_operand_nodes, problem.origin_params)
        result = row(operator)
        if ignored := operator.unread():
            return Declined(f"ATen's operator has no {', '.join(sorted(ignored))} for {problem.origin_rule!r}")
        if result is None:
            return Declined(f"ATen's operator does not mean this {problem.origin_rule}")
        program.bind(problem.graph.outputs[0], result)
        unread = set(range(len(problem.graph.inputs))) - program.used_inputs()
        if problem.origin_rule in TABLED:
            unread = {k for k in unread if not is_weight(problem.graph, problem.graph.inputs[k])}
        if unread:
            return Declined(f"an operand of {problem.origin_rule} was changed by the clean-ups")
        if not program.run:
            return Declined("nothing left to run")
        stored, first = problem.graph.type_of(problem.graph.outputs[0]), problem.origin_operand_nodes[0]
        same_shape = problem.graph.type_of(first).shape == stored.shape or problem.origin_rule in TABLED
        return program.finish(schedule, problem if same_shape else None)
