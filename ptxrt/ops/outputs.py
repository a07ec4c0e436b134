"""Where public functions write results, and in which type or block format: checked in one place for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..array import DeviceArray
from ..errors import ArgumentError
from ..formats import FORMATS, Format
from .endings import ENDINGS
from .levels import given_level, store_level, written_level
from .memory import check_parts
from .operands import operand_rule
from .place import Place, copied_to
from .quantize import given_global_scale, rule_number
from .quantized import SCALE_LAYOUTS, Layout, QuantizedArray, block_format, checked_scale_layout, layout_of
from .scales import fill_f32


@dataclass(frozen=True)
class Ending:
    """How results are quantized: their layout, the number of the scale rule, and the global scale (only nvfp4)."""

    layout: Layout
    rule: int
    global_scale: Any

    @property
    def number(self) -> int:
        """The number of the format in kernels."""
        return ENDINGS.index(self.layout.format.name) + 1

    @property
    def is_given(self) -> bool:
        """Whether the global scale is a scalar of the caller."""
        return isinstance(self.global_scale, DeviceArray) and not self.is_of_groups

    @property
    def is_of_groups(self) -> bool:
        """Whether each group of a product has a global scale."""
        return self.global_scale is not None and self.global_scale.ndim > 0

    def level(self, place: Place, out=None, read: Iterable[Any] = ()) -> DeviceArray | None:
        """Return the global scale on the device, without waiting; None for formats without one. read: the arrays that
        the call reads.
        """
        if self.global_scale is None:
            return None
        if self.is_given:
            return given_level(self.global_scale, place, out, read)
        return self.filled(float(self.global_scale), place, out, read)

    def filled(self, value: float, place: Place, out, read: Iterable[Any]) -> DeviceArray:
        """Return one number on the device."""
        return written_level(lambda x: fill_f32(x=x, value=value, stream=place.stream), place, out, read)

    def buffers(self, place: Place, out: QuantizedArray | None) -> tuple[DeviceArray, DeviceArray]:
        """Return codes and scales to write to: those of `out` if it is a device array, else new ones."""
        if out is not None and out.on_device:
            return out.codes, out.scales
        layout = self.layout
        codes, scales = (place.empty(shape, FORMATS["u8"]) for shape in (layout.codes_shape, layout.scales_shape))
        return codes, scales

    def arguments(self, codes: DeviceArray, scales: DeviceArray, level) -> dict[str, Any]:
        """Return the kernels' arguments for this ending; rows of codes have no gaps."""
        layout = self.layout
        arguments = dict(codes=codes.view(np.uint8).reshape(layout.outer, layout.code_bytes), ending=self.number)
        arguments |= dict(scales=scales.view(np.uint8).reshape(scales.size), scale_bytes=scales.size, rule=self.rule)
        arguments |= dict(code_bytes=layout.code_bytes, swizzled=int(layout.scale_layout != "linear"))
        return arguments if level is None else arguments | dict(out_global=level.reshape(level.size))

    def handed_back(self, place: Place, codes, scales, level, out: QuantizedArray | None) -> QuantizedArray:
        """Return the QuantizedArray for the caller: `out` if it was given."""
        if out is not None and out.on_device:
            if level is not None:
                store_level(out, level, self.is_given)
            return out
        layout = self.layout
        fields = dict(format=layout.format.name, shape=layout.shape, scale_layout=layout.scale_layout)
        result = QuantizedArray(codes, scales, **fields, global_scale=level)
        if not place.on_host:
            return result
        result = result.to_numpy(stream=place.stream)
        if out is None:
            return result
        for name in ("codes", "scales"):
            np.copyto(getattr(out, name).view(np.uint8), getattr(result, name).view(np.uint8))
        out.global_scale = result.global_scale
        return out


class Target:
    """A float result: `direct` is what kernels write, the other array what the caller gets.

    fits: whether kernels can write to the caller's array. If not, they write to a new one, which is then copied.
    """

    def __init__(self, caller_out, place: Place, shape, member: Format, fits: Callable[[DeviceArray], bool]):
        self.caller_out, self.place, self.member = caller_out, place, member
        self.whole = caller_out if isinstance(caller_out, DeviceArray) else place.empty(shape, member)
        self.direct = self.whole if fits(self.whole) else place.empty(shape, member)

    def handed_back(self):
        """Return the result; call it after the kernels are launched."""
        if self.direct is not self.whole and self.whole.size:
            copied_to(self.direct, self.member, self.place, self.whole)
        if isinstance(self.caller_out, DeviceArray):
            return self.caller_out
        result = self.place.back(self.whole)
        if self.caller_out is None:
            return result
        np.copyto(self.caller_out, result)
        return self.caller_out


def checked_ending(
    function: str, on_host: bool, shape, out, out_dtype, format, rule, scale_layout, global_scale, prefix: str = ""
) -> Ending | None:
    """Return how results of `shape` are quantized, or None if they are not. out: the caller's output, or None.

    prefix: of the argument names format, scale_rule, scale_layout and global_scale in messages.
    """
    if isinstance(out, QuantizedArray):
        if format not in (None, out.format):
            raise ArgumentError(f"{function}: out is {out!r}, {prefix}format {format!r}; leave out {prefix}format")
        checked_scale_layout(function, scale_layout, prefix)
        if scale_layout not in ("linear", out.scale_layout):
            found = f"out is {out!r}, {prefix}scale_layout {scale_layout!r}"
            raise ArgumentError(f"{function}: {found}; leave out {prefix}scale_layout")
        format, scale_layout = out.format, out.scale_layout
    if format is None:
        if not isinstance(scale_layout, str) or scale_layout != "linear":
            known = isinstance(scale_layout, str) and scale_layout in SCALE_LAYOUTS
            advice = f"pass {prefix}format, or leave it out" if known else "leave it out"
            found = f"{prefix}scale_layout is {scale_layout!r}, but the result is not quantized"
            raise ArgumentError(f"{function}: {found}; {advice}")
        for name, value in dict(scale_rule=rule, global_scale=global_scale).items():
            if value is not None:
                found = f"{prefix}{name} is {value!r}, but the result is not quantized"
                raise ArgumentError(f"{function}: {found}; pass {prefix}format, or leave it out")
        return None
    if not isinstance(format, str) or format not in ENDINGS:
        raise ArgumentError(f"{function}: {prefix}format is {format!r}; there are {', '.join(map(repr, ENDINGS))}")
    if out_dtype is not None or (out is not None and not isinstance(out, QuantizedArray)):
        found = (
            f"out_dtype {getattr(out_dtype, '__name__', out_dtype)}" if out_dtype is not None else f"out of {out.dtype}"
        )
        raise ArgumentError(f"{function}: {found} beside {prefix}format={format!r}; pass one of them")
    block = block_format(function, format)
    layout = layout_of(function, block, shape, -1, scale_layout, prefix)
    if block.two_level and global_scale is None:
        why = "the largest value is not known before the result is"
        need = f"{prefix}format 'nvfp4' needs {prefix}global_scale, since {why}"
        raise ArgumentError(f"{function}: {need}; pass a number (1 for a single level) or a float32 device scalar")
    level = given_global_scale(function, block, global_scale, on_host, prefix)
    rule = operand_rule(format) if rule is None else rule
    return Ending(layout, rule_number(function, block, rule, prefix), level)


def check_out(
    function: str, out, ending: Ending | None, shape, arrays: dict[str, Any], in_place: str | None = None
) -> None:
    """Raise ArgumentError if results of `shape` cannot be written to `out` while `arrays` are read."""
    if out is None:
        return
    if ending and out.layout != ending.layout:
        expected = f"{ending.layout.format.name} of shape {list(shape)}, scales {ending.layout.scale_layout}"
        raise ArgumentError(f"{function}: out is {out!r}; the result is {expected}")
    if not ending and tuple(out.shape) != tuple(shape):
        raise ArgumentError(f"{function}: out has shape {list(out.shape)}; pass an array of shape {list(shape)}")
    check_parts(function, out, arrays, in_place)
