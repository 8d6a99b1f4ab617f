"""The usual way to expect an error of the product."""

import pytest

from staddle.errors import LocalError


def refused(said):
    """Within it, a ``LocalError`` is raised whose text matches."""
    return pytest.raises(LocalError, match=said)
