"""Parsing and lowering of PTX text: strictness, laziness and speed."""

import time
from importlib import import_module

import pytest

from ptxrt.errors import EmulatorFault, PtxError
from ptxrt.ptx import PtxSyntaxError, parse
from ptxrt.ptx.ir import Address, Immediate, Location, Negated, Pair, Register, Special, Symbol, Vector
from ptxrt.ptx.lower import Branch, Exit, Jump, Switch, lower

reader = import_module("ptxrt.ptx.parse")

HEAD = ".version 9.0\n.target sm_120f\n.address_size 64\n"


def entry(body, params="", directives=""):
    return f"{HEAD}.visible .entry k({params}) {directives}\n{{\n{body}\n}}\n"


def statements(body):
    module = parse(entry(body), "t.ptx")
    return reader.body(module, module.functions["k"]).statements


# -- modules --------------------------------------------------------------------------------------------------------


def test_declarations():
    module = parse(
        HEAD.replace("sm_120f", "sm_90, debug")
        + """
    .file 1 "a//b{.cu"   // a comment with { and "
    .file 2 "c.cuh", 1234, 56
    /* one { more
       comment */
    .extern .func (.param .b32 result) other (.param .b64 a, .param .align 8 .b8 b[24]);
    .const .align 4 .b8 facts[36] = {128, 0, 0, 0, 1};
    .global .align 8 .u64 where[3] = {generic(number), number+4, 0x10};
    .visible .global .align 4 .u32 number = 5;
    .global .align 4 .f32 floats[2] = {0f3F800000, 2.5};
    .global .s16 negative[] = {-1, 2, 3};
    .extern .shared .align 1024 .b8 shared_raw[];
    .shared .align 16 .v2 .f32 pair;
    .visible .entry k(
        .param .u64 .ptr .align 1 k_param_0,
        .param .u64 .ptr .global .align 16 k_param_1,
        .param .align 8 .b8 k_param_2[20],
        .param .u16 k_param_3,
        .param .f32 k_param_4
    )
    .maxntid 128, 2
    .minnctapersm 3
    { ret; }
    .weak .func f { ret; }
    .section .debug_str
    {
    $L__info_string0:
    .b8 90
    .b8 78
    }
    """,
        "t.ptx",
    )
    assert (module.version, module.target, module.files) == ("9.0", "sm_90", {1: "a//b{.cu", 2: "c.cuh"})
    assert list(module.entries) == ["k"] and list(module.functions) == ["other", "k", "f"]
    kernel = module.entries["k"]
    assert [(p.type, p.offset, p.size, p.count, p.pointer) for p in kernel.params] == [
        ("u64", 0, 8, 0, True), ("u64", 8, 8, 0, True), ("b8", 16, 20, 20, False), ("u16", 36, 2, 0, False), ("f32", 40, 4, 0, False),
    ]  # fmt: skip
    assert kernel.param_bytes == 44 and kernel.maxntid == (128, 2, 1) and kernel.directives["minnctapersm"] == (3,)
    assert module.constant("facts") == bytes([128, 0, 0, 0, 1]).ljust(36, b"\0")
    assert module.constant("floats") == bytes.fromhex("0000803f00002040") and module.constant(
        "negative"
    ) == bytes.fromhex("ffff02000300")
    assert module.variables["where"].values == (Symbol("number"), Symbol("number", 4), 16)
    assert module.variables["shared_raw"].count == 0 and module.variables["shared_raw"].align == 1024
    assert (module.variables["pair"].count, module.variables["pair"].bytes) == (2, 8)
    with pytest.raises(PtxError, match="no variable 'nothing'"):
        module.constant("nothing")
    with pytest.raises(PtxError, match="holds addresses"):
        module.constant("where")


@pytest.mark.parametrize(
    "text,message",
    [
        ("hello", "expected a directive, found 'hello'"),
        ("", "starts with .version and .target"),
        (HEAD + ".frobnicate 3;", r"t.ptx:4: the directive .frobnicate is not known"),
        (HEAD + ".address_size 32", "this text has 32"),
        (HEAD + ".global .q32 x;", "no variable declaration"),
        (HEAD + ".global .u32 x = {sin(3)};", "'sin(3)' in an initializer".replace("(", r"\(").replace(")", r"\)")),
        (HEAD + ".entry k() .maxspeed 3 { ret; }", "the directive .maxspeed is not known on 'k'"),
        (HEAD + ".entry k(.param .q32 a) { ret; }", "is no parameter"),
        (HEAD + ".entry k() { ret;", "never closed; the text is cut off"),
        (HEAD + ".entry k() { ret; } }", "'}' without '{'"),
        (HEAD + ".entry k() { ret; } .entry k() { ret; }", "'k' is defined twice"),
    ],
)
def test_what_is_no_module(text, message):
    with pytest.raises(PtxSyntaxError, match=message):
        parse(text, "t.ptx")


def test_opcodes_are_listed_with_their_first_line():
    module = parse(
        entry(
            """.reg .b32 %r<9>; .reg .pred %p<3>; .reg .b32 lo, hi;
    .loc 1 2 3
    add.s32 %r1, %r2, %r3;
$L1: @%p1 bra $L1;
    @!%p2 ld.global.nc.L1::no_allocate.v2.f32 {%r1, %r2}, [%r3];
    mov.b64 {lo, hi}, %r4; add.s32 %r1, %r2, %r3;
    { mul.lo.s32 %r1, %r2, %r3; }
    call.uni (lo),
    other,
    (hi
    );
    bar.sync 0; ret;"""
        ),
        "t.ptx",
    )
    found = reader.opcodes(module, module.functions["k"])
    assert {opcode: reader.line_of(module, position) for opcode, position in found.items()} == {
        "add.s32": 8, "bra": 9, "ld.global.nc.L1::no_allocate.v2.f32": 10, "mov.b64": 11, "mul.lo.s32": 12, "call.uni": 13, "bar.sync": 17, "ret": 17,
    }  # fmt: skip


# -- bodies ---------------------------------------------------------------------------------------------------------


def test_operands():
    found = statements(
        """.reg .b32 %r<9>; .reg .pred %p<3>; .reg .f32 x, y; .reg .b64 %rd<3>; .local .align 8 .b8 depot[32];
    @!%p1 add.s32 %r1, -5, 0x1F;
    mov.f32 x, 0f3F800000; mov.f64 y, 0d3FF0000000000000; mov.f64 y, -1.5; mov.b32 %r1, 017; mov.b32 %r1, 0b101; mov.b32 %r1, 4000000000U;
    setp.lt.and.s32 %p0|%p2, %r1, WARP_SZ, !%p1;
    ld.global.v2.u32 {%r1, _}, [%rd1+-8]; ld.local.u32 %r1, [depot+4]; ld.shared.u32 %r1, [64]; st.local.u32 [%r2 - 4], %r3;
    mov.u32 %r1, %tid.x; mov.u64 %rd1, table+16; mov.u64 %rd2, depot;"""
    )
    operands = [instruction.operands for instruction in found]
    assert found[0].guard == (Register("%p1", "pred"), True)
    assert operands[0] == (Register("%r1", "b32"), Immediate(-5), Immediate(31))
    assert [row[1] for row in operands[1:7]] == [
        Immediate(0x3F800000, 32), Immediate(0x3FF0000000000000, 64), Immediate(0xBFF8000000000000, 64), Immediate(15), Immediate(5), Immediate(4000000000),
    ]  # fmt: skip
    assert operands[7] == (
        Pair(Register("%p0", "pred"), Register("%p2", "pred")),
        Register("%r1", "b32"),
        Immediate(32),
        Negated(Register("%p1", "pred")),
    )
    assert operands[8] == (Vector((Register("%r1", "b32"), Symbol("_"))), Address(Register("%rd1", "b64"), -8))
    assert [operands[9][1], operands[10][1], operands[11][0]] == [
        Address(Symbol("depot"), 4),
        Address(Immediate(64)),
        Address(Register("%r2", "b32"), -4),
    ]
    assert [row[1] for row in operands[12:]] == [Special("tid.x"), Symbol("table", 16), Symbol("depot")]


def test_scopes_rename_registers_and_labels():
    found = statements(
        """.reg .b32 a; .reg .pred p;
    L: mov.b32 a, 1; bra L;
    { .reg .b32 a; L: mov.b32 a, 2; @p bra L; bra M; { .reg .b32 a<2>; mov.b32 a1, a; } M: }
    { .reg .b32 a; L: mov.b32 a, 3; bra L; }
    mov.b32 a, 4;"""
    )
    moves = [statement.operands[0].name for statement in found if getattr(statement, "opcode", "") == "mov.b32"]
    assert moves == ["a", "a@2", "a@31", "a@4", "a"]
    targets = [statement.operands[0].name for statement in found if getattr(statement, "opcode", "") == "bra"]
    assert targets == ["L", "L@2", "M", "L@3"]


def test_source_lines_with_inlining():
    found = statements(
        """.reg .b32 %r<3>;
    .loc 1 10 3
    mov.b32 %r1, 1;
    .loc 2 20 5, function_name $L__info_string0, inlined_at 1 10 3
    mov.b32 %r1, 2;
    .loc 3 30 7, function_name $L__info_string1+12, inlined_at 2 20 5
    mov.b32 %r1, 3;"""
    )
    outer = Location(1, 10, 3)
    middle = Location(2, 20, 5, outer)
    assert [statement.location for statement in found] == [outer, middle, Location(3, 30, 7, middle)]


def test_source_lines_that_are_said_once():
    """nvcc states where a line was inlined when that changes, and omits it after a position without a line."""
    found = statements(
        """.reg .b32 %r<3>;
    .loc 2 20 5, function_name $a, inlined_at 1 10 3
    .loc 3 30 7, function_name $b, inlined_at 2 20 5
    mov.b32 %r1, 1;
    .loc 3 0 7
    mov.b32 %r1, 2;
    .loc 3 30 7
    mov.b32 %r1, 3;
    .loc 2 20 5, function_name $c, inlined_at 1 11 3
    .loc 3 30 7, function_name $d, inlined_at 2 20 5
    mov.b32 %r1, 4;
    .loc 3 30 7, function_name $b, inlined_at 2 20 5
    mov.b32 %r1, 5;"""
    )
    first, second = (Location(3, 30, 7, Location(2, 20, 5, Location(1, line, 3))) for line in (10, 11))
    assert [statement.location for statement in found] == [first, Location(3, 0, 7), first, second, first]


@pytest.mark.parametrize(
    "body,message",
    [
        (".reg .b32 %r<3>; add.s32 %r1, %r2, %r3;", r"t.ptx:6: the register '%r3' is not declared"),
        ("add.s32 %r1, 1, 2;", "the register '%r1' is not declared"),
        (".reg .b32 %r<3>; @%r1 bra L; L:", "the guard '@%r1' is no declared predicate"),
        ("bra L;", "the label 'L' is not defined"),
        ("L: L: ret;", "defined twice"),
        (".frob x;", "the directive .frob is not known in a function"),
        (".reg .q32 a;", "is no register declaration"),
        (".reg .b32 %r<3>; mov.b32 %r1, %smurf;", "'%smurf' is not declared and no special register"),
        (".reg .b32 %r<3>; mov.b32 %r1, 08;", "'08' is not understood"),
        (".reg .b32 %r<3>; add.s32 %r1, , %r2;", "an operand is missing"),
        ("ret", "'ret' is not understood"),
        ("#if 1\nret;", "'#if 1' is not understood"),
        (".loc one two\nret;", "'.loc one two' is not understood"),
        (".local .b8 x[];", "'x' has no length"),
    ],
)
def test_what_is_no_body(body, message):
    with pytest.raises(PtxSyntaxError, match=message):
        statements(body)


# -- lowering -------------------------------------------------------------------------------------------------------


def lowered(body, kind=lambda opcode: "plain", params=""):
    module = parse(entry(".reg .b32 %r<9>; .reg .pred %p<4>;" + body, params), "t.ptx")
    return lower(module, module.functions["k"], kind)


def test_blocks_of_a_loop_come_before_what_follows_it():
    program = lowered(
        """mov.b32 %r1, 0;
    HEAD: @%p1 bra OUT; add.s32 %r1, %r1, 1; @%p2 bra SKIP; add.s32 %r1, %r1, 2; SKIP: add.s32 %r2, %r1, 3; bra HEAD;
    OUT: mov.b32 %r3, 1; ret;"""
    )
    kinds = [type(block.terminator) for block in program.blocks]
    assert kinds == [Jump, Branch, Branch, Jump, Jump, Exit]
    head = program.blocks[1].terminator
    assert (head.taken, head.otherwise) == (5, 2) and program.blocks[4].terminator.target == 1
    assert program.blocks[5].instructions[0].operands[0].name == "%r3"


def test_a_path_out_of_line_comes_before_it_rejoins():
    program = lowered("@%p1 bra RARE; BACK: mov.b32 %r1, 1; ret; RARE: mov.b32 %r2, 2; bra BACK;")
    assert [block.instructions[0].operands[0].name for block in program.blocks[1:]] == ["%r2", "%r1"]


def test_guards_become_branches_where_threads_must_be_together():
    program = lowered(
        "@%p1 shfl.x %r1; @!%p1 bar.sync 0; mov.b32 %r2, 0; @%p2 ret;",
        lambda opcode: {"shfl.x": "collective", "bar.sync": "blocking"}.get(opcode, "plain"),
    )
    assert [block.instructions[0].opcode for block in program.blocks if block.instructions] == [
        "shfl.x",
        "bar.sync",
        "mov.b32",
    ]
    assert all(instruction.guard is None for block in program.blocks for instruction in block.instructions)


def test_chains_are_joined_and_dead_code_is_left_out():
    program = lowered("mov.b32 %r1, 0; bra A; mov.b32 %r8, 8; B: mov.b32 %r3, 2; ret; A: mov.b32 %r2, 1; bra B;")
    assert len(program.blocks) == 1
    moves = [instruction for instruction in program.blocks[0].instructions if instruction.opcode != "bra"]
    assert [instruction.operands[0].name for instruction in moves] == ["%r1", "%r2", "%r3"]


def test_variables_get_their_places():
    module = parse(
        HEAD
        + """.extern .shared .align 128 .b8 raw[]; .shared .align 16 .b8 tile[40]; .shared .b8 unused[1000];
    .entry k() { .reg .b32 %r<3>; .local .align 16 .b8 depot[24]; .local .b8 more[3]; .shared .align 8 .b8 own[4];
    mov.u32 %r1, raw; mov.u32 %r1, own; mov.u32 %r1, tile; st.local.u8 [more], 1; st.local.u8 [depot], 1; ret; }""",
        "t.ptx",
    )
    program = lower(module, module.functions["k"], lambda opcode: "plain")
    assert program.frame == {"depot": 0, "more": 24} and program.frame_bytes == 27
    assert (
        program.shared == {"k::own": 0, "tile": 16, "raw": 128}
        and program.shared_bytes == 56
        and program.dynamic == ("raw",)
    )


def test_switch():
    program = lowered("T: .branchtargets A, B, A; brx.idx %r1, T; A: mov.b32 %r2, 1; ret; B: mov.b32 %r2, 2; ret;")
    switch = program.blocks[0].terminator
    assert isinstance(switch, Switch) and switch.targets[0] == switch.targets[2] != switch.targets[1]


# -- loading --------------------------------------------------------------------------------------------------------


def test_unknown_opcodes_are_refused_when_a_text_is_loaded():
    from ptxrt.emulator import Emulator

    with pytest.raises(
        EmulatorFault, match=r"t.ptx:8: tex.2d.v4.f32.s32 is not implemented: no instruction is called 'tex'"
    ) as caught:
        Emulator().load_text(
            entry(".reg .b32 %r<9>;\nmov.b32 %r1, 0;\n@%p1 tex.2d.v4.f32.s32 {%r1, %r2, %r3, %r4}, [t, {%r1, %r2}];"),
            "t.ptx",
        )
    assert caught.value.line == 8
    with pytest.raises(PtxError, match="t.ptx:6: the directive .frob is not known in a function"):
        Emulator().load_text(entry(".frob x;"), "t.ptx")
    with pytest.raises(EmulatorFault, match="mov.b128 is not implemented"):
        Emulator().load_text(entry(".reg .b128 a; mov.b128 a, a;"), "t.ptx")
    with pytest.raises(EmulatorFault, match="t.ptx:6: add.rn.u32 is not implemented"):
        Emulator().load_text(entry(".reg .b32 %r<9>; add.rn.u32 %r1, %r1, 1;"), "t.ptx")


@pytest.mark.parametrize(
    "body,message",
    [
        ("add.s32 %r1, %r2;", "t.ptx:6: add.s32: expected 2 sources, found 1"),
        ("add.s32 %r1, %r2, %r3, %r4;", "1 operands too many"),
        ("add.s32 5, %r2, %r3;", "a destination is a register"),
        ("add.f64 %r1, %r2, %r3;", "is read as 64 bits|does not fit"),
        ("add.s32 %p1, %r2, %r3;", "does not go into the pred register"),
        ("add.s32 %r1, %p2, %r3;", "is read as 32 bits"),
        ("mov.b64 %r1, %r2;", "has not 64 bits"),
        ("ld.global.v2.u32 %r1, [%rd1];", "expected a vector of 2"),
        ("ld.global.u32 {%r1, %r2}, [%rd1];", "expected one destination, found a vector"),
        ("ld.global.u32 %r1, %r2;", r"expected an address \[..\]"),
        ("st.global.u32 [nowhere], %r2;", "'nowhere' is not defined"),
        ("add.s32 %r1|%r2, %r3, %r4;", "one destination, not d|p"),
    ],
)
def test_wrong_operands_are_refused_at_the_first_launch(body, message):
    from ptxrt.emulator import Emulator

    emulator = Emulator()
    module = emulator.load_text(entry(f".reg .b32 %r<9>; .reg .pred %p<4>; .reg .b64 %rd<4>; {body} ret;"), "t.ptx")
    with pytest.raises(PtxError, match=message):
        emulator.launch(module.entries["k"], 1, 32)


def test_a_large_module_loads_fast():
    """Loading five entries of about 4000 lines and launching one takes less than half a second of processor time."""
    from ptxrt.emulator import Emulator
    from ptxrt.emulator.instruction import resolve

    body = "".join(
        f".loc 1 {i} 3\n add.f32 %r{i % 200}, %r{(7 * i) % 200}, %r{(3 * i) % 199};\n mad.lo.s32 %r{(i + 1) % 200}, %r{i % 190}, 3, %r5; // comment\n"
        f" xor.b32 %r{(i + 2) % 200}, %r{i % 101}, {i};\n"
        for i in range(1000)
    )
    texts = "".join(f".visible .entry k{i}() {{\n.reg .b32 %r<200>;\n{body}ret;\n}}\n" for i in range(5))
    resolve("add.f32")  # families are imported once per process
    emulator = Emulator()
    best = 9.0
    for _ in range(3):
        started = time.process_time()
        module = emulator.load_text(HEAD + '.file 1 "x.cu"\n' + texts, "large.ptx")
        emulator.launch(module.entries["k3"], 1, 32)
        best = min(best, time.process_time() - started)
    assert best < 0.5
