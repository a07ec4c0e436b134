"""build.py of the root as a module, `build`; other packages have that name, too."""

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "build_script_of_the_root", Path(__file__).resolve().parent.parent / "build.py"
)
build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build)
