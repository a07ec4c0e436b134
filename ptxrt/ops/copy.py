"""The kernel that copies bytes: whole arrays or parts of them, with elements of any type."""

from ..declaration import In, Out, scattered
from ..formats import u8
from ..kernel import kernel


@kernel(
    grid="rows*width heads batch",
    cases=[dict(batch=2, heads=3, rows=5, width=width) for width in (1, 2, 4, 8, 12, 16, 35)]
    + [dict(batch=1, heads=1, rows=300, width=64)],
)
def copy_bytes(x: In[u8, "batch heads rows width", scattered], y: Out[u8, "batch heads rows width", scattered]):
    """Copy bytes between any strides. A stride of 0 repeats an axis of x; x and y do not overlap."""
    y[:] = x
