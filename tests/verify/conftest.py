import pytest
from support.lone_verifier import Tool, load


@pytest.fixture(scope="session")
def tool(tmp_path_factory):
    """The command line of the one file, in an interpreter that has nothing of Staddle."""
    tool = Tool(tmp_path_factory.mktemp("copied"))
    yield tool
    tool.close()


@pytest.fixture(scope="session")
def lone(tmp_path_factory):
    """The functions of the one file, for vectors that no command takes."""
    path = tmp_path_factory.mktemp("lone") / "copied.py"
    tool = Tool(path.parent)
    tool.close()
    return load(path)
