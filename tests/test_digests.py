"""The record of digests: it is repeatable and complete, and one changed bit changes it."""

import json

import numpy as np
import pytest

import digests
import ptxrt
from ptxrt.ops.attention import ATTENTION


def test_a_bit_more_is_another_digest():
    x = np.zeros((2, 3), np.float32)
    bits = x.view(np.uint32).copy()
    bits[1, 2] ^= 1
    assert digests.digest(x) == digests.digest(x.copy()) == digests.digest((x,))
    others = (x.reshape(3, 2), bits, bits.view(np.float32), -x)
    assert len({digests.digest(array) for array in (x, *others)}) == 5


def test_everything_is_recorded():
    runs = [(text, name) for text, name, _ in digests.chosen([])]
    assert len(runs) == len(set(runs)) and {text for text, _ in runs} == set(digests.TEXTS)
    names = [name for _, name in runs]
    kernels = {f"{kernel.name}/{case.id}" for kernel in ptxrt.kernels().values() for case in kernel.cases}
    assert kernels <= set(names)
    for formats in ATTENTION:
        spelled = "+".join(word for word in formats if word)
        of_way = [name.split("/")[2:] for name in names if name.startswith(f"attention/{spelled}/")]
        assert {dims for dims, *_ in of_way} == {f"{dim}x{dim_v}" for dim, dim_v in digests.HEAD_DIMS}
        for dims in ("64x64", "128x128"):
            assert {option for of, option, *_ in of_way if of == dims} == set(digests.OPTIONS)


def test_whole_and_half_blocks_are_recorded_where_there_are_both():
    def entry(run) -> str:
        with ptxrt.using("emulator", ptx="native"), ptxrt.trace() as trace:
            run()
        (entry,) = (launch.entry for launch in trace.launches if launch.kernel == "attention_nvfp4")
        return entry

    plain = "attention/nvfp4+nvfp4/64x64/plain"
    runs = {name: run for _, name, run in digests.chosen([f"native/{plain}/*"])}
    assert entry(runs[f"{plain}/half"]).endswith("_half")
    assert not entry(runs[f"{plain}/whole"]).endswith("_half")


def test_a_record_is_compared_with_another(tmp_path, monkeypatch, capsys):
    before, after = tmp_path / "before.json", tmp_path / "after.json"

    def record(*arguments) -> int:
        monkeypatch.setattr("sys.argv", ["digests.py", *map(str, arguments)])
        return digests.main()

    assert record(before, "native/fill_f32/*") == 0
    assert record(after, "native/fill_f32/*", "--compare", before) == 0
    found = json.loads(before.read_text())
    changed = next(iter(found))
    before.write_text(json.dumps({**found, changed: "0"}))
    assert record(after, "native/fill_f32/*", "--compare", before) == 1
    assert f"differs: {changed}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        record(after, "no such kernel")
