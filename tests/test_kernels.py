"""Every declared kernel at every declared size, on every machine, against its reference; also with race checks."""

import os

import pytest

import ptxrt
import sanitizer_cases
from parts import part_of_this_run
from ptxrt.commands.check import one_of_each_size

KERNELS = ptxrt.kernels()
CASES = [(kernel.name, case) for kernel in KERNELS.values() for case in kernel.cases]


def first_of_each(name_of, cases=CASES):
    """The first case for every value of name_of(kernel, axes, case)."""
    first = {}
    for name, case in cases:
        kernel = KERNELS[name]
        first.setdefault(name_of(kernel, {**kernel.fixed, **case.axes}, case), (name, case))
    return list(first.values())


def each_entry_once(cases=CASES):
    """The first case of every entry that any case reaches."""
    return first_of_each(lambda kernel, axes, case: kernel.entry_name(axes, case.format), cases)


def smallest():
    """The case of each kernel that moves the fewest bytes."""
    return [(kernel.name, min(kernel.cases, key=lambda case: bytes_moved(kernel, case))) for kernel in KERNELS.values()]


def bytes_moved(kernel, case):
    return kernel.bind(**kernel.example(case)).bytes_moved


def case_id(value):
    return value if isinstance(value, str) else value.id


def run_and_check(name, case):
    """Launch a kernel on the random inputs of a case and compare all outputs with the reference."""
    kernel = KERNELS[name]
    example = kernel.example(case)
    want = kernel.reference(**example)  # before the launch, which may change arguments in place
    got = kernel(**example)
    results = dict(zip(want, got if isinstance(got, tuple) else (got,)))
    for output, (comparison, missed) in kernel.check(results, want).items():
        assert not missed, f"{output}: {', '.join(missed)}; {comparison}"


@pytest.mark.gpu
@pytest.mark.parametrize("name, case", CASES, ids=case_id)
def test_kernel(gpu, name, case):
    run_and_check(name, case)


def raced(text):
    """The cases that run with race checks.

    In the native text: each size and each entry, since entries load different types. In the portable text, whose tiles
    and stages depend on the unit: one case of each unit. Probes are left out there: their stand-ins are slow, and they
    have one warp or the loads of attention.
    """
    if text == "native":
        return [(name, case) for name in KERNELS for case in one_of_each_size(KERNELS[name].cases)] + each_entry_once()
    return first_of_each(
        lambda kernel, axes, case: kernel.unit_name(axes), [case for case in CASES if not case[0].startswith("probe_")]
    )


def texts():
    """Every case in the native text of its unit, and whether it runs with race checks; in the portable text those with
    race checks, and a third of the others (parts.py): GPUs run them all."""
    for text in ("native", "portable"):
        chosen = {(name, case.id) for name, case in raced(text)}
        others = [(name, case.id) for name, case in CASES if (name, case.id) not in chosen]
        taken = chosen.union(others if text == "native" else part_of_this_run(others, 3))
        for name, case in CASES:
            if (name, case.id) not in taken:
                continue
            races = (name, case.id) in chosen
            yield pytest.param(
                text, name, case, races, marks=[pytest.mark.races] * races, id=f"{text}-{name}-{case.id}"
            )


@pytest.mark.parametrize("text, name, case, races", list(texts()))
def test_text_on_the_emulator(text, name, case, races):
    """The texts that nvcc compiles for compute_120f and for compute_90, which copies and waits differently."""
    with ptxrt.using("emulator", ptx=text, races=races):
        run_and_check(name, case)


@pytest.mark.parametrize("name, case", smallest(), ids=case_id)
def test_hardware_arithmetic_on_the_emulator(name, case):
    with ptxrt.using("emulator", arithmetic="hardware"):
        run_and_check(name, case)


def sanitized():
    """The cheap cases that together reach every place of the sources; sanitizer_cases.py chooses them."""
    there = {(name, case.id): (name, case) for name, case in CASES}
    part, parts = map(int, os.environ.get("PTXRT_PART", "0/1").split("/"))
    return [there[chosen] for chosen in sanitizer_cases.chosen() if chosen in there][part::parts]


def test_the_cases_for_the_sanitizer_are_there():
    there = [(name, case.id) for name, case in CASES]
    assert [chosen for chosen in sanitizer_cases.chosen() if chosen not in there] == [], "run make sanitizer-cases"
    assert sanitized()


@pytest.mark.sanitize
@pytest.mark.parametrize("name, case", sanitized(), ids=case_id)
def test_under_a_sanitizer(name, case):
    """The subset for compute-sanitizer, on the machine of PTXRT_MACHINE or the default one."""
    if ptxrt.selection.default_machine() == "emulator":
        pytest.skip("the default machine is the emulator, which no sanitizer watches")
    run_and_check(name, case)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: kernel.name)
def test_cases_reach_every_variant(kernel):
    """Every compiled unit runs in these tests."""
    reached = {kernel.unit_name({**kernel.fixed, **case.axes}) for case in kernel.cases}
    assert reached == {unit.name for unit in kernel.units}
