"""Where a run begins or continues: its directory opened and locked, and the state that it starts from."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from manyheads.algorithms.base import State
from manyheads.checkpoint import latest_round
from manyheads.errors import UserError
from manyheads.models.split import constants_of
from manyheads.network.restarts import restarted
from manyheads.saver import Saver
from manyheads.session import Session
from manyheads.sites import Sites, noted, refuse_others
from manyheads.snapshot import Snapshot
from manyheads.store import RunDirectory
from manyheads.store.layout import CHECKPOINT, PARTITION, finished_rounds
from manyheads.tree import row_forms
from manyheads.units import counted


@dataclass(frozen=True)
class Start:
    """The rounds that are done, the state after them, and the time they took."""

    round: int
    state: State
    seconds: float = 0.0
    simulated_seconds: float = 0.0


def open_directory(session: Session, path: Path, held: ExitStack) -> RunDirectory:
    """The run directory. Unless its run is finished it is locked, until ``held`` is closed."""
    sites, sharers = session.sites, session.sharers
    if sites:
        refuse_others(path, session.ctx.network.workers)
        # Asked before any process makes a folder.
        begun = session.processes.total(path.exists())
        if sites.away and not begun:
            raise sites.never_there(session.experiment.data)
    directory = RunDirectory(path)
    if sharers.rank > 0:
        return directory
    if finished_rounds(path) >= session.ctx.rounds:
        # It is only read, and may lie where we cannot write.
        directory.check(session.experiment, session.everyone)
        return directory
    resume, patience = session.runtime.resume, sharers.patience
    return RunDirectory.open(path, session.experiment, session.everyone, held, resume=resume, patience=patience)


def is_finished(session: Session, directory: RunDirectory) -> bool:
    """Whether the directory holds all rounds that are asked for, at every site."""
    rounds = session.ctx.rounds
    # Only process 0 looks. If the others looked before it has made the folder, a network disk could go on showing them
    # none for a while.
    held = finished_rounds(directory.path) if session.sharers.rank == 0 else 0
    finished = held >= rounds
    asked = f"the {counted(rounds, 'round')} asked for"
    count = session.processes.total(finished)
    if not count:
        return False
    if session.sites and count < session.processes.count:
        # All of them end here: torchrun would keep a finished process waiting for the last one.
        whose = "this site has finished" if finished else "other sites have finished"
        others = "others have not" if finished else "this one has not"
        # Where the rounds are part of the experiment, more of them would be another one.
        then = "begin again with another --out" if session.experiment.uses_rounds else "give all of them more --rounds"
        raise UserError(f"{whose} {asked}, but {others}: {then}.")
    what = f"{held} rounds, and its result is that of the last" if held > rounds else asked
    session.notes.append(f"{directory.path} already holds {what}: nothing to do.")
    return True


def write_result(session: Session, sites: Sites, saver: Saver, first: State) -> None:
    """Write the result that a site lacks if it was stopped after its last checkpoint, once no site has more to train.

    It needs nobody for that, and others, which may have theirs, could not go back.
    """
    directory, rounds = saver.directory, session.ctx.rounds
    written = finished_rounds(directory.path) >= rounds
    trained = written or latest_round(directory.path / CHECKPOINT) == rounds
    if session.processes.total(trained) < session.processes.count or written:
        return
    snapshot, _ = saver.checkpoints.load()
    if snapshot is not None and snapshot.round == rounds:
        sites.disturbances = noted(directory.path)["disturbances"]
        saver.finish(restore(session, snapshot, first), directory.record(rounds))


def begin_or_resume(session: Session, saver: Saver, first: State) -> Start:
    """Where the run goes on: at its newest good checkpoint, or at its beginning, the state ``first``."""
    directory = saver.directory
    snapshot, notes = saver.load()
    session.notes.extend(notes)
    state = restore(session, snapshot, first) if snapshot else first
    if session.sharers.rank == 0:
        directory.keep_constants(constants_of(session.ctx.model), begun=snapshot is not None)
    own = round = snapshot.round if snapshot else 0
    if session.sites:
        round = _common_round(session, session.sites, directory.path, own)
    if session.sharers.rank == 0:
        directory.write_experiment(session.experiment)
        # After its own state a lost site may have records of rounds that the others then made again without it.
        last = directory.cut_back(own)
        if (directory.path / PARTITION).exists():
            session.notes.append(f"Continuing the run in {directory.path} from round {round}.")
        if last < round - round % session.runtime.eval_every:
            # Those before a checkpoint are not made again.
            session.notes.append(f"{directory.path} has no records of the rounds after {last} up to {round}.")
        session.everyone.save(directory.path / PARTITION)
    if snapshot is None:
        return Start(round, state)
    if round == session.ctx.rounds:
        # The run was killed between its last checkpoint and its summary.
        saver.finish(state, directory.record(round))
    return Start(round, state, snapshot.seconds, snapshot.simulated_seconds)


def _common_round(session: Session, sites: Sites, folder: Path, own: int) -> int:
    """The round that all sites continue from. ``own``: the round of this site's state; 0: the first weights."""
    starts = session.processes.gather_json({"round": own, **noted(folder)})
    round = sites.resume_absences(folder, session.ctx.network.workers, starts)
    session.notes.extend(sites.disturbances)
    if own == 0 and round > 0:
        session.notes.append(
            f"{folder} holds no checkpoint to go on from, but the other sites have reached round {round}: this one"
            " starts from the first weights. If it has trained before, stop it and give the --out it had."
        )
    if sites.away and not restarted():
        session.notes.append(sites.may_have_ended())
    if session.processes.decide(sites.overdue()):
        raise sites.given_up()
    return round


def restore(session: Session, snapshot: Snapshot, first: State) -> State:
    """A checkpoint's state, placed where the session trains; the network continues counting from its traffic."""
    # Compared with the first state, not with the net: a state may hold copies of the net under other names only.
    wanted, kept = (row_forms({**each.params, **each.buffers}) for each in (first, snapshot))
    # A factory is identified by its name, so the net that it makes may have changed.
    if changed := [name for name in wanted | kept if wanted.get(name) != kept.get(name)]:
        raise UserError(
            f"the run was begun with another net ({changed[0]} differs): put it back, or choose another --out."
        )
    traffic = session.ctx.network.traffic
    traffic.sent, traffic.received = snapshot.sent.copy(), snapshot.received.copy()
    traffic.on_wire = snapshot.on_wire
    engine = session.ctx.engine
    return State(engine.place(snapshot.params), engine.place(snapshot.buffers))
