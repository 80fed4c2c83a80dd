"""kernel.toml: what it may say, and what is refused by key and line."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.generate.cuda.foreign.sources import HEAD, IN_OUT

from weft.generate.cuda.foreign.manifest import Manifest, ManifestError, read

SCALAR = '[[parameters]]\nname = "n"\ntype = "int"\nkind = "scalar"\nvalue = 3\n'


def written(folder: Path, text: str) -> Path:
    (folder / "k.cu").write_text("")
    (folder / "kernel.toml").write_text(text)
    return folder / "kernel.toml"


def of(folder: Path, text: str, **changes: object) -> Manifest:
    return read(written(folder, text), changes=changes)


def test_a_whole_manifest(tmp_path: Path) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "x.bin").write_bytes(bytes(8 * 28))
    m = of(
        tmp_path,
        'source = "k.cu"\nentry = "k<16, float>"\ngrid = [4, 2]\nblock = [8, 8, 2]\ndynamic_shared_bytes = 64\n'
        'include = ["include"]\nstage = 2\nstate = ["c"]\ndefine = { TILE = "16", N = 3 }\n'
        '[[parameters]]\nname = "a"\ntype = "Atom"\nas = "float"\nper = 7\nkind = "input"\nshape = [2, 4]\n'
        'init = "file"\nfile = "x.bin"\nbuffer = "shared"\n' + SCALAR + '[[parameters]]\nname = "v"\ntype = "float4"\n'
        'kind = "scalar"\nvalue = [1, 2.5, -3, 0]\n[[constants]]\nname = "t"\ntype = "float2"\nshape = [3]\n'
        'init = "uniform"\nlow = -1.0\nhigh = 2.0\nseed = 5\n[check]\nexact = false\nrtol = 1e-4\n'
        '[about]\nany = "thing"\n',
    )
    assert (m.entry, m.grid, m.block, m.threads) == ("k<16, float>", (4, 2, 1), (8, 8, 2), 128)
    assert m.define == (("TILE", "16"), ("N", "3")) and m.state == ("c",) and m.stage == 2
    atoms, n, v = m.parameters
    assert atoms.data is not None and atoms.data.nbytes == 8 * 28 and atoms.buffer == "shared"
    assert atoms.data.file == (tmp_path / "x.bin").resolve()
    assert n.bits == (3,) and v.bits == (0x402000003F800000, 0x00000000C0400000)
    assert m.constants[0].nbytes == 24 and (m.constants[0].low, m.constants[0].high) == (-1.0, 2.0)
    assert (m.exact, m.rtol) == (False, 1e-4)


BAD: dict[str, tuple[str, str]] = {
    "an unknown key": (HEAD + "colour = 3\n" + IN_OUT, "kernel.toml:5: colour: no such key"),
    "no entry": ('source = "k.cu"\ngrid = [1]\nblock = [1]\n' + IN_OUT, "entry: missing"),
    "no TOML": ("source = [", "not a TOML file"),
    "an entry with other characters": (HEAD.replace('"k"', '"k; rm"') + IN_OUT, "kernel.toml:2: entry: 'k; rm' is not"),
    "a path upwards": (HEAD.replace("k.cu", "../k.cu") + IN_OUT, "kernel.toml:1: source: '../k.cu' lies outside"),
    "an absolute path": (HEAD.replace("k.cu", "/etc/passwd") + IN_OUT, "kernel.toml:1: source: '/etc/passwd' lies"),
    "no such source": (HEAD.replace("k.cu", "l.cu") + IN_OUT, "source: 'l.cu': no such file"),
    "a link out of the folder": (HEAD.replace("k.cu", "link.cu") + IN_OUT, "source: 'link.cu' lies outside"),
    "an include out of the folder": (HEAD + 'include = [".."]\n' + IN_OUT, "kernel.toml:5: include: '..' lies outside"),
    "a grid of nothing": (HEAD.replace("[4]", "[0]") + IN_OUT, "kernel.toml:3: grid: 0 is outside of 1 to 2147483647"),
    "a grid of 64 bits": (HEAD.replace("[4]", "[65536, 65535]") + IN_OUT, "grid: 4294901760 blocks; up to"),
    "a block of 1025 threads": (HEAD.replace("[64]", "[41, 25]") + IN_OUT, "kernel.toml:4: block: 1025 threads"),
    "a block of text": (HEAD.replace("[64]", '"64"') + IN_OUT, "block: '64' is no list"),
    "a grid of true": (HEAD.replace("[4]", "[true]") + IN_OUT, "grid: True is no whole number"),
    "much shared memory": (HEAD + "dynamic_shared_bytes = 300000\n" + IN_OUT, "kernel.toml:5: dynamic_shared_bytes"),
    "a macro of two lines": (HEAD + 'define = { A = "1\\n#include <a>" }\n' + IN_OUT, "define: '1\\n#include"),
    "a macro of ours": (HEAD + 'define = { w_role = "1" }\n' + IN_OUT, "define: 'w_role': names that begin"),
    "no kind": (HEAD + '[[parameters]]\nname = "a"\ntype = "int"\n', "kernel.toml:5: parameters[0].kind: None is none"),
    "an unknown type": (
        HEAD + IN_OUT.replace("float", "Atom"),
        "kernel.toml:7: parameters[0].type: 'Atom' has no known",
    ),
    "a pointer": (HEAD + IN_OUT.replace('"float"', '"float*"'), "parameters[0].type: 'float*' is not the name"),
    "a type that ends a line": (HEAD + IN_OUT.replace('"float"', '"float;x"'), "'float;x' is not the name"),
    "a scalar over its range": (
        HEAD + SCALAR.replace("= 3", "= 2147483648"),
        "parameters[0].value: 2147483648 is outside",
    ),
    "a float over its range": (
        HEAD + SCALAR.replace("int", "float").replace("= 3", "= 1e39"),
        "is outside of the range",
    ),
    "a structure without its parts": (
        HEAD + SCALAR.replace("int", "Params"),
        "type: 'Params' is no type of a scalar that is known",
    ),
    "a structure of unknown parts": (
        HEAD + SCALAR.replace("int", "Params") + 'as = "Other"\n',
        "as: 'Other' is no type of a scalar that is known",
    ),
    "a structure of too few values": (
        HEAD + SCALAR.replace("int", "Params") + 'as = "int"\nper = 2\n',
        "value: 3 has not 2 components",
    ),
    "a structure that is too large": (
        HEAD + SCALAR.replace("int", "Params") + 'as = "int"\nper = 129\n',
        "per: 129 is outside of 1 to 128",
    ),
    "parts of a known scalar": (HEAD + SCALAR + "per = 2\n", "per: of types that the source defines alone"),
    "a scalar of no number": (HEAD + SCALAR.replace("= 3", "= nan").replace("int", "float"), "nan is no finite number"),
    "a name twice": (HEAD + SCALAR + SCALAR, "parameters[1].name: 'n' stands twice"),
    "an input without content": (
        HEAD + IN_OUT.replace('init = "normal"\nseed = 3\n', ""),
        "parameters[0].init: None says",
    ),
    "an output with content": (HEAD + IN_OUT.replace("inout", "output"), "an output holds nothing before the launch"),
    "a seed of zeros": (HEAD + IN_OUT.replace("normal", "zeros"), "seed: of init = normal or uniform alone"),
    "normal whole numbers": (HEAD + IN_OUT.replace("float", "int"), "normal is for floats"),
    "an empty range": (
        HEAD + IN_OUT.replace('"normal"', '"uniform"\nlow = 3.0\nhigh = 3.0'),
        "low: 3.0 to 3.0 is no range",
    ),
    "many elements": (HEAD + IN_OUT.replace("[256]", "[65536, 65536]"), "shape: 4294967296 elements"),
    "many bytes": (
        HEAD + IN_OUT.replace("[256]", "[2147483648]").replace("float", "double"),
        "parameters: 17179869184 bytes",
    ),
    "no such file": (
        HEAD + IN_OUT.replace('"normal"\nseed = 3', '"file"\nfile = "no.bin"'),
        "file: 'no.bin': no such file",
    ),
    "a file of another size": (
        HEAD + IN_OUT.replace('"normal"\nseed = 3', '"file"\nfile = "k.cu"'),
        "0 bytes; the shape takes 1024",
    ),
    "a tolerance of 2": (HEAD + IN_OUT + "[check]\nrtol = 2.0\n", "kernel.toml:13: check.rtol: 2.0 is outside"),
    "exact of 1": (HEAD + IN_OUT + "[check]\nexact = 1\n", "check.exact: 1 is not true or false"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused_by_key_and_line(name: str, tmp_path: Path) -> None:
    text, message = BAD[name]
    (tmp_path / "home").mkdir()
    (tmp_path / "other.cu").write_text("")
    (tmp_path / "home" / "link.cu").symlink_to(tmp_path / "other.cu")
    with pytest.raises(ManifestError) as found:
        of(tmp_path / "home", text)
    first, advice = str(found.value).splitlines()
    assert message in first and first.endswith("[W015]") and advice.strip()


def test_no_such_manifest_and_one_that_is_large(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="no such file"):
        read(tmp_path / "kernel.toml")
    (tmp_path / "kernel.toml").write_text("#" * (1 << 20) + "\n")
    with pytest.raises(ManifestError, match="over 1048576 bytes"):
        read(tmp_path / "kernel.toml")
    (tmp_path / "kernel.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ManifestError, match="UTF-8"):
        read(tmp_path / "kernel.toml")


def test_changes_stand_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, HEAD + IN_OUT + SCALAR)
    m = read(path, changes={"grid": [9], "parameters.n.value": 7, "define.A": "2", "check.exact": False})
    assert m.grid == (9, 1, 1) and m.parameters[1].bits == (7,) and m.define == (("A", "2"),) and not m.exact
    for key in ("parameters.m.value", "a.b", "colour"):
        with pytest.raises(ManifestError):
            read(path, changes={key: 1})


def test_the_small_launch(tmp_path: Path) -> None:
    small = '[small]\ngrid = [2]\ndefine = { B = "1" }\n[small.parameters.n]\nvalue = 5\n'
    small += "[small.parameters.x]\nshape = [8]\n"
    path = written(tmp_path, HEAD + 'define = { A = "2" }\n' + IN_OUT + SCALAR + small)
    whole, m = read(path), read(path, small=True)
    assert whole.grid == (4, 1, 1) and whole.parameters[0].data is not None and whole.parameters[0].data.shape == (256,)
    assert m.grid == (2, 1, 1) and m.define == (("A", "2"), ("B", "1")) and m.parameters[1].bits == (5,)
    assert m.parameters[0].data is not None and m.parameters[0].data.shape == (8,)
    with pytest.raises(ManifestError, match=r"small\.parameters\.z: no entry"):
        read(written(tmp_path, HEAD + IN_OUT + "[small.parameters.z]\nvalue = 1\n"), small=True)
    with pytest.raises(ManifestError, match=r"small\.entry: no such key"):
        read(written(tmp_path, HEAD + IN_OUT + '[small]\nentry = "z"\n'), small=True)
