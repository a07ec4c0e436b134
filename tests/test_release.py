"""release.py on a small repository with its own builder: what a release changes, and what a failure leaves."""

import os
import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from scripts import script

ROOT = Path(__file__).resolve().parent.parent
release = script("release.py")

CHANGES = "# Changelog\n\n## Next\n\n- One thing.\n- Another.\n\n## 0.1.0\n\nThe first.\n"


def git(root, *words):
    return release.git(root, *words)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "name")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "name@example.org")
    root = tmp_path / "tree"
    (root / "ptxrt").mkdir(parents=True)
    (root / "ptxrt" / "__init__.py").write_text('"""A package."""\n\n__version__ = "0.1.0"\n')
    (root / "CHANGELOG.md").write_text(CHANGES)
    (root / ".gitignore").write_text("dist/\nmodules/\n")
    (root / "modules").mkdir()
    (root / "modules" / "built").write_text("not committed")
    git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "first")
    return root


def wheel_of(tree, folder, extra=""):
    """A wheel with the files of a tree that git tracks."""
    version = re.search('"([0-9.]+)"', (tree / "ptxrt" / "__init__.py").read_text())[1]
    path = folder / f"ptxrt-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("ptxrt/__init__.py", "CHANGELOG.md"):
            info = zipfile.ZipInfo(name, (2020, 2, 2, 0, 0, 0))
            archive.writestr(info, (tree / name).read_text() + (extra if name == "ptxrt/__init__.py" else ""))
    return path


def test_a_release(tree, capsys):
    places = []

    def build(root, folder):
        places.append((root, (root / "modules").exists()))
        return wheel_of(root, folder)

    wheel = release.release(tree, "0.2.0", build)
    assert wheel == tree / "dist" / "ptxrt-0.2.0-py3-none-any.whl" and wheel.is_file()
    assert (
        places[0] == (tree, True) and places[1][0] != tree and not places[1][1]
    )  # the second build starts without build results
    digest, name = wheel.with_suffix(".whl.sha256").read_text().split()
    assert name == wheel.name and digest == release.hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert '__version__ = "0.2.0"' in (tree / "ptxrt" / "__init__.py").read_text()
    text = (tree / "CHANGELOG.md").read_text()
    assert re.fullmatch(
        r"# Changelog\n\n## Next\n\n## 0\.2\.0 \(\d{4}-\d\d-\d\d\)\n\n- One thing.\n- Another.\n\n## 0.1.0\n\nThe first.\n",
        text,
    )
    assert git(tree, "status", "--porcelain") == "" and git(tree, "tag", "--list").split() == ["v0.2.0"]
    assert git(tree, "log", "-1", "--format=%s").strip() == "Release 0.2.0"
    assert git(tree, "rev-parse", "v0.2.0^{commit}") == git(tree, "rev-parse", "HEAD")
    with pytest.raises(release.ReleaseFailure, match="CHANGELOG.md has nothing"):
        release.release(tree, "0.3.0", wheel_of)


def state(tree):
    return {
        **{name: (tree / name).read_text() for name in ("ptxrt/__init__.py", "CHANGELOG.md")},
        "head": git(tree, "rev-parse", "HEAD"),
        "tags": git(tree, "tag", "--list"),
        "dist": (tree / "dist").exists(),
    }


def test_builds_that_differ_are_no_release(tree):
    before, extras = state(tree), iter(["", "# compiled in another way"])
    with pytest.raises(release.ReleaseFailure, match="the two builds differ in ptxrt/__init__.py$"):
        release.release(tree, "0.2.0", lambda root, folder: wheel_of(root, folder, next(extras)))
    assert state(tree) == before and git(tree, "status", "--porcelain") == ""


def test_a_failure_keeps_what_somebody_edits_meanwhile(tree):
    def build(root, folder):
        (root / "README.md").write_text("edited during the build")
        raise release.ReleaseFailure("no compiler")

    before = state(tree)
    (tree / "README.md").write_text("before")
    git(tree, "add", "README.md")
    git(tree, "commit", "--quiet", "--message", "Read me")
    before["head"] = git(tree, "rev-parse", "HEAD")
    with pytest.raises(release.ReleaseFailure, match="no compiler"):
        release.release(tree, "0.2.0", build)
    assert state(tree) == before and (tree / "README.md").read_text() == "edited during the build"


def test_a_release_without_an_identity_fails_before_it_builds(tree, monkeypatch):
    for name in ("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL", "EMAIL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    for name in ("user.name", "user.email"):
        subprocess.run(["git", "-C", tree, "config", "--unset", name], check=False)
    git(tree, "config", "user.useConfigOnly", "true")
    before = state(tree)
    with pytest.raises(release.ReleaseFailure):
        release.release(tree, "0.2.0", lambda root, folder: pytest.fail("it builds"))
    assert state(tree) == before


@pytest.mark.parametrize("error", [release.ReleaseFailure("no compiler"), KeyboardInterrupt()])
def test_a_failure_leaves_the_tree_as_it_was(tree, error):
    def build(root, folder):
        raise error

    before = state(tree)
    with pytest.raises(type(error)):
        release.release(tree, "0.2.0", build)
    assert state(tree) == before and git(tree, "status", "--porcelain") == ""


def test_the_version_that_the_tree_has_already(tree):
    """A tree may already have the next version number and its changelog section."""
    (tree / "ptxrt" / "__init__.py").write_text('__version__ = "0.2.0"\n')
    (tree / "CHANGELOG.md").write_text(CHANGES.replace("## Next", "## 0.2.0 (unreleased)"))
    git(tree, "commit", "--all", "--quiet", "--message", "the next version")
    release.release(tree, "0.2.0", wheel_of)
    assert re.match(
        r"# Changelog\n\n## Next\n\n## 0\.2\.0 \(\d{4}-\d\d-\d\d\)\n\n- One thing.", (tree / "CHANGELOG.md").read_text()
    )
    with pytest.raises(release.ReleaseFailure, match="there is a tag v0.2.0 already"):
        release.release(tree, "0.2.0", wheel_of)


@pytest.mark.parametrize(
    "version, part", [("0.0.9", "pass that or a later one"), ("1.0", "three numbers"), ("v0.2.0", "three numbers")]
)
def test_versions_that_are_refused(tree, version, part):
    before = state(tree)
    with pytest.raises(release.ReleaseFailure, match=part):
        release.release(tree, version, wheel_of)
    assert state(tree) == before


def test_a_tree_that_is_not_ready_is_refused(tree):
    (tree / "new").touch()
    with pytest.raises(release.ReleaseFailure, match=r"commit or remove first:\n\?\? new"):
        release.release(tree, "0.2.0", wheel_of)
    (tree / "new").unlink()
    git(tree, "tag", "v0.2.0")
    with pytest.raises(release.ReleaseFailure, match="there is a tag v0.2.0 already"):
        release.release(tree, "0.2.0", wheel_of)


def test_the_projects_own_files_have_what_a_release_changes():
    assert (
        release.with_version((ROOT / "ptxrt" / "__init__.py").read_text(), "99.0.0").count('__version__ = "99.0.0"')
        == 1
    )
    text = (ROOT / "CHANGELOG.md").read_text()
    assert len(re.findall(r"^## (Next|\d+\.\d+\.\d+ \(unreleased\))$", text, re.MULTILINE)) == 1 and re.search(
        r"^## \d+\.\d+\.\d+", text, re.MULTILINE
    )


def test_every_dependency_has_bounds():
    text = (ROOT / "pyproject.toml").read_text()
    wanted = re.findall(
        r'^\s+"([\w-]+(?:\[\w+\])?)([<>=!~][^";]*)?(?:;[^"]*)?",$', text.partition("[project.scripts]")[0], re.MULTILINE
    )
    bounds = {name: bound for name, bound in wanted if not name.startswith("ptxrt[")}
    assert {
        "click",
        "cuda-python",
        "ml_dtypes",
        "numpy",
        "pytest",
        "hypothesis",
        "mkdocs",
        "latex2mathml",
    } <= bounds.keys()
    assert all(re.fullmatch(r">=[\d.]+,<\d+", bound) for bound in bounds.values()), bounds
    assert (
        subprocess.run(["grep", "-c", "hatchling>=1.26,<2", ROOT / "pyproject.toml"], capture_output=True).stdout
        == b"1\n"
    )
