"""What trains a simulation: a line for its manifest and its reports."""

from typing import Annotated, TypeAlias

from pydantic import Field

# What trains, such as "cuda (NVIDIA H200, 140 GiB), on 2 GPUs, bf16"; if nothing else is said,
# silos are stacked, on one GPU, in float32.
Device: TypeAlias = Annotated[
    str,
    Field(
        pattern=r"^(cpu|cuda \([^\n]{1,100}\)(, one by one|, on [0-9]{1,4} GPUs)?(, (tf32|bf16))?)$"
    ),
]
