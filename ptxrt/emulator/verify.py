"""Verification: check every instruction of a text when it is loaded (`Emulator.load_text(whole=True)`).

The units of this project are tested and have hundreds of entries, so the first launch of an entry checks that entry.
Texts from elsewhere are checked as a whole, so that errors show when they are loaded. The checks see one instruction at
a time: opcode, operands, names, and the arguments of calls.
"""

from __future__ import annotations

from ..errors import PtxError, PtxSyntaxError, Unsupported
from ..ptx.ir import Address, Function, Instruction, List, Module, Pair, Register, Symbol, Vector
from ..ptx.parse import SYSTEM_CALLS, Body, Label, body
from .decode import Decoder


def problem(module: Module, function: Function) -> PtxError | None:
    """The first error in a function, None if there is none. Raises PtxSyntaxError for a text that is not PTX."""
    decoder = Decoder(module.name)
    try:
        read = module.bodies[function.name] = body(module, function)
    except Unsupported as error:
        return error
    known = _names(module, function, read)
    for statement in read.statements:
        if isinstance(statement, Label):
            continue
        try:
            if statement.opcode.startswith("call"):
                _check_call(module, statement)
            elif not statement.opcode.startswith(("bra", "brx", "ret", "exit")):
                decoder.decode(statement)
                if function.is_entry and statement.opcode.startswith("st.param"):
                    _check_target(module, function, statement)
                for operand in statement.operands:
                    _check_names(module, statement, operand, known)
        except Unsupported as error:
            return error
    return None


def _names(module: Module, function: Function, read: Body) -> set[str]:
    """The names of variables and parameters that a function may use."""
    known = {variable.name for variable in read.variables} | set(module.variables)
    return known | {parameter.name for parameter in function.params + function.results} | {"_"}


def _unsupported(module: Module, statement: Instruction, message: str) -> Unsupported:
    return Unsupported(f"{module.name}:{statement.line}: {statement.opcode}: {message}", line=statement.line)


def _check_target(module: Module, function: Function, statement: Instruction) -> None:
    """Check that a store does not name a parameter of the kernel."""
    address = statement.operands[0]
    name = address.base.name if isinstance(address, Address) and isinstance(address.base, Symbol) else None
    if any(parameter.name == name for parameter in function.params):
        raise PtxSyntaxError(
            f"{module.name}:{statement.line}: {statement.opcode}: '{name}' is a parameter of the kernel, which is not "
            "written"
        )


def _check_names(module: Module, statement: Instruction, operand, known: set[str]) -> None:
    """Check that every name is that of a variable or a parameter."""
    if isinstance(operand, Symbol):
        if operand.name in module.functions:
            raise _unsupported(module, statement, f"the address of the function '{operand.name}' is not supported")
        if operand.name not in known:
            raise _unsupported(
                module, statement, f"'{operand.name}' is not defined, or its address is not supported here"
            )
    elif isinstance(operand, Address):
        _check_names(module, statement, operand.base, known)
    elif isinstance(operand, Pair):
        _check_names(module, statement, operand.first, known)
        _check_names(module, statement, operand.second, known)
    elif isinstance(operand, (Vector, List)):
        for element in operand.elements:
            _check_names(module, statement, element, known)


def _check_call(module: Module, statement: Instruction) -> None:
    """Check that a call names a function with a body (or of the driver), with its numbers of arguments and results."""
    lists = [operand for operand in statement.operands if isinstance(operand, List)]
    names = [operand for operand in statement.operands if isinstance(operand, (Symbol, Register))]
    target = names[0] if names else None
    function = module.functions.get(target.name) if isinstance(target, Symbol) else None
    if function is None:
        raise _unsupported(module, statement, "a call names a function of this text")
    expected = [found for found in (function.results, function.params) if found]
    if [len(each.elements) for each in lists if each.elements] != [len(each) for each in expected]:
        raise _unsupported(module, statement, f"'{function.name}' is called with other arguments than it has")
    if function.body is None and function.name not in SYSTEM_CALLS:
        raise _unsupported(module, statement, f"'{function.name}' is called and has no body here")
