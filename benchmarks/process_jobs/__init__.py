"""Best-effort jobs in a process of their own: training steps and the decoding of a language model, for `--be`."""
