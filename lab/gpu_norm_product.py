"""A layer norm between two products in f16: in the second one, with and without sums that the first one leaves.

    python -m lab.gpu_norm_product [--only TEXT] [--first K] [--seconds S] [--out FILE] [--no-torch] [--dry]

x = a @ Wp + bp + residual; z = [gelu](layer_norm(x) @ W + b), of ViT-B/16, BERT-base (where layer_norm(x) is a result,
too) and SegFormer-B0. Ways: three kernels (product, norm, product); two, where the first product leaves partial sums
and the second one normalises its operand on load (`parts`); two, where the second one computes mean and variance itself
(`own`); torch.compile's kernels. Of each kernel the first K schedules are compared with float64 and timed by
themselves, the fastest stand in the chains. Rows of large mean, of no variance, with NaN and infinity are checked, too.
A time is the median over replays of a CUDA graph of chains that read copies of the weights in turn (more than the L2
cache holds), launched as in a plan. `--dry` compiles the kernels without a GPU.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import torch
from benchmarks.cases.norm import EPS
from benchmarks.cases.norm_product import CASES, TOLERANCE, Bound, Case, Data, checked, error, problems, timed
from benchmarks.harness.kernel_cases import Kernel, opened, parser
from torch.nn import functional as F

from weft.generate.cuda.gemm.tma import normed as tma_normed

PATIENCE_S = 45
"""A case that takes longer ends the run: a kernel hangs."""


def torch_chain(data: Data) -> Callable[[int], object]:
    """torch.compile's kernels."""
    act = data.case.act

    def chain(
        a: torch.Tensor, r: torch.Tensor, wp: torch.Tensor, bp: torch.Tensor, g: torch.Tensor, e: torch.Tensor,
        w: torch.Tensor, b: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        x = r[0] + F.linear(a, wp, bp)
        y = F.layer_norm(x, x.shape[-1:], g, e, EPS)
        z = F.linear(y, w, b)
        return x, y, F.gelu(z) if act else z

    fast = torch.compile(chain, dynamic=False)
    first = [(w.t().contiguous(), b) for w, b in data.first]
    second = [(w.t().contiguous(), b) for w, b in data.second]

    def launch(i: int) -> object:
        i %= data.copies
        return fast(data.a, data.residual, *first[i], *data.vectors, *second[i])

    launch(0)
    return launch


def measured(case: Case, kernels: dict[str, list[Kernel]], *, peer: bool) -> dict[str, object]:
    """One case."""
    data = Data(case)
    best: dict[str, tuple[float, Kernel]] = {}
    tried: dict[str, list[str]] = {}
    wrong: list[str] = []
    for name, found in kernels.items():
        tried[name] = []
        for k in found:
            us, bad = checked(data, name, k)
            tried[name].append(f"{us:.2f} {k.source.schedule}")
            wrong += [f"{name} {x}: {k.source.schedule}" for x in bad]
            if not bad and us < best.get(name, (math.inf,))[0]:
                best[name] = (us, k)
    x, y, mean, spread = (data.results(n)[i] for n, i in (("first", 0), ("norm", 0), ("leave", 1), ("leave", 2)))
    z = data.results("second")[0]
    outs = {
        "first": [x], "leave": [x, mean, spread], "norm": [y], "second": [z],
        "parts": [z, y] if case.stored else [z], "own": [z, y] if case.stored else [z],
    }  # fmt: skip
    data.given = [mean, spread]
    bound = {n: Bound(k, data, n, y if n == "second" else x, outs[n]) for n, (_, k) in best.items()}
    ways = {"three": ("first", "norm", "second"), "parts": ("leave", "parts"), "own": ("first", "own")}
    times: dict[str, float] = {}
    for way, names in ways.items():
        if all(n in bound for n in names):

            def chain(i: int, names: tuple[str, ...] = names) -> None:
                for n in names:
                    bound[n](i)

            times[way] = timed(chain)
            chain(0)
            torch.cuda.synchronize()
            e = error(z, data.z)
            if not e <= TOLERANCE:
                wrong.append(f"the chain {way} errs by {e:.3g}")
    if peer:
        times["torch"] = timed(torch_chain(data))
    return {
        "case": list(case), "chains": times, "kernels": {n: us for n, (us, _) in best.items()},
        "schedules": {n: str(k.source.schedule) for n, (_, k) in best.items()}, "tried": tried, "wrong": wrong,
    }  # fmt: skip


WAYS, PARTS = ("three", "parts", "own", "torch"), ("first", "leave", "norm", "second", "parts", "own")


def main() -> int:
    """Run; 0 when every kernel was right."""
    options = parser(__doc__, first=4, seconds=70.0, threads=4)
    options.add_argument("--no-torch", action="store_true", help="without torch.compile")
    options.add_argument("--no-order", action="store_true", help="warpgroups that normalise do not take turns")
    args = options.parse_args()
    if args.no_order:
        tma_normed.WIDE = sys.maxsize
    shop = opened(args)
    work = [(name, case) for name, case in CASES.items() if shop.wants(name)]

    def prepared(item: tuple[str, Case]) -> dict[str, list[Kernel]]:
        return {n: shop.kernels(p) for n, p in problems(item[1]).items()}

    if args.dry:
        for item in work:
            for name, found in prepared(item).items():
                print(item[0], name, [k.cubin.of(k.source.entry).registers for k in found], flush=True)
        return 0
    torch.zeros(1, device="cuda")
    print(f"{'us of a chain':14}" + "".join(f"{w:>8}" for w in WAYS) + "  alone: " + " ".join(f"{n:>7}" for n in PARTS))
    bad = False
    with torch.inference_mode():
        for (name, case), kernels in shop.in_turn(work, prepared, ahead=1, patience_s=PATIENCE_S):
            line = measured(case, kernels, peer=not args.no_torch)
            chains, alone = line["chains"], line["kernels"]
            assert isinstance(chains, dict)
            assert isinstance(alone, dict)
            numbers = "".join(f"{chains.get(w, math.nan):8.2f}" for w in WAYS)
            print(
                f"{name:14}{numbers}         " + " ".join(f"{alone.get(n, math.nan):7.2f}" for n in PARTS), flush=True
            )
            tried = line["tried"]
            assert isinstance(tried, dict)
            print("   ", {n: [x.split()[0] for x in tried[n]] for n in ("leave", "parts", "own")}, flush=True)
            for x in line["wrong"]:  # type: ignore[attr-defined]
                bad = True
                print(f"    WRONG {x}"[:300], flush=True)
            shop.note(name, line)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
