import pytest
import torch
from support import jobs


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_job():
    return jobs.make_job


@pytest.fixture
def make_data():
    return jobs.make_data


@pytest.fixture
def make_shards():
    return jobs.make_shards
