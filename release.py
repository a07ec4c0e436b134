"""Make a release: `make release VERSION=0.2.0`, from a clean checkout in which `make test ALL=1` passes.

The script writes the version to ptxrt/__init__.py and dates the section of CHANGELOG.md named `VERSION (unreleased)` or
`Next`. It builds the wheel twice: here, and in a copy of the tree in another folder, where it compiles all kernels
anew. If both wheels have the same bytes, it writes the wheel and its SHA-256 to dist/, commits the change and tags it.
After any failure it restores the two files. It publishes nothing.
"""

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent


class ReleaseFailure(Exception):
    """The release cannot be made; the message says why and what to do."""


def git(root, *words):
    """Run git in a tree and return its output; raise ReleaseFailure if it fails."""
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise ReleaseFailure(f"git {' '.join(words)} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def numbers(version):
    """Return a version as three numbers."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ReleaseFailure(f"VERSION is {version!r}; pass three numbers, such as VERSION=0.2.0")
    return tuple(map(int, version.split(".")))


def with_version(text, version):
    """Return ptxrt/__init__.py with a version, which must be the present one or a later one."""
    present = re.search(r'^__version__ = "([^"]*)"$', text, re.MULTILINE)[1]
    if numbers(version) < numbers(present):
        raise ReleaseFailure(f"VERSION is {version}; the tree has {present}, pass that or a later one")
    return text.replace(f'__version__ = "{present}"', f'__version__ = "{version}"')


def with_section(text, version, day):
    """Return CHANGELOG.md with the unreleased section under the version and a date, below an empty section Next."""
    heading = rf"^## (?:Next|{re.escape(version)} \(unreleased\))\n\n"
    match = re.search(heading + r"(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if not match or not match[1].strip():
        raise ReleaseFailure(
            f"CHANGELOG.md has nothing under `## {version} (unreleased)` or `## Next`: say there what a user notices"
        )
    return f"{text[: match.start()]}## Next\n\n## {version} ({day})\n\n{match[1]}{text[match.end() :]}"


def build_wheel(tree, folder):
    """Build the wheel of a tree into a folder and return its path. Fresh kernels are not compiled again."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "--wheel-dir",
        str(folder),
        str(tree),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ReleaseFailure(f"the wheel of {tree} was not built:\n{done.stdout}{done.stderr}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def differences(one, other):
    """Return the differences of two wheels in words; nothing if their bytes are equal."""
    if one.read_bytes() == other.read_bytes():
        return []
    contents = []
    for path in (one, other):
        with zipfile.ZipFile(path) as archive:
            contents.append(
                {
                    info.filename: (hashlib.sha256(archive.read(info)).hexdigest(), info.date_time)
                    for info in archive.infolist()
                }
            )
    names = sorted({*contents[0], *contents[1]})
    return [name for name in names if contents[0].get(name) != contents[1].get(name)] or [
        "the order or the compression of their members"
    ]


def release(root, version, build=build_wheel):
    """Make a release of a tree and return its wheel. If it fails, restore what it edited and raise ReleaseFailure."""
    numbers(version)
    if changes := git(root, "status", "--porcelain").strip():
        raise ReleaseFailure(f"commit or remove first:\n{changes}")
    tag = f"v{version}"
    if git(root, "tag", "--list", tag).strip():
        raise ReleaseFailure(f"there is a tag {tag} already")
    edits = {
        root / "ptxrt" / "__init__.py": lambda text: with_version(text, version),
        root / "CHANGELOG.md": lambda text: with_section(text, version, time.strftime("%Y-%m-%d")),
    }
    after = {path: edit(path.read_text(encoding="utf-8")) for path, edit in edits.items()}
    before = git(root, "rev-parse", "HEAD").strip()
    git(root, "var", "GIT_COMMITTER_IDENT")  # fails here, and not behind two builds
    names, wheel = [str(path.relative_to(root)) for path in after], None
    try:
        for path, text in after.items():
            path.write_text(text, encoding="utf-8", newline="\n")
        with tempfile.TemporaryDirectory() as folder:
            places = [Path(folder) / name for name in ("here", "elsewhere", "a copy")]
            for place in places[:2]:
                place.mkdir()
            print(f"building {version} here", flush=True)
            here = build(root, places[0])
            print("building it once more from a copy of the sources, with every kernel compiled anew", flush=True)
            copy_sources(root, places[2])
            elsewhere = build(places[2], places[1])
            if found := differences(here, elsewhere):
                raise ReleaseFailure(
                    f"the two builds differ in {', '.join(found[:9])}{' and more' if len(found) > 9 else ''}"
                )
            dist = root / "dist"
            dist.mkdir(exist_ok=True)
            wheel = Path(shutil.copy2(here, dist))
        git(
            root,
            "commit",
            "--quiet",
            "--message",
            f"Release {version}",
            *names,
        )
        git(root, "tag", "--annotate", "--message", f"Release {version}", tag)
    except BaseException:
        if git(root, "rev-parse", "HEAD").strip() != before:  # the commit is there, the tag is not
            git(root, "reset", "--quiet", "--soft", before)
        git(root, "restore", "--staged", "--worktree", "--source", before, "--", *names)
        if wheel is not None:
            wheel.unlink(missing_ok=True)
        raise
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    wheel.with_suffix(".whl.sha256").write_text(f"{digest}  {wheel.name}\n", encoding="utf-8")
    print(
        f"{wheel} ({wheel.stat().st_size / 1e6:.1f} MB, both builds), committed and tagged {tag}; push both to "
        "publish the sources"
    )
    return wheel


def copy_sources(root, target):
    """Copy the files that git tracks, in their present state, to a new folder."""
    for name in git(root, "ls-files", "-z").split("\0")[:-1]:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, target / name)


def main():
    parser = argparse.ArgumentParser(description="Make a release of this checkout.")
    parser.add_argument("version", help="three numbers, such as 0.2.0")
    try:
        release(ROOT, parser.parse_args().version)
    except (ReleaseFailure, OSError) as failure:
        print(f"{type(failure).__name__}: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
