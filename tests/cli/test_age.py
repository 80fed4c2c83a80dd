"""How long the process runs, as the system says it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weft.cli import age


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says")
def test_the_age_of_a_process_contains_what_it_did_before_it_was_asked() -> None:
    code = "import time; time.sleep(0.3)\nfrom weft.cli.age import age_s\nprint(age_s())"
    env = {**os.environ, "PYTHONPATH": str(Path(age.__file__).parents[2])}
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600, env=env
    )
    assert 0.3 <= float(told.stdout) < 600


def test_a_system_that_does_not_say_gives_zero(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for text in (None, "", "1 (a b) S 1", "1 (weft) " + "x " * 40):
        path = tmp_path / "stat"
        if text is not None:
            path.write_text(text)
        monkeypatch.setattr(age, "STAT", path)
        assert age.age_s() == 0.0
