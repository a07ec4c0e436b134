"""Load scripts of the root and of docs/ as modules: they are in no package, and their names clash with other
packages."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent


@cache
def script(path: str) -> ModuleType:
    """Return a script as a module, loaded once per process. `path` is relative to the root, as in "docs/pages.py"."""
    spec = importlib.util.spec_from_file_location(f"script_{Path(path).stem}", ROOT / path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look up their module by name
    spec.loader.exec_module(module)
    return module
