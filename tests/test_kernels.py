"""Every declared kernel at every declared size, on every machine, against its reference."""

import pytest

import ptxrt

KERNELS = ptxrt.kernels()
CASES = [(kernel.name, case) for kernel in KERNELS.values() for case in kernel.cases]


def each_entry_once():
    """The first case of every entry that any case reaches."""
    seen = {}
    for name, case in CASES:
        kernel = KERNELS[name]
        seen.setdefault(kernel.entry_name({**kernel.fixed, **case.axes}, case.format), (name, case))
    return list(seen.values())


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
    got = kernel(**example)
    want = kernel.reference(**example)
    results = dict(zip(want, got if isinstance(got, tuple) else (got,)))
    for output, (comparison, missed) in kernel.check(results, want).items():
        assert not missed, f"{output}: {', '.join(missed)}; {comparison}"


@pytest.mark.parametrize("name, case", CASES, ids=case_id)
def test_kernel(machine, name, case):
    run_and_check(name, case)


def raced_once():
    """Every case, and whether it is the first of its unit: tiles and stages are those of the unit's sizes.

    Probes, whose stand-ins are slow, have one warp or the loads of attention.
    """
    seen = set()
    for name, case in CASES:
        unit = KERNELS[name].unit_name({**KERNELS[name].fixed, **case.axes})
        races = unit not in seen and not name.startswith("probe_")
        seen.add(unit)
        yield pytest.param(name, case, races, marks=[pytest.mark.races] * races, id=f"{name}-{case.id}")


@pytest.mark.parametrize("name, case, races", list(raced_once()))
def test_portable_text_on_the_emulator(name, case, races):
    """What compute_90 makes of a kernel copies and waits in other ways."""
    with ptxrt.using("emulator", ptx="portable", races=races):
        run_and_check(name, case)


@pytest.mark.parametrize("name, case", smallest(), ids=case_id)
def test_hardware_arithmetic_on_the_emulator(name, case):
    with ptxrt.using("emulator", arithmetic="hardware"):
        run_and_check(name, case)


@pytest.mark.sanitize
@pytest.mark.parametrize("name, case", each_entry_once(), ids=case_id)
def test_under_a_sanitizer(name, case):
    """The small subset for compute-sanitizer, on the machine of PTXRT_MACHINE or the default."""
    if ptxrt.backend.default_machine() == "emulator":
        pytest.skip("the default machine is the emulator, which no sanitizer watches")
    run_and_check(name, case)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: kernel.name)
def test_cases_reach_every_variant(kernel):
    """Every compiled unit runs somewhere in these tests."""
    reached = {kernel.unit_name({**kernel.fixed, **case.axes}) for case in kernel.cases}
    assert reached == {unit.name for unit in kernel.units}
