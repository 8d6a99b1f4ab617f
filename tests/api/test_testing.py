"""Checks of a method, each against a method that breaks it."""

from dataclasses import replace

import torch
from support.refusals import refused

from staddle import (
    ContributionsAndState,
    SiloState,
    testing,
)
from staddle.algorithms.methods.fedper import FedPer


class Good(FedPer):
    """FedPer under another name."""

    name = "good"


class Remembers(FedPer):
    """Its loss depends on the silo that ran before."""

    name = "remembers"
    version = 1

    def stages(self, state, facts):
        self.silo = facts.silo
        (stage,) = super().stages(state, facts)
        return (replace(stage, loss=self.loss),)

    def loss(self, parts, x, y, context):
        own = self.task_loss(parts, x, y, context)
        return own * (1 + self.setting.silos.index(self.silo))


class KeepsNothing(FedPer):
    """It means to keep how often it was asked, and forgets to return it."""

    name = "keeps-nothing"
    version = 1

    def initial_extra(self, silo):
        return {"asked": torch.zeros(1)}

    def contribute(self, state, facts):
        SiloState(state.parts, {"asked": state.extra["asked"] + 1})
        return super().contribute(state, facts)


class Keeps(KeepsNothing):
    """As it should be."""

    name = "keeps"

    def contribute(self, state, facts):
        kept = SiloState(state.parts, {"asked": state.extra["asked"] + 1})
        return ContributionsAndState(FedPer.contribute(self, state, facts), kept)


class TakesMore(FedPer):
    """Its stage takes an epoch more than its effort says, which a budget would not cover."""

    name = "takes-more"
    version = 1

    def stages(self, state, facts):
        (stage,) = super().stages(state, facts)
        return (replace(stage, epochs=stage.epochs + 1),)


class Falls(FedPer):
    """What silos upload weighs less towards the last round, and it does not say so."""

    name = "falls"
    version = 1

    def contribute(self, state, facts):
        given = super().contribute(state, facts)
        left = 1 - facts.round / self.setting.rounds
        return {
            name: replace(own, weight=own.weight * left**facts.samples)
            for name, own in given.items()
        }


class SaysSo(Falls):
    """As it should be."""

    name = "says-so"
    by_rounds = "weighs silos by the rounds that are left"


def test_a_method_that_can_do_all_of_it():
    assert testing.check_method(Good) == testing.MethodReport("", "")


def test_a_method_that_says_what_it_cannot_do():
    report = testing.check_method("fedproto")
    assert report.private
    fomo = testing.check_method("fedfomo")
    assert "each" in fomo.blind.lower()


def test_a_silo_that_is_remembered_shows_in_the_stacked_engine():
    with refused(r"silo '.', part/.*: by .*, more than 0.0001; stacked it differs"):
        testing.check_method(Remembers)


def test_a_state_that_is_not_kept_is_told():
    with refused("the tensor 'asked' that the method keeps never changed"):
        testing.check_method(KeepsNothing)
    assert testing.check_method(Keeps).blind == ""


def test_what_depends_on_the_number_of_rounds_is_told():
    job = testing.make_job(Falls, training={"batch_size": 16, "lr": 0.05})
    with refused("in a longer job it differs: what a method does by setting.rounds stands in by"):
        testing.check_longer(job, testing.make_records(job))
    job = testing.make_job(SaysSo)
    testing.check_longer(job, {})  # without training anything


def test_what_a_private_round_refuses_is_told():
    job = testing.make_job(TakesMore, privacy=testing.PRIVACY)
    with refused(r"effort\(\) of method .takes-more. says 2, 0 and 0"):
        testing.check_private(job, testing.make_records(job))


def test_settings_and_options_are_the_jobs():
    job = testing.make_job("pfedsim", options={"rho": 0.25}, rounds=2)
    assert (job.rounds, job.method_options.rho) == (2, 0.25)
    records = testing.make_records(job, train=10, test=4)
    assert [len(own) for own, _ in records.values()] == [10, 15, 20, 25]
