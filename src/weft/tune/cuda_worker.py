"""The process that may die, for one GPU: started as `python -m weft.tune.cuda_worker` with the pipes of `worker`.

It answers the same requests. An error that leaves no usable context behind, and a kernel that does not end, are
reported with the event `restart`; the process then ends, and the parent starts another, which proves itself on the
canary before it measures.
"""

from __future__ import annotations

import gc
import mmap
import os
import resource
import sys
from pathlib import Path
from typing import cast

import torch

from weft.errors import WeftError
from weft.generate.bind import CudaDriver, real_driver
from weft.tune.cuda_device import CudaGpu, Gpu
from weft.tune.cuda_subject import LateWriter, Soil
from weft.tune.cuda_trial import Bench, RestartError, run_trial
from weft.tune.messages import BOARD_BYTES, GarbageError, Message
from weft.tune.worker import PipeChannel, TrialRequest

CANARY_THREADS = 4096
CANARY_S = 20.0
"""Its kernel hangs on no sound GPU, but other processes may make it wait; less than a trial's patience."""
KEEP_BYTES = 16 << 30
"""Memory that the framework may hold on to between trials."""
SETTLING = 2
"""Trials after which nearly everything is loaded."""
COLLECT_EVERY = 4


def canary(gpu: Gpu, object_path: str, entry: str, *, driver: CudaDriver | None = None) -> str:
    """Run sums with a known answer through torch and, if given, a compiled kernel; a text says what is wrong."""
    try:
        x = torch.arange(CANARY_THREADS, dtype=torch.float32, device=gpu.device)
        if float((x.double() * 2 + 1).sum()) != float(CANARY_THREADS) ** 2:
            return "torch adds wrongly"
        a = torch.arange(64, dtype=torch.float64, device=gpu.device).reshape(8, 8)
        if float((a @ a).sum()) != float((a.cpu() @ a.cpu()).sum()):
            return "torch multiplies wrongly"
        if object_path:
            out = torch.zeros(CANARY_THREADS, dtype=torch.float32, device=gpu.device)
            function = (driver or real_driver()).load(Path(object_path)).function(entry)
            launch = function.bind(
                (CANARY_THREADS // 256, 1, 1),
                (256, 1, 1),
                (x.data_ptr(), out.data_ptr()),
                shared_bytes=0,
                cluster=(1, 1, 1),
                dependent=False,
            )
            launch.launch(gpu.stream)
            gpu.wait(CANARY_S)
            if not torch.equal(out, x * 2 + 1):
                return "a compiled kernel computes wrongly"
    except (RuntimeError, OSError, WeftError) as error:
        return f"the canary does not run: {type(error).__name__}: {error}"[:500]
    return ""


def serve(channel: PipeChannel) -> None:
    """Answer requests until the parent says `bye` or goes away, or the GPU is lost."""
    bench: Bench | None = None
    trials = 0
    while (message := channel.read()) is not None:
        op = message.get("op")
        if op == "hello":
            bench = _start(message)
            channel.say(event="ready", pid=os.getpid(), torch=torch.__version__)
        elif op == "bye":
            return
        elif bench is None:
            raise GarbageError("a request before `hello`")
        elif op == "canary":
            channel.say(event="canary", problem=canary(bench.gpu, str(message["object"]), str(message["entry"])))
        elif op == "trial":
            try:
                run_trial(TrialRequest.from_message(message), channel, bench)
            except RestartError:
                channel.answers.flush()
                os._exit(0)  # destructors would call a driver that answers no more
            trials += 1
            _tidy(trials)
        elif op == "rest":
            bench.forget()
            gc.collect()
            torch.cuda.empty_cache()
        else:
            raise GarbageError(f"request {op!r}")


def _start(message: Message) -> Bench:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # address space is not limited: the driver reserves all of it
    gpu = CudaGpu(int(cast("int", message["device"])))
    late, soil = str(message["late"]), _soil(message, gpu)
    before = LateWriter(late, gpu, soil=soil) if late else None
    return Bench(gpu, bool(message["allow_tf32"]), before=before, soil=soil)


def _soil(message: Message, gpu: CudaGpu) -> Soil | None:
    """None: it did not compile, or cannot be launched here."""
    if not message["soil"]:
        return None
    sms, shared_bytes = (int(cast("int", message[name])) for name in ("sms", "shared_bytes"))
    try:
        return Soil(str(message["soil"]), gpu, sms=sms, shared_bytes=shared_bytes)
    except WeftError:
        return None


def _tidy(trials: int) -> None:
    """Free what the trials left in cycles. What the first trials loaded stays, so it is not walked again and again."""
    if trials <= SETTLING or trials % COLLECT_EVERY == 0:
        gc.collect()
    if trials <= SETTLING:
        gc.freeze()
    if torch.cuda.memory_reserved() > KEEP_BYTES:
        torch.cuda.empty_cache()


def main() -> None:
    """Entry point of the process."""
    requests, answers, board = (int(x) for x in sys.argv[1:4])
    with os.fdopen(requests, "rb") as source, os.fdopen(answers, "wb") as sink, mmap.mmap(board, BOARD_BYTES) as page:
        serve(PipeChannel(source, sink, page))


if __name__ == "__main__":
    main()
