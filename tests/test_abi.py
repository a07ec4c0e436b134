"""Declarations against the compiled modules: units, entries, parameters and launch facts."""

import pytest

import ptxrt
from ptxrt import errors, ptx, units
from ptxrt.backend import Entry, Facts, Param
from ptxrt.kernel import half_of
from ptxrt.launch import checked_entry

UNITS = [unit for kernel in ptxrt.kernels().values() for unit in kernel.units]


class Text:
    """A parsed text in the place of a loaded module."""

    def __init__(self, unit, portable):
        path = units.text_path(unit.name, portable)
        self.name = path.name
        self.parsed = ptx.parse(units.read(path).decode(), path.name)
        self.entries = {name: Entry.from_text(function, None) for name, function in self.parsed.entries.items()}


@pytest.mark.parametrize("portable", [False, True], ids=["native", "portable"])
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_entries_are_the_declared_ones(unit, portable):
    kernel = ptxrt.kernels()[unit.kernel]
    text = Text(unit, portable)
    assert sorted(text.entries) == sorted(kernel.entries(unit))
    for name in kernel.entries(unit):
        checked_entry(kernel, text, name)
        facts = Facts.read(name, text.parsed.constant(f"{name}_launch"))
        threads = facts.threads[0] * facts.threads[1] * facts.threads[2]
        maxntid = text.parsed.entries[name].maxntid
        assert maxntid is not None and maxntid[0] * maxntid[1] * maxntid[2] == threads <= 1024
        assert len(kernel.grid) == 3 or set(facts.tile[len(kernel.grid) :]) == {1}
        if half_of(name) in text.entries:
            half = Facts.read(half_of(name), text.parsed.constant(f"{half_of(name)}_launch"))
            start, end = text.parsed.entries[half_of(name)].body
            assert all(mine <= others for mine, others in zip(half.tile, facts.tile))
            assert (half.tile == facts.tile) == (end - start < 500), "there is nothing in it where it is no smaller"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_records_name_the_variant(unit):
    record = units.record(unit.name)
    assert record["variant"] == dict(unit.variant)
    assert sorted(record["entries"]) == sorted(ptxrt.kernels()[unit.kernel].entries(unit))


def test_fixed_threads_are_those_of_the_block():
    kernel = ptxrt.kernels()["thread_identity"]
    text = Text(kernel.units[0], False)
    facts = Facts.read(kernel.name, text.parsed.constant(f"{kernel.name}_launch"))
    assert facts.threads[0] * facts.threads[1] * facts.threads[2] == kernel.fixed["threads"]


class Loaded:
    """A module with one entry of given parameters."""

    name = "module"

    def __init__(self, name, *params):
        self.entries = {name: Entry(name, params, 0, None)}


POINTER, SIZE = Param("u64", 8, 0, is_pointer=True), Param("u32", 4, 8)


@pytest.mark.parametrize(
    "params",
    [
        (POINTER, POINTER, SIZE),
        (POINTER, POINTER, SIZE, SIZE, SIZE),
        (POINTER, SIZE, POINTER, SIZE),
        (POINTER, POINTER, SIZE, Param("f32", 4, 0)),
        (POINTER, POINTER, SIZE, POINTER),
        (POINTER, Param("b8", 8, 0, is_struct=True), SIZE, SIZE),
        (POINTER, Param("u32", 4, 0), SIZE, SIZE),
        (POINTER, Param("f64", 8, 0), SIZE, SIZE),
    ],
)
def test_a_parameter_list_that_differs_is_an_abi_error(params):
    kernel = ptxrt.kernels()["transpose_naive"]
    with pytest.raises(ptxrt.AbiError, match="address of x, address of y, axis rows, axis cols") as caught:
        checked_entry(kernel, Loaded("transpose_naive", *params), "transpose_naive")
    assert "run `make`" in str(caught.value)


def test_the_declared_list_fits_in_either_size():
    kernel = ptxrt.kernels()["transpose_naive"]
    for size in (SIZE, Param("s32", 4, 0), Param("u64", 8, 0), Param("b64", 8, 0)):
        checked_entry(kernel, Loaded("transpose_naive", POINTER, Param("u64", 8, 0), size, size), "transpose_naive")


def test_strides_are_parameters_of_eight_bytes():
    kernel = ptxrt.kernels()["cast"]
    arrays, axes = (POINTER,) * 4, (SIZE,) * 5
    checked_entry(kernel, Loaded("cast", *arrays, *axes, *(Param("u64", 8, 0),) * 16), "cast")
    for strides in ((Param("u64", 8, 0),) * 15, (SIZE,) * 16, (POINTER,) * 16):
        with pytest.raises(ptxrt.AbiError, match="axis width, stride 0 of x, stride 1 of x, .*stride 3 of y_bf16"):
            checked_entry(kernel, Loaded("cast", *arrays, *axes, *strides), "cast")


def test_a_missing_entry_is_an_abi_error():
    kernel = ptxrt.kernels()["transpose_naive"]
    with pytest.raises(ptxrt.AbiError, match="module holds no entry transpose_naive.*it holds other"):
        checked_entry(kernel, Loaded("other"), "transpose_naive")


def test_facts_fill_what_the_text_leaves_out():
    facts = Facts.read("k", bytes([128, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4]))
    assert facts == Facts((128, 1, 1), 1024, (1, 1, 1), 1, 0)
    with pytest.raises(ptxrt.AbiError, match="40 bytes"):
        Facts.read("k", bytes(40))


def test_a_missing_module_says_make(monkeypatch, tmp_path):
    monkeypatch.setattr(units, "MODULES", tmp_path)
    with pytest.raises(ptxrt.BuildError, match="transpose_nowhere is not built.*run `make`"):
        units.read(units.text_path("transpose_nowhere", False))


def test_an_installed_package_is_to_be_reinstalled(monkeypatch, tmp_path):
    monkeypatch.setattr(units, "MODULES", tmp_path)
    monkeypatch.setattr(units, "CHECKOUT", tmp_path)
    monkeypatch.setattr(errors, "_SOURCES", tmp_path / "kernels_cu")
    (tmp_path / "damaged_unit.json").write_text("{")
    (tmp_path / "lone_unit.json").write_text('{"sources": {}}')
    for unit in ("transpose_nowhere", "damaged_unit", "lone_unit"):
        with pytest.raises(ptxrt.BuildError, match=r"reinstall it \(pip install --force-reinstall ptxrt\)$") as caught:
            units.read(units.text_path(unit, False))
        assert "make" not in str(caught.value)
    with pytest.raises(ptxrt.AbiError, match="reinstall it"):
        checked_entry(ptxrt.kernels()["transpose_naive"], Loaded("other"), "transpose_naive")


def test_a_module_older_than_its_source_says_so(monkeypatch, tmp_path):
    (tmp_path / "kernels_cu").mkdir()
    (tmp_path / "kernels_cu" / "a.cu").write_text("new")
    (tmp_path / "stale_unit.json").write_text('{"sources": {"kernels_cu/a.cu": "0123"}}')
    monkeypatch.setattr(units, "MODULES", tmp_path)
    monkeypatch.setattr(units, "CHECKOUT", tmp_path)
    with pytest.raises(ptxrt.BuildError, match="stale_unit is older than kernels_cu/a.cu; run `make`"):
        units.check_fresh("stale_unit")
    (tmp_path / "damaged_unit.json").write_text("{")
    with pytest.raises(ptxrt.BuildError, match="damaged"):
        units.check_fresh("damaged_unit")
