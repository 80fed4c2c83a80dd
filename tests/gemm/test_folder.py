"""What a search leaves on the disk."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.gemm.test_search import H200, Tuner

import weft
from weft.cli.app import app
from weft.errors import ArtifactError
from weft.gemm import folder
from weft.gemm.epilogue import epilogue
from weft.gemm.plot import plot
from weft.gemm.search import Outcome, SearchResult, search
from weft.gemm.spec import Gemm, Search
from weft.generate.written import written_in
from weft.kernels.pretty import pretty
from weft.kernels.source import CudaSource, Schedule

FILES = {"cuda.cu", "kernel.json", "parameters.json", "timings.jsonl", "search.svg", "script.py"}
SOURCE = Path(weft.__file__).parent.parent
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def found() -> SearchResult:
    g = Gemm(256, 256, 512, layout="nt", epilogue=epilogue("silu(acc + bias)"))
    return search(g, H200, Tuner().measure, limit=9)


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))


def test_a_folder_holds_kernel_parameters_timings_and_plot(found: SearchResult, tmp_path: Path) -> None:
    place = folder.write(tmp_path, found)
    assert place.name == "M=256_N=256_K=512_nt_f16_bias_silu"
    assert {p.name for p in place.iterdir()} == FILES
    parameters = strict((place / "parameters.json").read_text())
    assert parameters["gemm"]["epilogue"] == "silu(acc + bias)"
    assert parameters["feasible"] > len(found.outcomes)
    assert found.best is not None
    assert parameters["best"]["median_us"] == pytest.approx(found.best.median_us, abs=1e-4)
    assert parameters["best"]["parameters"]["template"] == found.best.template
    assert parameters["launches"][0]["block"][0] >= 64
    assert parameters["written_in"] and all((SOURCE / f).is_file() for f in parameters["written_in"])
    lines = [strict(x) for x in (place / "timings.jsonl").read_text().splitlines()]
    assert [x["rank"] for x in lines] == list(range(1, len(found.outcomes) + 1))
    assert all(len(x["samples_us"]) == (3 if x["state"] == "ok" else 0) for x in lines)
    assert isinstance(found.kernel, CudaSource)
    assert (place / "cuda.cu").read_text() == pretty(found.kernel.text)


def test_lines_of_its_text_are_told_by_file(
    found: SearchResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = folder.write(tmp_path, found)
    lines = (place / "cuda.cu").read_text().splitlines()
    own = next(x for x in lines if "w_shared(sm)" in x)
    head = next(x for x in lines if "griddepcontrol.wait" in x)
    assert found.kernel is not None
    made_in = written_in(str(found.kernel.schedule))[0].rpartition("/")[0]
    for line, file in ((own, f"{made_in}/"), (head, "weft_cuda_machine.h")):
        app(["explain", str(place), "--line", line], standalone_mode=False)
        assert file in capsys.readouterr().out


def test_a_folder_is_read_back_and_its_text_counts(found: SearchResult, tmp_path: Path) -> None:
    place = folder.write(tmp_path, found)
    g, source = folder.read(place)
    assert g == found.gemm
    assert isinstance(found.kernel, CudaSource)
    assert source == replace(found.kernel, text=pretty(found.kernel.text))
    (place / "cuda.cu").write_text("// changed by hand\n" + source.text)
    assert folder.read(place)[1].text.startswith("// changed by hand")


@pytest.mark.parametrize("name", ["cuda.cu", "kernel.json", "parameters.json"])
@pytest.mark.parametrize("text", [None, "", "{}", "[1]", '{"gemm": 3}', "\x00"])
def test_a_broken_folder_is_refused_in_words(name: str, text: str | None, found: SearchResult, tmp_path: Path) -> None:
    place = folder.write(tmp_path, found)
    if text is None:
        (place / name).unlink()
    elif name == "cuda.cu":
        return  # whatever it holds is for the compiler
    else:
        (place / name).write_text(text)
    with pytest.raises(ArtifactError, match=re.escape("[W401]")):
        folder.read(place)


def test_writing_again_leaves_nothing_of_the_search_before(found: SearchResult, tmp_path: Path) -> None:
    folder.write(tmp_path, found)
    algorithm = Outcome(Schedule("cublaslt", (("algorithm", 0),)), math.nan, "ok", (7.0,), 7.0)
    alone = SearchResult(
        replace(found.gemm, search=Search.LIBRARY), "NVIDIA H200", 1, [algorithm], algorithm, measured=True
    )
    place = folder.write(tmp_path, alone)
    assert {p.name for p in place.iterdir()} == FILES - {"cuda.cu", "kernel.json", "script.py"}
    assert strict((place / "timings.jsonl").read_text())["modelled_us"] is None


def test_a_place_that_cannot_be_written_is_an_error_of_ours(found: SearchResult, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match=r"it cannot be written: .*\[W401\]"):
        folder.write(tmp_path / "file", found)


def test_the_script_runs_alone_and_without_a_gpu_it_says_so(found: SearchResult, tmp_path: Path) -> None:
    place = folder.write(tmp_path, found)
    environment = {**os.environ, "PYTHONPATH": str(Path(weft.__file__).parent.parent), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(place / "script.py")], capture_output=True, text=True, timeout=600, env=environment,
        cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 5, done.stderr
    assert "no NVIDIA GPU [W301]" in done.stderr
    assert "Traceback" not in done.stderr


# -- the plot


def test_the_plot_has_a_mark_for_every_configuration(found: SearchResult) -> None:
    root = ET.fromstring(plot(found))
    assert root.get("role") == "img"
    assert found.gemm.name in str(root.get("aria-label"))
    own = found.outcomes
    titles = [t.text or "" for t in root.iter(f"{SVG}title")]
    assert len(titles) == len(own)
    assert sum("wrong" in t for t in titles) == 2
    assert len(list(root.iter(f"{SVG}circle"))) == sum(o.state == "ok" for o in own)
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for circle in root.iter(f"{SVG}circle"):
        assert 0 < float(circle.get("cx", -1)) < width
        assert 0 < float(circle.get("cy", -1)) < height
    assert "href" not in plot(found)
    assert plot(replace(found, library_us=9.0)).count("stroke-dasharray") == 1


def test_the_plot_takes_what_was_not_measured_and_what_is_hostile() -> None:
    strange = Outcome(Schedule("cuda", (("template", "<b>&\"'"),)), 3.0)
    root = ET.fromstring(plot(SearchResult(Gemm(), "<script>", 1, [strange])))
    assert not list(root.iter(f"{SVG}circle"))
    ET.fromstring(plot(SearchResult(Gemm(), "nothing", 0, [])))
    same = [Outcome(Schedule("cuda", (("n", i),)), 2.0, "ok", (2.0,), 2.0) for i in range(3)]
    ET.fromstring(plot(SearchResult(Gemm(), "all alike", 3, same, same[0], measured=True)))
