from __future__ import annotations

import subprocess
import sys

import pytest

import weft


def test_the_names_of_the_facade() -> None:
    assert weft.__all__ == ["Compiled", "Options", "UserError", "WeftError", "compile", "compile_step", "load"]
    for name in weft.__all__:
        assert getattr(weft, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'compiel'"):
        weft.compiel  # noqa: B018


def test_what_loads_plans_does_not_load_the_compiler() -> None:
    program = "import sys, weft; weft.load; print([m for m in sys.modules if m.startswith('weft.')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=600)
    loaded = done.stdout
    for package in ("frontends", "fission", "orchestrate", "tune", "pipeline", "generate.cpp"):
        assert f"'weft.{package}" not in loaded, package
