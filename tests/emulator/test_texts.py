"""Damaged, hostile and oversized texts, and texts of which only a part can run."""

import random

import numpy as np
import pytest
from programs import launch, program

import ptxrt
from ptxrt.emulator import Emulator
from ptxrt.emulator import machine as machine_module
from ptxrt.errors import EmulatorFault, FileError, PtxSyntaxError, Unsupported
from tests.fuzz import texts

HEAD = ".version 9.0\n.target sm_120f\n.address_size 64\n"
ENTRY = ".visible .entry k() { ret; }\n"


def body(text, before=""):
    """An entry around a body whose first line is the sixth after `before`."""
    registers = ".reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<9>; .reg .f32 %f<9>; .reg .f64 %fd<9>;"
    return f"{HEAD}{before}.visible .entry k(.param .u64 out)\n{{ {registers}\n{text}\nret; }}\n"


def test_mutants():
    """A thousand damaged texts: each runs or raises an error of this package; syntax errors name their line."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    came = texts.run(seed, 1000)
    assert came["PtxSyntaxError"] > 100 and came["ran"] > 5 and came["EmulatorFault"] > 50, came


NINES = "9" * 5000
DAMAGED = {
    "alignment of 0": (HEAD + ".global .align 0 .u32 x;", "t.ptx:4: '.align 0' is no power of two"),
    "alignment of 3": (HEAD + ".global .align 3 .u32 x;", "is no power of two"),
    "alignment of a parameter": (HEAD + ".entry k(.param .align 0 .b8 x[4]) { ret; }", "is no parameter"),
    "braces in braces": (body("mov.b64 %rd1, " + "{" * 3000 + "%r1" + "}" * 3000 + ";"), "t.ptx:6: the text is damaged here"),
    "parentheses": (body("call f, " + "(" * 5000 + ")" * 5000 + ";"), "t.ptx:"),
    "operand without end": (body("ld.global.u32 %r1, [%rd1;"), r"t.ptx:6: the operand '\[%rd1' is not closed by '\]'"),
    "two bars": (body("setp.eq.u32 %p1|%p2|%p3, %r1, 0;"), "t.ptx:6: setp.eq.u32: a destination is a register"),
    "number of many digits": (body(f"mov.u32 %r1, {NINES};"), "t.ptx:6: the operand '999"),
    "displacement of many digits": (body(f"ld.global.u32 %r1, [%rd1+{NINES}];"), "t.ptx:6: "),
    "initializer of many digits": (HEAD + f".global .u32 x = {NINES};", "t.ptx:4: '999"),
    "initializer too long": (HEAD + ".global .u32 x[2] = {1, 2, 3};", "'x' has 2 elements, and its initializer 3"),
    "file of many digits": (HEAD + f'.file {NINES} "a"', "t.ptx:4: the text is damaged here"),
    "branch to nothing": (body("bra;"), "t.ptx:6: bra names no label"),
    "branch to a number": (body("bra 5;"), "t.ptx:6: bra names no label"),
    "branch to a register": (body("bra %r1;"), "t.ptx:6: bra names no label"),
    "switch without labels": (body("brx.idx %r1;"), "t.ptx:6: brx.idx names no label"),
    "switch over no table": (body("brx.idx %r1, A; A:"), "is no .branchtargets"),
    "string with a brace": (HEAD + '.section .debug "{"', "t.ptx:4: expected a section name and '{'"),
    "call of nothing": (body("call;"), "t.ptx:6: call: a call names a function of this text"),
    "empty vector": (body("mov.b64 %rd1, {};"), "t.ptx:6: an operand is missing"),
    "vector of three": (body("mov.b64 %rd1, {%r1, %r2, %r3};"), "t.ptx:6: mov.b64: a vector of 3 elements"),
    "vector of vectors": (body("mov.b64 %rd1, {{%r1}, %r2};"), "t.ptx:6: the vector"),
    "predicate as a number": (body("mov.pred %p1, %r1;"), "t.ptx:6: mov.pred: %r1 has not 1 bits"),
    "address in a predicate": (body("ld.global.u32 %r1, [%p1];"), "t.ptx:6: ld.global.u32: the pred register %p1 is no address"),
    "integer as an f32": (body("mov.f32 %f1, 1;"), "t.ptx:6: mov.f32: the integer 1 stands where a f32 literal is"),
    "integer as a summand": (
        body("add.f64 %fd1, %fd1, 2;"),
        "t.ptx:6: add.f64: the integer 2 stands where a f64 literal",
    ),
    "float as an integer": (body("mov.u32 %r1, 3.0;"), "t.ptx:6: mov.u32: a float literal stands where a u32 operand"),
    "float as a stored integer": (body("st.global.b32 [%rd1], 3.0;"), "t.ptx:6: st.global.b32: a float literal stands"),
    "wide source": (
        body("add.f32 %f1, %rd1, %f1;"),
        "t.ptx:6: add.f32: the b64 register %rd1 is wider than its f32 operand",
    ),
    "wide result": (
        body("add.u32 %rd1, %r1, %r1;"),
        "t.ptx:6: add.u32: the u32 result goes into the wider b64 register %rd1",
    ),
    "store to a parameter": (
        body("st.param.u64 [out], %rd1;"),
        "t.ptx:6: st.param.u64: 'out' is a parameter of the kernel",
    ),
    "modifier without a number": (body("cp.async.wait_group;"), "t.ptx:6: "),
    "nothing": ("", "t.ptx:1: a PTX text starts with"),
    "zeros": ("\0" * 4096, "t.ptx:1: "),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_text_is_refused_by_its_line(what):
    text, message = DAMAGED[what]
    with pytest.raises((PtxSyntaxError, Unsupported), match=message):
        module = Emulator().load_text(text, "t.ptx", whole=True)
        module.code("k")


def test_literals_that_are_allowed():
    """Of float literals: any for floats, those of at most as many bits for untyped operands (as ptxas)."""
    lines = """mov.f32 %f1, 0d3FF0000000000000; mov.f64 %fd1, 0f3F800000; mov.b32 %r1, 0f3F800000; mov.b64 %rd1, 1.0;
        mov.b32 %f1, 1; add.f32 %f1, %f1, 1.0; and.b32 %r1, %r1, 0f3F800000;
        cvt.rn.f32.s32 %f1, 1; cvt.u32.u8 %r1, %rd1;
        cvt.u8.u32 %rd1, %r1; ld.param.u8 %rd1, [out]; st.global.u8 [%rd1], %rd1; mov.b64 %rd1, {%r1, 0f3F800000};"""
    Emulator().load_text(body(lines), "t.ptx", whole=True).code("k")


def test_a_literal_beyond_f32_is_infinite():
    module = Emulator().load_text(HEAD + ".global .f32 x[2] = {1e999, 3.4028235e38};\n" + ENTRY, "t.ptx")
    assert module.constant("x") == np.array([np.inf, 3.4028235e38], np.float32).tobytes()


# Limits


def chain(length, calls=1):
    """Functions f0 .. f(length - 1); each calls the previous one `calls` times."""
    return "".join(f".func f{i}() {{ {f'call f{i - 1};' * calls if i else ''} ret; }}\n" for i in range(length))


def test_chains_of_calls():
    Emulator().load_text(body("call f62;", chain(63)), "t.ptx").code("k")
    with pytest.raises(
        Unsupported, match="'k' begins a chain of 65 functions that call each other; at most 64 are inlined"
    ):
        Emulator().load_text(body("call f63;", chain(64)), "t.ptx")
    with pytest.raises(Unsupported, match="calls itself"):
        Emulator().load_text(body("call f1;", ".func f0();\n" + chain(2).replace("{  ret", "{ call f1; ret")), "t.ptx")


def test_instructions_that_are_inlined():
    """A kilobyte of text that inlines to 2 ** 26 instructions is refused at load time."""
    text = body("call f25;", chain(26, calls=2))
    assert len(text) < 1400
    with pytest.raises(
        Unsupported, match="'k' has about 1.34e.08 instructions once its calls are inlined; at most 262144"
    ):
        Emulator().load_text(text, "t.ptx")
    Emulator().load_text(body("call f9;", chain(10, calls=2)), "t.ptx").code("k")


@pytest.mark.parametrize(
    "text, message",
    [
        (HEAD + ".global .b8 x[1099511627776];\n" + ENTRY, "variables .* have 1099511627776 bytes, 'x' 1099511627776 of them; the emulator keeps"),
        (HEAD + ".global .b8 x[3000000000];\n.global .b8 y[3000000000];\n" + ENTRY, "t.ptx:4: variables .* have 6000000000 bytes"),
        (HEAD + ".global .b8 x[99999999999999999999999];\n" + ENTRY, "is larger than any memory"),
        (body(".local .b8 x[600000]; mov.u64 %rd1, x; st.local.u32 [%rd1], %r1;"), "600000 bytes of local memory a thread; at most 524288"),
        (body(".shared .b8 x[300000]; mov.u32 %r1, x; st.shared.u32 [%r1], %r1;"), "300000 bytes of shared memory per block"),
        (HEAD + ".entry k(" + ", ".join(f".param .u64 p{i}" for i in range(4100)) + ") { ret; }", "32800 bytes of parameters"),
    ],
)  # fmt: skip
def test_sizes_have_limits(text, message):
    emulator = Emulator()
    with pytest.raises(ptxrt.PtxError, match=message):
        module = emulator.load_text(text, "t.ptx")
        emulator.launch(module.entries["k"], 1, 32, 0, bytes(module.entries["k"].param_bytes))


def test_large_variables_are_zero_and_take_no_memory_before_they_are_used():
    emulator = Emulator()
    module = emulator.load_text(HEAD + ".global .u32 x[500000000] = {7};\n" + ENTRY, "t.ptx")
    found = np.empty(3, np.uint32)
    assert emulator.read(module.address("x"), found).tolist() == [7, 0, 0]
    assert emulator.read(module.address("x") + 4 * 499_999_997, found).tolist() == [0, 0, 0]


def test_blocks_run_together_as_far_as_memory_goes(monkeypatch):
    """With 4 KB a thread, a block of 64 takes a quarter of a megabyte: a batch of one megabyte has four, not 256."""
    monkeypatch.setattr(machine_module, "_BATCH_BYTES", 1 << 20)
    sizes = []
    begin = machine_module.Batch.__init__
    monkeypatch.setattr(
        machine_module.Batch,
        "__init__",
        lambda batch, launch, first, blocks: (sizes.append(blocks), begin(batch, launch, first, blocks))[1],
    )
    text = program(
        ".local .b8 x[4096]; mov.u64 %rd2, x; cvta.local.u64 %rd2, %rd2; st.u32 [%rd2], %r0; ld.u32 %r1, [%rd2]; st.global.u32 [%rd0], %r1;"
    )
    out = np.zeros(64, np.uint64)
    launch(text, "k", out, grid=9, block=64, emulator=Emulator(checks=False))
    assert (out == np.arange(64)).all()
    assert sizes == [4, 4, 1]
    with pytest.raises(
        EmulatorFault, match="k: a block takes [0-9]+ bytes of the host's memory; the emulator takes 1048576 at most"
    ):
        launch(text, "k", np.zeros(1024, np.uint64), block=1024)


ENDLESS = program("L: add.u32 %r1, %r1, 1; bra L;")


@pytest.mark.parametrize("schedule", ["together", "warps"])
def test_a_time_limit(schedule):
    with ptxrt.using("emulator", timeout=0.3, budget=10**12, schedule=schedule) as backend:
        module = backend.emulator.load_text(ENDLESS, "t.ptx")
        with pytest.raises(
            EmulatorFault, match=r"does not end within the time limit of 0.3 seconds, which can be raised, at PTX line"
        ):
            backend.emulator.launch(module.entries["k"], 1, 32, 0, bytes(8))


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "1", True])
def test_a_time_limit_is_a_number_of_seconds(timeout):
    with pytest.raises(ptxrt.ArgumentError, match="timeout is .*; pass a number of seconds above 0, or None"):
        ptxrt.using("emulator", timeout=timeout)


# Texts of which only a part can run

TWO = (
    HEAD
    + """
.func helper() { tex.2d.v4.f32.s32 nothing; ret; }
.visible .entry bad() { call helper; ret; }
.visible .entry wide(.param .u64 a) {
    .reg .b32 %r<3>; .reg .b64 %rd<3>;
    add.f64 %r1, %r2, %r2; ret; }
.visible .entry good(.param .u64 a) {
    .reg .b32 %r<3>; .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [a]; mov.u32 %r1, 5; st.global.u32 [%rd1], %r1; ret; }
"""
)


def test_entries_that_can_run_do(tmp_path, emulator):
    path = tmp_path / "two.ptx"
    path.write_text(TWO)
    loaded = ptxrt.load(path)
    assert list(loaded) == ["good"] and set(loaded.refused) == {"bad", "wide"}
    x = np.zeros(1, np.uint32)
    loaded["good"](1, 1, x)
    assert x[0] == 5
    with pytest.raises(
        Unsupported, match="two.ptx:5: tex.2d.v4.f32.s32 is not implemented: no instruction is called 'tex'"
    ) as caught:
        loaded["bad"]
    assert caught.value.line == 5
    with pytest.raises(Unsupported, match="two.ptx:9: add.f64: the b32 register %r2 is read as 64 bits|does not fit"):
        loaded["wide"]
    with pytest.raises(KeyError, match="has no entry 'other'; it has good"):
        loaded["other"]


def test_a_text_without_an_entry_that_can_run_is_refused(tmp_path, emulator):
    path = tmp_path / "none.ptx"
    path.write_text(TWO[: TWO.index(".visible .entry good")])
    with pytest.raises(Unsupported, match="none.ptx:5: tex.2d"):
        ptxrt.load(path)


def test_a_missing_file(tmp_path, machine):
    with pytest.raises(FileError, match="no.ptx"):
        ptxrt.load(tmp_path / "no.ptx")
    with pytest.raises(FileError):
        ptxrt.load(tmp_path)


# Constant expressions and registers of device functions

EXPRESSIONS = {  # values of ptxas 13.0
    "3*4": 12,
    "(3+4)*2-1": 13,
    "~0 | 1<<5 | (5>3)?7:8": 7,
    "((3))": 3,
    "-(3)": -3,
    "!3 + !0": 1,
    "-7/2": -3,
    "-7 % 4": 1,
    "1 && 0 || 2": 1,
    "1<<3>>1": 4,
    "6 & 3 ^ 8 | 16": 26,
    "2 - 1 - 1": 0,
    "-1 < 0U": 0,
    "(.s64)0xffffffffffffffff < 0": 1,
    "-1 >> 1": -1,
    "3 == 3 != 0": 1,
    "WARP_SZ * 2": 64,
}


def test_constant_expressions():
    lines = "\n".join(
        f"mov.u64 %rd2, {text}; st.global.u64 [%rd1+8*{position}], %rd2;" for position, text in enumerate(EXPRESSIONS)
    )
    other = """mov.u64 %rd2, list+4*(1+1); ld.global.u32 %r1, [%rd2]; ld.global.u32 %r2, [list+2*6];
        st.global.u32 [%rd1+8*20], %r1;
        st.global.u32 [%rd1+160+4], %r2; mov.b64 %rd2, {1+1, 2*2}; st.global.u64 [%rd1+(21*8)], %rd2;"""
    out = np.zeros(22, np.int64)
    before = ".global .b32 list[4] = {1, 2, 1+2, (1+1)*2};\n"
    launch(body(f"ld.param.u64 %rd1, [out]; {lines} {other}", before), "k", out, block=1)
    assert out[: len(EXPRESSIONS)].tolist() == list(EXPRESSIONS.values())
    assert out[20:].view(np.uint32).tolist() == [3, 4, 2, 4]


@pytest.mark.parametrize("text", ["1/0", "3 % 0", "(3", "3 +", "08", "1 ? 2", "2 3", "(.u32)3"])
def test_what_is_no_constant_expression(text):
    with pytest.raises(PtxSyntaxError, match="t.ptx:6: "):
        Emulator().load_text(body(f"mov.u32 %r1, {text};"), "t.ptx", whole=True)


def test_parameters_in_registers():
    """Numbers, registers, predicates and variables in .param are passed; a result may be dropped."""
    before = """.func (.reg .b32 r) more (.reg .b32 a) { add.u32 r, a, 41; ret; }
.func (.reg .pred r, .reg .f32 s) mixed (.reg .pred a, .reg .f32 b, .param .b32 c)
{ .reg .b32 x; ld.param.b32 x, [c]; not.pred r, a; cvt.rn.f32.u32 s, x; add.f32 s, s, b; ret; }
"""
    calls = """ld.param.u64 %rd1, [out]; mov.u32 %r1, 1; call (%r2), more, (%r1);
        call (%r1), more, (%r2); call (%r1), more, (%r1);
        st.global.u32 [%rd1], %r1; call (%r1), more, (1+1); st.global.u32 [%rd1+4], %r1; call (_), more, (%r1);
        setp.eq.u32 %p1, %r1, 0; @%p1 call (%r1), more, (%r1); st.global.u32 [%rd1+8], %r1;
        { .param .b32 c, d; st.param.b32 [c], 5; call (d), more, (c); ld.param.b32 %r3, [d];
        call (%p1, %f1), mixed, (%p1, 2.5, c); }
        selp.u32 %r4, 1, 0, %p1; st.global.v4.u32 [%rd1+16], {%r3, %r4, %r4, %r4}; st.global.f32 [%rd1+24], %f1;"""
    out = np.zeros(8, np.uint32)
    launch(body(calls, before), "k", out, block=1)
    assert out.tolist() == [124, 43, 43, 0, 46, 1, int(np.float32(7.5).view(np.uint32)), 1]


def test_vector_registers_are_refused_where_they_are_used():
    text = (
        HEAD
        + """.func helper() { .reg .v4 .u32 %v; ret; }
.visible .entry bad() { call helper; ret; }
"""
        + ENTRY
    )
    loaded = Emulator().load_text(text, "t.ptx", whole=True)
    assert set(loaded.refused) == {"bad"}
    assert "t.ptx:4: '.reg .v4 .u32 %v': registers that are vectors are not supported" in str(loaded.refused["bad"])


@pytest.mark.parametrize(
    "line",
    [
        ".reg .b32 %x; .reg .u32 %x;",
        ".reg .b32 %x<3>; .reg .b32 %x2;",
        ".reg .b32 %x<3>; .reg .b32 %x<5>;",
        ".reg .b32 out;",
        ".reg .b32 %x; .shared .b32 %x;",
    ],
)
def test_a_name_is_declared_once_in_a_scope(line):
    with pytest.raises(PtxSyntaxError, match="t.ptx:6: '.*' is declared twice in one scope"):
        Emulator().load_text(body(line), "t.ptx", whole=True)
    again = line.split(";")[0] + "; { " + line.split(";")[0] + "; }"
    if "out" not in line:
        Emulator().load_text(body(again), "t.ptx", whole=True)


# Output of other compilers


def test_vectors_of_one_element():
    """Triton's masked accesses of one element."""
    out = np.arange(32, dtype=np.uint64) * 3
    body = """mov.b32 %r2, 0; setp.lt.u32 %p1, %r0, 20; @%p1 ld.global.b32 { %r2 }, [ %rd0 + 0 ];
    add.u32 %r3, %r2, 1; @%p1 st.global.b32 [ %rd0 + 0 ], { %r3 }; mov.b32 {%r4}, %r3;"""
    launch(program(body), "k", out)
    assert out.tolist() == [3 * i + (i < 20) for i in range(32)]


def test_a_vector_of_one_element_as_the_scale_of_an_mma():
    """Triton writes `{%r1}, {0, 0}` behind the fragments of dot_scaled."""
    opcode = "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0"
    body = f"""mov.b32 %r1, 0x38383838; mov.b32 %r2, 0x7f7f7f7f; mov.f32 %f1, 0f3F800000;
    {opcode} {{%f5, %f6, %f7, %f8}}, {{%r1, %r1, %r1, %r1}}, {{%r1, %r1}}, {{%f1, %f1, %f1, %f1}}, {{%r2}}, {{0, 0}}, {{%r2}}, {{0, 0}};
    st.global.b32 [%rd0], {{%f7}};"""
    out = np.zeros(64, np.float32)
    launch(program(body), "k", out)
    assert (out[::2] == 33).all()


def test_versions_to_9_4():
    for version in ("8.8", "9.1", "9.2", "9.3", "9.4"):
        assert Emulator().load_text(body("").replace(".version 9.0", f".version {version}"), "t.ptx").entries


ELSEWHERE = {
    "wgmma.fence.sync.aligned;": "wgmma.fence.sync.aligned is not implemented: warpgroups multiply on sm_90a alone; compile for sm_80 or sm_120a",
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 nothing;": "where the same code uses mma.sync",
    "wmma.load.a.sync.aligned.row.m16n16k16.f16 nothing;": "the layout of wmma fragments is not documented; use mma.sync and ldmatrix",
    "tcgen05.wait::ld.sync.aligned;": "tensor memory is of sm_100 and sm_103 alone; compile for sm_120a",
    "tensormap.replace.tile.global_address.global.b1024.b64 [%rd1], %rd2;": "encode one for each shape",
}


@pytest.mark.parametrize("instruction", ELSEWHERE)
def test_instructions_of_other_machines_are_refused_with_what_takes_their_place(instruction):
    with pytest.raises(Unsupported, match="t.ptx:6: .*" + ELSEWHERE[instruction]) as caught:
        Emulator().load_text(body(instruction), "t.ptx")
    assert caught.value.line == 6


def test_clusters_of_several_blocks_are_refused_when_a_text_is_loaded():
    text = body("").replace("out)\n{", "out) .explicitcluster .reqnctapercluster 2, 1, 1\n{")
    with pytest.raises(
        Unsupported,
        match="t.ptx:4: 'k' requires clusters of 2 blocks; a cluster has one block here: leave __cluster_dims__ out",
    ):
        Emulator().load_text(text, "t.ptx")
