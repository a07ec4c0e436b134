"""Benchmarks: tables and plots of this library's speed. Both sides of a comparison are measured in one run.

timing.py measures times, plots.py draws; each other module is one benchmark. This package imports none of them by
itself.
"""
