"""The ``[training]`` table of a job file."""

from math import ceil
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from ...files.documents import Real, Strict
from ..course import LastBatch, Optimiser, records_taken
from ..data.augmentation import Augmentations
from .lr_schedule import Schedule

Whole = Annotated[int, Field(strict=True)]
Beta = Annotated[Real, Field(ge=0, lt=1)]
# By optimiser: the keys that have an effect.
OWN = {"sgd": {"momentum"}, "adam": {"betas", "eps"}, "adamw": {"betas", "eps"}}
# Later than the form of a document, which stays the same for jobs that do not set them.
UNWRITTEN = ("augment", "last_batch", "shuffle")


class TrainingTable(Strict):
    """The [training] table.

    ``batch_size`` is in records. With a schedule, ``lr`` is the rate of the first round after the
    warm-up.
    """

    epochs: Annotated[Whole, Field(ge=1, le=10_000)] = 1
    batch_size: Annotated[Whole, Field(ge=1, le=1_000_000)] = 32
    physical_batch: Annotated[Whole, Field(ge=1, le=1_000_000)] | None = None
    """Records of a step that are in memory at a time; default: all.

    Gradients add up to those of the whole batch, so it changes memory and time only, and what
    dropout draws. Methods whose losses couple records refuse it in their first round. In a private
    job ``privacy.physical_batch`` replaces it.
    """
    last_batch: LastBatch | None = None
    """What becomes of the records that are left over for an epoch's last batch.

    ``fill`` adds records of the same epoch until it is as long as the others, ``keep`` keeps it
    short (a single record is dropped), ``drop`` drops it unless it is the only one. Default:
    ``fill`` for models with batch norm, and others keep it, even of one record.
    """
    shuffle: bool = True
    """False: every epoch takes a silo's training records in their order, in the same batches.

    By default each epoch draws another order.
    """
    optimiser: Literal["sgd", "adam", "adamw"] = "sgd"
    """The rule of a step; each stage of a round begins without momentum or moments."""
    lr: Annotated[Real, Field(gt=0)]
    momentum: Annotated[Real, Field(ge=0, lt=1)] = 0.0
    """For sgd."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """For adam and adamw: how slowly the moments of the gradient change."""
    eps: Annotated[Real, Field(gt=0)] = 1e-8
    """For adam and adamw: added to the root of the second moment."""
    weight_decay: Annotated[Real, Field(ge=0)] = 0.0
    """Added to the gradient, times the parameter; for adamw apart from it."""
    clip: Annotated[Real, Field(gt=0)] | None = None
    """Norm to which a step's gradient is scaled down, over all parameters that it moves."""
    warmup: Annotated[Whole, Field(ge=0, le=100_000)] = 0
    """Rounds in which the rate rises to lr, in equal steps."""
    augment: Augmentations = ()
    """Random changes of the records, in this order (data/augmentation.py)."""
    schedule: Schedule | None = None
    """The course of lr from round to round after the warm-up; default: constant."""

    @model_validator(mode="after")
    def _no_idle_key(self) -> "TrainingTable":
        # Keys without effect are refused, so that no reader thinks that they do something.
        idle = set().union(*OWN.values()) - OWN[self.optimiser]
        for key in sorted(idle):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(
                    f"{key} does nothing with optimiser = {self.optimiser!r}; take it out"
                )
        return self

    @model_serializer(mode="wrap")
    def _written(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the keys of ``UNWRITTEN`` that have their defaults."""
        written: dict[str, Any] = serialise(self)
        for key in UNWRITTEN:
            if getattr(self, key) == type(self).model_fields[key].default:
                written.pop(key, None)
        return written

    def steps(self, records: int) -> int:
        """Steps of an epoch over so many records."""
        return ceil(records_taken(records, self.batch_size, self.last_batch) / self.batch_size)

    @property
    def rule(self) -> Optimiser:
        """One step of training as a stage of a method takes it.

        Methods may replace single fields, such as ``clip``.
        """
        return Optimiser(
            self.lr,
            self.momentum,
            self.weight_decay,
            self.clip,
            self.optimiser,
            betas=self.betas,
            eps=self.eps,
        )

    def factor(self, done: int, rounds: int) -> float:
        """The factor of all rates in the round after ``done`` of ``rounds`` that train."""
        if done < self.warmup:
            return (done + 1) / (self.warmup + 1)
        if self.schedule is None:
            return 1.0
        return self.schedule.at_round(done - self.warmup, rounds - self.warmup)
