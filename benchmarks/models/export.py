"""Write benchmark networks as ONNX files: python -m benchmarks.models.export NAME|all --out DIR."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import torch

from benchmarks.models import NETWORKS, load

OPSET = 18
EXTERNAL_BYTES = 1_500_000_000
"""Beyond this the weights stand in a file beside the model: one protobuf message holds 2 GB at most."""


def export(name: str, out: Path, *, batch: int = 1, seed: int = 0) -> Path:
    """Write `out/name.onnx`; returns its path."""
    module, inputs = load(name, batch, seed)
    num_bytes = sum(tensor.nbytes for tensor in module.state_dict().values())
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.onnx"
    with warnings.catch_warnings():
        # the exporter warns about itself
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            inputs,
            path,
            dynamo=True,
            opset_version=OPSET,
            external_data=num_bytes > EXTERNAL_BYTES,
            input_names=["input"],
            verbose=False,
        )
    return path


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models.export", description=__doc__)
    parser.add_argument("name", choices=[*NETWORKS, "all"])
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for name in NETWORKS if options.name == "all" else [options.name]:
        path = export(name, options.out, batch=options.batch, seed=options.seed)
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
