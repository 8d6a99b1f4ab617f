"""``python -m staddle.silo.training FOLDER``: computes the order in a folder (order.py)."""

import sys

from .serving import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
