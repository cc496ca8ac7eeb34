"""Outcomes as frames: what is packed comes out again, and no bytes at all do harm."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncloader.messages.failure import BadSample, CapturedError
from asyncloader.messages.frames import BadFrame
from asyncloader.messages.messages import Kind
from asyncloader.messages.outcome import NO_RECORD, OUTCOMES, Outcome, pack, unpack
from asyncloader.messages.snapshot import Untold
from asyncloader.observe.record import Record

KINDS = [Kind.BATCH, Kind.FAILURE, Kind.REFUSED, Kind.LEFT_OUT, Kind.EXHAUSTED]

seconds = st.floats(allow_nan=False)
u64 = st.integers(0, (1 << 64) - 1)
records = st.builds(Record, u64, u64, u64, *[seconds] * 6, u64, seconds)
errors = st.builds(CapturedError, st.text(), st.text(), st.text(), st.none() | st.binary())


def outcome_with(kind: int, **fields: Any) -> Outcome:
    """Return an outcome whose other fields are as they mostly are."""
    return Outcome(kind, **fields)


extras = {
    "record": records,
    "bad": st.lists(st.builds(BadSample, st.integers() | st.text() | st.none(), st.integers(), errors), max_size=3),
    "snapshot": st.none() | st.builds(Untold, st.text()),
}
outcomes = (
    st.builds(outcome_with, st.just(Kind.BATCH), data=st.binary(), nbytes=st.integers(0), **extras)
    | st.builds(outcome_with, st.sampled_from([Kind.FAILURE, Kind.REFUSED]), error=errors, **extras)
    | st.builds(outcome_with, st.sampled_from([Kind.LEFT_OUT, Kind.EXHAUSTED]), **extras)
)


on_a_busy_machine = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def decode(payload: memoryview) -> tuple[Any, int]:
    """Stand for the codec."""
    return bytes(payload), len(payload)


def sent(outcome: Outcome, payload: bytes = b"") -> Any:
    """Return an outcome as it arrives."""
    kind, parts = pack(outcome, [payload] if payload else [], outcome.record.encode_s)
    return unpack(kind, memoryview(b"".join(parts)), decode)


@on_a_busy_machine
@given(outcomes)
def test_what_is_packed_comes_out_again(outcome: Outcome) -> None:
    """Of its kind, with its record, its bad samples and its snapshot."""
    has_data = outcome.kind == Kind.BATCH
    payload = outcome.data if has_data else b""
    there = sent(outcome, payload)
    assert there._replace(bad=list(there.bad)) == outcome._replace(
        bad=list(outcome.bad), **({"nbytes": len(payload)} if has_data else {})
    )


@on_a_busy_machine
@given(st.sampled_from(KINDS), st.binary(max_size=300))
def test_no_bytes_do_harm(kind: int, body: bytes) -> None:
    """They are an outcome, or a BadFrame; what cannot be unpickled is the failure of its ticket."""
    try:
        there = unpack(kind, memoryview(body), decode)
    except BadFrame:
        return
    assert there.kind in OUTCOMES


@on_a_busy_machine
@given(outcomes, st.data())
def test_half_a_frame(outcome: Outcome, data: st.DataObject) -> None:
    """A frame that is cut short is an error, or costs what it tells of."""
    kind, parts = pack(outcome)
    body = b"".join(parts)
    test_no_bytes_do_harm.hypothesis.inner_test(kind, body[: data.draw(st.integers(0, len(body)))])


def test_a_usual_batch_has_no_extras() -> None:
    """Nothing is pickled for it: a record, a length, and the payload as it is."""
    payload = bytearray(b"data")
    kind, parts = pack(Outcome(Kind.BATCH), [payload])
    assert (kind, [len(part) for part in parts]) == (Kind.BATCH, [96, 0, 4])
    assert parts[-1] is payload


class Refuses:
    """Cannot be pickled, or raises as it is unpickled."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        if self.error is None:
            raise TypeError("not this one")
        return _raise, (self.error,)


def _raise(error: BaseException) -> None:
    raise error


def test_keys_that_do_not_pickle_are_named() -> None:
    """A bad sample is told, whatever its key is."""
    bad = BadSample(Refuses(), 3, CapturedError("OSError", "there", "text"))
    (there,) = sent(Outcome(Kind.LEFT_OUT, bad=[bad])).bad
    assert there.key.startswith("<")
    assert there._replace(key=0) == bad._replace(key=0)


@pytest.mark.parametrize("error", [KeyError("k"), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["payload", "extras", "both"])
def test_what_raises_as_it_is_rebuilt_stands_for_the_ticket(error: BaseException, where: str) -> None:
    """As an exception that does not end the loop. The payload is looked at all the same: it names slabs."""
    opened = []

    def explode(payload: memoryview) -> tuple[Any, int]:
        opened.append(bytes(payload))
        if where != "extras":
            pickle.loads(pickle.dumps(Refuses(error)))
        return None, 0

    snapshot = None if where == "payload" else Refuses(error)
    kind, parts = pack(Outcome(Kind.BATCH, NO_RECORD._replace(ticket=7), snapshot=snapshot), [b"slab 3"])
    there = unpack(kind, memoryview(b"".join(parts)), explode)
    assert opened == [b"slab 3"]
    assert there.kind == Kind.FAILURE
    assert there.record.ticket == 7
    assert isinstance(there.error, Exception)
    assert repr(error) in repr(there.error)


def test_a_batch_that_cannot_be_read_keeps_its_extras() -> None:
    """Its bad samples are counted, and its state is that of the dataset, all the same."""

    def explode(payload: memoryview) -> tuple[Any, int]:
        raise KeyError("k")

    bad = [BadSample(1, 0, CapturedError("OSError", "there", "text"))]
    kind, parts = pack(Outcome(Kind.BATCH, bad=bad, snapshot=Untold("so")), [b"x"])
    there = unpack(kind, memoryview(b"".join(parts)), explode)
    assert (there.bad, there.snapshot) == (bad, Untold("so"))
