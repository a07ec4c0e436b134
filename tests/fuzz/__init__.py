"""Random calls of the whole library: right ones are compared with float64, wrong ones must raise typed errors.

    python -m tests.fuzz attention merge --calls 1000 --seed 7 --machine emulator

Each module here is a kind of call. It draws a recipe (plain values by name) from random numbers, writes the call as a
program, and checks the variables that the program leaves. A failure prints exactly the code that ran. See `engine`.
"""
