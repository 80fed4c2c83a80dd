"""One product of matrices, searched by itself: `weft gemm`."""
