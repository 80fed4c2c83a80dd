"""`weft colocate run` and `prepare`, with a device of the host's own in place of the GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.colocate.fake_device import FakeDevice, FakeJob, query

from weft.cli import app as cli
from weft.cli import colocate_gpu
from weft.colocate.arrivals import Arrivals
from weft.colocate.bundle import read_bundle
from weft.colocate.gpu import MODES
from weft.colocate.gpu_machine import Form, GpuMachine, Lane
from weft.colocate.live import LiveBackend
from weft.colocate.live import run as live
from weft.colocate.operating import Prepared, Whole, setting_of, settle
from weft.colocate.outcome import Outcome
from weft.colocate.policies import make
from weft.colocate.recording import Mode, What, merged, recorded
from weft.device.cuda import mps
from weft.kernels.samples import SampleRecord, StepSamples, read

Run = Callable[..., tuple[int, str, str]]
HIGH, LOW, COPIES = 1, 2, 3
STEP = StepSamples("net", "work", "tma 0123", 1, 40.0, 0.1, 0.5, 0.0, True, 0)
JOB = 'name = "work"\nkind = "kernels"\nstages = ["kernel.toml"]\n'


class Session:
    """Stands in for `weft.colocate.gpu.GpuSession`."""

    def __init__(self, job: str, models: Sequence[str] = ("net",)) -> None:
        self.models, self.job, self.device, self.modes = tuple(models), job, FakeDevice(look_ns=200), MODES

    def machine(self, names: Mapping[str, Iterable[str]]) -> GpuMachine:
        device, resident, inside = self.device, Form(LOW, self.device.persistent), Form(HIGH, None, inside=True)
        every: dict[str, list[Lane]] = {}
        for model, own in names.items():
            us = 100.0 + 50.0 * self.models.index(model)
            every[model] = [Lane(HIGH, query(device, HIGH, us))]
            for n in own:
                form = inside if "role" in n else resident if "co-runner" in n else Form(LOW, None)
                every[model].append(Lane(HIGH, query(device, HIGH, 1.04 * us, draws=form is inside), form))
        if not self.job:
            return GpuMachine(device, every, copies=COPIES)
        return GpuMachine(device, every, copies=COPIES, job=FakeJob(device), idle=resident)

    def record(
        self, modes: Iterable[str], *, commit: str, driver: str, queries: int, seed: int, fuse_s: float
    ) -> tuple[SampleRecord, dict[str, str]]:
        ways = [n for n in modes if not n.startswith("green")] if self.job else []
        sharing = {"p": "priority", "s": "streams", "c": "co-runner"}
        found = []
        for k, model in enumerate(self.models):
            what = What("NVIDIA H200", driver, commit, model, 5, self.job, 300.0, 1.0)
            own = [Mode(n, sharing[n[0]]) for n in ways]  # type: ignore[arg-type]
            device_order = {m: ways if m == model else [] for m in self.models[k:]}
            made = recorded(self.machine(device_order), what, own, queries=30, small=5)
            steps = (replace(STEP, model=model),) if self.job and fuse_s else ()
            found.append(replace(made, steps=steps))
        return merged(found), {n: "no part of this GPU" for n in modes if n.startswith("green")}

    def settled(self, prepared: Prepared) -> Prepared:
        return settle(prepared, lambda p: Whole(p.lc, 30.0, 1980))

    def run_all(self, prepared: Sequence[Prepared], arrivals: Sequence[Arrivals], *, admit: bool = False) -> Outcome:
        policy = make(prepared[0].policy, setting_of(prepared))
        machine = self.machine({p.model.name: [x.variant.name for x in p.points[1:]] for p in prepared})
        return live(policy, LiveBackend(machine, list(zip(prepared, arrivals, strict=True)), policy=policy))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.chdir(tmp_path)

    @contextmanager
    def session(
        _screen: object, models: Sequence[Path], be: Path | None, *_: object, mps: bool,
        saves: dict[str, Callable[[Path], object]] | None = None,
    ) -> Iterator[Session]:  # fmt: skip
        assert not mps
        if saves is not None:
            saves["plan.weft"] = lambda path: path.write_bytes(b"a plan")
        yield Session("work" if be else "", [m.stem for m in models])

    monkeypatch.setattr(colocate_gpu, "_session", session)
    monkeypatch.setattr(colocate_gpu, "_driver", lambda: "580")

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["weft", "colocate", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            cli.run()
        out = capsys.readouterr()
        return int(ended.value.code or 0), out.out, out.err

    return call


def test_a_policy_on_a_gpu(run: Run) -> None:
    code, out, _ = run("-s", "weft", "-m", "net.onnx", "--be", "job.toml", "--load", 0.5, "--queries", 400)
    assert code == 0 and "measured" in out and "simulated" not in out
    assert "on NVIDIA H200" in out and "send delay" in out and "a decision" in out and "of the whole GPU" in out


def test_several_policies_for_programs(run: Run) -> None:
    code, out, _ = run(
        "run", "-s", "tally,priority,green:36", "-m", "net.onnx", "--be", "job.toml", "--queries", 300, "--json"
    )
    data = json.loads(out)
    assert code == 0 and data["simulated"] is False
    assert [r["policy"] for r in data["runs"]] == ["exclusive", "tally", "priority"]
    assert data["refused"] == {"green:36": "no samples of net beside work in such a partition"}
    assert len({r["arrivals_digest"] for r in data["runs"]}) == 1, "all on the same arrivals"
    assert data["runs"][0]["off_lindley_us"] < 20 and data["runs"][1]["be_throughput"] > 0


@pytest.mark.parametrize("fuse", [60, 0])
def test_policies_of_fused_steps(run: Run, fuse: int) -> None:
    code, out, _ = run(
        "run", "-s", "aker,weft", "-m", "net.onnx", "--be", "job.toml", "--queries", 300, "--fuse", fuse, "--json"
    )
    data = json.loads(out)
    assert code == 0 and data["refused"] == ({} if fuse else {"aker": "no fused kernels of net beside work"})
    if fuse:
        aker = next(r for r in data["runs"] if r["policy"] == "aker")
        assert [v["name"].split()[0] for v in aker["variants"]] == ["alone", "role"] and aker["be_throughput"] > 0


def test_mps_beside_other_policies_is_refused_by_name(run: Run) -> None:
    args = ("run", "-s", "tally,mps", "-m", "net.onnx", "--be", "job.toml", "--queries", 200, "--json")
    data = json.loads(run(*args)[1])
    assert [r["policy"] for r in data["runs"]] == ["exclusive", "tally"]
    assert "all processes of a call are its clients" in data["refused"]["mps"]
    code, _, err = run("prepare", "-m", "net.onnx", "-o", "s.json", "--modes", "mps,priority")
    assert code == 2 and "mps is measured in a call of its own" in err


def test_the_model_alone_needs_no_job(run: Run) -> None:
    code, out, _ = run("run", "-s", "exclusive", "-m", "net.onnx", "--load", 0.5, "--of", "service", "--queries", 200)
    assert code == 0 and "off a single queue" in out and "net, alone" in out


def test_samples_are_kept_and_used_again(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("prepare", "-m", "net.onnx", "--be", "job.toml", "-o", "samples.json")
    assert code == 0 and "added work" in out and "co-runner 128" in out and "green36: not here: no part" in out
    assert "fused steps" in out and "tma 0123" in out
    found = read(json.loads((tmp_path / "samples.json").read_text()))
    assert found.models[0].name == "net" and {m.name for m in found.modes} >= {"co-runner 64", "priority"}
    code, out, _ = run("-s", "weft", "-m", "net.onnx", "--be", "job.toml", "--record", "samples.json", "--queries", 200)
    assert code == 0 and f"samples {found.digest}" in out
    code, out, _ = run(
        "simulate", "-s", "weft", "-m", "net", "--be", "work", "--record", "samples.json", "--queries", 200
    )
    assert code == 0 and "simulated" in out
    code, out, _ = run(
        "prepare", "-m", "net.onnx", "--be", "job.toml", "-o", "s.json", "--modes", "priority", "--format", "json"
    )
    assert code == 0 and list(json.loads(out)["modes"]) == ["priority"]
    assert json.loads(out)["steps"] == {"tma 0123": {"count": 1, "slowdown": 0.1, "be": 0.5}}


def test_a_bundle_for_the_server(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "kernel.toml").write_text("")
    (tmp_path / "job" / "job.toml").write_text(JOB)
    prepare = ("prepare", "-m", "net.onnx", "--be", "job/job.toml", "-o", "s.json", "--modes", "priority")
    code, _, err = run(*prepare, "--bundle", "net.colocate", "--qos", 2)
    assert code == 0 and "net.colocate: target 2 ms, digest " in err
    found = read_bundle(tmp_path / "net.colocate", cache_dir=tmp_path / "cache")
    assert (found.model, found.target_ns, found.job.name) == ("net", 2_000_000, "work")
    assert found.samples == read(json.loads((tmp_path / "s.json").read_text()))
    assert found.plan.read_bytes() == b"a plan"
    code, _, err = run(*prepare, "--bundle", "net.colocate")
    assert code == 2 and "is there already" in err
    code, _, err = run(*prepare, "--bundle", "job/net.colocate")
    assert code == 2 and "lies in the job's folder" in err
    code, _, err = run(*prepare, "--bundle", "nowhere/net.colocate")
    assert code == 2 and "there is no folder nowhere" in err
    code, _, err = run(*prepare, "--bundle", "other")
    assert code == 0 and read_bundle(tmp_path / "other", cache_dir=tmp_path / "cache").target_ns == round(
        5e3 * found.samples.models[0].solo.at(0.5)
    )


@pytest.mark.parametrize(("options", "said"), [
    (("--qos", 2), "it is the target of a bundle"),
    (("--bundle", "x", "--qos", -1), "-1.0 is no time"),
    (("--bundle", "x", "-m", "other.onnx"), "a bundle is of one model"),
    (("--bundle", "x", "--modes", "mps"), "no client of MPS"),
])  # fmt: skip
def test_what_no_bundle_can_be_of(run: Run, options: tuple[object, ...], said: str) -> None:
    code, _, err = run("prepare", "-m", "net.onnx", "--be", "job.toml", "-o", "s.json", *options)
    assert code == 2 and said in err
    code, _, err = run("prepare", "-m", "net.onnx", "-o", "s.json", "--bundle", "x")
    assert code == 2 and "a job" in err


def test_several_models_at_once(run: Run) -> None:
    two = ("-m", "net.onnx", "-m", "other.onnx", "--be", "job.toml", "--queries", 200, "--of", "service")
    code, out, _ = run("run", "-s", "tally,weft,priority", *two, "--load", 0.2, "--load", 0.3, "--qos", 1, "--json")
    data = json.loads(out)
    assert code == 0 and [(r["policy"], r["model"]) for r in data["runs"]] == [
        (p, m) for p in ("exclusive", "tally", "weft", "priority") for m in ("net", "other")
    ]
    assert {(r["model"], r["load"], r["target_us"]) for r in data["runs"]} == {
        ("net", 0.2, 1000.0), ("other", 0.3, 1000.0),
    }  # fmt: skip
    for policy in ("tally", "weft", "priority"):
        one, other = (r for r in data["runs"] if r["policy"] == policy)
        assert one["be_throughput"] == other["be_throughput"] > 0 and one["among"] == ["other"]
        assert max(one["latency"]["queries"], other["latency"]["queries"]) == 196
        assert sum(v["queries"] for v in one["variants"]) / one["span_s"] == pytest.approx(one["rate_hz"], rel=0.1)
    code, out, _ = run("run", "-s", "weft", *two, "--load", 0.2)
    assert code == 0 and "net, together with other, beside work" in out and "other, together with net" in out


def test_samples_of_several_models_are_one_record(run: Run, tmp_path: Path) -> None:
    two = ("-m", "net.onnx", "-m", "other.onnx", "--be", "job.toml")
    code, out, _ = run("prepare", *two, "-o", "samples.json", "--modes", "priority", "--format", "json")
    data = json.loads(out)
    assert code == 0 and list(data["models"]) == ["net", "other"] and "priority" in data["models"]["other"]["modes"]
    found = read(json.loads((tmp_path / "samples.json").read_text()))
    assert [m.name for m in found.models] == ["net", "other"] and len(found.sources) == 2
    assert {s.model for s in found.steps} == {"net", "other"}
    args = ("-s", "weft", *two, "--record", "samples.json", "--queries", 100, "--load", 0.2)
    code, out, _ = run("run", *args)
    assert code == 0 and f"samples {found.digest}" in out
    named = ("-m", "net", "-m", "other", "--be", "work", "--record", "samples.json", "--queries", 300)
    code, out, _ = run("simulate", "-s", "priority", *named, "--load", 0.2)
    assert code == 0 and out.count("simulated") == 2


def test_a_report_is_written(run: Run, tmp_path: Path) -> None:
    code, _, _ = run("-s", "tally", "-m", "net.onnx", "--be", "job.toml", "--queries", 300, "--report", "report.html")
    text = (tmp_path / "report.html").read_text()
    assert code == 0 and "tally" in text and "simulated" not in text.lower().split("<style")[0]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("-s", "weft"), "it shares the GPU with a job"),
        (("-s", ""), "no policy is named"),
        (("-s", "best", "--be", "job.toml"), "there is none of this name"),
        (("-s", "exclusive", "--queries", 0), "a number from 1"),
        (("-s", "exclusive", "--load", -1), "load"),
        (("-s", "exclusive", "--fuse", -1), "-1.0 is no time"),
        (("-s", "exclusive", "--fuse", "inf"), "inf is no time"),
        (("-s", "exclusive", "--qos", 1, "--qos", 2), "2 values for 1 models"),
        (("-s", "exclusive", "-m", "other.onnx", *("--load", 0.1) * 3), "3 values for 2 models"),
    ],
)
def test_what_cannot_be_is_told(run: Run, args: tuple[object, ...], says: str) -> None:
    code, _, err = run("run", "-m", "net.onnx", *args)
    assert code != 0 and says in err


def test_without_a_gpu_nothing_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(mps, "started", partial(mps.started, program="nowhere/nvidia-cuda-mps-control"))
    (tmp_path / "a.onnx").write_bytes(b"")
    (tmp_path / "in").mkdir()
    (tmp_path / "net.toml").write_text('name = "n"\nkind = "network"\nmodel = "a.onnx"\ninputs = "in"\n')
    (tmp_path / "train.toml").write_text('name = "t"\nkind = "process"\nfile = "train.py"\n')
    (tmp_path / "train.py").write_bytes(b"")
    for more, says in (
        (("-s", "exclusive"), "needs an NVIDIA GPU"),
        (("-s", "weft", "--be", "net.toml"), "needs an NVIDIA GPU"),
        (("-s", "weft", "--be", "train.toml"), "needs an NVIDIA GPU"),
        (("-s", "mps", "--be", "train.toml"), "policy 'mps': no MPS: there is no nvidia-cuda-mps-control here"),
        (("-s", "exclusive", "--budget", "-1"), "is no time"),
        (("-s", "exclusive", "-m", "b/net.onnx"), "'net' twice"),
        (("-s", "weft", "--be", "none.toml"), "none.toml"),
    ):
        monkeypatch.setattr(sys, "argv", ["weft", "colocate", "run", "-m", "net.onnx", *more])
        with pytest.raises(SystemExit) as ended:
            cli.run()
        assert ended.value.code and says in capsys.readouterr().err
