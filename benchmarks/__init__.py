"""Benchmarks: every module here is a suite, `python -m benchmarks.NAME`; most keep a record in `benchmarks/results/`.

Whole networks: `demo`, `networks`, `gpu_networks` (its slow peer: `gpu_autotune`), `library_plan`, `budget`,
`call_overhead`, tuned by TVM: `tvm_networks`; 150 architectures of other libraries: `zoo`; classes of networks that
were behind: `classes`; saved plans for many callers: `serve`, a million queries: `serve_many`, for hours:
`serve_soak`, processes that are killed: `serve_faults`, more queries than can be answered: `serve_overload`. Kernels
by themselves, each against the library: `gpu_gemm_lt`, `gpu_gemm_cold`, `gpu_conv`, `gpu_attention`, `gpu_memory`,
`gpu_mlp`, `gpu_mlp_training`; whole training steps: `training`, `gpu_training`, with faults: `training_faults`,
over several GPUs `gpu_distributed`; several problems in one kernel against one each: `gpu_pooled`, `gpu_grouped`.
Co-location: the jobs of
`benchmarks/best_effort` by themselves: `gpu_best_effort`, in the CTAs of products: `gpu_pairs`, as a matrix:
`pairs_matrix`, when the roles ran: `pair_timeline`; in co-runners beside plans: `gpu_corunner`, whole networks as
such: `gpu_network_corunner`, their stop: `gpu_stop`; models with targets under scheduling policies: `gpu_colocate`,
with faults: `colocate_faults`, their predicted durations and power: `colocate_predictors`; kernels of public suites,
fused as they lie: `fetch_suites`; how long fusing takes: `fuse_seconds`.
All that are measured on a GPU, in calls of under ten minutes: `every`.
Trust: `random_programs`, `mutants`, `soak`, `gpu_faults`, `gpu_trust`. The models of the search, on measured tables
(`benchmarks/data`), without a GPU: `model_quality`, `model_fit`, `shipped_table`, `search_replay`. What all share is in
`benchmarks/harness`, what is measured in `benchmarks/cases`, what is built of peers in `benchmarks/peers`.
"""
