"""Every error that Weft raises: one tree, one code each.

    WeftError
    ├── UserError              the caller can mend it (exit code 2, 3 or 4)
    │   ├── OptionError        W0xx  an option or an argument is off
    │   ├── InputError         W0xx  tensors that do not fit a compiled model
    │   ├── RefitError         W0xx  weights that a compiled model cannot take over
    │   ├── PlugInError        W0xx  an installed generator that cannot take part
    │   ├── StepError          W0xx  a training step that cannot be compiled
    │   ├── ModelError         W1xx  the model is refused: malformed, hostile or over a limit
    │   └── UnsupportedError   W2xx  well-formed, but nothing can run it
    ├── DeviceError            W3xx  the machine: no compiler, no device, a sick worker
    │   ├── NoPlanError        W303  nothing that was verified is left, and the framework cannot run it
    │   └── ToolchainError     W31x  a compiler refused our source; carries its log
    ├── ArtifactError          W4xx  a saved plan, a database or a cache entry that cannot be used
    └── InvalidGraphError      W9xx  our bug; the graph is attached with `add_note`

An error says whose fault it is, where, and what to do: `where: what [code]`, then one indented line of advice.
"""

from __future__ import annotations

from typing import ClassVar


class BudgetWarning(UserWarning):
    """The budget ended before the problems of the best plan were measured, or before its plan could be judged.

    The same command goes on where it ended.
    """


class DifferenceWarning(UserWarning):
    """The model's own execution by its framework differs, beyond rounding, from the model as it was imported.

    Plans are judged by the latter.
    """


class WeftError(Exception):
    """The root; `str(error)` is the text shown to the user."""

    code: ClassVar[str] = "W000"
    template: ClassVar[str] = "{message}"
    """Format string of the first line, filled with the keyword arguments of the constructor."""
    todo: ClassVar[str] = ""
    """What the reader can do about it; may use the same keyword arguments."""
    exit_code: ClassVar[int] = 70

    def __init__(self, *, where: str = "", **details: object) -> None:
        self.where = where
        self.details = details
        head = self.template.format(**details)
        prefix = f"{where}: " if where else ""
        advice = self.todo.format(**details)
        super().__init__(f"{prefix}{head} [{self.code}]" + (f"\n  {advice}" if advice else ""))

    def __reduce__(self) -> tuple[object, ...]:
        """It can be sent to another process: what takes keyword arguments alone has to say how it is made again."""
        return _again, (type(self), self.args, self.__dict__)


def _again(kind: type[WeftError], args: tuple[object, ...], state: dict[str, object]) -> WeftError:
    found = kind.__new__(kind, *args)
    found.__dict__.update(state)
    return found


class UserError(WeftError):
    """The caller can mend it."""

    exit_code = 2


class OptionError(UserError):
    """An option or argument that cannot be taken."""

    code = "W001"
    template = "option {option!r}: {problem}"
    todo = "see `weft COMMAND --help` or the docstring of weft.Options"


class ExampleInputsError(OptionError):
    """What a module is to be compiled with is not what it can be called with."""

    todo = (
        "give what `forward` is called with: a tensor, or a sequence of arguments (tensors, numbers, texts, None, and "
        "tuples, lists, dictionaries and dataclasses of them); by name as `example_kwargs`"
    )


class InputError(UserError):
    """A call whose tensors do not fit the compiled signature."""

    code = "W011"
    template = "input {position}: {problem}"
    todo = "compile the model again for these shapes and types, or convert the tensor"


class RefitError(UserError):
    """Other weights cannot be taken over by a compiled model."""

    code = "W012"
    template = "{problem}"
    todo = "{remedy}"


class PlugInError(UserError):
    """An installed generator that cannot take part."""

    code = "W014"
    template = "generator {generator}: {problem}"
    todo = "{remedy}"


class StepError(UserError):
    """A training step that cannot be compiled, or a call of one that does not fit."""

    code = "W020"
    template = "{problem}"
    todo = "{remedy}"


class ModelError(UserError):
    """A model that is refused."""

    code = "W100"
    template = "{problem}"
    todo = "{remedy}"
    exit_code = 3


class LimitError(ModelError):
    """The model is over a limit: of what Weft reads, or of the memory that compiling it may take."""

    code = "W105"


class RefusedError(ModelError):
    """An operator that ONNX Runtime refuses to run: its attributes or its inputs are wrong."""

    code = "W115"
    todo = "the operator's attributes or inputs are not what it takes: correct the model"

    def __init__(self, *, problem: str, where: str = "", payload: str = "") -> None:
        super().__init__(where=where, problem=problem)
        self.payload = payload
        """Of the operator: where it stands is known to whoever has the graph."""


class ModelRaisesError(ModelError):
    """A PyTorch model that raises by itself on its example inputs."""

    code = "W116"


class UnsupportedError(UserError):
    """A well-formed model that nothing installed here can run."""

    code = "W201"
    template = "no rule for operator {op!r} and nothing to fall back on: {reason}"
    todo = "list every such operator with `weft check`"
    exit_code = 4


class DataDependentError(UnsupportedError):
    """An operator whose result has a size that depends on values: a plan's sizes follow from those of its inputs."""

    code = "W201"
    todo = "keep the size and mask what is not wanted, as `torch.where` does, or call this part outside of the model"


class NoTemplateError(UnsupportedError):
    """A product by itself that no template of generated kernels takes."""

    code = "W204"
    template = "no template takes {op}: {reason}"
    todo = "docs/gemm.md says what the templates take; 8-bit operands want --layout nt and K a multiple of 16"


class KernelDeclinedError(UnsupportedError):
    """A kernel that cannot share a CTA with another one."""

    code = "W205"
    template = "{reason}"
    todo = "docs/fuse.md says what kernels can be fused, and what to write in place of what is not taken"


class NotTracedError(UserError):
    """A PyTorch model that runs, but that `torch.export` cannot trace; the cause is torch's own exception."""

    code = "W207"
    template = "the model cannot be traced: {problem}"
    todo = "{remedy}"
    exit_code = 4


class DeviceError(WeftError):
    """The machine, its drivers or its compilers."""

    code = "W301"
    template = "{problem}"
    todo = "`weft doctor` says what this machine has"
    exit_code = 5


class NoWorkerError(DeviceError):
    """The process that measures cannot be started."""


class NoGpuError(DeviceError):
    """What measures pairs of kernels finds no GPU to run them on."""

    todo = "leave --search out, which needs no GPU, or run it on the machine whose GPU is to run the pair"


class NoPlanError(DeviceError):
    """No plan of the model is left, and there is no execution by its framework to give back instead."""

    code = "W303"
    template = "no plan is left for this model: {reason}"
    todo = (
        "give it a larger budget, without other load on the machine, or a budget of 0, which needs no process that "
        "measures; `weft doctor` says what this machine has"
    )


class ToolchainError(DeviceError):
    """A compiler refused a source text of ours."""

    code = "W311"
    template = "{tool} failed with status {status}"
    todo = "the log follows; please report it with `weft report`"

    def __init__(self, *, tool: str, status: int, log: str, where: str = "") -> None:
        super().__init__(where=where, tool=tool, status=status)
        self.log = log
        self.add_note(log[:4000])


class ArtifactError(WeftError):
    """A saved plan, database or cache entry that cannot be used."""

    code = "W401"
    template = "{problem}"
    todo = "{remedy}"
    exit_code = 3


class InvalidGraphError(WeftError):
    """A broken invariant of ours: always a bug in Weft."""

    code = "W901"
    template = "{problem}"
    todo = "this is a bug in Weft: please report it with the graph below"
