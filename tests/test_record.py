"""A record is what its line in metrics.jsonl says."""

import json
from dataclasses import replace

from manyheads.algorithms import DePRL
from manyheads.record import Record
from manyheads.rounds import train


def test_a_record_comes_back_from_its_line(lab):
    for every in (0, 1):
        *_, record = train(lab.tiny(DePRL()), replace(lab.cpu, theory_every=every))
        line = json.loads(json.dumps(record.metrics()))
        assert Record(**line, per_worker=record.per_worker) == record
        assert record.consensus_error_relative > 0
        assert record.simulated_seconds > 0
