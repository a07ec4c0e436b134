"""Branches, guards, calls, thread exits, fences and traps in isolation; and the messages of their faults."""

import re

import numpy as np
import pytest
from programs import launch, program

from ptxrt.emulator import Emulator, EmulatorFault
from ptxrt.emulator.instruction import Unsupported, resolve
from ptxrt.errors import PtxError

BRANCH_TABLE = """
    mov.u32 %r1, 0; and.b32 %r2, %r0, 3;
    @%p0 bra done;
table: .branchtargets zero, one, two, two;
    brx.idx %r2, table;
zero: mov.u32 %r1, 100; bra.uni done;
one: mov.u32 %r1, 200; bra done;
two: add.u32 %r1, %r2, 300;
done: st.global.u32 [%rd0], %r1;
"""


def test_brx():
    out = np.zeros((64, 2), np.uint32)
    launch(program("setp.eq.u32 %p0, %r0, 5;" + BRANCH_TABLE), "k", out, block=64)
    want = [0 if i == 5 else [100, 200, 302, 303][i & 3] for i in range(64)]
    assert out[:, 0].tolist() == want
    said = r"k: thread \(4, 0, 0\) of block \(0, 0, 0\) branches with index 4 of 4 targets at PTX line \d+ \(brx.idx\)"
    with pytest.raises(EmulatorFault, match=said) as caught:
        launch(
            program("setp.eq.u32 %p0, %r0, 999;" + BRANCH_TABLE.replace("and.b32 %r2, %r0, 3", "and.b32 %r2, %r0, 7")),
            "k",
            out,
            block=64,
        )
    assert caught.value.thread == (4, 0, 0) and caught.value.line > 0
    # Threads 0 to 31 are elsewhere, and the index is one number for all others.
    text = program("setp.lt.u32 %p0, %r0, 32;" + BRANCH_TABLE.replace("and.b32 %r2, %r0, 3", "mov.u32 %r2, 9"))
    for schedule in ("together", "warps"):
        with pytest.raises(EmulatorFault, match=r"thread \(32, 0, 0\) .* index 9 of 4"):
            launch(text, "k", out, block=64, emulator=Emulator(schedule=schedule))


def test_nested_divergence():
    body = """
    mov.u32 %r1, 0; and.b32 %r2, %r0, 1; setp.eq.u32 %p1, %r2, 0; setp.lt.u32 %p2, %r0, 12;
    @%p1 bra even;
    add.u32 %r1, %r1, 1; @%p2 bra low; add.u32 %r1, %r1, 10; bra join;
low: add.u32 %r1, %r1, 100; bra join;
even: add.u32 %r1, %r1, 1000; @!%p2 bra join; add.u32 %r1, %r1, 10000;
join: add.u32 %r1, %r1, 100000; st.global.u32 [%rd0], %r1;"""
    out = np.zeros((32, 2), np.uint32)
    launch(program(body), "k", out)
    want = [
        100000 + ((1000 + (10000 if i < 12 else 0)) if i % 2 == 0 else 1 + (100 if i < 12 else 10)) for i in range(32)
    ]
    assert out[:, 0].tolist() == want


def test_threads_end_at_different_places():
    body = "st.global.u32 [%rd0], 1; setp.lt.u32 %p1, %r0, 7; @%p1 ret; st.global.u32 [%rd0], 2; setp.lt.u32 %p1, %r0, 40; @%p1 exit; bar.sync 0; st.global.u32 [%rd0], 3;"
    out = np.zeros((64, 2), np.uint32)
    launch(program(body), "k", out, block=64)
    assert out[:, 0].tolist() == [1] * 7 + [2] * 33 + [3] * 24


def test_registers_of_inline_assembly_scopes():
    body = """
    mov.u32 %r1, 1;
    { .reg .pred p; .reg .b32 t<2>; setp.lt.u32 p, %r0, 3; mov.u32 t0, 5; selp.u32 t1, t0, 7, p; add.u32 %r1, %r1, t1; LOOP: add.u32 %r1, %r1, 1; setp.lt.u32 p, %r1, 20; @p bra LOOP; }
    { .reg .pred p; .reg .b32 t<2>; setp.ge.u32 p, %r0, 30; mov.u32 t0, 50; { .reg .b32 t0; mov.u32 t0, 1; add.u32 %r1, %r1, t0; } @p add.u32 %r1, %r1, t0; LOOP: sub.u32 %r1, %r1, 1; setp.gt.u32 p, %r1, 60; @p bra LOOP; }
    st.global.u32 [%rd0], %r1;"""
    out = np.zeros((32, 2), np.uint32)
    launch(program(body), "k", out)
    assert out[:30, 0].tolist() == [20] * 30 and out[30:, 0].tolist() == [60, 60]


FUNCTIONS = """
.func (.param .b32 r) twice (.param .b32 a) { .reg .b32 %r<4>; ld.param.b32 %r1, [a]; setp.eq.u32 %p, %r1, 5; @%p bra five; add.u32 %r2, %r1, %r1; st.param.b32 [r], %r2; ret;
five: st.param.b32 [r], 55; ret; }
.func (.param .align 8 .b8 r[16]) pair (.param .align 8 .b8 a[16], .param .b64 b)
{ .reg .b32 %r<8>; .reg .b64 %rd<4>; .local .align 8 .b8 depot[16];
  ld.param.v2.b32 {%r1, %r2}, [a]; ld.param.b64 %rd1, [a+8]; ld.param.b64 %rd2, [b];
  { .param .b32 x; st.param.b32 [x], %r1; .param .b32 y; call.uni (y), twice, (x); ld.param.b32 %r3, [y]; }
  st.local.u32 [depot+4], %r2; ld.local.u32 %r4, [depot+4]; add.s64 %rd3, %rd1, %rd2;
  st.param.v2.b32 [r], {%r3, %r4}; st.param.b64 [r+8], %rd3; ret; }
.func nothing () { ret; }
""".replace(".reg .b32 %r<4>;", ".reg .b32 %r<4>; .reg .pred %p;")


def test_calls():
    body = """
    setp.lt.u32 %p1, %r0, 20;
    { .param .align 8 .b8 p[16]; st.param.b32 [p], %r0; st.param.b32 [p+4], 9; st.param.b64 [p+8], %rd1; .param .b64 q; st.param.b64 [q], 1000; .param .align 8 .b8 s[16];
      call.uni (s), pair, (p, q); ld.param.b32 %r1, [s]; ld.param.b32 %r2, [s+4]; ld.param.b64 %rd2, [s+8]; }
    mov.u32 %r5, %r1;
    @%p1 call (%r5), twice, (%r2);
    call nothing;
    cvt.u32.u64 %r3, %rd2; add.u32 %r2, %r2, %r3; shl.b32 %r2, %r2, 8; add.u32 %r2, %r2, %r5; st.global.v2.u32 [%rd0], {%r1, %r2};"""
    out = np.zeros((32, 2), np.uint32)
    launch(program(body, before=FUNCTIONS), "k", out)
    for i in range(32):
        first = 55 if i == 5 else 2 * i
        assert out[i].tolist() == [first, ((9 + 8 * i + 1000) << 8) + (18 if i < 20 else first)]


def test_parameters_of_calls_that_stay_in_memory():
    functions = """.func (.param .b64 r) bytes (.param .align 8 .b8 a[8]) { .reg .b32 %r<4>; .reg .b64 %rd<4>;
    ld.param.u8 %r1, [a+1]; ld.param.u16 %r2, [a+2]; ld.param.s8 %r3, [a+7]; add.u32 %r1, %r1, %r2; add.u32 %r1, %r1, %r3; cvt.s64.s32 %rd1, %r1; st.param.b64 [r], %rd1; ret; }"""
    body = "{ .param .align 8 .b8 p[8]; st.param.b64 [p], %rd2; .param .b64 q; call (q), bytes, (p); ld.param.b64 %rd3, [q]; } st.global.u64 [%rd0], %rd3;"
    out = np.zeros(32, np.int64)
    launch(program("mov.b64 %rd2, 0xFE00000012345678;" + body, before=functions), "k", out)
    assert (out == 0x56 + 0x1234 - 2).all()


def test_recursion_and_missing_bodies_are_refused():
    def refuse(before, call, message):
        with pytest.raises(PtxError, match=re.escape(message)):
            launch(program(call, before=before), "k", np.zeros(32, np.uint64))

    refuse(".func f () { call f; ret; }", "call f;", "'f' calls itself")
    refuse(".func g (); .func f () { call g; ret; } .func g () { call f; ret; }", "call f;", "calls itself")
    refuse(
        ".extern .func (.param .b64 r) malloc (.param .b64 a);",
        "call (%rd1), malloc, (%rd1);",
        "'malloc' is called and has no body",
    )
    refuse(".func f () { ret; }", "call f, (%r1);", "other arguments")
    refuse(
        "",
        "call (%r1), %rd1, (%r2);",
        "call through '%rd1' (a pointer to a function, or a virtual function) is not supported",
    )


INDIRECT = """
.visible .entry other() { .loc 1 2 0
    ret; }
.visible .entry k()
{
    .reg .b32 %f<3>; .reg .b64 %rd<9>;
    .loc 1 4 0
    mov.u64 %rd8, 0;
    .loc 1 5 41
    { // callseq 0, 0
    .param .b32 param0;
    st.param.f32 [param0], %f1;
    .param .b32 retval0;
    prototype_0 : .callprototype (.param .b32 _) _ (.param .b32 _);
    call (retval0),
    %rd8,
    (
    param0
    )
    , prototype_0;
    ld.param.f32 %f2, [retval0];
    } // callseq 0
    ret;
}
"""


@pytest.mark.parametrize("files, source", [('.file 1 "pointers.cu"', "pointers.cu:5"), ("", "?:5")])
def test_a_call_of_a_function_pointer_is_refused_with_its_source_line(files, source):
    """The text is what nvcc 13.0 emits for a table of function pointers."""
    header = program("").split(".visible")[0]
    emulator = Emulator()
    module = emulator.load_text(f"{header}{INDIRECT}{files}\n", "t.ptx")
    emulator.launch(module.entries["other"], 1, 32)
    with pytest.raises(Unsupported) as caught:
        emulator.launch(module.entries["k"], 1, 32)
    assert list(module.refused) == ["k"]
    line = (header + INDIRECT).split("\n").index("    call (retval0),") + 1
    assert str(caught.value) == (
        f"t.ptx:{line}: call through '%rd8' (a pointer to a function, or a virtual function) is not supported: "
        f"only functions of this text are called, by their names ({source})"
    )


def test_an_opcode_is_refused_with_its_source_line():
    header = program("").split(".visible")[0]
    text = f'{header}.visible .entry k() {{\n.loc 1 7 3\nret;\n.loc 1 9 1\ntex.2d.v4.f32.s32 nothing;\n}}\n.file 1 "t.cu"\n'
    with pytest.raises(Unsupported, match=r"is not implemented: no instruction is called 'tex' \(t.cu:9\)$"):
        Emulator().load_text(text, "t.ptx")


def test_special_registers():
    names = ["tid.x", "tid.y", "tid.z", "ntid.x", "ntid.y", "ntid.z", "ctaid.x", "ctaid.y", "ctaid.z", "nctaid.x", "nctaid.y", "nctaid.z", "laneid", "warpid",
             "lanemask_eq", "lanemask_lt", "lanemask_le", "lanemask_gt", "lanemask_ge", "dynamic_smem_size", "nwarpid"]  # fmt: skip
    block, grid = (5, 3, 3), (3, 2, 2)
    threads, blocks = 45, 12
    body = f"""
    mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z; mov.u32 %r4, %ctaid.x; mov.u32 %r5, %ctaid.y; mov.u32 %r6, %ctaid.z;
    mad.lo.u32 %r7, %r3, 3, %r2; mad.lo.u32 %r7, %r7, 5, %r1; mad.lo.u32 %r8, %r6, 2, %r5; mad.lo.u32 %r8, %r8, 3, %r4; mad.lo.u32 %r9, %r8, 45, %r7;
    ld.param.u64 %rd2, [out]; mul.wide.u32 %rd3, %r9, {4 * len(names)}; add.s64 %rd4, %rd2, %rd3;
    """ + " ".join(f"mov.u32 %r10, %{name}; st.global.u32 [%rd4+{4 * i}], %r10;" for i, name in enumerate(names))
    out = np.zeros((blocks, threads, len(names)), np.uint32)
    launch(program(body), "k", out, grid=grid, block=block, shared_bytes=64)
    for number in range(blocks):
        for thread in range(threads):
            lane = thread % 32
            want = [
                thread % 5,
                thread // 5 % 3,
                thread // 15,
                *block,
                number % 3,
                number // 3 % 2,
                number // 6,
                *grid,
                lane,
                thread // 32,
            ]
            want += [1 << lane, (1 << lane) - 1, (2 << lane) - 1, 2**32 - (2 << lane), 2**32 - (1 << lane), 64, 2]
            assert out[number, thread].tolist() == want


def test_clocks_go_forward():
    body = "mov.u64 %rd2, %clock64; mov.u32 %r1, 50; L: sub.u32 %r1, %r1, 1; setp.ne.u32 %p1, %r1, 0; @%p1 bra L; mov.u64 %rd3, %clock64; sub.s64 %rd3, %rd3, %rd2; mov.u64 %rd4, %globaltimer; mov.u32 %r2, %clock; st.global.u64 [%rd0], %rd3;"
    out = np.zeros(32, np.uint64)
    launch(program(body), "k", out)
    assert (out >= 100).all()


def test_what_has_no_effect():
    body = (
        "membar.gl; membar.cta; fence.acq_rel.gpu; fence.sc.sys; fence.proxy.async; "
        "fence.mbarrier_init.release.cluster; fence.proxy.tensormap::generic.acquire.gpu [%rd0], 128; "
        "fence.proxy.tensormap::generic.release.gpu; prefetch.tensormap [%rd0]; nanosleep.u32 100; "
        "griddepcontrol.wait; griddepcontrol.launch_dependents; prefetch.global.L2 [%rd0]; "
        "applypriority.global.L2::evict_normal [%rd0], 128; discard.L2 [%rd0], 128; pmevent 3; st.global.u64 "
        "[%rd0], %rd1;"
    )
    out = np.zeros(32, np.uint64)
    launch(program(body), "k", out)
    assert out.tolist() == [8 * i for i in range(32)]


def test_trap():
    with pytest.raises(
        EmulatorFault, match=r"thread \(3, 0, 0\) of block \(0, 0, 0\) executes a trap at PTX line 12 \(trap\)"
    ):
        launch(program("setp.eq.u32 %p1, %r0, 3; @%p1 trap;"), "k", np.zeros(32, np.uint64))


def test_runaway():
    with pytest.raises(
        EmulatorFault,
        match=r"k: thread \(0, 0, 0\) of block \(0, 0, 0\) does not end within the budget of 1000 instructions .* at PTX line \d+",
    ):
        launch(program("L: add.u32 %r1, %r1, 1; bra L;"), "k", np.zeros(32, np.uint64), emulator=Emulator(budget=1000))


def test_deadlock():
    body = "setp.lt.u32 %p1, %r0, 32; @%p1 bra L; bar.sync 1, 64; bra D; L: bar.sync 2, 64; D: ret;"
    with pytest.raises(
        EmulatorFault,
        match=r"k: thread \(32, 0, 0\) of block \(0, 0, 0\) is in a deadlock: no thread can run; 32 threads wait at barrier 1; 32 threads wait at barrier 2.*64 of 64 threads wait and 0 have exited at PTX line 12",
    ) as caught:
        launch(program(body), "k", np.zeros(64, np.uint64), block=64)
    assert caught.value.thread == (32, 0, 0)


def test_diverged_warps():
    with pytest.raises(EmulatorFault, match="aligned barrier with 16 of the 32 threads"):
        launch(
            program("setp.lt.u32 %p1, %r0, 16; @%p1 bra L; bar.sync 0; L: bar.sync 0;"), "k", np.zeros(32, np.uint64)
        )
    shuffle = "setp.lt.u32 %p1, %r0, 16; @%p1 bra L; mov.u32 %r2, -1; shfl.sync.bfly.b32 %r1, %r0, 1, 31, {mask}; bra D; L: bar.sync 1, 64; D: ret;"
    with pytest.raises(
        EmulatorFault, match=r"membermask 0xffffffff names threads that are elsewhere \(lanes 0x0000ffff\)"
    ):
        launch(program(shuffle.format(mask="%r2")), "k", np.zeros(32, np.uint64))
    with pytest.raises(EmulatorFault, match="membermask does not name it"):
        launch(program(shuffle.format(mask="0x0000ffff")), "k", np.zeros(32, np.uint64))


def test_a_rare_path_rejoins_its_warp():
    """Threads on an out-of-line path rejoin their warp before the warp executes a shuffle."""
    body = """
    mov.u32 %r1, %r0; setp.eq.u32 %p1, %r0, 17; @%p1 bra RARE;
BACK: shfl.sync.idx.b32 %r2, %r1, 17, 31, 0xffffffff; st.global.u32 [%rd0], %r2; ret;
RARE: mov.u32 %r3, 100; LOOP: sub.u32 %r3, %r3, 1; setp.ne.u32 %p2, %r3, 0; @%p2 bra LOOP; mov.u32 %r1, 4711; bra BACK;"""
    out = np.zeros((32, 2), np.uint32)
    launch(program(body), "k", out)
    assert (out[:, 0] == 4711).all()


def test_exited_threads_do_not_count_in_a_mask():
    body = "setp.ge.u32 %p1, %r0, 20; @%p1 exit; vote.sync.ballot.b32 %r1, 1, 0xffffffff; st.global.u32 [%rd0], %r1;"
    out = np.zeros((32, 2), np.uint32)
    launch(
        program(
            body.replace("ballot.b32 %r1, 1", "ballot.b32 %r1, %p2").replace(
                "setp.ge", "setp.ge.u32 %p2, %r0, 0; setp.ge", 1
            )
        ),
        "k",
        out,
    )
    assert (out[:20, 0] == (1 << 20) - 1).all()


def test_races():
    body = """mov.u32 %r1, b; shl.b32 %r2, %r0, 2; add.u32 %r3, %r1, %r2; st.shared.u32 [%r3], %r0; {barrier}
    xor.b32 %r2, %r2, 128; add.u32 %r3, %r1, %r2; ld.shared.u32 %r4, [%r3]; {second} st.shared.u32 [%r3], %r4; st.global.u32 [%rd0], %r4;"""
    before = ".shared .align 4 .b8 b[256];"
    out = np.zeros((64, 2), np.uint32)

    def run(barrier, second):
        launch(
            program(body.format(barrier=barrier, second=second), before=before),
            "k",
            out,
            block=64,
            emulator=Emulator(races=True),
        )

    run("bar.sync 0;", "bar.sync 0;")
    assert out[:, 0].tolist() == [i ^ 32 for i in range(64)]
    with pytest.raises(
        EmulatorFault,
        match=r"reads 4 bytes of shared memory, and thread 32 \(warp 1\) wrote the byte at 0x480 at PTX line 12: a race",
    ):
        run("", "")
    run("bar.sync 1, 64;", "")  # after it, each warp alone reads and writes the other's half
    with pytest.raises(EmulatorFault, match="a race"):
        run("bar.warp.sync 0xffffffff;", "bar.sync 0;")
    write_after_read = "mov.u32 %r1, b; setp.lt.u32 %p1, %r0, 32; @%p1 st.shared.u32 [%r1], 1; bar.sync 0; ld.shared.u32 %r2, [%r1]; @%p1 st.shared.u32 [%r1], 2;"
    with pytest.raises(
        EmulatorFault, match=r"writes 4 bytes of shared memory, and thread 32 \(warp 1\) read the byte at 0x400"
    ):
        launch(program(write_after_read, before=before), "k", out, block=64, emulator=Emulator(races=True))


def test_coverage(tmp_path, monkeypatch):
    from ptxrt.emulator import check

    monkeypatch.setenv("PTXRT_COVERAGE", str(tmp_path))
    monkeypatch.setattr(check, "_collector", None)
    monkeypatch.setattr(check.atexit, "register", lambda function: None)
    body = "setp.lt.u32 %p1, %r0, 40;\n @%p1 bra L;\n add.u32 %r1, %r1, 1;\n bra D;\nL: add.u32 %r1, %r1, 2;\nD: setp.gt.u32 %p1, %r0, 500; @!%p1 bra E;\n trap;\nE: st.global.u32 [%rd0], %r0;"
    emulator = launch(program(body), "k", np.zeros(64, np.uint64), block=64)
    lines = emulator.coverage()["test.ptx"]["k"]
    assert [lines[line] for line in (12, 13, 14, 16, 17, 18, 19)] == [64, 64, 24, 40, 64, 0, 64]
    check.collector().write()
    launch(program(body), "k", np.zeros(64, np.uint64), block=64)
    check.collector().write()
    changed = program(body.replace("500", "501"))
    launch(changed, "k", np.zeros(64, np.uint64), block=64)
    check.collector().write()
    counts = check.merge(tmp_path)
    assert counts[check.text_key("test.ptx", program(body))]["k"] == {line: 2 * count for line, count in lines.items()}
    assert counts[check.text_key("test.ptx", changed)]["k"] == lines


def test_launch_facts_are_checked():
    def refuse(message, text, *arguments, **facts):
        with pytest.raises(EmulatorFault, match=message):
            launch(text, "k", np.zeros(32, np.uint64), *arguments, **facts)

    plain = program("")
    refuse("between 1 and", plain, block=1025)
    refuse("at most 1024", plain, block=(32, 32, 2))
    refuse("between 1 and", plain, grid=(1, 70000))
    refuse("between 1 and", plain, grid=0)
    refuse("the text allows 64", plain.replace("\n{", " .maxntid 64\n{"), block=65)
    refuse("the text requires", plain.replace("\n{", " .reqntid 64, 2\n{"), block=64)
    refuse("bytes of shared memory per block", plain, shared_bytes=300_000)
    emulator = Emulator()
    module = emulator.load_text(plain, "t.ptx")
    with pytest.raises(EmulatorFault, match="4 bytes of parameters, and the text declares 8"):
        emulator.launch(module.entries["k"], 1, 32, 0, bytes(4))
    with pytest.raises(EmulatorFault, match="another emulator"):
        Emulator().launch(module.entries["k"], 1, 32, 0, bytes(8))


@pytest.mark.parametrize(
    "opcode", ["bra.maybe", "exit.now", "membar.everything", "nanosleep.u64", "griddepcontrol.stay"]
)
def test_what_is_refused(opcode):
    with pytest.raises(Unsupported, match=opcode.split(".")[0]):
        resolve(opcode)
