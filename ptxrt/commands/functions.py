"""`run attention`, `run matmul`, `run quantize` and `run dequantize`: jobs of the friendly functions."""

from __future__ import annotations

import inspect

import click

from .job import Job, file_option, job_command, read_inputs
from .names import complete_formats, complete_operand_formats, manual_of

_BLOCK_FORMAT = "mxfp4"


def _attention():
    from ..ops.attention import attention

    return attention


def _quantize():
    from ..ops.quantize import quantize

    return quantize


def _dequantize():
    from ..ops.quantize import dequantize

    return dequantize


def _dtype_option(help: str) -> click.Option:
    return click.Option(["--dtype"], type=click.Choice(["f32", "f16", "bf16"]), help=help)


# The help of `run attention` on the keyword arguments of `ptxrt.attention`, by kind of option.
_ATTENTION_WORDS = {
    "qk": "Format of Q and K in Q K^T; f16 where q, k and v all are float16, else bf16.",
    "pv": "Format of the weights and V in P V; by default that of --qk.",
    "quantize": "in_kernel: quantize q and k as they are loaded.",
    "smooth_k": "Subtract the mean key: auto, true or false.",
    "layout": "Order of the axes: bhsd or bshd.",
}


_ATTENTION_NUMBERS = {
    "scale": "Factor of the scores; 1 / sqrt(dim) by default.",
    "softcap": "Scores become softcap tanh(score / softcap).",
}


_ATTENTION_FLAGS = {
    "causal": "Hide later keys from each query; aligned at the bottom right.",
    "smooth_q": "Subtract the mean of each 64 queries.",
    "return_lse": "Write lse, too: the logarithm of the sum of exponentials.",
    "normalize": "Divide the output by the sums; else write row_max and row_sum, too.",
}


_ATTENTION_FILES = {
    "mask": "The .npy of a mask of bool or float that broadcasts to [B, H, Sq, Sk].",
    "sinks": "The .npy of one logit for each head of q.",
    "key_lengths": "The .npy of the number of keys of each batch.",
    "cu_seqlens_q": "The .npy of where packed sequences begin and end in q.",
    "cu_seqlens_k": "The .npy of where they do in k and v.",
}


class Window(click.ParamType):
    """LEFT,RIGHT: whole numbers, or nothing for an open side."""

    name = "left,right"

    def convert(self, value, param, ctx):
        try:
            left, right = (int(side) if side.strip() else None for side in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not LEFT,RIGHT, such as 128,0 or 128, for open on the right", param, ctx)
        return left, right


def attention_command() -> click.Command:
    """Make `run attention`. Its options are the keyword arguments of `ptxrt.attention`."""
    function = _attention()
    params: list[click.Parameter] = []
    for p in inspect.signature(function).parameters.values():
        option = f"--{p.name.replace('_', '-')}"
        if p.kind is p.POSITIONAL_OR_KEYWORD:
            params.append(file_option(p.name, f"The .npy of {p.name}."))
        elif p.name in _ATTENTION_FILES:
            params.append(file_option(p.name, _ATTENTION_FILES[p.name], False))
        elif p.name in _ATTENTION_NUMBERS:
            params.append(click.Option([option], type=float, default=p.default, help=_ATTENTION_NUMBERS[p.name]))
        elif p.name in _ATTENTION_FLAGS:
            names = f"{option}/--no-{option[2:]}" if p.default else option
            params.append(click.Option([names], is_flag=True, default=p.default, help=_ATTENTION_FLAGS[p.name]))
        elif p.name in _ATTENTION_WORDS:
            completes = {"shell_complete": complete_operand_formats} if p.name in ("qk", "pv") else {}
            help = _ATTENTION_WORDS[p.name]
            shown = p.default is not None
            params.append(click.Option([option], default=p.default, show_default=shown, help=help, **completes))
        elif p.name == "window":
            params.append(
                click.Option(
                    [option],
                    type=Window(),
                    help="Number of keys that each query sees on either side; an omitted number means no limit.",
                )
            )
        elif p.name == "out_dtype":
            params.append(
                click.Option(
                    [option],
                    type=click.Choice(["bfloat16", "float16", "float32"]),
                    help="Dtype of the output; by default that of q.",
                )
            )
    params.append(_dtype_option("Convert q, k and v to this format first."))
    return job_command("attention", manual_of(function), params, attention_job, quantizes=True)


def attention_job(q, k, v, dtype, out_dtype, **options) -> Job:
    """Make the Job of `run attention`. The results are compared with exact attention of the quantized operands, and of
    q, k and v."""
    import numpy as np

    from ..formats import bf16
    from ..ops.attention import call_of, exact_attention

    inputs, notes = read_inputs({"q": q, "k": k, "v": v}, dtype)
    further, _ = read_inputs(
        {name: options.pop(name) for name in _ATTENTION_FILES if options[name] or options.pop(name)}, None
    )
    arrays = [array for _, array in inputs.values()]
    options |= {name: array for name, (_, array) in further.items()}
    options["smooth_k"] = {"true": True, "false": False}.get(options["smooth_k"], options["smooth_k"])
    options["out_dtype"] = bf16.dtype if out_dtype == "bfloat16" else out_dtype
    call = call_of(*arrays, **options)
    names = [
        f"out_{call.output}",
        *(["row_max", "row_sum"] if not call.normalize else ["lse"] if call.return_lse else []),
    ]

    def run():
        results = _attention()(*arrays, **options)
        return dict(zip(names, results if isinstance(results, tuple) else (results,)))

    meant = ("causal", "window", "softcap", *further)

    def wanted(results, *operands):
        out, lse = exact_attention(*operands, scale=call.scale, **{name: options[name] for name in meant})
        if not call.normalize:
            sums = np.exp(lse - np.where(np.isfinite(lse), results["row_max"], 0) * np.log(2))
            out, lse = out * sums[..., None], sums
        out = out.transpose(0, 2, 1, 3) if call.transposed else out
        return {names[0]: out, names[-1]: lse} if len(names) > 1 else {names[0]: out}

    def exact(results):
        return names[0], results[names[0]], wanted(results, call.q, call.k, call.v)[names[0]]

    def reference(results):
        return wanted(results, *call.way.multiplied(call))

    return Job(call.way.kernel.name, {**inputs, **further}, len(names), run, reference, exact, notes)


def quantize_command() -> click.Command:
    """Make `run quantize`: an .npy in, the .npz of a QuantizedArray out."""
    params = [
        file_option("x", "The file to quantize."),
        click.Option(
            ["--format"],
            default=_BLOCK_FORMAT,
            show_default=True,
            help="The block format.",
            shell_complete=complete_formats,
        ),
        click.Option(["--axis"], type=int, default=-1, show_default=True, help="The axis that is cut into blocks."),
        click.Option(["--scale-rule"], help="How scales are chosen."),
        click.Option(["--scale-layout"], default="linear", show_default=True, help="How scales lie: linear or 128x4."),
        click.Option(["--global-scale"], type=float, help="Global scale of nvfp4; computed if omitted."),
        click.Option(["--pad"], is_flag=True, help="Pad the axis with zeros to whole blocks."),
        _dtype_option("Convert x to this format first."),
    ]
    return job_command("quantize", manual_of(_quantize()), params, quantize_job, quantizes=True)


def quantize_job(x, format, dtype, **options) -> Job:
    """Make the Job of `run quantize`. The result is also compared with x."""
    import numpy as np

    from ..ops.quantize import quantize_reference

    inputs, notes = read_inputs({"x": x}, dtype)
    array = inputs["x"][1]

    def reference(_):
        expected = quantize_reference(array, format, **options)
        return {"codes": expected.codes, "scales": expected.scales}

    def exact(q):
        return "values", np.asarray(q), array

    return Job(f"quantize_{format}", inputs, 2, lambda: _quantize()(array, format, **options), reference, exact, notes)


def dequantize_command() -> click.Command:
    """Make `run dequantize`: the .npz of a QuantizedArray in, an .npy out."""
    params = [
        file_option("q", "The .npz of a quantized array."),
        _dtype_option("What to write; float32 by default."),
    ]
    return job_command("dequantize", manual_of(_dequantize()), params, dequantize_job)


def dequantize_job(q, dtype) -> Job:
    """Make the Job of `run dequantize`."""
    import numpy as np

    from ..formats import FORMATS
    from ..ops.quantized import Packed

    array = Packed.load(q)
    result = FORMATS[dtype or "f32"].dtype

    def reference(_):
        with np.errstate(over="ignore"):
            return {"x": np.asarray(array).astype(result)}

    return Job(
        f"dequantize_{array.format}", {"q": (q, array)}, 1, lambda: {"x": _dequantize()(array, result)}, reference
    )


# The help of `run matmul` on the keyword arguments of `ptxrt.matmul`, by kind of option. Results are floats: options of
# quantized ones have none.
_MATMUL_FILES = {
    "bias": "The .npy of one number for each row of b.",
    "residual": "The .npy of what is added at last.",
    "a_norm": "The .npy of the weights [K] of an RMS norm of a's rows.",
}


_MATMUL_WORDS = {
    "a_scale_rule": "How scales of a are chosen where the call quantizes it.",
    "b_scale_rule": "The same of b.",
}


_MATMUL_NUMBERS = {
    "alpha": "Factor of the product.",
    "a_global_scale": "Global scale of a where the call quantizes it to nvfp4; computed if omitted.",
    "b_global_scale": "The same of b.",
    "a_eps": "What --a-norm adds to the mean of squares.",
}


class Activation(click.ParamType):
    """The name of an activation, or swiglu(limit=7,alpha=1.702,offset=1) with any of these numbers."""

    name = "text"

    def convert(self, value, param, ctx):
        name, bracket, rest = value.strip().partition("(")
        if not bracket:
            return name
        try:
            words, end, behind = rest.partition(")")
            if not end or behind:
                raise ValueError
            pairs = (word.split("=") for word in words.split(",") if word.strip())
            return name.strip(), {key.strip(): float(number) for key, number in pairs}
        except ValueError:
            self.fail(f"{value!r} is no NAME or NAME(number=...), such as swiglu(limit=7,offset=1)", param, ctx)


def matmul_command() -> click.Command:
    """Make `run matmul`: arrays in .npy, quantized ones in .npz. Its options are those of `ptxrt.matmul` but the ones
    of quantized results.
    """
    params = [
        file_option("a", "The .npy, or .npz of a quantized array, of a [.., M, K]."),
        file_option("b", "The same of b [.., N, K]."),
    ]
    for p in inspect.signature(_matmul()).parameters.values():
        option = f"--{p.name.replace('_', '-')}"
        if p.name in _MATMUL_FILES:
            params.append(file_option(p.name, _MATMUL_FILES[p.name], False))
        elif p.name == "activation":
            help = "relu, gelu, gelu_tanh, silu or swiglu; also swiglu(limit=7,alpha=1.702,offset=1)."
            params.append(click.Option([option], type=Activation(), help=help))
        elif p.name in _MATMUL_WORDS:
            params.append(click.Option([option], help=_MATMUL_WORDS[p.name]))
        elif p.name in _MATMUL_NUMBERS:
            shown = p.default is not None
            params.append(
                click.Option([option], type=float, default=p.default, show_default=shown, help=_MATMUL_NUMBERS[p.name])
            )
        elif p.name in ("a_format", "b_format"):
            help = f"The format in which {p.name[0]} is multiplied; its own 16-bit type by default."
            params.append(click.Option([option], help=help, shell_complete=complete_operand_formats))
        elif p.name == "transpose_b":
            help = "Whether b is [N, K], not [K, N]."
            params.append(click.Option([f"{option}/--no-{option[2:]}"], is_flag=True, default=True, help=help))
        elif p.name == "splits":
            help = "1 does not split K; few rows split it by default."
            params.append(click.Option([option], type=int, help=help))
        elif p.name == "out_dtype":
            help = "Dtype of the result; by default that of a, or bfloat16 if a is quantized."
            params.append(click.Option([option], type=click.Choice(["bfloat16", "float16", "float32"]), help=help))
    params.append(_dtype_option("Convert a and b to this format first, unless they are quantized."))
    return job_command("matmul", manual_of(_matmul()), params, matmul_job, quantizes=True)


def matmul_job(a, b, dtype, out_dtype, **options) -> Job:
    """Make the Job of `run matmul`. The result is compared with the exact product of the quantized operands, and of a
    and b."""

    from ..formats import bf16
    from ..ops.gemm import call_of, exact_matmul, exact_rmsnorm, multiplied
    from ..ops.quantized import Packed

    packed = {name: (path, Packed.load(path)) for name, path in (("a", a), ("b", b)) if path.suffix == ".npz"}
    floats, notes = read_inputs({name: path for name, path in (("a", a), ("b", b)) if name not in packed}, dtype)
    further, _ = read_inputs(
        {name: options.pop(name) for name in _MATMUL_FILES if options[name] or options.pop(name)}, None
    )
    inputs = {**packed, **floats}
    options |= {name: array for name, (_, array) in further.items()}
    options["out_dtype"] = bf16.dtype if out_dtype == "bfloat16" else out_dtype
    arrays = inputs["a"][1], inputs["b"][1]
    call = call_of(*arrays, **options)
    name = f"out_{call.output}"
    ends = {word: options.get(word) for word in ("alpha", "activation", "bias", "residual")}

    def reference(_):
        return {name: exact_matmul(*multiplied(call), **ends)}

    def exact(results):
        rows, weights = arrays
        if "a_norm" in further:
            rows = exact_rmsnorm(rows, options["a_norm"], options["a_eps"])
        return name, results[name], exact_matmul(rows, weights, transpose_b=options["transpose_b"], **ends)

    rounds = any(format not in ("bf16", "f16") for format in (call.a.format, call.b.format))
    return Job(
        "gemm_",
        {"a": inputs["a"], "b": inputs["b"], **further},
        1,
        lambda: {name: _matmul()(*arrays, **options)},
        reference,
        exact if rounds and not packed else None,
        notes,
    )


def _matmul():
    from ..ops.gemm import matmul

    return matmul


FUNCTIONS = {"attention": _attention, "matmul": _matmul, "quantize": _quantize, "dequantize": _dequantize}


FUNCTION_COMMANDS = {
    "attention": attention_command,
    "matmul": matmul_command,
    "quantize": quantize_command,
    "dequantize": dequantize_command,
}
