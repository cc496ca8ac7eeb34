"""What becomes of the parts of a batch, on any device, and which tensors are found in it."""

from __future__ import annotations

import dataclasses
import datetime
import enum
from collections import OrderedDict, UserDict, UserList, namedtuple
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from asyncloader.wrap.moving import move, tensors_in

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "left right")


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    picture: torch.Tensor
    name: str


@dataclasses.dataclass(slots=True)
class Slotted:
    picture: torch.Tensor
    size: int = dataclasses.field(init=False, default=3)


class Graph:
    """A type of a library, which moves itself."""

    def __init__(self, nodes: torch.Tensor, *, how: Any = None) -> None:
        self.nodes, self.how = nodes, how

    def to(self, device: torch.device, non_blocking: bool = False) -> Graph:
        return Graph(self.nodes + 1, how=(device, non_blocking))


class Plain(Graph):
    """One that knows of no copies that go on."""

    def to(self, device: torch.device) -> Plain:  # type: ignore[override]
        return Plain(self.nodes + 1, how=device)


class Anything(Graph):
    """One that hands on what it is told."""

    def to(self, *args: Any, **kwargs: Any) -> Anything:  # type: ignore[override]
        return Anything(self.nodes + 1, how=(args, kwargs))


class Opaque:
    """One whose tensors nobody finds, as those of an extension in C++."""

    def __init__(self) -> None:
        nodes = torch.ones(1)
        self.nodes = lambda: nodes

    def to(self, device: torch.device) -> Opaque:
        return self


class Noted(Opaque):
    """One that has its tensors noted itself."""

    def record_stream(self, stream: Any) -> None:
        pass


def moved(data: Any) -> Any:
    """Move data to where each number is larger by one."""
    return move(data, CPU, lambda tensor: tensor + 1)


ONE, TWO = torch.ones(2), torch.full((2,), 2.0)


@pytest.mark.parametrize(
    "data",
    [
        [ONE, [torch.ones(2)]],
        (ONE, "name"),
        {"a": ONE, "b": {"c": torch.ones(2)}},
        OrderedDict(a=ONE),
        Pair(ONE, 3),
        UserDict(a=ONE),
        UserList([ONE]),
        Frozen(ONE, "name"),
        Slotted(ONE),
    ],
    ids=lambda data: type(data).__name__,
)
def test_containers_keep_their_type(data: Any) -> None:
    """What is in them is moved; the batch of the host stays as it is."""
    there = moved(data)
    assert type(there) is type(data)
    assert [tensor.tolist() for tensor in tensors_in(there)] == [[2.0, 2.0]] * len(list(tensors_in(data)))
    assert all(bool((tensor == 1).all()) for tensor in tensors_in(data))


@pytest.mark.parametrize(
    "fact",
    [
        "name", b"bytes", 3, 2.5, True, None, 1j, np.int64(3), np.array(["a", "b"]), Colour.RED, Path("a"), slice(3),
        datetime.date(2026, 1, 1), torch.float32, torch.device("cpu"), int, ["a"], {"a": (1, "b")}, {"a"}, range(3),
        np.ones(3), object(), Colour, Frozen, MappingProxyType({"a": 1}),
    ],
    ids=lambda fact: "object" if type(fact) is object else repr(fact),  # an address is another one in each process
)  # fmt: skip
def test_facts_stay_as_they_are(fact: Any) -> None:
    """The same object, containers of nothing else included."""
    assert moved(fact) is fact


class Holds:
    """A type that has a tensor, and nobody can say how to make another one of it."""

    def __init__(self, picture: torch.Tensor) -> None:
        self.picture = picture


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Holds(ONE), "a .*test_moving.Holds of the batch has tensors, and cannot be moved to cpu: have collate_fn"),
        ({"a": Pair(1, {ONE})}, "a builtins.set of the batch has tensors"),
        (Frozen(Holds(ONE), "name"), "Holds of the batch"),  # type: ignore[arg-type]
        (Opaque(), "its tensors neither in its attributes nor in a container: give it a method record_stream"),
    ],
)
def test_what_cannot_be_moved_is_named(data: Any, words: str) -> None:
    """With its type."""
    with pytest.raises(TypeError, match=words):
        moved(data)


def test_by_default_copies_are_made_at_once() -> None:
    """For programs that move a batch themselves."""
    there = move({"a": ONE, "graph": Graph(ONE)}, torch.device("meta"))
    assert there["a"].device.type == "meta"
    assert there["graph"].how == (torch.device("meta"), False)


def test_objects_move_themselves() -> None:
    """They are told that the copy may go on where they take that."""
    assert moved(Graph(ONE)).how == (CPU, True)
    assert moved(Plain(ONE)).how == CPU
    assert moved(Anything(ONE)).how == ((CPU,), {"non_blocking": True})
    packed = moved(pack_sequence([torch.ones(3), torch.ones(2)]))
    assert type(packed).__name__ == "PackedSequence"
    assert isinstance(moved(Noted()), Noted)


@pytest.mark.filterwarnings("ignore:Sparse CSC tensor support is in beta state")
def test_tensors_are_found_wherever_they_are() -> None:
    """In attributes, slots and containers, once each; in parts, where one has several; and on other devices."""
    loop: list[Any] = [ONE]
    loop.append(loop)
    assert list(map(id, tensors_in(loop))) == [id(ONE)]
    assert list(map(id, tensors_in([Graph(ONE), Slotted(TWO)]))) in ([id(TWO), id(ONE)], [id(ONE), id(TWO)])
    assert len({each.data_ptr() for each in tensors_in(torch.eye(3).to_sparse())}) == 2
    assert len({each.data_ptr() for each in tensors_in(torch.eye(3).to_sparse_csc())}) == 3
    assert list(map(id, tensors_in([ONE, torch.ones(1, device="meta")], "cpu"))) == [id(ONE)]
    noted = Noted()
    assert list(tensors_in([noted], "cuda")) == [noted]
    assert list(tensors_in([print, pytest, Graph, "name"])) == []


@pytest.mark.slow  # imports torch._dynamo and sympy, 1.3 s and 75 MB
def test_tensors_are_found_in_jagged_ones() -> None:
    """Values and offsets."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert len(list(tensors_in(nested))) >= 2
