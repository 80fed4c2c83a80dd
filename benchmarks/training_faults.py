"""Faults in training steps: what each leaves in the weights, and whether the next step is a loop's.

    python -m benchmarks.training_faults [--device cpu|cuda] [--times 50] [--only ROW,...] [--budget S]
                                         [--seconds 540] [--out FILE|-]

A small network with a batch norm is trained by `weft.compile_step` (momentum, weight decay). A fault counts as right
where it has changed nothing, or all that it should have and nothing else, and where the step behind it leaves what a
loop's own step leaves, from the same weights and state. Rows are kept as they come: a second call goes on.

`out of memory`: on a GPU the framework is given no more memory than it holds when a batch of another size comes; on a
processor the error is raised in place of one of the plan's kernels, each time another.
"""

from __future__ import annotations

import argparse
import copy
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import weft
from benchmarks.harness.faults import WrongError, need
from benchmarks.harness.left import Left, add_option
from benchmarks.harness.record import Record, Row, folder_of_gpu
from weft.errors import WeftError

ROWS_OF_BATCH, WIDTH, CLASSES = 24, 32, 10
LARGE, LARGER, MOST = 1 << 16, 1 << 14, 1 << 22
"""Rows of a batch for which memory is needed that is not held yet, how many more each time, and how many at most."""
RTOL, ATOL = 2e-4, 2e-5
"""Of a step beside a loop's from the same weights, in f32."""
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Trained:
    """A network with its compiled step, and a twin that a loop trains."""

    device: str
    budget_s: float
    skips: bool = False
    model: Any = field(init=False)
    twin: Any = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    other: torch.optim.Optimizer = field(init=False)
    step: Any = field(init=False)
    largest: int = LARGE
    """Rows of the largest batch so far for which there was no memory."""

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        layers = (nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, CLASSES))
        self.model = nn.Sequential(*layers).to(self.device)
        self.twin = copy.deepcopy(self.model)
        self.optimizer, self.other = (
            torch.optim.SGD(m.parameters(), 0.05, momentum=0.9, weight_decay=1e-3) for m in (self.model, self.twin)
        )
        options = weft.Options(budget_s=self.budget_s, device=self.device)
        batch = self.batch(random.Random(0))
        self.step = weft.compile_step(
            self.model, nn.CrossEntropyLoss(), self.optimizer, *batch, options=options, skip_nonfinite=self.skips
        )
        self.step(*batch)

    def batch(self, rng: random.Random, rows: int = ROWS_OF_BATCH) -> Batch:
        g = torch.Generator().manual_seed(rng.randrange(1 << 30))
        inputs, target = torch.randn(rows, WIDTH, generator=g), torch.randint(0, CLASSES, (rows,), generator=g)
        return inputs.to(self.device), target.to(self.device)

    def written(self, *, buffers: bool = True) -> list[torch.Tensor]:
        """Copies of all that a step writes; without `buffers` of what the optimizer writes."""
        state = [own for _, own in sorted(self.optimizer.state_dict()["state"].items())]
        held = [*self.model.parameters(), *(x for own in state for _, x in sorted(own.items()))]
        held += [*self.model.buffers()] if buffers else []
        return [x.detach().clone() for x in held if isinstance(x, torch.Tensor)]

    def unchanged(self, before: Sequence[torch.Tensor], what: str, *, buffers: bool = True) -> None:
        """Bit by bit.

        Raises:
            WrongError: something is not what it was.
        """
        same = [torch.equal(_bits(x), _bits(y)) for x, y in zip(self.written(buffers=buffers), before, strict=True)]
        need(all(same), f"{what}: {same.count(False)} of {len(same)} tensors changed")

    def as_twin(self, batch: Batch, what: str) -> None:
        """A step, and one of a loop from the same weights and state: they leave the same."""
        self.twin.load_state_dict(self.model.state_dict())
        self.other.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        for mine, own in zip(self.model.parameters(), self.twin.parameters(), strict=True):
            own.requires_grad_(mine.requires_grad)
        self.step(*batch)
        self.other.zero_grad()
        nn.functional.cross_entropy(self.twin(batch[0]), batch[1]).backward()
        self.other.step()
        for (name, x), y in zip(self.model.state_dict().items(), self.twin.state_dict().values(), strict=True):
            need(_alike(x, y), f"{what}: {name} is not a loop's")

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Weights and state are put back at the end."""
        weights = copy.deepcopy(self.model.state_dict())
        state = copy.deepcopy(self.optimizer.state_dict())
        try:
            yield
        finally:
            self.model.load_state_dict(weights)
            self.optimizer.load_state_dict(state)


def _alike(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether numbers are close, and the same ones none: how it is added says if a mean of infinite ones is NaN."""
    fine = torch.isfinite(x)
    return torch.equal(fine, torch.isfinite(y)) and torch.allclose(x[fine], y[fine], rtol=RTOL, atol=ATOL)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).contiguous().view(torch.uint8)


Fault = Callable[[Trained, random.Random], None]


def _spoiled(t: Trained, rng: random.Random) -> Batch:
    inputs, target = t.batch(rng)
    inputs[rng.randrange(len(inputs)), rng.randrange(WIDTH)] = rng.choice((float("nan"), float("inf"), -float("inf")))
    return inputs, target


def skipped(t: Trained, rng: random.Random) -> None:
    """A gradient that is no number, where such steps are left out; statistics of a batch norm are as in a loop."""
    before, count, batch = t.written(buffers=False), int(t.step.skipped), _spoiled(t, rng)
    t.twin.load_state_dict(t.model.state_dict())
    t.step(*batch)
    need(int(t.step.skipped) == count + 1, f"{int(t.step.skipped) - count} steps were counted as left out")
    t.unchanged(before, "a step that was left out", buffers=False)
    t.twin(batch[0])
    for x, y in zip(t.model.buffers(), t.twin.buffers(), strict=True):
        need(_alike(x, y), "statistics of the batch norm")
    t.as_twin(t.batch(rng), "behind it")


def written_through(t: Trained, rng: random.Random) -> None:
    """A gradient that is no number, where nobody asked for such steps to be left out."""
    with t.kept():
        t.as_twin(_spoiled(t, rng), "a step with a number that is none")
    t.as_twin(t.batch(rng), "behind it")


def interrupted(t: Trained, rng: random.Random) -> None:
    """Ctrl-C at any time."""
    batch, before = t.batch(rng), t.written()
    began = time.perf_counter()
    with t.kept():
        t.step(*batch)
        whole = time.perf_counter() - began

    def raised(*_: object) -> None:
        raise KeyboardInterrupt

    own = signal.signal(signal.SIGALRM, raised)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(1e-6, whole * 1.1 * rng.random()))
        t.step(*batch)
    except KeyboardInterrupt:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, own)
        torch.set_grad_enabled(True)  # torch leaves it off where its own `no_grad` is interrupted at its end
    changed = {not torch.equal(x, y) for x, y in zip(t.written(), before, strict=True)}
    need(len(changed) == 1, "half of it is written")
    t.as_twin(t.batch(rng), "behind it")


def out_of_memory(t: Trained, rng: random.Random) -> None:
    """No memory for what a step computes."""
    batch, before = t.batch(rng), t.written()
    if t.device == "cuda":
        while not _raised_within_what_is_held(t, batch):  # what lies free inside of segments may be enough
            t.largest += LARGER
            need(t.largest < MOST, "nobody said that there is no memory")
            batch, before = t.batch(rng, t.largest), t.written()
    else:
        launches = t.step.compilation.run._launches
        place = rng.randrange(len(launches) - 1)  # the last one writes to the weights
        held, launches[place] = launches[place], _no_memory
        try:
            need(_raises(t, batch), "nobody said that there is no memory")
        finally:
            launches[place] = held
    t.unchanged(before, "a step without memory")
    t.as_twin(batch, "behind it")


def _raised_within_what_is_held(t: Trained, batch: Batch) -> bool:
    """Whether a step has no memory where the framework is given no more than it holds."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    try:
        return _raises(t, batch)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _no_memory() -> None:
    raise torch.OutOfMemoryError("no memory")


def _raises(t: Trained, batch: Batch) -> bool:
    """Whether a step says that it has no memory."""
    try:
        t.step(*batch)
    except (torch.OutOfMemoryError, WeftError):
        return True
    return False


def other_rate(t: Trained, rng: random.Random) -> None:
    """Another learning rate, momentum and weight decay."""
    settings = {"lr": 10.0 ** rng.uniform(-4, -1), "momentum": rng.uniform(0.1, 0.95), "weight_decay": rng.random() / 9}
    for optimizer in (t.optimizer, t.other):
        optimizer.param_groups[0].update(settings)
    t.as_twin(t.batch(rng), f"with {settings}")


def frozen(t: Trained, rng: random.Random) -> None:
    """Some layers are frozen, and later no longer."""
    layers = [layer for layer in t.model if list(layer.parameters())]
    chosen = rng.sample(layers, rng.randint(1, len(layers) - 1))
    try:
        for layer in chosen:
            layer.requires_grad_(False)
        before = [x.detach().clone() for layer in chosen for x in layer.parameters()]
        t.as_twin(t.batch(rng), "with frozen layers")
        now = [x.detach() for layer in chosen for x in layer.parameters()]
        need(all(map(torch.equal, now, before)), "a frozen weight changed")
    finally:
        t.model.requires_grad_(True)
    t.as_twin(t.batch(rng), "once they are not frozen any more")


def other_batch(t: Trained, rng: random.Random) -> None:
    """A batch of another size."""
    t.as_twin(t.batch(rng, rng.randint(2, 3 * ROWS_OF_BATCH)), "with another batch")
    t.as_twin(t.batch(rng), "behind it")


def another_type(t: Trained, rng: random.Random) -> None:
    """A batch that no step takes: another width, another type, another number of tensors."""
    inputs, target = t.batch(rng)
    bad: list[tuple[torch.Tensor, ...]] = [(inputs[:, 1:], target), (inputs, target[1:]), (inputs.long(), target)]
    before = t.written()
    try:
        t.step(*rng.choice([*bad, (inputs,)]))
    except WeftError:
        pass
    else:
        raise WrongError("a batch that does not fit is taken")
    t.unchanged(before, "a batch that does not fit")
    t.as_twin((inputs, target), "behind it")


def from_checkpoint(t: Trained, rng: random.Random) -> None:
    """Weights and the optimizer's state of some steps ago are loaded."""
    weights, state = copy.deepcopy(t.model.state_dict()), copy.deepcopy(t.optimizer.state_dict())
    for _ in range(rng.randint(1, 4)):
        t.step(*t.batch(rng))
    t.model.load_state_dict(weights)
    t.optimizer.load_state_dict(state)
    t.as_twin(t.batch(rng), "behind a checkpoint")


def moved(t: Trained, rng: random.Random) -> None:
    """A parameter gets other memory."""
    for parameter in rng.sample(list(t.model.parameters()), 2):
        parameter.data = parameter.data.clone()
    t.as_twin(t.batch(rng), "with weights that lie elsewhere")


ROWS: dict[str, Fault] = {
    "a gradient is NaN, such steps are left out": skipped,
    "a gradient is NaN, nobody asked": written_through,
    "out of memory": out_of_memory,
    "Ctrl-C": interrupted,
    "other settings": other_rate,
    "layers are frozen": frozen,
    "a batch of another size": other_batch,
    "a batch that does not fit": another_type,
    "a checkpoint is loaded": from_checkpoint,
    "weights move": moved,
}


def injected(name: str, count: int, chosen: argparse.Namespace, end: float) -> Row:
    """A row of the table."""
    rng, right, wrong, fault = random.Random(chosen.seed), 0, list[str](), ROWS[name]
    trained = Trained(chosen.device, chosen.budget, skips=fault is skipped)
    for _ in range(count):
        if time.perf_counter() > end:
            break
        try:
            fault(trained, rng)
            right += 1
        except (WrongError, WeftError, RuntimeError, AssertionError) as error:
            wrong.append((str(error).splitlines() or [type(error).__name__])[0][:200])
    return {
        "record": "case", "suite": "training-faults", "case": name, "injected": right + len(wrong), "right": right,
        "wrong": wrong[:5],
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Inject, print and record; the exit status is 1 where one was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--budget", type=float, default=0.0, help="seconds of tuning of a plan")
    parser.add_argument("--times", type=int, default=50, help="faults of each row")
    parser.add_argument("--only", default="", help="rows, by commas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=540.0, help="nothing is begun after so many")
    parser.add_argument("--out", type=Path, help="write the record into this file; `-`: into that of the suite")
    add_option(parser)
    chosen = parser.parse_args(arguments)
    end = time.perf_counter() + chosen.seconds
    names = [n for n in ROWS if not chosen.only or any(x in n for x in chosen.only.split(","))]
    if not names:
        parser.error(f"--only: no row has {chosen.only!r}; there are {'; '.join(ROWS)}")
    record = None
    if chosen.out:
        path = None if str(chosen.out) == "-" else chosen.out
        record = Record("cpu" if chosen.device == "cpu" else folder_of_gpu(), "training-faults", path=path)
    bad, left = 0, Left(record, end, only=chosen.left, good=lambda row: not row.get("wrong"))
    for name in names:
        if not left.begins(case=name):
            continue
        row = injected(name, chosen.times, chosen, left.until)
        bad += bool(row["wrong"])
        print(row, flush=True)
        if record is not None:
            record.add(row)
    sys.exit(left.status(bad or (record is not None and record.failed)))


if __name__ == "__main__":
    main()
