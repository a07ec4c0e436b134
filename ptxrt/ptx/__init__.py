"""PTX text: strict parsing, and lowering of one entry to basic blocks."""

from .ir import PtxError, PtxSyntaxError
from .parse import parse

__all__ = ["PtxError", "PtxSyntaxError", "parse"]
