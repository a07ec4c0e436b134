"""The pages of docs/ and README.md: their code blocks run; links and the navigation of the site are valid."""

import fnmatch
import json
import re
import shutil
from pathlib import Path

import pytest

import ptxrt
from scripts import script

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="an installed package has no docs")


pages = script("docs/pages.py") if DOCS.is_dir() else None
PAGES = pages.pages() if pages else []
RUNNING = {page: pages.blocks(page) for page in PAGES}


def name_of(page):
    return str(page.relative_to(ROOT)) if isinstance(page, Path) else None


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder like a checkout: it links the sample inputs, and a test may change the rest."""
    (tmp_path / "data").symlink_to(ROOT / "data", target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    return tmp_path


def needs_of(page):
    return {need for block in RUNNING[page] for need in block.needs}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any("gpu" not in block.needs for block in RUNNING[page])], ids=name_of
)
def test_blocks(page, folder):
    """Run every block of a page that needs no GPU. After the others pass, the test is skipped if blocks lack something
    they need."""
    here = frozenset(need for need in needs_of(page) - {"gpu"} if pages.is_here(need))
    if "compiler" in here:
        for name in ("kernels_cu", "ptxrt", "tests"):
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("modules", "__pycache__", "*.ptx")
            )
        for name in ("build.py", "cli.py", "pyproject.toml"):
            shutil.copy2(ROOT / name, folder)
    with ptxrt.using("emulator"):
        count = pages.run(page, folder, here)
    left = {need for block in RUNNING[page] if "gpu" not in block.needs for need in block.needs} - here
    if left:
        pytest.skip(f"{count} blocks ran; the others need what is not here: {', '.join(sorted(left))}")


@pytest.mark.gpu
@pytest.mark.parametrize("page", [page for page in PAGES if "gpu" in needs_of(page)], ids=name_of)
def test_blocks_on_a_gpu(page, folder):
    missing = sorted(need for need in needs_of(page) if not pages.is_here(need))
    if "gpu" in missing:
        pytest.skip(f"these blocks need what is not here: {', '.join(missing)}")
    assert pages.run(page, folder, frozenset(needs_of(page)) - frozenset(missing))
    if missing:
        pytest.skip(f"the other blocks need what is not here: {', '.join(missing)}")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links(page):
    assert pages.broken_links(page) == []


def test_the_site_lists_every_page():
    listed = pages.navigation()
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
    assert len(listed) == len(set(listed))


def test_the_reference_lists_public_names_once():
    """docs/hooks.py appends the names that the page does not list."""
    text = (DOCS / "reference" / "functions.md").read_text(encoding="utf-8")
    listed = re.findall(r"^::: ptxrt\.(\w+)$", text, re.M)
    assert len(listed) == len(set(listed))
    assert set(listed) <= set(ptxrt.__all__)


def test_the_site_asks_no_other_machine_for_anything():
    """Fonts are the system's, and links work between files in a folder. docs/hooks.py checks the built site."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert re.search(r"^  font: false$", text, re.M) and re.search(r"^use_directory_urls: false$", text, re.M)
    assert not re.search(r"^\s*(analytics|extra_javascript|extra_css|- privacy)\b", text, re.M)


def test_generated_files_are_marked():
    """Reviews and statistics of the repository leave out what scripts write."""
    attributes = ROOT / ".gitattributes"
    if not attributes.exists():
        pytest.skip("this is no checkout")
    lines = [line.split() for line in attributes.read_text(encoding="utf-8").splitlines()]
    patterns = [words[0] for words in lines if "linguist-generated" in words]
    single = ("kernels", "fragments", "accuracy", "models", "speed")
    pages = [DOCS / f"{name}.md" for name in single] + [*DOCS.glob("fragments/*"), *DOCS.glob("lessons/*.md")]
    records = [DOCS / "models.json", *(ROOT / "tests").glob("*_figures.json"), *(ROOT / "tests").glob("data/*.ptx")]
    for path in (*pages, *records):
        name = path.relative_to(ROOT).as_posix()
        assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns), name


def test_readme_is_short():
    """It has a description, installation, ten lines of code, one picture, the machines, and links."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert 60 <= len(lines) <= 80 and max(map(len, lines)) <= 120
    assert len([line for line in lines if line.startswith("![")]) == 1


def test_readme_has_the_figures_of_the_speed_model():
    pages, words = script("docs/speed.py"), " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    record = json.loads(pages.RECORD.read_text(encoding="utf-8"))
    plain = {
        name: [f"{x:.0f}" for x in record["entries"][f"attention_{name}_dim128_dim_v128{suffix}"]["paths"]["plain"]]
        for name, suffix in (("nvfp4", ""), ("mxfp4", ""), ("mxfp8", ""), ("bf16", "_bf16"))
    }
    rate = {name: mean for name, (mean, *_) in plain.items()}
    assert (
        f"{rate['nvfp4']} useful TFLOPS in nvfp4, {rate['mxfp4']} in mxfp4, {rate['mxfp8']} in mxfp8 and "
        f"{rate['bf16']} in bf16; on the H200 the same model is {pages.errors(record)} too fast. Depending on "
        f"the order in which the simulated warps start, nvfp4 is between {plain['nvfp4'][1]} and {plain['nvfp4'][2]}. "
        "Published matrix products on an RTX 5090 stop near "
        f"{pages.POWER['MXFP4, NVFP4']} TFLOPS (4 bits) and {pages.POWER['MXFP8']} (mxfp8)"
    ) in words


def test_figures_are_those_of_the_script(tmp_path):
    """Every generated figure exists under its name, and generating it again gives the same text."""
    pytest.importorskip("matplotlib")
    figures = script("docs/figures.py")
    drawn = figures.write(tmp_path)
    assert sorted(path.name for path in drawn) == sorted(path.name for path in (DOCS / "figures").glob("*.svg"))
    for path in drawn:
        words = [re.findall(r">([^<>\n]+)</text>", file.read_text()) for file in (path, DOCS / "figures" / path.name)]
        assert words[0] == words[1], f"{path.name} is not what docs/figures.py draws: make figures"


def test_the_pipeline_has_as_many_stages_as_the_kernel():
    """The dynamic shared memory of each entry holds exactly the number of stages that the figure counts."""
    pytest.importorskip("matplotlib")
    figures = script("docs/figures.py")
    from ptxrt import units
    from ptxrt.tiles import tile_layout

    launches = units.launches("attention_nvfp4_dim256_dim_v256", "compute_120f")
    stage = sum(tile_layout("nvfp4", role, 256).nbytes for role in "kv")
    stages = figures.stages_of("nvfp4", 256)
    for launch in launches.values():
        assert stages * stage <= launch["launch"][3] < (stages + 1) * stage


class TestTheRunner:
    """The runner fails on a wrong page and reports where."""

    def page(self, tmp_path, text, monkeypatch):
        monkeypatch.setattr(pages, "ROOT", tmp_path)
        path = tmp_path / "page.md"
        path.write_text(text)
        return path

    def test_output_is_compared(self, tmp_path, monkeypatch):
        page = self.page(tmp_path, "```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n", monkeypatch)
        with pytest.raises(pages.Wrong, match=r"page.md:2 prints\n2\n\nThe page shows\n3"):
            pages.run(page, tmp_path)

    def test_blocks_share_names_and_errors_have_lines(self, tmp_path, monkeypatch):
        page = self.page(tmp_path, "```python\nx = 1\n```\ntext\n```python\nx / 0\n```\n", monkeypatch)
        with pytest.raises(ZeroDivisionError) as caught:
            pages.run(page, tmp_path)
        assert caught.traceback[-1].lineno + 1 == 6

    def test_commands_and_files(self, tmp_path, monkeypatch):
        text = '```python title="a.py"\nprint("from a")\n```\n```console\n$ python a.py\nfrom ...\n$ python a.py\nfrom b\n```\n'
        with pytest.raises(pages.Wrong, match="page.md:7 prints\nfrom a"):
            pages.run(self.page(tmp_path, text, monkeypatch), tmp_path)

    def test_what_is_missing_is_not_run(self, tmp_path, monkeypatch):
        page = self.page(tmp_path, "<!-- needs: gpu, torch -->\n```python\n1 / 0\n```\n", monkeypatch)
        assert pages.run(page, tmp_path) == 0
        with pytest.raises(ZeroDivisionError):
            pages.run(page, tmp_path, frozenset({"gpu", "torch"}))

    def test_links_and_headings(self, tmp_path, monkeypatch):
        text = (
            "# One kernel: `a` to b\n[a](#one-kernel-a-to-b) [b](#two) [c](other.md)\n`[d](no.md)` "
            "[e](https://example.org)\n"
        )
        page = self.page(tmp_path, text, monkeypatch)
        assert pages.broken_links(page) == [
            "page.md:2: page.md has no heading #two",
            "page.md:2: other.md is not there",
        ]
