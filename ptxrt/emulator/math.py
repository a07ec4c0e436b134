"""Approximate transcendental functions (PTX ISA 9.7.3 and 9.7.4)."""
