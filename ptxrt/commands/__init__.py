"""The command line. Commands are made from the declarations; other modules do the computing.

Only click is imported before a command runs, so that `--help` answers at once.
"""

# Importing them adds their commands to the group.
from . import bench, check, layout, probe, run, show, speed  # noqa: F401
from .group import main as main
