"""The maps of similarities: what follows the data, and what agrees altogether."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from manyheads.errors import UserError
from manyheads.studies import get_study
from manyheads.studies.records import Records
from manyheads.studies.trial import QUICK


@pytest.mark.filterwarnings("error")
def test_heads_may_follow_the_data_and_representations_be_one(tmp_path: Path, records_lab: SimpleNamespace) -> None:
    study, records = get_study("similarity"), Records(tmp_path / "records")
    (trial,) = study.grid(QUICK)
    records_lab.write(records, trial)
    count = trial.experiment.workers
    data = np.random.default_rng(0).random((count, count), dtype=np.float32)
    data = (data + data.T) / 2
    maps = {"data": data, "heads": 0.9 + 0.05 * data, "representations": np.ones_like(data)}
    save_file(maps, records.path(trial) / "similarity.safetensors")

    page = study.write(QUICK, records, tmp_path).read_text()
    rows = {row[1].strip(): row[3].strip() for row in (line.split("|") for line in page.splitlines() if "|" in line)}
    assert (rows["data"], rows["heads"], rows["representations"]) == ("1.000", "1.000", "all alike")
    assert "DePRL, digits, Dirichlet 0.3, random graph: cosines" in page, "whose they are"
    assert "heads: cosines of" in page and (tmp_path / "similarity-representations.svg").exists()

    save_file({"heads": data}, records.path(trial) / "similarity.safetensors")
    with pytest.raises(UserError, match=r"similarity\.safetensors is damaged: put it back, or delete it and start"):
        study.write(QUICK, records, tmp_path)
