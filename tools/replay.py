"""Are plans and kernel texts the same as on another commit? `python tools/replay.py --base main`.

The corpus is a handful of graphs with everything in them. Each is compiled without measuring: kernels are priced by
the model on a fixed machine, so that plans depend on the code alone. Both trees run with this interpreter.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def corpus() -> dict[str, str]:
    """Name -> text: every kernel of every candidate, and the plan, of each graph."""
    import torch
    from torch import nn
    from torch.nn import functional as F  # noqa: N812 - the name everybody uses

    from weft.device.facts import CpuFacts
    from weft.frontends.torch import import_exported
    from weft.generate.registry import generators
    from weft.ir.passes import clean_up
    from weft.kernels.source import KernelSource
    from weft.options import Options
    from weft.orchestrate.alternatives import find_alternatives
    from weft.orchestrate.enumerate import enumerate_candidates
    from weft.orchestrate.select import select
    from weft.pipeline.problems import collect, make_kernels
    from weft.pipeline.search import Known, priced_offers

    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 16, 3), nn.InstanceNorm2d(16, affine=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.max_pool2d(F.relu(self.norm(self.conv(F.pad(x, (1, 1, 1, 1), "reflect")))), 2)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
            self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (f(x).view(1, 16, 2, 16).transpose(1, 2) for f in (self.q, self.k, self.v))
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(1, 16, 32)
            x = self.norm(x + self.o(y))
            return x + self.down(F.gelu(self.up(x)))

    class Mobile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8)
            self.c = nn.Conv2d(8, 16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.silu(self.c(F.silu(self.b(self.a(x)))))
            return torch.cat(
                [F.interpolate(y, scale_factor=2.0), F.interpolate(y, scale_factor=2.0, mode="bilinear")], 1
            )

    torch.manual_seed(0)
    cases = {
        "norms": (Norms(), torch.randn(1, 3, 16, 16)),
        "block": (Block(), torch.randn(1, 16, 32)),
        "mobile": (Mobile(), torch.randn(1, 8, 12, 12)),
        "softmax": (nn.Softmax(-1), torch.randn(64, 100)),
    }
    facts, options = CpuFacts(simd_bytes=64, threads=2, cores=2), Options()
    found: dict[str, str] = {}
    for name, (module, x) in cases.items():
        with torch.no_grad():
            program = torch.export.export(module.eval(), (x,), strict=False)
        alternatives = find_alternatives(clean_up(import_exported(program).graph).graph)
        graph = alternatives.graph
        problems = collect(graph, enumerate_candidates(graph, None, alternatives).candidates, alternatives, facts)
        for entry in problems.entries.values():
            entry.widened = True
            make_kernels(entry, problems, generators(), facts, options)
            for schedule, kernel in entry.kernels or ():
                text = kernel.text if isinstance(kernel, KernelSource) else repr(kernel)
                found[f"kernel {name} {schedule}\n{entry.problem.key}"] = text
        runnable = {k: e for k, e in problems.entries.items() if e.kernels}
        problems.entries = runnable
        offers, owners = priced_offers(problems, Known())
        chosen = select(graph, offers, alternatives=alternatives, gap=0.0, plans=1)[0].chosen
        found[f"plan {name}"] = "\n\n".join(owners[i].problem.key for i in chosen)
    return found


def emit(tree: Path) -> dict[str, str]:
    """The corpus as a tree compiles it, in a process of its own."""
    env = {**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"}
    command = [sys.executable, str(Path(__file__).resolve()), "--emit"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=tree)
    if done.returncode:
        sys.exit(f"replay: {tree} failed:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def main() -> None:
    """Compare and exit 1 on any difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="HEAD")
    parser.add_argument("--emit", action="store_true", help="print the corpus of this tree as JSON")
    given = parser.parse_args()
    if given.emit:
        print(json.dumps(corpus()))
        return
    with tempfile.TemporaryDirectory(prefix="weft-replay-") as folder:
        tree = Path(folder) / "base"
        subprocess.run(["git", "worktree", "add", "--detach", "-q", str(tree), given.base], cwd=ROOT, check=True)
        try:
            old, new = emit(tree), emit(ROOT)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
    differ = sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k))
    for key in differ[:20]:
        print(
            "\n".join(
                difflib.unified_diff(
                    old.get(key, "").split("\n"), new.get(key, "").split("\n"), "base " + key, "here", lineterm=""
                )
            )
        )
    count = {kind: sum(k.startswith(kind) for k in new) for kind in ("kernel", "plan")}
    same = {kind: sum(k.startswith(kind) and old.get(k) == new[k] for k in new) for kind in count}
    print(f"{count['kernel']} kernels, {count['plan']} plans: {same['kernel']} and {same['plan']} identical")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
