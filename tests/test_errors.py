"""What errors say."""

import errno

from staddle.errors import reason


def test_the_system_s_own_words_or_what_it_was_raised_with_say_why():
    assert (
        reason(OSError(errno.EROFS, "Read-only file system", "x.json")) == "Read-only file system"
    )
    assert reason(OSError("timed out")) == "timed out"
