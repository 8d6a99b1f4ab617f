"""``python -m staddle.commands``: the console script by another name."""

from .main import main

if __name__ == "__main__":
    main()
