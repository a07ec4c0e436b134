"""Rates: how many cycles one instruction of a warp occupies which pipe, by architecture, and the cards, each with its
source.

A multiprocessor has four parts. A part issues one instruction of a warp per clock; the instruction then occupies its
pipe in that part for `cycles`. Pipes that the four parts share, shared memory and shuffles, count with four times their
cycles.

Sources
    [guide]      CUDA C++ Best Practices Guide 13.0, "Throughput of Native Arithmetic Instructions": n results per clock
                 and multiprocessor are 128 / n cycles
    [ptxas]      stall counts that ptxas 13.0 puts between independent instructions of the class
    [paper]      peaks of NVIDIA's RTX Blackwell whitepaper: 209.5 TFLOPS in BF16, 419 in FP8 with FP32 sums, 838 in
                 INT8, 1676 in FP4, of 170 multiprocessors at 2.407 GHz
    [mmapeak]    mmapeak on an RTX 5090: MXFP8 at 737 TFLOPS, twice FP8 with FP32 sums; NVFP4 at 1474, twice MXFP8; both
                 operands FP6 or FP4 in QMMA at half of MXFP8. "Things I learned digging into 5090 perf",
                 main-horse.github.io/posts/5090-mm-perf
    [attention]  attention in BF16 on an RTX 5090, github.com/gau-nernst/learn-cuda, 07_attention/README.md: 143 to 198
                 TFLOPS of five versions at 400 W. Their machine code, in an earlier form of this model
    [Spark]      FlashInfer's attention in BF16 on a DGX Spark at 93 to 95 TFLOPS: "Enable SM121 (GB10/DGX Spark) for
                 NVFP4 attention", github.com/flashinfer-ai/flashinfer/pull/3897
    [products]   cuBLAS on an RTX 5090, the best of many large shapes: MXFP8 at 660 TFLOPS and NVFP4 at 1306 at 600 W,
                 552 and 1165 at 400 W. "Realistic SOL", github.com/gau-nernst/gn-kernels, README.md
    [usual]      not measured on these chips; as published for Ampere to Hopper
    [H200]       the kernels mma_rate_* on an H200, docs/benchmarks.md
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

# ---------------------------------------------------------------------------------------------------------------------
# Cards


@dataclass(frozen=True)
class Card:
    """A card, at the clock for which its vendor states peaks."""

    name: str
    target: str  # the target of its machine code and rates
    multiprocessors: int
    gigahertz: float
    memory_gb_per_s: float
    source: str
    halves_sums: bool = True  # MMAs of 16 and plain 8 bits with 32-bit sums run at half rate, as on GeForce

    @property
    def parts(self) -> int:
        return 4 * self.multiprocessors

    @property
    def hertz(self) -> float:
        return self.gigahertz * 1e9


CARDS = {
    "RTX 5090": Card(
        "RTX 5090", "sm_120a", 170, 2.407, 1792, "NVIDIA, GeForce RTX 5090: 21760 cores, 2.41 GHz, 1792 GB/s"
    ),
    "RTX 5080": Card(
        "RTX 5080", "sm_120a", 84, 2.617, 960, "NVIDIA, GeForce RTX 5080: 10752 cores, 2.62 GHz, 960 GB/s"
    ),
    "RTX 5070 Ti": Card(
        "RTX 5070 Ti",
        "sm_120a",
        70,
        2.452,
        896,
        "NVIDIA, GeForce RTX 5070 Ti: 8960 cores, 2.45 GHz, 896 GB/s",
    ),
    "RTX PRO 6000": Card(
        "RTX PRO 6000",
        "sm_120a",
        188,
        2.617,
        1792,
        "NVIDIA, RTX PRO 6000 Blackwell: 24064 cores, 125 TFLOPS in FP32; 503.8 TFLOPS in FP16 with FP32 sums",
        halves_sums=False,
    ),
    "DGX Spark": Card(
        "DGX Spark",
        "sm_121a",
        48,
        2.54,
        273,
        "NVIDIA, DGX Spark: 6144 cores, 273 GB/s, 1 PFLOP of sparse FP4, of which the clock; "
        "[Spark] attention in BF16 at 93 TFLOPS needs the full rate",
        halves_sums=False,
    ),
    "H200": Card(
        "H200",
        "sm_90",
        132,
        1.83,
        4800,
        "NVIDIA, H200 SXM: 132 multiprocessors, 4.8 TB/s; 1.83 GHz under load",
        halves_sums=False,
    ),
}


@dataclass(frozen=True)
class Multiprocessor:
    """The resources of a multiprocessor."""

    registers: int
    shared_bytes: int
    warps: int
    blocks: int
    l2_bytes_per_clock: float  # from L2: on sm_12x those at which the model fits [attention], on sm_90 [usual]


MULTIPROCESSORS = {
    "sm_120a": Multiprocessor(65536, 102400, 48, 24, 24),
    "sm_121a": Multiprocessor(65536, 102400, 48, 24, 24),
    "sm_90": Multiprocessor(65536, 233472, 64, 32, 64),
}

# Matrix instructions: the first matching pattern counts


@dataclass(frozen=True)
class MmaRate:
    """The cycles of MMAs whose opcode matches the pattern."""

    pattern: str
    cycles: float
    source: str
    halved: bool = False  # cycles are those of cards with halved sums; others take half as many


_BLACKWELL = (
    MmaRate(r"HMMA\.16816\.F16\b", 16, "[paper] [ptxas] FP16 sums, full rate"),
    MmaRate(r"HMMA\.16816\.F32", 32, "[paper] FP32 sums: 209.5 TFLOPS; ptxas spaces them 16 apart", halved=True),
    MmaRate(r"HMMA\.1688\.F32\.TF32", 32, "[paper] 104.8 TFLOPS", halved=True),
    MmaRate(r"HMMA\.1688\.F32", 16, "[paper] half of 16816", halved=True),
    MmaRate(r"IMMA\.16832", 16, "[paper] [ptxas] 838 TOPS"),
    MmaRate(r"IMMA\.16816", 8, "[paper] half of 16832"),
    MmaRate(
        r"QMMA\.(SF\.)?16832\.F\d+\.(E3M2|E2M3|E2M1)\.(E3M2|E2M3|E2M1)",
        32,
        "[mmapeak] both operands FP6 or FP4",
        halved=True,
    ),
    MmaRate(r"QMMA\.SF\.16832", 16, "[mmapeak] [ptxas] MXFP8 with FP32 sums, full rate"),
    MmaRate(r"QMMA\.16832\.F16", 16, "[paper] [ptxas]"),
    MmaRate(r"QMMA\.16832\.F32", 32, "[paper] [mmapeak] FP8 with FP32 sums", halved=True),
    MmaRate(r"OMMA\.SF\.16864", 16, "[paper] [mmapeak] [ptxas] MXFP4 and NVFP4"),
)
_HOPPER = (
    MmaRate(
        r"HMMA\.16816", 6.5, "[usual] 0.62 of the peak of 4 cycles; [ptxas] 6; [H200] 7.25, if it runs at 1.83 GHz"
    ),
    MmaRate(r"HMMA\.1688", 3.25, "half of 16816"),
    MmaRate(r"[IQ]MMA\.16832", 6.5, "as HMMA.16816"),
)
MMA_RATES = {"sm_120a": _BLACKWELL, "sm_121a": _BLACKWELL, "sm_90": _HOPPER}

# Shape as written in opcodes -> (M, N, K).
MMA_SHAPES = {
    "1688": (16, 8, 8),
    "16816": (16, 8, 16),
    "16832": (16, 8, 32),
    "16864": (16, 8, 64),
    "8816": (8, 8, 16),
    "884": (8, 8, 4),
}


def mma_flops(opcode: str) -> int:
    """Return the multiplications and additions of one MMA."""
    m, n, k = next(MMA_SHAPES[word] for word in opcode.split(".") if word in MMA_SHAPES)
    return 2 * m * n * k


def mma_cycles(opcode: str, card: Card) -> float:
    """Return the cycles for which an MMA occupies the tensor core of its part."""
    for rate in MMA_RATES[card.target]:
        if re.match(rate.pattern, opcode):
            return rate.cycles if card.halves_sums or not rate.halved else rate.cycles / 2
    raise KeyError(f"no rate for {opcode} on {card.target}")


# All other instructions: the first entry with the opcode's stem counts


@dataclass(frozen=True)
class Rate:
    """The rate of instructions with these stems. Cycles of 0 mean by bytes: 128 per clock and
    multiprocessor [usual]. hopper: the cycles on sm_90, if they are others."""

    stems: str
    kind: str
    pipe: str
    cycles: float
    source: str
    hopper: float | None = None

    def cycles_on(self, target: str) -> float:
        """Return the cycles on a target."""
        return self.hopper if self.hopper is not None and target == "sm_90" else self.cycles


RATES = (
    Rate("FADD FMUL FFMA FSWZADD", "float", "FMA", 1, "[guide] [ptxas] 128 per clock"),
    Rate("HADD2 HMUL2 HFMA2", "half", "FMA", 2, "[guide] [ptxas] 64"),
    Rate("FMNMX FMNMX3 HMNMX2", "extreme", "ALU", 2, "[guide] 64; [ptxas] 1 apart on sm_120, 2 on sm_90"),
    Rate("FSETP FSET FSEL FCHK HSETP2", "select", "ALU", 2, "[guide] 64"),
    Rate("F2FP I2FP F2IP", "convert", "ALU", 2, "[ptxas] fixed latency, 2 apart"),
    Rate("MUFU", "special", "XU", 8, "[guide] 16"),
    Rate("F2F F2I I2F FRND POPC FLO BREV", "convert slowly", "XU", 8, "[guide] 16"),
    Rate("IMAD IDP", "integer", "FMA", 2, "[guide] [ptxas] 64"),
    Rate("IADD3 IADD VIADD VIADDMNMX VIMNMX VIMNMX3 IMNMX", "integer", "ALU", 1, "[guide] 128 on 12.0, 64 on 9.0", 2),
    Rate(
        "LOP3 SHF PRMT LEA ISETP SEL IABS BMSK SGXT LOP PLOP3 VOTE P2R R2P CS2R VABSDIFF",
        "integer",
        "ALU",
        2,
        "[guide] [ptxas] 64",
    ),
    Rate("MOV", "integer", "ALU", 1, "[usual]"),
    Rate("LDSM", "load matrix", "LSU", 0, "[usual]"),
    Rate("LDS", "load shared", "LSU", 0, "[usual]"),
    Rate("STS STSM", "store shared", "LSU", 0, "[usual]"),
    Rate("ATOMS", "store shared", "LSU", 4, "[usual]"),
    Rate("SHFL MATCH", "shuffle", "LSU", 4, "[guide] 32"),
    Rate("REDUX CREDUX", "shuffle", "LSU", 8, "[guide] 16"),
    Rate("LDGSTS", "copy", "LSU", 0, "[usual]; and the L2's bytes"),
    Rate("UTMALDG UBLKCP UTMASTG UTMAPF", "bulk copy", "UDP", 2, "[usual]"),
    Rate("LDL", "load local", "LSU", 4, "[usual]"),
    Rate("LDG LD", "load global", "LSU", 8, "[usual]"),
    Rate("STG ST STL RED REDG ATOM ATOMG", "store global", "LSU", 8, "[usual]"),
    Rate("LDC LDCU ULDC", "load constant", "UDP", 2, "[usual]"),
    Rate("SYNCS MEMBAR FENCE ERRBAR CCTL", "barrier of memory", "LSU", 4, "[usual]"),
    Rate(
        "BAR DEPBAR LDGDEPBAR WARPSYNC NANOSLEEP UTMACMDFLUSH UTMACCTL USETMAXREG ACQBULK B2R",
        "barrier",
        "CTL",
        1,
        "issue alone",
    ),
    Rate(
        "BRA BRX JMP EXIT RET CALL BSSY BSYNC BREAK NOP BMOV YIELD KILL ELECT PREEXIT RPCMOV BPT ENDCOLLECTIVE",
        "control",
        "CTL",
        1,
        "issue alone",
    ),
    Rate("S2R S2UR R2UR CS2UR VOTEU UR2R", "uniform", "UDP", 2, "[usual]"),
)
UNIFORM = Rate("U...", "uniform", "UDP", 2, "[usual]")
OTHER = Rate("", "other", "ALU", 2, "unknown: as an integer instruction")
MMA = Rate("", "mma", "MMA", 0, "MMA_RATES")
NEVER = Rate("", "control", "CTL", 1, "@!PT: issued, never executed")
BY_STEM = {stem: rate for rate in reversed(RATES) for stem in rate.stems.split()}

PIPES = ("ISSUE", "MMA", "XU", "FMA", "ALU", "LSU", "UDP")
MATRIX_STEMS = frozenset("HMMA QMMA OMMA IMMA DMMA BMMA".split())

# Cycles from the start in the pipe to the result, for instructions that ptxas guards by scoreboards [usual]. Those of
# memory accesses vary: each takes 0 to 50 % more, at random.
LATENCIES = {
    "load matrix": 33,
    "load shared": 29,
    "store shared": 20,
    "shuffle": 24,
    "special": 20,
    "convert slowly": 20,
    "copy": 20,
    "load global": 500,
    "load local": 40,
    "store global": 20,
    "bulk copy": 20,
    "load constant": 30,
    "barrier of memory": 24,
    "uniform": 14,
    "barrier": 1,
    "integer": 14,
    "float": 14,
    "control": 4,
}
OTHER_LATENCY = 20
READ_LATENCY = 10  # cycles until the operands of such an instruction are read [usual]
COPY_LATENCY = 700  # cycles of cp.async, from L2 [usual]
BARRIER_LATENCY = 22  # cycles from the last arrival at a barrier to the next issue [usual]
BRANCH_CYCLES = 10  # cycles that a taken branch costs its warp [usual]
QUEUES = {"LSU": 8, "XU": 3, "UDP": 2}  # queue length of each pipe; 1 for all others [usual]


@cache
def rate_of(opcode: str, guard: str = "") -> Rate:
    """Return the rate of an opcode; OTHER if it has none."""
    if guard == "@!PT":
        return NEVER
    stem = opcode.split(".")[0]
    if stem in MATRIX_STEMS:
        return MMA
    return BY_STEM.get(stem) or (UNIFORM if stem.startswith("U") else OTHER)


WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "16": 2, "64": 8, "128": 16, "256": 32}


def warp_bytes(opcode: str) -> int:
    """Return the bytes that a warp's memory access moves."""
    words = opcode.split(".")
    if words[0] in ("LDSM", "STSM"):
        matrices = int(words[-1]) if words[-1] in ("2", "4") else 1
        return matrices * (
            256
            if any("16M" in word or "MT16" in word or "M1616" in word for word in words) and "M88" not in words
            else 128
        )
    return 32 * next((WIDTHS[word] for word in words if word in WIDTHS), 4)


def cycles_of(opcode: str, card: Card, guard: str = "") -> float:
    """Return the cycles for which an instruction occupies its pipe."""
    rate = rate_of(opcode, guard)
    if rate is MMA:
        return mma_cycles(opcode, card)
    if rate.cycles:
        return rate.cycles_on(card.target)
    return 4 * max(1.0, warp_bytes(opcode) / 128)
