"""TVM in an environment of its own, where there is no torch: tune a network, or run it for whoever asks.

    PYTHON benchmarks/peers/tvm_process.py tune FILE FOLDER THREADS
    PYTHON benchmarks/peers/tvm_process.py serve FILE FOLDER THREADS INPUTS

FILE: an ONNX file; FOLDER: TVM's database; INPUTS: a file of `numpy.savez`, arrays by position (`arr_0`, ...). `tune`
ends when it is ended. `serve` says in a line of JSON where its results are (`outputs`, as INPUTS) and of how many
`tasks` the network consists; then it answers each line `N` with the seconds of N calls.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

PER_ROUND = 16
"""Trials of a task before the next one has its turn: with TVM's 64 many tasks would have none after some minutes."""


def only_x86() -> None:
    """Of TVM's intrinsics those of this processor alone.

    Each process that builds kernels parses those of all GPUs too, which takes longer than it may for all that it does.
    """
    import importlib
    import types

    import tvm.s_tir

    name = "tvm.s_tir.tensor_intrin"
    if name not in sys.modules:
        package = types.ModuleType(name)
        package.__path__ = [str(Path(str(tvm.s_tir.__file__)).parent / "tensor_intrin")]
        sys.modules[name] = package
        importlib.import_module(f"{name}.x86")


class Network:
    """A network as TVM holds it: what is tuned, and what runs."""

    def __init__(self, path: str, folder: str, threads: int) -> None:
        """Read and lower."""
        import onnx
        import tvm

        only_x86()
        from tvm import relax
        from tvm.relax.frontend.onnx import from_onnx
        from tvm.target import codegen

        self._tvm: Any = tvm
        self.folder = folder
        self.target = tvm.target.Target({"kind": "llvm", "mcpu": codegen.llvm_get_system_cpu(), "num-cores": threads})
        read = from_onnx(onnx.load(path), keep_params_in_input=True)
        module, parameters = relax.frontend.detach_params(read)
        self._parameters = parameters["main"]
        passes = relax.transform
        self.lowered = self._after(
            module,
            passes.DecomposeOpsForInference(),
            passes.CanonicalizeBindings(),
            relax.get_pipeline("zero"),
            passes.AttachAttrLayoutFreeBuffers(),
        )

    def _after(self, module: Any, *passes: Any) -> Any:
        with self.target:
            return self._tvm.transform.Sequential(list(passes))(module)

    def tasks(self) -> int:
        """Different kernels, each of which is tuned by itself."""
        from tvm.s_tir.meta_schedule.relax_integration import extract_tasks

        with self.target:
            return len(extract_tasks(self.lowered, self.target, {}))

    def tune(self) -> None:
        """Until somebody ends it: each pass over the tasks is in the database when it has ended."""
        trials = self.tasks() * PER_ROUND
        while True:
            self._tune(trials)

    def _tune(self, trials: int) -> None:
        from tvm.s_tir.meta_schedule.builder import LocalBuilder
        from tvm.s_tir.meta_schedule.relax_integration import tune_relax

        with self.target:
            tune_relax(
                self.lowered,
                {},
                self.target,
                work_dir=self.folder,
                max_trials_global=trials,
                num_trials_per_iter=PER_ROUND,
                builder=LocalBuilder(initializer=only_x86),
                seed=0,
            )

    def call(self, inputs: Sequence[np.ndarray[Any, Any]]) -> Callable[[], list[Any]]:
        """The network with the best that its database has, as something to call."""
        tvm = self._tvm
        from tvm import relax

        passes = relax.transform
        with self.target:  # the first pass reads it when it is made
            module = self._after(
                self.lowered,
                passes.MetaScheduleApplyDatabase(self.folder),
                passes.SplitLayoutRewritePreproc(),
                passes.LiftTransformParams(),
                passes.FoldConstant(),
            )
            machine = relax.VirtualMachine(tvm.compile(module, target=self.target), tvm.cpu())
        weights = machine["main_transform_params"](self._parameters)
        given = [tvm.runtime.tensor(x) for x in inputs]
        main = machine["main"]

        def run() -> list[Any]:
            found = main(*given, *weights)
            return [found] if hasattr(found, "numpy") else list(found)

        return run


def serve(network: Network, inputs: Sequence[np.ndarray[Any, Any]]) -> None:
    """Say what comes of one call, then answer until nobody asks."""
    call = network.call(inputs)
    with tempfile.TemporaryDirectory(prefix="weft-tvm-") as folder:
        path = Path(folder) / "outputs.npz"
        np.savez(path, *(x.numpy() for x in call()))
        print(json.dumps({"outputs": str(path), "tasks": network.tasks()}), flush=True)
        for line in sys.stdin:
            count = int(line)
            began = time.perf_counter()
            for _ in range(count):
                call()
            print(time.perf_counter() - began, flush=True)


def main(what: str, path: str, folder: str, threads: str, inputs: str = "") -> None:
    """As the command line says."""
    os.environ["TVM_NUM_THREADS"] = threads
    network = Network(path, folder, int(threads))
    if what == "tune":
        network.tune()
    else:
        with np.load(inputs, allow_pickle=False) as given:
            serve(network, [given[f"arr_{k}"] for k in range(len(given.files))])


if __name__ == "__main__":
    main(*sys.argv[1:])
