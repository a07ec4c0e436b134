"""docs/lessons/: the pages show what the kernels do on the emulator, and the committed text is what nvcc makes of
lessons.cu."""

import subprocess
from pathlib import Path

import pytest

from scripts import script

DOCS = Path(__file__).resolve().parent.parent / "docs"

pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="an installed package has no docs")


lessons = script("docs/lessons.py") if DOCS.is_dir() else None
PAGES = list(lessons.PAGES) if lessons else []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_kernels_do(name):
    text = (DOCS / "lessons" / name).read_text(encoding="utf-8")
    assert text == lessons.PAGES[name](), f"{name} is another: run `make docs`"


def test_every_page_is_written():
    assert sorted(path.name for path in (DOCS / "lessons").glob("*.md")) == sorted(PAGES)


def test_the_text_is_that_of_the_source(tmp_path):
    nvcc = script("docs/pages.py").nvcc()
    if nvcc is None:
        pytest.skip("there is no nvcc")
    source, made = DOCS / "lessons" / "lessons.cu", tmp_path / "lessons.ptx"
    subprocess.run([nvcc, "-ptx", "-arch=compute_120f", "-std=c++17", "-o", made, source], check=True)

    def instructions(path):
        return [line for line in path.read_text().splitlines() if not line.startswith("//")]

    assert instructions(made) == instructions(DOCS / "lessons" / "lessons.ptx")


@pytest.mark.parametrize(
    "text, name",
    [
        ("@%p3 ld.global.nc.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1]", "global memory"),
        ("{.reg .b8 pair; cvt.rn.satfinite.e2m1x2.f32 pair, %f1, %f2", "conversions to codes"),
        ("st.shared.f32 [%r1], %f1", "shared memory"),
        ("fma.rn.f32 %f1, %f2, %f3, %f4", "floats"),
        ("mad.lo.s32 %r1, %r2, %r3, %r4", "integers and addresses"),
        ("@!%p1 bra $L__BB0_2", "branches"),
    ],
)
def test_classes_of_lines(text, name):
    assert lessons.class_of(text) == name
