"""The machine code of every kernel against its record, so that no kernel gets worse unnoticed."""

import pytest

import sass
from ptxrt.declaration import half_of

UNITS = sass.build.find_units(sass.build.SOURCES)
RECORD, CODE = sass.read_record()
AGAIN = "if this is as it should be, write the record anew: make sass RECORD=1"

# Margins by which a kernel may be worse than its record. The compiler version is fixed, so these cover changes
# elsewhere that move a register or an address computation. Calls, spills and byte-wide accesses have no margin.
INSTRUCTIONS = 1.03
REGISTERS = 8


def record_of(unit) -> dict:
    """The build record of a unit; if its build is incomplete, the test is skipped."""
    try:
        return sass.build.assembled(unit, sass.build.MODULES)
    except sass.build.BuildFailure as failure:
        pytest.skip(str(failure))


def worse(figures: dict, recorded: dict) -> list[str]:
    """Descriptions of the figures that are worse than recorded by more than their margin."""
    found = []
    for name, value in figures.items():
        limit = recorded.get(name, 0)
        if name.startswith("instructions"):
            limit *= INSTRUCTIONS
        elif name == "registers":
            limit += REGISTERS
        if value > limit:
            found.append(f"{name} {value}, recorded {recorded.get(name)}")
    return found


def check(figures: dict, arch: str, entry: str) -> None:
    assert entry in RECORD[arch], f"{entry} is not in {sass.RECORD.name}; {AGAIN}"
    assert not (found := worse(figures, RECORD[arch][entry])), f"{entry} on {arch}: {'; '.join(found)}; {AGAIN}"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.unit)
def test_native_code_is_no_worse_than_recorded(disassembler, unit):
    record = record_of(unit)
    same = sass.code_of(unit).items() <= CODE.get(unit.unit, {}).items()
    if same and unit.unit not in sass.READ:  # other units are read only if their code differs from the recorded one
        there = {
            entry for entry, usage in record["entries"].items() if sass.NATIVE in usage
        }  # other entries exist in the portable build only
        assert there and there <= set(RECORD[sass.NATIVE]), AGAIN
        return
    for entry, figures in sass.figures_of_unit(unit, sass.NATIVE).items():
        check(figures.recorded(), sass.NATIVE, entry)
        assert not same or figures.recorded() == RECORD[sass.NATIVE][entry], (
            f"{entry}: the record is not what its code gives; {AGAIN}"
        )
        assert not figures.instructions["other"], f"{entry}: an opcode has no class in {sass.__file__}"


@pytest.mark.parametrize("arch", [arch for arch in sass.ARCHS if arch != sass.NATIVE])
def test_other_code_needs_no_more_than_recorded(arch):
    """Registers and spills as ptxas reported them: reading all code of these targets would take a minute."""
    if any(sass.build.extent_of(record_of(unit)) is not sass.build.FULL for unit in UNITS):
        pytest.skip("units are assembled for sm_120a alone: run make test ALL=1")
    for unit in UNITS:
        for entry, usage in record_of(unit)["entries"].items():
            if arch not in usage:
                continue  # an entry that is empty on this target
            spilled = max(usage[arch]["spill_store_bytes"], usage[arch]["spill_load_bytes"])
            check({"registers": usage[arch]["registers"], "spill_bytes": spilled}, arch, entry)


def test_the_record_has_no_others():
    records = [record_of(unit) for unit in UNITS]
    entries = {entry for record in records for entry in record["entries"]}
    if any(sass.build.extent_of(record) is not sass.build.FULL for record in records):
        entries |= {half_of(entry) for entry in entries}  # entries of targets that a quick build omits
    assert {arch: set(recorded) - entries for arch, recorded in RECORD.items()} == {arch: set() for arch in RECORD}, (
        AGAIN
    )


def test_worse_than_recorded_is_seen():
    recorded = dict(
        registers=40, spill_bytes=0, shared_bytes=64, calls=0, byte_wide_shared=0, instructions_per_mma=10.0
    )
    assert worse(recorded, recorded) == []
    assert worse(recorded | {"registers": 48, "instructions_per_mma": 10.3}, recorded) == []
    for change in (
        dict(registers=49),
        dict(spill_bytes=4),
        dict(calls=1),
        dict(byte_wide_shared=2),
        dict(instructions_per_mma=10.4),
    ):
        assert len(worse(recorded | change, recorded)) == 1


def test_the_record_knows_the_code_that_was_read(tmp_path, monkeypatch):
    (unit,) = sass.build.select(UNITS, ["amax"])
    cubins = {sass.NATIVE: "some digest"}
    monkeypatch.setattr(sass.build, "assembled", lambda *_: {"cubins": cubins})
    code = {unit.unit: sass.code_of(unit)}
    monkeypatch.setattr(sass, "RECORD", tmp_path / "record.json")
    sass.write_record({arch: {} for arch in sass.ARCHS}, code)
    assert sass.read_record() == ({arch: {} for arch in sass.ARCHS}, code)
    cubins[sass.NATIVE] = "another digest"
    assert code != {unit.unit: sass.code_of(unit)}


# The reading of listings, on handwritten code

LISTING = """
\t\tFunction : looping_f32
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
        /*0010*/               @P0 EXIT ;
        /*0020*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0030*/               @P1 BRA 0x70 ;
        /*0040*/                   FMUL R4, R4, R5 ;
        /*0050*/                   FMUL R5, R4, R5 ;
        /*0060*/                   BRA 0x80 ;
        /*0070*/                   FMUL R4, R4, R6 ;
        /*0080*/                   STG.E.64 desc[UR4][R8.64], R4 ;
        /*0090*/              @!P2 BRA 0x20 ;
        /*00a0*/                   CALL.REL.NOINC 0xd0 ;
        /*00b0*/                   STS.U8 [R3], R4 ;
        /*00c0*/                   EXIT ;
        /*00d0*/                   RET.REL.NODEC R2 0x0 ;
        /*00e0*/                   BRA 0xe0;
\t\tFunction : straight_bf16
        /*0000*/                   LDG.E.U16 R4, desc[UR4][R2.64] ;
        /*0010*/                   BRA.U UP0, 0x40 ;
        /*0020*/                   SHF.L.U32 R4, R4, 0x10, RZ ;
        /*0030*/                   LOP3.LUT R4, R4, 0x3, RZ, 0xc0, !PT ;
        /*0040*/                   STG.E.U16 desc[UR4][R8.64], R4 ;
        /*0050*/                   EXIT ;
\t\tFunction : multiplying
        /*0000*/                   LDSM.16.M88.4 R4, [R2] ;
        /*0010*/                   QMMA.SF.16832.F32.E2M1.E2M1.E8 R8, R4, R6, R8, R1, R2, URZ ;
        /*0020*/               @P0 BRA 0x50 ;
        /*0030*/                   MUFU.EX2 R3, R3 ;
        /*0040*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0050*/                   LDS R4, [R2] ;
        /*0060*/               @P1 BRA 0x10 ;
        /*0070*/                   STG.E.128 desc[UR4][R8.64], R8 ;
        /*0080*/                   EXIT ;
\t\tFunction : falling_back
        /*0000*/                   HMMA.16816.F32 R8, R4, R6, R8 ;
        /*0010*/                   HMMA.16816.F32 R8, R4, R6, R8 ;
        /*0020*/               @P0 BRA 0x0 ;
        /*0030*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0040*/                   LOP3.LUT R4, R4, 0x3, RZ, 0xc0, !PT ;
        /*0050*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0060*/               @P1 BRA 0x30 ;
        /*0070*/                   EXIT ;
"""


def figures(entry):
    usage = dict(registers=40, spill_store_bytes=4, spill_load_bytes=8, shared_bytes=16)
    return sass.figures_of(entry, sass.parse(LISTING)[entry], usage, 1024)


def test_copies_to_an_address_with_a_uniform_part_are_found():
    """As ptxas 13.0 wrote them where a loop variable was uniform in a warp."""
    code = """
\t\tFunction : copying
        /*0000*/                   LDGSTS.E.BYPASS.128 [R124+0x200], desc[UR8][R54.64+0x200] ;
        /*0010*/                   LDGSTS.E.BYPASS.128 [R124+UR0+0x200], desc[UR1][R54.64+0x200] ;
        /*0020*/                   LDS R4, [R2+UR4] ;
        /*0030*/                   LDGSTS.E.64 [R124], desc[UR8][R54.64+UR4] ;
"""
    assert [one.address for one in sass.wrong_copies(sass.parse(code)["copying"])] == [0x10]


def test_a_loop_counts_the_shorter_of_equal_ways():
    found = figures("looping_f32")
    assert found.looped and found.work == 4 and found.global_bytes == 24
    assert found.instructions == {"global": 2, "control": 2, "float": 1}  # the path through 0x70
    assert (found.total, found.calls, found.byte_wide_shared, found.spill_bytes, found.shared_bytes) == (
        1.25,
        1,
        1,
        8,
        1040,
    )
    assert found.issue_bound == pytest.approx(32 * 24 / 5 * 170 * 4 * 2.407)


def test_without_a_loop_the_straight_line_counts():
    found = figures("straight_bf16")
    assert not found.looped and found.work == 1
    assert found.instructions == {"global": 2, "control": 2}


def test_matrix_instructions_come_before_short_ways():
    found = figures("multiplying")
    assert found.looped and (found.work, found.per) == (2, "mma")
    assert found.instructions == {"mma": 2, "special": 1, "shared": 1, "control": 2}
    assert found.recorded()["instructions_per_mma"] == 3


def test_of_two_loops_in_a_row_with_the_same_work_the_shorter_counts():
    found = figures("falling_back")
    assert found.looped and found.instructions == {"mma": 2, "control": 1}
