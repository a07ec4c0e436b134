"""Random calls as programs: drawn from a seed, run, checked, reduced if they fail, and printed as code.

A recipe with `wrong` is a call that must be refused. A recipe with `odd` may be refused or give a right result. All
others must give a right result. A refusal is a PtxError with an informative message; after it every variable named in
`kept` is unchanged.
"""

from __future__ import annotations

import gc
import random
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import ptxrt
from ptxrt import dlpack

# Limits for reducing a failing call.
REDUCING_SECONDS, REDUCING_RUNS = 60, 400
_HEAD = "import ml_dtypes, numpy as np, ptxrt"


@dataclass(frozen=True)
class Kind:
    """A kind of call.

    draw: returns a recipe. program: returns a recipe's call as code. check: takes the variables that the code left and
    raises AssertionError if they are wrong. needed: values that a recipe must keep.
    """

    name: str
    draw: Callable[[random.Random], dict]
    program: Callable[[dict], str]
    check: Callable[[dict], None]
    needed: tuple[str, ...] = ()


@dataclass
class Tally:
    """The results of the calls of one kind: the count of each outcome, and the programs of failures."""

    kind: str
    seed: int
    outcomes: Counter = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        counted = ", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items()))
        return f"{self.kind}: {sum(self.outcomes.values())} calls, seed {self.seed}, {self.seconds:.1f} s: {counted}"


def random_of(kind: Kind, seed: int, call: int) -> random.Random:
    """The random generator of one call: the same in every process."""
    return random.Random(f"{kind.name} {seed} {call}")


def outcome(kind: Kind, recipe: dict) -> tuple[str, str]:
    """("right" or "refused", "") if a call behaves as it should, else ("failed", why)."""
    names: dict[str, Any] = {"__name__": f"fuzz_{kind.name}"}
    dlpack._sweep()  # otherwise unconsumed capsules live until the next export
    before, refusal = ptxrt.memory_info().used, None
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exec(compile(program_of(kind, recipe), f"<{kind.name}>", "exec"), names)
            why = _fault_of_result(kind, recipe, names)
        except ptxrt.PtxError as error:
            refusal = f"{type(error).__name__}: {error}"
            why = _fault_of_refusal(recipe, names, error)
        except (Exception, RecursionError) as error:
            why = f"{type(error).__name__} is no error of ptxrt: {error}"
    names.clear()
    if why:
        return "failed", why
    if refusal and ptxrt.memory_info().used > before:
        gc.collect()
        dlpack._sweep()
        ptxrt.synchronize()
        ptxrt.trim_memory()  # memory lent to others counts as used until the device is done with it
        if (after := ptxrt.memory_info().used) > before:
            return (
                "failed",
                f"a refused call keeps device memory, {before} bytes before and {after} after it: {refusal}",
            )
    return "refused" if refusal else "right", ""


def _fault_of_refusal(recipe: dict, names: dict, error: ptxrt.PtxError) -> str:
    """What is wrong with an error; "" if the recipe should raise it."""
    told = f"{type(error).__name__}: {error}"
    if not ("wrong" in recipe or "odd" in recipe):
        return f"a right call was refused by {told}"
    if len(str(error)) <= 20:
        return f"the message says nothing: {told}"
    for name, copy in names.get("kept", {}).items():
        if not same(names[name], copy):
            return f"a refused call changed {name}: {told}"
    return ""


def _fault_of_result(kind: Kind, recipe: dict, names: dict) -> str:
    """What is wrong with the results of a call; "" if they are right."""
    if "wrong" in recipe:
        return f"a wrong call was accepted: {recipe['wrong']}"
    try:
        kind.check(names)
    except AssertionError as error:
        return f"the result is wrong: {error}"
    return ""


def same(array, copy) -> bool:
    """Whether an array on any machine holds the bytes of a NumPy array."""
    host = array.to_numpy() if hasattr(array, "to_numpy") else np.asarray(array)
    return host.tobytes() == copy.tobytes()


def program_of(kind: Kind, recipe: dict) -> str:
    """The code of a call."""
    return f"{_HEAD}\n{kind.program(recipe)}\n"


def printed(kind: Kind, recipe: dict, machine: str, why: str) -> str:
    """A failure as code that runs in the root of a checkout."""
    code = program_of(kind, recipe).strip().replace(_HEAD, f"{_HEAD}\n\nptxrt.using({machine!r})", 1)
    ending = (
        "# It must be refused."
        if "wrong" in recipe
        else f"from {kind.check.__module__} import {kind.check.__name__}; {kind.check.__name__}(globals())"
    )
    return "\n".join([f"# {line}" for line in why.splitlines()[:6]] + [code, ending])


# Reducing a failure


def reduced(kind: Kind, recipe: dict, why: str) -> tuple[dict, str]:
    """The smallest recipe found that fails in the same way, and its failure."""
    wanted, runs, ends = _nature(why), 0, time.monotonic() + REDUCING_SECONDS
    progress = True
    while progress:
        progress = False
        for candidate in simpler(kind, recipe):
            if runs >= REDUCING_RUNS or time.monotonic() > ends:
                return recipe, why
            runs += 1
            try:
                result, told = outcome(kind, candidate)
            except Exception:  # the candidate is no valid recipe
                continue
            if result == "failed" and _nature(told) == wanted:
                recipe, why, progress = candidate, told, True
                break
    return recipe, why


def _nature(why: str) -> str:
    """A failure message without its numbers."""
    return re.sub(r"[-+\d.,e\[\]() ]+", " ", why)[:70]


def simpler(kind: Kind, recipe: dict) -> Iterator[dict]:
    """Recipes with one value removed or reduced."""
    for name in recipe:
        if name not in kind.needed and name not in ("wrong", "odd", "seed"):
            yield {other: value for other, value in recipe.items() if other != name}
    for name, value in recipe.items():
        if name not in ("wrong", "odd", "seed"):
            for smaller in _smaller(value):
                yield {**recipe, name: smaller}


def _smaller(value: Any) -> Iterator[Any]:
    if isinstance(value, bool) or not isinstance(value, (int, list, tuple)):
        return
    if isinstance(value, int):
        yield from dict.fromkeys(n for n in (1, value // 2, value - 1) if 0 < n < value)
        return
    for i, item in enumerate(value):
        yield type(value)([*value[:i], *value[i + 1 :]])
        for smaller in _smaller(item):
            yield type(value)([*value[:i], smaller, *value[i + 1 :]])


# Many calls


def run(
    kind: Kind,
    *,
    seed: int,
    calls: range,
    machine: str = "emulator",
    seconds: float | None = None,
    most_failures: int = 5,
) -> Tally:
    """Run calls of a kind on the current machine, until there are enough failures or time is up."""
    tally, started = Tally(kind.name, seed), time.monotonic()
    gc.collect()
    gc.freeze()  # so that collecting garbage after a refused call is fast
    for call in calls:
        if (seconds is not None and time.monotonic() - started > seconds) or len(tally.failures) >= most_failures:
            break
        recipe = kind.draw(random_of(kind, seed, call))
        result, why = outcome(kind, recipe)
        tally.outcomes[result] += 1
        if result == "failed":
            smallest, why = reduced(kind, recipe, why)
            tally.failures.append(f"# {kind.name}, seed {seed}, call {call}\n{printed(kind, smallest, machine, why)}")
    tally.seconds = time.monotonic() - started
    return tally
