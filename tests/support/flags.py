"""What a process of a test does, where a server of processes can import it."""


def raised(flag, shown):
    """Say whether the flag is set, set it, and say so again."""
    shown.send(flag.is_set())
    flag.set()
    shown.send(flag.is_set())
