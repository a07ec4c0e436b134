"""Compare the static model's figures of the kernels with their record: `make speed` all, test_speed.py a few entries.

`python tests/speed.py` simulates every entry of attention, of decoding one query from pages, quantizers, packers at head
dimension 128, matrix products and the kernels between products. It lists the entries that fell behind speed_figures.json
by more than MARGIN, and recorded paths, cards and launches that are missing now. With --record it writes that file, from
which docs/speed.py generates docs/speed.md; figures of the H200 stay as recorded if a quick build has no code for it. A
run takes some minutes on one core.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import sys
from pathlib import Path

from scripts import script

build = script("build.py")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


import ptxrt.ops  # noqa: E402  (registers the kernels)
import ptxrt.units  # noqa: E402
from ptxrt import launch  # noqa: E402
from ptxrt.errors import BuildError  # noqa: E402
from ptxrt.speed import (  # noqa: E402
    CARDS,
    SHAPES,
    TILE_PATHS,
    Entry,
    Machine,
    doubts_of,
    entries_of,
    launch_tflops,
    launch_times,
    launches_of,
    speeds_of,
    with_halves,
)

RECORD = Path(__file__).with_name("speed_figures.json")
NATIVE = build.TARGETS[0].cubins[0]
MARGIN = 0.02  # the fall that an entry may have: with equal starts, 2 % between two versions of a kernel is significant
FIRST = "RTX 5090"  # every path is recorded for this card, only the plain one for others
GROUPS = ("attention", "quantize", "pack", "gemm", "norm", "gate", "activate")
ALL_PATHS = (64, 128, 256)  # the head dimensions at which every path of a tile is recorded
HEADLINE = 128  # the head dimension at which launches, doubts and packers are recorded

# Measured TFLOPS of whole launches on an H200, for operands quantized before: the table of docs/benchmarks.md.
MEASURED_SHAPE = "b4 h32 s2048"
MEASURED = {
    "attention_bf16_dim128_dim_v128_bf16": 400.1,
    "attention_mxfp8_dim128_dim_v128": 221.4,
    "attention_mxfp8_bf16_dim128_dim_v128": 274.8,
    "attention_nvfp4_dim128_dim_v128": 198.9,
    "attention_nvfp4_mxfp8_dim128_dim_v128": 231.9,
    "attention_nvfp4_bf16_dim128_dim_v128": 286.3,
    "attention_mxfp4_dim128_dim_v128": 185.5,
    "attention_mxfp4_mxfp8_dim128_dim_v128": 224.0,
    "attention_mxfp4_bf16_dim128_dim_v128": 277.6,
}
# The same of quantizers: the share of a copy's rate on the same card, and that rate in GB/s, the mean of its range.
MEASURED_COPY = 4250
MEASURED_SHARES = {
    "quantize_mxfp4_f32": 0.99,
    "quantize_mxfp4_bf16": 0.97,
    "quantize_mxfp8_f32": 1.02,
    "quantize_mxfp8_bf16": 1.03,
    "quantize_mxfp6_e3m2_f32": 1.00,
    "quantize_mxfp6_e3m2_bf16": 0.94,
    "quantize_nvfp4_f32": 0.94,
    "quantize_nvfp4_bf16": 0.96,
}
# Cycles of m16n8k16 at the rate that `mma_rate_bf16` reaches on the H200 (docs/benchmarks.md), in place of the table's.
MEASURED_MMA = 4096 * 4 * 132 * 1.83e9 / 546e12


def wanted(unit) -> bool:
    """Whether the record has a unit's figures."""
    if unit.unit.split("_")[0] not in GROUPS or unit.unit.startswith(
        ("attention_few", "attention_paged", "attention_merge")
    ):
        return False
    return not unit.unit.startswith("pack") or f"dim{HEADLINE}" in unit.unit


def units() -> list:
    """The units in the record."""
    return [unit for unit in build.find_units(build.SOURCES) if wanted(unit)]


def code_of(unit: str) -> str:
    """The digest of a unit's native code; BuildError if the build has none, as after `build.py --ptx-only`."""
    cubins = ptxrt.units.record(unit)["cubins"]
    if NATIVE not in cubins:
        raise BuildError(f"{unit} has no code for {NATIVE}: run `make`")
    return cubins[NATIVE]


def model_digest() -> str:
    """A digest of the static model's source files, and of the choice between whole and half blocks, which decides the
    figures of launches."""
    parts = [path.read_bytes() for path in sorted((ROOT / "ptxrt" / "speed").glob("*.py"))]
    parts += [inspect.getsource(launch.takes_halves).encode(), repr(launch._ROUND).encode()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def compact(speed) -> list[float]:
    """[mean, lowest, highest]."""
    return [round(x, 1) for x in (speed.speed, speed.lowest, speed.highest)]


def figures_of(entry: Entry, halves: dict[str, Entry | None]) -> dict:
    """The recorded figures of an entry. halves: the entries that launches take, each with that of its half blocks."""
    machine = Machine(CARDS[FIRST])
    paths = TILE_PATHS if entry.is_attention and entry.dims in [(dim, dim) for dim in ALL_PATHS] else ("plain",)
    speeds = speeds_of(entry, machine, paths)
    plain = speeds["plain"]
    warps, blocks = entry.resident(machine.card)
    found = {
        "unit": plain.unit,
        "warps": warps * blocks,
        "peak": round(plain.peak, 1),
        "bound_by": plain.bound_by,
        "instructions": plain.instructions,
        "pipes": {name: round(cycles) for name, cycles in plain.pipes.items()},
        "work": round(plain.work),
        "paths": {name: compact(speed) for name, speed in speeds.items()},
    }
    if entry.is_attention:
        found["rows"] = entry.rows
    found["cards"] = {}
    for name, card in CARDS.items():
        if name not in (FIRST, "H200") and plain.unit == "TFLOPS":  # others are bound by memory on every card
            speed = speeds_of(entry, Machine(card), ("plain",))["plain"]
            found["cards"][name] = [*compact(speed), round(speed.peak, 1)]
    if entry.is_attention and plain.unit == "TFLOPS" and entry.dims == (HEADLINE, HEADLINE):
        if entry.name in halves:
            launches = launches_of(entry, halves[entry.name], machine)
            found["launches"] = {shape: round(tflops, 1) for shape, tflops in launches.items()}
        found["doubts"] = {name: round(value, 1) for name, value in doubts_of(entry, machine).items()}
    return found


def on_h200(entry: Entry) -> dict:
    """What an entry reaches on the H200: measured, modeled with the table of rates, and for attention with the
    measured MMA rate. TFLOPS of whole launches, or GB/s."""
    card = CARDS["H200"]
    if entry.name in MEASURED_SHARES:
        speed = speeds_of(entry, Machine(card), ("plain",))["plain"]
        measured = MEASURED_SHARES[entry.name] * MEASURED_COPY
        return {"unit": "GB/s", "measured": round(measured), "model": round(speed.speed)}
    shape = next(shape for shape in SHAPES if str(shape) == MEASURED_SHAPE)
    machines = {"model": Machine(card), "measured rate": Machine(card, mma_cycles=MEASURED_MMA)}
    found = {
        name: round(launch_tflops(entry, shape, launch_times(entry, machine), card), 1)
        for name, machine in machines.items()
    }
    return {"unit": "TFLOPS", "measured": MEASURED[entry.name], **found}


def is_measured(name: str) -> bool:
    """Whether an entry was measured on the H200."""
    return name in MEASURED or name in MEASURED_SHARES


def means(figures: dict) -> dict[str, float]:
    """The mean of each path, of the plain path on each other card, and of each whole launch."""
    found = {path: values[0] for path, values in figures["paths"].items()}
    found |= {f"plain on {card}": values[0] for card, values in figures.get("cards", {}).items()}
    return found | {f"launch {shape}": speed for shape, speed in figures.get("launches", {}).items()}


def fallen(figures: dict, recorded: dict) -> list[str]:
    """The means that are lower than recorded by more than MARGIN, and those that are missing now."""
    now = means(figures)
    return [
        f"{name} {now[name]} {figures['unit']}, recorded {mean}" if name in now else f"{name} is missing now"
        for name, mean in means(recorded).items()
        if name not in now or now[name] < mean * (1 - MARGIN)
    ]


def read_record() -> dict:
    """The contents of speed_figures.json; empty parts if the file does not exist."""
    empty = {"model": "", "code": {}, "entries": {}, "H200": {}}
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else empty


def write_record(record: dict) -> None:
    """Write speed_figures.json, one entry or unit per line."""
    parts = [f' "model": "{record["model"]}"']
    for part in ("code", "entries", "H200"):
        lines = [f'  "{name}": {json.dumps(value)}' for name, value in sorted(record[part].items())]
        parts.append(f' "{part}": {{\n' + ",\n".join(lines) + "\n }")
    RECORD.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8", newline="\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="units with this in their name; recorded beside the others"
    )
    parser.add_argument("--changed", action="store_true", help="units alone whose code is another than recorded")
    options = parser.parse_args()
    record, worse = read_record(), 0
    before = dict(record["entries"])
    again = options.record and not options.changed and not options.only
    found = {"model": model_digest(), "code": {}, "entries": {}, "H200": record["H200"]} if again else record
    for unit in units():
        name = unit.unit
        if options.only not in name:
            continue
        try:
            code = code_of(name)
        except BuildError as missing:
            print(f"{name}: left out ({missing})")
            continue
        if options.changed and code == record["code"].get(name):
            continue
        entries = list(entries_of(name, CARDS[FIRST]))
        halves = {entry.name: half for entry, half in with_halves(entries)}
        for entry in entries:
            figures = figures_of(entry, halves)
            for words in fallen(figures, before.get(entry.name, {"paths": {}})):
                worse += 1
                print(f"{entry.name}: {words}")
            if options.record:
                found["entries"][entry.name] = figures
        found["code"][name] = code
        if options.record and any(entry.startswith(name) for entry in (*MEASURED, *MEASURED_SHARES)):
            try:
                found["H200"] |= {e.name: on_h200(e) for e in entries_of(name, CARDS["H200"]) if is_measured(e.name)}
            except BuildError as quick:
                print(f"{name}: the H200's figures stay as they are ({quick})")
    if options.record:
        found["model"] = model_digest()
        there = {unit.unit for unit in units()}
        found["code"] = {name: code for name, code in found["code"].items() if name in there}
        found["entries"] = {
            name: figures
            for name, figures in found["entries"].items()
            if any(f"{name}_".startswith(f"{unit}_") for unit in there)
        }
        found["H200"] = {name: figures for name, figures in found["H200"].items() if is_measured(name)}
        write_record(found)
        print(f"wrote {RECORD}")
        return 0
    print(f"{worse} fell by more than {100 * MARGIN:g} %")
    return bool(worse)


if __name__ == "__main__":
    sys.exit(main())
