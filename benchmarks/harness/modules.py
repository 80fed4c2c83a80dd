"""Loaded cubins of a benchmark, each once, until the end."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import final

from weft.device.cuda.driver import Function, Module, encode_tensor_map
from weft.device.cuda.resident import prefer_shared
from weft.generate.bind import CudaDriver


@final
class Modules:
    """Loads each cubin once; `held` unloads them. `driver` binds kernels of them."""

    def __init__(self, held: ExitStack, *, prefer: bool = False) -> None:
        """`prefer`: functions prefer the carve-out of plans under a budget."""
        self._held, self._prefer = held, prefer
        self._modules: dict[Path, Module] = {}
        self.driver = CudaDriver(lambda path: _Kept(self.load(path), prefer), encode_tensor_map)

    def load(self, path: Path) -> Module:
        """The module of a cubin."""
        if path not in self._modules:
            self._modules[path] = Module(path)
            self._held.callback(self._modules[path].unload)
        return self._modules[path]


class _Kept:
    def __init__(self, module: Module, prefer: bool) -> None:
        self._module, self._prefer = module, prefer

    def function(self, entry: str) -> Function:
        found = self._module.function(entry)
        if self._prefer:
            prefer_shared(found)
        return found
