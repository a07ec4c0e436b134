"""Device functions that the driver provides: vprintf (printf) and __assertfail (assert).

lower.py turns a call of one of them into an instruction `call.NAME` with the values of the arguments as operands.

vprintf gets the addresses of a format and of a buffer with the arguments. Each argument is at a multiple of its own
size: 4 bytes for int and smaller, 8 bytes for long, pointers, strings and double. The text of a batch of blocks appears
when the batch ends, also by a fault, sorted by block, thread and order of the calls. `Emulator.output` takes it,
sys.stdout by default. The result of vprintf is the number of arguments, -1 for a null format.

Source: CUDA C++ Programming Guide, formatted output and assertion; the calls are those that nvcc 13.0 writes.
"""

from __future__ import annotations

import re

import numpy as np

from .instruction import Fault, Memory, Semantics, Unsupported, define
from .memory import Access

_CONVERSION = re.compile(
    r"%(?P<flags>[-+ #0]*)(?P<width>\*|\d+)?(?:\.(?P<precision>\*|\d*))?(?P<length>hh|h|ll|l|z|j|t|L)?(?P<type>.)", re.S
)
_WIDE = ("l", "ll", "z", "j", "t")
_LONGEST = 1 << 16  # the most characters of a string


def _string(access: Access, address: int, who: int) -> str:
    """The string at a generic address, up to its zero byte; `who` is the position of the reading thread."""
    thread = access.subset(np.array([who]))
    found = bytearray()
    while len(found) < _LONGEST:
        (byte,) = _read(thread, address + len(found), 1).tolist()
        if not byte:
            return found.decode("utf-8", "replace")
        found.append(byte)
    raise Fault(f"prints a string at 0x{address:x} that does not end within {_LONGEST} characters")


def _read(thread: Access, address: int, size: int) -> np.ndarray:
    """The bytes at a generic address."""
    return thread.gather("generic", np.array([address], np.uint64), size).view(np.uint8)


class _Arguments:
    """The arguments of one thread's call, in order."""

    def __init__(self, access: Access, address: int, who: int):
        self.access, self.address, self.who = access, address, who
        self.thread = access.subset(np.array([who]))
        self.count = 0

    def next(self, kind: str) -> int | float:
        """The next argument; `kind` is its dtype in short, such as `i4`, `u8` or `f8`."""
        size = int(kind[1])
        self.address = -(-self.address // size) * size
        value = _read(self.thread, self.address, size).view(kind)[0]
        self.address, self.count = self.address + size, self.count + 1
        return value.item()


def formatted(text: str, arguments: _Arguments) -> str:
    """The text that C prints for a format and its arguments. Raises Fault for a conversion that CUDA does not know."""

    def one(match: re.Match) -> str:
        flags, length, type = match["flags"], match["length"] or "", match["type"]
        if type == "%":
            return "%"
        width = str(arguments.next("i4")) if match["width"] == "*" else match["width"] or ""
        if width.startswith("-"):
            flags, width = flags + "-", width[1:]
        precision = match["precision"]
        if precision is not None:
            precision = str(arguments.next("i4")) if precision == "*" else precision or "0"
            precision = None if precision.startswith("-") else precision
        if type in "di":
            value = _narrowed(arguments.next("i8" if length in _WIDE else "i4"), length, True)
            return _integer(flags, width, precision, "d", value)
        if type in "uoxX":
            value = _narrowed(arguments.next("u8" if length in _WIDE else "u4"), length, False)
            return _integer(flags, width, precision, type, value)
        if type == "c":
            return _padded(chr(arguments.next("i4") & 0xFF), flags, width)
        if type == "s":
            address = arguments.next("u8")
            found = "(null)" if not address else _string(arguments.access, address, arguments.who)
            return _padded(found if precision is None else found[: int(precision)], flags, width)
        if type == "p":
            return _padded(f"0x{arguments.next('u8'):x}", flags, width)
        if type in "aA":
            found = _hexadecimal(arguments.next("f8"), flags)
            return _padded(found.upper() if type == "A" else found, flags, width)
        if type in "fFeEgG":
            dot = "" if precision is None else "." + precision
            return f"%{flags}{width}{dot}{type}" % arguments.next("f8")
        raise Fault(f"prints by '{match.group()}', a conversion that printf does not know")

    return _CONVERSION.sub(one, text)


def _narrowed(value: int, length: str, signed: bool) -> int:
    """Reduce an int to the char (hh) or short (h) that it was promoted from."""
    bits = {"hh": 8, "h": 16}.get(length)
    if bits is None:
        return value
    value &= (1 << bits) - 1
    return value - (1 << bits) if signed and value >> (bits - 1) else value


def _integer(flags: str, width: str, precision: str | None, type: str, value: int) -> str:
    """An integer with sign and prefix, zero-padded to the precision, or to the width with the flag 0."""
    digits = format(abs(value), "d" if type in "du" else type)
    if precision is not None:
        digits = "" if int(precision) == 0 and value == 0 else digits.rjust(int(precision), "0")
    head = ""
    if type == "d":
        head = "-" if value < 0 else "+" if "+" in flags else " " if " " in flags else ""
    elif "#" in flags and type in "xX" and value:
        head = "0" + type
    elif "#" in flags and type == "o" and not digits.startswith("0"):
        digits = "0" + digits
    if "0" in flags and "-" not in flags and precision is None:
        digits = digits.rjust(int(width or 0) - len(head), "0")
    return _padded(head + digits, flags, width)


def _padded(text: str, flags: str, width: str) -> str:
    size = int(width or 0)
    return text.ljust(size) if "-" in flags else text.rjust(size)


def _hexadecimal(value: float, flags: str) -> str:
    """%a: the shortest hexadecimal digits."""
    if value != value or value in (float("inf"), float("-inf")):
        found = f"{value:f}"
    else:
        digits, _, exponent = value.hex().partition("p")
        found = (digits.rstrip("0").rstrip(".") if "." in digits else digits) + "p" + exponent
    return found if found.startswith("-") else ("+" if "+" in flags else " " if " " in flags else "") + found


@define("call.vprintf")
def vprintf(modifiers: tuple[str, ...]) -> Semantics:
    """vprintf(format, arguments): print for each thread."""
    if modifiers:
        raise Unsupported("expected no modifier")

    def run(access: Access, formats: np.ndarray, buffers: np.ndarray) -> np.ndarray:
        counts = np.full(access.count, -1, np.int32)
        formats, buffers = (np.broadcast_to(each, access.count).tolist() for each in (formats, buffers))
        texts: dict[int, str] = {}
        batch = access.batch
        for position, lane in enumerate(access.lane_ids.tolist()):
            address = formats[position]
            if not address:
                continue
            if address not in texts:
                texts[address] = _string(access, address, position)
            arguments = _Arguments(access, buffers[position], position)
            try:
                batch.prints(lane, formatted(texts[address], arguments))
            except Fault as fault:
                raise Fault(fault.message, position) from None
            counts[position] = arguments.count
        return counts

    return Memory("s32", "u64, u64", run)


@define("call.__assertfail")
def assertfail(modifiers: tuple[str, ...]) -> Semantics:
    """__assertfail(expression, file, line, function, size of a character): raises a fault with the assertion."""
    if modifiers:
        raise Unsupported("expected no modifier")

    def run(access: Access, expression, file, line, function, size) -> None:
        def first(value) -> int:
            return int(np.broadcast_to(value, access.count)[0])

        words = [_string(access, first(each), 0) if first(each) else "?" for each in (expression, file, function)]
        raise Fault(f"fails the assertion `{words[0]}` of {words[1]}:{first(line)}, {words[2]}", 0)

    return Memory("", "u64, u64, u32, u64, u64", run)
