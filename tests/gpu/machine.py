"""What runs kernels by themselves on a real GPU, compiled all at once, with inputs for them and a limit of errors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tests.generate.cuda.tensor_emulator import from_memory, to_memory

from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, Nvrtc
from weft.generate.bind import Addresses, BoundCuda
from weft.ir.types import DType, round_bf16
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource

TF32_ERROR = 4e-4
"""Over the root mean square of the result: 2.9e-4 if both operands are rounded, 4.5e-4 if one of them is cut off."""


class Gpu:
    """Compiles, binds and runs one source with fresh, poisoned buffers."""

    def __init__(self, nvrtc: Nvrtc | Known, arch: str) -> None:
        self.nvrtc, self.arch = nvrtc, arch

    def run(self, problem: Problem, source: CudaSource, inputs: list[np.ndarray], times: int = 3) -> list[np.ndarray]:
        g = problem.graph
        compiled = self.nvrtc.compile(source.text, arch=self.arch, flags=source.flags)
        types = [g.type_of(i) for i in g.inputs]
        ins = [
            torch.from_numpy(to_memory(x, t.dtype, f)).cuda()
            for x, t, f in zip(inputs, types, problem.input_formats, strict=True)
        ]
        sizes = (*source.packed_bytes, source.workspace_bytes)
        *packed, work = (torch.full((n,), 0xFF, dtype=torch.uint8, device="cuda") for n in sizes)
        state = torch.zeros(source.state_bytes, dtype=torch.uint8, device="cuda")
        bound = BoundCuda(source, compiled.path)
        stream = torch.cuda.current_stream().cuda_stream
        bound.pack([x.data_ptr() for x in ins], [x.data_ptr() for x in packed], stream)
        torch.cuda.synchronize()
        results: list[list[np.ndarray]] = []
        for _ in range(times):
            outs = [torch.full((g.type_of(o).nbytes,), 0xFF, dtype=torch.uint8, device="cuda") for o in g.outputs]
            addresses = Addresses(
                [x.data_ptr() for x in ins],
                [x.data_ptr() for x in outs],
                [x.data_ptr() for x in packed],
                work.data_ptr(),
                state.data_ptr(),
            )
            bound.prepare(addresses)(stream)
            torch.cuda.synchronize()
            results.append([x.cpu().numpy() for x in outs])
        assert not state.any(), "the state was not left zero"
        for again in results[1:]:
            for x, y in zip(results[0], again, strict=True):
                np.testing.assert_array_equal(x, y)
        return [
            from_memory(x, g.type_of(o).dtype, g.type_of(o).shape, f)
            for x, o, f in zip(results[0], g.outputs, problem.output_formats, strict=True)
        ]


class Known:
    """Stands for NVRTC: every text is compiled once, all of them on all cores at first."""

    def __init__(self, nvrtc: Nvrtc | Known, arch: str, sources: list[CudaSource]) -> None:
        assert isinstance(nvrtc, Nvrtc)
        self._nvrtc = nvrtc
        results = nvrtc.compile_many([CompileJob(s.text, arch, s.flags) for s in sources])
        self._known = {s.text: result for s, result in zip(sources, results, strict=True)}

    def compile(self, text: str, *, arch: str, flags: Sequence[str]) -> CompiledCubin:
        found = self._known.get(text) or self._nvrtc.compile(text, arch=arch, flags=flags)
        assert isinstance(found, CompiledCubin), found
        return found


def normal(problem: Problem) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    found = []
    for i in problem.graph.inputs:
        t = problem.graph.type_of(i)
        x = rng.standard_normal(t.shape).astype(np.float32)
        found.append(round_bf16(x) if t.dtype is DType.BF16 else x.astype(t.dtype.numpy))
    return found
