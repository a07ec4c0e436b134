"""Conversions between number formats (PTX ISA 9.7.9)."""
