"""Benchmarks: tables and pictures of how fast this library is here, both sides of each comparison in one run.

timing.py knows how to take times, plots.py how to draw; the others each measure one thing. Nothing is imported unasked.
"""
