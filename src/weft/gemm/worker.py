"""The measuring process of `weft gemm`: `weft.tune.cuda_worker`, which also runs libraries' kernels for products."""

from __future__ import annotations

from weft.gemm import cutlass, library
from weft.tune import cuda_worker

MODULE = "weft.gemm.worker"

if __name__ == "__main__":
    assert library.TARGET != cutlass.TARGET  # they are registered by being imported
    cuda_worker.main()
