"""The tasks of single-token attention: some rows, one split of their keys and one KV head each.

A task's rows share the leading keys of the split, according to their block numbers, and continue with
separate keys.
"""

from __future__ import annotations

import numpy as np

from pagemill.kernels.cpu.attention.operands import first_visible
from pagemill.kernels.cpu.jit.compiler import i32_pointer, jit
from pagemill.kernels.cpu.jit.row import I32

SPLIT = 256  # keys; long enough to make the merge negligible, short enough to share a long row among threads
FEWEST_KEYS = 64
"""The fewest keys to read once for several rows. With 64 shared and 32 separate keys, two rows gain 1-17%."""
MOST_HEADS = 64
"""Query heads per task, unless one row has more. 16 heads run at 0.9 times the speed; 32 are within 3%."""
FEWEST_TASKS = 4
"""Fewest tasks per thread. Rows are not grouped if that would leave threads without work."""

# Columns of rows.
BEGIN, END, PARTIAL = range(3)
# Columns of tasks.
KV_HEAD, PLACE, COUNT, FIRST_SPLIT_KEY, SHARED_END = range(5)


@jit
def num_splits(begin, end):
    """Number of splits that contain keys begin .. end - 1. Splits are counted from key 0."""
    return (end - 1) // SPLIT - begin // SPLIT + 1 if end > 0 else 0


@jit
def most_rows_of_a_task(num_tasks, group, num_threads):
    """Return the maximum number of rows per task. `num_tasks` counts tasks of one row each."""
    fitting = num_tasks // (FEWEST_TASKS * num_threads) if num_threads > 1 else MOST_HEADS
    return max(1, min(MOST_HEADS // group, fitting))


@jit
def plan_rows(rows, seq_lens, num_rows, window):
    """rows[row] = (first key, last key + 1, first partial result or -1).

    Returns the number of splits and of partial results. A row whose keys are in one split does not have
    partial results.
    """
    count, num_partials = 0, 0
    for row in range(num_rows):
        end = int(seq_lens[row])
        rows[row, BEGIN], rows[row, END] = max(0, first_visible(window, max(0, end - 1))), end
        splits = num_splits(rows[row, BEGIN], end)
        rows[row, PARTIAL] = num_partials if splits > 1 else -1
        num_partials += splits if splits > 1 else 0
        count += splits
    return count, num_partials


@jit
def plan_order(order, sharing, rows, num_rows, block_size):
    """order[place] = (row, number of leading keys shared with the previous row).

    `sharing` comes from `shared_blocks`. Only complete blocks that both rows have filled count, because later
    entries of a table are undefined.
    """
    numbers, blocks = i32_pointer(sharing), i32_pointer(sharing + I32 * num_rows)
    for place in range(num_rows):
        order[place, 0] = numbers[place] if sharing != 0 else place
        order[place, 1] = 0
        if sharing != 0 and place > 0:
            ends = rows[order[place, 0], END], rows[order[place - 1, 0], END]
            filled = min(ends[0], ends[1]) // block_size
            order[place, 1] = min(int(blocks[place]), filled) * block_size


@jit
def _plan_split(tasks, costs, count, rows, order, first, last, key, num_kv_heads, most_rows):
    """Add the tasks of the split at `key` for rows at positions first .. last - 1. Returns the count."""
    place = first
    while place < last:
        row, num_rows, keys = order[place, 0], 1, 0
        begin, end = max(rows[row, BEGIN], key), min(rows[row, END], key + SPLIT)
        shared_end, longest = key + SPLIT, end
        while begin == key and place + num_rows < last and num_rows < most_rows:
            row, joined_end = order[place + num_rows, 0], min(order[place + num_rows, 1], shared_end)
            longest = max(longest, min(rows[row, END], key + SPLIT))
            # A row joins only if all rows share at least as many keys as any of them has alone.
            if rows[row, BEGIN] > key or joined_end - key < max(FEWEST_KEYS, longest - joined_end):
                break
            shared_end, num_rows = joined_end, num_rows + 1
        for other in range(place, place + num_rows):
            keys += 8 + min(rows[order[other, 0], END], key + SPLIT) - begin
        for kv_head in range(num_kv_heads if begin < end else 0):
            tasks[count, KV_HEAD], tasks[count, PLACE], tasks[count, COUNT] = kv_head, place, num_rows
            tasks[count, FIRST_SPLIT_KEY] = begin
            tasks[count, SHARED_END] = shared_end if num_rows > 1 else begin
            costs[count + 1] = costs[count] + keys
            count += 1
        place += num_rows
    return count


@jit(allocates=True)
def plan_tasks(rows, order, num_rows, num_row_splits, num_kv_heads, most_rows):
    """Return the tasks, their cumulative costs, and the maximum number of rows in one.

    Neighboring tasks read the same or adjacent keys. Rows that share keys are processed split by split. Keys
    that a task's rows do not share are processed KV head by KV head, while they are in cache.
    """
    tasks = np.empty((num_row_splits * num_kv_heads, 5), np.int64)
    costs = np.zeros(num_row_splits * num_kv_heads + 1, np.int64)
    count, first, largest = 0, 0, 1
    while first < num_rows:
        last = first + 1
        while last < num_rows and order[last, 1] >= FEWEST_KEYS:
            last += 1
        key, end = rows[order[first, 0], BEGIN], 0
        for place in range(first, last):
            key, end = min(key, rows[order[place, 0], BEGIN]), max(end, rows[order[place, 0], END])
        for split_key in range(key // SPLIT * SPLIT, end, SPLIT):
            start = count
            count = _plan_split(
                tasks, costs, count, rows, order, first, last, split_key, num_kv_heads, most_rows
            )
            for task in range(start, count):
                largest = max(largest, tasks[task, COUNT])
        first = last
    return tasks[:count], costs[: count + 1], largest


@jit
def part_of(part, task, rows, order):
    """Return a row of the task, and the keys of a part. Part 0 is shared by the rows; part n is row n's."""
    place, begin, shared_end = task[PLACE], task[FIRST_SPLIT_KEY], task[SHARED_END]
    if part == 0:
        return order[place, 0], begin, shared_end
    row = order[place + part - 1, 0]
    return row, shared_end, min(rows[row, END], end_of(task))


@jit
def end_of(task):
    """Return the end of the task's split."""
    return task[FIRST_SPLIT_KEY] // SPLIT * SPLIT + SPLIT
