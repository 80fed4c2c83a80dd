"""What `weft mlp` runs: one fully connected network, fused and by its peers, forward or forward and backward."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import nn

from weft.cli.show import Screen, microseconds, plain, print_pairs, visible
from weft.errors import DeviceError, OptionError

PEERS = ("eager", "compile", "cublas")
_STEPS, _MOST_STEPS = 4, 400
"""Calls of a round."""
_ROUND_US = 2000.0
_WARM = 3
_LIMIT = 1 << 16
_TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
Run = Callable[[torch.Tensor], torch.Tensor]


def activations() -> dict[str, Callable[[], nn.Module]]:
    """Modules by the names that `--activation` takes."""
    from weft.generate.cuda.training import KINDS
    from weft.nn.layers import module_class

    tuned = {name: partial(module_class(kind), **kind.options) for name, kind in KINDS.items() if name != "identity"}
    others = {c.__name__.lower(): c for c in (nn.Mish, nn.SELU, nn.Hardswish)}
    return {**tuned, **{name: c for name, c in others.items() if name not in tuned}, "none": nn.Identity}


def run(
    widths: str, rows: int, activation: str, dtype: str, against: str, device: str, form: str,
    *, backward: bool, graph: bool, rounds: int,
) -> None:  # fmt: skip
    """As the command's options say.

    Raises:
        OptionError: one that is none [W001].
        DeviceError: there is no such device.
    """
    screen = Screen(form)
    sizes, names = _widths(widths), [n for n in dict.fromkeys(against.split(",")) if n]
    for name in names:
        if name not in PEERS:
            raise OptionError(option="--against", problem=f"{visible(name)!r} is not one of {', '.join(PEERS)}")
    if backward and "cublas" in names:
        raise OptionError(option="--against", problem="cublas has no backward pass")
    acts = _acts(activation, len(sizes) - 1)
    place = _place(device)
    if graph and place.type != "cuda":
        raise OptionError(option="--graph", problem="only a CUDA device has graphs")
    net = _network(sizes, acts, place, _TYPES[dtype])
    x = torch.randn(rows, sizes[0], generator=torch.Generator().manual_seed(1)).to(place, _TYPES[dtype])
    x.requires_grad_(backward)
    from weft.nn import FusedMLP

    fused = FusedMLP(net)
    ways: dict[str, Run] = {"weft": fused}
    makers: dict[str, Callable[[], Run]] = {
        "eager": lambda: net,
        "compile": lambda: torch.compile(net, dynamic=False),
        "cublas": lambda: _by_library(net),
    }
    ways |= {name: makers[name]() for name in names}
    if dtype == "f32":
        ways = {name: _automatic(run, place) for name, run in ways.items()}
    steps = {k: _step(run, x, net, backward=backward) for k, run in ways.items()}
    medians = _medians({k: _recorded(v) for k, v in steps.items()} if graph else steps, rounds, place)
    with torch.autocast(place.type, torch.bfloat16, enabled=dtype == "f32"):
        result = {
            "widths": list(sizes), "activation": activation, "rows": rows, "dtype": dtype, "backward": backward,
            "graph": graph, "median_us": medians,
            "ratio": {k: v / medians["weft"] for k, v in medians.items() if k != "weft"},
            "error": _errors(ways, net, x),
            "not_fused": fused.why_not(x), "backward_not_fused": fused.why_no_fused_backward(x) if backward else None,
        }  # fmt: skip
    if screen.json:
        screen.data(result)
    else:
        _show(screen, result, medians)


def _show(screen: Screen, result: dict[str, object], medians: dict[str, float]) -> None:
    errors = result["error"]
    assert isinstance(errors, dict)
    table = [[k, microseconds(v), f"{v / medians['weft']:.2f}", f"{errors[k]:.2e}"] for k, v in medians.items()]
    screen.table("", ["", "median", "against weft", "error"], table)
    reasons = {"not fused": result["not_fused"], "gradients by torch": result["backward_not_fused"]}
    print_pairs(screen, {k: plain(str(v), 200) for k, v in reasons.items() if v is not None})


def _widths(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(x) for x in text.split(","))
    except ValueError:
        raise OptionError(option="--widths", problem=f"{visible(text)!r} is not a list such as 64,64,64") from None
    if len(found) < 2 or not all(1 <= w <= _LIMIT for w in found):
        raise OptionError(option="--widths", problem=f"two numbers or more are wanted, each from 1 to {_LIMIT}")
    return found


def _place(device: str) -> torch.device:
    try:
        place = torch.device(device)
    except RuntimeError:
        raise OptionError(option="--device", problem=f"{visible(device)!r} is none of cuda, cuda:N, cpu") from None
    if place.type not in ("cuda", "cpu"):
        raise OptionError(option="--device", problem=f"{visible(device)!r} is none of cuda, cuda:N, cpu")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise DeviceError(problem=f"torch sees no device {visible(device)}")
    return place


def _acts(text: str, layers: int) -> list[nn.Module]:
    """The module behind each layer."""
    known, names = activations(), text.split(",")
    for name in names:
        if name not in known:
            raise OptionError(option="--activation", problem=f"{visible(name)!r} is not one of {', '.join(known)}")
    if len(names) not in (1, layers):
        problem = f"{len(names)} activations for {layers} layers: one is wanted for each, or one for all but the last"
        raise OptionError(option="--activation", problem=problem)
    return [known[n]() for n in (names if len(names) > 1 else [*names * (layers - 1), "none"])]


def _network(widths: tuple[int, ...], acts: list[nn.Module], place: torch.device, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    modules: list[nn.Module] = []
    for (k, n), act in zip(pairwise(widths), acts, strict=True):
        modules += [nn.Linear(k, n), act]
    if isinstance(modules[-1], nn.Identity):
        modules.pop()
    return nn.Sequential(*modules).to(place, dtype)


def _automatic(run: Run, place: torch.device) -> Run:
    """The same under autocast, entered for each call as a training loop does: what it casts is cast again."""

    def under(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(place.type, torch.bfloat16):
            return run(x)

    return under


def _by_library(net: nn.Sequential) -> Run:
    modules = list(net)

    def run(x: torch.Tensor) -> torch.Tensor:
        at = 0
        while at < len(modules):
            layer = modules[at]
            if isinstance(layer, nn.Linear) and at + 1 < len(modules) and type(modules[at + 1]) is nn.ReLU:
                x = torch._addmm_activation(layer.bias, x, layer.weight.t(), use_gelu=False)
                at += 1
            else:
                x = layer(x)
            at += 1
        return x

    return run


def _step(run: Run, x: torch.Tensor, net: nn.Module, *, backward: bool) -> Callable[[], object]:
    """What is timed."""
    if not backward:

        def forward() -> torch.Tensor:
            with torch.no_grad():
                return run(x)

        return forward
    wanted = [x, *net.parameters()]
    with torch.no_grad():
        dy = torch.randn_like(run(x))
    return lambda: torch.autograd.grad(run(x), wanted, dy)


def _recorded(step: Callable[[], object]) -> Callable[[], object]:
    """A replay of what a call puts on the device."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph.replay


def _medians(steps: dict[str, Callable[[], object]], rounds: int, place: torch.device) -> dict[str, float]:
    """Microseconds of a call, host included; all take turns."""

    def sample(step: Callable[[], object], calls: int) -> float:
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        start = time.perf_counter()
        for _ in range(calls):
            step()
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        return (time.perf_counter() - start) / calls * 1e6

    for step in steps.values():
        for _ in range(_WARM):
            step()
    calls = {k: min(_MOST_STEPS, max(_STEPS, int(_ROUND_US / sample(step, _STEPS)))) for k, step in steps.items()}
    samples: dict[str, list[float]] = {k: [] for k in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            samples[name].append(sample(step, calls[name]))
    return {k: statistics.median(v) for k, v in samples.items()}


def _errors(ways: dict[str, Run], net: nn.Sequential, x: torch.Tensor) -> dict[str, float]:
    """Norm of the error over the norm of the result, on the first rows."""
    import copy

    with torch.no_grad():
        exact = copy.deepcopy(net).double()(x[:4096].double())
        found = {k: run(x)[:4096].double() for k, run in ways.items()}
    size = float(exact.norm()) or 1.0
    return {k: float((v - exact).norm()) / size for k, v in found.items()}
