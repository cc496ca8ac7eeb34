"""The engines of `async_rl.py`: where rollouts are made. Tasks of the trainer's loop, an HTTP server, or processes.

Each one leases prompts from a feed, answers them with the weights that it was given last, and puts groups of answers.
"""

import asyncio
import copy
import io
import multiprocessing
import random
import socket
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

import aiohttp
import torch
from aiohttp import web
from torch import nn
from torch.nn import functional

from asyncloader.online import Feed, FeedHandle

DIGITS = 6
GROUP = 8
ANSWER_S = 0.03
PROCESSES = 4

Group = list[dict[str, torch.Tensor]]


class Policy(nn.Module):
    """Gives the logits of all sums for two digits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2 * DIGITS, 512), nn.ReLU(), nn.Linear(512, 2 * DIGITS - 1))

    def forward(self, prompts: torch.Tensor) -> torch.Tensor:
        """Return logits of shape (prompts, sums)."""
        logits: torch.Tensor = self.layers(functional.one_hot(prompts, DIGITS).flatten(1).float())
        return logits


async def generate(policy: Policy, prompt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Answer a prompt as often as a group has samples; return the answers, and their log-probabilities."""
    await asyncio.sleep(random.lognormvariate(0, 0.5) * ANSWER_S)
    with torch.no_grad():
        log_p = policy(prompt[None])[0].log_softmax(0)
    answers = torch.multinomial(log_p.exp(), GROUP, replacement=True)
    return answers, log_p[answers]


def graded(prompt: torch.Tensor, answers: torch.Tensor, log_p: torch.Tensor) -> Group:
    """Return the samples of a group, with advantages within it: the reward is 1 for the right sum."""
    rewards = (answers == prompt.sum()).float()
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    rows = zip(answers, log_p, advantages, strict=True)
    return [{"prompt": prompt, "answer": answer, "log_p": p, "advantage": value} for answer, p, value in rows]


async def produce(feed: Feed[Any] | FeedHandle, answer: Callable[[torch.Tensor], Awaitable[Group]]) -> None:
    """Answer prompts until the feed is closed."""
    async for item in feed.leases():
        async with item:
            await item.put(await answer(torch.tensor(divmod(item.value * 7 % DIGITS**2, DIGITS))))


class Tasks:
    """Rollouts in the trainer's own loop.

    Args:
        policy: Its weights are copied.
        producers: How many prompts are answered at once.
    """

    def __init__(self, policy: Policy, producers: int) -> None:
        self._policy, self._producers = copy.deepcopy(policy), producers

    async def start(self, feed: Feed[Any]) -> None:
        """Begin to answer prompts."""
        self._tasks = [asyncio.create_task(produce(feed, self._answer)) for _ in range(self._producers)]

    async def update(self, policy: Policy) -> None:
        """Answer with these weights from now on."""
        self._policy.load_state_dict(policy.state_dict())

    async def stop(self) -> None:
        """Wait until all producers have seen the end of the feed."""
        await asyncio.gather(*self._tasks)

    async def _answer(self, prompt: torch.Tensor) -> Group:
        return graded(prompt, *await generate(self._policy, prompt))


class Http(Tasks):
    """Rollouts by a server that answers as vLLM does: ``/v1/completions``, and new weights between requests."""

    async def start(self, feed: Feed[Any]) -> None:
        """Start the server on a free port of the loopback, and begin to answer prompts."""
        ours, theirs = multiprocessing.Pipe()
        self._server = processes().Process(target=serve, args=(theirs,), daemon=True)
        self._server.start()
        port = await asyncio.to_thread(ours.recv)
        self._session = aiohttp.ClientSession(f"http://127.0.0.1:{port}")
        await self.update(self._policy)
        await super().start(feed)

    async def update(self, policy: Policy) -> None:
        """Send the weights."""
        weights = io.BytesIO()
        torch.save(policy.state_dict(), weights)
        async with self._session.post("/update_weights", data=weights.getvalue()) as response:
            response.raise_for_status()

    async def stop(self) -> None:
        """Wait for the producers, and end the server."""
        await super().stop()
        await self._session.close()
        self._server.terminate()
        await asyncio.to_thread(self._server.join)

    async def _answer(self, prompt: torch.Tensor) -> Group:
        request = {"prompt": prompt.tolist(), "n": GROUP, "max_tokens": 1, "logprobs": 0}
        async with self._session.post("/v1/completions", json=request) as response:
            choices = (await response.json())["choices"]
        log_p = torch.tensor([choice["logprobs"]["token_logprobs"][0] for choice in choices])
        return graded(prompt, torch.tensor([int(choice["text"]) for choice in choices]), log_p)


def serve(pipe: Connection) -> None:
    """Answer requests, in a process of its own. Send the port through the pipe."""
    torch.set_num_threads(1)
    policy = Policy()

    async def complete(request: web.Request) -> web.Response:
        answers, log_p = await generate(policy, torch.tensor((await request.json())["prompt"]))
        pairs = zip(answers.tolist(), log_p.tolist(), strict=True)
        choices = [{"text": str(answer), "logprobs": {"token_logprobs": [p]}} for answer, p in pairs]
        return web.json_response({"choices": choices})

    async def update_weights(request: web.Request) -> web.Response:
        policy.load_state_dict(torch.load(io.BytesIO(await request.read())))
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/v1/completions", complete), web.post("/update_weights", update_weights)])
    with socket.create_server(("127.0.0.1", 0)) as sock:
        pipe.send(sock.getsockname()[1])
        web.run_app(app, sock=sock, print=None, access_log=None, shutdown_timeout=0)


class Processes:
    """Rollouts by four processes, which have a handle of the feed, and the weights in shared memory.

    Args:
        policy: Its weights are copied.
        producers: How many prompts are answered at once, by all of them.
    """

    def __init__(self, policy: Policy, producers: int) -> None:
        self._policy, self._producers = copy.deepcopy(policy).share_memory(), producers

    async def start(self, feed: Feed[Any]) -> None:
        """Start the processes."""
        arguments = feed.handle(), self._policy, max(1, self._producers // PROCESSES)
        self._processes = [processes().Process(target=produce_here, args=arguments) for _ in range(PROCESSES)]
        for process in self._processes:
            process.start()

    async def update(self, policy: Policy) -> None:
        """Answer with these weights from now on: the processes see them."""
        self._policy.load_state_dict(policy.state_dict())

    async def stop(self) -> None:
        """Wait until all processes have seen the end of the feed."""
        for process in self._processes:
            await asyncio.to_thread(process.join)


def produce_here(handle: FeedHandle, policy: Policy, producers: int) -> None:
    """Answer prompts in this process, several at once."""
    torch.set_num_threads(1)

    async def answer(prompt: torch.Tensor) -> Group:
        return graded(prompt, *await generate(policy, prompt))

    async def produce_all() -> None:
        await asyncio.gather(*(produce(handle, answer) for _ in range(producers)))

    asyncio.run(produce_all())


def processes() -> multiprocessing.context.ForkServerContext:
    """Return how processes are started: from one that has imported before what they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "aiohttp.web", "asyncloader.online"])
    return context


ENGINES: dict[str, Callable[[Policy, int], Tasks | Processes]] = {"tasks": Tasks, "http": Http, "processes": Processes}
