"""Declarations and references of all kernels, and the public functions that launch them.

Importing this package imports every file in it, which fills `ptxrt.kernel.REGISTRY`.
"""

from importlib import import_module
from pkgutil import iter_modules

for _file in sorted(module.name for module in iter_modules(__path__)):
    import_module(f"{__name__}.{_file}")
