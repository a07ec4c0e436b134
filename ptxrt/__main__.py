"""`python -m ptxrt` is the program `ptxrt`."""

from .commands import main

if __name__ == "__main__":
    main()
