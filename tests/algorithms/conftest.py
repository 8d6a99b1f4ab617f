import pytest
from support import jobs


@pytest.fixture
def make_job():
    return jobs.make_job


@pytest.fixture
def make_data():
    return jobs.make_data


@pytest.fixture
def make_shards():
    return jobs.make_shards
