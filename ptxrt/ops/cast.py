"""The kernel that converts rows to the type, width and order that other kernels take."""

from ..declaration import In, Out, scattered
from ..formats import bf16, f16, f32
from ..kernel import kernel


@kernel(
    grid="rows*width heads batch",
    cases=[
        *(
            dict(batch=2, heads=3, rows=5, cols=cols, width=width, y_f32=True, y_f16=True, y_bf16=True)
            for cols, width in [(8, 8), (20, 24), (40, 33)]
        ),
        dict(batch=1, heads=1, rows=300, cols=64, width=64, y_bf16=True),
        dict(batch=1, heads=1, rows=1, cols=1, width=1, y_f16=True),
    ],
)
def cast(
    x: In[f32 | f16 | bf16, "batch heads rows cols", scattered],
    y_f32: Out[f32, "batch heads rows width", scattered] = None,
    y_f16: Out[f16, "batch heads rows width", scattered] = None,
    y_bf16: Out[bf16, "batch heads rows width", scattered] = None,
):
    """Copy rows to another type, rounded to nearest, ties to even, and to another width, cut or padded with zeros.

    Values beyond float16 become infinite. NaN stays NaN, without its payload.
    """
    for y in (y_f32, y_f16, y_bf16):
        if y is not None:
            kept = min(x.shape[-1], y.shape[-1])
            y[..., :kept], y[..., kept:] = x[..., :kept].astype(y.dtype), 0
