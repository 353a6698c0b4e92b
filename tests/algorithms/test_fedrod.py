"""FedRoD by hand: balanced softmax, summed scores, and a personal head that teaches nobody."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from manyheads.algorithms import FedRoD
from manyheads.algorithms.fedrod import two_losses
from manyheads.data import Dataset
from manyheads.engine.phase import cross_entropy
from manyheads.errors import UserError


def scores(rows: int = 5, classes: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(rows, classes, generator=generator, dtype=torch.float64).requires_grad_()
        for name in ("generic", "head")
    }


def test_both_losses_by_hand():
    outputs, y = scores(), torch.tensor([0, 1, 2, 3, 0])
    counts = torch.tensor([[4.0, 1.0, 2.0, 3.0]], dtype=torch.float64).expand(5, 4)
    generic, head = outputs["generic"].detach(), outputs["head"].detach()
    weighted = generic.exp() * counts
    balanced = -(weighted[range(5), y] / weighted.sum(1)).log()
    summed = (generic + head).exp()
    personal = -(summed[range(5), y] / summed.sum(1)).log()
    torch.testing.assert_close(two_losses(outputs, y, {"log_counts": counts.log()}), balanced + personal)


def test_the_personal_loss_teaches_the_personal_head_alone():
    outputs, y = scores(), torch.tensor([0, 1, 2, 3, 0])
    log_counts = torch.tensor([0.3, 0.0, 1.0, -0.5], dtype=torch.float64).expand(5, 4)
    two_losses(outputs, y, {"log_counts": log_counts}).sum().backward()
    generic = outputs["generic"].detach().requires_grad_()
    F.cross_entropy(generic + log_counts, y, reduction="sum").backward()
    torch.testing.assert_close(outputs["generic"].grad, generic.grad)
    head = outputs["head"].detach().requires_grad_()
    F.cross_entropy(outputs["generic"].detach() + head, y, reduction="sum").backward()
    torch.testing.assert_close(outputs["head"].grad, head.grad)


def test_equal_counts_are_plain_cross_entropy():
    outputs, y = scores(), torch.tensor([0, 1, 2, 3, 0])
    same = {"log_counts": torch.full((5, 4), 7.0, dtype=torch.float64).log()}
    expected = cross_entropy(outputs["generic"], y) + cross_entropy(outputs["generic"] + outputs["head"], y)
    torch.testing.assert_close(two_losses(outputs, y, same), expected)


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_absent_classes_are_left_out(lab, precision):
    """As log 0 would do, without an infinity: neither loss nor gradient knows of a class a worker does not have."""
    data = lab.blobs()
    missing = torch.where(data.user_train == 0, data.y_train % 2, data.y_train)
    data = replace(data, y_train=missing, source=None)
    session = lab.opened(lab.tiny(FedRoD(), data=data, precision=precision))
    recorder = lab.Recorder(session.ctx.engine)
    kind, ctx = FedRoD(), replace(session.ctx, engine=recorder)
    kind.local(kind.init(ctx), 0, ctx)
    ((_, phase),) = recorder.asked
    log_counts = phase.constants["log_counts"]
    counts = torch.stack(
        [torch.bincount(session.federation.train.y[session.federation.train.rows(w)], minlength=3) for w in range(4)]
    )
    assert counts[0, 2] == 0 and counts[0, :2].all()
    torch.testing.assert_close(log_counts[counts > 0], counts[counts > 0].log().to(log_counts.dtype))
    generic = torch.randn(6, 3, dtype=log_counts.dtype).requires_grad_()
    y = torch.tensor([0, 1, 0, 1, 1, 0])
    outputs = {"generic": generic, "head": torch.zeros_like(generic)}
    present = generic.detach()[:, :2] + counts[0, :2].log().to(generic.dtype)
    loss = two_losses(outputs, y, {"log_counts": log_counts[0].expand(6, 3)})
    personal = cross_entropy(generic.detach(), y)
    torch.testing.assert_close(loss.detach(), cross_entropy(present, y) + personal)
    loss.sum().backward()
    assert generic.grad is not None and generic.grad.isfinite().all()
    assert not generic.grad[:, 2].any()


def test_the_first_personal_scores_are_the_generic_ones(lab):
    for head in (None, "fc1"):
        session = lab.opened(lab.tiny(FedRoD(), head=head, model="mlp:5,4"))
        state = FedRoD().init(session.ctx)
        net = session.ctx.model.eval()
        net.load_state_dict({name: leaf[0] for name, leaf in state.params.items()})
        x = session.federation.test.x
        outputs = net.outputs(x)
        assert not outputs["head"].any() and outputs["generic"].any()
        torch.testing.assert_close(net(x), outputs["generic"])
        # It must be able to learn all the same.
        trained, _ = FedRoD().local(state, 0, session.ctx)
        for name, leaf in state.params.items():
            if name.startswith("head."):
                assert not torch.equal(leaf, trained.params[name]), name


def test_nothing_shared_depends_on_the_personal_head(lab):
    session = lab.opened(lab.tiny(FedRoD(), clip=0.0))
    kind, ctx = FedRoD(), session.ctx
    start = kind.init(ctx)
    other = replace(start, params={n: v + 1 if n.startswith("head.") else v for n, v in start.params.items()})
    (a, _), (b, _) = kind.local(start, 0, ctx), kind.local(other, 0, ctx)
    for name in a.params:
        assert torch.equal(a.params[name], b.params[name]) == (not name.startswith("head.")), name


def test_counts_are_of_the_names_a_worker_uses(lab):
    session = lab.opened(lab.tiny(FedRoD(), relabel=True))
    train = session.federation.train
    for worker in range(4):
        expected = torch.bincount(train.y[train.rows(worker)], minlength=3)
        assert session.ctx.class_counts[worker].tolist() == expected.tolist()


def test_a_loss_of_the_users_is_refused_and_so_is_a_regression(lab):
    data = lab.blobs()
    numbers = Dataset(
        "numbers",
        data.x_train,
        data.x_train[:, 0],
        data.x_test,
        data.x_test[:, 0],
        None,
        data.user_train,
        data.user_test,
    )

    def squares(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (output[:, 0] - y).square()

    for changes in ({"data": numbers, "loss": squares}, {"loss": cross_entropy}):
        with pytest.raises(UserError, match="fedrod trains two heads with its own losses"):
            lab.opened(lab.tiny(FedRoD(), **changes))


def test_more_scores_than_classes_are_classes_that_nobody_has():
    outputs, y = scores(classes=6), torch.tensor([0, 1, 2, 3, 0])
    log_counts = torch.tensor([0.3, 0.0, 1.0, -0.5, -1e4, -1e4], dtype=torch.float64).expand(5, 6)
    found = two_losses(outputs, y, {"log_counts": log_counts[:, :4]})
    torch.testing.assert_close(found, two_losses(outputs, y, {"log_counts": log_counts}))


def test_a_net_without_a_head_is_refused(lab):
    with pytest.raises(UserError, match="head"):
        FedRoD().init(lab.opened(lab.tiny(FedRoD(), head="none")).ctx)
