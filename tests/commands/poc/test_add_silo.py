"""What is left behind where a silo does not join."""

from staddle.commands.poc.add_silo import _undraft


def test_jobs_of_the_users_own_stay(tmp_path):
    for name in ("local-7", "first-7", "first", "mine-7"):
        (tmp_path / f"{name}.toml").touch()
    _undraft(tmp_path, "-7")
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["first", "mine-7"]
