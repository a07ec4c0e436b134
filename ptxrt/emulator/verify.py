"""Verification: check a whole text before anything of it runs, for errors that single instructions show.

Units of this project are read entry by entry, when an entry is first launched, because they have hundreds of entries
and were tested. A file of another project is read as a whole, so that it is refused when it is loaded.
"""

from __future__ import annotations

from ..errors import PtxError, Unsupported
from ..ptx.ir import Address, Function, Instruction, List, Module, Pair, Register, Symbol, Vector
from ..ptx.parse import SYSTEM_CALLS, Body, Label, body
from .decode import Decoder


def problem(module: Module, function: Function) -> PtxError | None:
    """The first thing in a function that cannot be executed, None where nothing is found.

    Looked at are opcodes, operands, names, and the arguments of calls. Raises PtxSyntaxError for what is no PTX.
    """
    decoder = Decoder(module.name)
    read = module.bodies[function.name] = body(module, function)
    known = _names(module, function, read)
    for statement in read.statements:
        if isinstance(statement, Label):
            continue
        try:
            if statement.opcode.startswith("call"):
                _check_call(module, statement)
            elif not statement.opcode.startswith(("bra", "brx", "ret", "exit")):
                decoder.decode(statement)
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


def _check_names(module: Module, statement: Instruction, operand, known: set[str]) -> None:
    """Every name is that of a variable or a parameter."""
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
    """As many arguments and results as the function has."""
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
