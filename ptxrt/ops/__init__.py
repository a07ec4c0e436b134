"""Every kernel's declaration and reference, and the friendly functions made of them.

Importing this package fills `ptxrt.kernel.REGISTRY`.
"""

from . import attention, attention_blocks, attention_kernels, cast, endings, packers, probes, quantize, quantizers, scales, smoothing, transpose  # noqa: F401
