"""The limits on ONNX files as flags, for every command that reads one."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from weft.frontends.onnx import Limits

FLAGS: Mapping[str, str] = {
    "max_model_bytes": "largest model file, e.g. 4GiB",
    "max_external_bytes": "most external data, e.g. 100GiB",
    "max_tensor_bytes": "largest value of the graph",
    "max_nodes": "most nodes, functions and loops unrolled",
    "max_graph": "most primitives with work of their own",
    "max_depth": "deepest nesting of subgraphs",
    "max_calls": "deepest nesting of function calls",
    "parse_timeout": "seconds of processor time for reading the file",
    "max_parse_memory": "memory for reading the file, beyond its own size",
    "model_root": "links in external data may end beneath this directory",
}
"""Each also as a variable `WEFT_<NAME>` and a key of `[limits]` in the options file."""
HARDLINKS = "allow_hardlinks"
NO_LIMITS: Mapping[str, str] = MappingProxyType({})


def with_limits(command: Callable[..., None]) -> Callable[..., None]:
    """The command with a flag for each limit; it gets those that are given as `limits`, by name."""
    own = inspect.signature(command, eval_str=True)
    flags = [_parameter(name, Annotated[str | None, typer.Option(help=text)], None) for name, text in FLAGS.items()]
    text = "external data may have several names in the file system"
    flags.append(_parameter(HARDLINKS, Annotated[bool, typer.Option(f"--{HARDLINKS.replace('_', '-')}", help=text)]))

    @wraps(command)
    def run(**given: Any) -> None:
        limits = {name: given.pop(name) for name in (*FLAGS, HARDLINKS)}
        command(**given, limits={name: str(value) for name, value in limits.items() if value not in (None, False)})

    kept = [p for p in own.parameters.values() if p.name != "limits"]
    run.__signature__ = own.replace(parameters=[*kept, *flags])  # type: ignore[attr-defined]
    return run


def _parameter(name: str, annotation: object, default: object = False) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)


def limits_of(flags: Mapping[str, str]) -> Limits:
    """The limits in force: flags, environment, options file, defaults.

    Raises:
        OptionError: a value that does not parse [W001].
    """
    from weft.frontends.onnx import Limits

    return Limits.from_environment(os.environ, flags)
