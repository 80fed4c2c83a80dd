"""How tiny-cuda-nn is called, on a library with the same functions whose networks hand back what they are given."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks.cases.mlp import ACTIVATIONS, Case
from benchmarks.peers import tiny_cuda_nn
from benchmarks.peers.tiny_cuda_nn import ACTIVATIONS as THEIRS
from benchmarks.peers.tiny_cuda_nn import KINDS, Library
from torch import nn

from benchmarks import gpu_mlp
from weft.ir.types import DType

STAND_IN = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
struct net { int width, layers; };
static const char* error = "";
const char* tcnn_error(void) { return error; }
int tcnn_make(void** out, int width, int layers, const char* activation, const char* kind, int jit) {
  if (strcmp(kind, "FullyFusedMLP") == 0 && width > 128) { error = "no such width\nand more"; return 1; }
  if (strcmp(activation, "ReLU")) { error = "no such activation"; return 1; }
  struct net* n = malloc(sizeof *n);
  n->width = width; n->layers = layers;
  *out = n;
  return 0;
}
int64_t tcnn_parameters(void* net) {
  struct net* n = net;
  return (int64_t)n->layers * n->width * n->width + (n->layers == 7);
}
int tcnn_set(void* net, void* stream, const void* weights) { return !net || !stream || !weights; }
int tcnn_infer(void* net, void* stream, const void* x, void* y, uint32_t rows, int transposed) {
  struct net* n = net;
  if (rows % 256) { error = "rows are to be a multiple of 256"; return 1; }
  memcpy(y, x, 2ul * rows * n->width);
  return transposed > 1;
}
void tcnn_free(void* net) { free(net); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    folder = tmp_path_factory.mktemp("tcnn")
    (folder / "tcnn.c").write_text(STAND_IN)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "libtcnn.so", folder / "tcnn.c"], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_cuda_nn, "NEEDED", ())
        return Library(folder / "libtcnn.so")


@pytest.fixture(autouse=True)
def _stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=64))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.parametrize("name", KINDS)
def test_rows_are_those_of_its_form(library: Library, name: str) -> None:
    weights = torch.randn(3, 32, 32, dtype=torch.float16)
    run = library.network(name, "relu", weights)
    x = torch.randn(512, 32, dtype=torch.float16)
    given = x.t().contiguous() if KINDS[name][1] else x
    assert torch.equal(run(given, torch.empty_like(given)), given)
    with pytest.raises(RuntimeError, match="multiple of 256"):
        run(given.t().contiguous(), torch.empty(32, 512, dtype=torch.float16))


def test_what_it_does_not_take_is_said_in_its_words(library: Library) -> None:
    wide = torch.randn(2, 256, 256, dtype=torch.float16)
    with pytest.raises(RuntimeError, match=r"^no such width$"):
        library.network("tcnn", "relu", wide)
    library.network("tcnn_cutlass", "relu", wide)
    with pytest.raises(RuntimeError, match="no such activation"):
        library.network("tcnn", "tanh", wide[:, :64, :64])
    with pytest.raises(RuntimeError, match="1793 parameters in place of 1792"):
        library.network("tcnn", "relu", torch.randn(7, 16, 16, dtype=torch.float16))


def test_a_network_that_nobody_has_is_freed(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[object] = []
    monkeypatch.setattr(library._lib, "tcnn_free", freed.append)
    run = library.network("tcnn", "relu", torch.randn(2, 16, 16, dtype=torch.float16))
    assert not freed
    del run
    assert len(freed) == 1
    with pytest.raises(RuntimeError, match="parameters in place of"):
        library.network("tcnn", "relu", torch.randn(7, 16, 16, dtype=torch.float16))
    gc.collect()
    assert len(freed) == 2


def test_types_that_it_has_not_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_mlp", "--tiny-cuda-nn", "libweft_tcnn.so", "--dtype", "bf16"])
    with pytest.raises(SystemExit, match="2"):
        gpu_mlp.main()
    assert "--tiny-cuda-nn wants --dtype f16" in capsys.readouterr().err


def test_what_it_needs_is_loaded_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for needed, missing in (((), "/nothing"), ((lambda: "libno-such-driver.so",), "libno-such-driver.so")):
        monkeypatch.setattr(tiny_cuda_nn, "NEEDED", needed)
        with pytest.raises(OSError, match=missing):
            Library(Path("/nothing"))
    assert Path(tiny_cuda_nn._nvrtc()).name.startswith("libnvrtc.so")


def test_a_peer_of_networks_in_f16(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[torch.Tensor] = []

    def median_us(launch: Callable[[], torch.Tensor], **_: int) -> float:
        timed.append(launch())
        return 5.0

    monkeypatch.setattr(gpu_mlp, "median_us", median_us)
    case = Case(9, 256, 2)
    layers = [nn.Linear(256, 256) for _ in range(2)]
    net = nn.Sequential(*(m for layer in layers for m in (layer, nn.ReLU())))
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(torch.eye(256))
        x = torch.rand(512, 256, dtype=torch.float16)
        times, failures, errors = gpu_mlp.by_tiny_cuda_nn(case, net.half(), x, library)
        assert times == {"tcnn_cutlass": 5.0} and errors == {"tcnn_cutlass": 0.0} and torch.equal(timed[0], x)
        assert failures == {"tcnn": "no such width", "tcnn_jit": "no such width"}
        assert layers[0].bias is not None, "the network keeps its biases"
        layers[1].weight.mul_(2)
        times, failures, errors = gpu_mlp.by_tiny_cuda_nn(case, net, x, library)
        assert not times and "wrong: an error of 0.5" in failures["tcnn_cutlass"] and errors["tcnn_cutlass"] == 0.5


def test_who_is_asked() -> None:
    asked = gpu_mlp.wanted_peers(Case(12, 64, 4), DType.F16, [], has_tiny_cuda_nn=True)
    assert asked == ["eager", "library", *KINDS]
    for case, dtype in ((Case(12, 64, 4), DType.BF16), (Case(12, 64, 4, "gelu"), DType.F16)):
        assert KINDS.keys().isdisjoint(gpu_mlp.wanted_peers(case, dtype, [], has_tiny_cuda_nn=True))
    assert KINDS.keys().isdisjoint(gpu_mlp.wanted_peers(Case(12, 64, 4), DType.F16, []))
    assert set(THEIRS) < set(ACTIVATIONS)


def test_the_library_has_these_functions() -> None:
    text = (Path(gpu_mlp.__file__).parent / "peers" / "tiny_cuda_nn" / "networks.cu").read_text()
    for line in STAND_IN.splitlines():
        if line.startswith(("const char* tcnn", "int tcnn", "int64_t tcnn", "void tcnn")):
            assert 'extern "C" ' + line.partition(" {")[0].replace("(void)", "()") in text
