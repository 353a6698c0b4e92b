"""Train a net of your own on arrays of your own, and use what one worker has learned."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import manyheads


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 64), nn.ReLU())
        self.classifier = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.body(x))


rng = np.random.default_rng(0)
y = rng.integers(4, size=2000)
x = rng.normal(size=(4, 20))[y] + rng.normal(size=(2000, 20))

experiment = manyheads.Experiment(
    algorithm=manyheads.DePRL(head_epochs=2, body_epochs=1),
    data=manyheads.from_arrays(x, y),
    model=Net,
    head="classifier",  # stays with its worker; all the rest is shared
    workers=8,
    split="dirichlet:0.3",
    graph="ring",
    rounds=10,
)
out = Path("runs/own-model")
for record in manyheads.train(experiment, manyheads.Runtime(out=out)):
    print(f"round {record.round}: accuracy {record.accuracy_mean:.3f}, worst tenth {record.accuracy_worst10:.3f}")

net = manyheads.Run.open(out, model=Net).model(worker=3)
print("worker 3 says", net(torch.tensor(x[:8], dtype=torch.float32)).argmax(1).tolist())
