"""Declarations against the compiled modules: units, entries, parameters and launch facts."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import ptxrt
from ptxrt import errors, ptx, units
from ptxrt.backend import Entry, Facts, Param
from ptxrt.declaration import half_of
from ptxrt.launch import checked_entry

UNITS = [unit for kernel in ptxrt.kernels().values() for unit in kernel.units]


class Text:
    """A parsed text in place of a loaded module."""

    def __init__(self, unit, portable):
        path = units.text_path(unit.name, portable)
        self.name = path.name
        self.parsed = ptx.parse(units.read(path).decode(), path.name)
        self.entries = {name: Entry.from_text(function, None) for name, function in self.parsed.entries.items()}


def whole_blocks(entries):
    """The entries without those of half blocks, which only some targets have."""
    return [name for name in entries if not name.endswith(half_of(""))]


@pytest.mark.parametrize("portable", [False, True], ids=["native", "portable"])
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_entries_are_the_declared_ones(unit, portable):
    kernel = ptxrt.kernels()[unit.kernel]
    text = Text(unit, portable)
    assert sorted(whole_blocks(text.entries)) == sorted(kernel.entries(unit))
    assert len(text.entries) in (len(kernel.entries(unit)), 2 * len(kernel.entries(unit)))
    recorded = units.launches(unit.name, "compute_90" if portable else "compute_120f")
    assert {
        name: Entry.from_record(name, launch["parameters"], None) for name, launch in recorded.items()
    } == text.entries
    assert {name: Facts.of(name, launch["launch"]) for name, launch in recorded.items()} == {
        name: Facts.read(name, text.parsed.constant(f"{name}_launch")) for name in text.entries
    }
    for name in kernel.entries(unit):
        checked_entry(kernel, text, name)
        facts = Facts.read(name, text.parsed.constant(f"{name}_launch"))
        threads = facts.threads[0] * facts.threads[1] * facts.threads[2]
        maxntid = text.parsed.entries[name].maxntid
        assert maxntid is not None and maxntid[0] * maxntid[1] * maxntid[2] == threads <= 1024
        assert len(kernel.grid) == 3 or set(facts.tile[len(kernel.grid) :]) == {1}
        if half_of(name) in text.entries:
            assert kernel.halved
            half = Facts.read(half_of(name), text.parsed.constant(f"{half_of(name)}_launch"))
            assert all(mine <= others for mine, others in zip(half.tile, facts.tile)) and half.tile != facts.tile


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_records_name_the_variant(unit):
    record = units.record(unit.name)
    assert record["variant"] == dict(unit.variant)
    assert sorted(whole_blocks(record["entries"])) == sorted(ptxrt.kernels()[unit.kernel].entries(unit))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_what_other_gpus_run_has_the_same_parameters(unit):
    """The compute_80 text is not kept: GPU machines know its entries only from the record."""
    if "compute_80" not in units.record(unit.name)["texts"]:
        pytest.skip("a quick build leaves compute_80 out; `make test ALL=1` compiles it")
    kernel, launches = ptxrt.kernels()[unit.kernel], units.launches(unit.name, "compute_80")
    assert sorted(whole_blocks(launches)) == sorted(kernel.entries(unit))
    module = Loaded("none")
    module.entries = {name: Entry.from_record(name, launch["parameters"], None) for name, launch in launches.items()}
    for name, launch in launches.items():
        checked_entry(kernel, module, name)
        assert 0 < Facts.of(name, launch["launch"]).threads[0] <= 1024


def test_parameters_of_a_record_lie_as_ptx_lays_them():
    entry = Entry.from_record("k", "u64.ptr f32 u64 b8[10]@16 u16", None)
    assert entry.params == (
        *(Param("u64", 8, 0, is_pointer=True), Param("f32", 4, 8), Param("u64", 8, 16)),
        *(Param("b8", 10, 32, is_struct=True), Param("u16", 2, 42)),
    )
    assert entry.param_bytes == 44
    assert Entry.from_record("k", "", None).params == ()
    for words in ("u65", "u64.pointer", "b8[4]", "b8[4]@0", "pred"):
        with pytest.raises(ptxrt.AbiError, match="the record of k has a parameter"):
            Entry.from_record("k", words, None)


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
    write_record(tmp_path, "lone_unit")
    for unit in ("transpose_nowhere", "damaged_unit", "lone_unit"):
        with pytest.raises(
            ptxrt.BuildError, match=r"reinstall its wheel \(pip install --force-reinstall WHEEL\)$"
        ) as caught:
            units.read(units.text_path(unit, False))
        assert "make" not in str(caught.value)
    with pytest.raises(ptxrt.AbiError, match="reinstall it"):
        checked_entry(ptxrt.kernels()["transpose_naive"], Loaded("other"), "transpose_naive")


def test_a_module_older_than_its_source_says_so(monkeypatch, tmp_path):
    (tmp_path / "kernels_cu").mkdir()
    (tmp_path / "kernels_cu" / "a.cu").write_text("new")
    write_record(tmp_path, "stale_unit", sources={"kernels_cu/a.cu": "0123"})
    monkeypatch.setattr(units, "MODULES", tmp_path)
    monkeypatch.setattr(units, "CHECKOUT", tmp_path)
    with pytest.raises(ptxrt.BuildError, match="stale_unit was built from another kernels_cu/a.cu; run `make`"):
        units.check_fresh("stale_unit")


def write_record(folder, unit, **parts):
    parts = {**dict.fromkeys(("variant", "sources", "entries", "sha256", "texts"), {}), **parts}
    (folder / f"{unit}.json").write_text(json.dumps(parts))


@pytest.fixture
def modules(monkeypatch, tmp_path):
    """An empty folder of modules in a package without sources."""
    monkeypatch.setattr(units, "MODULES", tmp_path)
    monkeypatch.setattr(units, "CHECKOUT", tmp_path)
    units.check_fresh.cache_clear()
    yield tmp_path
    units.check_fresh.cache_clear()


@pytest.mark.parametrize(
    "content", ["", "{", "{}", "[]", "null", "1", '"text"', '{"sources": []}', "[" * 100_000, b"\xff\xfe", "\0"]
)
def test_a_record_that_is_none_is_a_build_error(modules, content):
    (modules / "unit.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    for ask in (
        units.record,
        units.check_fresh,
        lambda unit: units.text(unit, False),
        lambda unit: units.launches(unit, "compute_120f"),
    ):
        with pytest.raises(ptxrt.BuildError, match="unit.json is damaged.*make|reinstall"):
            ask("unit")


@pytest.mark.parametrize(
    "table", [[], "x", 1, {"e": None}, {"e": {}}, {"e": {"parameters": 1, "launch": []}}, {"e": {"parameters": ""}}]
)
def test_a_damaged_table_of_entries_is_a_build_error(modules, table):
    write_record(modules, "unit", texts={"compute_120f": table})
    with pytest.raises(ptxrt.BuildError, match="is not a table of entries"):
        units.launches("unit", "compute_120f")
    with pytest.raises(ptxrt.BuildError, match="not compiled for compute_90"):
        units.launches("unit", "compute_90")


@pytest.mark.parametrize("launch", [[1] * 8, [1] * 10, ["1"] * 9, [1.5] * 9])
def test_damaged_launch_constants_are_an_abi_error(launch):
    with pytest.raises(ptxrt.AbiError, match="nine numbers"):
        Facts.of("entry", launch)


def test_a_changed_module_is_a_build_error(modules, monkeypatch):
    for name, read in (("unit.ptx", units.text), ("unit.fatbin", units.binary)):
        (modules / name).write_bytes(b"what was built")
        write_record(modules, "unit", sha256={name: hashlib.sha256(b"what was built").hexdigest()})
        assert read("unit", False) in ("what was built", b"what was built")
        (modules / name).write_bytes(b"what was bui1t")
        with pytest.raises(ptxrt.BuildError, match=f"{name} is not the file that was built: its digest differs"):
            read("unit", False)
        monkeypatch.setenv("PTXRT_VERIFY", "0")
        assert read("unit", False) in ("what was bui1t", b"what was bui1t")
        monkeypatch.delenv("PTXRT_VERIFY")
        write_record(modules, "unit")
        with pytest.raises(ptxrt.BuildError, match="digest differs"):
            read("unit", False)


@pytest.mark.parametrize(
    "capability, file",
    [((9, 0), "unit.portable.fatbin")]
    + [((8, minor), "unit.portable.fatbin") for minor in (0, 6, 9)]
    + [(capability, "unit.compute_80.ptx") for capability in ((8, 7), (10, 0), (10, 3), (11, 0), (12, 0), (13, 0))],
)
def test_a_gpu_loads_machine_code_or_else_a_text_that_its_driver_compiles(modules, capability, file):
    files = {name: name.encode() for name in ("unit.fatbin", "unit.portable.fatbin", "unit.compute_80.ptx")}
    for name, data in files.items():
        (modules / name).write_bytes(data)
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    write_record(modules, "unit", sha256=digests, texts=dict.fromkeys(("compute_120f", "compute_90", "compute_80"), {}))
    assert units.image("unit", True, capability) == files[file] + (b"\0" if file.endswith(".ptx") else b"")
    assert units.image("unit", False, (12, 0)) == b"unit.fatbin"
    (modules / file).write_bytes(b"changed")
    with pytest.raises(ptxrt.BuildError, match=f"{file} is not the file that was built"):
        units.image("unit", True, capability)
    # The portable fatbin of a quick build holds a text itself.
    (modules / "unit.portable.fatbin").write_bytes(files["unit.portable.fatbin"])
    write_record(modules, "unit", sha256=digests, texts=dict.fromkeys(("compute_120f", "compute_90"), {}))
    assert units.image("unit", True, capability) == b"unit.portable.fatbin"


def test_a_text_that_is_no_text_is_a_build_error(modules, monkeypatch):
    data = b".version 8.8 // \xff"
    (modules / "unit.ptx").write_bytes(data)
    write_record(modules, "unit", sha256={"unit.ptx": hashlib.sha256(data).hexdigest()})
    with pytest.raises(ptxrt.BuildError, match="unit.ptx is damaged: it is no UTF-8 text"):
        units.text("unit", False)


def test_no_kernel_runs_on_changed_bytes(modules, monkeypatch):
    """The text is changed in the type of one conversion; only its digest tells that it is not the built file."""
    from ptxrt import selection

    source = Path(ptxrt.__file__).parent / "modules"
    for name in ("quantize_mxfp4.json", "quantize_mxfp4.ptx"):
        shutil.copy(source / name, modules / name)
    text = (modules / "quantize_mxfp4.ptx").read_bytes()
    (modules / "quantize_mxfp4.ptx").write_bytes(
        text.replace(b"cvt.rn.satfinite.e2m1x2.f32", b"cvt.rn.satfinite.e2m1x2.f16", 1)
    )
    monkeypatch.setattr(selection, "_opened", {})
    with (
        ptxrt.using("emulator", budget=10**9),
        pytest.raises(ptxrt.BuildError, match="quantize_mxfp4.ptx is not the file that was built"),
    ):
        ptxrt.quantize(np.ones((2, 32), np.float32), "mxfp4")
