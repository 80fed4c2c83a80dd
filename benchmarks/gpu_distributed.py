"""Training over several GPUs: torch.compile(backend="weft") under DDP and FSDP2, beside eager and torch.compile.

    python -m benchmarks.gpu_distributed [--only WORD,WORD] [--how ddp,fsdp] [--who weft,eager,inductor] [--ranks 2]
                                         [--budget S] [--limit S] [--again WHO,WHO] [--out -|FILE]
    python -m benchmarks.gpu_distributed --device cpu --small

The networks of `benchmarks.gpu_training`, each rank with a batch of its own, in bf16 autocast; the model is wrapped
first and compiled then, as PyTorch's own examples do it, and the loop is the user's: zero_grad, loss, backward, step of
the framework's optimizer. Collectives are NCCL's (gloo's on a processor). Nobody's step is in a CUDA graph.

`ms` is the median of a step by the clock of rank 0, with a barrier in front of each sample. `right`: the losses of the
first batches of rank 0 are no further from eager's in f32 than twice eager's own in bf16, and one last digit of a bf16.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.cases.training import CASES
from benchmarks.harness.left import Left, add_option
from benchmarks.harness.own_process import said
from benchmarks.harness.record import Record, Row, folder_of
from benchmarks.harness.training_steps import CHECKED, ROUND_S, ROUNDS, SHOWN, WARM, case_row
from weft.torch_backend import register

SUITE = "distributed"
WHO, HOW = ("weft", "eager", "inductor"), ("ddp", "fsdp")
CHOSEN = ("resnet50/b64", "bert_base/16x128", "dlrm")
"""Without `--only`."""
_CONTEXT = torch.multiprocessing.get_context("spawn")


class Rank:
    """One process: its part of the model, its batches."""

    def __init__(self, name: str, how: str, who: str, rank: int, given: Mapping[str, Any]) -> None:
        self.case, self.given, self.rank = CASES[name], given, rank
        self.device = torch.device("cuda", rank) if given["device"] == "cuda" else torch.device("cpu")
        self.how, self.who = how, who

    def batch(self, number: int) -> tuple[torch.Tensor, ...]:
        """Of this rank, on its device."""
        found = self.case.batch(number * int(self.given["ranks"]) + self.rank, small=bool(self.given["small"]))
        return tuple(self._laid(x.to(self.device)) for x in found)

    def _laid(self, x: Any) -> Any:
        image = self.case.images and (isinstance(x, torch.nn.Module) or x.dim() == 4)
        return x.to(memory_format=torch.channels_last) if image else x

    def step(self, *, autocast: bool = True) -> Any:
        """A step from the first weights on, of a model wrapped and compiled anew."""
        torch.manual_seed(0)
        model = self._laid(self.case.build(bool(self.given["small"])).to(self.device).train())
        if self.how == "ddp":
            wrapped: Any = DistributedDataParallel(model, [self.rank] if self.device.type == "cuda" else None)
        else:
            from torch.distributed.fsdp import fully_shard

            wrapped = fully_shard(model)
        run = wrapped
        if self.who == "weft":
            register()  # a source tree has no entry point
            run = torch.compile(wrapped, backend="weft", options={"budget_s": self.given["budget"]})
        elif self.who != "eager":
            run = torch.compile(wrapped)
        optimizer = self.case.optimizer(wrapped.parameters(), fused=False, capturable=False)

        def step(*batch: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(self.device.type, torch.bfloat16) if autocast else nullcontext():
                loss = self.case.loss(run(*batch[:-1]), batch[-1])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return loss.detach()

        return step

    def wait(self) -> None:
        """Until the device has done all."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def measured(self) -> Row:
        """The entry of the contender."""
        began = time.perf_counter()
        step = self.step()
        losses = [float(step(*self.batch(k))) for k in range(CHECKED)]
        row: Row = {"first_losses_s": round(time.perf_counter() - began, 1), "losses": losses}
        batch = self.batch(0)

        def sample(count: int) -> float:
            self.wait()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(count):
                step(*batch)
            self.wait()
            return (time.perf_counter() - start) / count * 1e3

        once = [sample(WARM), sample(1)][-1]
        counts: list[Any] = [max(1, math.ceil(ROUND_S * 1e3 / max(once, 1e-3)))]
        dist.broadcast_object_list(counts)
        samples = [sample(counts[0]) for _ in range(int(self.given["rounds"]))]
        row.update(ms=round(statistics.median(samples), 4), samples_ms=[round(x, 4) for x in samples])
        if self.device.type == "cuda":
            row["memory_bytes"] = torch.cuda.max_memory_reserved()
        if self.who == "eager":
            exact = self.step(autocast=False)
            row["losses_f32"] = [float(exact(*self.batch(k))) for k in range(CHECKED)]
        return row


def _answer(rank: int, name: str, how: str, who: str, given: Mapping[str, Any], pipe: Any, log: str) -> None:
    """What a process does; rank 0 says the entry."""
    told = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(told, 1)
    os.dup2(told, 2)
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(given["port"]))
    on_gpu = given["device"] == "cuda"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        if on_gpu:
            torch.cuda.set_device(rank)
        else:
            torch.set_num_threads(1)
        dist.init_process_group("nccl" if on_gpu else "gloo", rank=rank, world_size=int(given["ranks"]))
        row = Rank(name, how, who, rank, given).measured()
    except Exception as error:  # it is the contender's result
        traceback.print_exc()
        row = {"failed": said(error)}
    if rank == 0 or "failed" in row:
        pipe.put(row)
        time.sleep(0.1)
    os._exit(0)  # a rank whose fellow failed would wait in a collective for ever


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def asked(name: str, how: str, who: str, given: Mapping[str, Any], log: str) -> Row:
    """The entry of one contender, from processes of its own that are ended when their time is over."""
    given = {**given, "port": _free_port()}
    pipe: Any = _CONTEXT.Queue()
    ranks = [
        _CONTEXT.Process(target=_answer, args=(rank, name, how, who, given, pipe, log))
        for rank in range(int(given["ranks"]))
    ]
    began = time.perf_counter()
    for process in ranks:
        process.start()
    row: Row = {"failed": f"no step in {given['limit']:g} s"}
    while time.perf_counter() < began + float(given["limit"]):
        try:
            row = pipe.get(timeout=1.0)
            break
        except Exception:
            if not any(p.is_alive() for p in ranks):
                row = {"failed": f"the processes ended with {[p.exitcode for p in ranks]}"}
                break
    for process in ranks:
        process.kill()
        process.join()
    return {**row, "seconds": round(time.perf_counter() - began, 1)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="cases whose name holds one of these texts, by commas")
    parser.add_argument("--how", default=",".join(HOW))
    parser.add_argument("--who", default=",".join(WHO))
    parser.add_argument("--again", default="", help="contenders to be measured once more, by commas, or `all`")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--budget", type=float, default=30.0, help="of Weft's search for each graph, in seconds")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds that a contender may take")
    parser.add_argument("--seconds", type=float, default=math.inf, help="none is begun after so many")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small forms of the networks")
    parser.add_argument("--out", type=Path, help="write the record: into this file, or `-`: into that of the suite")
    add_option(parser)
    given = parser.parse_args(arguments)
    words = given.only.split(",") if given.only else SHOWN if given.small else CHOSEN
    cases = [(c, how) for c in CASES if any(w in c for w in words) for how in given.how.split(",")]
    folder = folder_of(given.device, _CONTEXT)
    if not folder:
        sys.exit("benchmarks.gpu_distributed: torch sees no NVIDIA GPU; `--device cpu --small` runs on the processor")
    settings: Row = {k: getattr(given, k) for k in ("ranks", "small", "budget", "rounds", "limit")}
    end = time.perf_counter() + given.seconds
    with tempfile.TemporaryDirectory(prefix="weft-distributed-") as temporary:
        log = Path(temporary) / "log.txt"
        path = None if given.out == Path("-") else given.out or Path(temporary) / "record.jsonl"
        record = Record(folder, SUITE, path=path)
        again = [x for x in given.again.split(",") if x]
        src, turns = record.head["src"], Left(record, end, only=given.left)
        for name, how in cases:
            case = f"{name}/{how}{given.ranks}"
            for who in given.who.split(","):
                known = record.before().get(case, {}).get("runs", {})
                runs: dict[str, Row] = dict(known) if isinstance(known, dict) else {}
                done = who in runs and who not in again and "all" not in again
                if given.left and who == "weft" and runs.get(who, {}).get("src") != src:
                    done = False
                if done or turns.over(f"{case}, {who}"):
                    continue
                log.write_text("")
                runs[who] = {**asked(name, how, who, vars(given), str(log)), "src": src}
                if "failed" in runs[who]:
                    print(log.read_text(errors="replace")[-4000:], file=sys.stderr, flush=True)
                record.add(case_row(case, runs, settings, SUITE))
    turns.close()


if __name__ == "__main__":
    main()
