"""The public interface: declarations and their errors, machines, device arrays, receipts, programs, comparison."""

import ctypes
import threading
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ptxrt
from ptxrt import kernel as kernel_module
from ptxrt.accuracy import Tolerance
from ptxrt.array import Box
from ptxrt.declaration import In, InOut, Out, Scalar, in_parts, scattered, strided, unaligned
from ptxrt.formats import bf16, e2m1x2, f16, f32, i32
from ptxrt.kernel import kernel
from ptxrt.launch import GRID_LIMITS, grid_of
from ptxrt.ops.transpose import transpose_naive, transpose_tiled


@pytest.fixture
def registry(monkeypatch):
    """An empty registry, so that tests may declare kernels."""
    monkeypatch.setattr(kernel_module, "REGISTRY", {})


@pytest.fixture
def sample(registry):
    @kernel(grid="rows*cols", fixed=dict(fields=4), cases=[dict(rows=2, cols=8)], flops="2*rows*cols")
    def sample(
        x: In[f32 | f16, "rows cols"],
        packed: In[e2m1x2, "rows cols/2"],
        y: Out[f32 | f16, "cols rows fields"],
        total: Out[f32, "rows"] = None,
        *,
        factor: Scalar[f32] = 2.0,
        steps: Scalar[i32],
    ):
        """Do something.

        In detail.
        """
        y[:] = factor * x.T[..., None]
        if total is not None:
            total[:] = x.sum(axis=1)

    return sample


X, PACKED = np.ones((2, 8), np.float32), np.zeros((2, 4), np.uint8)


# Declarations


@pytest.fixture
def negated(registry):
    @kernel(grid="count", cases=[dict(count=3, few=2)])
    def negated(
        places: In[i32, "few"],
        x: InOut[f32, "count"],
        pool: In[f32, "rows count", in_parts(strided)] = None,
        *,
        step: Scalar[i32] = 1,
    ):
        """Negate the elements at some places."""
        x[places] *= -1

    return negated


def test_arrays_changed_in_place_are_given_and_come_back_whole(negated):
    places, x = np.array([0, 2], np.int32), np.arange(1, 5, dtype=np.float32)
    assert negated.declaration == (
        "negated(places: In i32 [few], x: InOut f32 [count], in parts, "
        "pool: In f32 [rows, count], rows of any strides, in parts or None, step: i32)"
    )
    want = negated.reference(places, x, rows=1)
    assert list(want) == ["x"] and want["x"].tolist() == [-1, 2, -3, 4] and x.tolist() == [1, 2, 3, 4]
    bound = negated.bind(places, x, np.ones((7, 4), np.float32))
    assert bound.inputs["x"] is x and not bound.outputs and bound.bytes_moved == places.nbytes
    comparison, missed = negated.check({"x": want["x"] * [1, 1, 1, -1]}, want)["x"]
    assert comparison.mismatches == 1 and missed
    example = negated.example(negated.cases[0])
    assert example["x"].shape == (3,) and negated.written == (negated.by_name["x"],)
    x.flags.writeable = False
    for named, words in [(dict(), "x is missing"), (dict(x=True), "x is a bool"), (dict(x=x), "x is read-only")]:
        with pytest.raises(ptxrt.ArgumentError, match=words):
            negated.bind(places, **named, rows=1)


def test_arrays_changed_in_place_run_like_outputs(registry, machine):
    """Declare the entry of fill_f32 as one that changes its argument in place."""

    @kernel(grid="count", cases=[dict(count=1, value=1)])
    def fill_f32(x: InOut[f32, "count"], *, value: Scalar[f32]):
        """Set every element to a value."""
        x[:] = value

    host = np.arange(300, dtype=np.float32)
    assert fill_f32(host, value=2) is host and (host == 2).all()
    device = ptxrt.to_device(np.arange(600, dtype=np.float32))
    for value in (3, 4):  # the first call builds a plan, the second reuses it
        half = device[300:]
        assert fill_f32(half, value=value) is half
        assert device.to_numpy().tolist() == [*range(300), *[value] * 300]
    read_only = device.broadcast_to((2, 600))[0]
    for given, words in [([1.0], "x is a list"), (read_only, "x is read-only"), (device[::2], "strides")]:
        with pytest.raises(ptxrt.ArgumentError, match=words):
            fill_f32(given, value=1)
    prepared = ptxrt.prepare(fill_f32, device, value=5)
    assert prepared(device) is device and (device.to_numpy() == 5).all()


@given(st.data())
def test_boxes_overlap_where_they_share_a_byte(data):
    """Boxes that share a byte always overlap, and alternating arrays of pages are not reported."""

    def box_and_bytes():
        axes = data.draw(
            st.lists(st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24, 30])), max_size=3)
        )
        axes, width = sorted(axes, key=lambda axis: -axis[1]), data.draw(st.integers(1, 6))
        starts = [sum(i * stride for i, (_, stride) in zip(at, axes)) for at in np.ndindex(*(size for size, _ in axes))]
        return Box(tuple(axes), width), {start + byte for start in starts for byte in range(width)}

    (a, mine), (b, theirs), distance = box_and_bytes(), box_and_bytes(), data.draw(st.integers(-60, 60))
    shared = bool(mine & {place + distance for place in theirs})
    assert a.overlaps(b, distance) or not shared
    assert a.overlaps(b, distance) == b.overlaps(a, -distance)


def test_codes_and_scales_in_one_page_are_apart(emulator):
    whole = ptxrt.empty((7, 2 * 4 * (8 + 2)), np.uint8)  # pages: [2 tokens, 4 heads] codes of 8 bytes, then scales of 2
    codes, scales = whole[:, :64].reshape(7, 2, 4, 8), whole[:, 64:].reshape(7, 2, 4, 2)
    a, b, distance = Box.of(codes), Box.of(scales), scales.address - codes.address
    assert not a.overlaps(b, distance) and not b.overlaps(a, -distance) and a.overlaps(b, distance - 1)
    records = ptxrt.empty((7, 2, 4, 10), np.uint8)  # scales follow the codes of each token
    a = Box.of(records[..., :8])
    assert not a.overlaps(Box.of(records[..., 8:]), 8) and a.overlaps(Box.of(records[..., 7:]), 7)


def test_a_declaration_knows_its_parts(sample):
    assert sample.name == "sample" and sample.summary == "Do something."
    assert sample.axes == ("rows", "cols", "fields")
    assert [str(p) for p in sample.parameters] == [
        *("address of x", "address of packed", "address of y", "address of total"),
        *("f32 factor", "i32 steps", "axis rows", "axis cols", "axis fields"),
    ]
    assert sample.declaration == (
        "sample(x: In f32|f16 [rows, cols], packed: In e2m1x2 [rows, cols/2], y: Out f32|f16 [cols, rows, fields], "
        "total: Out f32 [rows] or None, factor: f32, steps: i32)"
    )
    assert [unit.name for unit in sample.units] == ["sample"] and sample.entries(sample.units[0]) == (
        "sample_f32",
        "sample_f16",
    )


def test_binding_solves_axes_formats_and_costs(sample):
    bound = sample.bind(X.astype(np.float16), PACKED, steps=3, total=True)
    assert bound.axes == dict(rows=2, cols=8, fields=4) and bound.format is f16 and bound.entry == "sample_f16"
    assert bound.bytes_moved == 2 * 8 * 2 + 8 + 8 * 2 * 4 * 2 + 2 * 4 and bound.flops == 32
    assert bound.scalars == dict(factor=np.float32(2), steps=np.int32(3))


def test_variants_name_units_and_entries(registry):
    @kernel(grid="n", variants=dict(dim=(32, 64), way=(1, 2)))
    def varied(x: In[f32 | bf16, "n dim"], y: Out[f32 | bf16, "n dim way"]):
        """Vary."""

    assert [u.name for u in varied.units] == [f"varied_dim{d}_way{w}" for d in (32, 64) for w in (1, 2)]
    assert varied.entries(varied.units[3]) == ("varied_dim64_way2_f32", "varied_dim64_way2_bf16")
    assert varied.bind(np.zeros((3, 64), ml_dtypes.bfloat16), way=1).entry == "varied_dim64_way1_bf16"


def test_axes_may_vary_together(registry):
    @kernel(grid="n", variants={"dim dim_v": ((32, 32), (64, 32)), "way": (1, 2)})
    def paired(q: In[f32, "n dim"], v: In[f32, "n dim_v"], y: Out[f32, "n way"]):
        """Pair."""

    assert [u.name for u in paired.units] == [f"paired_dim{d}_dim_v32_way{w}" for d in (32, 64) for w in (1, 2)]
    assert paired.units[2].variant == dict(dim=64, dim_v=32, way=1)
    assert (
        paired.bind(np.zeros((3, 64), np.float32), np.zeros((3, 32), np.float32), way=2).unit
        == "paired_dim64_dim_v32_way2"
    )
    words = r"dim is 64 in q, dim_v is 64 in v; compiled for 32 x 32, 64 x 32. Nearest: the largest is 64 x 32"
    with pytest.raises(ptxrt.ArgumentError, match=words):
        paired.bind(np.zeros((3, 64), np.float32), np.zeros((3, 64), np.float32), way=1)
    with pytest.raises(ptxrt.ArgumentError, match="way is 3 in the call; compiled for 1, 2"):
        paired.bind(np.zeros((3, 64), np.float32), np.zeros((3, 32), np.float32), way=3)


def test_the_smallest_variant_that_holds_the_sizes_is_filled_up(registry):
    @kernel(grid="n", variants={"dim dim_v": ((64, 64), (192, 128), (192, 192), (256, 256))}, filled=True)
    def filled(q: In[f32, "n dim"], v: In[f32, "n dim_v"], y: Out[f32, "n"]):
        """Fill."""

    for dim, dim_v, want in [
        (64, 64, "64_dim_v64"),
        (1, 3, "64_dim_v64"),
        (65, 1, "192_dim_v128"),
        (64, 130, "192_dim_v192"),
        (200, 8, "256_dim_v256"),
    ]:
        bound = filled.bind(np.zeros((3, dim), np.float32), np.zeros((3, dim_v), np.float32))
        assert bound.unit == f"filled_dim{want}" and bound.axes == dict(n=3, dim=dim, dim_v=dim_v)
    with pytest.raises(
        ptxrt.ArgumentError,
        match="dim is 257 in q, dim_v is 8 in v; compiled for 64 x 64, .*Nearest: the largest is 256 x 256",
    ):
        filled.bind(np.zeros((3, 257), np.float32), np.zeros((3, 8), np.float32))


@pytest.fixture
def optional(registry):
    """A kernel whose optional arrays introduce axes."""

    @kernel(grid="n", cases=[dict(n=4, parts=2, runs=1, starts=True, sums=True), dict(n=4, parts=3, runs=5)])
    def optional(
        x: In[f32, "n"],
        starts: In[i32, "parts", unaligned] = None,
        y: Out[f32, "n"] = None,
        sums: Out[f32, "runs n"] = None,
        *,
        factor: Scalar[f32] = 1,
    ):
        """Be optional."""

    return optional


def test_optional_inputs_may_be_left_out(optional):
    x, starts = np.zeros(4, np.float32), np.zeros(2, np.int32)
    bound = optional.bind(x, starts=starts, runs=1, y=True)
    assert bound.axes == dict(n=4, parts=2, runs=1) and [a.name for a in bound.present] == ["x", "starts", "y"]
    bound = optional.bind(x, None, parts=3, runs=1, y=True)
    assert bound.inputs == dict(x=x, starts=None) and bound.axes["parts"] == 3 and bound.bytes_moved == 32
    assert optional.bind(x, starts, sums=np.zeros((7, 4), np.float32)).axes["runs"] == 7
    assert "starts: In i32 [parts], starting at any element or None" in optional.declaration
    for call, words in [
        (lambda: optional.bind(x, y=True), "no array fixes parts, runs; pass parts=..., runs=..."),
        (
            lambda: optional.bind(x, starts, parts=3, runs=1),
            r"starts has shape \[2\], where dimension 0 \(parts\) must be 3",
        ),
        (lambda: optional.bind(None, starts, runs=1), "x is missing"),
        (lambda: optional.bind(x, False, parts=1, runs=1), "starts is a bool"),
        (
            lambda: optional.bind(x, starts, sums=np.zeros((7, 5), np.float32)),
            r"sums has shape \[7, 5\], where dimension 1 \(n\) must be 4|not \[7, 4\]",
        ),
    ]:
        with pytest.raises(ptxrt.ArgumentError, match=words):
            call()


def test_examples_give_the_optional_arrays_that_a_case_names(optional):
    first, second = optional.cases
    assert first.id == "n4-parts2-runs1-starts-sums"
    assert set(optional.example(first)) == {"x", "starts", "sums", "runs"} and set(optional.example(second)) == {
        "x",
        "parts",
        "runs",
    }


def test_an_array_that_may_be_omitted_has_none_for_its_default(registry):
    with pytest.raises(ValueError, match="x has the default 3"):

        @kernel(grid="n")
        def wrong(x: In[f32, "n"] = 3):
            """Be wrong."""


def test_strides_are_parameters_after_the_axes(registry):
    @kernel(grid="n")
    def placed(
        x: In[f32, "n rows cols", strided],
        m: In[f32, "n cols", scattered] = None,
        y: Out[f32, "n rows cols", strided] = None,
    ):
        """Place."""

    assert [str(p) for p in placed.parameters] == [
        *("address of x", "address of m", "address of y", "axis n", "axis rows", "axis cols"),
        *("stride 0 of x", "stride 1 of x", "stride 0 of m", "stride 1 of m", "stride 0 of y", "stride 1 of y"),
    ]
    assert placed.declaration.startswith(
        "placed(x: In f32 [n, rows, cols], rows of any strides, m: In f32 [n, cols], elements at any strides or None"
    )
    with ptxrt.using("emulator"):
        x = ptxrt.to_device(np.zeros((3, 5, 8), np.float32))
        m = ptxrt.to_device(np.zeros((8, 3), np.float32))
        turned = x.transpose(1, 0, 2)
        bound = placed.bind(turned, m[:, 1:2].transpose().broadcast_to((5, 8)), y=True)
        by_name = {a.name: bound.strides_of(a) for a in placed.arrays}
        assert by_name == dict(x=(8, 40), m=(0, 3), y=(24, 8))
        assert bound.bytes_moved == 4 * (120 + 8 + 120)  # repeated elements are read once
        assert placed.bind(turned).strides_of(placed.by_name["m"]) == (0, 0)
        for call, words in [
            (
                lambda: placed.bind(x.transpose(2, 1, 0)),
                r"strides of \[4, 32, 160\] bytes.*Pass its copy.., whose last axis lies without gaps",
            ),
            (lambda: placed.bind(x[:, :, 1:7]), "starts at .* no multiple of 16 bytes"),
            (
                lambda: placed.bind(ptxrt.to_device(np.zeros((3, 5, 6), np.float32))),
                r"strides of \[120, 24, 4\] bytes.*multiples of 16",
            ),
            (lambda: placed.bind(np.zeros((3, 5, 6), np.float32)), "multiples of 16"),
            (lambda: placed.bind(x[::-1]), r"strides of \[-160, 32, 4\] bytes.*from 0 on"),
            (lambda: placed.bind(x, y=x[:1].broadcast_to((3, 5, 8))), "y .*elements do not share memory"),
        ]:
            with pytest.raises(ptxrt.ArgumentError, match=words):
                call()


def test_the_reference_runs_without_a_machine(sample):
    want = sample.reference(X, PACKED, steps=0, total=True)
    assert want["y"].shape == (8, 2, 4) and want["y"].dtype == np.float32 and (want["y"] == 2).all()
    assert want["total"].tolist() == [8, 8]
    assert "total" not in sample.reference(X, PACKED, steps=0)


def test_references_of_approximate_kernels_are_float64(registry):
    @kernel(grid="n", tolerance=Tolerance("approximate", absolute=1e-3))
    def third(x: In[f32, "n"], y: Out[f32, "n"]):
        """Divide by three."""
        y[:] = x.astype(np.float64) / 3

    want = third.reference(np.ones(2, np.float32))
    assert want["y"].dtype == np.float64
    (comparison, missed) = third.check({"y": want["y"] + 1e-2}, want)["y"]
    assert missed == ["worst error 1.000e-02 > 1.000e-03"] and comparison.mismatches == 2


def test_examples_fit_their_case(sample):
    (case, other) = sample.cases
    assert (case.id, other.format) == ("rows2-cols8-f32", f16)
    example = sample.example(case, seed=1)
    assert example["x"].shape == (2, 8) and example["packed"].dtype == np.uint8 and "fields" in example
    assert sample.bind(**example, steps=1).format is f32
    np.testing.assert_array_equal(sample.example(case, seed=1)["x"], example["x"])
    assert (sample.example(case, seed=2)["x"] != example["x"]).any()


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda k: k.bind(), "x is missing; declared as f32\\|f16 \\[rows, cols\\]"),
        (lambda k: k.bind(X, PACKED, X, steps=1), "takes 2 inputs, 3 came"),
        (lambda k: k.bind(X, PACKED, x=X, steps=1), "given \\['x'\\] twice"),
        (lambda k: k.bind(X, PACKED, stepz=1), "given \\['stepz'\\], which it does not know"),
        (lambda k: k.bind(X, PACKED), "steps is missing"),
        (lambda k: k.bind(X, PACKED, steps=1.5), "steps is 1.5; declared as i32"),
        (lambda k: k.bind(X, PACKED, steps=2**31), "steps is 2147483648"),
        (lambda k: k.bind(X, PACKED, steps="1x"), "steps is '1x'"),
        (lambda k: k.bind(X, PACKED, steps=1, factor=1e300), "factor is 1e\\+300"),
        (lambda k: k.bind(X, PACKED, steps=1, factor=[1]), "factor is \\[1\\]"),
        (lambda k: k.bind([1.0], PACKED, steps=1), "x is a list"),
        (
            lambda k: k.bind(X.astype(np.int64), PACKED, steps=1),
            "x is int64 \\[2, 8\\].*Convert it to float32 or float16",
        ),
        (lambda k: k.bind(X[0], PACKED, steps=1), "1 dimension where 2 are needed"),
        (
            lambda k: k.bind(X[:, :7], PACKED, steps=1),
            "cols is 7 in x; it must be a multiple of 2, as packed.*Pad it to 8 or cut it to 6",
        ),
        (lambda k: k.bind(X, PACKED[:, :3], steps=1), "dimension 1 \\(cols/2\\) must be 4, since cols is 8 in x"),
        (lambda k: k.bind(X, PACKED[:1], steps=1), "dimension 0 \\(rows\\) must be 2, since rows is 2 in x"),
        (lambda k: k.bind(X, PACKED, steps=1, fields=5), "fields is 5 in the call; it is always 4"),
        (lambda k: k.bind(X, PACKED, steps=1, rows=3), "must be 3, since rows is 3 in the call"),
        (lambda k: k.bind(X, PACKED, steps=1, rows=-1), "rows is -1"),
        (lambda k: k.bind(X, PACKED, steps=1, y=None), "y is omitted"),
        (lambda k: k.bind(X, PACKED, steps=1, y=[1]), "y is a list"),
        (lambda k: k.bind(X, PACKED, steps=1, y=np.zeros((8, 2, 4), np.float16)), "y is float16, but x is float32"),
        (
            lambda k: k.bind(X, PACKED, steps=1, y=np.zeros((8, 2, 3), np.float32)),
            "y has shape \\[8, 2, 3\\], not \\[8, 2, 4\\]",
        ),
        (
            lambda k: k.bind(X, PACKED, steps=1, total=np.zeros(2)),
            "total is float64 \\[2\\]; declared as f32 \\[rows\\]",
        ),
        (lambda k: k.bind(X, PACKED, steps=1, total=np.broadcast_to(np.float32(0), 2)), "total is read-only"),
        (lambda k: k.bind(X, PACKED, steps=1, dtype=np.float16), "dtype is float16; the call allows float32"),
        (lambda k: k.bind(X[:0], PACKED[:0], steps=1, total=True, fields=0), "fields is 0 in the call; it is always 4"),
    ],
)
def test_what_does_not_fit_is_refused_in_the_words_of_the_declaration(sample, call, words):
    with pytest.raises(ptxrt.ArgumentError, match=words) as caught:
        call(sample)
    assert str(caught.value).startswith("sample")


def test_axes_that_nothing_fixes_are_asked_for():
    with pytest.raises(ptxrt.ArgumentError, match="no array fixes blocks_z, blocks_y, blocks_x; pass blocks_z=..."):
        ptxrt.kernels()["thread_identity"].bind()


def test_outputs_alone_need_a_dtype():
    codes, scales = np.zeros((1, 16), np.uint8), np.zeros((1, 1), np.uint8)
    with pytest.raises(ptxrt.ArgumentError, match="pass dtype= one of float32, float16, bfloat16"):
        ptxrt.kernels()["dequantize_mxfp4"].bind(codes, scales)


@pytest.mark.parametrize(
    "declare",
    [
        lambda: kernel(grid="planes"),
        lambda: kernel(grid="rows rows rows rows"),
        lambda: kernel(grid="rows", variants=dict(dim=(1,))),
        lambda: kernel(grid="rows", cases=[dict(row=1)]),
    ],
)
def test_declarations_that_contradict_themselves_are_refused(registry, declare):
    with pytest.raises(ValueError, match="copy"):

        @declare()
        def copy(x: In[f32, "rows"], y: Out[f32, "rows"]):
            """Copy."""


def test_unions_of_one_kernel_are_alike(registry):
    with pytest.raises(ValueError, match="all choices of one kernel are alike"):

        @kernel(grid="n")
        def copy(x: In[f32 | f16, "n"], y: Out[f32 | bf16, "n"]):
            """Copy."""


def test_grids_beyond_the_hardware_are_refused(registry):
    @kernel(grid="n heads")
    def wide(x: In[f32, "n heads"], y: Out[f32, "n heads"]):
        """Be wide."""

    bound = wide.bind(np.broadcast_to(np.float32(0), (100, 65536)))
    assert grid_of(bound, (32, 2, 1)) == (4, 32768, 1)
    with pytest.raises(
        ptxrt.ArgumentError, match="wide: heads is 65536, which takes 65536 blocks along y, where 65535 are allowed"
    ):
        grid_of(bound, (32, 1, 1))
    assert GRID_LIMITS[0] == 2**31 - 1


# Machines


def test_machines_say_what_is_there():
    there = ptxrt.machines()
    assert list(there) == ["native", "portable", "emulator"] and there["emulator"].available
    for name, machine in there.items():
        assert machine.detail and str(machine).startswith(f"{name}: ")


def test_using_holds_for_a_block_or_from_a_call():
    with ptxrt.using("emulator", ptx="portable") as outer:
        with ptxrt.using("emulator") as inner:
            assert ptxrt.selection.current() is inner is not outer
            ptxrt.using("emulator", arithmetic="hardware")
            assert "hardware" in ptxrt.selection.current().describe()
        assert ptxrt.selection.current() is outer


def test_a_choice_begins_any_number_of_blocks():
    with ptxrt.using("emulator", ptx="portable") as outer:
        choice = ptxrt.using("emulator")
        for _ in range(3):
            with choice as inner, choice:
                assert ptxrt.selection.current() is inner is not outer
            assert ptxrt.selection.current() is outer
        seen = []

        def other():
            with choice:
                seen.append(ptxrt.selection.current())
            seen.append(ptxrt.backend.scope().backend)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert seen == [inner, None]


def test_the_same_choice_is_the_same_machine():
    with ptxrt.using("emulator", checks=True) as one, ptxrt.using("emulator", checks=True) as two:
        assert one is two


def test_a_choice_holds_for_its_thread():
    seen = []
    with ptxrt.using("emulator", ptx="portable") as chosen:
        thread = threading.Thread(target=lambda: seen.append(ptxrt.backend.scope().backend))
        thread.start()
        thread.join()
        assert ptxrt.selection.current() is chosen
    assert seen == [None]


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("abacus", {}, "machine is 'abacus'; there is native, portable, emulator"),
        ("emulator", dict(ptx="old"), "ptx is 'old'"),
        ("emulator", dict(arithmetic="decimal"), "arithmetic"),
        ("emulator", dict(speed="high"), "speed"),
        ("emulator", dict(budget=0), "budget is 0"),
        ("emulator", dict(budget=[1]), "budget is \\[1\\]"),
        ("emulator", dict(checks="no"), "checks is 'no'"),
    ],
)
def test_wrong_choices_are_refused(name, options, words):
    with pytest.raises(ptxrt.ArgumentError, match=words):
        ptxrt.using(name, **options)


# Launches


def test_numpy_in_numpy_out(machine, rng):
    x = rng.standard_normal((5, 9)).astype(np.float32)
    y = transpose_tiled(x)
    assert isinstance(y, np.ndarray)
    np.testing.assert_array_equal(y, x.T)
    np.testing.assert_array_equal(transpose_tiled(x[::-1, ::2]), x[::-1, ::2].T)
    out = np.zeros((9, 10), np.float32)
    assert transpose_tiled(x, y=out[:, ::2]).base is out
    np.testing.assert_array_equal(out[:, ::2], x.T)
    assert not out[:, 1::2].any()
    np.testing.assert_array_equal(transpose_tiled(list(x)), x.T)


def test_the_receipt_says_what_ran(machine):
    transpose_naive(np.zeros((40, 70), np.float32))
    receipt = ptxrt.last_launches()[-1]
    assert (receipt.kernel, receipt.machine, receipt.entry) == ("transpose_naive", machine.name, "transpose_naive")
    assert receipt.bytes_moved == 2 * 40 * 70 * 4 and receipt.flops is None
    assert all(len(sizes) == 3 for sizes in (receipt.grid, receipt.block)) and machine.name in str(receipt)


def test_nothing_is_launched_for_an_empty_result(machine):
    before = len(ptxrt.last_launches())
    assert transpose_naive(np.zeros((0, 5), np.float32)).shape == (5, 0)
    assert transpose_naive(ptxrt.to_device(np.zeros((0, 5), np.float32))).to_numpy().shape == (5, 0)
    assert len(ptxrt.last_launches()) == before or before == 256


def test_threads_may_call_at_once(machine, rng):
    x = rng.standard_normal((33, 20)).astype(np.float32)
    results = [None] * 4

    def work(index):
        with ptxrt.using(machine.name):
            results[index] = transpose_tiled(x + index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, result in enumerate(results):
        np.testing.assert_array_equal(result, (x + index).T)


# Device arrays


def test_device_arrays_hold_what_was_put_in(machine, rng):
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16, np.uint8, np.int64):
        x = (rng.standard_normal((3, 4, 5)) * 50).astype(dtype)
        array = ptxrt.to_device(x[:, ::-1])
        assert (array.shape, array.dtype, array.ndim, array.size, array.nbytes) == (x.shape, x.dtype, 3, 60, x.nbytes)
        assert array.machine == machine.name and array.strides == x.strides and array.is_contiguous and len(array) == 3
        np.testing.assert_array_equal(array.to_numpy(), x[:, ::-1])
        np.testing.assert_array_equal(array.reshape(5, -1).to_numpy(), x[:, ::-1].reshape(5, -1))
    assert ptxrt.to_device(array) is array
    assert f"int64 [3, 4, 5] on {machine.name}" in repr(array)


def test_scalars_and_empty_arrays_travel(machine):
    assert ptxrt.to_device(np.float32(3)).to_numpy() == 3
    assert ptxrt.to_device(np.zeros((2, 0))).to_numpy().shape == (2, 0)
    assert ptxrt.empty((2, 3), "bfloat16").dtype == ml_dtypes.bfloat16
    assert ptxrt.empty(4, np.float32).shape == (4,)


def test_device_arrays_do_not_pass_for_numpy(emulator):
    array = ptxrt.to_device(np.zeros((2, 3), np.float32))
    with pytest.raises(TypeError, match="to_numpy"):
        np.asarray(array)
    with pytest.raises(TypeError):
        array + np.zeros((2, 3))
    assert not hasattr(array, "__cuda_array_interface__")
    with pytest.raises(AttributeError, match="no CUDA memory"):
        array.__cuda_array_interface__


def test_views_share_memory_as_those_of_numpy_do(emulator, rng):
    x = rng.standard_normal((3, 4, 6), dtype=np.float32)
    array = ptxrt.to_device(x)
    for view in (
        lambda a: a.transpose(),
        lambda a: a.transpose(1, 0, 2),
        lambda a: a.transpose((2, -3, 1)),
        lambda a: a[1],
        lambda a: a[-1, ..., 2],
        lambda a: a[:, 1:3],
        lambda a: a[..., ::2],
        lambda a: a[::-1, None, 2:0:-1],
        lambda a: a[1:1],
        lambda a: a[2, 3, 4],
        lambda a: a[...],
        lambda a: a.transpose(0, 2, 1).reshape(3, 2, 3, 4),
        lambda a: a[:, :2].reshape(3, 1, 12),
        lambda a: a[:, :, 1:3].reshape(-1, 2, 2, 1),
        lambda a: a.transpose(1, 0, 2)[1].reshape(3, 2, 3),
        lambda a: a.reshape(72)[3:40:5],
        lambda a: a[:, :1].reshape(3, 6),
        lambda a: a[1][1][1],
    ):
        there, want = view(array), view(x)
        assert there.shape == want.shape and there.memory is array.memory
        assert 0 in want.shape or all(a == b for a, b, n in zip(there.strides, want.strides, want.shape) if n > 1)
        np.testing.assert_array_equal(there.to_numpy(), want)
    wide = array[:, :1].broadcast_to((2, 3, 5, 6))
    np.testing.assert_array_equal(wide.to_numpy(), np.broadcast_to(x[:, :1], (2, 3, 5, 6)))
    assert not wide.writeable and [part.shape for part in array] == [(4, 6)] * 3
    for call, words in [
        (lambda: array.transpose(0, 1), "pass each of the 3 axes"),
        (lambda: array.transpose(0, 1, 1), "pass each of the 3 axes"),
        (lambda: array.transpose(0, 1, "2"), "pass each of the 3 axes"),
        (lambda: array.broadcast_to((3, 4, 7)), r"does not broadcast to \[3, 4, 7\]"),
        (lambda: array.broadcast_to((6,)), "does not broadcast"),
        (lambda: array.transpose().reshape(72), r"strides of \[4, 24, 96\] bytes has no view of shape \[72\]"),
        (lambda: array[3], "index out of range"),
        (lambda: array[0, 0, 0, 0], "is cut by whole numbers"),
        (lambda: array[[0, 1]], "is cut by whole numbers.*an array of indices needs a copy"),
        (lambda: array[np.array([0, 1])], "an array of indices needs a copy"),
        (lambda: array[[True, False]], "a mask needs a copy"),
        (lambda: array[True], "a mask needs a copy"),
        (lambda: array[1.5], "is cut by whole numbers"),
        (lambda: array[x > 0], "is cut by whole numbers.*a mask needs a copy"),
        (lambda: array[..., ...], "is cut by whole numbers"),
    ]:
        with pytest.raises(ptxrt.ArgumentError, match=words):
            call()


def test_views_with_gaps_are_read_where_something_wrote(emulator):
    """Gaps between the elements of a view are not read: here they are unwritten."""
    whole = ptxrt.empty((1, 1, 4, 24), np.float32)
    part = whole[..., 4:20]
    ptxrt.kernels()["cast"](ptxrt.to_device(np.ones((1, 1, 4, 16), np.float32)), y_f32=part)
    np.testing.assert_array_equal(part.to_numpy(), np.ones((1, 1, 4, 16)))
    with pytest.raises(ptxrt.EmulatorFault, match="where no kernel wrote"):
        whole.to_numpy()


def test_arrays_of_any_strides_go_in_and_out(machine, rng):
    """NumPy and device arrays, including broadcast ones, give the results of a contiguous copy."""
    cast = ptxrt.kernels()["cast"]
    x = rng.standard_normal((2, 5, 3, 16), dtype=np.float32)
    there = ptxrt.to_device(x)
    for view in (lambda a: a.transpose(0, 2, 1, 3), lambda a: a.transpose(3, 1, 2, 0), lambda a: a[:, ::2, :, 1:8]):
        want = np.ascontiguousarray(view(x))
        np.testing.assert_array_equal(cast(view(x), width=want.shape[-1], y_f32=True), want)
        np.testing.assert_array_equal(cast(view(there), width=want.shape[-1], y_f32=True).to_numpy(), want)
        out = ptxrt.to_device(np.zeros((*want.shape[::-1],), np.float32))
        cast(view(there), y_f32=out.transpose())
        np.testing.assert_array_equal(out.to_numpy(), want.transpose())
    repeated = np.broadcast_to(x[:, :1], (2, 5, 3, 16))
    np.testing.assert_array_equal(cast(repeated, width=16, y_f32=True), repeated)
    np.testing.assert_array_equal(
        cast(there[:, :1].broadcast_to((2, 5, 3, 16)), width=16, y_f32=True).to_numpy(), repeated
    )


def test_plans_know_strides(emulator, rng):
    """Calls that differ only in strides get separate plans, also when prepared; interleaved arrays do not overlap."""
    cast = ptxrt.kernels()["cast"]
    x = ptxrt.to_device(rng.standard_normal((4, 4, 4, 16), dtype=np.float32))
    for _ in range(2):
        for order in ((0, 1, 2, 3), (1, 0, 2, 3), (2, 1, 0, 3)):
            np.testing.assert_array_equal(
                cast(x.transpose(order), width=16, y_f32=True).to_numpy(), x.to_numpy().transpose(order)
            )
    turned, y = x.transpose(1, 0, 2, 3), ptxrt.empty((4, 4, 4, 16), np.float32)
    prepared = ptxrt.prepare(cast, turned, y_f32=y)
    np.testing.assert_array_equal(prepared(turned).to_numpy(), turned.to_numpy())
    with pytest.raises(ptxrt.ArgumentError, match=r"it was prepared with .*strides of \[256, 1024, 64, 4\] bytes"):
        prepared(x)
    for _ in range(2):
        with pytest.raises(ptxrt.ArgumentError, match="overlap in memory"):
            cast(x[:, :, :, :8], y_f32=x[:, :, :, 4:12])
        cast(x[:, :, :, :8], y_f32=x[:, :, :, 8:])
    np.testing.assert_array_equal(x.to_numpy()[..., 8:], x.to_numpy()[..., :8])


def test_wrong_views_are_refused(emulator):
    array = ptxrt.to_device(np.zeros((2, 3), np.float32))
    assert array.view(np.int32).dtype == np.int32
    assert array.view(np.int8).shape == (2, 12) and array.view(np.int8).view(np.float32).shape == (2, 3)
    for call in (lambda: array.reshape(7), lambda: array.reshape(-1, 4), lambda: array.view(np.int64)):
        with pytest.raises(ptxrt.ArgumentError):
            call()
    for key, words in (((..., ...), "may stand once"), ((0, 0, 0), "there are 2 axes"), ((..., 0, 0, 0), "2 axes")):
        with pytest.raises(ptxrt.ArgumentError, match=words):
            array[key]
    with pytest.raises(ptxrt.ArgumentError, match="Python objects"):
        ptxrt.to_device(np.array([{}]))


def test_memory_nothing_wrote_is_found(emulator):
    with pytest.raises(ptxrt.EmulatorFault):
        transpose_naive(ptxrt.empty((4, 4), np.float32))


def test_memory_is_given_back(emulator):
    array = ptxrt.to_device(np.zeros(4, np.float32))
    address = array.address
    del array
    with pytest.raises(ptxrt.EmulatorFault):
        emulator.read(address, np.empty(4, np.float32))


# Programs

SAXPY = """
.version 8.0
.target sm_80
.address_size 64

.visible .entry saxpy(
    .param .f32 a,
    .param .u64 .ptr .align 1 x,
    .param .u64 .ptr .align 1 y,
    .param .u32 n
)
{
    .reg .pred %p;
    .reg .b32 %r<6>;
    .reg .f32 %f<4>;
    .reg .b64 %rd<6>;
    ld.param.f32 %f1, [a];
    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [y];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p, %r5, %r1;
    @%p bra DONE;
    mul.wide.u32 %rd3, %r5, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    ld.global.f32 %f2, [%rd4];
    ld.global.f32 %f3, [%rd5];
    fma.rn.f32 %f3, %f1, %f2, %f3;
    st.global.f32 [%rd5], %f3;
DONE:
    ret;
}
"""


@pytest.fixture
def saxpy(machine, tmp_path):
    path = tmp_path / "saxpy.ptx"
    path.write_text(SAXPY)
    return ptxrt.load(path)


def test_a_program_is_a_mapping_of_entries(saxpy):
    assert list(saxpy) == ["saxpy"] and len(saxpy) == 1 and "saxpy" in saxpy
    assert "saxpy(f32, u64, u64, u32)" in repr(saxpy["saxpy"])
    with pytest.raises(KeyError, match="no entry 'daxpy'; it has saxpy"):
        saxpy["daxpy"]


def test_programs_run_on_arrays_and_scalars(saxpy, machine):
    x, y = np.arange(100, dtype=np.float32), np.ones(100, np.float32)
    saxpy["saxpy"](2, 64, 2.0, x, y, 100)
    np.testing.assert_array_equal(y, 2 * x + 1)
    saxpy["saxpy"]((2,), (64, 1), np.float32(-1), x, y, np.int32(50))
    np.testing.assert_array_equal(y, np.where(x < 50, x + 1, 2 * x + 1))
    device = ptxrt.to_device(y)
    saxpy["saxpy"](2, 64, 1.0, x, device, np.uint32(100))
    np.testing.assert_array_equal(device.to_numpy(), y + x)
    assert ptxrt.last_launches()[-1].entry == "saxpy" and ptxrt.last_launches()[-1].grid == (2, 1, 1)


def test_an_array_given_twice_is_one_array(saxpy):
    x = np.arange(8, dtype=np.float32)
    saxpy["saxpy"](1, 8, 1.0, x, x, 8)
    np.testing.assert_array_equal(x, 2 * np.arange(8))


def test_arrays_that_overlap_are_one_array_or_refused(saxpy):
    """Each array of the host is uploaded: a second one of the same memory would get back what the first one was."""
    x = np.arange(8, dtype=np.float32)
    saxpy["saxpy"](1, 8, 1.0, x[:], x[:], 8)
    np.testing.assert_array_equal(x, 2 * np.arange(8))
    for first, second in ((x[2:], x), (x, x[::2]), (x[::-1], x)):
        with pytest.raises(ptxrt.ArgumentError, match="arguments 1 and 2 are NumPy arrays that overlap"):
            saxpy["saxpy"](1, 2, 1.0, first, second, 2)
    read, whole = np.broadcast_to(np.float32(3), 8), np.zeros(8, np.float32)
    saxpy["saxpy"](1, 4, 1.0, whole[:4], whole[4:], 4)
    saxpy["saxpy"](1, 8, 1.0, read, whole, 8)
    np.testing.assert_array_equal(whole, read)
    np.testing.assert_array_equal(x, 2 * np.arange(8))


def test_layouts_and_read_only_arrays_are_respected(saxpy):
    x, y = np.ones(4, np.float32), np.zeros(8, np.float32)
    x.flags.writeable = False
    saxpy["saxpy"](1, 8, 1.0, x, y[::2], 4)
    assert y.tolist() == [1, 0] * 4


def test_wrong_program_calls_are_refused_before_the_launch(saxpy):
    entry, x = saxpy["saxpy"], np.zeros(4, np.float32)
    for call, words in [
        (lambda: entry(1, 8, 1.0, x, x), "takes 4 arguments, 3 came"),
        (
            lambda: entry(1, 8, np.float64(1), x, x, 4),
            "argument 0 is .*a float64 of 8 bytes; the parameter is f32, 4 bytes",
        ),
        (lambda: entry(1, 8, x, x, x, 4), "argument 0 is an array"),
        (lambda: entry(1, 8, 1.0, 5, x, 4), "argument 1 is 5; .*Pass an array or None"),
        (lambda: entry(1, 8, 1.0, np.uint64(5), x, 4), "Pass an array or None"),
        (lambda: entry(1, 8, 1.0, x, x, -1), "argument 3 is -1"),
        (lambda: entry(1, 8, 1.0, x, x, 1.5), "argument 3 is 1.5"),
        (lambda: entry(1, 8, 1.0, x, x, "4"), "argument 3 is a str"),
        (lambda: entry(1, 8, 1.0, x, x, None), "argument 3 is None"),
        (lambda: entry(0, 8, 1.0, x, x, 4), "grid is 0"),
        (lambda: entry((1, 70000), 8, 1.0, x, x, 4), "grid y is 70000"),
        (lambda: entry((1, 1, 1, 1), 8, 1.0, x, x, 4), "grid is"),
        (lambda: entry(1, 8.0, 1.0, x, x, 4), "block is 8.0"),
    ]:
        with pytest.raises(ptxrt.ArgumentError, match=words):
            call()


def test_a_fault_leaves_arrays_as_they_were(emulator, tmp_path):
    path = tmp_path / "saxpy.ptx"
    path.write_text(SAXPY)
    y = np.zeros(4, np.float32)
    with pytest.raises(ptxrt.EmulatorFault, match="saxpy"):
        ptxrt.load(path)["saxpy"](1, 64, 1.0, np.ones(64, np.float32), y, 64)
    assert not y.any()


def test_a_null_pointer_is_null(saxpy):
    saxpy["saxpy"](1, 8, 1.0, None, None, 0)


def test_what_cannot_be_loaded_says_why(emulator, tmp_path):
    path = tmp_path / "module"
    fatbin = ptxrt.units.fatbin_path("transpose_naive", True).read_bytes()
    for content, words in [
        (b"", "neither PTX text nor a fatbin"),
        (b"hello", "neither PTX text nor a fatbin"),
        (fatbin, "is a fatbin; the emulator runs PTX text"),
        (fatbin[:100], "truncated fatbin"),
        (fatbin[:10], "truncated fatbin"),
        (b"\x7fELF", "no 64-bit cubin"),
        (b"\x7fELF\x02".ljust(64, b"\xff"), "truncated cubin"),
    ]:
        path.write_bytes(content)
        with pytest.raises(ptxrt.FileError, match=words):
            ptxrt.load(path)
    path.write_text(SAXPY.replace("fma.rn.f32", "fma.rz.ftz.sat.f16x4"))
    with pytest.raises(ptxrt.PtxError, match="fma.rz.ftz.sat.f16x4"):
        ptxrt.load(path)
    for name, words in (
        ("nothing.ptx", f"does not exist in the folder {tmp_path}"),
        ("no/x.ptx", f"the folder {tmp_path}/no does not exist"),
    ):
        with pytest.raises(ptxrt.FileError, match=words):
            ptxrt.load(tmp_path / name)
    for path in (True, 0, None):
        with pytest.raises(ptxrt.FileError, match="pass the name of a file"):
            ptxrt.load(path)


def test_a_path_is_no_array(emulator):
    q = np.ones((1, 1, 4, 32), np.float32)
    for path, words in (
        ("x.npy", "x is a string, 'x.npy'; pass an array: numpy.load"),
        (Path("x.npy"), "x is a path, "),
        (b"x", "x is bytes"),
    ):
        for call in (
            lambda: ptxrt.quantize(path, "mxfp4"),
            lambda: ptxrt.to_device(path),
            lambda: ptxrt.kernels()["transpose_naive"](path),
            lambda: ptxrt.quantize_operand(path, "mxfp8", role="k"),
        ):
            with pytest.raises(ptxrt.ArgumentError, match=words):
                call()
        with pytest.raises(ptxrt.ArgumentError, match=words.replace("x is", "mask is", 1)):
            ptxrt.attention(q, q, q, mask=path)


@pytest.mark.parametrize("dtype", [">f4", ">f2"])
def test_arrays_of_the_other_byte_order(emulator, rng, dtype):
    x = rng.standard_normal((1, 2, 40, 32)).astype(dtype)
    native = x.astype(x.dtype.newbyteorder("="))
    for call in (
        lambda x: np.asarray(ptxrt.quantize(x, "mxfp4")),
        lambda x: ptxrt.to_device(x).to_numpy(),
        lambda x: ptxrt.attention(x, x, x, mask=np.zeros((40, 40), dtype), out_dtype=np.float32),
        lambda x: np.asarray(ptxrt.quantize_operand(x, "nvfp4", role="k")),
        lambda x: ptxrt.kernels()["cast"](x, y_f32=True, width=32),
        lambda x: ptxrt.attention(
            x, x, x, key_lengths=np.array([30], ">i4" if x is not native else "i4"), out_dtype=np.float32
        ),
    ):
        got, want = call(x), call(native)
        assert got.dtype == want.dtype and got.dtype.isnative
        np.testing.assert_array_equal(got, want)


def test_a_program_writes_into_arrays_of_the_other_byte_order(saxpy):
    x, y = np.arange(64).astype(">f4"), np.ones(64, ">f4")
    saxpy["saxpy"](1, 64, 2.0, x, y, 64)
    np.testing.assert_array_equal(y, 2 * np.arange(64) + 1)
    assert y.dtype == np.dtype(">f4")


@pytest.mark.parametrize("device", [-1, True, False, 0.0, 1.0, "0", np.array([0, 1]), np.array([]), [0]])
def test_a_device_is_a_whole_number(emulator, device):
    for call in (
        lambda: ptxrt.empty((2,), np.float32, device=device),
        lambda: ptxrt.zeros((2,), np.float32, device=device),
        lambda: ptxrt.to_device(np.ones(2), device=device),
        lambda: ptxrt.Stream(device=device),
        lambda: ptxrt.using("emulator", device=device),
    ):
        with pytest.raises(ptxrt.ArgumentError, match="device is .*; pass the number of a device, from 0 on"):
            call()
    assert ptxrt.empty((2,), np.float32, device=np.int8(0)).device == 0


# Comparison


def test_compare_gives_its_figures():
    want = np.array([3.0, 4.0, 0.0])
    figures = ptxrt.compare(want + [0, 0.5, 0], want)
    assert figures.relative_l2 == pytest.approx(0.1) and figures.worst_index == (1,) and figures.worst_error == 0.5
    assert figures.gain == pytest.approx(27 / 25) and figures.mismatches == 1 and figures.size == 3
    assert (figures.worst_got, figures.worst_want) == (4.5, 4.0) and "relative L2 1.000e-01" in str(figures)
    assert ptxrt.compare(2 * want, want).cosine == pytest.approx(1)
    assert ptxrt.compare(-want, want).cosine == pytest.approx(-1)


def test_compare_takes_special_values_seriously():
    want = np.array([1.0, np.nan, -np.inf])
    assert ptxrt.compare(want, want).relative_l2 == 0 and ptxrt.compare(want, want).mismatches == 0
    for got in ([1.0, 0.0, -np.inf], [1.0, np.nan, np.inf], [np.nan, np.nan, -np.inf]):
        figures = ptxrt.compare(got, want)
        assert figures.relative_l2 == np.inf and figures.worst_error == np.inf and figures.mismatches == 1
    zero = ptxrt.compare(np.zeros(3), np.zeros(3))
    assert (zero.relative_l2, zero.cosine, zero.gain) == (0, 1, 1)
    assert ptxrt.compare([1.0], [0.0]).relative_l2 == np.inf
    assert ptxrt.compare(np.full(2, 1e300), np.full(2, 1e300)).cosine == pytest.approx(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opposite = ptxrt.compare(np.array([1e308, -1e308]), np.array([-1e308, 1e308]))
        assert ptxrt.compare(np.array([np.longdouble("1e4000")]), np.array([1.0])).relative_l2 == np.inf
    assert opposite.relative_l2 == pytest.approx(2) and opposite.cosine == pytest.approx(-1)
    assert ptxrt.compare(np.zeros(0), np.zeros(0)).size == 0
    with pytest.raises(ptxrt.ArgumentError, match="got has shape \\[2\\], want \\[3\\]"):
        ptxrt.compare(np.zeros(2), np.zeros(3))


def test_scalars_of_ctypes_are_no_numbers(saxpy):
    with pytest.raises(ptxrt.ArgumentError, match="argument 3 is a c_int"):
        saxpy["saxpy"](1, 8, 1.0, None, None, ctypes.c_int(0))


def test_package_is_typed_and_versioned():
    assert (ptxrt.units.CHECKOUT / "ptxrt" / "py.typed").exists() and ptxrt.__version__.count(".") == 2


# Arbitrary calls

ANY_DTYPE = st.sampled_from(
    [np.float32, np.float16, ml_dtypes.bfloat16, np.float64, np.uint8, np.int32, bool, "U3", object]
)
ANY_SHAPE = st.lists(st.sampled_from([0, 1, 2, 3, 16, 31, 32, 64, 96, 288]), max_size=5)


@st.composite
def any_value(draw):
    """An array of any dtype, shape and layout, or something that is not an array."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from([None, True, False, 3, -1, 2.5, float("nan"), "text", [1.0], {}, 10**400]))
    array = np.broadcast_to(np.zeros((), draw(ANY_DTYPE)), draw(ANY_SHAPE))
    return array.T if draw(st.booleans()) else array


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_call_binds_or_is_an_argument_error(data):
    declared = data.draw(st.sampled_from(list(ptxrt.kernels().values())), label="kernel")
    names = [a.name for a in declared.arguments] + list(declared.axes)
    named = data.draw(st.dictionaries(st.sampled_from(names), any_value()), label="named")
    positional = data.draw(st.lists(any_value(), max_size=3), label="positional")
    dtype = data.draw(st.none() | ANY_DTYPE, label="dtype")
    try:
        bound = declared.bind(*positional, dtype=dtype, **named)
    except ptxrt.ArgumentError as error:
        assert declared.name in str(error)
    else:
        assert all(size >= 0 for size in bound.axes.values()) and bound.bytes_moved >= 0


@settings(max_examples=150, deadline=None)
@given(q=any_value(), k=any_value(), v=any_value(), out=any_value(), scale=any_value(), out_dtype=st.none() | ANY_DTYPE)
def test_any_call_of_attention_is_checked(q, k, v, out, scale, out_dtype):
    from ptxrt.ops.attention import call_of

    try:
        made = call_of(q, k, v, scale=scale, out_dtype=out_dtype, out=out, return_lse=True)
        assert made.q.shape[1] == made.group * made.k.shape[1]
    except ptxrt.ArgumentError as error:
        assert "attention" in str(error)
