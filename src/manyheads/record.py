"""Record: what is known about a run after a round; its fields are the columns of metrics.jsonl and summary.json."""

from dataclasses import dataclass, field
from typing import Any

_MEASURED = ("similarity_", "theory_")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One evaluated round. Accuracies are fractions of 1, unweighted over workers, after the round's last move."""

    round: int
    """Rounds finished."""
    algorithm: str
    run_id: str
    accuracy_mean: float
    """Mean over workers of each one's accuracy on its own test shard; workers without test samples are left out."""
    accuracy_std: float
    """Population deviation over workers."""
    accuracy_worst10: float
    """Mean of the lowest tenth of the workers (rounded up)."""
    accuracy_by_samples: float | None = None
    """``accuracy_mean`` with every worker counted by its test samples; None in sites, which keep their number."""
    accuracy_before_mixing: float
    """``accuracy_mean`` between local training and mixing."""
    accuracy_validation: float | None
    """On the held-out part of the train shards; None without one."""
    majority_floor: float | None
    """What naming each worker's most frequent train class would score; None for regression and for a metric of
    one's own."""
    workers_without_test: int
    loss: float
    """Mean over workers of the running loss in the round's last local phase."""
    train_loss: float
    """Mean over workers of the loss over the whole train shard after local training."""
    consensus_error: float
    """(1/N) sum_i |phi_i - phibar|^2 over representation parameters, after mixing."""
    consensus_error_relative: float
    """The same over |phibar|^2."""
    consensus_error_before_mixing: float
    bytes_sent_per_worker: float
    """Mean over workers, cumulative, on the logical graph; server algorithms: upload."""
    bytes_received_per_worker: float
    bytes_on_wire: int
    """Payload handed to the transport between processes, cumulative."""
    seconds: float
    """Cumulative, kept over a resume."""
    simulated_seconds: float
    """What the rounds would have taken with a machine for every worker, cumulative."""
    peak_memory_bytes: int
    similarity_heads: float | None = None
    """Mean over every two workers of the cosine of their heads; None: no heads, or several processes."""
    similarity_representations: float | None = None
    """The same of representations."""
    theory_grad_phi: float | None = None
    """|G_phi|^2, the first term of the paper's M(k) at the start of the round; None where it was not measured."""
    theory_grad_theta: float | None = None
    """|G_theta|^2, the second, without its weight alpha tau / beta."""
    theory_grad_theta_mean: float | None = None
    """(1/N) sum_i |grad_theta F_i|^2, in which heads' gradients cannot cancel."""
    theory_consensus: float | None = None
    """The third: the consensus error at the start of the round's local training."""
    theory_m: float | None = None
    """M(k)."""
    per_worker: dict[str, list[float | None]] = field(default_factory=dict)
    """Values of every worker, kept in workers.jsonl."""

    def metrics(self) -> dict[str, Any]:
        """The line of metrics.jsonl; similarities and the terms of M(k) only where they were measured."""
        # Not by asdict, which would first copy every worker's values.
        return {
            name: value
            for name, value in vars(self).items()
            if name != "per_worker" and (value is not None or not name.startswith(_MEASURED))
        }
