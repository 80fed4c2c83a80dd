"""Probes that answered one question each; the documents hold the answers.

They stay to be asked again on another GPU or after a change. They may take the product apart and patch its kernels, so
nothing imports them: no test, no suite, no type checker. `python -m lab.NAME`; what they wrote is in `lab/results`.
"""
