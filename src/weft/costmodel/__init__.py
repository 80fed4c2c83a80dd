"""What kernels cost on a device: arithmetic that knows no template, and every model's constants as data by device.

`roofline` and `tiles` are plain numbers over a GPU's facts; the model of a template stands beside the template, that of
a whole problem in `orchestrate.estimate_cuda`. All take their constants from a file of `profiles`
(`profile.costs_of`).
"""
