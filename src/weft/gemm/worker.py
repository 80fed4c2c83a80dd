"""The measuring process of `weft gemm`: `weft.tune.cuda_worker`, which also runs the library's algorithms by number."""

from __future__ import annotations

from weft.gemm import library
from weft.tune import cuda_worker

MODULE = "weft.gemm.worker"

if __name__ == "__main__":
    assert library.TARGET  # it is registered by being imported
    cuda_worker.main()
