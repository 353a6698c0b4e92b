"""What follows from an experiment: graph, weights, rates, precision and device."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from manyheads.algorithms import DPSGD, DePRL, DisPFL, FedAvg, FedRep, Local
from manyheads.data import Dataset, load
from manyheads.data.arrays import from_arrays, from_workers
from manyheads.derived import federation_of, mixing_of, pick_device, rates_of, resolve
from manyheads.errors import UserError
from manyheads.experiment import Experiment

NO_RATES = {"lr": None, "head_lr": None, "decay": None}


def complete(experiment: Experiment) -> Experiment:
    assert isinstance(experiment.data, Dataset)
    return resolve(experiment, experiment.data.input_shape, torch.device("cpu"))


def test_users_whose_samples_are_dealt_out_are_noted(lab):
    x, y, user = torch.randn(60, 6), torch.arange(60) % 3, torch.arange(60) // 10
    data = from_arrays(x, y, user=user)
    for split, noted in (("dirichlet:0.3", True), ("natural", False)):
        experiment = complete(lab.tiny(DePRL(), data=data, split=split))
        notes = federation_of(experiment, data).notes
        assert any(f"--split {split} deals a user's samples" in note for note in notes) == noted


@pytest.mark.parametrize(
    ("algorithm", "graph", "weights"),
    [
        (DePRL(), "ring", "metropolis"),
        (DPSGD(), "ring", "metropolis"),
        (DisPFL(), "ring", "uniform"),
        (FedAvg(), "server", None),
        (Local(), "none", None),
    ],
)
def test_graph_and_weights_follow_the_algorithm(lab, algorithm, graph, weights):
    experiment = complete(lab.tiny(algorithm))
    assert (experiment.graph, experiment.weights) == (graph, weights)


def test_workers_who_could_only_exchange_their_models_are_refused_where_they_mix(lab):
    graph = "links:" + ",".join(f"{worker}-{(worker + 1) % 4}=0.5" for worker in range(4))
    with pytest.raises(UserError, match="can never agree"):
        mixing_of(complete(lab.tiny(DePRL(), graph=graph)))
    mixing_of(complete(lab.tiny(DePRL(), graph=graph.replace("0.5", "0.4"))))


@pytest.mark.parametrize("algorithm", [DePRL(), FedAvg(), Local()])
def test_a_misspelt_graph_is_told_also_where_none_is_used(lab, algorithm):
    with pytest.raises(UserError, match="unknown graph 'rign'"):
        complete(lab.tiny(algorithm, graph="rign"))


def test_who_counts_neighbours_alike_takes_no_weights(lab):
    with pytest.raises(
        UserError, match="dispfl weighs all neighbours alike: give the links of --graph without weights"
    ):
        complete(lab.tiny(DisPFL(), graph="links:0-1=0.5"))


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ({"graph": "random:.25"}, {"graph": "random:0.25"}),
        ({"graph": "regular:02"}, {"graph": "regular:2"}),
        ({"graph": "links:2-1,0-1,1-2,3-0"}, {"graph": "links:0-1,0-3,1-2"}),
        ({"graph": "links:1-0=.50,1-2=3e-1/0-2=.5"}, {"graph": "links:0-1=0.5,1-2=0.3/0-2=0.5", "weights": None}),
        ({"split": "dirichlet:.30"}, {"split": "dirichlet:0.3"}),
        ({"split": "dirichlet:1e0:uncapped"}, {"split": "dirichlet:1:uncapped"}),
        ({"split": "shards:02"}, {"split": "shards:2"}),
    ],
)
def test_one_graph_or_split_is_one_text_however_it_is_spelt(lab, given, written):
    one, other = (complete(lab.tiny(DePRL(), **options)) for options in (given, written))
    assert one.run_id == other.run_id
    assert {name: getattr(one, name) for name in written} == written


def test_workers_keep_the_samples_they_bring():
    x, y = torch.randn(40, 6), torch.arange(40) % 3
    parts = from_workers([(x[:30], y[:30]), (x[30:], y[30:])])
    (plain, brought, dealt) = (
        complete(Experiment(data=data, workers=2, **split))
        for data, split in ((from_arrays(x, y, user=y), {}), (parts, {}), (parts, {"split": "iid"}))
    )
    assert (plain.split, brought.split, dealt.split) == ("dirichlet:0.3", "natural", "iid")
    assert federation_of(brought, parts).train.sizes == (22, 7), "the others are for test and validation"


def test_a_file_for_each_worker_says_who_holds_what():
    experiment = Experiment(data="site-{worker}.npz")
    assert resolve(experiment, (6,)).split == resolve(replace(experiment, split="natural"), (6,)).split == "natural"
    with pytest.raises(UserError, match=r"--split iid does not go with a file for each worker, .* leave it out"):
        resolve(replace(experiment, split="iid"), (6,))


def test_rates_decay_every_round(lab):
    found = rates_of(complete(lab.tiny(DePRL(), lr=0.4, head_lr=0.2, decay=0.5)))
    assert [found.sgd(round).lr for round in range(3)] == [0.4, 0.2, 0.1]
    assert [found.sgd(round, head=True).lr for round in range(3)] == [0.2, 0.1, 0.05]
    assert (found.momentum, found.weight_decay, found.clip) == (0.5, 0.001, 1.0)


def test_a_clip_of_zero_is_none(lab):
    assert rates_of(complete(lab.tiny(DePRL(), clip=0.0))).sgd(0).clip is None


@pytest.mark.parametrize(
    ("algorithm", "tau"),
    [
        (DePRL(head_epochs=3), 3),
        (DePRL(head_steps=5), 5),
        (FedRep(head_epochs=4), 4),
        (FedRep(head_steps=6), 6),
        (DPSGD(), 1),
        (DePRL(head_epochs=0), 1),
    ],
)
def test_corollary_ones_schedule(lab, algorithm, tau):
    """beta = sqrt(N / K) and alpha = 1 / (tau sqrt(K)), the same in every round."""
    experiment = complete(lab.tiny(algorithm, schedule="corollary", rounds=25, **NO_RATES))
    found = rates_of(experiment)
    for round in (0, 7):
        assert found.sgd(round).lr == pytest.approx((4 / 25) ** 0.5)
        assert found.sgd(round, head=True).lr == pytest.approx(1 / (tau * 5))
    # What a run writes down names the recipe's rates, and is the same experiment.
    assert complete(experiment) == experiment


@pytest.mark.parametrize("name", NO_RATES)
def test_corollary_ones_schedule_takes_no_other_rates(lab, name):
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')} 0.5 is not used by --schedule corollary"):
        complete(lab.tiny(DePRL(), schedule="corollary", **NO_RATES | {name: 0.5}))


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_precisions_of_gpus_are_refused_on_a_cpu(lab, precision):
    """They would be computed as float32 there, under the name of something else."""
    with pytest.raises(UserError, match=precision):
        complete(lab.tiny(DePRL(), precision=precision))


@pytest.mark.parametrize(("device", "wanted"), [("cuda", "tf32"), ("cpu", "float32")])
def test_the_usual_precision_is_the_devices(device, wanted):
    """Also without that device: nothing is computed yet."""
    assert resolve(Experiment(), (1, 8, 8), torch.device(device)).precision == wanted


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "meta", "mps"])
def test_devices_that_are_not_there_are_refused(name):
    with pytest.raises(UserError, match=f"'{name}'"):
        pick_device(name)


@pytest.mark.parametrize("classes", ["train and test", "train"])
def test_labels_that_count_from_one_are_noted(lab, classes):
    x, y = torch.randn(40, 6), 1 + torch.arange(40) % 2
    from_one = classes == "train and test"
    data = from_arrays(x, y, x, y if from_one else y - 1, num_classes=3)
    experiment = complete(lab.tiny(DePRL(), data=data, split="iid"))
    noted = [
        note for note in federation_of(experiment, data).notes if note.startswith("no sample is of class 0: if labels")
    ]
    assert len(noted) == from_one


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([0, 1, 5], "class 2 and 2 more: if labels have gaps, renumber them with numpy.unique"),
        ([0, 2], "class 1: if labels have gaps"),
        ([1, 3], "class 0 and 1 more: if labels have gaps"),
        ([0, 1], None),
    ],
)
def test_labels_with_gaps_are_noted(lab, labels, said):
    x, y = torch.randn(40, 6), torch.tensor(labels).repeat(40)[:40]
    # Of classes after the last with a sample somebody has said that they are there.
    data = from_arrays(x, y, num_classes=8)
    notes = federation_of(complete(lab.tiny(DePRL(), data=data, split="iid")), data).notes
    assert not notes if said is None else notes[0].startswith(f"no sample is of {said}")


def test_what_a_file_leaves_to_say_is_noted(lab, tmp_path):
    np.savez(tmp_path / "mine.npz", x=np.ones((40, 6)), y=np.arange(40) % 2, users=np.arange(40))
    data = load(tmp_path / "mine.npz")
    experiment = complete(lab.tiny(DePRL(), data=data, split="iid"))
    assert any("not read: users" in note for note in federation_of(experiment, data).notes)


def test_a_site_that_lacks_class_0_is_not_told_to_number_classes_anew(lab):
    x, y = torch.randn(40, 6), 1 + torch.arange(40) % 2
    data = from_workers([(x, y), (x, y)], num_classes=3)
    experiment = complete(lab.tiny(DePRL(), data=data, split="natural", workers=2))
    assert federation_of(experiment, data).notes and not federation_of(experiment, data, range(2)).notes
