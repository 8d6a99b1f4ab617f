from staddle.simulator.experiment.hints import hint


def test_the_nearest_known_name_is_suggested():
    assert hint("fedpr", ["local", "fedper"]) == "did you mean 'fedper'?"


def test_where_nothing_is_near_all_known_names_are_listed():
    assert hint("zzz", ["local", "fedper"]) == "known: local, fedper"
