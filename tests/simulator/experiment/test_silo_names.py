import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import refused

from staddle.errors import LocalError
from staddle.simulator.experiment.silo_names import numbered, silo_names


def test_names_sort_like_numbers_and_stand_for_clients_in_order():
    assert numbered(3) == ("silo-000", "silo-001", "silo-002")
    names = numbered(1001)
    assert names[-1] == "silo-1000"
    assert sorted(names) == list(names)
    assert silo_names(["7", "30"]) == ("silo-007", "silo-030")
    clients = ["Hôpital St. Louis (Paris)", "silo-004", "va", "3"]
    assert silo_names(clients) == ("hopital-st-louis-paris", "silo-004", "va", "3")
    assert silo_names(["a b", "A-B"], ("first", "second")) == ("first", "second")
    with refused("silos names 2, the partition has 3 clients; name each, or leave it out"):
        silo_names(["1", "2", "3"], ("first", "second"))


@given(st.lists(st.text(max_size=70), min_size=1, max_size=5, unique=True))
def test_what_comes_out_are_names_one_a_client_or_an_error(clients):
    try:
        names = silo_names(clients)
    except LocalError as error:
        assert "silos = […]" in str(error)  # noqa: PT017 - most texts make a name
    else:
        assert len(set(names)) == len(clients)
        assert all(re.fullmatch("[a-z0-9-]{1,64}", name) for name in names)


@pytest.mark.parametrize(
    ("clients", "text"),
    [
        (["a b", "A-B"], "clients 'a b' and 'A-B' are both named 'a-b'; name all 2 yourself"),
        (["京都", "a"], "client '京都' makes no name of a silo"),
        (["a" * 65], "makes no name"),
        (["1", "01"], "clients '1' and '01' are both named 'silo-001'"),
    ],
)
def test_two_clients_of_one_name_or_one_of_none_are_refused(clients, text):
    with refused(text):
        silo_names(clients)
