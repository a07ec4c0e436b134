"""Random calls of every kind, right and wrong, on every machine: `make fuzz` runs more of them, with other seeds."""

import pytest

from tests.fuzz import __main__ as fuzz
from tests.fuzz import engine

# Calls of each kind in a run of the suite, up to a few seconds each. Change SEED to run others.
CALLS = dict(
    attention=100,
    dlpack=300,
    files=300,
    graphs=40,
    merge=200,
    operands=120,
    pages=30,
    products=60,
    quantize=150,
    texts=100,
    views=500,
)
SEED = 20240607


@pytest.mark.parametrize("kind", [fuzz.KINDS[name] for name in CALLS], ids=lambda kind: kind.name)
def test_random_calls(machine, kind):
    """Right calls are within the bounds of float64; wrong calls raise typed errors and leave nothing behind."""
    name = machine.name
    tally = engine.run(kind, seed=SEED, calls=range(CALLS[kind.name]), machine=name, most_failures=3)
    assert not tally.failures, "\n\n".join([str(tally), *tally.failures])
    assert tally.outcomes["right"] >= CALLS[kind.name] // 5, tally
    assert kind.name == "texts" or tally.outcomes["refused"] >= CALLS[kind.name] // 20, tally


@pytest.mark.parametrize(
    "wrong, said", [(["--machine", "abacus"], "native, portable, emulator"), (["--process", "2/2"], "0/4")]
)
def test_a_wrong_choice_is_a_message(monkeypatch, capsys, wrong, said):
    monkeypatch.setattr("sys.argv", ["tests.fuzz", "quantize", *wrong])
    with pytest.raises(SystemExit) as ended:
        fuzz.main()
    assert ended.value.code == 2 and said in capsys.readouterr().err
