"""What `torch.export` raises, as an error of Weft: whose fault it is, where in the model, and a way on.

`torch.export` fails in its own words, and in those of whatever it called. Where the model itself raises on the same
inputs, the model or the inputs are to be mended (W116); where it runs, tracing it is what fails (W207), and the
table `WAYS` says what can be done instead. An exception that no row knows has the last one.
"""

from __future__ import annotations

import copy
import inspect
import re
import sysconfig
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from weft.errors import ModelError, ModelRaisesError, NotTracedError, UnsupportedError, WeftError

BACKEND = 'torch.compile(model, backend="weft")'
SPLIT = f"`{BACKEND}` leaves this part to torch and compiles what is round it"
_ELSEWHERE = tuple(
    str(Path(place).resolve())
    for place in (Path(torch.__file__).parent, Path(__file__).parents[2], sysconfig.get_paths()["stdlib"])
)
"""What is no place in the user's model; packages of others, below `site-packages`, may be one."""
_MOST = 300
"""Characters of torch's own text."""
_NESTED = str(Path("torch", "nested"))
_PACKAGES = "site-packages"


@dataclass(frozen=True, slots=True)
class Way:
    """One kind of failure, and what can be done about it."""

    kind: str
    """A regular expression for the exception's class and text, `Class: text`."""
    problem: str
    """What could not be traced; empty: torch's own first line says it."""
    remedy: str


WAYS = (
    Way(
        "GuardOnDataDependentSymNode|UserErrorType.DYNAMIC_CONTROL_FLOW|PendingUnbackedSymbolNotFound",
        "a size, a branch or a Python number depends on the values of tensors",
        f"choose with `torch.where`, keep sizes fixed and mask, leave out `.item()`; {SPLIT}",
    ),
    Way(
        "DynamicOutputShapeException: .*_ctc_loss",
        "ctc_loss reads the lengths of its sequences from tensors",
        f"return the log probabilities and compute the loss outside of the model; {SPLIT}",
    ),
    Way(
        "DynamicOutputShapeException|DataDependentOutputException",
        "an operator makes as much as the values of tensors ask for",
        f"keep the size and mask what is not wanted, or call this part outside of the model; {SPLIT}",
    ),
    Way(
        r"failed to unpack the object.*FakeTensor|_pack_padded_sequence",
        "packed sequences have sizes that depend on the values of their lengths",
        f"give the recurrent layer the padded tensor, and mask its results; {SPLIT}",
    ),
    Way(
        "LinearPackedParams|ConvPackedParams|quantized nyi|torch.classes.quantized|ScriptObject",
        "it holds integer weights in a form of torch.ao.quantization's own that no trace can read",
        f"compile the model before it was quantised, or an ONNX file of the quantised one; {SPLIT}",
    ),
    Way(
        "[Nn]ested|SymInt.*is not tracked with proxy",
        "nested (jagged) tensors have no shape that a plan could be made for",
        f"pad them (`torch.nested.to_padded_tensor`) outside of the model and give a mask; {SPLIT}",
    ),
    Way(
        "[Ss]parse",
        "sparse tensors are not traced",
        f"give it dense ones (`.to_dense()`); {SPLIT}",
    ),
    Way(
        "DynamicCache|EncoderDecoderCache|StaticCache|HybridCache",
        "it returns a cache of keys and values",
        f"set `model.config.use_cache = False` before compiling it; {SPLIT}",
    ),
    Way(
        r"in output, which is not a known type|Unsupported (input|output)|only (tensors|a tensor)",
        "",
        f"return tensors, in tuples, lists, dictionaries or dataclasses; {SPLIT}",
    ),
    Way(
        "[Nn]o fake impl|register_fake|fake impl registered",
        "a custom operator has no rule for the shapes of its results",
        "give it one with `torch.library.register_fake`, or the `register_fake` of its `custom_op`",
    ),
    Way(
        "ScriptModule|torch.jit",
        "it is TorchScript, which torch does not trace",
        "give the module that it was made of, or an ONNX file of it",
    ),
    Way(
        r"does not require grad|torch\.autograd\.grad",
        "it computes gradients, and is compiled for inference, where there are none",
        "use `torch.func.grad` in it, or compute gradients outside of the model",
    ),
    Way(
        r"\.numpy\(\) is not supported|Cannot access data pointer|__array__",
        "it leaves torch for NumPy, where nothing can be traced",
        f"write that part with operators of torch; {SPLIT}",
    ),
    Way("", "", f"{SPLIT}; `torch.export.draft_export` says more"),
)
"""The first row whose `kind` is found applies."""


def check_module(module: torch.nn.Module, label: str) -> None:
    """Refuse a module that has no weights yet, or is none of Python.

    Raises:
        ModelError: a parameter or buffer is not initialised, or has no data [W100].
        NotTracedError: it is TorchScript [W207].
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise untraced(TypeError("a ScriptModule"), label)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            problem = f"{name!r} is not initialised: the module is a lazy one that was never called"
            raise ModelError(
                where=label, problem=problem, remedy="call the module once with inputs of the shapes meant"
            )
        if tensor.is_meta:
            problem = f"{name!r} lies on the device 'meta', which has no data"
            remedy = "give it weights: `model.to_empty(device=...)`, then `model.load_state_dict(...)`"
            raise ModelError(where=label, problem=problem, remedy=remedy)


def odd_tensor(tensor: torch.Tensor) -> str:
    """Why no plan can take such a tensor; empty: it can."""
    if tensor.is_nested:
        return "a nested tensor, which has no one shape: pad it (`torch.nested.to_padded_tensor`) and give a mask"
    if tensor.layout is not torch.strided:
        return f"a {str(tensor.layout).removeprefix('torch.')} tensor, and plans take dense ones: give `.to_dense()`"
    if tensor.is_quantized:
        return "a quantised tensor: give its integers (`.int_repr()`), or floats (`.dequantize()`)"
    if tensor.is_meta:
        return "on the device 'meta', which has no data: give one with values"
    return ""


def refused(
    error: Exception, module: torch.nn.Module, args: Sequence[object], kwargs: Mapping[str, object], label: str
) -> WeftError:
    """The error of Weft for what `torch.export` raised while it traced `module(*args, **kwargs)`."""
    if isinstance(error, NotTracedError) and not error.where:
        return NotTracedError(where=label, **error.details)
    if isinstance(error, WeftError):
        return error
    where = place(error, module, label)
    own = _raised(module, args, kwargs)
    if own is not None:
        remedy = "correct the model, or give example inputs that it runs on: `model(*example_inputs)` raises the same"
        problem = f"the model itself raises {type(own).__name__} on these inputs: {first_line(own)}"
        return ModelRaisesError(where=place(own, module, label), problem=problem, remedy=remedy)
    return untraced(error, where)


def untraced(error: Exception, where: str = "") -> NotTracedError:
    """What torch raised while it traced a model that runs, by the table of ways."""
    nested = any(_NESTED in frame.f_code.co_filename for one in _chain(error) for frame, _ in _frames(one))
    text = f"{type(error).__name__}: {error}" + " (in torch.nested)" * nested
    way = next(w for w in WAYS if re.search(w.kind, text, re.DOTALL))
    problem = way.problem or f"{type(error).__name__}: {first_line(error)}"
    return NotTracedError(where=where, problem=problem, remedy=way.remedy)


def advised(error: UnsupportedError, module: torch.nn.Module, label: str, *, wrapped: bool) -> UnsupportedError:
    """What the importer refused, with what can be done about it in PyTorch.

    `wrapped`: the module was traced inside of another one.
    """
    where = error.where or label
    if wrapped:
        where = re.sub(
            r"\(module module(\.|,|\))", lambda m: "(module " if m[1] == "." else f"(module itself{m[1]}", where
        )
    reason = str(error.details["reason"])
    remedy = SPLIT
    effect = re.search(r"random numbers|writes .*buffer|running statistics|Python number", reason)
    if effect and effect[0] != "Python number" and any(m.training for m in module.modules()):
        remedy = f"the model is in training mode: call `model.eval()` before compiling it; to train, {_lower(SPLIT)}"
    elif effect and effect[0] == "random numbers":
        remedy = f"draw them outside of the model and give them as an input; {SPLIT}"
    elif effect and effect[0] == "Python number":
        remedy = f"leave out `.item()` and `.tolist()`: compute with the tensor; {SPLIT}"
    elif "which torch does not" in reason:
        remedy = "give inputs of the weights' element type, or convert them in the model"
    elif "writes its parameter" in reason:
        once = "call the model once before compiling it, if it writes parameters in its first call alone"
        remedy = f"{once}, else give back the new value; {SPLIT}"
    elif "writes" in reason:
        remedy = f"give back the new value in place of writing it; {SPLIT}"
    return ModuleOperatorError(where=where, remedy=remedy, **error.details)


class ModuleOperatorError(UnsupportedError):
    """An operator of a PyTorch module that cannot be in a plan."""

    todo = "{remedy}"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def short(signature: inspect.Signature | None) -> str:
    """A signature without its types."""
    if signature is None:
        return "(...)"
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    return text if len(text) <= _MOST else text[: _MOST - 1] + "…"


def _raised(module: torch.nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> Exception | None:
    """What the model raises by itself on copies of the same inputs; None: it runs, or cannot be tried."""
    try:
        given = copy.deepcopy((list(args), dict(kwargs)))
    except Exception:  # whatever a type of the user's raises
        return None
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it was run before
            module(*given[0], **given[1])
    except Exception as error:  # whatever a model raises
        return error
    return None


def first_line(error: BaseException) -> str:
    """Of an exception's text, without its colours, cut."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:_MOST] if lines else type(error).__name__


def place(error: BaseException, module: torch.nn.Module, label: str) -> str:
    """The module that was running, and the file and line of the model that called into torch: no folders."""
    names = {id(m): name for name, m in module.named_modules()}
    for one in _chain(error):
        path, line = "", ""
        for frame, number in _frames(one):
            path = names.get(id(frame.f_locals.get("self")), "") or path
            file = frame.f_code.co_filename
            if is_users(file):
                line = f"{Path(file).name}:{number}"
        if line:
            return f"{'.'.join(filter(None, (label, path)))} ({line})"
    return label


def is_users(file: str) -> bool:
    """Whether a file is part of the user's model: neither torch's nor Weft's, nor Python's own."""
    if file.startswith("<"):
        return False
    found = str(Path(file).resolve())
    own, stdlib = _ELSEWHERE[:2], _ELSEWHERE[2]
    return not found.startswith(own) and (_PACKAGES in found or not found.startswith(stdlib))


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        yield one
        seen.add(id(one))
        one = one.__cause__ or one.__context__


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    entry = error.__traceback__
    while entry is not None:
        yield entry.tb_frame, entry.tb_lineno
        entry = entry.tb_next
