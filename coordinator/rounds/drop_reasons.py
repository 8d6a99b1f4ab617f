"""What the codes of silos that drop out of a round mean, where the code alone says too little."""

from ...security.faults import Code

BATCH = "BATCH"  # of a batch without which sums are of values, and with which they are not: it takes no more part
BUDGET = "BUDGET"  # the round is over for the silo: asked again, it answers the same
GUILTY = (Code.MISDEALT, Code.COMPLAINT)  # what it signed shows that the silo broke the rules: it takes no more part
PROVEN = Code.MISDEALT  # by evidence that the other silos of its batch are shown: sums of the batch go on without it
WORDS = {
    BATCH: "with its batch a sum was beyond what silos may give",
    BUDGET: "its privacy budget is spent",
    Code.MISDEALT: "it dealt shares that do not open or do not join",
    Code.COMPLAINT: "it complained of a dealer without a reason",
}


def in_words(code: str) -> str:
    """A code, with what it means."""
    return f"{code}, {WORDS[code]}" if code in WORDS else code
