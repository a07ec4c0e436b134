"""Asynchronous copies from global to shared memory, per thread (PTX ISA 9.7.9.25)."""
