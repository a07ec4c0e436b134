"""Warp-wide loads, stores and transposes of small matrices (PTX ISA 9.7.14.5)."""
