"""Swapping layers keeps what is shared shared, and nothing else."""

from torch import nn

from manyheads.models.layers import replace_layers, unshare_layers


def test_a_shared_layer_is_replaced_in_all_its_places_by_one() -> None:
    norm = nn.BatchNorm1d(3)
    net = nn.Sequential(norm, nn.Sequential(nn.Linear(3, 3), norm))
    replace_layers(net, lambda layer: nn.LayerNorm(3) if layer is norm else None)
    assert isinstance(net[0], nn.LayerNorm)
    assert net[1][1] is net[0]
    assert isinstance(net[1][0], nn.Linear)


def test_a_shared_layer_without_tensors_becomes_one_for_each_place() -> None:
    relu, linear = nn.ReLU(), nn.Linear(3, 3)
    net = nn.Sequential(linear, relu, linear, nn.Sequential(relu), relu)
    unshare_layers(net)
    assert len({net[1], net[3][0], net[4]}) == 3
    assert net[0] is net[2]
