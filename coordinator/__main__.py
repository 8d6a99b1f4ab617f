"""``python -m staddle.coordinator``: the same as ``staddle coordinator run``."""

from ..commands.main import single

if __name__ == "__main__":
    single("coordinator:run")
