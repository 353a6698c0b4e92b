"""Nets by name, by import path, as factories and as modules; wrong ones are refused in one line."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from manyheads.errors import UserError
from manyheads.models.registry import build
from manyheads.randomness import torch_seed

FACTORIES = """
from torch import nn

def fitted(input_shape, num_outputs):
    rows, columns = input_shape
    return nn.Sequential(nn.Flatten(), nn.Linear(rows * columns, 8), nn.ReLU(), nn.Linear(8, num_outputs))

def fixed(width=8):
    return nn.Sequential(nn.Flatten(), nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 4))

class Net(nn.Module):
    def __init__(self, input_shape, num_outputs):
        super().__init__()
        self.body = nn.Linear(3, 5)
        self.out = nn.Linear(10, num_outputs)

    def forward(self, x):
        return self.out(self.body(x).flatten(1))

def greedy(a, b, c):
    return fixed()

def sized(width, classes):
    return nn.Linear(width, classes)

def broken():
    raise RuntimeError("first line\\nsecond line")

def nothing():
    return None

def leaving():
    raise SystemExit

number = 3
made = nn.Linear(6, 4)
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "user_nets.py").write_text(FACTORIES)
    (tmp_path / "failing_nets.py").write_text("import not_a_module_at_all\n")
    (tmp_path / "leaving_nets.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "user_nets", raising=False)
    return "user_nets"


def module() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 4))


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 5), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x.long()).mean(1))


def test_a_net_that_looks_its_inputs_up_is_tried_on_what_it_can_take() -> None:
    assert build(Lookup, (6,), 4, example=torch.full((2, 6), 8.0))(torch.full((3, 6), 8.0)).shape == (3, 4)


def test_hidden_sizes_come_from_the_spec_and_the_rest_from_the_data() -> None:
    net = build("mlp:200,100", (28, 28), 10)
    weights = [tuple(p.shape) for p in net.parameters() if p.ndim == 2]
    assert weights == [(200, 784), (100, 200), (10, 100)]


@pytest.mark.parametrize("factory", ["fitted", "fixed", "Net"])
def test_a_factory_is_found_by_its_import_path(factories: str, factory: str) -> None:
    assert build(f"{factories}:{factory}", (2, 3), 4).eval()(torch.zeros(5, 2, 3)).shape == (5, 4)


@pytest.mark.parametrize("model", [module(), module, lambda: module(), lambda input_shape, num_outputs: module()])
def test_modules_and_callables_are_taken_as_they_are(model: nn.Module | Callable[..., nn.Module]) -> None:
    assert build(model, (2, 3), 4, head="1").groups == ("head",)


def test_a_module_keeps_its_weights_and_is_not_changed() -> None:
    own = module()
    net = build(own, (2, 3), 4, norm="group")
    assert torch.equal(net.get_parameter("head.4.weight"), own[4].weight)
    assert net.get_parameter("head.4.weight") is not own[4].weight
    assert isinstance(own[3], nn.BatchNorm1d)
    assert isinstance(net.representation[3], nn.GroupNorm)


def test_a_module_of_another_precision_stays_in_it() -> None:
    assert build(module().double(), (2, 3), 4).get_buffer("representation.3.running_mean").dtype == torch.float64


def test_weights_are_a_function_of_the_global_seed() -> None:
    def weights(seed: int) -> torch.Tensor:
        with torch_seed(seed):
            return build("cnn", (1, 8, 8), 10).get_parameter("representation.conv1.weight")

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("resnet81", "Did you mean 'resnet18'?"),
        ("nothing-like-it", "package.module:factory"),
        ("mlp:", "as mlp:200,100"),
        ("mlp:20,-1", "as mlp:200,100"),
        ("mlp:0", "as mlp:200,100"),
        ("vgg11:64", "vgg11 takes no sizes"),
        ("mpl:64", "unknown model 'mpl'. Did you mean 'mlp'?"),
        ("no_such_package.nets:net", "cannot import no_such_package.nets: ModuleNotFoundError"),
        ("no_such_package.nets:net", "or add that folder to PYTHONPATH"),
        ("user_nets.py:net", "write user_nets:net, and start in the folder of that file."),
        ("./nets/user_nets.py:net", "write user_nets:net, "),
        (":net", "write the whole name of the module, as package.module:net."),
        ("..:net", "write the whole name of the module, as package.module:net."),
        ("failing_nets:net", "No module named 'not_a_module_at_all'"),
        ("user_nets:fited", "user_nets has no 'fited'. Did you mean 'fitted'?"),
        ("user_nets:zzz", "user_nets has no 'zzz': name a function or class that gives a module."),
        ("user_nets:number", "is a int"),
        ("user_nets:made", "is a Linear: name a function or class that gives a module."),
        ("user_nets:greedy", "needs the arguments a, b, c"),
        ("user_nets:sized", "cannot be made when called with input_shape (2, 3) and num_outputs 4: TypeError"),
        ("user_nets:broken", "cannot be made: RuntimeError: first line"),
        ("user_nets:nothing", "gives a NoneType"),
        ("user_nets:leaving", "cannot be made: SystemExit"),
        ("leaving_nets:net", "cannot import leaving_nets: SystemExit: 0"),
        ("builtins:dict", "cannot be made: ValueError: no signature found"),
    ],
)
def test_a_wrong_spec_is_refused_in_one_line(factories: str, spec: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        build(spec, (2, 3), 4)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (nn.DataParallel, "DataParallel, which spreads batches over GPUs: give the plain net, its .module."),
        (torch.compile, "OptimizedModule, made by torch.compile: give the plain net it was made from."),
        (torch.jit.script, "RecursiveScriptModule, made by torch.jit: give the plain net it was made from."),
    ],
    ids=["parallel", "compiled", "scripted"],
)
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_what_only_wraps_a_net_is_refused_in_one_line(wrap: Callable[[nn.Module], nn.Module], message: str) -> None:
    with pytest.raises(UserError) as error:
        build(wrap(module()), (2, 3), 4)
    assert str(error.value) == f"the model is a {message}"
    inside = nn.Sequential(nn.Flatten(), wrap(nn.Linear(6, 4)), nn.Linear(4, 4))
    with pytest.raises(UserError) as error:
        build(inside, (2, 3), 4)
    assert str(error.value) == f"the model's layer 1 is a {message}"


def test_samples_that_do_not_fit_are_refused_unless_the_net_is_known() -> None:
    with pytest.raises(UserError, match=r"^on samples of shape 2x4 the model fails in "):
        build(module(), (2, 4), 4, example=torch.rand(4, 2, 4))
    assert build(module(), (2, 4), 4).groups == ("representation", "head")


def test_an_unknown_norm_is_refused() -> None:
    with pytest.raises(UserError, match="Did you mean 'group'"):
        build("mlp", (2, 3), 4, norm="groups")  # type: ignore[arg-type]


class Running(nn.Module):
    """Keeps a statistic of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 4)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.head(x - self.mean)


def test_a_policy_for_batchnorm_is_refused_where_it_has_no_effect() -> None:
    x = torch.rand(4, 2, 3)
    for model, norm in (("mlp", "local"), ("mlp", "group"), (Running, "group")):
        with pytest.raises(UserError) as error:
            build(model, (2, 3), 4, norm=norm, example=x)
        said = f"--norm {norm} is for nets with BatchNorm, and this one has none"
        assert str(error.value) == f"{said}: leave it out, or say --norm shared."
        assert build(model, (2, 3), 4, norm=norm).groups  # it has been tried before
    for model, norm in (("mlp", "shared"), (module, "local"), (module, "group"), (Running, "local")):
        assert build(model, (2, 3), 4, norm=norm, example=x).groups
