"""The command line, for use from a checkout: `python cli.py` is the same program as the installed `ptxrt`."""

from ptxrt.commands import main

if __name__ == "__main__":
    main()
