"""Who is at which site, where a run over sites goes on, and for how long it waits for one; runs are in ``network``."""

import time
from pathlib import Path

import pytest

from manyheads.data.site_files import seen
from manyheads.errors import UserError
from manyheads.sites import Sites, noted, place, refuse_others, resume_round, whose


def _marked(seen: list[list[int]]) -> list[dict[str, str]]:
    return [{str(worker): f"the file of {worker}" for worker in workers} for workers in seen]


def test_a_worker_is_where_its_file_is() -> None:
    assert place(_marked([[3], [0, 1], [2]])) == (range(3, 4), range(2), range(2, 3))
    assert place(_marked([[2, 3], [0, 1], [2, 3]])) == (range(2, 3), range(2), range(3, 4))
    assert place(_marked([[0, 1, 2]])) == (range(3),)


def test_two_sites_may_not_number_their_workers_alike(tmp_path: Path) -> None:
    def site(name: str) -> dict[str, str]:
        (tmp_path / name).mkdir()
        for worker in range(2):
            (tmp_path / name / f"s-{worker}.npz").write_bytes(b"as large")
        return seen(str(tmp_path / name / "s-{worker}.npz"), 2)

    here = site("here")
    assert place([here, here]) == (range(1), range(1, 2)), "two processes of one site"
    with pytest.raises(UserError, match="two sites have a file of worker 0, and not the same one: give every worker"):
        place([here, site("there")])


def test_a_process_is_known_by_its_workers_and_their_files() -> None:
    names = ["worker 3 (~/s-3.npz)", "workers 0, 1, 2 (~/s-0.npz to ~/s-2.npz)"]
    assert whose((range(3, 4), range(3)), "~/s-{worker}.npz") == names


def test_a_line_about_many_workers_has_room_for_what_to_do() -> None:
    many = (range(1000, 2000), range(1000))
    names = ["workers 1000 to 1999 (s-1000.npz to s-1999.npz)", "workers 0 to 999 (s-0.npz to s-999.npz)"]
    assert whose(many, "s-{worker}.npz") == names
    with pytest.raises(UserError, match=r"of workers 0, 2, .*, 38, 980 more: number the workers of a site consec"):
        place(_marked([[*range(0, 2000, 2)], [*range(1, 2000, 2)]]))
    assert str(Sites((range(4),), 12, 1.0).given_up()).startswith("workers 4 to 11 were away for more than 1 s")


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ([[0], []], r"a process sees no file, the others see those of worker 0 \(of workers below --workers\): "),
        ([[], []], r"no file is here \(of workers below --workers\): put one where --data says"),
        ([[0, 2], [1]], "a process sees the files of workers 0, 2: number the workers of a site consecutively"),
        (
            [[0, 1], [1, 2]],
            "worker 1 is seen by a process that sees workers 0, 1 and by another that sees workers 1, 2",
        ),
        ([[0], [1, 2], [0]], "2 processes see the file of worker 0: start at most 1 there."),
    ],
)
def test_places_that_make_no_sense(workers: list[list[int]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        place(_marked(workers))


def test_the_round_to_go_on_from() -> None:
    assert resume_round([[8, 12], [12], [4, 12]]) == 12
    assert resume_round([[8, 12], [4, 8]]) == 8
    assert resume_round([[8, 12], [2, 4]]) == 12
    assert resume_round([[8, 12], [8], [2, 4]]) == 8, "two of three stay together"
    assert resume_round([[4, 5], [4, 5], [99, 100]]) == 100, "nobody loses what it has trained meanwhile"
    assert resume_round([[8], []]) == 8
    assert resume_round([[], []]) == 0


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"workers": [0]}',
        '{"workers": [0], "away": [], "disturbances": []}',
        *(
            f'{{"workers": [0], "away": {{{away}}}, "disturbances": []}}'
            for away in ('"x": 1', '"1": "x"', '"1": null')
        ),
        '{"workers": ["0"], "away": {}, "disturbances": []}',
    ],
)
def test_a_damaged_folder_of_a_site_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "site.json").write_text(content)
    with pytest.raises(UserError, match=r"site\.json is damaged: put it back, or delete it"):
        refuse_others(tmp_path, range(1))


def _starts(*rounds: int, **told: object) -> list[dict[str, object]]:
    """Of the first process with what its site has noted, of the others with nothing."""
    return [
        {"round": round, "away": {}, "disturbances": [], **(told if k == 0 else {})} for k, round in enumerate(rounds)
    ]


def test_a_folder_is_that_of_its_workers_not_of_as_many(tmp_path: Path) -> None:
    Sites((range(2), range(2, 4)), 4, timeout=1).resume_absences(tmp_path, range(2), _starts(0, 0))
    refuse_others(tmp_path, range(2))
    with pytest.raises(UserError, match=r"was begun with workers 0, 1, and this process now has workers 2, 3"):
        refuse_others(tmp_path, range(2, 4))


def test_away_for_too_long(tmp_path: Path) -> None:
    first = Sites((range(1), range(2, 3)), 3, timeout=0.2)
    assert first.resume_absences(tmp_path, range(1), _starts(4, 4)) == 4
    assert not first.overdue()
    time.sleep(0.25)
    again = Sites((range(1), range(2, 3)), 3, timeout=0.2)
    assert not again.overdue()
    again.resume_absences(tmp_path, range(1), _starts(6, 6, **noted(tmp_path)))
    assert again.overdue(), "an absence is counted from its beginning, over starts"
    assert "worker 1 was away for more than 0.2 s" in str(again.given_up())
    back = Sites((range(1), range(1, 2), range(2, 3)), 3, timeout=0.2)
    # At worker 1's site, which has noted nothing itself.
    (tmp_path / "other").mkdir()
    back.resume_absences(tmp_path / "other", range(1, 2), _starts(8, 0, 8, **noted(tmp_path)))
    assert not back.overdue()
    assert back.disturbances == noted(tmp_path / "other")["disturbances"]
    assert back.disturbances == [
        "From round 5 on worker 1 was away.",
        "From round 7 on worker 1 was away.",
        "From round 9 on all workers were there again.",
        "Worker 1 went on in round 9 with first weights.",
    ]


def test_what_each_of_two_sites_has_noted_is_known_to_both(tmp_path: Path) -> None:
    starts = [
        {"round": 8, "away": {"1": 5.0, "2": 5.0}, "disturbances": ["From round 5 on workers 1, 2 were away."]},
        {"round": 8, "away": {"0": 7.0, "2": 9.0}, "disturbances": ["a", "b"]},
    ]
    both = Sites((range(1), range(1, 2)), 3, timeout=1)
    both.resume_absences(tmp_path, range(1), starts)
    assert both.disturbances[:3] == ["a", "b", "From round 5 on workers 1, 2 were away."]
    assert noted(tmp_path)["away"] == {"2": pytest.approx(9.0, abs=1)}, "since it was first missed"


def test_a_clock_that_is_wrong_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away = (range(1), range(1, 2))
    monkeypatch.setattr("time.time", lambda: 5.0)
    Sites(away, 3, timeout=60).resume_absences(tmp_path, range(1), _starts(4, 4))
    told = noted(tmp_path)
    monkeypatch.setattr("time.time", lambda: 1e9)
    (tmp_path / "other").mkdir()
    other = Sites(away, 3, timeout=60)
    other.resume_absences(tmp_path / "other", range(1, 2), _starts(4, 4, **told))
    assert not other.overdue(), "it has been away for no time, whatever the clock of the site that says so shows"
