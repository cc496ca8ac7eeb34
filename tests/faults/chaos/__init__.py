"""Disturb runs over data in every way that comes up, and hold each against an undisturbed one.

    python -m tests.faults.chaos --runs 1000

A run is a property, and a plan of that property: values of all its dimensions, drawn from the run's own seed. That seed
is the seed of the whole plus the number of the run, so ``--seed N --runs 1`` repeats run N alone, and a run that fails
prints its plan. Without ``--seed`` it comes from the clock.

property        what happens                                                    what has to hold
disturbed       workers die, hang, are killed; samples raise; consumers leave   batches and errors as without
resumed         states are taken and loaded, in place and by new loaders        this epoch and all later ones as torch
                                                                                draws them, and the random numbers
mismatched      a state of one configuration is loaded by another               the promised rest, or StateMismatchError
broken          a callback of the engine raises                                 an error or all batches; no hang; the
                                                                                next epoch works
delayed         whoever sends or reads a message is held up now and then        all batches come, as torch orders them
trained         trainers seed, look, leave loops, save at edges of      a state changes nothing; an epoch's draws
                epochs; datasets hold generators and open files         follow from its seed; masks fit images
edges           persistent workers of streams are killed where epochs meet      each epoch is that of a run without
programmed      programs of several loaders are seeded, told epochs, killed,    what the program gives that was
                stopped anywhere and begun again                                not interrupted

Nothing hangs in any of them, and no child, thread, descriptor, memfd, mapping or segment of shared memory is left.

``sampling`` (which samplers, drawing when and from what), ``generators`` (the trainer's), ``chaotic`` (datasets to
which something happens) and ``on_device`` (batches that go to a simulated device) are dimensions that several
properties share. A dimension of one property is in its module.
"""

from tests.faults.chaos.soak import PROPERTIES, draw, seed_of_the_clock, soak

__all__ = ["PROPERTIES", "draw", "seed_of_the_clock", "soak"]
