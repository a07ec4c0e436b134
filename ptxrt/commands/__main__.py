"""`python -m ptxrt.commands` is the program `ptxrt`."""

from . import main

if __name__ == "__main__":
    main()
