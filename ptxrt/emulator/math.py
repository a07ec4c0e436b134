"""Approximate functions: ex2, lg2, sin, cos, tanh, and the .approx and .full forms of rcp, sqrt, rsqrt and div.

The PTX ISA bounds the error of these instructions but does not define their bits (PTX ISA 9.7.3, 9.7.4), so results may
differ from those of a GPU. Every result here is the function in float64, rounded once to the destination. That is
within the bound of the ISA, which each instruction quotes. NumPy's float64 functions may be off by one float64 ulp,
which changes about one result in 2^28. Special values are exact: infinities, zeros and their signs, NaN (canonical),
flushing of subnormal inputs and results under .ftz.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .instruction import Lanes, Semantics, Unsupported, define
from .numbers import FORMATS, canonical, encode, flushed


def _f32(function: Callable[[np.ndarray], np.ndarray], flush: bool) -> Callable:
    """An operation on f32 arrays from a `function` on float64."""

    def apply(a):
        a = np.asarray(a, np.float32)
        result = canonical(function((flushed(a) if flush else a).astype(np.float64)).astype(np.float32))
        return flushed(result) if flush else result

    return apply


def _f64(function: Callable[[np.ndarray], np.ndarray]) -> Callable:
    """An operation on f64 arrays from a `function` on float64; NaN results are np.nan."""

    def apply(a):
        with np.errstate(all="ignore"):
            result = function(np.asarray(a, np.float64))
        return np.where(np.isnan(result), np.nan, result)

    return apply


def _gross(function: Callable[[np.ndarray], np.ndarray]) -> Callable:
    """`function` on the upper 32 bits of f64 arrays: the lower 32 bits of operands are ignored, those of results are 0.

    Subnormal operands and results become zeros of their sign. PTX ISA 9.7.3, rcp.approx.ftz.f64, does not define the
    rounding of the 20 mantissa bits; here it is to nearest. Divisions and logarithms in double precision use such a
    result as their first approximation.
    """
    upper = np.uint64(0xFFFF_FFFF_0000_0000)
    exact = _f64(function)

    def flush(a):
        return np.where(np.abs(a) < 2.0**-1022, np.copysign(0.0, a), a)

    def apply(a):
        a = np.asarray(a, np.float64)
        result = exact(flush((a.view(np.uint64) & upper).view(np.float64)))
        # A carry out of the mantissa correctly increments the exponent; the lower bits of an infinity are zero.
        rounded = (result.view(np.uint64) + np.uint64(1 << 31) & upper).view(np.float64)
        return np.where(np.isnan(a), np.nan, flush(rounded))

    return apply


def _half(function: Callable, name: str, flush: bool) -> Callable:
    """An operation on raw f16 or bf16 codes from a `function` on float64, by a look-up table of all codes."""
    table: list[np.ndarray] = []

    def apply(codes):
        if not table:
            values = FORMATS[name].values
            if flush:
                values = flushed(values.astype(np.float32)).astype(np.float64)
            with np.errstate(all="ignore"):
                results = function(values)
            if flush:
                results = np.where(np.abs(results) < 2.0**-126, np.copysign(0.0, results), results)
            table.append(encode(results, FORMATS[name]))
        return table[0][codes]

    return apply


def _half_forms(function: Callable, type_: str, flush: bool) -> Semantics:
    """The f16, bf16, f16x2 or bf16x2 form of a function on float64."""
    codes = _half(function, type_.removesuffix("x2"), flush)
    if type_ == "f16":
        return Lanes("f16", "f16", lambda a: codes(np.asarray(a).view(np.uint16)).view(np.float16))
    if type_ == "bf16":
        return Lanes("bf16", "bf16", codes)

    def pair(a):
        high, low = codes(a >> np.uint32(16)), codes(a & np.uint32(0xFFFF))
        return (high.astype(np.uint32) << np.uint32(16)) | low

    return Lanes(type_, type_, pair)


def _approx_f32(name: str, modifiers: tuple[str, ...], function: Callable) -> Semantics:
    """Resolve `name.approx{.ftz}.f32`."""
    if modifiers not in (("approx", "f32"), ("approx", "ftz", "f32")):
        raise Unsupported(f"expected {name}.approx{{.ftz}}.f32")
    return Lanes("f32", "f32", _f32(function, "ftz" in modifiers))


@define("ex2")
def ex2(modifiers: tuple[str, ...]) -> Semantics:
    """ex2.approx{.ftz}.f32, ex2.approx.{f16|f16x2}, ex2.approx.ftz.{bf16|bf16x2}: 2^a.

    Hardware: within 2 ulp (f32), relative 2^-9.9 (f16), 2^-7 (bf16).
    """
    if modifiers in (("approx", "f16"), ("approx", "f16x2"), ("approx", "ftz", "bf16"), ("approx", "ftz", "bf16x2")):
        return _half_forms(np.exp2, modifiers[-1], "ftz" in modifiers)
    if modifiers[-1:] != ("f32",):
        raise Unsupported("expected ex2.approx{.ftz}.f32, ex2.approx.{f16|f16x2} or ex2.approx.ftz.{bf16|bf16x2}")
    return _approx_f32("ex2", modifiers, np.exp2)


@define("lg2")
def lg2(modifiers: tuple[str, ...]) -> Semantics:
    """lg2.approx{.ftz}.f32: log2 a; -inf for a zero, NaN for a negative number.

    Hardware: absolute 2^-22 for a in (0.5, 2), relative 2^-22 elsewhere.
    """
    return _approx_f32("lg2", modifiers, np.log2)


@define("sin")
def sin(modifiers: tuple[str, ...]) -> Semantics:
    """sin.approx{.ftz}.f32: sin a, a in radians; NaN for an infinity.

    Hardware: absolute 2^-20.5 for a in [-2 pi, 2 pi], 2^-14.7 in [-100 pi, 100 pi], no bound outside.
    """
    return _approx_f32("sin", modifiers, np.sin)


@define("cos")
def cos(modifiers: tuple[str, ...]) -> Semantics:
    """cos.approx{.ftz}.f32: cos a, a in radians; NaN for an infinity. Hardware: bounds as for sin."""
    return _approx_f32("cos", modifiers, np.cos)


@define("tanh")
def tanh(modifiers: tuple[str, ...]) -> Semantics:
    """tanh.approx.{f32|f16|f16x2|bf16|bf16x2}: the hyperbolic tangent; subnormals are kept.

    Hardware: relative 2^-11 (f32), absolute 2^-10.987 (f16), relative 2^-8 (bf16).
    """
    if len(modifiers) != 2 or modifiers[0] != "approx" or modifiers[1] not in ("f32", "f16", "f16x2", "bf16", "bf16x2"):
        raise Unsupported("expected tanh.approx.{f32|f16|f16x2|bf16|bf16x2}")
    if modifiers[1] == "f32":
        return Lanes("f32", "f32", _f32(np.tanh, flush=False))
    return _half_forms(np.tanh, modifiers[1], flush=False)


@define("rcp.approx")
def rcp_approx(modifiers: tuple[str, ...]) -> Semantics:
    """rcp.approx{.ftz}.f32: 1 / a; for a zero, an infinity of its sign. Hardware: within 1 ulp.

    rcp.approx.ftz.f64: an approximation from the upper halves of double-precision numbers (`_gross`).
    """
    if modifiers == ("ftz", "f64"):
        return Lanes("f64", "f64", _gross(lambda a: 1.0 / a))
    if modifiers not in (("f32",), ("ftz", "f32")):
        raise Unsupported("expected rcp.approx{.ftz}.f32 or rcp.approx.ftz.f64")
    return _approx_f32("rcp", ("approx", *modifiers), lambda a: 1.0 / a)


@define("sqrt.approx")
def sqrt_approx(modifiers: tuple[str, ...]) -> Semantics:
    """sqrt.approx{.ftz}.f32: the square root; -0 for -0, NaN for a negative number. Hardware: relative 2^-23."""
    return _approx_f32("sqrt", ("approx", *modifiers), np.sqrt)


@define("rsqrt.approx")
def rsqrt_approx(modifiers: tuple[str, ...]) -> Semantics:
    """rsqrt.approx{.ftz}.f32: 1 / sqrt a; for a zero, an infinity of its sign. Hardware: relative 2^-22.9.

    rsqrt.approx.f64: the same in double precision, subnormals kept. rsqrt.approx.ftz.f64: an approximation (`_gross`).
    """
    if modifiers == ("f64",):
        return Lanes("f64", "f64", _f64(lambda a: 1.0 / np.sqrt(a)))
    if modifiers == ("ftz", "f64"):
        return Lanes("f64", "f64", _gross(lambda a: 1.0 / np.sqrt(a)))
    if modifiers not in (("f32",), ("ftz", "f32")):
        raise Unsupported("expected rsqrt.approx{.ftz}.f32 or rsqrt.approx{.ftz}.f64")
    return _approx_f32("rsqrt", ("approx", *modifiers), lambda a: 1.0 / np.sqrt(a))


@define("div.approx")
def div_approx(modifiers: tuple[str, ...]) -> Semantics:
    """div.approx{.ftz}.f32: a / b; for 2^126 < |b| < 2^128 zero, or NaN if a is infinite, as the ISA defines.

    Hardware: within 2 ulp for |b| in [2^-126, 2^126].
    """

    def quotient(a, b):
        # For large b, 1 / b is subnormal, and the hardware's product a * (1 / b) flushes it to zero.
        large = np.isfinite(b) & (np.abs(b) > np.float32(2.0**126))
        return np.where(large, a * np.copysign(np.float32(0), b), np.divide(a, b))

    return _division("approx", modifiers, quotient)


@define("div.full")
def div_full(modifiers: tuple[str, ...]) -> Semantics:
    """div.full{.ftz}.f32: a / b. Hardware: within 2 ulp over the full range."""
    return _division("full", modifiers, np.divide)


def _division(name: str, modifiers: tuple[str, ...], quotient: Callable) -> Semantics:
    if modifiers not in (("f32",), ("ftz", "f32")):
        raise Unsupported(f"expected div.{name}{{.ftz}}.f32")
    flush = "ftz" in modifiers

    def divide(a, b):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        if flush:
            a, b = flushed(a), flushed(b)
        result = canonical(quotient(a, b))
        return flushed(result) if flush else result

    return Lanes("f32", "f32, f32", divide)
