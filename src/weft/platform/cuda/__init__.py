"""NVIDIA GPUs: surveyed and linked in `platform`, the framework's own model in a CUDA graph in `captured`."""
