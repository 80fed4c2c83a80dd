"""Best-effort kernels of our own: CUDA C++ written from the operations' definitions, one folder per job.

A folder holds the source and a manifest for each stage (`*.toml`: one launch); `jobs` loads them and makes their
inputs, `references` says what is right. `README.md` lists them.
"""
