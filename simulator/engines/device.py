"""What trains a simulation: a line for its manifest and its reports."""

from typing import Annotated, TypeAlias

from pydantic import Field

# What trains, such as "cuda (NVIDIA H200, 140 GiB), bf16"; if nothing else is said, silos are
# stacked, in float32.
Device: TypeAlias = Annotated[
    str, Field(pattern=r"^(cpu|cuda \([^\n]{1,100}\)(, one by one)?(, (tf32|bf16))?)$")
]
