"""Scripts of the root and of docs/ as modules: they belong to no package, and other packages have their names."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent


@cache
def script(path: str) -> ModuleType:
    """Return a script, named from the root as in "docs/pages.py", as a module: one for a process."""
    spec = importlib.util.spec_from_file_location(f"script_{Path(path).stem}", ROOT / path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
