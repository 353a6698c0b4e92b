"""The network of a simulation: mixing is P times the rows, a server is a weighted mean, and every byte is counted."""

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from manyheads.errors import UserError
from manyheads.network.distributed import Distributed
from manyheads.network.in_process import InProcess
from manyheads.network.processes import Processes
from manyheads.topology import build_mixing

GRAPHS = ["ring", "full", "star", "random:0.5", "exponential", "regular:3", "one-peer-exponential"]


def tree(workers: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(workers)

    def randn(*shape: int) -> Tensor:
        return torch.randn(workers, *shape, generator=generator, dtype=torch.float64).to(dtype)

    return {"representation.weight": randn(3, 2), "representation.bias": randn(3), "head.weight": randn(5)}


def network(graph: str, workers: int, private: frozenset[str] = frozenset(), **options) -> InProcess:
    return InProcess(build_mixing(graph, workers, **options), private)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@hypothesis.given(graph=st.sampled_from(GRAPHS), workers=st.sampled_from([4, 6, 8]), round=st.integers(0, 5))
def test_mixing_is_the_matrix_times_the_rows(graph, workers, round):
    net, params = network(graph, workers), tree(workers)
    before = {name: leaf.clone() for name, leaf in params.items()}
    matrix = torch.from_numpy(net.mixing.rows(round).dense())
    mixed = net.mix(params, round)
    assert list(mixed) == list(params)
    for name, leaf in params.items():
        assert torch.equal(leaf, before[name])
        close(mixed[name], torch.tensordot(matrix, leaf, 1))
        close(mixed[name].mean(0), leaf.mean(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_type_stays(dtype):
    mixed = network("ring", 4).mix(tree(4, dtype), 0)
    averaged = network("ring", 4).average(tree(4, dtype), np.ones(4))
    for leaf in (*mixed.values(), *averaged.values()):
        assert leaf.dtype == dtype


def test_sums_run_over_ascending_workers():
    """So that any number of processes gives the same bits: every row is added up in the order of the workers."""
    net, params = network("full", 6), tree(6, torch.float32)
    weight = 1 / 6
    for name, leaf in params.items():
        total = torch.zeros_like(leaf[0])
        for row in leaf:
            total = torch.add(total, row, alpha=weight)
        for row in net.mix(params, 0)[name]:
            assert torch.equal(row, total)


def test_mixing_contracts_at_the_second_singular_value():
    mixing = build_mixing("ring", 8)
    rho = np.linalg.norm(mixing.rows(0).dense() - 1 / 8, 2)
    net = InProcess(mixing, frozenset())
    x = {"representation.x": torch.randn(8, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}

    def spread(params: dict[str, Tensor]) -> float:
        leaf = params["representation.x"]
        return float((leaf - leaf.mean(0)).norm())

    ratios = []
    for round in range(40):
        mixed = net.mix(x, round)
        ratios.append(spread(mixed) / spread(x))
        x = mixed
    assert max(ratios) <= rho + 1e-12
    assert ratios[-1] == pytest.approx(rho, rel=1e-3)


@pytest.mark.parametrize(("graph", "degrees"), [("ring", [2] * 5), ("full", [4] * 5), ("star", [4, 1, 1, 1, 1])])
def test_every_link_carries_a_row(graph, degrees):
    net, params = network(graph, 5), tree(5, torch.float32)
    message = (3 * 2 + 3 + 5) * 4
    for rounds in (1, 2):
        net.mix(params, rounds - 1)
        assert net.traffic.sent.tolist() == [rounds * degree * message for degree in degrees]
        assert net.traffic.received.tolist() == [rounds * degree * message for degree in degrees]
    assert net.traffic.on_wire == 0


def test_directed_links_count_for_sender_and_receiver(lab):
    matrix = np.array([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.25, 0.25, 0.5]])
    net = InProcess(lab.mixing_of(matrix), frozenset())
    net.mix({"head.weight": torch.ones(3, 10, dtype=torch.float64)}, 0)
    assert net.traffic.sent.tolist() == [80, 160, 80]
    assert net.traffic.received.tolist() == [80, 80, 160]


def test_failed_links_and_absent_workers_carry_nothing():
    net = network("full", 6, link_failure=0.3, worker_failure=0.3, seed=2)
    round = next(round for round in range(20) if not net.present(round).all())
    rows = net.mixing.rows(round)
    params = tree(6)
    mixed = net.mix(params, round)
    message = 14 * 8
    heard = (rows.dense() > 0) & ~np.eye(6, dtype=bool)
    assert net.traffic.sent.tolist() == (heard.sum(0) * message).tolist()
    assert net.traffic.received.tolist() == (heard.sum(1) * message).tolist()
    gone = np.flatnonzero(~net.present(round))
    for name, leaf in params.items():
        assert torch.equal(mixed[name][gone], leaf[gone])


def test_under_a_mask_each_weight_is_averaged_over_those_who_have_it(lab):
    matrix = np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]])
    net = InProcess(lab.mixing_of(matrix), frozenset())
    x = torch.tensor([[4.0, 1.0, 0.0], [8.0, 0.0, 0.0], [0.0, 3.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 1, 0]], dtype=torch.uint8)
    plain = torch.ones(3, 2, dtype=torch.float64)
    mixed = net.mix({"head.w": x, "head.b": plain}, 0, {"head.w": mask})
    # First weight: workers 0 and 1 have it; second: 0 and 2; third: nobody.
    expected = [[4 / 0.75, 1.25 / 0.75, 0.0], [5 / 0.75, 1 / 0.5, 0.0], [3 / 0.5, 1.75 / 0.75, 0.0]]
    expected[0][0] = (0.5 * 4 + 0.25 * 8) / 0.75
    close(mixed["head.w"], torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(mixed["head.b"], plain)
    # Two kept values and three bits for the masked leaf, two values for the plain one; worker 1 and 2 keep one value.
    message = [2 * 8 + 1 + 16, 8 + 1 + 16, 8 + 1 + 16]
    assert net.traffic.sent.tolist() == [2 * size for size in message]
    assert net.traffic.received.tolist() == [sum(message) - size for size in message]


def test_a_mask_of_ones_is_no_mask():
    net, params = network("star", 4), tree(4)
    ones = {name: torch.ones_like(leaf, dtype=torch.uint8) for name, leaf in params.items()}
    masked, plain = net.mix(params, 0, ones), net.mix(params, 0)
    for name in params:
        close(masked[name], plain[name])


@hypothesis.given(st.lists(st.floats(0, 50), min_size=4, max_size=4).filter(lambda w: sum(w) > 1e-3))
def test_a_server_weighs_the_rows(weights):
    net, params = network("ring", 4), tree(4)
    share = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    averaged = net.average(params, np.array(weights))
    for name, leaf in params.items():
        close(averaged[name], torch.tensordot(share, leaf, 1).expand_as(leaf))
    taking_part = [weight > 0 for weight in weights]
    assert net.traffic.sent.tolist() == [14 * 8 * here for here in taking_part]
    assert net.traffic.received.tolist() == [14 * 8 * here for here in taking_part]


def test_rows_of_a_result_share_no_memory():
    net, params = network("full", 4), tree(4)
    for result in (net.mix(params, 0), net.average(params, np.ones(4))):
        leaf = result["head.weight"]
        before = leaf.clone()
        leaf[0] = 7.0
        assert torch.equal(leaf[1:], before[1:])


def test_private_leaves_are_refused_before_anything_is_counted():
    net, params = network("ring", 4, frozenset({"head"})), tree(4)
    with pytest.raises(RuntimeError, match=r"head\.weight.*private"):
        net.mix(params, 0)
    with pytest.raises(RuntimeError, match=r"head\.weight.*private"):
        net.average(params, np.ones(4))
    assert not net.traffic.sent.any() and not net.traffic.received.any()
    del params["head.weight"]
    assert net.mix(params, 0).keys() == params.keys()


def test_slots_with_a_mask_give_the_neighbours_rows_one_by_one():
    """As the design page promises."""
    net, params = network("random:0.5", 6, link_failure=0.3, worker_failure=0.2, weights="lazy"), tree(6)
    own = torch.eye(6, dtype=torch.float64)
    slots = {name: torch.einsum("ij,i...->ij...", own, leaf) for name, leaf in params.items()}
    mask = {name: torch.einsum("ij,i...->ij...", own, torch.ones_like(leaf)) for name, leaf in params.items()}
    for round in range(4):
        before, matrix = net.traffic.sent.copy(), torch.from_numpy(net.mixing.rows(round).dense())
        for name, leaf in net.mix(slots, round, mask).items():
            close(leaf, torch.einsum("ij,j...->ij...", (matrix > 0).double(), params[name]))
        messages = ((matrix > 0).sum(0) - 1).numpy()
        numbers = [leaf[0].numel() for leaf in params.values()]
        each = sum(8 * count + -(-6 * count // 8) for count in numbers)
        assert (net.traffic.sent - before).tolist() == (each * messages).tolist()


def test_metrics_see_every_row():
    net, params = network("ring", 4), tree(4, torch.float32)
    values = torch.arange(4.0)
    assert torch.equal(net.gather(values), values)
    mean = net.mean(params)
    for name, leaf in params.items():
        assert mean[name].dtype == torch.float64
        close(mean[name], leaf.double().mean(0))
    assert (net.num_workers, list(net.workers)) == (4, [0, 1, 2, 3])


def test_one_tensor_is_gathered_at_a_time():
    alone = Processes(None, 0, 1, "0", 1.0, torch.device("cpu"))
    for net in (
        network("full", 2),
        Distributed(build_mixing("full", 2), frozenset(), alone, (range(2),)),
    ):
        with pytest.raises(UserError, match=r"^gather takes a tensor \[workers, \.\.\.\] and was given a dict: give"):
            net.gather(tree(2))  # pyright: ignore[reportArgumentType]


def test_of_nothing_nothing_is_sent():
    """As of the representation of a net that is all head."""
    net = network("ring", 4)
    assert net.mix({}, 0) == net.average({}, np.ones(4)) == {}
    assert not net.traffic.sent.any()
