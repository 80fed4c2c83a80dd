"""Attention models and injected faults on a GPU: does the caller's process live, are results right, is anything slower?

    python -m benchmarks.gpu_trust [--budget 10] [--jobs 6] [--count 100] [--only models|faults] [--case NAME]

Every case (a model at a batch size) is compiled in a process of its own with a time limit, `--jobs` of them at once;
then each of these processes times in its turn, alone on the GPU: Weft's graph and call against eager's graph and call.
Right: its error against float64 is at most `FACTOR` times that of eager, or below the rounding of the result's type.

Faults: `--count` of every kind in library calls, through tuners as a compilation uses them; `--count` of every kind
that leaves the GPU alone in steps of whole plans, through linking and judging; and one compilation in which a third of
all library calls is broken, some so that whoever runs them can use the GPU no more. Each of these `PARTS` is a process
of its own, `--jobs` of them at once, which tells of its progress on the standard error; it must be able to use the GPU
afterwards. A run of models or faults alone keeps the records of the other.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.harness import noise
from benchmarks.harness.record import ROOT, Record, folder_of_gpu

FACTOR = 2.0
"""Times the error of eager."""
ROUNDING = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-20}
"""Relative error (in norm) below which nothing is wrong."""
LIMIT_S = 110.0
"""For one process: start, compilation, checks."""
BEGAN = time.perf_counter()
TOKENS = 512
HEADS, SIZE = 8, 64


@final
class Block(nn.Module):
    """Layers of attention with a residual, of any kind of operands."""

    def __init__(
        self,
        attend: Callable[..., torch.Tensor],
        *,
        heads: int = HEADS,
        keys: int = 0,
        size: int = SIZE,
        layers: int = 4,
    ) -> None:
        super().__init__()
        self.attend, self.heads, self.keys, self.size = attend, heads, keys or heads, size
        width, narrow = heads * size, self.keys * size
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.q = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.kv = nn.ModuleList(nn.Linear(width, 2 * narrow) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        """x (B, T, heads * size); `more`: what the attention reads besides, for cross-attention (B, S, ...) first."""
        cross = self.attend is crossed
        for norm, q, kv, out in zip(self.norms, self.q, self.kv, self.out, strict=True):
            y = norm(x)
            k, v = kv(more[0] if cross else y).chunk(2, -1)
            found = self.attend(
                self._split(q(y), self.heads), self._split(k, self.keys), self._split(v, self.keys),
                *(() if cross else more),
            )  # fmt: skip
            x = x + out(found.transpose(1, 2).reshape(x.shape))
        return x

    def _split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.reshape(x.shape[0], x.shape[1], heads, self.size).transpose(1, 2)


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """No mask."""
    return F.scaled_dot_product_attention(q, k, v)


def crossed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """No mask, keys of another sequence."""
    return F.scaled_dot_product_attention(q, k, v)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The framework's own causal mask."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Several heads of queries share one of keys."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A mask that is given."""
    return F.scaled_dot_product_attention(q, k, v, mask)


def unscaled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A relative bias on the scores, which nothing divides."""
    return F.scaled_dot_product_attention(q * 0.125, k, v, bias, scale=1.0)


@final
class Hidden(nn.Module):
    """The last hidden state of a network of `transformers` with random weights."""

    def __init__(self, model: nn.Module, padding: bool) -> None:
        super().__init__()
        self.model, self.padding = model, padding

    def forward(self, ids: torch.Tensor, *mask: torch.Tensor) -> torch.Tensor:
        """ids (B, T), mask (B, T)."""
        given = {"attention_mask": mask[0]} if self.padding else {"use_cache": False}
        found: torch.Tensor = self.model(ids, **given).last_hidden_state
        return found


Made = tuple[nn.Module, tuple[torch.Tensor, ...]]


def _rows(batch: int, tokens: int, chance: torch.Generator, width: int = HEADS * SIZE) -> torch.Tensor:
    return torch.randn(batch, tokens, width, generator=chance)


def _padding(batch: int, tokens: int) -> torch.Tensor:
    """(B, T) of bool: each row of the batch is some tokens shorter than the one before."""
    lengths = [max(tokens - 17 * b, tokens // 2) for b in range(batch)]
    return torch.arange(tokens)[None, :] < torch.tensor(lengths)[:, None]


def _transformer(name: str, batch: int, tokens: int, chance: torch.Generator) -> Made:
    import transformers

    ids = torch.randint(0, 1000, (batch, tokens), generator=chance)
    if name == "gpt2":
        return Hidden(transformers.GPT2Model(transformers.GPT2Config()), padding=False), (ids,)
    if name == "llama":
        config = transformers.LlamaConfig(
            vocab_size=1000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16,
            num_key_value_heads=4,
        )  # fmt: skip
        return Hidden(transformers.LlamaModel(config), padding=False), (ids,)
    bert = transformers.BertConfig(vocab_size=1000, num_hidden_layers=4)
    model = transformers.BertModel(bert, add_pooling_layer=False)
    return Hidden(model, padding=True), (ids, _padding(batch, tokens).long())


def _block(name: str, batch: int, tokens: int, chance: torch.Generator) -> Made:
    x = _rows(batch, tokens, chance)
    if name == "mask broadcast":
        return Block(masked), (x, _padding(batch, tokens)[:, None, None, :])
    if name == "causal":
        return Block(causal), (x,)
    if name == "grouped heads":
        return Block(grouped, keys=2), (x,)
    if name == "odd heads":
        odd = tokens - 3
        return Block(plain, heads=6, size=40), (_rows(batch, odd, chance, 240),)
    if name == "no mask":
        return Block(plain), (x,)
    if name == "cross":
        return Block(crossed), (_rows(batch, max(tokens // 6, 1), chance), x)
    if name == "relative bias":
        return Block(unscaled), (x, torch.randn(1, HEADS, tokens, tokens, generator=chance))
    tril = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    window = tril & ~tril.tril(-max(tokens // 4, 1))
    return Block(masked), (x, window[None, None].expand(batch, HEADS, tokens, tokens).contiguous())


MODELS: Mapping[str, tuple[Callable[[str, int, int, torch.Generator], Made], torch.dtype]] = {
    "gpt2": (_transformer, torch.float16),
    "llama": (_transformer, torch.bfloat16),
    "bert": (_transformer, torch.float16),
    "mask broadcast": (_block, torch.float16),
    "causal": (_block, torch.bfloat16),
    "grouped heads": (_block, torch.float16),
    "odd heads": (_block, torch.float16),
    "no mask": (_block, torch.float16),
    "cross": (_block, torch.float16),
    "relative bias": (_block, torch.float16),
    "window per head": (_block, torch.float16),
}
BATCHES: Mapping[str, Sequence[int]] = dict.fromkeys(MODELS, (1, 8)) | {"gpt2": (1, 2, 4, 8, 16, 32)}


def made(name: str, batch: int, tokens: int = TOKENS) -> Made:
    """A model and its inputs, in f32 on the CPU, always the same ones."""
    torch.manual_seed(7)
    build, _ = MODELS[name]
    model, inputs = build(name, batch, tokens, torch.Generator().manual_seed(1))
    return model.eval().requires_grad_(requires_grad=False), inputs


def as_type(inputs: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Floats among them in that type."""
    return [x.to(dtype) if x.is_floating_point() else x for x in inputs]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Of a result, relative to the norm of what it must be; infinite where it has other NaN or infinities."""
    if got.shape != want.shape or not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got.double() - want.double()).norm() / want.double().norm())


def is_right(mine: float, theirs: float, dtype: torch.dtype) -> bool:
    """Whether an error is one that the type of the result explains."""
    return mine <= max(FACTOR * theirs, ROUNDING[dtype])


# --- one case, in a process of its own


def child(name: str, batch: int, budget_s: float) -> None:
    """Compile, judge, say so; time when a line on the standard input says that the GPU is free."""
    import weft

    _, dtype = MODELS[name]
    model, given = made(name, batch)
    exact = model.cuda().double()
    wide = [x.cuda() for x in as_type(given, torch.float64)]
    want = exact(*wide).cpu()
    model = exact.to(dtype)
    inputs = [x.cuda() for x in as_type(given, dtype)]
    theirs = error(model(*inputs).cpu(), want)
    del wide
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="weft-trust-") as cache, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        options = weft.Options(device="cuda", budget_s=budget_s, cache_dir=Path(cache))
        compiled = weft.compile(model, inputs, options=options)
        seconds = time.perf_counter() - start
        mine = error(cast("torch.Tensor", compiled(*inputs)).cpu(), want)
        torch.cuda.synchronize()
        told = [str(w.message) for w in said if "Weft" in str(w.message)]
        found: dict[str, object] = {
            "compile_s": round(seconds, 1), "error": mine, "eager_error": theirs, "alive": lives(),
            "right": is_right(mine, theirs, dtype), "chosen": compiled.record.chosen,
            "kernels": len(compiled.record.steps), "warnings": told,
        }  # fmt: skip
        print("ready", flush=True)
        sys.stdin.readline()
        print(json.dumps(found | timed(compiled, model, inputs)), flush=True)


def timed(compiled: Any, model: nn.Module, inputs: Sequence[torch.Tensor]) -> dict[str, object]:
    """Medians in microseconds, in interleaved rounds."""
    import statistics

    from weft.options import Options
    from weft.pipeline.finish import interleave
    from weft.platform.cuda import captured as capturing
    from weft.platform.cuda import platform as gpu

    def eager(*tensors: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            return [model(*tensors)]

    captured = capturing.capture(eager, inputs, Options(device="cuda"))
    runs: dict[str, Callable[[], object]] = {
        "weft_ms": getattr(compiled.run, "replay", lambda: compiled(*inputs)),
        "weft_call_ms": lambda: compiled(*inputs),
        "eager_call_ms": lambda: eager(*inputs),
    }
    if hasattr(captured, "replay"):
        runs["eager_ms"] = captured.replay
    samples = interleave(noise.twice(runs), rounds=15, seed=1, budget_s=4.0, sample=gpu.sample_us)
    ms = {name: statistics.median(samples[name]) / 1e3 for name in runs}
    best = min((n for n in ("eager_ms", "eager_call_ms") if n in ms), key=lambda n: ms[n])
    beside = noise.of_rounds(samples, "weft_ms", best)
    calls = noise.of_rounds(samples, "weft_call_ms", "eager_call_ms")
    found: dict[str, object] = {name: round(x, 4) for name, x in ms.items()}
    kept = beside.no_slower and calls.no_slower
    return found | {"noise": beside.record(), "noise_of_calls": calls.record(), "faster": kept}


def lives() -> bool:
    """Whether this process can use the GPU."""
    try:
        torch.cuda.synchronize()
        return float(torch.ones(4096, device="cuda").sum()) == 4096.0
    except RuntimeError:
        return False


@dataclass
class Case:
    """One process."""

    name: str
    batch: int
    process: subprocess.Popen[str]
    log: Path
    deadline: float
    lines: list[str] = field(default_factory=list)
    reader: threading.Thread | None = None

    def wait(self, count: int) -> bool:
        """Until so many lines are there; False where it ended, or was killed for want of time."""
        while len(self.lines) < count:
            if self.process.poll() is not None and self.reader is not None:
                self.reader.join(5.0)
                return len(self.lines) >= count
            if time.monotonic() > self.deadline:
                self.process.kill()
                return False
            time.sleep(0.05)
        return True


def begin(name: str, batch: int, arguments: Sequence[str], folder: Path) -> Case:
    """Start the process of a case."""
    log = folder / f"{name.replace(' ', '-')}-{batch}.log"
    command = [sys.executable, "-m", "benchmarks.gpu_trust", "--child", name, "--batch", str(batch), *arguments]
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT.parent
        )
    case = Case(name, batch, process, log, time.monotonic() + LIMIT_S)

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(("ready", "{")):
                case.lines.append(line)

    case.reader = threading.Thread(target=read, daemon=True)
    case.reader.start()
    return case


def finish(case: Case) -> dict[str, object]:
    """Let a case that is ready time, and give its record."""
    ready = case.wait(1)
    if ready and case.process.stdin is not None:
        case.deadline = time.monotonic() + 30.0
        case.process.stdin.write("go\n")
        case.process.stdin.flush()
    done = ready and case.wait(2)
    if done:
        found = json.loads(case.lines[1])
    else:
        case.process.kill()
        last = case.log.read_text(errors="replace").strip().splitlines()[-1:]
        found = {"alive": False, "right": False, "faster": False, "problem": (last or ["no answer in time"])[0][:300]}
    case.process.wait()
    line = {"record": "case", "suite": "attention-models", "case": f"{case.name} batch {case.batch}"}
    return line | found


def models(
    record: Record, names: Sequence[tuple[str, int]], budget_s: float, jobs: int, folder: Path
) -> list[dict[str, object]]:
    """All cases, so many at once."""
    found = []
    for first in range(0, len(names), jobs):
        cases = [begin(name, batch, ["--budget", str(budget_s)], folder) for name, batch in names[first : first + jobs]]
        for case in cases:
            case.wait(1)
        for case in cases:  # one after another, while the others wait
            line = finish(case)
            found.append(line)
            record.add(line)
    return found


# --- faults


def _broken(kind: str, number: int, call: Any) -> Any:
    """A library call that is wrong in one way. `number` says where and how."""
    from weft.kernels.source import CallStep, LibraryCall, Ref

    last = Ref("tmp", len(call.run) - 1)
    where = call.outputs[0] if call.outputs[0].kind == "tmp" and not call.out_variant else last
    far = 10**6 + 977 * number
    more = {
        "refuses": (CallStep("aten.reshape.default", (where, (3 + number % 7, 1_000_003))),),
        # nothing constant, also where all values are nearly the same: norms and softmax take that out again
        "wrong numbers": (
            CallStep("aten.mul.Tensor", (where, 1000.0)),
            CallStep("aten.cos.default", (Ref("tmp", len(call.run)),)),
            CallStep("aten.add.Tensor", (where, Ref("tmp", len(call.run) + 1)), (("alpha", 1 + number % 5),)),
        ),
        "not a number": (CallStep("aten.mul.Tensor", (where, float("nan"))),),
        "another shape": (CallStep("aten.unsqueeze.default", (where, 0)), CallStep("aten.cat.default", (
            (Ref("tmp", len(call.run)), Ref("tmp", len(call.run))), 0,
        ))),
        "index outside": (
            CallStep("weft.tensor", ((far,), "dtype:i64", (1,))),
            CallStep("aten.reshape.default", (where, (-1,))),
            CallStep("aten.index_select.default", (Ref("tmp", len(call.run) + 1), 0, Ref("tmp", len(call.run)))),
            CallStep("aten.add.Tensor", (where, Ref("tmp", len(call.run) + 2))),
        ),
        "argument that is none": (CallStep("aten.add.Tensor", (where, ())),),
    }[kind]  # fmt: skip
    run = (*call.run, *more)
    schedule = replace(call.schedule, params=(*call.schedule.params, ("fault", kind), ("number", number)))
    return LibraryCall(schedule, call.prepare, run, (Ref("tmp", len(run) - 1),))


KINDS = ("refuses", "wrong numbers", "not a number", "another shape", "argument that is none", "index outside")
STICKY = frozenset({"index outside"})
"""On a GPU these end the use of it for whoever runs them."""


def broken(kind: str, number: int, call: Any) -> Any:
    """See `_broken`; where the call writes its output itself, it gives it back instead."""
    if call.out_variant:
        *others, last = call.run
        call = replace(call, run=(*others, replace(last, target=functional(last.target))), out_variant=False)
    return _broken(kind, number, call)


def functional(target: str) -> str:
    """The overload that gives back what `target`, as `aten.sum.IntList_out`, writes: it takes the same but `out`.

    Raises:
        ValueError: there is none.
    """

    def taken(overload: str) -> list[tuple[str, str]]:
        schema = getattr(packet, overload)._schema
        return [(a.name, str(a.type)) for a in schema.arguments if not a.is_out]

    _, name, writing = target.split(".")
    packet = getattr(torch.ops.aten, name)
    for overload in packet.overloads():
        outputs = any(a.is_out for a in getattr(packet, overload)._schema.arguments)
        if not outputs and taken(overload) == taken(writing):
            return f"aten.{name}.{overload}"
    raise ValueError(f"no overload of aten.{name} takes what {target} does and gives back its result")


def told(case: str, done: int, count: int) -> None:
    """Progress, a line on the standard error for every tenth of the faults of a kind."""
    if done % max(1, count // 10) == 0 or done == count:
        print(f"{time.perf_counter() - BEGAN:7.1f} s  {case}: {done} of {count}", file=sys.stderr, flush=True)


def call_faults(count: int, jobs: int, cache: Path) -> Iterator[dict[str, object]]:
    """Faults in library calls, verified without being timed as a compilation does it; one record per kind.

    All kinds at once: most of the time goes into starting workers anew, `3 * jobs` at once for the kind that ends them.
    """
    from benchmarks.gpu_faults import MULTIPLY, Bench, problem
    from weft.kernels.measurement import Verdict
    from weft.tune.tuner import ProblemTrial

    bench = Bench.here(cache)
    tallies = {kind: Tally() for kind in KINDS}

    def work(kind: str, tally: Tally) -> None:
        def trials() -> Iterator[ProblemTrial]:
            while True:
                try:
                    numbers = tally.waiting.get_nowait()
                except queue.Empty:
                    return
                calls = [broken(kind, n, MULTIPLY) for n in numbers]
                kernels = [(c.schedule, c, None) for c in (*calls, MULTIPLY)]
                yield ProblemTrial(problem(f"{kind} {numbers}"), kernels, timed=False)

        try:
            with bench.tuner() as tuner:
                for m in tuner.measure(trials()):
                    with tally.lock:
                        faulty = "fault" in dict(m.schedule.params)
                        (tally.verdicts if faulty else tally.sound)[m.verdict.value] += 1
                        if faulty:
                            told(f"faults in calls: {kind}", sum(tally.verdicts.values()), count)
        except Exception as reason:  # whatever it is, it must not have happened
            tally.deaths.append(f"{type(reason).__name__}: {reason}"[:300])

    threads: dict[str, list[threading.Thread]] = {}
    for kind in sorted(KINDS, key=lambda k: k not in STICKY):  # those that take longest begin first
        tally, together = tallies[kind], 1 if kind in STICKY else 10
        for first in range(0, count, together):
            tally.waiting.put(list(range(first, min(count, first + together))))
        at_once = 3 * jobs if kind in STICKY else 1
        threads[kind] = [threading.Thread(target=work, args=(kind, tally)) for _ in range(at_once)]
        for t in threads[kind]:
            t.start()
    for kind in KINDS:
        for t in threads[kind]:
            t.join()
        tally = tallies[kind]
        accepted = tally.verdicts[Verdict.OK.value] + (sum(tally.sound.values()) - tally.sound[Verdict.OK.value])
        injected = sum(tally.verdicts.values())
        yield {
            "record": "case", "suite": "attention-models", "case": f"faults in calls: {kind}", "injected": injected,
            "verdicts": dict(tally.verdicts), "deaths": tally.deaths, "alive": lives(),
            "right": not accepted and not tally.deaths and injected == count,
        }  # fmt: skip


@dataclass
class Tally:
    """What became of the faults of one kind."""

    waiting: queue.SimpleQueue[list[int]] = field(default_factory=queue.SimpleQueue)
    verdicts: Counter[str] = field(default_factory=Counter)
    sound: Counter[str] = field(default_factory=Counter)
    """Of the call that is right, beside each."""
    deaths: list[str] = field(default_factory=list)
    """Of a tuner, which is the caller's."""
    lock: threading.Lock = field(default_factory=threading.Lock)


def plan_faults(kinds: Sequence[str], count: int, cache: Path, device: str = "cuda") -> Iterator[dict[str, object]]:
    """Faults in steps of whole plans, through what links and judges them; one record per kind.

    A plan that is verified counts as chosen, however slow. Where its result is as right as eager's (`is_right`, against
    float64), what was put in is no fault: a softmax does not depend on what is subtracted from its rows. These are
    told apart (`none_at`, by the step's calls) and another is injected.
    """
    from weft.api import compile as compile_model
    from weft.kernels.source import LibraryCall
    from weft.options import Options
    from weft.pipeline import finish as judge
    from weft.pipeline import link as linking
    from weft.pipeline import reference
    from weft.pipeline.reference import working_dtype
    from weft.pipeline.setting import survey

    dtype = torch.float16 if device == "cuda" else torch.float32
    model, given = made("causal", 1, 64)
    model, inputs = model.to(device, dtype), [x.to(device) for x in as_type(given, dtype)]
    options = Options(device=device, budget_s=0.0, cache_dir=cache)
    compiled = compile_model(model, inputs, options=options)
    graph, plan = compiled.graph, compiled.executable.plan
    found = survey(options)
    setting = replace(found, platform=found.platform.lending())
    expected = reference.outputs(graph, inputs, None)

    def eager(*tensors: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            return [model(*tensors)]

    with torch.no_grad():
        want = copy.deepcopy(model).double()(*[x.double() for x in inputs])
    theirs = error(eager(*inputs)[0], want)
    places = [i for i, s in enumerate(plan.steps) if isinstance(s.kernel, LibraryCall) and len(s.outputs) == 1]
    for kind in kinds:
        chosen: Counter[str] = Counter()
        bad_at: Counter[str] = Counter()
        none_at: Counter[str] = Counter()
        for number in itertools.count():
            if chosen.total() == count or number == LAPS * count:
                break
            at = places[number * 7 % len(places)]
            steps = list(plan.steps)
            call = cast("LibraryCall", steps[at].kernel)
            if not call.run:
                continue  # a view that is made beforehand
            steps[at] = replace(steps[at], kernel=broken(kind, number, call))
            bad = replace(plan, name=f"bad-{number}", steps=tuple(steps))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that it is left out
                contenders = linking.link_all(graph, [bad], setting, inputs, eager, [])
                won, told_of = judge.decide(
                    contenders, expected, working_dtype(graph), seed=0, budget_s=0.01,
                    sample=setting.platform.sample_us, lives=lives,
                )  # fmt: skip
            what = " ".join(c.target for c in call.run)
            taken = [
                c for c in contenders if c.name == bad.name and any(r.name == c.name and r.verified for r in told_of)
            ]
            if taken and is_right(error(next(iter(taken[0].run())), want), theirs, dtype):
                none_at[what] += 1
                continue
            chosen["bad" if taken else won.name.partition("-")[0]] += 1
            bad_at[what] += bool(taken)
            told(f"faults in plans: {kind}", chosen.total(), count)
        yield {
            "record": "case", "suite": "attention-models", "case": f"faults in plans: {kind}",
            "injected": chosen.total(), "chosen": dict(chosen), "bad_at": dict(+bad_at), "none_at": dict(none_at),
            "alive": lives(), "right": not chosen["bad"] and chosen.total() == count,
        }  # fmt: skip


LAPS = 3
"""Places that are tried for each fault: at some, what is meant for one changes no result."""


def compile_faults(cache: Path, budget_s: float) -> dict[str, object]:
    """A compilation in which a third of all library calls is broken."""
    import weft
    from weft.generate.library import LibraryGenerator
    from weft.kernels.source import LibraryCall

    emit = LibraryGenerator.emit
    injected: Counter[str] = Counter()
    seen = 0

    def faulty(self: LibraryGenerator, problem: Any, schedule: Any) -> Any:
        nonlocal seen
        call = emit(self, problem, schedule)
        if not isinstance(call, LibraryCall) or len(problem.graph.outputs) != 1 or not call.run:
            return call
        seen += 1
        if seen % 3:
            return call
        kind = KINDS[seen // 3 % len(KINDS)]
        injected[kind] += 1
        return replace(broken(kind, seen, call), schedule=call.schedule)

    model, given = made("mask broadcast", 2, 128)
    want = model.cuda().double()(*[x.cuda() for x in as_type(given, torch.float64)])
    model, inputs = model.half(), [x.cuda() for x in as_type(given, torch.float16)]
    theirs = error(model(*inputs), want)
    LibraryGenerator.emit = faulty  # type: ignore[method-assign]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            compiled = weft.compile(
                model, inputs, options=weft.Options(device="cuda", budget_s=budget_s, cache_dir=cache)
            )
        mine = error(cast("torch.Tensor", compiled(*inputs)), want)
    finally:
        LibraryGenerator.emit = emit  # type: ignore[method-assign]
    return {
        "record": "case", "suite": "attention-models", "case": "faults in a compilation",
        "injected": sum(injected.values()), "kinds": dict(injected), "chosen": compiled.record.chosen,
        "rejected": dict(compiled.record.rejected_kernels), "alive": lives(),
        "right": is_right(mine, theirs, torch.float16),
    }  # fmt: skip


PLAN_KINDS = tuple(k for k in KINDS if k not in STICKY)
PARTS: Mapping[str, Callable[[int, int, float, Path], Iterator[dict[str, object]]]] = {
    "calls": lambda count, jobs, _, cache: call_faults(count, jobs, cache),
    "plans 1": lambda count, _, __, cache: plan_faults(PLAN_KINDS[::2], count, cache),
    "plans 2": lambda count, _, __, cache: plan_faults(PLAN_KINDS[1::2], count, cache),
    "compilation": lambda _, __, budget_s, cache: iter([compile_faults(cache, 2 * budget_s)]),
}
"""Of (faults of each kind, jobs, seconds of a compilation, folder of a cache); each in a process of its own."""
PART_S = 300.0


def faults(record: Record, count: int, jobs: int, budget_s: float) -> list[dict[str, object]]:
    """All parts, so many at once; a part that raises, dies or does not end is a line, and the others are run."""
    lines: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()

    def work() -> None:
        while True:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                return
            for line in asked(name, count, jobs, budget_s):
                lines.put(line)

    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in PARTS:
        waiting.put(name)
    threads = [threading.Thread(target=work) for _ in range(min(jobs, len(PARTS)))]
    for t in threads:
        t.start()
    found = []
    while any(t.is_alive() for t in threads) or not lines.empty():
        try:
            line = lines.get(timeout=0.2)
        except queue.Empty:
            continue
        found.append(line)
        record.add(line)
    return found


def asked(part: str, count: int, jobs: int, budget_s: float) -> Iterator[dict[str, object]]:
    """The lines of one part, as its process gives them; one more where it did not come to its end."""
    command = [sys.executable, "-m", "benchmarks.gpu_trust", "--part", part, "--count", str(count), "--jobs", str(jobs)]
    command += ["--budget", str(budget_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT.parent) as process:
        late = threading.Timer(PART_S, process.kill)
        late.start()
        assert process.stdout is not None
        for text in process.stdout:
            if text.startswith("{"):
                yield json.loads(text)
        late.cancel()
    if process.returncode:
        yield {
            "record": "case", "suite": "attention-models", "case": f"faults, {part}", "injected": 0, "alive": False,
            "right": False, "problem": f"its process ended with status {process.returncode}",
        }  # fmt: skip


def run_part(part: str, count: int, jobs: int, budget_s: float) -> int:
    """In a process of its own: print the lines of one part as they come; the exit status."""
    with tempfile.TemporaryDirectory(prefix="weft-trust-") as place, torch.no_grad():
        os.chmod(place, 0o700)
        try:
            for line in PARTS[part](count, jobs, budget_s, Path(place) / "cache"):
                print(json.dumps(line), flush=True)
        except Exception as reason:  # what is told is that this part failed, and why
            traceback.print_exc()
            line = {
                "record": "case", "suite": "attention-models", "case": f"faults, {part}", "injected": 0,
                "alive": lives(), "right": False, "problem": f"{type(reason).__name__}: {reason}"[:300],
            }  # fmt: skip
            print(json.dumps(line), flush=True)
    return 0


def summary(lines: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Counts of all cases."""
    of_models = [x for x in lines if "injected" not in x]
    of_faults = [x for x in lines if "injected" in x]
    return {
        "record": "summary", "suite": "attention-models", "total": len(of_models),
        "alive": sum(bool(x["alive"]) for x in of_models), "right": sum(bool(x["right"]) for x in of_models),
        "faster": sum(bool(x.get("faster")) for x in of_models),
        "faults": sum(int(str(x["injected"])) for x in of_faults),
        "fault_cases": len(of_faults), "fault_cases_right": sum(bool(x["right"] and x["alive"]) for x in of_faults),
    }  # fmt: skip


def table(lines: Sequence[Mapping[str, object]]) -> str:
    """For people."""
    head = ("case", "alive", "right", "faster", "weft", "eager graph", "call", "eager call", "chosen")
    names = ("case", "alive", "right", "faster", "weft_ms", "eager_ms", "weft_call_ms", "eager_call_ms", "chosen")
    rows = [head, *(tuple(str(x.get(name, "-")) for name in names) for x in lines)]
    width = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, width, strict=True)) for row in rows)


def main() -> None:
    """Run, record, print one table; the exit status is 1 where anything died or was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=10.0, help="seconds of each compilation")
    parser.add_argument("--jobs", type=int, default=6, help="processes at once")
    parser.add_argument("--count", type=int, default=100, help="faults of each kind")
    parser.add_argument("--only", choices=("models", "faults"))
    parser.add_argument("--case", help="one model by name")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, default=1, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu_trust: torch sees no NVIDIA GPU")
    if given.part:
        sys.exit(run_part(given.part, given.count, given.jobs, given.budget))
    if given.child:
        with torch.no_grad():
            child(given.child, given.batch, given.budget)
        return
    record = Record(folder_of_gpu(), "attention-models")
    names = [(n, b) for n, batches in BATCHES.items() for b in batches if given.case in (None, n)]
    of_models = [f"{n} batch {b}" for n, b in names] if given.only != "faults" else []
    with_faults = given.only != "models" and given.case is None
    if with_faults:  # every part gives rows of its own, also where it does not come to its end
        record.forget(*(x for x in record.known() if x.startswith("faults")))
    found: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="weft-trust-") as place, torch.no_grad():
        folder = Path(place)
        os.chmod(folder, 0o700)
        if of_models:
            found += models(record, names, given.budget, given.jobs, folder)
        if with_faults:
            found += faults(record, given.count, given.jobs, given.budget)
    total = summary(record.cases)
    record.add(total)
    print(table(found))
    good = total["alive"] == total["right"] == total["total"] and total["fault_cases"] == total["fault_cases_right"]
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
