"""pFedSim as the usual research code runs it: one client after another.

FL-bench and PFLlib do this too, with torch's own number of threads: one model for all clients, and
a DataLoader over a Subset of the records; before a client's turn its parameters are put together
(in the generalisation phase the average, afterwards the mix of extractors by the row of a
similarity matrix) and loaded; it is evaluated on its test records, trained for the epochs by
``torch.optim.SGD`` on ``DataLoader(Subset(…), batch_size, shuffle=True)``, evaluated again, and its
parameters and the optimiser's state are copied. After the round the extractors' similarities are
computed from the classifiers, pair by pair. Batches of one record are skipped, as batch norm wants.

Records are kept in one of four ways:

- ``"images"``: 8-bit images, as torchvision's CIFAR10 gives them, made PIL images, tensors
  (ToTensor) and normal (Normalize) each time that one is taken;
- ``"normalised"``: tensors that are made normal each time that one is taken, as in FL-bench;
- ``"tensors"``: a list of pairs of tensors that nothing is left to do with, as in PFLlib (which
  reads it from the disk anew for each turn; here it is in memory);
- ``"resident"``: one tensor on the device, of which batches are taken by index without a
  DataLoader. No research code does so; it shows what of a gain is the records' way alone.

``captured`` replays the training step of a full batch as a CUDA graph (for ``"resident"``), which
shows what of a gain is the launching of kernels alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from staddle.algorithms.models.torchvision_import import torchvision
from staddle.algorithms.numerics.devices import Precision, casting

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of CIFAR-10
Way: TypeAlias = Literal["images", "normalised", "tensors", "resident"]
WAYS: tuple[Way, ...] = ("images", "normalised", "tensors")  # of research code
WARM_STEPS = 3  # before a step is captured: libraries set up their workspaces in the first
Parameters: TypeAlias = dict[str, Tensor]


class Pixels(Dataset[tuple[Tensor, int]]):
    """8-bit images [N, height, width, 3] and their labels, transformed one by one."""

    def __init__(self, pixels: NDArray[np.uint8], labels: NDArray[np.int64], way: Way) -> None:
        transforms = torchvision("transforms", "the plain loop")
        self._labels = labels.tolist()
        normal = transforms.Normalize(MEAN, STD)
        if way == "images":
            self._records: Any = pixels
            self._transform = transforms.Compose([Image.fromarray, transforms.ToTensor(), normal])
        else:
            self._records = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().float() / 255
            self._transform = transforms.Compose([normal])

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._transform(self._records[index]), self._labels[index]


def normalised(pixels: NDArray[np.uint8]) -> Tensor:
    """The same records as one tensor."""
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().float() / 255
    return (x - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


class PlainLoop:
    """``train`` and ``test`` are the indices of each client's records."""

    def __init__(
        self,
        model: nn.Sequential,
        pixels: NDArray[np.uint8],
        labels: NDArray[np.int64],
        train: Sequence[Sequence[int]],
        test: Sequence[Sequence[int]],
        way: Way,
        epochs: int,
        batch_size: int,
        lr: float,
        warmup: int,
        device: str = "cpu",
        precision: Precision = "float32",
        *,
        captured: bool = False,
    ) -> None:
        """``model`` has the children ``extractor`` and ``classifier``.

        ``warmup`` is rounds of generalisation.

        Batches are taken to the ``device``, where the model is. Forward passes in training are
        autocast where ``precision`` is "bf16".
        """
        self.steps, self._device, self._precision = 0, torch.device(device), precision
        self._captured: Callable[[Tensor, Tensor], None] | None = None
        self._capturing = captured
        model.to(device)
        self._model, self._epochs, self._lr, self._warmup, self._batch = (
            model,
            epochs,
            lr,
            warmup,
            batch_size,
        )
        if way == "resident":
            self._x, self._y = normalised(pixels).to(device), torch.from_numpy(labels).to(device)
            self._train, self._test = (
                [torch.tensor([*own], device=device) for own in side] for side in (train, test)
            )
        elif way == "tensors":
            pairs = list(zip(normalised(pixels), torch.from_numpy(labels), strict=True))
            self._train, self._test = (
                [[pairs[i] for i in own] for own in side] for side in (train, test)
            )
        else:
            records = Pixels(pixels, labels, way)
            self._train, self._test = (
                [Subset(records, own) for own in side] for side in (train, test)
            )
        self._criterion = nn.CrossEntropyLoss()
        self._shared: Parameters = {
            name: p.detach().clone() for name, p in model.named_parameters()
        }
        self._own: dict[int, Parameters] = {}  # with buffers
        self._similar = torch.eye(len(train))
        self._optimisers: dict[int, dict[str, Any]] = {}

    def round(self, number: int, clients: Sequence[int]) -> tuple[int, int]:
        """Run a round; its clients' correct test records before and after training."""
        before = after = 0
        weights, trained = [], []
        for client in clients:
            self._load(client, number)
            before += self._evaluate(client)
            self._fit(client)
            after += self._evaluate(client)
            self._own[client] = {
                name: value.clone() for name, value in self._model.state_dict().items()
            }
            trained.append(deepcopy(dict(self._model.named_parameters())))
            weights.append(len(self._train[client]))
        if number < self._warmup:
            share = torch.tensor(weights, device=self._device) / sum(weights)
            for name in self._shared:
                stacked = torch.stack([own[name].detach() for own in trained], dim=-1)
                self._shared[name] = (stacked * share).sum(dim=-1)
        else:
            self._compare(clients)
        return before, after

    def _load(self, client: int, number: int) -> None:
        self._model.load_state_dict(self._shared, strict=False)
        if client in self._own:
            self._model.load_state_dict(self._buffers_of(self._own[client]), strict=False)
        if number <= self._warmup or client not in self._own:
            return
        self._model.load_state_dict(self._own[client])
        row = self._similar[client]
        others = [other for other in self._own if row[other] > 0]
        share = -torch.log(1 - row[others].clamp(max=0.9999)).to(self._device)
        mixed = {
            name: torch.stack([self._own[other][name] for other in others], dim=-1)
            @ (share / share.sum())
            for name in self._shared
            if name.startswith("extractor")
        }
        self._model.load_state_dict(mixed, strict=False)

    def _buffers_of(self, state: Mapping[str, Tensor]) -> Parameters:
        return {name: value for name, value in state.items() if name not in self._shared}

    def _fit(self, client: int) -> None:
        optimiser = torch.optim.SGD(self._model.parameters(), self._lr)
        if self._capturing and self._captured is None:
            self._captured = self._capture()
        self._model.train()
        for _ in range(self._epochs):
            for x, y in self._batches(self._train[client], shuffle=True):
                if len(x) <= 1:
                    continue
                if self._captured is not None and len(x) == self._batch:
                    self._captured(x, y)
                else:
                    self._step(optimiser, x, y)
                self.steps += 1
        self._optimisers[client] = deepcopy(optimiser.state_dict())

    def _step(self, optimiser: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        with casting(self._device, self._precision):
            loss = self._criterion(self._model(x), y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    def _capture(self) -> Callable[[Tensor, Tensor], None]:
        """The step on a full batch as a CUDA graph; the model is afterwards as it was."""
        optimiser = torch.optim.SGD(self._model.parameters(), self._lr)
        x, y = self._x[: self._batch].clone(), self._y[: self._batch].clone()
        before = {name: value.clone() for name, value in self._model.state_dict().items()}
        self._model.train()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_STEPS):
                self._step(optimiser, x, y)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(optimiser, x, y)
        self._model.load_state_dict(before)

        def replayed(own_x: Tensor, own_y: Tensor) -> None:
            x.copy_(own_x)
            y.copy_(own_y)
            graph.replay()

        return replayed

    def _batches(self, own: Any, *, shuffle: bool) -> Iterator[tuple[Tensor, Tensor]]:
        if isinstance(own, Tensor):
            order = torch.randperm(len(own), device=self._device) if shuffle else None
            for places in (own if order is None else own[order]).split(self._batch):
                yield self._x[places], self._y[places]
        else:
            for x, y in DataLoader(own, self._batch, shuffle=shuffle):
                yield x.to(self._device), y.to(self._device)

    @torch.no_grad()
    def _evaluate(self, client: int) -> int:
        self._model.eval()
        right = torch.zeros((), dtype=torch.int64, device=self._device)
        for x, y in self._batches(self._test[client], shuffle=False):
            right += (self._model(x).argmax(-1) == y).sum()
        return int(right)

    def _compare(self, clients: Sequence[int]) -> None:
        for i, j in _pairs(clients):
            one, other = (self._own[client]["classifier.weight"] for client in (i, j))
            found = torch.cosine_similarity(one, other, dim=-1).mean().clamp(0, 1)
            self._similar[i, j] = self._similar[j, i] = found


def _pairs(clients: Sequence[int]) -> Iterator[tuple[int, int]]:
    return ((i, j) for place, i in enumerate(clients) for j in clients[place + 1 :])
