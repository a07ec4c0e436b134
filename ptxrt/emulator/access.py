"""Loads, stores, atomics and address conversions."""
