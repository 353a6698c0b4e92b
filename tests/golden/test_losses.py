"""Golden losses in double precision: whatever is changed, these numbers stay, or somebody says why they do not."""

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from manyheads.algorithms import REGISTRY

spec = spec_from_file_location("regenerate", Path(__file__).with_name("regenerate.py"))
assert spec is not None and spec.loader is not None
regenerate = module_from_spec(spec)
spec.loader.exec_module(regenerate)


@pytest.mark.parametrize("algorithm", REGISTRY)
def test_golden_losses(algorithm):
    expected = json.loads(regenerate.STORED.read_text())[algorithm]
    found = regenerate.losses(algorithm)
    assert found.keys() == expected.keys()
    for name, values in found.items():
        # First weights are drawn in single precision, whose last bit is not the same on every processor.
        assert values == pytest.approx(expected[name], rel=1e-7), name


def test_every_golden_algorithm_exists():
    assert json.loads(regenerate.STORED.read_text()).keys() == REGISTRY.keys()
