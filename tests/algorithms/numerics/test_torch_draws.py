"""What torch draws by a stream: all bits of it count, and nothing else changes."""

import numpy as np
import torch
from torch import nn

from staddle.algorithms.numerics.streams import secret_stream, stream
from staddle.algorithms.numerics.torch_draws import STATE, drawing


def drawn(words):
    with drawing(words):
        return torch.rand(2000), nn.functional.dropout(torch.ones(50), 0.5)


class Words:
    """A stream of the words that it is given."""

    def __init__(self, words):
        self.bit_generator = self
        self._words = np.array(words, np.uint64)

    def random_raw(self, count):
        return self._words[:count]


def test_a_stream_gives_the_same_twice_and_each_step_others():
    one, other = stream(0, "a", 0, "draw/0"), stream(0, "a", 0, "draw/0")
    first, second = drawn(one), drawn(one)
    assert torch.equal(first[0], drawn(other)[0])
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(drawn(secret_stream())[0], drawn(secret_stream())[0])


def test_every_word_of_the_state_comes_from_the_stream():
    """A seed would give 32 bits, which can be tried one by one."""
    zeros = [0] * 313
    found = set()
    for place in range(1, 313):
        for bit in (0, 33, 63):
            words = list(zeros)
            words[place] = 1 << bit
            with drawing(Words(words)):
                found.add(torch.get_rng_state()[STATE].numpy().tobytes())
    assert len(found) == 312 * 3
    # And they are used: torch draws as NumPy's generator of the same state does.
    words = np.random.default_rng(0).integers(0, 2**64, 313, np.uint64)
    twister = np.random.MT19937()
    key = words[1:].view(np.uint32)
    twister.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": 624}}
    with drawing(Words(words)):
        own = torch.rand(8)
    # float32 takes 24 bits of each number.
    theirs = (twister.random_raw(8) & np.uint64(2**24 - 1)) / 2**24
    assert own.tolist() == theirs.tolist()


def test_afterwards_torch_continues_as_if_nothing_had_been_drawn():
    torch.manual_seed(4)
    before = torch.get_rng_state()
    drawn(stream(0, "a", 0, "draw/0"))
    assert torch.equal(torch.get_rng_state(), before)
