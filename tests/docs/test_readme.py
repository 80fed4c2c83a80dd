from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def test_the_python_example_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    scope: dict[str, object] = {}
    exec(compile(blocks[0], "README.md", "exec"), scope)  # noqa: S102 - our own documentation
    assert (tmp_path / "mlp.weft").is_file()
    assert "<html" in (tmp_path / "mlp.html").read_text()[:2000].lower()


def test_links_of_the_documents_lead_somewhere() -> None:
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", path.read_text()):
            if "://" not in target:
                found = (path.parent / target) if target else path
                assert found.exists(), f"{path.name}: {target}"
                assert not anchor or anchor in anchors(found), f"{path.name}: {target}#{anchor}"


def anchors(path: Path) -> set[str]:
    """What headings of a document are called in links to them."""
    heads = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


TARGETS = ("demo", "test", "test-all", "test-random", "kernels", "check", "conformance", "replay", "bench")
GPU_TARGETS = ("gpu-test", "gpu-bench", "gpu-bench-all", "gpu-faults", "gpu-sanitize")


@pytest.mark.parametrize("target", [*TARGETS, *GPU_TARGETS])
def test_the_makefile_has_every_target(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
