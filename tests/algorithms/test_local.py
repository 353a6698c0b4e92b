"""Local training sends nothing."""

from manyheads.algorithms import Local
from manyheads.rounds import train


def test_nothing_is_sent(lab):
    session = lab.opened(lab.tiny(Local()))
    lab.states(session)
    assert not session.ctx.network.traffic.sent.any()
    assert session.experiment.graph == "none"


def test_mixing_is_no_event(lab):
    for record in train(lab.tiny(Local()), lab.cpu):
        assert record.accuracy_mean == record.accuracy_before_mixing
        assert record.consensus_error == record.consensus_error_before_mixing > 0
        assert record.bytes_sent_per_worker == record.bytes_received_per_worker == 0
