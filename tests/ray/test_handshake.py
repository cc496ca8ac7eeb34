"""Proofs, byte by byte, without a connection."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from asyncloader.ray.handshake import MAGIC, Refused, Steps, agent_side, new_secret, trainer_side

SECRET = new_secret()


class Talk:
    """Two sides that hear what the other has sent."""

    def __init__(self, trainer: bytes = SECRET, agent: bytes = SECRET, number: int = 7) -> None:
        self.asked: list[int] = []
        self.to_agent = bytearray()
        self.to_trainer = bytearray()
        self.admits: Callable[[int], bool] = lambda number: True
        self.trainer = trainer_side(trainer, self.to_agent.extend, self._admit)
        self.agent = agent_side(agent, self.to_trainer.extend, number)

    def _admit(self, number: int) -> bool:
        self.asked.append(number)
        return self.admits(number)

    def run(self) -> None:
        """Talk to the end."""
        wanted_here, wanted_there = next(self.trainer), next(self.agent)
        wanted_there = self.agent.send(bytes(self.to_agent[:wanted_there]))
        del self.to_agent[:]
        _finish(self.trainer, bytes(self.to_trainer[:wanted_here]))
        assert len(self.to_agent) == wanted_there
        _finish(self.agent, bytes(self.to_agent))


def _finish(side: Steps, data: bytes) -> None:
    with pytest.raises(StopIteration):
        side.send(data)


def test_both_who_know_the_secret_are_content() -> None:
    talk = Talk()
    talk.run()
    assert talk.asked == [7]


def test_an_agent_with_another_secret_is_refused_before_anybody_is_asked() -> None:
    """And nothing is sent to it that would prove the trainer."""
    talk = Talk(agent=new_secret())
    with pytest.raises(Refused, match="wrong secret"):
        talk.run()
    assert talk.asked == []
    assert not talk.to_agent


def test_a_trainer_with_another_secret_is_refused_by_the_agent() -> None:
    """One that sends anything in place of a proof."""
    talk = Talk()
    wanted = next(talk.agent)
    next(talk.trainer)
    wanted = talk.agent.send(bytes(talk.to_agent[:wanted]))
    with pytest.raises(Refused, match="wrong secret"):
        talk.agent.send(bytes(wanted))


def test_an_agent_that_is_not_expected_is_refused() -> None:
    talk = Talk()
    talk.admits = lambda number: False
    with pytest.raises(Refused, match="not expected"):
        talk.run()


def test_a_number_that_was_changed_on_the_way_is_no_proof() -> None:
    """It is part of what is proven."""
    talk = Talk()
    here, there = next(talk.trainer), next(talk.agent)
    talk.agent.send(bytes(talk.to_agent[:there]))
    talk.to_trainer[len(MAGIC)] ^= 1
    with pytest.raises(Refused, match="wrong secret"):
        talk.trainer.send(bytes(talk.to_trainer[:here]))


def test_what_was_recorded_is_no_proof_another_time() -> None:
    """The nonces are others."""
    recorded = Talk()
    recorded.run()
    talk = Talk()
    with pytest.raises(Refused, match="wrong secret"):
        talk.trainer.send(bytes(recorded.to_trainer[: next(talk.trainer)]))


def test_a_trainers_own_proof_sent_back_is_none_of_an_agent() -> None:
    """The roles are part of what is proven; two that play the trainer do not come together."""
    first, second = Talk(), Talk()
    wanted = next(first.trainer)
    next(second.trainer)
    with pytest.raises(Refused):
        first.trainer.send(bytes(second.to_agent).ljust(wanted, b"\0")[:wanted])


@pytest.mark.parametrize("side", ["trainer", "agent"])
def test_garbage_is_refused(side: str) -> None:
    """A browser's request, say."""
    talk = Talk()
    steps = talk.trainer if side == "trainer" else talk.agent
    wanted = next(steps)
    with pytest.raises(Refused, match=r"no agent|no trainer"):
        steps.send(b"GET / HTTP/1.1\r\n".ljust(wanted, b"."))
