"""Workers spread over processes that torch.distributed connects: gloo between CPUs, NCCL between GPUs.

Each process hosts a contiguous block of workers. Mixing sends a row once to every process that hosts a neighbour; all
that one process sends another is one message. If all rows of P are equal, as on the full graph, and for a server's
average, a running sum goes from process to process instead, and its result to all: fewer bytes, the same bits.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from manyheads.network.base import Traffic, check_gathered, links, message_bytes, refuse_private
from manyheads.network.messages import Row, pack, unpack
from manyheads.network.placement import Placement, crossings, owners
from manyheads.network.processes import Processes
from manyheads.network.sums import LeafRows, add_hosted, common_row, divided, for_all, leaf_rows, mix_rows
from manyheads.topology import Mixing, Rows
from manyheads.tree import Params, as_uint8, nbytes

_PIECE_BYTES = 1 << 20
"""A running sum goes on in pieces of about this size, so that all processes add at the same time."""

_NOBODY = float("nan")
"""The value that is gathered for a worker that no process hosts."""


class Distributed:
    """The network between processes. Every process calls the same methods in the same order."""

    def __init__(
        self,
        mixing: Mixing,
        private: frozenset[str],
        processes: Processes,
        placement: Placement,
        *,
        one_owner: bool = True,
    ) -> None:
        """``one_owner``: whether all processes are one person's, who may look at everything in metrics."""
        self.mixing, self.private = mixing, private
        self.processes, self.placement = processes, placement
        self.num_workers = mixing.num_workers
        self.workers = placement[processes.rank]
        self.traffic = Traffic(self.workers)
        self.may_gather_private = one_owner
        self._owner = owners(placement, self.num_workers)

    def mix(self, params: Params, round: int, mask: Params | None = None) -> Params:
        refuse_private(params, self.private)
        if not params:
            return {}
        mask, matrix = mask or {}, self.mixing.rows(round)
        sizes = self._message_sizes(params, mask)
        self.traffic.count(*links(matrix), sizes)
        common = common_row(matrix)
        if common is not None and self._sum_is_smaller(params, mask, sizes):
            return self._mix_by_sum(params, mask, common)
        rows, masks = self._exchange(params, mask, matrix, sizes)
        return mix_rows(leaf_rows(params, self.workers, rows), leaf_rows(mask, self.workers, masks), matrix)

    def average(self, params: Params, weights: np.ndarray) -> Params:
        refuse_private(params, self.private)
        weights = np.where(self._owner >= 0, weights, 0)
        taking_part = np.flatnonzero(weights)
        if not params or not len(taking_part):
            return params
        self.traffic.count(taking_part, taking_part, self._message_sizes(params, {}))
        total = self._counted_sum(params, weights / weights.sum())
        return {name: for_all(total[name], leaf) for name, leaf in params.items()}

    def gather(self, values: Tensor) -> Tensor:
        check_gathered(values)
        longest = max(map(len, self.placement))
        block = values.new_zeros(longest, *values.shape[1:], device="cpu")
        block[: len(values)] = values
        # As bytes: torch.distributed does not know every type.
        blocks = self.processes.gather(as_uint8(block))
        everyone = block.new_full((self.num_workers, *values.shape[1:]), _NOBODY if values.is_floating_point() else 0)
        for workers, content in zip(self.placement, blocks, strict=True):
            everyone[workers.start : workers.stop] = content.view(values.dtype).view(block.shape)[: len(workers)]
        return everyone.to(values.device)

    def mean(self, params: Params) -> Params:
        if not self.may_gather_private:
            raise RuntimeError("a mean over all workers would show rows to those who are not neighbours")
        hosted = sum(map(len, self.placement))
        return {name: leaf / hosted for name, leaf in self._sum(params, None, torch.float64).items()}

    def present(self, round: int) -> np.ndarray:
        return self.mixing.rows(round).present

    def _message_sizes(self, params: Params, mask: Params) -> np.ndarray:
        """Bytes of every worker's message, [N]. Without a mask all are of one length, known without asking."""
        own = message_bytes(params, mask)
        if mask:
            return self.gather(torch.from_numpy(own)).numpy()
        return np.full(self.num_workers, own[0])

    def _exchange(
        self, params: Params, mask: Params, matrix: Rows, sizes: np.ndarray
    ) -> tuple[dict[int, Row], dict[int, Row]]:
        """Send what the others need and get what this process needs: worker -> its row, and worker -> its mask."""
        like = next(iter(params.values()))
        destinations, workers = crossings(matrix, self._owner)
        rank, origins = self.processes.rank, self._owner[workers]
        outgoing = {peer: workers[(destinations == peer) & (origins == rank)].tolist() for peer in self._peers()}
        incoming = {peer: workers[(destinations == rank) & (origins == peer)].tolist() for peer in self._peers()}
        packed = {worker: pack(params, mask, worker - self.workers.start) for worker in set().union(*outgoing.values())}
        operations, buffers = [], {}
        for peer in self._peers():
            if outgoing[peer]:
                message = torch.cat([packed[worker] for worker in outgoing[peer]]).to(self.processes.wire)
                self.traffic.on_wire += message.nbytes
                operations.append(dist.P2POp(dist.isend, message, peer))
            if incoming[peer]:
                length = int(sizes[incoming[peer]].sum())
                buffers[peer] = torch.empty(length, dtype=torch.uint8, device=self.processes.wire)
                operations.append(dist.P2POp(dist.irecv, buffers[peer], peer))
        with self.processes.together():
            _wait(dist.batch_isend_irecv(operations) if operations else [])
        rows, masks = {}, {}
        for peer, buffer in buffers.items():
            messages = buffer.to(like.device).split(sizes[incoming[peer]].tolist())
            for worker, message in zip(incoming[peer], messages, strict=True):
                rows[worker], masks[worker] = unpack(message, params, mask)
        return dict(sorted(rows.items())), dict(sorted(masks.items()))

    def _sum_is_smaller(self, params: Params, mask: Params, sizes: np.ndarray) -> bool:
        """Whether passing on a running sum and its result takes fewer bytes than sending every row to the others."""
        return 2 * (nbytes(params) + nbytes({name: params[name] for name in mask})) < sizes.sum()

    def _mix_by_sum(self, params: Params, mask: Params, weights: np.ndarray) -> Params:
        kept = {f"mask.{name}": leaf.to(params[name].dtype) for name, leaf in mask.items()}
        total = self._counted_sum({**params, **kept}, weights)
        return {
            name: for_all(divided(total[name], total[f"mask.{name}"]) if name in mask else total[name], leaf)
            for name, leaf in params.items()
        }

    def _counted_sum(self, params: Params, weights: np.ndarray) -> Params:
        """``_sum``, which every process hands on once; a process alone hands on nothing."""
        self.traffic.on_wire += nbytes(params) if self.processes.count > 1 else 0
        return self._sum(params, weights)

    def _sum(self, params: Params, weights: np.ndarray | None, dtype: torch.dtype | None = None) -> Params:
        """sum_j w_j x_j over all workers in ascending order, [...], on every process."""
        order = sorted(range(self.processes.count), key=lambda rank: self.placement[rank].start)
        place, last = order.index(self.processes.rank), order[-1]
        pieces, sending = [], []
        with self.processes.together():
            for leaves in _pieces(params):
                like = next(iter(leaves.values()))
                length = sum(leaf[0].numel() for leaf in leaves.values())
                piece = torch.zeros(length, dtype=dtype or like.dtype, device=self.processes.wire)
                if place > 0:
                    _wait(dist.batch_isend_irecv([dist.P2POp(dist.irecv, piece, order[place - 1])]))
                piece = piece.to(like.device)
                for name, part in _views(piece, leaves).items():
                    add_hosted(part, LeafRows(leaves[name], self.workers), weights)
                piece = piece.to(self.processes.wire)
                if self.processes.rank != last:
                    sending += dist.batch_isend_irecv([dist.P2POp(dist.isend, piece, order[place + 1])])
                pieces.append((leaves, piece))
            _wait(sending)
            total: Params = {}
            for leaves, piece in pieces:
                if self.processes.count > 1:
                    dist.broadcast(piece, last)
                total |= _views(piece.to(next(iter(leaves.values())).device), leaves)
        return total

    def _peers(self) -> Iterator[int]:
        return (rank for rank in range(self.processes.count) if rank != self.processes.rank)


def _wait(works: Iterable[dist.Work]) -> None:
    for work in works:
        work.wait()


def _pieces(params: Params) -> Iterator[Params]:
    """The leaves in pieces: consecutive ones of one type, enough to be worth a message."""
    piece: Params = {}
    for name, leaf in params.items():
        size = sum(other[0].nbytes for other in piece.values())
        if piece and (size >= _PIECE_BYTES or next(iter(piece.values())).dtype != leaf.dtype):
            yield piece
            piece = {}
        piece[name] = leaf
    if piece:
        yield piece


def _views(flat: Tensor, leaves: Mapping[str, Tensor]) -> Params:
    """The parts of a flat tensor, shaped as rows of the leaves."""
    parts = flat.split([leaf[0].numel() for leaf in leaves.values()])
    return {name: part.view(leaf.shape[1:]) for part, (name, leaf) in zip(parts, leaves.items(), strict=True)}
