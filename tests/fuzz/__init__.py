"""Random calls of the whole library, compared with float64, and wrong ones, which typed errors must refuse.

    python -m tests.fuzz attention merge --calls 1000 --seed 7 --machine emulator

A module here is a kind of call. It draws a recipe (plain values by name) from random numbers, writes the call as a
program, and checks the names that the program leaves. What is printed of a failure is thus what was run. See `engine`.
"""
