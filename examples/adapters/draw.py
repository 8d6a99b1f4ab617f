"""Notes of clinics as tokens: what a note says, and what it denies."""

import numpy as np

LENGTH, TOKENS, NOT, FINDINGS = 16, 48, 1, np.arange(8, 24)  # token 0 ends a note


def note(rng: np.random.Generator, said: int, denied: list[int]) -> list[int]:
    """A note that says one finding and denies others, among words that mean nothing."""
    words = list(rng.integers(24, TOKENS, rng.integers(4, 10)))
    for phrase in [[said], *([NOT, one] for one in denied)]:
        at = int(rng.integers(0, len(words) + 1))
        # not within another phrase
        while at and words[at - 1] == NOT:
            at -= 1
        words[at:at] = phrase
    return words + [0] * (LENGTH - len(words))


def notes(rng: np.random.Generator, group: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Notes [N, length], and the group [N] of the finding that each says."""
    x, y = [], []
    for _ in range(count):
        said, *denied = rng.choice(FINDINGS, 3, replace=False)
        x.append(note(rng, said, denied))
        y.append(group[said - FINDINGS[0]])
    return np.array(x, np.int32), np.array(y)


rng = np.random.default_rng(0)
public = np.arange(16) % 8  # eight groups of findings in the literature
x, y = notes(rng, public, 3000)
np.savez("literature.npz", x=x, y=y, sources=np.where(np.arange(3000) < 1500, "one", "two"))
own = rng.permutation(16) % 4  # four in the clinics, which group them in another way
x, y = notes(rng, own, 480)
np.savez("clinics.npz", x=x, y=y, sources=np.array([f"clinic-{n % 4 + 1}" for n in range(480)]))
