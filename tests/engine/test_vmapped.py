"""The kernel for stacked workers of any net: what it cannot run is said in one line. test_agreement.py has the rest."""

import pytest
from torch import Tensor, nn

from manyheads.errors import UserError
from manyheads.experiment import Experiment, Runtime
from manyheads.rounds import train


class Scaled(nn.Module):
    """Looks at a number of its own on the way, which many workers at once do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.top = nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.top((1 + self.body.bias.mean().item()) * self.body(x.flatten(1)))


def test_a_net_without_a_rule_is_refused_in_one_line_and_loop_runs_it() -> None:
    experiment = Experiment(workers=4, rounds=1, model=Scaled, head="top")
    with pytest.raises(UserError, match=r"^engine 'batched' cannot run this net \(.*\): use 'loop'.$"):
        list(train(experiment, Runtime(engine="batched", device="cpu", threads=1)))
    (record,) = train(experiment, Runtime(device="cpu", threads=1))
    assert record.accuracy_mean > 0
