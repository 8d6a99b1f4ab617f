"""The services of deploy/compose.yaml have no rights, and start by commands that exist."""

import tomllib

import pytest
import yaml
from support.deployed import DEPLOY, beside

from staddle.commands.loader import COMMANDS

pytestmark = beside
ROLES = {"coordinator": "coordinator", "hospital-a": "silo"}


@pytest.fixture
def services():
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]


@pytest.mark.parametrize("name", ROLES)
def test_a_service_writes_its_folder_alone_and_has_no_rights(services, name):
    service = services[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["user"] == "10001:10001"
    written = [each for each in service["volumes"] if not each.endswith(":ro")]
    assert written == [f"{name}:/var/lib/staddle"]


@pytest.mark.parametrize(("name", "role"), ROLES.items())
def test_a_service_starts_and_is_asked_by_commands_that_exist(services, name, role):
    file = f"/etc/staddle/{role}.toml"
    assert services[name]["command"] == [role, "run", "--config", file]
    asked = services[name]["healthcheck"]["test"]
    assert asked == ["CMD", "staddle", "health", "--config", file]
    assert {f"{role} run", "health"} <= COMMANDS.keys()


def test_the_image_is_of_the_release_of_the_package(services):
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    images = {service["image"] for service in services.values()}
    assert images == {f"${{STADDLE_IMAGE:-staddle:{project['version']}}}"}
