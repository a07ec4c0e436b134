"""Branches, calls, exits, and instructions without effect in the emulator (fences, hints).

ptx/lower.py turns control flow into basic blocks. The definitions here only check the modifiers, so that an entry with
unknown ones is refused when its text is loaded.

Source: PTX ISA 9.0, sections 9.7.12 (control flow), 9.7.9 (prefetch, discard), 9.7.13 (fences), 9.7.19 (miscellaneous).
"""

from __future__ import annotations

from .instruction import Fault, Lanes, Memory, Semantics, Unsupported, define


def _nothing(*_) -> None:
    """No effect: memory is in order, and hints and delays do not apply."""


def _plain(*allowed: tuple[str, ...]):
    """A resolver for an instruction that the lowering handles; it only checks the modifiers."""

    def resolver(modifiers: tuple[str, ...]) -> Semantics:
        if modifiers not in allowed:
            raise Unsupported(
                f"expected {' or '.join('.' + '.'.join(words) if words else 'no modifier' for words in allowed)}"
            )
        return Lanes("", "", _nothing)

    return resolver


define("bra")(_plain((), ("uni",)))
define("brx")(_plain(("idx",), ("idx", "uni")))
define("call")(_plain((), ("uni",)))
define("ret")(_plain((), ("uni",)))
define("exit")(_plain(()))


@define("trap", "brkpt")
def trap(modifiers: tuple[str, ...]) -> Semantics:
    """trap: the kernel stops with a fault."""
    if modifiers:
        raise Unsupported("expected no modifier")

    def stop(memory) -> None:
        raise Fault("executes a trap")

    return Memory("", "", stop)


_FENCE_WORDS = {
    "membar": {"cta", "gl", "sys", "proxy", "alias"},
    "fence": {
        "sc", "acq_rel", "acquire", "release", "cta", "cluster", "gpu", "sys", "proxy", "alias", "async", "global",
        "shared::cta",
        "shared::cluster", "mbarrier_init", "sync_restrict",
    },
}  # fmt: skip


def _fence(name: str):
    def resolver(modifiers: tuple[str, ...]) -> Semantics:
        if modifiers[:2] == ("proxy", "tensormap::generic") and modifiers[2:3] in (("acquire",), ("release",)):
            return Memory("", "[generic], imm" if modifiers[2] == "acquire" else "", _nothing)
        unknown = [
            word
            for word in modifiers
            if word not in _FENCE_WORDS[name] and not word.startswith(("async::", "sync_restrict::", "op_restrict::"))
        ]
        if unknown or not modifiers:
            raise Unsupported(f"'{'.'.join(unknown)}' is not known here")
        fences_bulk_copies = modifiers[:2] == ("proxy", "async") and modifiers[2:] != ("global",)
        return Memory("", "", _proxy_fence if fences_bulk_copies else _memory_fence)

    return resolver


def _memory_fence(memory) -> None:
    """No effect except for the race checks: the fence may order blocks."""
    memory.batch.synchronizes(memory.lane_ids)


def _proxy_fence(memory) -> None:
    """No effect except for the race checks: earlier accesses are visible to bulk copies."""
    memory.batch.fenced(memory.lane_ids)


define("membar")(_fence("membar"))
define("fence")(_fence("fence"))


@define("nanosleep")
def nanosleep(modifiers: tuple[str, ...]) -> Semantics:
    """nanosleep.u32 t: no effect."""
    if modifiers != ("u32",):
        raise Unsupported("expected .u32")
    return Memory("", "u32", _nothing)


@define("pmevent")
def hint(modifiers: tuple[str, ...]) -> Semantics:
    """A hint with one immediate: no effect."""
    return Memory("", "imm", _nothing)


@define("griddepcontrol")
def griddepcontrol(modifiers: tuple[str, ...]) -> Semantics:
    """griddepcontrol.wait and .launch_dependents: no effect, since launches run one after the other."""
    if modifiers not in {("wait",), ("launch_dependents",)}:
        raise Unsupported("expected .wait or .launch_dependents")
    return Memory("", "", _nothing)


@define("prefetch", "prefetchu")
def prefetch(modifiers: tuple[str, ...]) -> Semantics:
    """prefetch{.space}.level [a]: no effect."""
    space = modifiers[0] if modifiers and modifiers[0] in ("global", "local") else "generic"
    if modifiers[-1:] == ("tensormap",) and modifiers[:-1] in ((), ("const",), ("param",)):
        return Memory("", "[generic]", _nothing)
    level = modifiers[-1] if modifiers else ""
    if not level.startswith(("L1", "L2")):
        raise Unsupported("expected a cache level")
    return Memory("", f"[{space}]", _nothing)


@define("applypriority", "discard")
def hint_of_a_line(modifiers: tuple[str, ...]) -> Semantics:
    """applypriority{.global}.L2::evict_normal [a], 128 and discard{.global}.L2 [a], 128: no effect."""
    space, level = ("global", modifiers[1:]) if modifiers[:1] == ("global",) else ("generic", modifiers)
    if level not in (("L2::evict_normal",), ("L2",)):
        raise Unsupported("expected applypriority{.global}.L2::evict_normal or discard{.global}.L2")
    return Memory("", f"[{space}], imm", _nothing)
