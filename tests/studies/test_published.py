"""The paper's numbers, read as they are printed."""

from manyheads.studies.published import Place, accuracies, speeds


def test_every_cell_is_there_once() -> None:
    for table, count in ((1, 108), (2, 108), (3, 84), (4, 84)):
        cells = accuracies(table)
        assert len(cells) == count
        assert {place.data for place in cells} == {"cifar10", "cifar100", "fashion-mnist", "mobiact"}
        assert all(0 < cell.std < cell.accuracy < 100 for cell in cells.values())
    assert len(speeds()) == 32


def test_tables_agree_where_they_overlap() -> None:
    for by_graph, by_algorithm in ((1, 3), (2, 4)):
        on_ring = {(place, cell) for place, cell in accuracies(by_graph).items() if place.graph == "ring"}
        assert on_ring <= accuracies(by_algorithm).items()
    assert accuracies(1)[Place("cifar10", 0.1, "ring", "deprl")] == (89.57, 0.2)


def test_times_are_not_taken_for_each_other() -> None:
    found = speeds()["cifar100", 4, "fedrep"]
    assert (found.final_accuracy, found.convergence_time, found.time_to_accuracy) == (74.1, 690.3, 381.5)
