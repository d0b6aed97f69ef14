"""`python -m frameworks [suite ...]`: see `suites.main`."""

import sys

from frameworks.suites import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
