"""The usual way to expect an error of the product."""

import pytest

from staddle.errors import LocalError, RefusedError


def refused(said):
    """Within it, a ``LocalError`` is raised whose text matches."""
    return pytest.raises(LocalError, match=said)


def blamed(call, *arguments, **fields):
    """A call is refused: the peer that is blamed, the code and the text."""
    with pytest.raises(RefusedError) as caught:
        call(*arguments, **fields)
    return caught.value.peer, caught.value.code, caught.value.why
