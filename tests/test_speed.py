"""The static model of speed: on handwritten code, on built kernels, and against its record."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

import sass
import speed
from ptxrt import launch
from ptxrt.commands import main
from ptxrt.commands import speed as command
from ptxrt.errors import BuildError
from ptxrt.speed import (
    CARDS,
    Entry,
    Machine,
    Shape,
    entries_of,
    launch_tflops,
    model,
    paths_of,
    rates,
    speed_of_path,
    speeds_of,
    with_halves,
)
from ptxrt.speed.listing import CLASSES, Control, Instruction, parse
from ptxrt.speed.paths import without_absent
from ptxrt.speed.simulate import alone, simulate
from scripts import script

GEFORCE = Machine(CARDS["RTX 5090"])
RECORD = speed.read_record()
AGAIN = "if this is as it should be, write the record anew: make speed RECORD=1"
ALWAYS = ("attention_nvfp4_dim128_dim_v128", "attention_bf16_dim128_dim_v128")


def instruction(opcode, stall=1, sets=None, waits=(), operands="", reads=None) -> Instruction:
    return Instruction(0, "", opcode, operands, Control(stall, sets, reads, sum(1 << bit for bit in waits)))


MMA, MUFU, FADD = "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X", "MUFU.EX2", "FADD"


# Rates and listings


def test_a_control_word_is_read():
    """LDS R6, [R7] with a stall of 4 cycles: it sets scoreboard 1 on completion and waits for scoreboards 0 and 2."""
    word = (4 | 1 << 4 | 1 << 5 | 7 << 8 | 0b101 << 11) << 41
    assert Control.of(word) == Control(stall=4, sets=1, reads=None, waits=0b101)
    text = "\t\tFunction : f\n        /*0010*/   @!P0 LDS R6, [R7] ;   /* 0x0000000007067984 */\n"
    text += f"     /* 0x{word:016x} */\n"
    (found,) = parse(text)["f"]
    assert found == Instruction(16, "@!P0", "LDS", "R6, [R7]", Control(4, 1, None, 5))


def test_peaks_are_those_of_the_data_sheets():
    """TFLOPS of the tensor cores, as NVIDIA states them."""
    stated = {
        "RTX 5090": {"HMMA.16816.F32.BF16": 209.5, "QMMA.SF.16832.F32.E4M3.E4M3.E8": 838, MMA: 1676},
        "RTX 5070 Ti": {"HMMA.16816.F32.BF16": 87.9, MMA: 703},
        "RTX PRO 6000": {"HMMA.16816.F32": 503.8, "QMMA.16832.F32.E4M3.E4M3": 1007.6, MMA: 2015.2},
    }
    for card, peaks in stated.items():
        for opcode, tflops in peaks.items():
            found = (
                rates.mma_flops(opcode)
                / rates.mma_cycles(opcode, CARDS[card])
                * CARDS[card].parts
                * CARDS[card].hertz
                / 1e12
            )
            assert found == pytest.approx(tflops, rel=2e-3), (card, opcode)


def test_every_rate_has_a_source_and_every_stem_one_rate():
    stems = [stem for rate in rates.RATES for stem in rate.stems.split()]
    assert len(stems) == len(set(stems))
    assert all(rate.source for table in (rates.RATES, *rates.MMA_RATES.values()) for rate in table)
    assert all(card.source and card.target in rates.MMA_RATES for card in CARDS.values())


def test_what_is_counted_has_a_rate():
    """The opcode stems that the listing classifies."""
    unknown = {"FLO", "UTMASTG", "VHMNMX", "BRX"}
    for kind, stems in CLASSES.items():
        for stem in stems.split():
            if (
                kind not in ("mma", "uniform")
                and not stem.startswith(("D", "I2I", "SHL", "SHR"))
                and stem.rstrip(".") not in unknown
            ):
                assert rates.rate_of(stem.rstrip(".")) is not None


def test_bytes_of_a_warp():
    assert [
        rates.warp_bytes(op)
        for op in ("LDS", "LDS.128", "LDG.E.64", "STS.U8", "LDSM.16.M88.4", "LDSM.16.M88.2", "STG.E.U16")
    ] == [
        128,
        512,
        256,
        32,
        512,
        256,
        64,
    ]


# The simulation, in cases with a known result


def test_a_full_pipe_is_the_trip():
    """Two warps of independent MMAs: 16 cycles per MMA, for all starts."""
    trip = simulate([instruction(MMA)] * 40, GEFORCE, 1, 2)
    assert trip.fastest == pytest.approx(2 * 40 * 16, rel=0.03) and trip.slowest == pytest.approx(
        trip.fastest, rel=0.03
    )


def test_one_warp_waits_out_its_stalls():
    trip = simulate([instruction(FADD, stall=4)] * 25, GEFORCE, 1, 1)
    assert trip.cycles == pytest.approx(25 * 4 + rates.BRANCH_CYCLES, rel=0.01)


def test_four_warps_share_the_issue_slot():
    """Each warp could issue every cycle; together they have one issue slot."""
    trip = simulate([instruction(FADD)] * 100, GEFORCE, 1, 4)
    assert trip.cycles == pytest.approx(400, rel=0.03)


def test_a_scoreboard_makes_a_warp_wait():
    """An instruction that uses the result of a MUFU waits 20 cycles; another warp issues meanwhile."""
    path = [instruction(MUFU, sets=0), instruction(FADD, waits=(0,))]
    assert simulate(path, GEFORCE, 1, 1).cycles == pytest.approx(21 + rates.BRANCH_CYCLES)
    assert simulate(path, GEFORCE, 1, 2).cycles < 1.4 * simulate(path, GEFORCE, 1, 1).cycles


def test_a_barrier_keeps_warps_together():
    path = [instruction(MMA)] * 4 + [instruction("BAR.SYNC.DEFER_BLOCKING")]
    assert simulate(path, GEFORCE, 2, 1).cycles == pytest.approx(7 * 16 + rates.BARRIER_LATENCY, abs=3)
    assert simulate(path, GEFORCE, 1, 2).cycles == pytest.approx(8 * 16, abs=3)  # the warps are of different blocks


def test_memory_gives_what_it_can():
    """A copy of 16 bytes per lane: reads and writes together reach the memory bandwidth."""
    path = [instruction("LDG.E.128", sets=0), instruction("STG.E.128", waits=(0,))]
    cycles = simulate(path, GEFORCE, 1, 12, streams=True).cycles
    moved = 2 * 512 * 12 / cycles * GEFORCE.card.parts * GEFORCE.card.hertz / 1e9
    assert moved == pytest.approx(1792, rel=0.05)


def test_doubts_change_what_they_say():
    path = [instruction(MUFU)] * 20
    assert simulate(path, GEFORCE.doubted(special_cycles=16.0), 1, 1).cycles == pytest.approx(
        2 * simulate(path, GEFORCE, 1, 1).cycles, rel=0.1
    )
    path = [instruction(MMA)] * 20
    assert simulate(path, GEFORCE.doubted(mma_cycles=32.0), 1, 1).cycles > 1.9 * simulate(path, GEFORCE, 1, 1).cycles


def test_starts_are_the_same_in_every_run():
    path = [instruction(MMA), instruction("LDSM.16.M88.4", sets=0), instruction(FADD, waits=(0,))] * 5
    assert simulate(path, GEFORCE, 1, 3) == simulate(path, GEFORCE, 1, 3)
    assert alone(path, GEFORCE, 1) > 5 * 33


# Whole launches


def entry_of(rows=64, threads=128, registers=255, kernel="attention_bf16") -> Entry:
    return Entry("e", "u", kernel, {"dim": 64, "dim_v": 64}, (), threads, rows, registers, 1024)


def test_whole_waves_and_the_last_one():
    """170 blocks are one wave, 171 are two; a block takes its prologue, epilogue and trips."""
    times = model.LaunchTimes(64, (1000.0,), (1000.0,), (1000.0,), 500.0)
    entry = entry_of()
    one, two = (model.launch_cycles(entry, Shape(1, heads, 64), times, GEFORCE.card) for heads in (170, 171))
    assert (one, two) == (1500.0, 3000.0)
    assert launch_tflops(entry, Shape(1, 170, 64), times, GEFORCE.card) == pytest.approx(
        4 * 170 * 64**3 / (1500 / 2.407e9) / 1e12
    )


def test_a_block_alone_runs_faster():
    """A trip takes 1500 cycles with two blocks per multiprocessor, 1000 with one."""
    times = model.LaunchTimes(64, (1000.0, 1500.0), (1000.0, 1500.0), (1000.0, 1500.0), 0.0)
    cycles = [model.launch_cycles(entry_of(), Shape(1, heads, 64), times, GEFORCE.card) for heads in (170, 340, 510)]
    assert cycles == pytest.approx([1000, 1500, 2500])


def test_causal_blocks_have_what_they_see():
    """The last 192 rows see 3 full tiles of 64 keys; of their warps one third each sees 1, 2 and 3 masked tiles."""
    times = model.LaunchTimes(64, (100.0,), (100.0,), (1000.0,), 0.0)
    entry = entry_of(rows=192, threads=384)
    assert model.block_cycles(entry, Shape(1, 1, 384, causal=True), times, 1, 1) == 3 * 100 + 2 * 1000
    assert model.block_cycles(entry, Shape(1, 1, 384), times, 1, 1) == 6 * 100


def test_a_launch_takes_the_blocks_that_launches_take(monkeypatch):
    """At b1 h32 s512 half blocks, of which multiprocessors have one or two, at b4 h32 s2048 whole ones. Both kinds have
    trips of 1000 cycles."""
    times = model.LaunchTimes(64, (1000.0, 1000.0), (1000.0, 1000.0), (1000.0, 1000.0), 0.0)
    monkeypatch.setattr(model, "launch_times", lambda entry, machine: times)
    whole, half = (
        replace(entry_of(rows, 2 * rows), name=name, least_blocks=2) for rows, name in ((128, "e"), (64, "e_half"))
    )
    assert model.with_halves([half, whole]) == [(whole, half)] and model.with_halves([whole]) == [(whole, None)]
    both, alone = (model.launches_of(whole, other, GEFORCE) for other in (half, None))
    assert both["b1 h32 s512"] == pytest.approx(launch_tflops(half, Shape(1, 32, 512), times, GEFORCE.card))
    assert both["b4 h32 s2048"] == alone["b4 h32 s2048"]
    assert alone["b4 h32 s2048"] == pytest.approx(launch_tflops(whole, Shape(4, 32, 2048), times, GEFORCE.card))


def code(text: str) -> list[Instruction]:
    """One instruction per line: an opcode, after a guard if there is one, and operands."""
    words = [line.split(maxsplit=2 if "@" in line else 1) for line in text.strip().splitlines()]
    return [Instruction(0, "".join(word[:-2]), word[-2], word[-1], Control(1, None, None, 0)) for word in words]


@pytest.mark.parametrize(
    "compare",
    [
        "LDC.64 R6, c[0x0][0x3e8]\nISETP.NE.S64.AND P1, PT, R6, RZ, PT",
        "LDC.64 R6, c[0x0][0x3e8]\nISETP.NE.U32.AND P1, PT, R6, RZ, PT\nISETP.NE.AND.EX P1, PT, R7, RZ, PT, P1",
        "LDCU.64 UR4, c[0x0][0x3e8]\nUISETP.NE.S64.AND UP0, UPT, UR4, URZ, UPT\n"
        "PLOP3.LUT P1, PT, PT, PT, UP0, 0x80, 0x8",
    ],
)
def test_null_pointers_switch_their_loads_off(compare):
    path = code(
        compare + "\n@P1 LDG.E R0, desc[UR8][R6.64]\n@!P1 IADD3 R3, R0, R1, RZ\nISETP.GE.AND P1, PT, R3, RZ, PT"
    )
    path += code("@P1 LDG.E R0, desc[UR8][R6.64]")
    count = len(path) - 4
    guards = [i.guard for i in without_absent(path, {0x3E8})]
    assert guards == [""] * count + ["@!PT", "@!P1", "", "@P1"]
    assert without_absent(path, {0x3E0}) == path


def test_a_register_that_is_written_again_is_not_null():
    path = code(
        "LDC.64 R6, c[0x0][0x3e8]\nIMAD.WIDE R6, R1, 0x4, R2\n"
        "ISETP.NE.S64.AND P1, PT, R6, RZ, PT\n@P1 LDG.E R0, desc[UR8][R6.64]"
    )
    assert without_absent(path, {0x3E8}) == path


def test_a_block_starts_when_its_tile_and_q_are_there():
    """The copy of the first tile starts after the last barrier; Q is loaded meanwhile."""
    before, after = [instruction(MMA)] * 10, [instruction(FADD, stall=10)]
    barrier = [instruction("BAR.SYNC.DEFER_BLOCKING")]
    entry = entry_of(kernel="attention_nvfp4")

    def start(path):
        return model._cycles_to_the_first_tile(entry, path, GEFORCE)

    assert start(before + barrier) == pytest.approx(150 + rates.COPY_LATENCY, abs=20)
    assert start(before + barrier + 20 * after) == start(before + barrier)
    assert start(before + barrier + 100 * after) == pytest.approx(150 + rates.BARRIER_LATENCY + 1000, abs=20)
    assert start(before) == pytest.approx(150 + rates.COPY_LATENCY, abs=20)


def test_the_column_of_ones_does_not_count():
    assert entry_of(kernel="attention_nvfp4").useful == pytest.approx(128 / 136)
    assert entry_of(kernel="attention_nvfp4_mxfp8").useful < 1 == entry_of(kernel="attention_nvfp4_bf16").useful


# Kernels that are built


def test_ways_of_a_tile(disassembler):
    """nvfp4 has all six paths: each has the same MMAs, and its own further instructions."""
    ((entry, _),) = with_halves(entries_of("attention_nvfp4_dim128_dim_v128", GEFORCE.card))
    paths = paths_of(entry)
    assert {*model.TILE_PATHS, "prologue", "epilogue"} == set(paths)
    mmas = {name: sum(i.kind == "mma" for i in path) for name, path in paths.items()}
    assert {mmas[name] for name in model.TILE_PATHS} == {33} and mmas["prologue"] == mmas["epilogue"] == 0
    hidden = {name: sum("-INF" in i.operands for i in path) for name, path in paths.items()}
    assert hidden["plain"] == hidden["sums"] == hidden["raising"] == 0 < 32 == hidden["masked"]
    products = {name: sum(i.stem == "FMUL" for i in path) for name, path in paths.items()}
    assert products["raising"] >= products["plain"] + 66
    scores = {name: sum(rates.warp_bytes(i.opcode) for i in path if i.stem == "LDS") for name, path in paths.items()}
    assert scores["smooth_q"] == scores["plain"] + 32 * 4 * 32 and not any(
        i.stem == "LDG" for name in ("plain", "smooth_q") for i in paths[name]
    )
    assert scores["smooth_sums"] >= scores["smooth_q"] and hidden["smooth_sums"] == 0
    assert any(i.stem == "STG" for i in paths["epilogue"])


@pytest.mark.parametrize(("dim", "held"), [(dim, held) for dim in (64, 128) for held in (1, 2, 3, 4)])
def test_a_tile_of_decoding_is_whole(disassembler, dim, held):
    """64 keys for 8 rows: the MMAs of both products, an exponential for each score, copies of all bytes, no mask."""
    unit = f"attention_one_dim{dim}_held{held}"
    try:
        (entry,) = entries_of(unit, GEFORCE.card)
    except BuildError as missing:
        assert unit not in sass.READ
        pytest.skip(str(missing))
    paths = paths_of(entry)
    assert entry.decodes and not entry.is_attention and list(paths) == ["plain"]
    path = paths["plain"]
    assert sum(i.kind == "mma" for i in path) == 2 * (64 // 16) * (dim // 16)
    assert sum(i.stem == "MUFU" for i in path) == 8 * 64 // 32
    assert not any("-INF" in i.operands and i.stem == "FSEL" for i in path)
    bits = {1: 16, 2: 8, 3: 4, 4: 4}[held]
    copied = sum(rates.warp_bytes(i.opcode) for i in path if i.stem == "LDGSTS")
    assert copied >= 2 * 64 * dim * bits // 8
    assert speed_of_path(entry, "plain", path, GEFORCE).work == 4 * 8 * 64 * dim


def test_useful_work_of_a_trip(disassembler):
    """16 rows by 64 keys, both products; one of the 33 MMAs computes the denominator and does not count."""
    ((entry, _),) = with_halves(entries_of("attention_nvfp4_dim128_dim_v128", GEFORCE.card))
    plain = speed_of_path(entry, "plain", paths_of(entry)["plain"], GEFORCE)
    assert plain.work == pytest.approx(2 * 16 * 64 * 256)
    assert plain.pipes["MMA"] == 33 * 16 and plain.lowest <= plain.speed <= plain.highest < plain.peak == pytest.approx(
        1676, rel=1e-3
    )


@pytest.mark.parametrize("unit", [unit.unit for unit in speed.units()])
def test_no_slower_than_recorded(disassembler, unit):
    """Units whose code is another are simulated on every recorded path, card and launch; of the others a few on the
    plain path, which is then as recorded. `make speed` simulates all."""
    try:
        same = speed.code_of(unit) == RECORD["code"].get(unit)
    except BuildError as missing:
        pytest.skip(str(missing))
    assert unit in RECORD["code"], f"{unit} is not in {speed.RECORD.name}; {AGAIN}"
    if same and unit not in ALWAYS:
        return
    entries = list(entries_of(unit, GEFORCE.card))
    halves = {entry.name: half for entry, half in with_halves(entries)}
    for entry in entries:
        recorded = RECORD["entries"][entry.name]
        if same:
            assert speed.compact(speeds_of(entry, GEFORCE, ("plain",))["plain"]) == recorded["paths"]["plain"], AGAIN
        else:
            fallen = speed.fallen(speed.figures_of(entry, halves), recorded)
            assert not fallen, f"{entry.name}: {fallen}; {AGAIN}"


def test_the_record_is_of_this_model():
    assert RECORD["model"] == speed.model_digest(), AGAIN


def test_the_choice_of_half_blocks_is_of_the_model(monkeypatch):
    before = speed.model_digest()
    monkeypatch.setattr(launch, "_ROUND", launch._ROUND + 1)
    after = speed.model_digest()
    monkeypatch.setattr(launch, "takes_halves", lambda *_: False)
    assert len({before, after, speed.model_digest()}) == 3


def test_a_build_without_machine_code_has_no_digest(monkeypatch):
    """As after `build.py --ptx-only`; test_no_slower_than_recorded then skips."""
    monkeypatch.setattr(speed.ptxrt.units, "record", lambda unit: {"cubins": {}})
    with pytest.raises(BuildError, match="no code for"):
        speed.code_of("attention_nvfp4_dim128_dim_v128")


def test_the_page_is_of_the_record():
    page = script("docs/speed.py")
    written = (speed.ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    assert page.page(RECORD) == written, "docs/speed.md is not what docs/speed.py writes; run make speed RECORD=1"
    assert all((speed.ROOT / "docs" / page.picture_of(card)).exists() for card in page.CONSUMER)


@pytest.mark.parametrize("part", ["paths", "cards", "launches"])
def test_a_fall_is_seen(part):
    """Of every path, on every card, and of whole launches."""
    recorded = dict(unit="TFLOPS", paths=dict(plain=[100.0, 90, 110], sums=[80.0, 70, 90]))
    recorded |= dict(cards={"DGX Spark": [50.0, 40, 60, 70.0]}, launches={"b1 h32 s512": 70.0})
    for loss, seen in ((0.985, False), (0.975, True)):
        last, found = list(recorded[part])[-1], json.loads(json.dumps(recorded))
        before = found[part][last]
        found[part][last] = [before[0] * loss, *before[1:]] if isinstance(before, list) else before * loss
        words = speed.fallen(found, recorded)
        assert len(words) == seen and all(last in word for word in words), words
    del found[part][last]
    assert [word for word in speed.fallen(found, recorded) if "missing" in word and last in word]
    assert speed.fallen(recorded, found) == []  # a new name is no fall


def test_measured_figures_are_those_of_the_benchmarks():
    page = (speed.ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for name, tflops in speed.MEASURED.items():
        pair = name.removeprefix("attention_").split("_dim")[0].replace("_", "+")
        assert f"| {pair} | {tflops} (" in page, name
    for name, share in speed.MEASURED_SHARES.items():
        format = name.removeprefix("quantize_").rpartition("_")[0]
        (row,) = [
            line.split(" | ")
            for line in page.splitlines()
            if line.startswith(f"| quantize | {format}") and "computed" not in line
        ]
        assert f"{share:.2f}" == row[2 + name.endswith("_bf16")].strip(" |"), name


# The command


def test_the_command_says_it(disassembler):
    done = CliRunner().invoke(main, ["speed", "attention_bf16[dim=64]", "--card", "rtx 5080"])
    assert (
        done.exit_code == 0
        and "attention_bf16_dim64_dim_v64_bf16 on RTX 5080" in done.output
        and "TFLOPS" in done.output
    )
    done = CliRunner().invoke(main, ["speed", "amax", "--json"])
    found = json.loads(done.output)
    assert found["card"]["multiprocessors"] == 170 and all(
        "GB/s" in entry["paths"]["plain"] for entry in found["entries"]
    )


def test_the_command_says_which_launches_are_modeled(disassembler):
    said = "no launches of"
    for kernel, none in (("attention_one[dim=64,held=1]", True), ("amax", True)):
        done = CliRunner().invoke(main, ["speed", kernel, "--launches"])
        assert done.exit_code == 0 and (said in done.output) == none and "  launch" not in done.output
    done = CliRunner().invoke(main, ["speed", "attention_nvfp4[dim=128,dim_v=128]", "--launches"])
    assert said not in done.output and "b1 h32 s512" in done.output
    assert "_half (half blocks, for short launches) on" in done.output


def test_the_command_knows_all_cards():
    assert command.CARDS == tuple(CARDS)
    assert CliRunner().invoke(main, ["speed", "amax", "--card", "RTX 1"]).exit_code == 2
    assert "no kernel is called" in CliRunner().invoke(main, ["speed", "atention_nvfp4"]).output
