"""The tables of value embeddings and of n-grams: their gradients, their update, and how the ranks
exchange rows.

A batch looks up some of their rows. Only those have a gradient and are updated. Each rank owns some
of the columns of every row, so that all ranks share this work, whichever rows they are.

A rank looks up many rows several times, and the ranks mostly different ones. So each rank first
adds up the gradients of the rows that it has looked up itself. It cuts these sums by columns, and
sends each rank the columns which that rank owns. Then each rank adds up what it has received, and
updates its columns of these rows.

The other ranks need a new row only when they look it up. So before the passes of a step, each rank
sends the others its columns of the rows that they look up in this step. Every rank holds whole
tables. But in the columns of other ranks, a row is as it was when this rank last looked it up.
`complete` brings all up to date, for validation and saves.

The sums and the update take memory bandwidth, while the update of the matrices takes arithmetic. So
they are done on a CUDA stream beside the main one (records/TRIED.md).

A table is by far the largest part of a model. So it has no float32 original, and is kept only in
the model's dtype (but bf16 in place of fp16). In bf16, updates smaller than half of the distance
to the next number would be lost by rounding to the nearest one. So new rows are rounded up or down
at random, such that their mean is exact. The optimizer keeps a single number for a row, the mean
square of its gradients over time, and no momentum (record 92).

In comments R is the number of rows of a table, and `own_width` the number of columns that a rank
owns. The last columns are padded if the width is no multiple of the number of ranks.
"""
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nanogpt.gpu import NO_TRANSFER, SideStream
from nanogpt.kernels import tl, triton
from nanogpt.past import PreparedBatch
from nanogpt.precision.rounding import BF16_GRID, round_to
from nanogpt.ranks import gathered, rank_and_world_size


class Table(NamedTuple):
    bank: Tensor  # (R, width); this rank's columns are up to date
    # (R,), float32 or wider, of each row's gradients; 0 before the first. The same on all ranks.
    mean_square: Tensor
    looked_up_at: str  # the key of Reading.rows() that has the rows: "tokens" or "ngrams"


ROWS_AT_A_TIME = 2**20  # of a table, while all of it is brought up to date


class Tables:
    """In each step these methods are called in this order:

        begin         takes which rows the micro-batches look up, and fetches their newest values
        add           takes the gradients of these rows after each pass; the last call sends them
        add_embedding adds those of the token embedding to the gradient of the head, as both are one
                      matrix
        update        updates the rows
        finish        makes the main stream wait for that

    Another order of these five raises RuntimeError. To leave a step out, as with fp16, the caller
    looks at `gradients`, and calls `reset` in place of `update` and `finish`. Between `finish` and
    `begin`, whoever else reads the banks calls `complete` first."""

    def __init__(self, device: torch.device, tables: dict[str, Table]):
        self.side_stream = SideStream(device)
        self.rank, self.world_size = rank_and_world_size()
        self.tables = tables
        self.are_whole = True  # whether all columns of all rows are up to date on this rank
        self.reset()

    def reset(self) -> None:
        """Makes ready for the next step. A step that was begun but not finished is forgotten."""
        self.last_call = "finish"  # of the methods above
        self.lookups = []  # of each micro-batch, its Reading.rows()
        self.used = {}  # UsedRows by the keys of these
        # Sums of gradients over this rank's lookups: (ranks, its rows, own_width) of each table,
        # and with the name lm_head (1, its rows, width) of the token embedding.
        self.local_sums = {}
        # For each table: the local sums sent to this rank, (rows, own_width), and their transfer.
        self.arriving = {}
        # For each table: sums over all ranks, (1, n, own_width), of n rows that any rank looks up.
        self.global_sums = {}
        # For each key of Reading.rows(): which of these n rows each arriving one is, (rows,).
        self.places_of_ranks = {}

    def take_turn(self, method: str, after: str) -> None:
        """Notes that a method is called, and raises RuntimeError if it is not its turn."""
        if self.last_call != after:
            raise RuntimeError(f"`{method}` of the tables must be after `{after}`, but was called "
                               f"after `{self.last_call}` (micro-batches: {len(self.lookups)})")
        self.last_call = method

    def begin(self, batch: PreparedBatch) -> None:
        """Takes the rows that each micro-batch of this rank looks up, and those that the whole step
        uses, once these are counted. Fetches the other ranks' columns of the rows that this rank
        looks up. The pass that comes next on the main stream waits for that. A collective."""
        self.take_turn("begin", after="finish")
        self.lookups = [reading.rows() for reading, _ in batch.micro_batches]
        self.used = batch.used_rows()
        if self.world_size > 1:
            self.fetch()
        self.side_stream.meet()  # it reads `used`, which another stream has made

    @torch.no_grad()
    def fetch(self) -> None:
        """Each rank sends the others its columns of the rows that they look up. A collective."""
        arriving = []
        for table in self.tables.values():
            used = self.used[table.looked_up_at]
            columns = take_columns(table.bank, used.of_ranks, self.rank, self.world_size)
            parts = columns.new_empty(self.world_size, len(used.of_this_rank), columns.size(1))
            sizes = [len(used.of_this_rank)] * self.world_size
            transfer = dist.all_to_all_single(
                parts.flatten(0, 1), columns, sizes, used.counts, async_op=True)
            arriving.append((table.bank, used.of_this_rank, parts, transfer))
        for bank, rows, parts, transfer in arriving:
            transfer.wait()
            put_rows(bank, rows, parts)

    @torch.no_grad()
    def complete(self) -> None:
        """Brings all rows up to date on this rank, a part of a table at a time. A collective."""
        if self.are_whole or self.world_size == 1:
            return
        self.are_whole = True
        for table in self.tables.values():
            rows = torch.arange(len(table.bank), device=table.bank.device)
            for some in rows.split(ROWS_AT_A_TIME):
                columns = take_columns(table.bank, some, self.rank, self.world_size)
                parts = gathered(columns).unflatten(0, (self.world_size, -1))
                put_rows(table.bank, some, parts)

    def make_room(self, gradients: dict[str, Tensor]) -> None:
        """Makes room for the sums of gradients. The GPU does this beside the first pass."""
        embedding = gradients["lm_head"]
        wide = torch.promote_types(embedding.dtype, torch.float32)
        self.local_sums["lm_head"] = embedding.new_zeros(
            1, len(self.used["tokens"].of_this_rank), embedding.size(1), dtype=wide)
        for name, table in self.tables.items():
            used = self.used[table.looked_up_at]
            self.local_sums[name] = self.new_sums(table, self.world_size, len(used.of_this_rank))
            if self.world_size > 1:
                self.global_sums[name] = self.new_sums(table, 1, len(used.of_all))
                self.places_of_ranks[table.looked_up_at] = torch.searchsorted(
                    used.of_all, used.of_ranks)

    def new_sums(self, table: Table, *sizes: int) -> Tensor:
        """Zeros (*sizes, own_width), for sums of gradients."""
        own_width = -(-table.bank.size(1) // self.world_size)
        wide = torch.promote_types(table.bank.dtype, torch.float32)
        return table.bank.new_zeros(*sizes, own_width, dtype=wide)

    @torch.no_grad()
    def add(self, i: int, gradients: dict[str, Tensor]) -> None:
        """Adds the gradients (lookups, width) of the rows that micro-batch i has looked up, for
        each table, and under the name lm_head for the token embedding. A collective, with the
        last micro-batch."""
        is_last = i == len(self.lookups) - 1
        self.take_turn("add" if is_last else f"add {i}", after=f"add {i - 1}" if i else "begin")
        with self.side_stream.on():  # beside the pass
            if i == 0:
                self.make_room(gradients)
            # Which of this rank's used rows each lookup is, (lookups,).
            places = {at: torch.searchsorted(self.used[at].of_this_rank, rows)
                      for at, rows in self.lookups[i].items()}
        self.side_stream.meet()  # it waits for this pass, and the next pass for its work so far
        with self.side_stream.on():
            for name, table in self.tables.items():
                sum_rows(self.local_sums[name], places[table.looked_up_at], gradients[name])
                if is_last:
                    self.send(name)
            sum_rows(self.local_sums["lm_head"], places["tokens"], gradients["lm_head"])
        for gradient in gradients.values():
            self.side_stream.keep(gradient)
        if 0 < i and not is_last:
            # The first pass is a CUDA graph of its own, and later passes leave its results alone
            # (CudaGraphs). But all later ones are one graph, which writes its gradients to the same
            # place each time. So the next pass waits until these are added up.
            self.side_stream.meet()

    def send(self, name: str) -> None:
        """Begins to send each rank its columns of local sums, in the bank's dtype. A collective."""
        table = self.tables[name]
        sums = self.local_sums.pop(name)  # (ranks, rows of this rank, own_width)
        if self.world_size == 1:
            self.arriving[name] = sums[0], NO_TRANSFER
            return
        sums = sums.to(table.bank.dtype)
        counts = self.used[table.looked_up_at].counts
        arrived = sums.new_empty(sum(counts), sums.size(2))
        sizes = [counts[self.rank]] * self.world_size
        transfer = dist.all_to_all_single(
            arrived, sums.flatten(0, 1), counts, sizes, async_op=True)
        self.arriving[name] = arrived, transfer

    def add_embedding(self, gradient: Tensor) -> None:
        """Adds the local sums of the token embedding to the gradient (V, width) of the head. This
        is done on the side stream, which must be the current one."""
        self.take_turn("add_embedding", after="add")
        sums = self.local_sums["lm_head"][0].to(gradient.dtype)
        gradient[self.used["tokens"].of_this_rank] += sums  # no row twice

    def gradients(self) -> list[Tensor]:
        """What this rank has received, after waiting for it on the current stream."""
        for _, transfer in self.arriving.values():
            transfer.wait()
        self.side_stream.meet()
        return [arrived for arrived, _ in self.arriving.values()]

    @torch.no_grad()
    def update(self, rates: dict, unscale: Callable[[Tensor], Tensor]) -> None:
        """Updates this rank's columns of the used rows. It uses lr, decay and beta2 of the rates
        (train_gpt.Rates); `unscale` divides a gradient by the scale of the loss. A collective."""
        self.take_turn("update", after="add_embedding")
        self.are_whole = False
        if not self.tables:
            return
        with self.side_stream.on():
            gradients = {name: self.add_up_ranks(name, table, unscale)
                         for name, table in self.tables.items()}
            squares = self.mean_squares(gradients)
            for name, table in self.tables.items():
                rows = self.used[table.looked_up_at].of_all
                root = remember_square(table.mean_square, rows, squares[name], rates[name].beta2)
                update_rows(
                    gradients[name], rows, root, table.bank, self.rank,
                    rates[name].lr, rates[name].decay)

    def mean_squares(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradients (n, own_width) of this rank's columns -> of each row the mean square over
        all columns, (n,). (A norm reads memory once, squares and a sum twice.) A collective."""
        lengths = [torch.linalg.vector_norm(x, dim=1) for x in gradients.values()]
        squares = torch.cat(lengths).square()
        if self.world_size > 1:
            dist.all_reduce(squares, async_op=True).wait()
        parts = squares.split([len(x) for x in gradients.values()])
        return {name: part / self.tables[name].bank.size(1)
                for name, part in zip(gradients, parts)}

    def add_up_ranks(self, name: str, table: Table, unscale: Callable) -> Tensor:
        """The summed gradient of this rank's columns of all used rows, (n, own_width)."""
        arrived, transfer = self.arriving.pop(name)
        if self.world_size == 1:
            return unscale(arrived)
        transfer.wait()
        sums = self.global_sums.pop(name)
        sum_rows(sums, self.places_of_ranks[table.looked_up_at], unscale(arrived))
        return sums[0]

    def finish(self) -> None:
        """What comes on the main stream waits for the update."""
        self.take_turn("finish", after="update")
        self.side_stream.meet()
        self.reset()


# --------------------------------------------------------------------------------------------------
# The kernels
#
# Each passes over memory once, where indexing in PyTorch, compiled or not, takes two to four
# passes. Each program (kernels.py) takes 1024 numbers: a part of one line, or several short lines.
# (A line is a row of any matrix, while "row" means one of a table.)

NUMBERS_PER_PROGRAM = 1024


def line_tiles(n: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """How many programs cover n lines of `width` columns, and the lines and columns of a tile."""
    columns = min(triton.next_power_of_2(width), NUMBERS_PER_PROGRAM)
    lines = NUMBERS_PER_PROGRAM // columns
    return (triton.cdiv(n, lines), triton.cdiv(width, columns)), (lines, columns)


if triton is not None:
    # The number of lines, n, differs from step to step. Without do_not_specialize Triton would
    # compile a kernel again at the first n that is a multiple of 16.

    @triton.jit
    def tile_of_lines(n, width, LINES: tl.constexpr, COLUMNS: tl.constexpr):
        """The lines (LINES, 1) and columns (1, COLUMNS) of this program, and which are there."""
        line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)[:, None]
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        return line, column, (line < n) & (column < width)

    @triton.jit(do_not_specialize=["n", "lookups"])
    def sum_rows_kernel(
        total_ptr,  # (ranks, n, own_width)
        places_ptr,  # (lookups,)
        gradient_ptr,  # (lookups, width)
        n,
        lookups,
        width,
        own_width,
        LINES: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):
        """Adds the gradients of looked-up rows to their lines of the total."""
        line, column, inside = tile_of_lines(lookups, width, LINES, COLUMNS)
        place = tl.load(places_ptr + line, mask=line < lookups)
        gradient = tl.load(gradient_ptr + line * width + column, mask=inside)
        gradient = gradient.to(total_ptr.dtype.element_ty)
        rank = column // own_width
        own_ptr = total_ptr + (rank * n + place) * own_width + column % own_width
        tl.atomic_add(own_ptr, gradient, inside, sem="relaxed")

    @triton.jit(do_not_specialize=["n", "first_column", "seed"])
    def update_rows_kernel(
        gradient_ptr,  # (n, own_width)
        rows_ptr,  # (n,)
        root_ptr,  # (n,)
        bank_ptr,  # (R, width)
        n,
        own_width,
        width,
        first_column,
        lr,
        decay,
        seed,
        IS_BF16: tl.constexpr,
        LINES: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):
        """Updates some columns of these rows, which are rounded at random if they are in bf16."""
        line, column, inside = tile_of_lines(n, own_width, LINES, COLUMNS)
        offset = line * own_width + column
        gradient = tl.load(gradient_ptr + offset, mask=inside, other=0.0)
        root = tl.load(root_ptr + line, mask=line < n, other=1.0)
        row = tl.load(rows_ptr + line, mask=line < n, other=0)
        bank_column = first_column + column
        in_bank = inside & (bank_column < width)
        weight_ptr = bank_ptr + row * width + bank_column
        weight = tl.load(weight_ptr, mask=in_bank, other=0.0).to(gradient.dtype)
        update = gradient / (root + 1e-10)
        shrinks = update * weight > 0
        weight -= lr * (update + tl.where(shrinks, decay * weight, 0.0))
        if IS_BF16:
            # bf16 is the upper half of a float32. Noise in the lower half carries into it at times,
            # the more often the larger this half is; for numbers below 0 that is away from 0, too.
            # Six rounds of Triton's generator are enough. With four, neighbours are correlated.
            noise = (tl.randint(seed, offset.to(tl.int32), n_rounds=6) & 0xFFFF).to(tl.int32)
            bits = (weight.to(tl.int32, bitcast=True) + noise) & -65536
            weight = bits.to(tl.float32, bitcast=True)
        tl.store(weight_ptr, weight.to(bank_ptr.dtype.element_ty), mask=in_bank)


def sum_rows(total: Tensor, places: Tensor, gradient: Tensor) -> None:
    """Adds line k of the gradient (lookups, width) to line places[k] of the total (ranks, n,
    own_width), for each lookup, in place. Each rank has a range of the columns."""
    ranks, n, own_width = total.shape
    width = gradient.size(1)
    if total.is_cuda:
        grid, tile = line_tiles(*gradient.shape)
        sum_rows_kernel[grid](
            total, places, gradient.contiguous(), n, len(places), width, own_width, *tile
        )
        return
    padding = ranks * own_width - width
    gradient = F.pad(gradient.to(total.dtype), (0, padding)).view(-1, ranks, own_width)
    total.index_add_(1, places, gradient.transpose(0, 1))


def remember_square(mean_square: Tensor, rows: Tensor, square: Tensor, beta2: float) -> Tensor:
    """Takes the squares (n,) of these rows (n,) into their running means (R,), in place, and
    returns the roots of these means (n,). The first mean is the first square: rows of rare n-grams
    have few gradients, and the update by the first must not be larger than the others."""
    before = mean_square[rows]
    after = torch.where(before == 0, square, torch.lerp(square, before, beta2))
    mean_square[rows] = after
    return after.sqrt()


def update_rows(gradient: Tensor, rows: Tensor, root: Tensor, bank: Tensor, rank: int,
                lr: float, decay: float) -> None:
    """Updates this rank's columns of rows (n,) of a bank (R, width), in place; bf16 is rounded at
    random. The gradient (n, own_width) has all columns that this rank owns; the last ones may be
    padding, which the bank lacks.

    The update is lr * gradient / root, with root (n,) that of the mean squares, and weight decay
    only where that shrinks the weight anyway (Chen et al. 2025; record 43), as cautious_update of
    train_gpt.py does it.
    """
    n, own_width = gradient.shape
    first_column = rank * own_width
    is_bf16 = bank.dtype == torch.bfloat16
    if gradient.is_cuda:
        seed = int(torch.randint(2**31, ()))
        grid, tile = line_tiles(n, own_width)
        update_rows_kernel[grid](
            gradient, rows, root, bank, n, own_width, bank.size(1), first_column, lr, decay, seed,
            is_bf16, *tile)
        return
    own = bank[:, first_column : first_column + own_width]
    weight = own[rows].to(gradient.dtype)
    update = gradient[:, : own.size(1)] / (root[:, None] + 1e-10)
    shrinks = update * weight > 0
    weight = weight - lr * (update + decay * weight * shrinks)
    if is_bf16:
        weight = round_to(weight, BF16_GRID, torch.rand_like(weight))
    own[rows] = weight.to(bank.dtype)


def in_words(x: Tensor) -> Tensor:
    """x (..., width) seen as numbers of 8 bytes, if its lines are made of whole ones: a GPU moves 8
    bytes as fast as 2."""
    in_word = 8 // x.itemsize
    steps = x.size(-1), x.storage_offset(), *x.stride()[:-1]
    return x.view(torch.int64) if all(step % in_word == 0 for step in steps) else x


def take_columns(bank: Tensor, rows: Tensor, rank: int, ranks: int) -> Tensor:
    """A rank's columns of rows (n,) of a bank (R, width): (n, own_width), 0 beyond the bank's."""
    own_width = -(-bank.size(1) // ranks)
    own = bank[:, rank * own_width : (rank + 1) * own_width]
    taken = in_words(own)[rows].view(bank.dtype)
    padding = own_width - own.size(1)
    return F.pad(taken, (0, padding)) if padding else taken


def put_rows(bank: Tensor, rows: Tensor, parts: Tensor) -> None:
    """Writes parts (ranks, n, own_width), one of each rank, to rows (n,) of a bank (R, width)."""
    ranks, _, own_width = parts.shape
    parts = parts.transpose(0, 1)  # (n, ranks, own_width)
    if bank.size(1) == ranks * own_width:
        in_words(bank.unflatten(1, (ranks, own_width)))[rows] = in_words(parts)
    else:
        bank[rows] = parts.flatten(1)[:, : bank.size(1)]
