"""``python -m staddle.silo --config silo.toml``: the same as ``staddle silo run``."""

from ..commands.main import single
from ..commands.silo import run

if __name__ == "__main__":
    single(run)
