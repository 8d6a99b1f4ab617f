"""Who is asked what it holds of whose ledger, and what was answered. Pure: no I/O, no clock.

::

    silo A  Hello(challenge)            ask
    silo B  Poll → Witness(asked: A)    waiting; in each session of A, until WITNESSES silos held
                                        something
    or      Beat → asked: A             questions, where B is at work
    silo B  Attest(A, challenge, head)  answered
    silo A  Poll → Witness(from: B)     waiting

The answers are signed, so nothing is checked here but that they were asked for
(security/log/attestation.py).
"""

from dataclasses import dataclass, field

from ...proto import federation_pb2 as pb

WITNESSES = 3  # answers that each session should have
# More than needed, since some may be away or keep silent.
MOST_ASKED = 6  # with those that have not answered yet


@dataclass
class _Question:
    challenge: bytes
    asked: set[str] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)
    # answers of silos that hold nothing, such as those that share no job: others are asked instead
    empty: int = 0
    answers: list[pb.Attestation] = field(default_factory=list)  # not handed out yet

    @property
    def wanted(self) -> bool:
        """Whether one more silo is asked."""
        # Some may never answer, to keep others from being asked; so more are asked than needed.
        useful, outstanding = len(self.answered) - self.empty, len(self.asked - self.answered)
        return useful < WITNESSES and useful + outstanding < MOST_ASKED


class Attesting:
    """The questions of all sessions.

    In memory only: after a restart, silos begin new sessions and ask again.
    """

    def __init__(self) -> None:
        self._questions: dict[str, _Question] = {}
        self._open: dict[str, _Question] = {}  # those of them that more silos are asked

    def ask(self, silo: str, challenge: bytes) -> None:
        """Begin a session of this silo: earlier answers for it are void.

        What it was asked is asked again.
        """
        self._questions[silo] = _Question(challenge)
        # The process that was asked may be gone, and its questions with it.
        for question in self._questions.values():
            if silo not in question.answered:
                question.asked.discard(silo)
        self._open = {
            asking: question for asking, question in self._questions.items() if question.wanted
        }

    def waiting(self, silo: str) -> pb.Witness | None:
        """Take what waits for this silo: questions about others, answers about itself.

        None if there is nothing. It is handed out once, whether or not it arrives.
        """
        asked = self.questions(silo)
        own = self._questions.get(silo)
        attestations: list[pb.Attestation] = []
        if own is not None:
            attestations, own.answers = own.answers, []
        return pb.Witness(asked=asked, attestations=attestations) if asked or attestations else None

    def questions(self, silo: str) -> list[pb.Challenge]:
        """Take the questions about others alone: what goes with a heartbeat.

        A silo gets each question once per session of its own.
        """
        asked = []
        for other, question in list(self._open.items()):
            if other != silo and silo not in question.asked:
                # Counts as asked at once: only an answer would show that it arrived.
                question.asked.add(silo)
                asked.append(pb.Challenge(silo=other, challenge=question.challenge))
                if not question.wanted:
                    del self._open[other]
        return asked

    def wants(self, silo: str) -> bool:
        """True while more silos are to be asked about this one."""
        return silo in self._open

    def answered(self, by: str, said: pb.Attestation) -> bool:
        """Keep an answer for the silo that asked; False for one that nobody waits for.

        The silo that asked checks the signature: it does not trust the coordinator with that.
        """
        question = self._questions.get(said.silo)
        if question is None:
            return False
        # An answer to an earlier session is void: its challenge says that it is not fresh.
        awaited = by in question.asked - question.answered
        if not (awaited and said.challenge == question.challenge):
            return False

        question.answered.add(by)
        question.empty += not said.held
        # Copied field by field, so that nothing else is passed on.
        question.answers.append(
            pb.Attestation(
                by=by,
                silo=said.silo,
                challenge=said.challenge,
                held=said.held,
                signature=said.signature,
            )
        )
        # One that holds nothing is no witness: another silo is asked in its place.
        if question.wanted:
            self._open[said.silo] = question
        return True
