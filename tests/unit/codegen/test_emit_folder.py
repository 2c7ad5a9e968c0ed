"""Names, staging and templates of a module's folder; C literals of odd names."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apq_tvm.codegen.build.kernels import CPUINFO_FLAGS, cpu_flags
from apq_tvm.codegen.graph.arrays import DTYPES
from apq_tvm.codegen.graph.c_source import dl_dtype
from apq_tvm.codegen.graph.c_text import comment, identifier, literal
from apq_tvm.codegen.package import folder as folder_module
from apq_tvm.codegen.package.folder import check_name, staged
from apq_tvm.errors import BuildError, OutputExists, OutputFailed


@pytest.mark.parametrize("name", ["m", "minilm_w4", "_private", "X9", "int"])
def test_good_names(name: str) -> None:
    assert check_name(Path("some-folder") / name) == name


@pytest.mark.parametrize("name", ["", "9x", "a-b", "a b", "lambda", "é", "apq", "a.so"])
def test_bad_names(name: str) -> None:
    with pytest.raises(OutputFailed):
        check_name(Path(name))


def test_staged_folder_appears_whole(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "out"
    with staged(output, force=False) as folder:
        (folder / "file").write_text("new")
        assert not output.exists()
    assert (output / "file").read_text() == "new"
    assert [p.name for p in output.parent.iterdir()] == ["out"]


def test_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), staged(tmp_path / "out", force=False) as folder:
        (folder / "file").write_text("half")
        raise KeyError("stop")
    assert list(tmp_path.iterdir()) == []


def test_empty_folder_is_no_loss(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputExists), staged(tmp_path / "out", force=False):
        pytest.fail("must not start")
    with staged(tmp_path / "out", force=True) as folder:
        (folder / "file").write_text("new")
    assert (tmp_path / "out" / "file").exists()


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (OSError(5, "Input/output error"), OutputFailed),
        (KeyboardInterrupt("Input/output error"), KeyboardInterrupt),
    ],
)
def test_old_output_returns_if_the_move_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    seen: type[BaseException],
) -> None:
    output = tmp_path / "out"
    with staged(output, force=False) as folder:
        (folder / "manifest.json").write_text('{"format": "apq_tvm-module-1"}')
    monkeypatch.setattr(folder_module, "_rename", lambda *_: False)  # as on NFS
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise error
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(seen, match="Input/output error"), staged(output, force=True):
        pass
    assert (output / "manifest.json").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def module_in(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text('{"format": "apq_tvm-module-1"}')
    (folder / "file").write_text(text)


def test_forced_output_is_exchanged_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill at any moment leaves the old module or the new one: no rename but the exchange."""
    output = tmp_path / "out"
    with staged(output, force=False) as folder:
        module_in(folder, "old")
    monkeypatch.setattr(Path, "rename", lambda *_: pytest.fail("a step of two"))
    with staged(output, force=True) as folder:
        module_in(folder, "new")
        assert (output / "file").read_text() == "old"
    assert (output / "file").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("known", [True, False], ids=["renameat2", "two renames"])
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("made", ["folder", "file", "link", "empty", "module"])
def test_what_came_to_be_meanwhile_stays(
    made: str, force: bool, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not known:
        monkeypatch.setattr(folder_module, "_rename", lambda *_: False)
    output = tmp_path / "out"
    replaced = force and made in ("empty", "module")
    try:
        with staged(output, force) as folder:
            module_in(folder, "new")
            if made == "file":
                output.write_text("mine")
            elif made == "link":
                output.symlink_to("nowhere")
            else:
                output.mkdir()
                if made == "module":
                    module_in(output, "mine")
                if made == "folder":
                    (output / "file").write_text("mine")
    except OutputExists:
        assert not replaced
    else:
        assert replaced
    if replaced:
        assert (output / "file").read_text() == "new"
    elif made in ("folder", "module"):
        assert (output / "file").read_text() == "mine"
    else:
        assert output.is_symlink() == (made == "link")
        assert output.is_dir() == (made == "empty")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


ODD_NAMES = ('"', "\\", "a\nb", "??/", "%s%n", "*/", "é", "日本", "\x01" + "7", "")


def test_c_strings(tmp_path: Path) -> None:
    lines = [f"const char *s{i}(void) {{ return {literal(t)}; }}" for i, t in enumerate(ODD_NAMES)]
    source, library = tmp_path / "s.c", tmp_path / "s.so"
    source.write_text("\n".join(lines))
    command = ["cc", "-std=c11", "-Wall", "-Werror", "-trigraphs", "-shared", "-fPIC"]
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    for i, text in enumerate(ODD_NAMES):
        function = getattr(loaded, f"s{i}")
        function.restype = ctypes.c_char_p
        assert function().decode() == text


@given(text=st.text(st.characters(), max_size=30))
def test_c_strings_are_plain_ascii(text: str) -> None:
    written = literal(text)
    assert written.isascii()
    assert "\n" not in written


@given(text=st.text(st.one_of(st.sampled_from("*/\\?\n\r\0 "), st.characters()), max_size=30))
def test_comments_are_harmless(text: str) -> None:
    """No character that ends a comment, goes on with the next line, or begins a trigraph."""
    written = comment(text)
    assert written.isascii()
    assert not set("\\?\n\r\0\"'") & set(written)
    assert "*/" not in written and "/*" not in written
    assert not written.startswith("*") and not written.endswith("*")


def test_comments_are_readable() -> None:
    for text in ("/model/layers.0/attn/MatMul.codes", "2 * batch + 1", "onnx::MatMul_77 [n, 8]"):
        assert comment(text) == text
    assert comment("a*/b\né?") == "a%2A/b%0A%C3%A9%3F"


def test_nul_does_not_cut_a_name_short() -> None:
    assert literal("a\0b") != literal("a\0c")
    assert literal("a\0b") == '"a\\300\\200b"'


@pytest.mark.parametrize("name", ["a b", "a-b", "", "9", "a\n", "é", "x;y"])
def test_what_is_no_identifier(name: str) -> None:
    with pytest.raises(BuildError, match="not a C identifier"):
        identifier(name)


def test_dl_types() -> None:
    assert {d: dl_dtype(d) for d in DTYPES} == {
        "bool": "{6, 8, 1}",
        "int8": "{0, 8, 1}",
        "int16": "{0, 16, 1}",
        "int32": "{0, 32, 1}",
        "int64": "{0, 64, 1}",
        "uint8": "{1, 8, 1}",
        "uint16": "{1, 16, 1}",
        "uint32": "{1, 32, 1}",
        "uint64": "{1, 64, 1}",
        "float16": "{2, 16, 1}",
        "float32": "{2, 32, 1}",
        "float64": "{2, 64, 1}",
    }


@pytest.mark.parametrize(
    ("mcpu", "has", "lacks"),
    [
        ("znver3", {"avx2", "fma", "bmi2"}, {"avx512f", "avx512_vnni"}),
        ("znver4", {"avx2", "avx512f", "avx512_vnni", "avx512_bf16"}, {"amx_tile"}),
        ("x86-64", set(), {"avx", "avx2"}),
    ],
)
def test_flags_of_a_cpu(mcpu: str, has: set[str], lacks: set[str]) -> None:
    import tvm

    target = tvm.target.Target({"kind": "llvm", "mcpu": mcpu, "mtriple": "x86_64-linux-gnu"})
    flags = set(cpu_flags(target))
    assert has <= flags
    assert not lacks & flags
    assert flags <= set(CPUINFO_FLAGS.values())
