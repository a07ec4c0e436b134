"""The errors that this package raises. Each message says what was passed, what was expected and what to do.

PtxError
  ArgumentError (ValueError)   an argument does not fit the declaration
    FileError                  a file is foreign, damaged or of the wrong kind
  BuildError                   a module is missing or older than its source: run `make`, or reinstall the package
  AbiError                     a declaration and its compiled entry disagree
  LaunchError                  the machine failed
    MachineError               the requested machine is not available
    DriverError                a CUresult, with its name and the call
      OutOfMemory (MemoryError)  the device or the host has no more memory; everything else stays usable
    EmulatorFault              bad address, deadlock, a limit; with block, thread, line
      Unsupported              a text uses what the emulator does not implement; with the line
  PtxSyntaxError               a text is not the PTX that this package reads; with the line
"""

from pathlib import Path

_SOURCES = Path(__file__).parent.parent / "kernels_cu"


def remedy() -> str:
    """Return what to do about modules that are missing or do not fit: build them in a checkout, else reinstall the
    package.
    """
    if _SOURCES.is_dir():
        return "run `make`"
    return "the installed package is damaged: reinstall its wheel (pip install --force-reinstall WHEEL)"


class PtxError(Exception):
    """The root of every error that this package raises on purpose."""


class ArgumentError(PtxError, ValueError):
    """An argument does not fit the declaration; nothing was launched."""


class FileError(ArgumentError):
    """A file is foreign, damaged, truncated or of a kind that this machine cannot load."""


class BuildError(PtxError):
    """A compiled module is missing or older than its source."""


class AbiError(PtxError):
    """A declaration and its compiled entry disagree on the parameters or the launch facts."""


class LaunchError(PtxError):
    """The machine could not run the kernel; the results of the call are invalid."""


class MachineError(LaunchError):
    """The requested machine is not available; the message says why."""


class DriverError(LaunchError):
    """A call of the CUDA driver failed.

    Attributes:
        result: The CUresult's name, such as "CUDA_ERROR_OUT_OF_MEMORY".
        code: Its number.
        call: The function that returned it.
    """

    def __init__(self, message: str, *, result: str = "", code: int = 0, call: str = ""):
        super().__init__(message)
        self.result = result
        self.code = code
        self.call = call


class OutOfMemory(DriverError, MemoryError):
    """The device has too little memory, even after the pool returned its unused blocks; or the host has too little for
    a result.

    Existing arrays keep their contents, and later calls work. Free arrays, or split the call.
    """


class EmulatorFault(LaunchError):
    """The emulator refused a text or stopped a kernel; the message names the place.

    Attributes:
        kernel: The entry's name.
        block: (x, y, z), or None.
        thread: (x, y, z), or None.
        line: The line of the PTX text, or 0.
        source: The line of the source and what it was inlined into, or "".
    """

    def __init__(self, message: str, *, kernel: str = "", block=None, thread=None, line: int = 0, source: str = ""):
        super().__init__(message)
        self.kernel = kernel
        self.block = block
        self.thread = thread
        self.line = line
        self.source = source


class Unsupported(EmulatorFault):
    """A text uses what the emulator does not implement: an instruction, a combination of modifiers, a kind of call."""


class PtxSyntaxError(PtxError):
    """A text is not the PTX that this package reads; the message names file, line and what was found."""
