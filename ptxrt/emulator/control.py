"""Branches, calls, exits, and instructions that do nothing here (fences, hints)."""
