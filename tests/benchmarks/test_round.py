def test_blind_rounds_of_silos_whose_names_are_not_sorted(forking):
    found = forking.our_rounds(["silo-2", "silo-10", "silo-9", "silo-1"], 2, 32, blind=True)
    assert len(found.took) == 1
    assert found.gate > 0
