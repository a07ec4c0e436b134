"""Writing files so that they appear whole or not at all."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def write_atomically(path, data: bytes) -> None:
    """Write `data` to a new file beside `path` and rename it into place; on failure nothing is left behind."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
