"""MXFP4 and NVFP4 quantizers in plain PyTorch, for torch.compile.

They follow the definitions in docs/numerics.md (rules `floor` and `amax`) and give the same bytes for finite values.
NaN and infinity are not handled; this would cost them time.
"""

from __future__ import annotations

import torch


def packed_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Round float32 [..., 2 n] of magnitudes up to 6 to E2M1, ties to even, two codes to a byte: uint8 [..., n]."""
    magnitude = values.abs()
    code = (magnitude > 0.25).to(torch.uint8)
    for boundary, reached in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += (magnitude >= boundary) if reached else (magnitude > boundary)
    code = (code | (torch.signbit(values).to(torch.uint8) << 3)).unflatten(-1, (-1, 2))
    return code[..., 0] | (code[..., 1] << 4)


def mxfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes uint8 [rows, cols / 2] and UE8M0 scales uint8 [rows, cols / 32] of x [rows, cols]."""
    blocks = x.float().unflatten(-1, (-1, 32))
    exponent = blocks.abs().amax(-1).view(torch.int32) >> 23
    scale = (exponent - 2).clamp(min=0)  # 2 is the exponent of 6, the largest code
    reciprocal = ((254 - scale) << 23).view(torch.float32)
    scaled = (blocks * reciprocal.unsqueeze(-1)).clamp(-6, 6)
    return packed_e2m1(scaled.flatten(-2)), scale.to(torch.uint8)


def nvfp4_global_scale(x: torch.Tensor) -> torch.Tensor:
    """Return the global scale of x, float32 without axes."""
    scale = x.abs().amax().float() / 2688
    return torch.where(scale == 0, 1.0, scale)


def nvfp4(x: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes uint8 [rows, cols / 2] and scales float8_e4m3fn [rows, cols / 16] of x [rows, cols]."""
    blocks = x.float().unflatten(-1, (-1, 16))
    scale = (blocks.abs().amax(-1) / 6 / global_scale).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    step = global_scale * scale.float()
    scaled = (blocks / step.unsqueeze(-1)).clamp(-6, 6)
    return packed_e2m1(scaled.flatten(-2)), scale


def nvfp4_of_own_scale(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `nvfp4`, with the global scale of x."""
    return nvfp4(x, nvfp4_global_scale(x))
