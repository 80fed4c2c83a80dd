"""NVIDIA GPUs: facts, the run-time compiler, modules and launches. Imports neither torch nor onnx."""
