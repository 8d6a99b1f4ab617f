def test_all_silos_of_one_process_take_part_in_each_round(forking):
    found = forking.cost(5, 3, 0.1)
    assert found.cpu > 0
    assert found.per_silo == found.cpu / 5
    double = forking.Cost(10, 4 * found.cpu)
    assert forking.told([found, double]).endswith("2.00 times that of 5\n")
