"""Measuring and verifying kernels in worker processes, and the database of what was measured.

Reading order: `tolerance` (how wrong is wrong), `inputs` and `oracle` (what is compared), `verify` and `timing`
(one kernel), `worker` and `transport` (the process that may die), `tuner` (the loop), `keys` and `store` (what stays).
On a GPU: `cuda_site` (the parent's side), `cuda_worker`, `cuda_trial`, `cuda_subject`, `cuda_device`, `cuda_timing`.
"""
