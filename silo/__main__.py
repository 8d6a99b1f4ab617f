"""``python -m staddle.silo --config silo.toml``: the same as ``staddle silo run``."""

from ..commands.main import single

if __name__ == "__main__":
    single("silo.agent:run")
