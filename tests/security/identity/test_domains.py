from hypothesis import given
from hypothesis import strategies as st

from staddle.security.identity import domains
from staddle.security.identity.domains import framed


def test_bytes_are_those_of_the_docstring():
    wanted = bytes.fromhex("000000000000000261620000000000000001780000000000000000").hex(" ", 8)
    assert framed(b"ab", b"x", b"").hex(" ", 8) == wanted


@given(
    st.lists(st.binary(max_size=12), min_size=1, max_size=4),
    st.lists(st.binary(max_size=12), min_size=1, max_size=4),
)
def test_framing_is_injective(one, other):
    assert (framed(*one) == framed(*other)) == (one == other)


def test_moving_a_border_changes_the_bytes():
    assert framed(b"ab", b"c") != framed(b"a", b"bc") != framed(b"abc")
    assert framed(b"a", framed(b"b")) != framed(b"a", b"b")


def test_labels_differ():
    assert (len(domains.SIGNED), len(domains.HASHED)) == (19, 29)
    assert len({*domains.SIGNED, *domains.HASHED}) == 48
    assert all(domain.startswith(b"staddle/") for domain in (*domains.SIGNED, *domains.HASHED))
