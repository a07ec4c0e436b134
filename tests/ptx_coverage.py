"""Run the tests that launch kernels and print which PTX lines of each kernel they executed: `make coverage`.

Arguments go to pytest in place of TESTS. Lines count once per entry that holds them, and entries that no test launches count as
not run.
The exit code is 1 where the tests fail or the native text of a kernel is run by less than 95 %.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import ptxrt  # noqa: E402
from ptxrt import units  # noqa: E402
from ptxrt.emulator.check import merge  # noqa: E402
from ptxrt.kernel import half_of  # noqa: E402
from ptxrt.ptx.ir import Instruction  # noqa: E402
from ptxrt.ptx.parse import body, parse  # noqa: E402

COUNTS = ROOT / ".coverage-ptx"
# The files whose tests launch the collection's kernels for their results; all others test what is around them.
TESTS = ["kernels", "quantize", "attention", "attention_blocks", "attention_mxfp4_bf16", "operands", "probes"]
WANTED = 0.95
SHOWN = 12  # source lines listed for each kernel

REASON = """
Why lines stay that no test runs: nvcc unrolls the loops that copy, convert and transpose tiles, and keeps remainders and early
exits for trip counts that no tile has. In attention_mxfp4_bf16 and probe_scores_mxfp4 these are the loops of copy_rows and
convert_to_bf16 (with SharedTile, cp_async.cuh and the conversions inlined into them); in the portable transposes the loop
over rows, which starts at threadIdx.y: nvcc does not know there that it is below 8. In quantize_nvfp4 and its columns, of f16
what sixth() has for magnitudes below 2^-60, of which f16 has none but 0; in the portable text of 16-bit values also the plain
branch of divide_by_step(): such blocks have thresholds and are not divided. Kernels in variants (attention_*, pack_*,
mean_scores_*): every variant and entry runs, but options (masks, windows, soft caps, sinks, smoothing, packed sequences, splits, types of
outputs, both scale rules) run in one variant or a few, since they are the same source in all; lines count once per entry that
holds them. The merge and the first reads (attention_merge, scan_keys, mean_keys, operand_scale, unpack_rows) have unrolled loops
for trip counts that small problems do not have."""


def run_tests(arguments):
    """Run pytest with counting, a process to a core, eight at most; return its exit code."""
    shutil.rmtree(COUNTS, ignore_errors=True)
    environment = {**os.environ, "PTXRT_COVERAGE": str(COUNTS)}
    processes = ["--quiet", "--numprocesses", "auto", "--maxprocesses", "8", "--dist", "worksteal", "-m", "not gpu"]
    chosen = arguments or [*(f"tests/test_{name}.py" for name in TESTS), "-k", "not hardware_arithmetic"]  # the same lines again
    return subprocess.run([sys.executable, "-m", "pytest", *processes, *chosen], cwd=ROOT, env=environment).returncode


def source_lines(text):
    """Return for every line of a PTX text the source line that its latest `.loc` names, as FILE:LINE."""
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.MULTILINE))
    found, current = {}, "no source line"
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line):
            current = f"{files.get(match[1], '?')}:{match[2]}"
        found[number] = current
    return found


def kernel_coverage(kernel, counts, portable):
    """Return (lines run, all lines, {source line: PTX lines not run}, entries never launched) of one kernel."""
    run = total = 0
    missed, idle = Counter(), []
    for unit in kernel.units:
        path = units.text_path(unit.name, portable)
        text = path.read_text()
        module, sources = parse(text, path.name), source_lines(text)
        for entry in kernel.entries(unit):
            executed = counts.get(path.name, {}).get(entry, {})
            lines = {s.line for s in body(module, module.functions[entry]).statements if isinstance(s, Instruction)}
            if entry.endswith(half_of("")) and len(lines) == 1:
                continue  # nothing is in it, and nobody launches it
            total += len(lines)
            if not executed:
                idle.append(entry)
                continue
            not_run = [line for line in lines if not executed.get(line)]
            run += len(lines) - len(not_run)
            missed.update(sources[line] for line in not_run)
    return run, total, missed, idle


def main():
    failed = run_tests(sys.argv[1:])
    counts = merge(COUNTS)
    low = []
    for portable in (False, True):
        print(f"\nPTX lines run of the {'portable' if portable else 'native'} texts")
        for kernel in ptxrt.kernels().values():
            run, total, missed, idle = kernel_coverage(kernel, counts, portable)
            print(f"  {kernel.name:24} {run / total:7.1%}  {run} of {total}")
            if idle:
                print(f"    never launched: {len(idle)} entries ({', '.join(idle[:4])}{', ...' if len(idle) > 4 else ''})")
            for source, number in missed.most_common(SHOWN):
                print(f"    {source}: {number} PTX lines not run")
            if not portable and run < WANTED * total:
                low.append(kernel.name)
    print(REASON)
    if low:
        print(f"\nbelow {WANTED:.0%}: {', '.join(low)}")
    return 1 if failed or low else 0


if __name__ == "__main__":
    sys.exit(main())
