"""The paper's numbers, read as they are printed."""

from manyheads.studies.published import accuracies, speeds


def test_every_cell_is_there_once() -> None:
    for table, count in ((1, 108), (2, 108), (3, 84), (4, 84)):
        cells = accuracies(table)
        assert len({(cell.data, cell.dirichlet, cell.graph, cell.algorithm) for cell in cells}) == len(cells) == count
        assert {cell.data for cell in cells} == {"cifar10", "cifar100", "fashion-mnist", "mobiact"}
        assert all(0 < cell.std < cell.accuracy < 100 for cell in cells)
    assert len({(cell.data, cell.workers, cell.algorithm) for cell in speeds()}) == len(speeds()) == 32


def test_tables_agree_where_they_overlap() -> None:
    on_ring = {cell for cell in accuracies(1) if cell.graph == "ring"}
    assert on_ring <= set(accuracies(3))
    assert {cell for cell in accuracies(2) if cell.graph == "ring"} <= set(accuracies(4))
    (cell,) = (cell for cell in on_ring if (cell.data, cell.dirichlet, cell.algorithm) == ("cifar10", 0.1, "deprl"))
    assert (cell.accuracy, cell.std) == (89.57, 0.2)
