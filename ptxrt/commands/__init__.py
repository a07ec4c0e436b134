"""The command line. Every command is made from the declarations; what it computes is done elsewhere.

Only click is imported before a command runs, so that `--help` answers at once.
"""

# Importing them adds their commands to the group.
from . import bench, check, layout, probe, run, show, speed  # noqa: F401
from .group import main as main
