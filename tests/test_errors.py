"""What errors say."""

import errno

from staddle.errors import reason


def test_the_system_s_own_words_say_why():
    assert (
        reason(OSError(errno.EROFS, "Read-only file system", "x.json")) == "Read-only file system"
    )


def test_an_error_without_a_number_says_what_it_was_raised_with():
    assert reason(OSError("timed out")) == "timed out"
