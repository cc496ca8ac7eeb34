"""A worker process: start it, watch it, ask it for its stack, kill it, reap it.

          parent (loop thread)                          worker
    channel   ───────────────── socketpair ───────────  messages
    liveness  ───────────────── pipe ─────────────────  hangs up when the parent is gone: SIGKILL by the kernel
    group     ── the worker's end of it, which outlives the worker: then what it started is killed as well
    output    ───────────────── pipe ─────────────────  faulthandler: stacks, last words
    pidfd     ── readable when the process has ended

Death is learned from the pidfd. multiprocessing's own sign (a sentinel pipe) and the end of the channel come late when
the worker left a child behind, which holds copies of both.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing.process
import os
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Iterable
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, cast

from asyncloader.backends.backend import Backend, Launch
from asyncloader.backends.processes import fork_server
from asyncloader.backends.processes.channel import Channel, OnFrames, open_pair
from asyncloader.backends.processes.executors import Running
from asyncloader.backends.processes.launching import start_process, try_descriptors
from asyncloader.backends.worker import Worker, WorkerState
from asyncloader.errors import MAIN_IS_IMPORTED, WorkerStartError
from asyncloader.loops import GuardedLoop
from asyncloader.messages.frames import BadFrame
from asyncloader.messages.messages import EpochSpec, Kind
from asyncloader.seeding.generators import wait_drawn
from asyncloader.signals import HandlersWait, masked
from asyncloader.stack_text import shorten
from asyncloader.worker import bootstrap
from asyncloader.worker.bootstrap import CAN_TELL, CANNOT_START, STACK_SIGNAL, Ends, Later

_children: set[BaseProcess] = cast(Any, multiprocessing.process)._children

_OUTPUT_BYTES = 64 << 10
_STACK_QUIET_S = 0.03
_EXITCODE_TRIES = {True: 50, False: 1000}  # a millisecond each; by whether it was told to end: then few ask
_UP_S = 10.0  # a forked worker is up in some hundredths of a second; an overloaded machine is given time
_REAPED_WITHIN_S = 1.0
_DESCRIPTORS = 21  # open at once at most while a worker is started, by us and by multiprocessing


def launch_all(context: BaseContext, launches: Iterable[Launch]) -> None:
    """Launch processes, one right after the other: between two forks each page that is written to is copied.

    No signal ends a worker before it has settled, and no handler leaves a process that nobody knows.
    """
    method = context.get_start_method()
    if method != "fork":
        with masked(signal.SIG_UNBLOCK, ()):  # it leaves signals unblocked that were not
            resource_tracker.ensure_running()
    if method == "forkserver":
        fork_server.start()
    with HandlersWait(), masked(signal.SIG_BLOCK, signal.valid_signals()):
        for launch in launches:
            launch()


class WorkerProcess(Worker):
    """Owner of a process and of the parent's ends of its connections.

    Belongs to the loop thread, but for `pid`, `exitcode`, `is_alive`, `kill` and `wait_dead`, which any may use.
    """

    is_telling: bool = False  # until it can be asked for its stack
    is_process = True
    channel: Channel
    _first_epoch: EpochSpec | None  # to be sent

    def __init__(
        self, worker_id: int, loop: GuardedLoop, owner: Backend[WorkerProcess], *, overlaps: bool = False
    ) -> None:
        super().__init__(worker_id, loop)
        self.overlaps = overlaps  # it has a loop of its own
        self._owner = owner
        self._closing = threading.Lock()  # held to close a descriptor, and to use one in another thread
        self._may_end = False  # its end is no death, whatever its state
        self._was_killed = False
        self._why_killed = ""
        self._descriptors: dict[str, int] = {}
        self._kill_timer: asyncio.TimerHandle | None = None
        self._up_timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<WorkerProcess {self.worker_id} pid={self.pid} {self.state.name}>"

    def _note_start(self) -> None:
        """Note why it ended, if it did so before any code of the user's ran: no signal has killed it."""
        if self.exitcode is None or self.exitcode < 0 or (self.is_telling and CANNOT_START.encode() not in self.output):
            return
        words = self.output.decode(errors="replace").strip() or f"The traceback is on stderr. {MAIN_IS_IMPORTED}"
        self.why_no_other: Exception | None = WorkerStartError(
            f"DataLoader worker (pid {self.pid}) ended with exit code {self.exitcode} at its start. {words}"
        )

    # -------------------------------------------------------------------------------------------------- start

    def launch(
        self,
        context: BaseContext,
        source: Any,
        heap: Any,
        epoch: EpochSpec,
        importing: frozenset[str],
    ) -> None:
        """Launch the process. By `launch_all`, in any thread; the loop's may call `watch` afterwards, or `close`.

        Raises:
            OSError: if the system has no room for it.
        """
        method = context.get_start_method()
        self.was_forked: bool = method == "fork"
        try_descriptors(_DESCRIPTORS)
        ends = self._connect()
        try:
            # multiprocessing writes this into a pipe, and a process that is not forked imports the main module before
            # it has read all. So what may be long, as an epoch with states in it, is sent through the channel.
            self._first_epoch = None if self.was_forked else epoch
            work = Later((source, heap, epoch if self.was_forked else None))
            args = (self.worker_id, ends, work, method, importing)
            process: BaseProcess = cast(Any, context).Process(target=bootstrap.start, args=args)
            if method == "fork":
                wait_drawn()  # right before: the child would never get a lock that another thread holds now
            try:
                start_process(process)
            except (EOFError, ConnectionError) as error:
                raise fork_server.ended() from error
            self._process = process
            self.pid: int = process.pid or -1
            with contextlib.suppress(ProcessLookupError):  # the fork server may have reaped it
                self._descriptors["pid"] = os.pidfd_open(self.pid)
        finally:
            ends.close()  # the worker has them: while they are open here, its end would not hang up the channel
        self.started_at: float = time.monotonic()

    def _connect(self) -> Ends:
        ours, theirs = open_pair()
        self._sock = ours
        _parent_ends.add(self)
        ends = Ends(theirs)
        try:
            ends.liveness, self._descriptors["liveness"] = os.pipe()
            self._descriptors["group"] = os.dup(ends.liveness)
            self._descriptors["output"], ends.output = os.pipe()
        except OSError:
            ends.close()
            raise
        return ends

    def running(self) -> Running | None:
        """Return the process for an executor, or None if it is gone. In any thread."""
        with self._closing:
            pidfd = self._descriptors.get("pid")
            return None if pidfd is None else Running(self.pid, pidfd)

    def watch(self, on_frames: OnFrames) -> None:
        """Hear of the process, which may be up, or gone, before the loop has its next turn.

        Args:
            on_frames: Is told what it sends, as `Channel` tells it.

        Raises:
            OSError: if the system has no room for that.
        """
        self.channel = Channel(self._loop, self._sock, on_frames, self._on_channel_closed)
        self.channel.open()
        if self._first_epoch is not None:
            self.put(Kind.EPOCH, self._first_epoch)
        self._watch_exit()
        os.set_blocking(self._descriptors["output"], False)
        self._loop.add_reader(self._descriptors["output"], self._on_output)
        self.state: WorkerState = WorkerState.RUNNING
        if self.was_forked:
            self._up_timer = self._loop.call_later(_UP_S, self._on_late)

    def _watch_exit(self) -> None:
        if "pid" in self._descriptors:
            self._loop.add_reader(self._descriptors["pid"], self._on_exit)
        else:
            self._loop.call_soon(self._on_exit)

    # -------------------------------------------------------------------------------------------------- events

    def on_up(self) -> None:
        """The worker has come so far that what it waits for is the user's affair."""
        if self._up_timer is not None:
            self._up_timer.cancel()

    def _on_late(self) -> None:
        """The worker should be up by now. If this process did not run for a while, its message may wait to be read."""
        self._up_timer = self._loop.call_later(_UP_S / 10, self._on_stuck)

    def _on_stuck(self) -> None:
        """Kill it: a lock that another thread held at the fork is never released in the child.

        torch's generators have such locks, and whoever draws a number from them holds one. With torch's own DataLoader
        the trainer itself forks, so it cannot be drawing at that moment; here a worker that died is replaced at any
        time. `wait_drawn` leaves one fork in a hundred for this, beside a thread that does nothing but draw.
        """
        self._why_killed = (
            "It hung before any code of the user's ran, so it was killed: another thread of the main process held a "
            "lock (of torch's random generator?) when it was forked. If this happens often, use "
            'multiprocessing_context="forkserver".'
        )
        self.kill()

    def _on_channel_closed(self, error: Exception | None) -> None:
        """The worker left, or closed what it should not have: the pidfd tells, or the grace ends."""
        if isinstance(error, BadFrame):
            self._why_killed = f"It wrote something that is no message into its channel ({error}), so it was killed."
        elif not self._was_killed and self._find_exitcode() is None:
            self._why_killed = (
                "It closed its connections to the main process (does something close descriptors that it did not "
                "open?), so it was killed."
            )
        self.end(grace_s=0.0 if isinstance(error, BadFrame) else 1.0, expected=self._may_end)

    def _on_output(self) -> None:
        try:
            data = os.read(self._descriptors["output"], _OUTPUT_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._descriptors["output"])
            return
        self._keep_output(data)
        if self._stack_waiters:
            self._stack_timer.cancel()
            self._stack_timer = self._loop.call_later(_STACK_QUIET_S, self._on_quiet)

    def _keep_output(self, data: bytes) -> None:
        if data and not self.is_telling:
            self.is_telling = True
            data = data[len(CAN_TELL) :]
        self.output += data
        del self.output[:-_OUTPUT_BYTES]

    def _on_exit(self, tries: int = 0) -> None:
        """The process has ended. Its exit code may still be on its way from the fork server, or in another thread.

        The pidfd is watched to the last: if anything in here fails, the loop calls again.
        """
        if self.state is WorkerState.DEAD:
            return
        self._kill_group()  # children that it left behind
        self.exitcode: int | None = self._find_exitcode()
        if self.exitcode is None and tries < _EXITCODE_TRIES[self._may_end]:
            if "pid" in self._descriptors:
                self._loop.remove_reader(self._descriptors["pid"])
            self._loop.call_later(0.001, self._on_exit, tries + 1)
            return
        expected = self._may_end
        with contextlib.suppress(OSError, KeyError):
            self._keep_output(os.read(self._descriptors["output"], _OUTPUT_BYTES))  # its last words
        self._note_start()
        if not expected and self._was_killed:
            self.output += self._why_killed.encode()
        try:
            self.channel.drain()
        finally:
            self.close()
        owner = self._owner
        del self._owner  # otherwise a cycle
        owner.on_exit(self, expected)

    def _find_exitcode(self) -> int | None:
        """Look at the status without reaping; multiprocessing may be reaping in another thread at the same time."""
        try:
            status = os.waitid(os.P_PIDFD, self._descriptors["pid"], os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except (KeyError, ChildProcessError):  # reaped already, or a child of the fork server
            popen = self._process._popen  # type: ignore[attr-defined]
            return self._process.exitcode if popen.method == "forkserver" else popen.returncode
        if status is None:
            return None
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status

    def _reap(self) -> None:
        """Reap the process, which is gone, or killed. A process that does not even end by SIGKILL is left."""
        if (pid := self._descriptors.get("pid")) is not None:
            wait([pid], _REAPED_WITHIN_S)
            self._process.is_alive()
        else:
            self._process.join(_REAPED_WITHIN_S)
        _children.discard(self._process)  # it stays there if the program has reaped it

    # ----------------------------------------------------------------------------------------------------- end

    def end(self, grace_s: float, *, expected: bool = True) -> None:
        """Tell the worker to finish; kill it, and what it started, after ``grace_s`` seconds."""
        if self.state in (WorkerState.NEW, WorkerState.DEAD):
            return
        if self.state is WorkerState.RUNNING:
            self._may_end = expected
            self.state = WorkerState.ENDING
            self.channel.send(Kind.END)
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        if grace_s <= 0:
            self.kill()
            self._watch_exit()
        else:
            self._kill_timer = self._loop.call_later(grace_s, self.kill)

    def kill(self) -> None:
        """Kill the process and its children with SIGKILL. The pidfd tells when it is gone. In any thread."""
        if self.state is WorkerState.DEAD:
            return
        self._was_killed = True
        self._kill_group()
        self._send_signal(signal.SIGKILL)

    def _send_signal(self, number: int) -> None:
        """Send a signal, if the process is there and the trainer has not become another user since."""
        with self._closing, contextlib.suppress(KeyError, ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self._descriptors["pid"], number)

    def close(self) -> None:
        """Let go of everything, whatever of it fails."""
        with contextlib.ExitStack() as steps:  # from the last one up
            steps.callback(vars(self).pop, "_process", None)  # it has pipes, and an error may hold this object
            steps.callback(self._dead.set)
            steps.callback(setattr, self, "state", WorkerState.DEAD)
            steps.callback(self._tell_stack)
            steps.callback(_parent_ends.discard, self)
            if hasattr(self, "_sock"):
                steps.callback(self._sock.close)
            if hasattr(self, "channel"):
                steps.callback(self.channel.close)
            for name in tuple(self._descriptors):
                steps.callback(self._close_descriptor, name)
            if hasattr(self, "_process"):
                steps.callback(self._reap)
            steps.callback(self._kill_group)
            if self.pid > 0:
                steps.callback(self.kill)
            for name in {"pid", "output"} & self._descriptors.keys():
                steps.callback(self._loop.remove_reader, self._descriptors[name])
            for timer in (self._kill_timer, self._up_timer):
                if timer is not None:
                    steps.callback(timer.cancel)

    def _kill_group(self) -> None:
        """Kill the worker with all that it started and left behind.

        The kernel does it when the pipe hangs up, and knows the group that the worker made. ``killpg`` knows a number:
        by now it may be that of another group, or, if the worker was refused one, of none.
        """
        self._close_descriptor("liveness")

    def _close_descriptor(self, name: str) -> None:
        # With the lock: otherwise a thread that kills could use a number that this has closed, and that somebody else
        # has opened since. Whoever comes second finds no descriptor.
        with self._closing:
            fd = self._descriptors.pop(name, None)
            if fd is not None:
                os.close(fd)

    # -------------------------------------------------------------------------------------------------- stacks

    def put(self, kind: int, contents: Any) -> None:
        """Send it a message."""
        self.channel.send(kind, pickle.dumps(contents))

    def _ask(self, ticket: int) -> None:
        """Have the worker write the stacks of its threads. Before it is telling, the signal would kill it.

        faulthandler writes from inside the signal handler, so a worker that hangs in C code answers too. A worker whose
        loop turns also tells at which awaits the samples of the ticket are.
        """
        self._stack_start = len(self.output)
        if self.overlaps:
            self.put(Kind.WHERE, ticket)
        self._send_signal(STACK_SIGNAL)

    def _on_quiet(self) -> None:
        """Take faulthandler's stack; the worker's loop, if it has one that turns, answers within a moment as well."""
        if self.overlaps and self._awaits is None:
            self._stack_timer = self._loop.call_later(self.answers_within_s - _STACK_QUIET_S, self._tell_stack)
        else:
            self._tell_stack()

    def on_awaits(self, text: str) -> None:
        """The worker's loop has answered: what faulthandler writes may still come."""
        self._awaits = text
        if self._stack_waiters and len(self.output) > self._stack_start:
            self._stack_timer.cancel()
            self._stack_timer = self._loop.call_later(_STACK_QUIET_S, self._tell_stack)

    def _stack(self, awaits: str) -> str:
        written = self.output[self._stack_start :].decode(errors="replace")
        del self.output[self._stack_start :]
        return awaits + shorten(written)


_parent_ends: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()


def kill_all() -> None:
    """Kill all workers of this process. For who ends the interpreter, in any thread."""
    for worker in tuple(_parent_ends):
        worker._may_end = True  # the loop, if it turns again, has nobody to tell
        worker.kill()


def _close_in_child() -> None:
    """In any forked child, a worker or the trainer's own: close the parent's ends, which would keep pipes open.

    And forget the processes, which the exit hooks of a child would try to join.
    """
    for worker in tuple(_parent_ends):
        _children.discard(getattr(worker, "_process", None))
        for fd in worker._descriptors.values():
            with contextlib.suppress(OSError):
                os.close(fd)
        worker._descriptors = {}
        worker._sock.close()
    _parent_ends.clear()


os.register_at_fork(after_in_child=_close_in_child)
