"""`python -m bench`: see `cli.main`."""

import sys

from bench.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
