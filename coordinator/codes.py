"""What the codes of silos that drop out of a round mean, where the code alone says too little."""

BUDGET = "BUDGET"  # the round is over for the silo: asked again, it answers the same
WORDS = {BUDGET: "its privacy budget is spent"}


def in_words(code: str) -> str:
    """A code, with what it means."""
    return f"{code}, {WORDS[code]}" if code in WORDS else code
