"""Train a policy on episodes of two cameras, as LeRobot's data sets are: frames are decoded from the videos as needed.

    pip install av
    python examples/train_video.py

A sample is one moment of an episode: a frame of each camera, and where the gripper is. Its cameras are decoded side by
side, on threads, and each worker keeps a few decoders open, which samples borrow. The training is stopped and resumed
with another number of workers: its losses are those of the training that nobody stopped, to the bit. The videos are
made here. Where FFmpeg is installed, torchcodec's `VideoDecoder(path, dimension_order="NHWC")` can take the place of
`Video`: `decoder.get_frame_played_at(second).data`. With torchcodec 0.12 and 0.13, FFmpeg 5.1 and torch 2.13 for CPUs
it was tried; wheels of torchcodec 0.16 and 0.17 on the index need torch for CUDA.
"""

import asyncio
import contextlib
import itertools
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from torch import Tensor, nn

from asyncloader import DataLoader

CAMERAS, EPISODES, FRAMES, RATE, SIZE = ("front", "side"), 6, 64, 16, 64
EPOCHS, STOP_AT = 3, 17


def write_videos(folder: Path) -> None:
    """Write an H.264 file for each camera of each episode: a bright gripper in front of a dark ground."""
    for episode, (at, camera) in itertools.product(range(EPISODES), enumerate(CAMERAS)):
        with av.open(str(folder / f"{episode}-{camera}.mp4"), "w") as file:
            stream = file.add_stream("libx264", rate=RATE, options={"g": "8"})
            stream.width = stream.height = SIZE
            for number in range(FRAMES):
                image = np.full((SIZE, SIZE, 3), 20, np.uint8)
                left = int(position(episode, number)[at] * (SIZE - 16))
                image[24:40, left : left + 16] = 220
                file.mux(stream.encode(av.VideoFrame.from_ndarray(image)))
            file.mux(stream.encode(None))


def position(episode: int, number: int) -> Tensor:
    """Return where the gripper is, as either camera sees it, from 0 to 1."""
    return 0.5 + 0.5 * torch.sin(torch.tensor([0.2 * number + episode, 0.13 * number - episode]))


class Video:
    """A file that is being decoded; for one thread at a time."""

    def __init__(self, path: Path) -> None:
        self.file = av.open(str(path))
        self.stream = self.file.streams.video[0]

    def frame_at(self, second: float) -> Tensor:
        """Decode the frame that is shown at a time: from the key frame before it on."""
        wanted = round(second / self.stream.time_base)
        self.file.seek(wanted, stream=self.stream)
        frame = next(frame for frame in self.file.decode(self.stream) if frame.pts >= wanted)
        return torch.from_numpy(frame.to_ndarray(format="rgb24"))


class Decoders:
    """Open files of a worker, at most so many: a thread borrows one; of the idle ones the oldest is closed first."""

    def __init__(self, most: int) -> None:
        self._room = threading.Semaphore(most)
        self._lock = threading.Lock()
        self._idle: OrderedDict[Video, Path] = OrderedDict()
        self._borrowed, self._most = 0, most

    @contextlib.contextmanager
    def borrow(self, path: Path) -> Iterator[Video]:
        with self._room:
            try:
                video = self._take(path) or Video(path)
                yield video  # one that raises is not used again
                with self._lock:
                    self._idle[video] = path
            finally:
                with self._lock:
                    self._borrowed -= 1

    def _take(self, path: Path) -> Video | None:
        """Return an idle file of that path; if there is none, make room for another one."""
        with self._lock:
            self._borrowed += 1
            for video, of in self._idle.items():
                if of == path:
                    del self._idle[video]
                    return video
            while self._idle and self._borrowed + len(self._idle) > self._most:
                self._idle.popitem(last=False)[0].file.close()
            return None


class Episodes:
    """An async dataset of moments; what it opens is opened in the worker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def __aenter__(self) -> None:
        self.decoders = Decoders(most=8)

    async def __aexit__(self, *exc_info: object) -> None:
        del self.decoders

    def __len__(self) -> int:
        return EPISODES * FRAMES

    async def __getitem__(self, index: int) -> dict[str, Tensor]:
        episode, number = divmod(index, FRAMES)
        paths = [self.folder / f"{episode}-{camera}.mp4" for camera in CAMERAS]
        frames = await asyncio.gather(*(asyncio.to_thread(self._decode, path, number / RATE) for path in paths))
        return {"position": position(episode, number), **dict(zip(CAMERAS, frames, strict=True))}

    def _decode(self, path: Path, second: float) -> Tensor:
        with self.decoders.borrow(path) as video:
            return video.frame_at(second)


class Training:
    """The objects of one process."""

    def __init__(self, folder: Path, num_workers: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Conv2d(6, 8, 8, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 15 * 15, 2)
        )  # fmt: skip
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.003)
        self.loader = DataLoader(Episodes(folder), batch_size=24, shuffle=True, num_workers=num_workers, concurrency=8)

    def losses(self, first_epoch: int = 0) -> Iterator[float]:
        """Train to the end, a step for each loss that is taken."""
        for _ in range(first_epoch, EPOCHS):
            for batch in self.loader:
                frames = torch.cat([batch[camera] for camera in CAMERAS], dim=3).permute(0, 3, 1, 2).float() / 255
                loss = nn.functional.mse_loss(self.model(frames), batch["position"])
                self.optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
                self.optimizer.step()
                yield loss.item()

    def save(self, path: Path) -> None:
        torch.save({name: getattr(self, name).state_dict() for name in ("model", "optimizer", "loader")}, path)

    def load(self, path: Path) -> None:
        saved: dict[str, Any] = torch.load(path)
        for name, state in saved.items():
            getattr(self, name).load_state_dict(state)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, checkpoint = Path(name), Path(name, "checkpoint.pt")
        write_videos(folder)
        expected = list(Training(folder, num_workers=2).losses())
        stopped = Training(folder, num_workers=2)
        losses = list(itertools.islice(stopped.losses(), STOP_AT))
        stopped.save(checkpoint)
        resumed = Training(folder, num_workers=1)
        resumed.load(checkpoint)
        losses += resumed.losses(first_epoch=STOP_AT // len(resumed.loader))
    assert losses == expected
    first, *_, last = expected
    print(f"loss {first:.3f} to {last:.3f} in {len(expected)} steps of {len(CAMERAS)} cameras")
    print(f"stopped after {STOP_AT} and resumed with 1 worker in place of 2: the same losses")


if __name__ == "__main__":
    main()
