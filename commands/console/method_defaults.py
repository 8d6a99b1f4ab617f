"""What works together: the small model that fits every method's example, and what single methods need beside it."""

from collections.abc import Mapping
from typing import Any

MODEL: Mapping[str, Any] = {"name": "cnn-digits", "classes": 10, "norm": "none"}
# What a method needs to make sense in a job as short as the demo's; there the other jobs run with the same model and
# participation, so that the comparison is one.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    # It moves the models of absent silos; of eight, a blind round takes one of two batches.
    "fedsimsup": {"silos": 8, "participation": 0.75, "options": {"tau_theta": 2}},
    "fedssa": {"options": {"t_stable": 4}},  # header rows grow while μ > 0; 20 rounds of that are too many here
    "fedbn": {"model": {"norm": "group"}},  # it shares all but the norm layers
    "fedaims": {"model": {"name": "convnet-digits", "norm": "group"}},  # it supervises the blocks of a network
}
